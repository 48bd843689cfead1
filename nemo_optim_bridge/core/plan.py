"""Which box of which source shard goes to which target shard. Pure: no tensors, no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.aliasing import shared_storage
from nemo_optim_bridge.core.boxes import Boxes, BoxIndex, IntArray, intersect, volume
from nemo_optim_bridge.core.manifest import Manifest, Shard, ShardTable
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.errors import BridgeError, ContradictionError, MissingSourceError, TargetError, raise_all

RowArray = npt.NDArray[np.integer[Any]]
_ALL = slice(None)
_CHUNK = 1 << 15  # pieces intersected at a time: temporaries stay in the cache


@dataclass(frozen=True, slots=True)
class Copy:
    """One box to copy: ``region`` lies in both shards, in elements of the global tensor."""

    source: Shard
    target: Shard
    region: Region


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Every copy that fills the target's shards, as columns; built only by ``make_plan``, hence complete and disjoint.

    Row ``i`` of every column is piece ``i``; pieces are sorted by (target buffer, storage offset in it). ``offsets``
    and ``shape`` are (pieces, K) boxes in elements of the global tensor, with leading dimensions of size 1 where a
    tensor has fewer than K. ``replicas`` is (m, 2): the source row that the plan reads, and one that must equal it.
    """

    source: Manifest
    target: Manifest
    source_rows: RowArray
    target_rows: RowArray
    offsets: IntArray
    shape: IntArray
    replicas: RowArray
    buffer_starts: IntArray  # per target buffer, and one more: its first piece

    def __len__(self) -> int:
        return len(self.source_rows)

    def __iter__(self) -> Iterator[Copy]:
        return (self[piece] for piece in range(len(self)))

    def __getitem__(self, piece: int) -> Copy:
        target = self.target.shards[int(self.target_rows[piece])]
        pad = self.offsets.shape[1] - len(target.region.shape)
        region = Region(tuple(self.offsets[piece, pad:].tolist()), tuple(self.shape[piece, pad:].tolist()))
        return Copy(self.source.shards[int(self.source_rows[piece])], target, region)

    @property
    def pieces(self) -> int:
        """Number of copies."""
        return len(self)

    @property
    def num_bytes(self) -> int:
        """Bytes that the plan writes."""
        return _num_bytes(self.target, self.target_rows, self.shape)

    @property
    def num_bytes_read(self) -> int:
        """Bytes that the plan reads, without those of replicas."""
        return _num_bytes(self.source, self.source_rows, self.shape)

    def buffer_bytes_read(self) -> IntArray:
        """Return, per target buffer, the bytes that are read to fill it."""
        itemsize = self.source.buffers.itemsize()[self.source.shards.buffer[self.source_rows]]
        total = np.append(0, np.cumsum(volume(self.shape) * itemsize))
        return np.diff(total[self.buffer_starts])

    def source_tensors(self) -> npt.NDArray[np.bool_]:
        """Tell which of the source's tensors the plan reads."""
        read = np.zeros(len(self.source.tensors), np.bool_)
        read[self.source.shards.tensor[self.source_rows]] = True
        return read

    def compare_only(self, tensors: npt.NDArray[np.bool_]) -> Plan:
        """Return the plan with the replicas of some of the source's tensors only."""
        chosen = tensors[self.source.shards.tensor[self.replicas[:, 0]]]
        return replace(self, replicas=self.replicas[chosen])

    def pieces_of(self, buffer: int) -> slice:
        """Return the rows of the pieces that fill target buffer number ``buffer``, sorted by storage offset."""
        return slice(int(self.buffer_starts[buffer]), int(self.buffer_starts[buffer + 1]))

    def source_offsets(self, pieces: slice | RowArray = _ALL) -> IntArray:
        """Return where each piece's first element lies in its source buffer, in elements."""
        return _storage_offsets(self.source.shards, self.source_rows[pieces], self.offsets[pieces])

    def target_offsets(self, pieces: slice | RowArray = _ALL) -> IntArray:
        """Return where each piece's first element lies in its target buffer, in elements."""
        return _storage_offsets(self.target.shards, self.target_rows[pieces], self.offsets[pieces])


