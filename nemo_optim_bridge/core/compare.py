"""Compare boxes of two manifests bit for bit, wherever and however they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.gather import Gatherer, aligned_buffer, as_floats, bounded_boxes, unsigned
from nemo_optim_bridge.core.manifest import DTYPES, Manifest, TensorKey
from nemo_optim_bridge.core.plan import Plan
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.core.store import FileStore, Store
from nemo_optim_bridge.core.team import Progress, Team, ignore
from nemo_optim_bridge.errors import ReplicaMismatchError

_BLOCK_BYTES = 1 << 20
_PAIRS = 1 << 7  # compared by one process at a time
Columns = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """How two copies of a box differ: in how many elements, and by how much at most.

    ``max_abs`` is at global index ``position``, with the files and ranks that hold it; it is infinite where only one
    side is a number. ``max_rel`` is relative to the larger magnitude, so at most 2.
    """

    key: TensorKey
    num_elements: int
    max_abs: float
    max_rel: float
    position: tuple[int, ...]
    left_file: str
    right_file: str
    left_rank: int
    right_rank: int


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Boxes to compare, as columns: shard rows on both sides, and the common box in global elements."""

    left: Manifest
    right: Manifest
    left_rows: Columns
    right_rows: Columns
    offsets: Columns
    shape: Columns

    @classmethod
    def of_plan(cls, plan: Plan) -> Pairs:
        """Pair every target box of a plan with the source box that it would be filled from."""
        return cls(plan.source, plan.target, plan.source_rows, plan.target_rows, plan.offsets, plan.shape)

    @classmethod
    def of_replicas(cls, plan: Plan) -> Pairs:
        """Pair every replica in a plan's source with the copy that the plan reads."""
        primary, replica = plan.replicas[:, 0], plan.replicas[:, 1]
        table = plan.source.shards
        return cls(plan.source, plan.source, primary, replica, table.offsets[primary], table.shape[primary])

    def __len__(self) -> int:
        return len(self.left_rows)

    def parts(self) -> list[Pairs]:
        """Return the pairs in parts that processes can share out."""
        columns = (self.left_rows, self.right_rows, self.offsets, self.shape)
        return [
            Pairs(self.left, self.right, *(column[start : start + _PAIRS] for column in columns))
            for start in range(0, len(self), _PAIRS)
        ]

    def num_bytes(self) -> int:
        """Bytes of the right side."""
        itemsize = self.right.buffers.itemsize()[self.right.shards.buffer[self.right_rows]]
        return int((self.shape.prod(axis=1) * itemsize).sum())


class _Side:
    """One side of many pairs: reads boxes of them from its store."""

    def __init__(self, manifest: Manifest, store: Store, rows: Columns, offsets: Columns) -> None:
        self._table, self._rows = manifest.shards, rows
        self._buffers, self._gatherer = manifest.buffers, Gatherer(store)
        ndim = offsets.shape[1]
        stride = _last(self._table.stride[rows], ndim, 0)
        inside = offsets - _last(self._table.offsets[rows], ndim, 0)
        buffer = self._table.buffer[rows]
        start = self._table.storage_offset[rows] + (inside * stride).sum(axis=1)
        columns = buffer, manifest.buffers.dtype[buffer], start, stride
        self._boxes = list(zip(*(column.tolist() for column in columns), strict=True))

    def read(self, pair: int, inner: tuple[int, ...], out: Columns, dtype: str) -> None:
        """Fill ``out`` with the part of a pair's box that begins at ``inner``."""
        buffer, stored, start, stride = self._boxes[pair]
        moved = start + sum(i * s for i, s in zip(inner, stride, strict=True))
        self._gatherer.gather(out, dtype, buffer, DTYPES[stored], moved, tuple(stride))

    def place(self, pair: int) -> tuple[str, int]:
        """Return the file and the rank that hold a pair's box."""
        shard = self._table[int(self._rows[pair])]
        return self._buffers[shard.buffer].file, shard.rank


def _last(columns: Columns, ndim: int, value: int) -> Columns:
    """Return the last ``ndim`` columns, or all with leading columns of ``value``."""
    missing = ndim - columns.shape[1]
    return np.pad(columns, ((0, 0), (missing, 0)), constant_values=value) if missing > 0 else columns[:, -missing:]


