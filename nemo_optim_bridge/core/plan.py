"""Which box of which source shard goes to which target shard. Pure: no tensors, no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.boxes import Boxes, BoxIndex, IntArray, intersect
from nemo_optim_bridge.core.manifest import ITEMSIZE, Manifest, Shard, ShardTable
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.errors import BridgeError, ContradictionError, MissingSourceError, TargetError, raise_all

RowArray = npt.NDArray[np.integer[Any]]
_ALL = slice(None)
_CHUNK = 1 << 15  # target shards planned at a time: temporaries stay in the cache


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
        ContradictionError: source shards overlap without being equal.
    """
    number = _match_tensors(source, target)
    wanted = _wanted_rows(target, ranks)
    sizes = _sizes(target, max(source.shards.offsets.shape[1], target.shards.offsets.shape[1]))
    rows, boxes = _source_boxes(source, number, target.shards.tensor[wanted], sizes)
    index = BoxIndex(boxes, sizes)
    raise_all(_contradictions(source.shards, rows, index))
    primary, replicas = _choose_primaries(source, rows, index)
    pieces = _find_pieces(target, wanted, index, boxes, primary, source.shards, rows)
    return _sorted_plan(source, target, pieces, replicas)


def _match_tensors(source: Manifest, target: Manifest) -> IntArray:
    """Return, per source tensor, its number in the target or -1; raises for target tensors that do not match."""
    index = source.index()
    number = np.full(len(source.tensors), -1, np.int64)
    unmatched: list[int] = []
    for row, spec in enumerate(target.tensors):
        found = index.get(spec.key, -1)
        if found >= 0 and source.tensors[found] == spec:
            number[found] = row
        else:
            unmatched.append(row)
    if unmatched:
        raise_all(_mismatches(source, target, unmatched))
    return number


def _mismatches(source: Manifest, target: Manifest, unmatched: Sequence[int]) -> Iterator[BridgeError]:
    """Yield one error for each of the target tensors ``unmatched``, in order of their names."""
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
    return rows[np.lexsort((offset, buffer))]


def _sizes(manifest: Manifest, max_ndim: int) -> IntArray:
    """Return the shapes of all tensors, padded with leading ones."""
    sizes = np.ones((len(manifest.tensors), max_ndim), np.int64)
    for row, spec in enumerate(manifest.tensors):
        if spec.shape:
            sizes[row, max_ndim - len(spec.shape) :] = spec.shape
    return sizes


def _source_boxes(
    source: Manifest, number: IntArray, wanted_tensors: IntArray, sizes: IntArray
) -> tuple[IntArray, Boxes]:
    """Return the source shards of the wanted tensors: row numbers, and boxes with the target's tensor numbers."""
    table = source.shards
    used = np.zeros(len(sizes) + 1, np.bool_)  # the last one is for number -1
    used[wanted_tensors] = True
    tensor = number[table.tensor]
    rows = np.flatnonzero(used[tensor])
    take = _ALL if len(rows) == len(table) else rows
    max_ndim = sizes.shape[1]
    boxes = Boxes(tensor[take], _padded(table.offsets[take], max_ndim, 0), _padded(table.shape[take], max_ndim, 1))
    return rows, boxes


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
    """Return which of its equals to read, for every box of the index, and (primary, replica) source rows."""
    members, group = index.equal
    order = _precedence(source, rows[members], group)
    members, group = members[order], group[order]
    is_first = np.ones(len(members), np.bool_)
    is_first[1:] = group[1:] != group[:-1]
    leader = members[is_first][np.cumsum(is_first) - 1]
    primary = np.arange(len(rows))
    primary[members] = leader
    return primary, np.stack([rows[leader], rows[members]], axis=1)[~is_first]