def make_plan(source: Manifest, target: Manifest, *, ranks: Sequence[int] | None = None) -> Plan:
    """Plan every copy from ``source`` that the target's shards need, or only the shards of ``ranks``.

    Plans of disjoint ranks add up to the plan for all of them. Equal source boxes are replicas: the lowest rank's is
    read, whatever the order of listing. Source and target may differ in the dtype of a buffer, not of a tensor.

    Raises:
        MissingSourceError: a tensor or box has no source; names the tensor, the box and the rank that wants it.
        TargetError: a tensor's shape or dtype differs from the source's.
        ContradictionError: source shards overlap without being equal, or target shards share storage.
    """
    number = _match_tensors(source, target)
    wanted = _wanted_rows(target, ranks)
    raise_all(shared_storage(target, wanted))
    sizes = target.sizes(max(source.shards.offsets.shape[1], target.shards.offsets.shape[1]))
    rows, boxes = _source_boxes(source, number, target.shards.tensor[wanted], sizes)
    index = BoxIndex(boxes, sizes)
    raise_all(_contradictions(source.shards, rows, index))
    read, replicas = _choose_primaries(source, rows, index)
    sought = _boxes_of(target.shards, target.shards.tensor, wanted, sizes.shape[1])
    pairs = index.find(sought)
    del index  # as large as half of the plan
    pieces = _cut_pieces(target, wanted, sought, boxes, read, pairs)
    raise_all(_uncovered(target.shards, wanted, pieces))
    return _sorted_plan(source, target, pieces, replicas)


def _match_tensors(source: Manifest, target: Manifest) -> IntArray:
    """Return, per source tensor, its number in the target or -1; raises for target tensors that do not match."""
    index = source.index()
    found = [index.get(spec.key, -1) for spec in target.tensors]
    unmatched = [
        row
        for row, (spec, at) in enumerate(zip(target.tensors, found, strict=True))
        if at < 0 or source.tensors[at] != spec
    ]
    raise_all(_mismatches(source, target, unmatched))
    number = np.full(len(source.tensors), -1, np.int64)
    number[found] = np.arange(len(found))
    return number


def _mismatches(source: Manifest, target: Manifest, unmatched: Sequence[int]) -> Iterator[BridgeError]:
    """Yield one error for each of the target tensors ``unmatched``, in order of their names."""
    if not unmatched:
        return
    index = source.index()
    table = target.shards
    by_rank = np.lexsort((table.rank, table.tensor))
    tensors, first = np.unique(table.tensor[by_rank], return_index=True)
    wanting = dict(zip(tensors.tolist(), by_rank[first].tolist(), strict=True))
    for row in sorted(unmatched, key=lambda row: target.tensors[row].key):
        spec = target.tensors[row]
        shard = table[wanting[row]] if row in wanting else None
        region, rank = (shard.region, shard.rank) if shard else (Region.full(spec.shape), None)
        if spec.key not in index:
            yield MissingSourceError("the source has no such tensor", key=spec.key, region=region, rank=rank)
            continue
        known = source.tensors[index[spec.key]]
        yield TargetError(
            f"the source has {known.dtype} {known.shape} and the target wants {spec.dtype} {spec.shape}",
            key=spec.key, region=region, rank=rank,
        )  # fmt: skip


def _wanted_rows(target: Manifest, ranks: Sequence[int] | None) -> IntArray:
    """Return the target shards to fill, sorted by (buffer, storage offset)."""
    table = target.shards
    rows = np.arange(len(table)) if ranks is None else np.flatnonzero(np.isin(table.rank, list(ranks)))
    buffer, offset = table.buffer[rows], table.storage_offset[rows]
    return rows if _ascend(buffer, offset) else rows[np.lexsort((offset, buffer))]


def _ascend(major: IntArray, minor: IntArray) -> bool:
    """Tell whether the pairs (major, minor) ascend, no two being equal."""
    return bool(((major[1:] > major[:-1]) | ((major[1:] == major[:-1]) & (minor[1:] > minor[:-1]))).all())


