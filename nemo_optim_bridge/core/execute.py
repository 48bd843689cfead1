"""Run a plan into the bytes of its target's buffers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.gather import Gatherer, unsigned, window_boxes
from nemo_optim_bridge.core.manifest import DTYPES, ITEMSIZE, IntArray
from nemo_optim_bridge.core.plan import Plan
from nemo_optim_bridge.core.store import Store

_BATCH_PIECES = 1 << 13
_MAX_BATCHES = 4


class BufferFiller:
    """Fills ranges of the target's buffers with what the plan copies there, and zeros elsewhere."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self._plan = plan
        self._store = store
        self._gatherer = Gatherer(store)
        self._batches: list[_Batch] = []

    def row_elements(self, buffer: int) -> int:
        """Return the outermost stride of interleaved pieces: windows of whole rows need the fewest reads."""
        batch, pieces = self._pieces(buffer)
        interleaved = pieces[~batch.is_flat[pieces]]
        return int(batch.row[interleaved].max()) if len(interleaved) else 1

    def fill(self, buffer: int, start: int, out: npt.NDArray[np.uint8]) -> None:
        """Fill ``out`` with the bytes of a target buffer from byte ``start`` on; bounds are multiples of an element."""
        batch, pieces = self._pieces(buffer)
        run = self._plan.target.buffers[buffer]
        itemsize = ITEMSIZE[run.dtype]
        first, last = start // itemsize, (start + len(out)) // itemsize
        if batch.numel[pieces].sum() * itemsize != run.nbytes:
            out[:] = 0
        for piece in pieces[(batch.target_offset[pieces] < last) & (batch.target_stop[pieces] > first)].tolist():
            if batch.is_flat[piece]:
                begin = int(batch.target_offset[piece])
                a, b = max(begin, first), min(int(batch.target_stop[piece]), last)
                offset = (int(batch.source_offset[piece]) + a - begin) * itemsize
                view = out.data[(a - first) * itemsize : (b - first) * itemsize]
                self._store.read_into(int(batch.source_buffer[piece]), offset, view)
            else:
                self._fill_strided(batch, piece, out.view(unsigned(run.dtype)), run.dtype, first, last)

    def fill_whole(self, first: int, starts: IntArray, out: npt.NDArray[np.uint8]) -> None:
        """Fill whole target buffers, numbered from ``first`` on: number ``first + i`` goes to byte ``starts[i]``."""
        table = self._plan.target.buffers[first : first + len(starts)]
        itemsize = table.itemsize()
        batch, pieces = self._pieces(first, first + len(starts) - 1)
        owner = batch.target_buffer[pieces] - first
        covered = np.bincount(owner, batch.numel[pieces], len(starts)) * itemsize
        for gap in np.flatnonzero(covered != table.nbytes).tolist():
            out[starts[gap] : starts[gap] + table.nbytes[gap]] = 0
        start = starts[owner] + batch.target_offset[pieces] * itemsize[owner]
        flat = batch.is_flat[pieces]
        view, read = out.data, self._store.read_into
        offset, stop = batch.source_offset[pieces] * itemsize[owner], start + batch.numel[pieces] * itemsize[owner]
        columns = batch.source_buffer[pieces], offset, start, stop
        for buffer, at, a, b in zip(*(column[flat].tolist() for column in columns), strict=True):
            read(buffer, at, view[a:b])
        strided = pieces[~flat].tolist(), start[~flat].tolist(), table.dtype[owner[~flat]].tolist()
        for piece, at, dtype in zip(*strided, strict=True):
            shape, source_stride, target_stride = batch.strides(piece)
            kind = unsigned(DTYPES[dtype])
            box = np.ndarray(shape, kind, view, at, tuple(s * kind.itemsize for s in target_stride))
            self._gather(batch, piece, box, DTYPES[dtype], int(batch.source_offset[piece]), source_stride)

    def _fill_strided(
        self, batch: _Batch, piece: int, out: npt.NDArray[Any], dtype: str, first: int, last: int
    ) -> None:  # fmt: skip
        shape, source_stride, target_stride = batch.strides(piece)
        base = int(batch.target_offset[piece])
        strides = tuple(s * out.itemsize for s in target_stride)
        for offsets, size in window_boxes(shape, target_stride, base, first, last):
            target = base + sum(o * s for o, s in zip(offsets, target_stride, strict=True)) - first
            source = int(batch.source_offset[piece]) + sum(o * s for o, s in zip(offsets, source_stride, strict=True))
            box = np.ndarray(size, out.dtype, out.data, target * out.itemsize, strides)
            self._gather(batch, piece, box, dtype, source, source_stride)

    def _gather(
        self, batch: _Batch, piece: int, out: npt.NDArray[Any], dtype: str, offset: int, stride: tuple[int, ...]
    ) -> None:  # fmt: skip
        buffer = int(batch.source_buffer[piece])
        self._gatherer.gather(out, dtype, buffer, DTYPES[self._plan.source.buffers.dtype[buffer]], offset, stride)

    def _pieces(self, first: int, last: int | None = None) -> tuple[_Batch, IntArray]:
        """Return the batch that holds the pieces of buffers ``first`` to ``last`` (included), and their rows in it."""
        starts = self._plan.buffer_starts
        start, stop = int(starts[first]), int(starts[(first if last is None else last) + 1])
        for batch in self._batches:
            if batch.start <= start and stop <= batch.stop:
                break
        else:
            batch = _Batch(self._plan, start, min(len(self._plan), max(stop, start + _BATCH_PIECES)))
            self._batches = [batch, *self._batches[: _MAX_BATCHES - 1]]
        return batch, np.arange(start - batch.start, stop - batch.start)