def compare(pairs: Pairs, left: Store, right: Store) -> Iterator[Difference]:
    """Yield one difference for every box whose two copies do not have the same bits."""
    block = aligned_buffer(2 * _BLOCK_BYTES)
    sides = (
        _Side(pairs.left, left, pairs.left_rows, pairs.offsets),
        _Side(pairs.right, right, pairs.right_rows, pairs.offsets),
    )
    tensors = pairs.left.shards.tensor[pairs.left_rows].tolist()
    for pair, (tensor, shape) in enumerate(zip(tensors, map(tuple, pairs.shape.tolist()), strict=True)):
        spec = pairs.left.tensors[tensor]
        kind = unsigned(spec.dtype)
        difference: _Measure | None = None
        for inner, size in bounded_boxes(shape, _BLOCK_BYTES // kind.itemsize):
            arrays = [np.ndarray(size, kind, block.data, number * _BLOCK_BYTES) for number in range(2)]
            for side, array in zip(sides, arrays, strict=True):
                side.read(pair, inner, array, spec.dtype)
            if not np.array_equal(arrays[0], arrays[1]):
                pad = len(shape) - len(spec.shape)
                one, two = (array.reshape(size[pad:]) for array in arrays)
                origin = tuple(o + i for o, i in zip(pairs.offsets[pair].tolist(), inner, strict=True))
                difference = _merge(difference, _measure(one, two, spec.dtype, origin[pad:]))
        if difference is not None:
            (left_file, left_rank), (right_file, right_rank) = (side.place(pair) for side in sides)
            yield Difference(spec.key, *difference, left_file, right_file, left_rank, right_rank)


_Measure = tuple[int, float, float, tuple[int, ...]]


def _measure(left: Columns, right: Columns, dtype: str, origin: tuple[int, ...]) -> _Measure:
    """Return how many elements differ, the largest absolute and relative difference, and the former's global index."""
    differs = left != right
    a, b = (as_floats(side, dtype) for side in (left, right))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        distance = np.where(differs, np.abs(a - b), -1.0)
        distance = np.where(np.isnan(distance), np.inf, distance)
        relative = np.where(differs & (distance > 0), distance / np.maximum(np.abs(a), np.abs(b)), 0.0)
    place = np.unravel_index(int(distance.argmax()), left.shape) if left.shape else ()
    position = tuple(o + int(i) for o, i in zip(origin, place, strict=True))
    return int(differs.sum()), float(distance.max()), float(np.nan_to_num(relative, nan=2.0).max()), position


def _merge(known: _Measure | None, new: _Measure) -> _Measure:
    if known is None:
        return new
    worst = known if known[1] >= new[1] else new
    return known[0] + new[0], worst[1], max(known[2], new[2]), worst[3]


def require_equal_replicas(
    plan: Plan, team: Team, progress: Progress = ignore, open_store: Callable[[Manifest], Store] = FileStore.of
) -> int:  # fmt: skip
    """Compare all replicas of a plan's source; return how many there are. Called by all members of a team.

    Raises ReplicaMismatchError that shows the largest absolute difference, where it is, and both files.
    """
    pairs = Pairs.of_replicas(plan)
    parts = pairs.parts()

    def make(report: Progress) -> Callable[[Pairs], Difference | None]:
        store = open_store(plan.source)

        def first_difference(part: Pairs) -> Difference | None:
            found = next(compare(part, store, store), None)
            report(part.num_bytes())
            return found

        return first_difference

    for found in team.map(make, parts, [part.num_bytes() for part in parts], progress):
        if found is not None:
            raise ReplicaMismatchError(
                f"copies differ in {found.num_elements} elements, by up to {found.max_abs:g} at "
                f"{list(found.position)}; the other copy is rank {found.left_rank}'s in {found.left_file}",
                path=found.right_file,
                key=found.key,
                region=_box(found.position),
                rank=found.right_rank,
                hint="find out which copy is right; --replicas lowest-rank takes the lowest rank's",
            )
    return len(pairs)


def _box(position: tuple[int, ...]) -> Region:
    return Region(position, (1,) * len(position))