def _precedence(source: Manifest, rows: IntArray, group: IntArray) -> IntArray:
    """Return the order by group, then rank, then place of the bytes; never by order of listing."""
    table = source.shards
    rank = table.rank[rows]
    order = np.lexsort((rank, group))
    if not ((np.diff(group[order]) == 0) & (np.diff(rank[order]) == 0)).any():
        return order
    used, inverse = np.unique(table.buffer[rows], return_inverse=True)
    places = [(source.buffers[b].file, source.buffers[b].offset) for b in used.tolist()]
    number = {place: i for i, place in enumerate(sorted(set(places)))}
    place = np.array([number[p] for p in places])[inverse]
    return np.lexsort((table.storage_offset[rows], place, rank, group))


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Columns of a plan, not sorted yet."""

    source_rows: RowArray
    target_rows: RowArray
    offsets: IntArray
    shape: IntArray


def _find_pieces(
    target: Manifest, wanted: IntArray, index: BoxIndex, boxes: Boxes, primary: IntArray,
    source_table: ShardTable, rows: IntArray,
) -> _Pieces:  # fmt: skip
    """Return the pieces of all wanted target shards; raises MissingSourceError for what they do not cover."""
    table = target.shards
    max_ndim = boxes.offsets.shape[1]
    row_type = np.int32 if max(len(table), len(source_table)) < 2**31 else np.int64
    parts: list[_Pieces] = []
    problems: list[BridgeError] = []
    for start in range(0, len(wanted), _CHUNK):
        some = wanted[start : start + _CHUNK]
        sought = Boxes(
            table.tensor[some],
            _padded(table.offsets[some], max_ndim, 0),
            _padded(table.shape[some], max_ndim, 1),
        )
        query, found = index.find(sought)
        offsets, shape = intersect(sought, query, boxes, found)
        real = shape.min(axis=1) > 0
        if not real.all():
            query, found, offsets, shape = query[real], found[real], offsets[real], shape[real]
        covered = np.bincount(query, weights=shape.prod(axis=1), minlength=len(sought))
        part = _Pieces(rows[primary[found]].astype(row_type), some[query].astype(row_type), offsets, shape)
        parts.append(part)
        for row in some[covered != sought.shape.prod(axis=1)]:
            problems.append(_missing(table, int(row), part))
    if problems:
        raise_all(sorted(problems, key=lambda problem: (problem.key, problem.rank, problem.region)))
    empty = np.zeros((0, max_ndim), np.int64)
    return _Pieces(
        np.concatenate([np.zeros(0, row_type), *(part.source_rows for part in parts)]),
        np.concatenate([np.zeros(0, row_type), *(part.target_rows for part in parts)]),
        np.concatenate([empty, *(part.offsets for part in parts)]),
        np.concatenate([empty, *(part.shape for part in parts)]),
    )


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
    table = target.shards
    capacity = np.array([buffer.nbytes // ITEMSIZE[buffer.dtype] for buffer in target.buffers], np.int64)
    base = np.cumsum(capacity) - capacity
    place = base[table.buffer[pieces.target_rows]]
    place += _storage_offsets(table, pieces.target_rows, pieces.offsets)
    order: slice | IntArray = _ALL
    if (place[1:] < place[:-1]).any():
        order = np.argsort(place, kind="stable")
        place = place[order]
    return Plan(
        source,
        target,
        pieces.source_rows[order],
        pieces.target_rows[order],
        pieces.offsets[order],
        pieces.shape[order],
        replicas.astype(pieces.source_rows.dtype),
        np.append(np.searchsorted(place, base), len(place)),
    )


def _storage_offsets(table: ShardTable, rows: RowArray, offsets: IntArray) -> IntArray:
    """Return where the element at ``offsets`` of each shard lies in its buffer, in elements."""
    ndim = table.offsets.shape[1]
    inside = offsets[:, offsets.shape[1] - ndim :] - table.offsets[rows]
    result: IntArray = np.einsum("ij,ij->i", inside, table.stride[rows])
    result += table.storage_offset[rows]
    return result


def _num_bytes(manifest: Manifest, rows: RowArray, shape: IntArray) -> int:
    """Return the bytes of boxes of ``shape`` in the given shards."""
    itemsize = np.array([ITEMSIZE[buffer.dtype] for buffer in manifest.buffers], np.int64)
    return int((shape.prod(axis=1) * itemsize[manifest.shards.buffer[rows]]).sum()) if len(rows) else 0
