"""Which of many boxes overlap: a tree of sorted intervals, one dimension a level. Pure numpy, no Python per box.

All tensors share one integer line: each has its own stretch of it, as long as its size along the dimension that the
level looks at. Boxes with the same interval share a node, so a grid of shards is searched row by row and then column
by column, never as a product; what remains in one node after the last level are equal boxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.errors import CheckpointError

IntArray = npt.NDArray[np.int64]
_LONGEST_LINE = 2.0**62


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Boxes as columns: ``tensor`` (n), ``offsets`` and ``shape`` (n, K), in elements; no box is empty."""

    tensor: IntArray
    offsets: IntArray
    shape: IntArray

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, rows: npt.NDArray[np.integer] | slice) -> Boxes:
        """Return the boxes of the given row numbers."""
        return Boxes(self.tensor[rows], self.offsets[rows], self.shape[rows])


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """Children of the nodes of one depth: distinct intervals in ascending order on the level's line.

    Within a layer stops ascend as starts do, hence what overlaps an interval is a contiguous range of children.
    ``child`` is the box of a child that has no further level, or the complement of its node number in the next one.
    """

    dim: IntArray  # per node
    base: IntArray  # per node: where its stretch of the line begins
    starts: tuple[IntArray, ...]  # per layer
    stops: tuple[IntArray, ...]
    child: tuple[IntArray, ...]

    def overlapping(self, boxes: Boxes, query: IntArray, node: IntArray) -> tuple[IntArray, IntArray]:
        """Return (query, child) for every child of ``node`` that overlaps its query along this level's dimension."""
        start, stop = _on_line(boxes, query, node, self.dim, self.base)
        found: list[tuple[IntArray, IntArray]] = []
        for starts, stops, child in zip(self.starts, self.stops, self.child, strict=True):
            first = _count_below(stops, start, "right")
            count = _count_below(starts, stop, "left") - first
            found.append((np.repeat(query, count), child[ranges(first, count)]))
        return _joined(found)


