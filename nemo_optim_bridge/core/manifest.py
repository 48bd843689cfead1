"""What a checkpoint holds: global tensors, and the shards that store boxes of them. No bytes are touched here."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.region import Region, contiguous_stride
from nemo_optim_bridge.errors import BridgeError, ContradictionError, raise_all

IntArray = npt.NDArray[np.int64]

#: Inode, size in bytes and modification time in nanoseconds of a file.
Identity = tuple[int, int, int]
BoolArray = npt.NDArray[np.bool_]

#: No tensor or buffer holds more, in elements or bytes: float64 counts it exactly and int64 sums of it do not wrap.
LARGEST = 2**53

#: Bytes per element of every dtype that a checkpoint may hold; names are torch's.
ITEMSIZE: Mapping[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class TensorKey(NamedTuple):
    """Name of one global tensor: the parameter's ``fqn`` and which ``state`` of it.

    ``state`` is data (``weight``, ``exp_avg``, ``exp_avg_sq``, ``fp32_param`` for the fp32 master, ...): nothing in
    the core knows a particular optimizer.
    """

    fqn: str
    state: str

    def __str__(self) -> str:
        return f"{self.fqn}|{self.state}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A global tensor: its name, shape in elements, and dtype name."""

    key: TensorKey
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Buffer:
    """A run of bytes that shards are views of: ``nbytes`` bytes at byte ``offset`` of ``file``.

    ``file`` is a path, or any label that a store understands. ``dtype`` is that of the stored elements.
    """

    file: str
    offset: int
    nbytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Shard:
    """One box of one global tensor, stored as a strided view of a buffer (``torch.as_strided`` vocabulary).

    ``storage_offset`` and ``stride`` are in elements, relative to the start of the buffer. Equal regions of one key
    are replicas of each other.
    """

    key: TensorKey
    region: Region
    rank: int
    buffer: int
    storage_offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Hyperparameters and the parameters they apply to, by fully qualified name."""

    fqns: tuple[str, ...]
    hyperparameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable:
    """Shards as columns: row ``i`` of every column is shard ``i``; iterating yields ``Shard`` views.

    ``offsets``, ``shape`` and ``stride`` have ``max_ndim`` columns; dimensions that a tensor lacks are *leading* ones
    of offset 0, size 1 and stride 0.
    """

    tensors: tuple[TensorSpec, ...]
    tensor: IntArray
    rank: IntArray
    buffer: IntArray
    storage_offset: IntArray
    offsets: IntArray
    shape: IntArray
    stride: IntArray

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Shard]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, row: int) -> Shard:
        spec = self.tensors[self.tensor[row]]
        pad = self.offsets.shape[1] - len(spec.shape)
        return Shard(
            key=spec.key,
            region=self.region(row),
            rank=int(self.rank[row]),
            buffer=int(self.buffer[row]),
            storage_offset=int(self.storage_offset[row]),
            stride=tuple(self.stride[row, pad:].tolist()),
        )

    def region(self, row: int) -> Region:
        """Return the box of shard ``row``."""
        pad = self.offsets.shape[1] - len(self.tensors[self.tensor[row]].shape)
        return Region(tuple(self.offsets[row, pad:].tolist()), tuple(self.shape[row, pad:].tolist()))

    def take(self, rows: npt.NDArray[Any]) -> ShardTable:
        """Return the shards of the given row numbers or boolean mask."""
        return ShardTable(
            self.tensors, self.tensor[rows], self.rank[rows], self.buffer[rows], self.storage_offset[rows],
            self.offsets[rows], self.shape[rows], self.stride[rows],
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """Everything that is known of a checkpoint from its headers alone.

    ``identities`` are those of the files when their headers were read: offsets count for no other version.
    """

    tensors: tuple[TensorSpec, ...]
    shards: ShardTable
    buffers: tuple[Buffer, ...]
    param_groups: tuple[ParamGroup, ...] = ()
    steps: Mapping[str, float] = field(default_factory=dict)  # fqn -> step
    identities: Mapping[str, Identity] = field(default_factory=dict)  # file -> identity

    def index(self) -> dict[TensorKey, int]:
        """Return the row of every tensor by its key."""
        return {spec.key: row for row, spec in enumerate(self.tensors)}

    def restrict(self, keys: Collection[TensorKey]) -> Manifest:
        """Return the part that concerns the given tensors; buffers keep their numbers."""
        kept = [row for row, spec in enumerate(self.tensors) if spec.key in keys]
        number = np.full(len(self.tensors), -1, np.int64)
        number[kept] = np.arange(len(kept))
        specs = tuple(self.tensors[row] for row in kept)
        table = self.shards.take(number[self.shards.tensor] >= 0)
        return replace(self, tensors=specs, shards=replace(table, tensors=specs, tensor=number[table.tensor]))

    def sizes(self, max_ndim: int) -> IntArray:
        """Return the shapes of all tensors as (tensors, max_ndim), with leading ones."""
        sizes = np.ones((len(self.tensors), max_ndim), np.int64)
        by_ndim: dict[int, list[int]] = {}
        for row, spec in enumerate(self.tensors):
            by_ndim.setdefault(len(spec.shape), []).append(row)
        for ndim, rows in by_ndim.items():
            if ndim:
                values = chain.from_iterable(self.tensors[row].shape for row in rows)
                sizes[rows, max_ndim - ndim :] = np.fromiter(values, np.int64).reshape(-1, ndim)
        return sizes


class ManifestBuilder:
    """Collect tensors, buffers and shards; ``build`` validates them all, lists every problem, and raises once."""

    def __init__(self) -> None:
        self._specs: list[TensorSpec] = []
        self._rows: dict[TensorKey, int] = {}
        self._buffers: list[Buffer] = []
        self._max_ndim = 1
        self._fixed = array("q")  # tensor, rank, buffer, storage_offset per shard
        self._dims: dict[int, tuple[array[int], array[int]]] = {}  # ndim -> (shard numbers, offsets+shape+stride)
        self._problems: list[BridgeError] = []
        self._broken_tensors: set[int] = set()  # reported already: their shards are not looked at
        self._broken_buffers: set[int] = set()

    def tensor(self, key: TensorKey, shape: Sequence[int], dtype: str) -> int:
        """Declare a global tensor, or look it up again; a different shape or dtype is a contradiction."""
        spec = TensorSpec(key, tuple(shape), dtype)
        row = self._rows.setdefault(key, len(self._specs))
        if row == len(self._specs):
            if problem := _spec_problem(spec):
                self._problems.append(problem)
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
        row = len(self._buffers)
        buffer = Buffer(file, offset, nbytes, dtype)
        if problem := _buffer_problem(buffer):
            self._problems.append(problem)
            self._broken_buffers.add(row)
            buffer = Buffer(file, 0, 0, "uint8")
        self._buffers.append(buffer)
        return row

    def shard(
        self, tensor: int, region: Region, rank: int, buffer: int, storage_offset: int = 0,
        stride: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Add one box; ``stride`` defaults to row-major over the region. Empty boxes are dropped.

        Raises IndexError when ``tensor`` or ``buffer`` is not a number that this builder gave.
        """
        if not (0 <= tensor < len(self._specs) and 0 <= buffer < len(self._buffers)):
            raise IndexError(f"no tensor {tensor} or no buffer {buffer}")
        if not region.numel or tensor in self._broken_tensors or buffer in self._broken_buffers:
            return
        if stride is None:
            stride = contiguous_stride(region.shape)
        ndim = len(self._specs[tensor].shape)
        if not len(stride) == len(region.shape) == ndim:
            problem = f"box, or stride {tuple(stride)}, has not the tensor's {ndim} dimensions"
        elif max(map(abs, (rank, storage_offset, *region.stops, *stride))) > LARGEST:
            problem = f"storage offset {storage_offset} or stride {tuple(stride)} is too large"
        else:
            numbers, dims = self._dims.setdefault(ndim, (array("q"), array("q")))
            numbers.append(len(self._fixed) // 4)
            self._fixed.extend((tensor, rank, buffer, storage_offset))
            dims.extend((*region.offsets, *region.shape, *stride))
            return
        key, path = self._specs[tensor].key, self._buffers[buffer].file
        self._problems.append(ContradictionError(problem, path=path, key=key, region=region, rank=rank))

    def build(
        self,
        param_groups: Sequence[ParamGroup] = (),
        steps: Mapping[str, float] | None = None,
        identities: Mapping[str, Identity] | None = None,
    ) -> Manifest:
        """Return the manifest; raises ContradictionError with every problem found."""
        fixed = np.frombuffer(self._fixed, dtype=np.int64).reshape(-1, 4) if self._fixed else np.zeros((0, 4), np.int64)
        count = len(fixed)
        columns = np.zeros((3, count, self._max_ndim), np.int64)
        columns[1] = 1
        for ndim, (numbers, dims) in self._dims.items():
            if ndim:
                rows = np.frombuffer(numbers, dtype=np.int64)
                values = np.frombuffer(dims, dtype=np.int64).reshape(-1, 3, ndim).swapaxes(0, 1)
                columns[:, rows, self._max_ndim - ndim :] = values
        specs = tuple(self._specs)
        table = ShardTable(specs, *(fixed[:, i].copy() for i in range(4)), *columns)
        manifest = Manifest(
            specs, table, tuple(self._buffers), tuple(param_groups), dict(steps or {}), dict(identities or {})
        )
        raise_all([*self._problems, *_problems(manifest)])
        return manifest


def _spec_problem(spec: TensorSpec) -> ContradictionError | None:
    """Return what is wrong with a tensor's declaration, if anything is."""
    if any(size < 0 for size in spec.shape):
        return ContradictionError(f"negative size in shape {spec.shape}", key=spec.key)
    if prod(max(size, 1) for size in spec.shape) > LARGEST:
        return ContradictionError(f"shape {spec.shape} has more than 2**53 elements", key=spec.key)
    if spec.dtype not in ITEMSIZE:
        return ContradictionError(f"unknown dtype {spec.dtype}", key=spec.key)
    return None


def _buffer_problem(buffer: Buffer) -> ContradictionError | None:
    """Return what is wrong with a buffer's declaration, if anything is."""
    if buffer.dtype not in ITEMSIZE:
        return ContradictionError(f"unknown dtype {buffer.dtype}", path=buffer.file)
    if not (0 <= buffer.offset <= LARGEST and 0 <= buffer.nbytes <= LARGEST):
        return ContradictionError(f"no file has {buffer.nbytes} bytes at {buffer.offset}", path=buffer.file)
    return None


def _problems(manifest: Manifest) -> Iterator[BridgeError]:
    """Yield what is wrong with a manifest's shards: boxes outside their tensor, views outside their buffer."""
    table = manifest.shards
    if not len(table):
        return
    outside, overrun = _outside(manifest), _overrun(manifest)
    negative: BoolArray = np.any(table.stride < 0, axis=1)
    for row in np.flatnonzero(outside | negative | overrun).tolist():
        shard, spec = table[row], manifest.tensors[table.tensor[row]]
        buffer = manifest.buffers[shard.buffer]
        for wrong, problem in (
            (outside[row], f"box lies outside the tensor's shape {spec.shape}"),
            (negative[row], f"negative stride {shard.stride}"),
            (overrun[row], f"view reaches past its buffer of {buffer.nbytes} bytes of {buffer.dtype}"),
        ):
            if wrong:
                yield ContradictionError(problem, path=buffer.file, key=shard.key, region=shard.region, rank=shard.rank)


def _outside(manifest: Manifest) -> BoolArray:
    """Tell which boxes are not within their tensor."""
    table = manifest.shards
    sizes = manifest.sizes(table.shape.shape[1])
    outside = np.zeros(len(table), np.bool_)
    for dim in range(sizes.shape[1]):
        outside |= table.offsets[:, dim] + table.shape[:, dim] > sizes[table.tensor, dim]
    return outside


def _overrun(manifest: Manifest) -> BoolArray:
    """Tell which views begin before their buffer or reach past its end."""
    table = manifest.shards
    capacity = np.array([buffer.nbytes // ITEMSIZE[buffer.dtype] for buffer in manifest.buffers], np.int64)
    last = table.storage_offset.astype(np.float64)  # where int64 would wrap
    for dim in range(table.shape.shape[1]):
        last += (table.shape[:, dim] - 1) * table.stride[:, dim].astype(np.float64)
    return (table.storage_offset < 0) | (last >= capacity[table.buffer])