class _Batch:
    """Addresses of a run of pieces, computed together."""

    def __init__(self, plan: Plan, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        rows = slice(start, stop)
        source, target = plan.source.shards, plan.target.shards
        ndim = plan.shape.shape[1]
        self.shape = plan.shape[rows]
        self.source_stride = _leading(source.stride[plan.source_rows[rows]], ndim)
        self.target_stride = _leading(target.stride[plan.target_rows[rows]], ndim)
        self.source_offset = plan.source_offsets(rows)
        self.target_offset = plan.target_offsets(rows)
        self.source_buffer = source.buffer[plan.source_rows[rows]]
        self.target_buffer = target.buffer[plan.target_rows[rows]]
        self.target_stop = self.target_offset + ((self.shape - 1) * self.target_stride).sum(axis=1) + 1
        self.numel = self.shape.prod(axis=1)
        same = plan.source.buffers.dtype[self.source_buffer] == plan.target.buffers.dtype[self.target_buffer]
        flat_source = _is_contiguous(self.shape, self.source_stride)
        self.is_flat = same & flat_source & _is_contiguous(self.shape, self.target_stride)
        self.row = np.where(self.shape > 1, self.target_stride, 1).max(axis=1, initial=1)

    def strides(self, piece: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return a piece's shape and both strides, dimensions in the order of the target's addresses, without ones."""
        columns = self.shape[piece], self.source_stride[piece], self.target_stride[piece]
        return _in_order(*(tuple(column.tolist()) for column in columns))


@lru_cache(maxsize=1 << 10)  # layers repeat each other
def _in_order(
    shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    dims = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -target[d])
    return tuple(shape[d] for d in dims), tuple(source[d] for d in dims), tuple(target[d] for d in dims)


def _leading(columns: IntArray, ndim: int) -> IntArray:
    missing = ndim - columns.shape[1]
    return np.pad(columns, ((0, 0), (missing, 0))) if missing else columns


def _is_contiguous(shape: IntArray, stride: IntArray) -> npt.NDArray[np.bool_]:
    expected = np.ones(len(shape), np.int64)
    result = np.ones(len(shape), np.bool_)
    for dim in range(shape.shape[1] - 1, -1, -1):
        result &= (shape[:, dim] == 1) | (stride[:, dim] == expected)
        expected *= shape[:, dim]
    return result