class BoxIndex:
    """An index of boxes that finds those that overlap others.

    Args:
        boxes: the boxes to find.
        sizes: (num_tensors, K), the tensors' shapes; every box, sought or found, lies within its tensor.

    ``equal`` lists (row, group) of all boxes that another box equals; ``find`` returns one row of each group.
    Raises CheckpointError when the tensors' sizes along one dimension add up to 2**62 or more.
    """

    def __init__(self, boxes: Boxes, sizes: IntArray) -> None:
        self._boxes = boxes
        self._levels: list[_Level] = []
        self._crossing: list[IntArray] = []
        self.equal: tuple[IntArray, IntArray] = (np.zeros(0, np.int64), np.zeros(0, np.int64))
        order = _dims_by_selectivity(boxes, sizes)
        rows, node, tensor = np.arange(len(boxes)), boxes.tensor, np.arange(len(sizes))
        for depth in range(sizes.shape[1]):
            dim = order[tensor, depth]
            rows, node, tensor = self._grow(rows, node, tensor, dim, sizes[tensor, dim], depth + 1 == sizes.shape[1])
            if not len(rows):
                break

    def _grow(
        self, rows: IntArray, node: IntArray, tensor: IntArray, dim: IntArray, size: IntArray, last: bool
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Add a level below ``node`` (one per row); return the rows that share a child, their node, its tensor."""
        if size.sum(dtype=np.float64) >= _LONGEST_LINE:
            raise CheckpointError("the tensors are too large to be planned together")
        base = np.cumsum(size) - size
        start, stop = _on_line(self._boxes, rows, node, dim, base)
        rows, node, start, stop = _sorted_intervals(rows, node, start, stop)
        is_first = np.ones(len(rows), np.bool_)
        is_first[1:] = (start[1:] != start[:-1]) | (stop[1:] != stop[:-1])
        first = np.flatnonzero(is_first)
        shared = np.diff(first, append=len(rows)) > 1
        starts, stops, child = start[first], stop[first], rows[first]
        members = np.zeros(0, np.int64)
        next_node = members
        if shared.any():
            child_of_row = np.cumsum(is_first) - 1
            members = np.flatnonzero(shared[child_of_row])
            number = np.cumsum(shared) - 1
            next_node = number[child_of_row[members]]
            if last:
                self.equal = rows[members], next_node
            else:
                child[shared] = ~number[shared]
        furthest = np.maximum.accumulate(stops)
        self._note_crossing(rows, is_first, starts, furthest)
        layers = _layers(stops, furthest)
        self._levels.append(
            _Level(
                dim, base, tuple(starts[x] for x in layers), tuple(stops[x] for x in layers),
                tuple(child[x] for x in layers),
            )
        )  # fmt: skip
        if last:
            members = members[:0]
            next_node = members
        return rows[members], next_node, tensor[node[first[shared]]]

    def _note_crossing(
        self, rows: IntArray, is_first: npt.NDArray[np.bool_], starts: IntArray, furthest: IntArray
    ) -> None:
        """Remember the rows whose interval overlaps a different interval of the same node."""
        crosses = starts[1:] < furthest[:-1]
        if crosses.any():
            suspect = np.zeros(len(starts), np.bool_)
            suspect[1:] = crosses
            suspect[:-1] |= crosses
            self._crossing.append(rows[suspect[np.cumsum(is_first) - 1]])

    def find(self, boxes: Boxes) -> tuple[IntArray, IntArray]:
        """Return (row of ``boxes``, row of the index) of every pair that may overlap, most of which do.

        Pairs that overlap are all there, once; a few others are too: the caller intersects the boxes anyhow.
        """
        found: list[tuple[IntArray, IntArray]] = []
        query, node = np.arange(len(boxes)), boxes.tensor
        for level in self._levels:
            query, child = level.overlapping(boxes, query, node)
            inner = child < 0
            if not inner.any():
                found.append((query, child))
                break
            found.append((query[~inner], child[~inner]))
            query, node = query[inner], ~child[inner]
        return _joined(found)

    def find_overlaps(self) -> tuple[IntArray, IntArray]:
        """Return the pairs of rows, each once, whose boxes overlap without being equal."""
        if not self._crossing:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        suspect = np.unique(np.concatenate(self._crossing))
        query, b = self.find(self._boxes.take(suspect))
        a = suspect[query]
        _, shape = intersect(self._boxes, a, self._boxes, b)
        differ = (self._boxes.offsets[a] != self._boxes.offsets[b]) | (self._boxes.shape[a] != self._boxes.shape[b])
        real = (volume(shape) > 0) & differ.any(axis=1)
        a, b = a[real], b[real]
        pairs = np.unique(np.stack([np.minimum(a, b), np.maximum(a, b)], axis=1), axis=0)
        return pairs[:, 0], pairs[:, 1]


def intersect(a: Boxes, a_rows: IntArray, b: Boxes, b_rows: IntArray) -> tuple[IntArray, IntArray]:
    """Return offsets and shape (n, K) of the common box of each pair; some size is 0 or less where there is none."""
    a_offsets, b_offsets = a.offsets[a_rows], b.offsets[b_rows]
    stops = np.minimum(a_offsets + a.shape[a_rows], b_offsets + b.shape[b_rows])
    offsets = np.maximum(a_offsets, b_offsets)
    return offsets, stops - offsets


def volume(shape: IntArray) -> IntArray:
    """Return the number of elements of each box; 0 where a size is negative."""
    numel = np.maximum(shape[:, 0], 0)
    for dim in range(1, shape.shape[1]):
        numel *= np.maximum(shape[:, dim], 0)
    return numel


def ranges(first: IntArray, count: IntArray) -> IntArray:
    """Return ``first[i], first[i] + 1, ...``, ``count[i]`` numbers for each i, in one run."""
    before = np.cumsum(count) - count
    numbers: IntArray = np.repeat(first - before, count)
    numbers += np.arange(len(numbers))
    return numbers


def _count_below(ascending: IntArray, values: IntArray, side: Literal["left", "right"]) -> IntArray:
    """Return ``searchsorted(ascending, values, side)``; sorts the values first, for the sake of the cache."""
    if (values[1:] >= values[:-1]).all():
        return np.searchsorted(ascending, values, side=side)
    order = np.argsort(values, kind="stable")
    count = np.empty(len(values), np.int64)
    count[order] = np.searchsorted(ascending, values[order], side=side)
    return count


def _on_line(boxes: Boxes, rows: IntArray, node: IntArray, dim: IntArray, base: IntArray) -> tuple[IntArray, IntArray]:
    """Return start and stop of each row's interval along its node's dimension, on the level's line."""
    cell = rows * boxes.offsets.shape[1] + dim[node]
    start = base[node] + boxes.offsets.reshape(-1)[cell]
    return start, start + boxes.shape.reshape(-1)[cell]


def _sorted_intervals(
    rows: IntArray, node: IntArray, start: IntArray, stop: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return the columns sorted by (start, stop)."""
    order = np.argsort(start, kind="stable")  # listings are made of sorted runs, which a stable sort merges
    if _descends_within(start[order], stop[order]):
        order = np.lexsort((stop, start))
    return rows[order], node[order], start[order], stop[order]


def _descends_within(start: IntArray, stop: IntArray) -> bool:
    """Tell whether stops of equal starts are out of order."""
    return bool(((start[1:] == start[:-1]) & (stop[1:] < stop[:-1])).any())


def _layers(stops: IntArray, furthest: IntArray) -> list[npt.NDArray[np.int64] | slice]:
    """Return index sets that partition intervals sorted by start so that in each of them stops ascend too."""
    nested = np.flatnonzero(stops < furthest)
    if not len(nested):
        return [slice(None)]
    layers: list[npt.NDArray[np.int64] | slice] = [np.flatnonzero(stops == furthest)]
    while len(nested):
        inside = stops[nested] < np.maximum.accumulate(stops[nested])
        layers.append(nested[~inside])
        nested = nested[inside]
    return layers


def _dims_by_selectivity(boxes: Boxes, sizes: IntArray) -> IntArray:
    """Return, per tensor, its dimensions with the most finely divided one first."""
    extent = np.ones(sizes.shape, np.float64)
    count = np.maximum(np.bincount(boxes.tensor, minlength=len(sizes)), 1)
    for dim in range(sizes.shape[1]):
        if (sizes[:, dim] > 1).any():
            total = np.bincount(boxes.tensor, weights=boxes.shape[:, dim], minlength=len(sizes))
            extent[:, dim] = total / (count * np.maximum(sizes[:, dim], 1))
    return np.argsort(extent, axis=1, kind="stable")


def _joined(parts: list[tuple[IntArray, IntArray]]) -> tuple[IntArray, IntArray]:
    """Return the parts one after the other."""
    if len(parts) == 1:
        return parts[0]
    empty = np.zeros(0, np.int64)
    return np.concatenate([empty, *(a for a, _ in parts)]), np.concatenate([empty, *(b for _, b in parts)])