def _source_boxes(
    source: Manifest, number: IntArray, wanted_tensors: IntArray, sizes: IntArray
) -> tuple[IntArray, Boxes]:
    """Return the source shards of the wanted tensors: row numbers, and boxes with the target's tensor numbers."""
    table = source.shards
    used = np.zeros(len(sizes) + 1, np.bool_)  # the last one is for number -1
    used[wanted_tensors] = True
    tensor = number[table.tensor]
    rows = np.flatnonzero(used[tensor])
    return rows, _boxes_of(table, tensor, rows, sizes.shape[1])


def _boxes_of(table: ShardTable, tensor: IntArray, rows: IntArray, max_ndim: int) -> Boxes:
    """Return the boxes of the shards ``rows`` with ``max_ndim`` dimensions; ``tensor`` numbers those of all shards."""
    all_in_order = len(rows) == len(table) and bool((rows[1:] > rows[:-1]).all())
    boxes = Boxes(tensor, _padded(table.offsets, max_ndim, 0), _padded(table.shape, max_ndim, 1))
    return boxes if all_in_order else boxes.take(rows)


def _padded(columns: IntArray, max_ndim: int, value: int) -> IntArray:
    """Return (n, K) columns with leading columns of ``value`` up to ``max_ndim``."""
    missing = max_ndim - columns.shape[1]
    return np.pad(columns, ((0, 0), (missing, 0)), constant_values=value) if missing else columns


def _contradictions(table: ShardTable, rows: IntArray, index: BoxIndex) -> Iterator[BridgeError]:
    """Yield an error for every two source shards that overlap without being equal."""
    for a, b in zip(*(side.tolist() for side in index.find_overlaps()), strict=True):
        one, two = sorted((table[int(rows[a])], table[int(rows[b])]), key=lambda shard: (shard.rank, shard.region))
        yield ContradictionError(
            f"the box overlaps box {two.region} of rank {two.rank} without being equal",
            key=one.key, region=one.region, rank=one.rank,
        )  # fmt: skip


def _choose_primaries(source: Manifest, rows: IntArray, index: BoxIndex) -> tuple[IntArray, IntArray]:
    """Return the source row to read for every box of the index, and the (primary, replica) source rows."""
    members, group = index.equal
    order = _precedence(source, rows[members], group)
    members, group = members[order], group[order]
    is_first = np.ones(len(members), np.bool_)
    is_first[1:] = group[1:] != group[:-1]
    leader = members[is_first][np.cumsum(is_first) - 1]
    read = rows.copy()
    read[members] = rows[leader]
    return read, np.stack([rows[leader], rows[members]], axis=1)[~is_first]


def _precedence(source: Manifest, rows: IntArray, group: IntArray) -> IntArray | slice:
    """Return the order by group, then rank, then place of the bytes; never by order of listing."""
    table = source.shards
    rank = table.rank[rows]
    if _ascend(group, rank):
        return _ALL
    order = np.lexsort((rank, group))
    if not ((np.diff(group[order]) == 0) & (np.diff(rank[order]) == 0)).any():
        return order
    used, inverse = np.unique(table.buffer[rows], return_inverse=True)
    places = [(source.buffers[b].file, source.buffers[b].offset) for b in used.tolist()]
    number = {place: i for i, place in enumerate(sorted(set(places)))}
    place = np.array([number[p] for p in places])[inverse]
    return np.lexsort((table.storage_offset[rows], place, rank, group))


@dataclass(slots=True, eq=False)
class _Pieces:
    """Columns of a plan, not sorted yet. ``place`` is where a piece goes on a line through all target buffers."""

    source_rows: RowArray
    target_rows: RowArray
    offsets: IntArray
    shape: IntArray
    place: IntArray
    base: IntArray  # per target buffer: where it begins on that line

    def __len__(self) -> int:
        return len(self.place)

    def keep(self, order: slice | IntArray) -> None:
        """Reduce or reorder the pieces, a column at a time."""
        for name in ("source_rows", "target_rows", "offsets", "shape", "place"):
            column = getattr(self, name)
            setattr(self, name, column[order] if isinstance(order, slice) else column.take(order, axis=0))


