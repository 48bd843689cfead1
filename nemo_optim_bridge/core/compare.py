"""Compare boxes of two manifests bit for bit, wherever and however they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.gather import Gatherer, aligned_buffer, as_floats, bounded_boxes, unsigned
from nemo_optim_bridge.core.manifest import ITEMSIZE, Manifest, TensorKey
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


def compare(pairs: Pairs, left: Store, right: Store) -> Iterator[Difference]:
    """Yield one difference for every box whose two copies do not have the same bits."""
    block = aligned_buffer(2 * _BLOCK_BYTES)
    sides = (pairs.left, left, pairs.left_rows), (pairs.right, right, pairs.right_rows)
    gatherers = [Gatherer(left), Gatherer(right)]
    for pair in range(len(pairs.left_rows)):
        views = []
        for manifest, _, rows in sides:
            shard = manifest.shards[int(rows[pair])]
            pad = pairs.offsets.shape[1] - len(shard.region.shape)
            offsets = tuple(pairs.offsets[pair, pad:].tolist())
            shape = tuple(pairs.shape[pair, pad:].tolist())
            start = shard.storage_offset + sum(
                (o - p) * s for o, p, s in zip(offsets, shard.region.offsets, shard.stride, strict=True)
            )
            views.append((shard, start))
        dtype = pairs.left.tensors[pairs.left.shards.tensor[pairs.left_rows[pair]]].dtype
        difference: _Measure | None = None
        for inner, size in bounded_boxes(shape, _BLOCK_BYTES // ITEMSIZE[dtype]):
            arrays = []
            for side, (shard, start) in enumerate(views):
                array = np.ndarray(size, unsigned(dtype), block.data, side * _BLOCK_BYTES)
                run = sides[side][0].buffers[shard.buffer]
                moved = start + sum(i * s for i, s in zip(inner, shard.stride, strict=True))
                gatherers[side].gather(array, dtype, shard.buffer, run.dtype, moved, shard.stride)
                arrays.append(array)
            if not np.array_equal(arrays[0], arrays[1]):
                origin = tuple(o + i for o, i in zip(offsets, inner, strict=True))
                difference = _merge(difference, _measure(arrays[0], arrays[1], dtype, origin))
        if difference is not None:
            (one, _), (two, _) = views
            yield Difference(
                one.key, *difference, pairs.left.buffers[one.buffer].file,
                pairs.right.buffers[two.buffer].file, one.rank, two.rank,
            )  # fmt: skip


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
