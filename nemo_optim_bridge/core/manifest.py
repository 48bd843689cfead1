"""What a checkpoint holds: global tensors, and the shards that store boxes of them. No bytes are touched here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.errors import BridgeError, ContradictionError

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
DTYPES = tuple(ITEMSIZE)
_ITEMSIZES = np.array(list(ITEMSIZE.values()), np.int64)


class TensorKey(NamedTuple):
    """Name of one global tensor: the parameter's ``fqn`` and which ``state`` of it.

    ``state`` is data (``weight``, ``exp_avg``, ``exp_avg_sq``, ``fp32_param`` for the fp32 master, ...): nothing in
    the core knows a particular optimizer.
    """

    fqn: str
    state: str

    def __str__(self) -> str:
        return f"{self.fqn}|{self.state}"


class TensorSpec(NamedTuple):
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


@dataclass(frozen=True, slots=True, eq=False)
class BufferTable(Sequence[Buffer]):
    """Buffers as columns: row ``i`` of every column is buffer ``i``; indexing yields ``Buffer`` views.

    ``file`` numbers ``files``, ``dtype`` the names in DTYPES; ``offset`` and ``nbytes`` are in bytes.
    """

    files: tuple[str, ...]
    file: IntArray
    offset: IntArray
    nbytes: IntArray
    dtype: IntArray

    @classmethod
    def of(cls, buffers: Iterable[Buffer]) -> BufferTable:
        """Return the columns of some buffers."""
        listed = list(buffers)
        numbers = {file: number for number, file in enumerate(dict.fromkeys(buffer.file for buffer in listed))}
        rows = [(numbers[b.file], b.offset, b.nbytes, DTYPES.index(b.dtype)) for b in listed]
        return cls(tuple(numbers), *np.array(rows, np.int64).reshape(-1, 4).T.copy())

    def __len__(self) -> int:
        return len(self.file)

    @overload
    def __getitem__(self, row: int) -> Buffer: ...
    @overload
    def __getitem__(self, row: slice) -> BufferTable: ...
    def __getitem__(self, row: int | slice) -> Buffer | BufferTable:
        if isinstance(row, slice):
            return BufferTable(self.files, self.file[row], self.offset[row], self.nbytes[row], self.dtype[row])
        file, dtype = self.files[self.file[row]], DTYPES[self.dtype[row]]
        return Buffer(file, int(self.offset[row]), int(self.nbytes[row]), dtype)

    def take(self, rows: IntArray) -> BufferTable:
        """Return the buffers of the given row numbers, and only the files that they need."""
        used, file = np.unique(self.file[rows], return_inverse=True)
        files = tuple(self.files[number] for number in used.tolist())
        return BufferTable(files, file, self.offset[rows], self.nbytes[rows], self.dtype[rows])

    def itemsize(self) -> IntArray:
        """Return the size of each buffer's elements, in bytes."""
        return _ITEMSIZES[self.dtype]

    def capacity(self) -> IntArray:
        """Return how many elements each buffer holds."""
        return self.nbytes // self.itemsize()


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
    buffers: BufferTable
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
        shapes = [spec.shape for spec in self.tensors]
        number = {shape: row for row, shape in enumerate(dict.fromkeys(shapes))}  # a model has few shapes
        padded = [(1,) * (max_ndim - len(shape)) + tuple(shape) for shape in number]
        distinct = np.array(padded, np.int64).reshape(len(padded), max_ndim)
        return distinct[np.array([number[shape] for shape in shapes], np.int64)]


def problems_of(manifest: Manifest) -> Iterator[BridgeError]:
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
    capacity = manifest.buffers.capacity()
    last = table.storage_offset.astype(np.float64)  # where int64 would wrap
    for dim in range(table.shape.shape[1]):
        last += (table.shape[:, dim] - 1) * table.stride[:, dim].astype(np.float64)
    return (table.storage_offset < 0) | (last >= capacity[table.buffer])
