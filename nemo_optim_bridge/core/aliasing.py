"""Whether shards of a manifest share storage: two views of a buffer that hold a common element of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.boxes import Boxes, BoxIndex, IntArray, crossing, ranges
from nemo_optim_bridge.core.manifest import Manifest, ShardTable
from nemo_optim_bridge.errors import BridgeError, ContradictionError

_CHUNK = 1 << 10  # views compared with all others at a time


def shared_storage(manifest: Manifest, rows: IntArray) -> Iterator[BridgeError]:
    """Yield an error for every shard of ``rows`` that is stored twice in itself, and every two that share an element.

    ``rows`` are sorted by (buffer, storage offset). Views in a row, one after the other, cost one comparison each;
    only those whose extents interleave, as column blocks do, are compared in pairs.
    """
    table = manifest.shards
    extent, row_major = _extents(table, rows)
    odd = rows[~row_major]
    for row in odd[_folds(table.shape[odd], table.stride[odd])].tolist():
        yield _error(manifest, "elements of the shard share storage", row)
    for a, b in _interleaved(manifest, rows, extent):
        meets = _meets(table, a, b)
        for one, two in zip(a[meets].tolist(), b[meets].tolist(), strict=True):
            other = table[two]
            yield _error(manifest, f"shares storage with {other.key} {other.region} of rank {other.rank}", one)


def _error(manifest: Manifest, problem: str, row: int) -> ContradictionError:
    shard = manifest.shards[row]
    path = manifest.buffers[shard.buffer].file
    return ContradictionError(problem, path=path, key=shard.key, region=shard.region, rank=shard.rank)


def _extents(table: ShardTable, rows: IntArray) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Return the distance from each view's first element to past its last, and whether its strides descend."""
    shape, stride = table.shape.take(rows, axis=0), table.stride.take(rows, axis=0)
    span = np.zeros(len(rows), np.int64)
    row_major = np.ones(len(rows), np.bool_)
    for dim in reversed(range(shape.shape[1])):
        row_major &= (shape[:, dim] == 1) | (stride[:, dim] > span)
        span += (shape[:, dim] - 1) * stride[:, dim]
    return span + 1, row_major


def _folds(shape: IntArray, stride: IntArray) -> npt.NDArray[np.bool_]:
    """Tell for which views a stride does not reach past all that the smaller strides span."""
    order = np.argsort(np.where(shape > 1, stride, 0), axis=1)
    span = np.zeros(len(shape), np.int64)
    folds = np.zeros(len(shape), np.bool_)
    for dim in order.T:
        size, step = (np.take_along_axis(x, dim[:, None], 1)[:, 0] for x in (shape, stride))
        folds |= (size > 1) & (step <= span)
        span += (size - 1) * step
    return folds


def _interleaved(manifest: Manifest, rows: IntArray, extent: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield the pairs of rows whose extents in their buffer overlap; at least one of each set of equal ones."""
    table = manifest.shards
    capacity = manifest.buffers.nbytes
    start = table.storage_offset[rows]
    place = (np.cumsum(capacity) - capacity)[table.buffer[rows]] + start
    suspect = crossing(place, np.maximum.accumulate(place + extent))
    if not suspect.any():
        return
    rows = rows[suspect]
    views = Boxes(table.buffer[rows], start[suspect, None], extent[suspect, None])
    index = BoxIndex(views, capacity[:, None])
    for first in range(0, len(rows), _CHUNK):
        query, found = index.find(views.take(np.arange(first, min(first + _CHUNK, len(rows)))))
        query += first
        once = query > found  # what equals a view found before has a greater number than it
        yield rows[found[once]], rows[query[once]]


def _meets(table: ShardTable, a: IntArray, b: IntArray) -> npt.NDArray[np.bool_]:
    """Tell which pairs of views have a common element.

    That is so if sum((i_d - j_d) * stride_d) over the dimensions can be the distance between the two, with i in the
    first view's shape and j in the second's. Solved greatest stride first: what the smaller ones span leaves few
    choices, mostly one or two, at each.
    """
    a_size, b_size, stride = _common_dims(table, a, b)
    reach_a = (a_size - 1) * stride
    reach_b = (b_size - 1) * stride
    left_a = np.cumsum(reach_a[:, ::-1], axis=1)[:, ::-1] - reach_a  # what the dims after this one can add
    left_b = np.cumsum(reach_b[:, ::-1], axis=1)[:, ::-1] - reach_b
    pair = np.arange(len(a))
    distance = table.storage_offset[b] - table.storage_offset[a]
    for dim in range(stride.shape[1]):
        step = np.maximum(stride[pair, dim], 1)
        low = np.maximum(-(-(distance - left_a[pair, dim]) // step), 1 - b_size[pair, dim])
        high = np.minimum((distance + left_b[pair, dim]) // step, a_size[pair, dim] - 1)
        count = np.maximum(high - low + 1, 0)
        choice = ranges(low, count)
        distance = np.repeat(distance, count) - choice * np.repeat(step, count)
        pair = np.repeat(pair, count)
    meets = np.zeros(len(a), np.bool_)
    meets[pair[distance == 0]] = True
    return meets


def _common_dims(table: ShardTable, a: IntArray, b: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return sizes of both views along common strides, greatest first; a view has size 1 along the other's own."""
    a_size, b_size, a_stride, b_stride = table.shape[a], table.shape[b], table.stride[a], table.stride[b]
    apart = (a_size > 1) & (b_size > 1) & (a_stride != b_stride)
    size_a = np.concatenate([a_size, np.ones_like(a_size)], axis=1)
    size_b = np.concatenate([np.where(apart, 1, b_size), np.where(apart, b_size, 1)], axis=1)
    stride = np.concatenate([np.where(a_size > 1, a_stride, b_stride), np.where(apart, b_stride, 0)], axis=1)
    stride[(size_a == 1) & (size_b == 1)] = 0
    order = np.argsort(-stride, axis=1, kind="stable")
    return (
        np.take_along_axis(size_a, order, 1),
        np.take_along_axis(size_b, order, 1),
        np.take_along_axis(stride, order, 1),
    )
