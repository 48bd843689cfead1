"""Run a plan: bytes move from file to file through one small, aligned, reused buffer."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.gather import Gatherer, aligned_buffer, unsigned, window_boxes
from nemo_optim_bridge.core.manifest import ITEMSIZE
from nemo_optim_bridge.core.output import Literal, OutputFile, Payload
from nemo_optim_bridge.core.plan import Plan
from nemo_optim_bridge.core.store import Store
from nemo_optim_bridge.errors import OutputError

WINDOW_BYTES = 1 << 20
_BATCH_PIECES = 1 << 15

Progress = Callable[[int], None]


class BufferFiller:
    """Fills ranges of the target's buffers with what the plan copies there, and zeros elsewhere."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self._plan = plan
        self._store = store
        self._gatherer = Gatherer(store)
        self._batch = _Batch(plan, 0, 0)

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

    def _fill_strided(
        self, batch: _Batch, piece: int, out: npt.NDArray[Any], dtype: str, first: int, last: int
    ) -> None:  # fmt: skip
        shape, source_stride, target_stride = batch.strides(piece)
        base = int(batch.target_offset[piece])
        buffer = int(batch.source_buffer[piece])
        source_dtype = self._plan.source.buffers[buffer].dtype
        for offsets, size in window_boxes(shape, target_stride, base, first, last):
            target = base + sum(o * s for o, s in zip(offsets, target_stride, strict=True)) - first
            source = int(batch.source_offset[piece]) + sum(o * s for o, s in zip(offsets, source_stride, strict=True))
            strides = tuple(s * out.itemsize for s in target_stride)
            view = np.ndarray(size, out.dtype, out.data, target * out.itemsize, strides)
            self._gatherer.gather(view, dtype, buffer, source_dtype, source, source_stride)

    def _pieces(self, buffer: int) -> tuple[_Batch, npt.NDArray[np.int64]]:
        """Return the batch that holds a buffer's pieces, and their rows in it."""
        rows = self._plan.pieces_of(buffer)
        if not (self._batch.start <= rows.start and rows.stop <= self._batch.stop):
            stop = min(len(self._plan), max(rows.stop, rows.start + _BATCH_PIECES))
            self._batch = _Batch(self._plan, rows.start, stop)
        return self._batch, np.arange(rows.start - self._batch.start, rows.stop - self._batch.start)


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
        target_buffer = target.buffer[plan.target_rows[rows]]
        self.target_stop = self.target_offset + ((self.shape - 1) * self.target_stride).sum(axis=1) + 1
        self.numel = self.shape.prod(axis=1)
        names = sorted(ITEMSIZE)
        source_dtype = np.array([names.index(b.dtype) for b in plan.source.buffers], np.int64)
        target_dtype = np.array([names.index(b.dtype) for b in plan.target.buffers], np.int64)
        same = source_dtype[self.source_buffer] == target_dtype[target_buffer]
        flat_source = _is_contiguous(self.shape, self.source_stride)
        self.is_flat = same & flat_source & _is_contiguous(self.shape, self.target_stride)
        self.row = np.where(self.shape > 1, self.target_stride, 1).max(axis=1, initial=1)

    def strides(self, piece: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return a piece's shape and both strides, dimensions in the order of the target's addresses, without ones."""
        shape, source, target = (
            columns[piece].tolist() for columns in (self.shape, self.source_stride, self.target_stride)
        )
        dims = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -target[d])
        return (
            tuple(shape[d] for d in dims),
            tuple(source[d] for d in dims),
            tuple(target[d] for d in dims),
        )


def _leading(columns: npt.NDArray[np.int64], ndim: int) -> npt.NDArray[np.int64]:
    missing = ndim - columns.shape[1]
    return np.pad(columns, ((0, 0), (missing, 0))) if missing else columns


def _is_contiguous(shape: npt.NDArray[np.int64], stride: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    expected = np.ones(len(shape), np.int64)
    result = np.ones(len(shape), np.bool_)
    for dim in range(shape.shape[1] - 1, -1, -1):
        result &= (shape[:, dim] == 1) | (stride[:, dim] == expected)
        expected *= shape[:, dim]
    return result


class FileWriter:
    """Writes output files front to back through one reused buffer."""

    def __init__(self, filler: BufferFiller, plan: Plan, *, fsync: bool, progress: Progress | None = None) -> None:
        self._filler, self._plan, self._fsync = filler, plan, fsync
        self._progress = progress or (lambda num_bytes: None)
        self._window = aligned_buffer(WINDOW_BYTES)

    def write(self, directory: Path, files: Sequence[OutputFile]) -> None:
        """Create all files below ``directory``; raises OutputError when the system refuses."""
        made: set[Path] = set()
        for file in files:
            path = directory / file.path
            try:
                if path.parent not in made:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    made.add(path.parent)
                self._write_file(path, file)
            except OSError as error:
                raise OutputError(f"cannot be written: {error.strerror}", path=path) from error

    def _write_file(self, path: Path, file: OutputFile) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for chunk in self._chunks(file):
                self._progress(len(chunk))
                while len(chunk):
                    chunk = chunk[os.write(descriptor, chunk) :]
            if self._fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _chunks(self, file: OutputFile) -> Iterator[memoryview]:
        """Yield a file's bytes in order, in runs of the window's size where possible."""
        window, used = self._window, 0
        view = window.data
        crcs: list[int] = []
        needs_crc = any(not isinstance(part, Literal | Payload) for part in file.parts)
        for part in file.parts:
            if isinstance(part, Payload):
                if part.nbytes > WINDOW_BYTES - used:
                    yield view[:used]
                    used = 0
                crc, done = 0, 0
                step = self._step(part)
                while done < part.nbytes:
                    size = min(step, part.nbytes - done)
                    out = window[used : used + size]
                    self._filler.fill(part.buffer, done, out)
                    if needs_crc:
                        crc = zlib.crc32(out.data, crc)
                    done += size
                    used += size
                    if done < part.nbytes:
                        yield view[:used]
                        used = 0
                crcs.append(crc)
                continue
            data = memoryview(part.data if isinstance(part, Literal) else part.seal(crcs))
            while len(data):
                size = min(len(data), WINDOW_BYTES - used)
                view[used : used + size] = data[:size]
                data, used = data[size:], used + size
                if used == WINDOW_BYTES:
                    yield view[:used]
                    used = 0
        yield view[:used]

    def _step(self, part: Payload) -> int:
        """Return how many bytes of a payload to fill at a time: whole rows of interleaved pieces where they fit."""
        if part.nbytes <= WINDOW_BYTES:
            return max(part.nbytes, 1)
        row = self._filler.row_elements(part.buffer) * ITEMSIZE[self._plan.target.buffers[part.buffer].dtype]
        return WINDOW_BYTES // row * row if row <= WINDOW_BYTES else WINDOW_BYTES
