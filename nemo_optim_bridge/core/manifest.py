"""What a checkpoint holds: global tensors, and the shards that store boxes of them. No bytes are touched here."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.region import Region, contiguous_stride
from nemo_optim_bridge.errors import BridgeError, ContradictionError, raise_all

IntArray = npt.NDArray[np.int64]

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
    """Everything that is known of a checkpoint from its headers alone."""

    tensors: tuple[TensorSpec, ...]
    shards: ShardTable
    buffers: tuple[Buffer, ...]
    param_groups: tuple[ParamGroup, ...] = ()
    steps: Mapping[str, float] = field(default_factory=dict)  # fqn -> step

    def index(self) -> dict[TensorKey, int]:
        """Return the row of every tensor by its key."""
        return {spec.key: row for row, spec in enumerate(self.tensors)}

    def sizes(self, max_ndim: int) -> IntArray:
        """Return the shapes of all tensors as (tensors, max_ndim), with leading ones."""
        sizes = np.ones((len(self.tensors), max_ndim), np.int64)
        by_ndim: dict[int, list[int]] = {}
        for row, spec in enumerate(self.tensors):
            by_ndim.setdefault(len(spec.shape), []).append(row)
        for ndim, rows in by_ndim.items():
            if ndim:
                sizes[rows, max_ndim - ndim :] = [self.tensors[row].shape for row in rows]
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

    def tensor(self, key: TensorKey, shape: Sequence[int], dtype: str) -> int:
        """Declare a global tensor, or look it up again; a different shape or dtype is a contradiction."""
        spec = TensorSpec(key, tuple(shape), dtype)
        row = self._rows.setdefault(key, len(self._specs))
        if row == len(self._specs):
            self._specs.append(spec)
            self._max_ndim = max(self._max_ndim, len(spec.shape))
        elif self._specs[row] != spec:
            known = self._specs[row]
            self._problems.append(
                ContradictionError(f"declared as {known.dtype} {known.shape} and as {spec.dtype} {spec.shape}", key=key)
            )
        return row

    def buffer(self, file: str, offset: int, nbytes: int, dtype: str) -> int:
        """Declare a run of bytes and return its number."""
        self._buffers.append(Buffer(file, offset, nbytes, dtype))
        return len(self._buffers) - 1

    def shard(
        self, tensor: int, region: Region, rank: int, buffer: int, storage_offset: int = 0,
        stride: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Add one box; ``stride`` defaults to row-major over the region. Empty boxes are dropped."""
        if not region.numel:
            return
        ndim = len(region.shape)
        numbers, dims = self._dims.setdefault(ndim, (array("q"), array("q")))
        numbers.append(len(self._fixed) // 4)
        self._fixed.extend((tensor, rank, buffer, storage_offset))
        dims.extend(region.offsets)
        dims.extend(region.shape)
        dims.extend(contiguous_stride(region.shape) if stride is None else stride)

    def build(self, param_groups: Sequence[ParamGroup] = (), steps: Mapping[str, float] | None = None) -> Manifest:
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
        manifest = Manifest(specs, table, tuple(self._buffers), tuple(param_groups), dict(steps or {}))
        raise_all([*self._problems, *_problems(manifest, self._dims)])
        return manifest


def _problems(manifest: Manifest, dims: Mapping[int, tuple[array[int], array[int]]]) -> Iterator[BridgeError]:
    """Yield what is wrong with a manifest: boxes outside their tensor, views outside their buffer."""
    table = manifest.shards
    if not len(table):
        return
    ndims = np.array([len(spec.shape) for spec in manifest.tensors])
    for ndim, (numbers, _) in dims.items():
        rows = np.frombuffer(numbers, dtype=np.int64)
        for row in rows[ndims[table.tensor[rows]] != ndim][:20]:
            yield ContradictionError("box and tensor differ in dimensions", key=manifest.tensors[table.tensor[row]].key)
            return
    limits = manifest.sizes(table.shape.shape[1])
    outside: npt.NDArray[np.bool_] = np.any(
        (table.offsets < 0) | (table.offsets + table.shape > limits[table.tensor]), axis=1
    )
    itemsize = np.array([ITEMSIZE[buffer.dtype] for buffer in manifest.buffers])
    capacity = np.array([buffer.nbytes for buffer in manifest.buffers]) // itemsize
    last = table.storage_offset + ((table.shape - 1) * table.stride).sum(axis=1)
    overrun: npt.NDArray[np.bool_] = np.any(table.stride < 0, axis=1)
    overrun |= (table.storage_offset < 0) | (last >= capacity[table.buffer])
    for row in np.flatnonzero(outside | overrun):
        shard = table[int(row)]
        spec = manifest.tensors[table.tensor[row]]
        problem = (
            f"box lies outside the tensor's shape {spec.shape}" if outside[row] else "view reaches past its buffer"
        )
        yield ContradictionError(
            problem, path=manifest.buffers[shard.buffer].file, key=shard.key, region=shard.region, rank=shard.rank
        )
