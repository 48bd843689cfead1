"""Which of many boxes overlap: a tree of sorted intervals, one dimension a level. Pure numpy, no Python per box.

All tensors share one integer line: each has its own stretch of it, as long as its size along the dimension that the
level looks at. Boxes with the same interval share a node, so a grid of shards is searched row by row and then column
by column, never as a product; what remains in one node after the last level are equal boxes.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def take(self, rows: IntArray) -> Boxes:
        """Return the boxes of the given row numbers."""
        return Boxes(self.tensor[rows], self.offsets.take(rows, axis=0), self.shape.take(rows, axis=0))


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """Children of the nodes of one depth: distinct intervals in ascending order on the level's line.

    Within a layer stops ascend as starts do, hence what overlaps an interval is a contiguous range of children.
    ``child`` is the row of a child that is a single box, or the complement of its node number in the next level.
    """

    dim: IntArray  # per node
    base: IntArray  # per node: where its stretch of the line begins
    layers: tuple[tuple[IntArray, IntArray, IntArray], ...]  # starts, stops, child

    def overlapping(self, boxes: Boxes, query: IntArray, node: IntArray) -> tuple[IntArray, IntArray]:
        """Return (query, child) for every child of ``node`` that overlaps its query along this level's dimension."""
        start, stop = _on_line(boxes, query, node, self.dim, self.base)
        order = np.argsort(start, kind="stable")  # ascending needles are found several times faster
        start, stop = start[order], stop[order]
        found: list[tuple[IntArray, IntArray]] = []
        for starts, stops, child in self.layers:
            first, count = np.empty_like(start), np.empty_like(start)
            first[order] = at = np.searchsorted(stops, start, side="right")
            count[order] = np.searchsorted(starts, stop, side="left") - at
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
        self._crossing: list[IntArray] = []  # rows whose interval overlaps a different one of the same node
        order = _dims_by_selectivity(boxes, sizes)
        rows, node, tensor = np.arange(len(boxes)), boxes.tensor, np.arange(len(sizes))
        for depth in range(sizes.shape[1]):
            dim = order[tensor, depth]
            rows, node, tensor = self._add_level(rows, node, tensor, dim, _bases(sizes[tensor, dim]))
            if not len(rows):
                break
        self.equal = rows, node
        self._one_of_equal = rows[np.unique(node, return_index=True)[1]]

    def _add_level(
        self, rows: IntArray, node: IntArray, tensor: IntArray, dim: IntArray, base: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Divide the nodes, one per row, along ``dim``; return what remains: rows, their node, each node's tensor."""
        start, stop = _on_line(self._boxes, rows, node, dim, base)
        order, start, stop = _by_start_and_stop(start, stop)
        rows = rows[order]
        is_first = np.ones(len(rows), np.bool_)
        is_first[1:] = (start[1:] != start[:-1]) | (stop[1:] != stop[:-1])
        first = np.flatnonzero(is_first)
        shared = np.diff(first, append=len(rows)) > 1
        starts, stops, child = start[first], stop[first], rows[first]
        furthest = np.maximum.accumulate(stops)
        crosses = crossing(starts, furthest)
        remaining, next_node = rows[:0], rows[:0]
        if shared.any() or crosses.any():
            child_of_row = np.cumsum(is_first) - 1
            self._crossing.append(rows[crosses[child_of_row]])
            inside = shared[child_of_row]
            remaining = rows[inside]
            next_node = (np.cumsum(shared) - 1)[child_of_row[inside]]
            child[shared] = ~np.arange(np.count_nonzero(shared))
        layers = tuple((starts[some], stops[some], child[some]) for some in _layers(stops, furthest))
        self._levels.append(_Level(dim, base, layers))
        return remaining, next_node, tensor[node[order[first[shared]]]]

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
                return _joined([*found, (query, child)])
            found.append((query[~inner], child[~inner]))
            query, node = query[inner], ~child[inner]
        return _joined([*found, (query, self._one_of_equal[node])])

    def find_overlaps(self) -> tuple[IntArray, IntArray]:
        """Return the pairs of rows, each once, whose boxes overlap without being equal."""
        suspect = np.unique(np.concatenate([np.zeros(0, np.int64), *self._crossing]))
        query, b = self.find(self._boxes.take(suspect))
        a = suspect[query]
        _, shape = intersect(self._boxes, a, self._boxes, b)
        one, two = self._boxes.take(a), self._boxes.take(b)
        differ = (one.offsets != two.offsets) | (one.shape != two.shape)
        real = (volume(shape) > 0) & differ.any(axis=1)
        a, b = a[real], b[real]
        pairs = np.unique(np.stack([np.minimum(a, b), np.maximum(a, b)], axis=1), axis=0)
        return pairs[:, 0], pairs[:, 1]


def intersect(a: Boxes, a_rows: IntArray, b: Boxes, b_rows: IntArray) -> tuple[IntArray, IntArray]:
    """Return offsets and shape (n, K) of the common box of each pair; some size is 0 or less where there is none."""
    offsets, other = a.offsets.take(a_rows, axis=0), b.offsets.take(b_rows, axis=0)
    stops = offsets + a.shape.take(a_rows, axis=0)
    np.minimum(stops, other + b.shape.take(b_rows, axis=0), out=stops)
    np.maximum(offsets, other, out=offsets)
    stops -= offsets
    return offsets, stops


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


def _on_line(boxes: Boxes, rows: IntArray, node: IntArray, dim: IntArray, base: IntArray) -> tuple[IntArray, IntArray]:
    """Return start and stop of each row's interval along its node's dimension, on the level's line."""
    cell = rows * boxes.offsets.shape[1] + dim[node]
    start = base[node] + boxes.offsets.reshape(-1)[cell]
    return start, start + boxes.shape.reshape(-1)[cell]


def _bases(size: IntArray) -> IntArray:
    """Return where each node's stretch of the line begins."""
    if size.sum(dtype=np.float64) >= _LONGEST_LINE:
        raise CheckpointError("the tensors are too large to be planned together")
    return np.cumsum(size) - size


def _by_start_and_stop(start: IntArray, stop: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return the order of the intervals by start, then stop, and both in that order."""
    order = np.argsort(start, kind="stable")  # listings are made of sorted runs, which a stable sort merges
    ascending, along = start[order], stop[order]
    if ((ascending[1:] == ascending[:-1]) & (along[1:] < along[:-1])).any():
        order = np.lexsort((stop, start))
        ascending, along = start[order], stop[order]
    return order, ascending, along


def crossing(starts: IntArray, furthest: IntArray) -> npt.NDArray[np.bool_]:
    """Tell which of the intervals, sorted by start, overlap another; ``furthest`` is the running maximum of stops."""
    overlaps = np.zeros(len(starts), np.bool_)
    overlaps[1:] = starts[1:] < furthest[:-1]
    overlaps[:-1] |= overlaps[1:]
    return overlaps


def _layers(stops: IntArray, furthest: IntArray) -> list[IntArray | slice]:
    """Return index sets that partition intervals sorted by start so that in each of them stops ascend too."""
    nested = np.flatnonzero(stops < furthest)
    if not len(nested):
        return [slice(None)]
    layers: list[IntArray | slice] = [np.flatnonzero(stops == furthest)]
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