def _cut_pieces(
    target: Manifest, wanted: IntArray, sought: Boxes, boxes: Boxes, read: IntArray, pairs: tuple[IntArray, IntArray]
) -> _Pieces:  # fmt: skip
    """Return what overlaps of the pairs (wanted box, source box), whether that covers the wanted ones or not."""
    table, max_ndim = target.shards, boxes.offsets.shape[1]
    query, found = pairs
    capacity = target.buffers.capacity()
    base = np.cumsum(capacity) - capacity
    stride = _padded(table.stride.take(wanted, axis=0), max_ndim, 0)
    origin = base[table.buffer[wanted]] + table.storage_offset[wanted] - _dot(sought.offsets, stride)
    count = len(query)
    row_type = np.int32 if max(len(table), read.max(initial=0)) < 2**31 else np.int64
    pieces = _Pieces(
        np.empty(count, row_type), np.empty(count, row_type), np.empty((count, max_ndim), np.int64),
        np.empty((count, max_ndim), np.int64), np.empty(count, np.int64), base,
    )  # fmt: skip
    used = 0
    for start in range(0, count, _CHUNK):
        some, at = query[start : start + _CHUNK], found[start : start + _CHUNK]
        offsets, shape = intersect(sought, some, boxes, at)
        real = volume(shape) > 0
        if not real.all():
            some, at, offsets, shape = some[real], at[real], offsets[real], shape[real]
        rows = slice(used, used + len(some))
        used += len(some)
        pieces.source_rows[rows] = read[at]
        pieces.target_rows[rows] = wanted[some]
        pieces.offsets[rows], pieces.shape[rows] = offsets, shape
        pieces.place[rows] = origin[some] + _dot(offsets, stride.take(some, axis=0))
    pieces.keep(slice(used))
    return pieces


def _uncovered(table: ShardTable, wanted: IntArray, pieces: _Pieces) -> list[BridgeError]:
    """Return an error for each target shard that its pieces do not cover; sources are known to be disjoint."""
    covered = np.bincount(pieces.target_rows, weights=volume(pieces.shape), minlength=len(table))
    missing = wanted[covered[wanted] != volume(table.shape)[wanted]]
    problems = [_missing(table, row, pieces) for row in missing.tolist()]
    return sorted(problems, key=lambda problem: (problem.key, problem.rank, problem.region))


def _missing(table: ShardTable, row: int, pieces: _Pieces) -> MissingSourceError:
    """Return the error for target shard ``row``: its first box, by offsets, that no piece covers."""
    shard = table[row]
    pad = pieces.offsets.shape[1] - len(shard.region.shape)
    rest = [shard.region]
    for piece in np.flatnonzero(pieces.target_rows == row):
        box = Region(tuple(pieces.offsets[piece, pad:].tolist()), tuple(pieces.shape[piece, pad:].tolist()))
        rest = [left for region in rest for left in region.subtract(box)]
    return MissingSourceError("no source shard holds the box", key=shard.key, region=min(rest), rank=shard.rank)


def _sorted_plan(source: Manifest, target: Manifest, pieces: _Pieces, replicas: IntArray) -> Plan:
    """Return the plan of the pieces, sorted by (target buffer, storage offset)."""
    if (pieces.place[1:] < pieces.place[:-1]).any():
        pieces.keep(np.argsort(pieces.place, kind="stable"))
    return Plan(
        source,
        target,
        pieces.source_rows,
        pieces.target_rows,
        pieces.offsets,
        pieces.shape,
        replicas.astype(pieces.source_rows.dtype),
        np.append(np.searchsorted(pieces.place, pieces.base), len(pieces)),
    )


def _storage_offsets(table: ShardTable, rows: RowArray, offsets: IntArray) -> IntArray:
    """Return where the element at ``offsets`` of each shard lies in its buffer, in elements."""
    inside = offsets[:, offsets.shape[1] - table.offsets.shape[1] :] - table.offsets.take(rows, axis=0)
    return table.storage_offset[rows] + _dot(inside, table.stride.take(rows, axis=0))


def _dot(a: IntArray, b: IntArray) -> IntArray:
    """Return the inner product of each pair of rows."""
    result: IntArray = np.einsum("ij,ij->i", a, b)
    return result


def _num_bytes(manifest: Manifest, rows: RowArray, shape: IntArray) -> int:
    """Return the bytes of boxes of ``shape`` in the given shards."""
    itemsize = manifest.buffers.itemsize()
    return int((volume(shape) * itemsize[manifest.shards.buffer[rows]]).sum()) if len(rows) else 0
