"""Collect what a checkpoint holds, one box or a column of boxes at a time, into a validated manifest."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.boxes import ranges
from nemo_optim_bridge.core.manifest import (
    DTYPES,
    ITEMSIZE,
    LARGEST,
    BufferTable,
    Identity,
    Manifest,
    ParamGroup,
    ShardTable,
    TensorKey,
    TensorSpec,
    problems_of,
)
from nemo_optim_bridge.core.region import Region, contiguous_stride
from nemo_optim_bridge.errors import BridgeError, ContradictionError, raise_all

Rows = npt.NDArray[np.int64]


class ManifestBuilder:
    """Collect tensors, buffers and shards; ``build`` validates them all, lists every problem, and raises once."""

    def __init__(self) -> None:
        self._specs: list[TensorSpec] = []
        self._rows: dict[TensorKey, int] = {}
        self._files: dict[str, int] = {}
        self._buffers = array("q")  # file, offset, nbytes, dtype per buffer
        self._max_ndim = 1
        self._fixed = array("q")  # tensor, rank, buffer, storage_offset per shard
        self._boxes: dict[int, _Boxes] = {}  # by ndim
        self._problems: list[BridgeError] = []
        self._broken_tensors: set[int] = set()  # reported already: their shards are not looked at
        self._broken_buffers: set[int] = set()

    def tensor(self, key: TensorKey, shape: Sequence[int], dtype: str) -> int:
        """Declare a global tensor, or look it up again; a different shape or dtype is a contradiction."""
        spec = TensorSpec(key, tuple(shape), dtype)
        row = self._rows.setdefault(key, len(self._specs))
        if row == len(self._specs):
            if problem := _spec_problem(spec.shape, dtype):
                self._problems.append(ContradictionError(problem, key=key))
                self._broken_tensors.add(row)
                spec = TensorSpec(key, (), dtype)
            self._specs.append(spec)
            self._max_ndim = max(self._max_ndim, len(spec.shape))
        elif self._specs[row] != spec and row not in self._broken_tensors:
            known = self._specs[row]
            self._problems.append(
                ContradictionError(f"declared as {known.dtype} {known.shape} and as {spec.dtype} {spec.shape}", key=key)
            )
        return row

    def buffer(self, file: str, offset: int, nbytes: int, dtype: str) -> int:
        """Declare a run of bytes and return its number."""
        row = len(self._buffers) // 4
        if problem := _buffer_problem(file, offset, nbytes, dtype):
            self._problems.append(problem)
            self._broken_buffers.add(row)
            offset, nbytes, dtype = 0, 0, "uint8"
        self._buffers.extend((self._files.setdefault(file, len(self._files)), offset, nbytes, _NUMBER[dtype]))
        return row

    def buffers(self, file: str, offset: Rows, nbytes: Rows, dtype: Rows) -> Rows:
        """Declare many runs of bytes of one file, ``dtype`` numbering DTYPES, and return their numbers."""
        first = len(self._buffers) // 4
        bad = (offset < 0) | (offset > LARGEST) | (nbytes < 0) | (nbytes > LARGEST)
        if bad.any():
            columns = (column.tolist() for column in (offset, nbytes, dtype))
            return np.array([self.buffer(file, o, n, DTYPES[d]) for o, n, d in zip(*columns, strict=True)], np.int64)
        number = self._files.setdefault(file, len(self._files))
        rows = np.stack([np.full(len(offset), number), offset, nbytes, dtype], axis=1, dtype=np.int64)
        self._buffers.frombytes(rows.tobytes())
        return np.arange(first, first + len(offset))

    def shard(
        self, tensor: int, region: Region, rank: int, buffer: int, storage_offset: int = 0,
        stride: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Add one box; ``stride`` defaults to row-major over the region. Empty boxes are dropped.

        Raises IndexError when ``tensor`` or ``buffer`` is not a number that this builder gave.
        """
        if not (0 <= tensor < len(self._specs) and 0 <= buffer < len(self._buffers) // 4):
            raise IndexError(f"no tensor {tensor} or no buffer {buffer}")
        if not region.numel or tensor in self._broken_tensors or buffer in self._broken_buffers:
            return
        if stride is None:
            stride = contiguous_stride(region.shape)
        ndim = len(self._specs[tensor].shape)
        problem = _box_problem(ndim, region, rank, storage_offset, stride)
        if problem is None:
            self._box(ndim, region, stride, 1)
            self._fixed.extend((tensor, rank, buffer, storage_offset))
            return
        key, path = self._specs[tensor].key, list(self._files)[self._buffers[4 * buffer]]
        self._problems.append(ContradictionError(problem, path=path, key=key, region=region, rank=rank))

    def shards(
        self, tensor: Rows, region: Region, rank: int, buffer: Rows, storage_offset: int, stride: Sequence[int]
    ) -> None:
        """Add the same box of many tensors of one rank, each stored alike in a buffer of its own."""
        ndim = len(region.shape)
        is_alike = {len(self._specs[row].shape) for row in tensor.tolist()} == {ndim}
        in_bulk = is_alike and not self._broken_tensors and not self._broken_buffers and region.numel
        if not in_bulk or _box_problem(ndim, region, rank, storage_offset, stride) is not None:
            for one, at in zip(tensor.tolist(), buffer.tolist(), strict=True):
                self.shard(one, region, rank, at, storage_offset, stride)
            return
        count = len(tensor)
        self._box(ndim, region, stride, count)
        rows = [tensor, np.full(count, rank), buffer, np.full(count, storage_offset)]
        self._fixed.frombytes(np.stack(rows, axis=1, dtype=np.int64).tobytes())

    def _box(self, ndim: int, region: Region, stride: Sequence[int], count: int) -> None:
        """Enter the box of the next ``count`` shards."""
        spans, dims = self._boxes.setdefault(ndim, _Boxes(array("q"), array("q")))
        spans.extend((len(self._fixed) // 4, count))
        dims.extend((*region.offsets, *region.shape, *stride))

    def build(
        self,
        param_groups: Sequence[ParamGroup] = (),
        steps: Mapping[str, float] | None = None,
        identities: Mapping[str, Identity] | None = None,
    ) -> Manifest:
        """Return the manifest, and let go of what it is made from; raises ContradictionError with every problem found.

        To be called once, as the last.
        """
        specs, fixed = tuple(self._specs), _taken(self._fixed, 4)
        table = ShardTable(specs, *fixed, *self._box_columns(fixed.shape[1]))
        buffers = BufferTable(tuple(self._files), *_taken(self._buffers, 4))
        manifest = Manifest(specs, table, buffers, tuple(param_groups), dict(steps or {}), dict(identities or {}))
        raise_all([*self._problems, *problems_of(manifest)])
        return manifest

    def _box_columns(self, count: int) -> Rows:
        """Return offsets, shape and stride of all ``count`` shards, each (shards, K)."""
        columns = np.zeros((3, count, self._max_ndim), np.int64)
        columns[1] = 1
        for ndim, (spans, dims) in self._boxes.items():
            if ndim:
                first, counts = _taken(spans, 2)
                rows, run = ranges(first, counts), np.repeat(np.arange(len(counts)), counts)
                for column, boxes in zip(columns, _taken(dims, 3, ndim), strict=True):
                    column[rows, self._max_ndim - ndim :] = boxes[run]
        return columns


class _Boxes(NamedTuple):
    """Boxes of runs of shards: first shard and number of shards of each run; its offsets, shape and stride."""

    spans: array[int]
    dims: array[int]


_NUMBER = {dtype: number for number, dtype in enumerate(DTYPES)}


def _taken(values: array[int], *row: int) -> Rows:
    """Return what was collected, a row of that shape after the other, with the rows' first axis first; forget it."""
    columns = np.array(values, np.int64).reshape(-1, *row).swapaxes(0, 1).copy()
    del values[:]
    return columns


@lru_cache(maxsize=1 << 10)  # layers repeat each other
def _spec_problem(shape: tuple[int, ...], dtype: str) -> str | None:
    """Return what is wrong with a tensor's declaration, if anything is."""
    if any(size < 0 for size in shape):
        return f"negative size in shape {shape}"
    if prod(max(size, 1) for size in shape) > LARGEST:
        return f"shape {shape} has more than 2**53 elements"
    if dtype not in ITEMSIZE:
        return f"unknown dtype {dtype}"
    return None


def _buffer_problem(file: str, offset: int, nbytes: int, dtype: str) -> ContradictionError | None:
    """Return what is wrong with a buffer's declaration, if anything is."""
    if dtype not in ITEMSIZE:
        return ContradictionError(f"unknown dtype {dtype}", path=file)
    if not (0 <= offset <= LARGEST and 0 <= nbytes <= LARGEST):
        return ContradictionError(f"no file has {nbytes} bytes at {offset}", path=file)
    return None


def _box_problem(ndim: int, region: Region, rank: int, storage_offset: int, stride: Sequence[int]) -> str | None:
    """Return why a box cannot be entered for a tensor of ``ndim`` dimensions, if so."""
    if not len(stride) == len(region.shape) == ndim:
        return f"box, or stride {tuple(stride)}, has not the tensor's {ndim} dimensions"
    if max(map(abs, (rank, storage_offset, *region.stops, *stride))) > LARGEST:
        return f"storage offset {storage_offset} or stride {tuple(stride)} is too large"
    return None
