"""Write output files: bytes move from file to file through one small, aligned, reused buffer.

Files are cut into segments of whole parts that can be written in any order, by any process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isal.isal_zlib import crc32

from nemo_optim_bridge.core.execute import BufferFiller
from nemo_optim_bridge.core.gather import aligned_buffer
from nemo_optim_bridge.core.manifest import ITEMSIZE, Manifest
from nemo_optim_bridge.core.output import Literal, OutputFile, Payload, Sealed
from nemo_optim_bridge.core.plan import Plan
from nemo_optim_bridge.core.store import FileStore, Store
from nemo_optim_bridge.core.team import Progress, Team, ignore
from nemo_optim_bridge.errors import OutputError

WINDOW_BYTES = 1 << 20
SEGMENT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Segment:
    """Parts ``start`` to ``stop`` of file number ``file``, which lie from byte ``offset`` on.

    ``first_payload`` is the number in the file of the first payload among them; ``is_whole`` says that there is no
    other segment of this file.
    """

    file: int
    start: int
    stop: int
    offset: int
    nbytes: int
    first_payload: int
    is_whole: bool


def cut_files(files: Sequence[OutputFile]) -> list[Segment]:
    """Return segments of about SEGMENT_BYTES that cover all files; a cut is only made before a literal."""
    segments: list[Segment] = []
    for number, file in enumerate(files):
        bounds = [(0, 0, 0)]  # part, byte offset, payload
        offset = payloads = 0
        for index, part in enumerate(file.parts):
            if isinstance(part, Literal) and offset - bounds[-1][1] >= SEGMENT_BYTES:
                bounds.append((index, offset, payloads))
            offset += part.nbytes
            payloads += isinstance(part, Payload)
        ends = [*bounds[1:], (len(file.parts), offset, payloads)]
        for (start, begin, first), (stop, end, _) in zip(bounds, ends, strict=True):
            segments.append(Segment(number, start, stop, begin, end - begin, first, len(bounds) == 1))
    return segments


def write_files(
    directory: Path, files: Sequence[OutputFile], plan: Plan, team: Team, *, fsync: bool, progress: Progress = ignore,
    open_store: Callable[[Manifest], Store] = FileStore.of,
) -> None:  # fmt: skip
    """Write all files below a new ``directory``; called by all members of a team, each of which writes its segments.

    Raises OutputError when the system refuses, CheckpointError when a source cannot be read.
    """
    segments = cut_files(files)

    def writer(report: Progress) -> SegmentWriter:
        filler = BufferFiller(plan, open_store(plan.source))
        return SegmentWriter(directory, files, filler, plan, fsync=fsync, progress=report)

    crcs = team.map(lambda report: writer(report).write, segments, [s.nbytes for s in segments], progress)
    unfinished: dict[int, list[int]] = {}
    for segment, found in zip(segments, crcs, strict=True):
        if not segment.is_whole:
            unfinished.setdefault(segment.file, []).extend(found)
    team.lead(lambda: writer(ignore).finish(unfinished, segments))


class SegmentWriter:
    """Writes segments through one reused buffer; each process has its own."""

    def __init__(
        self, directory: Path, files: Sequence[OutputFile], filler: BufferFiller, plan: Plan, *, fsync: bool,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._directory, self._files, self._filler, self._plan = directory, files, filler, plan
        self._fsync, self._progress = fsync, progress
        self._window = aligned_buffer(WINDOW_BYTES)
        self._made: set[Path] = set()

    def write(self, segment: Segment) -> list[int]:
        """Write a segment, but for sealed parts that depend on others; return the CRC-32 of its payloads.

        Raises OutputError when the system refuses.
        """
        file = self._files[segment.file]
        path = self._directory / file.path
        crcs: list[int] = []
        try:
            if path.parent not in self._made:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._made.add(path.parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if segment.is_whole else 0)
            descriptor = os.open(path, flags, 0o666)
            try:
                position = segment.offset
                for chunk in self._chunks(file, segment, crcs):
                    _write_at(descriptor, chunk, position)
                    position += len(chunk)
                    self._progress(len(chunk))
                if self._fsync and segment.is_whole:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise OutputError(f"cannot be written: {error.strerror}", path=path) from error
        return crcs

    def _chunks(self, file: OutputFile, segment: Segment, crcs: list[int]) -> Iterator[memoryview]:
        """Yield a segment's bytes in order, in runs of the window's size where possible; collect payloads' CRCs."""
        window, used = self._window, 0
        view = window.data
        needs_crc = any(isinstance(part, Sealed) for part in file.parts)
        for part in file.parts[segment.start : segment.stop]:
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
                        crc = crc32(out.data, crc)
                    done += size
                    used += size
                    if done < part.nbytes:
                        yield view[:used]
                        used = 0
                crcs.append(crc)
                continue
            data = memoryview(_bytes_of(part, segment, crcs))
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

    def finish(self, crcs: Mapping[int, list[int]], segments: Sequence[Segment]) -> None:
        """Write the sealed parts of files that are in several segments, and sync those files.

        Args:
            crcs: of all payloads of each such file, by file number.
        """
        for number, found in crcs.items():
            file = self._files[number]
            path = self._directory / file.path
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                try:
                    for offset, part in _deferred(file, [s for s in segments if s.file == number]):
                        _write_at(descriptor, memoryview(part.seal(found)), offset)
                    if self._fsync:
                        os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise OutputError(f"cannot be written: {error.strerror}", path=path) from error


def _bytes_of(part: Literal | Sealed, segment: Segment, crcs: Sequence[int]) -> bytes:
    """Return a part's bytes; zeros for a sealed one that depends on other segments."""
    if isinstance(part, Literal):
        return part.data
    if not _is_deferred(part, segment):
        return part.seal([*([0] * segment.first_payload), *crcs])
    return bytes(part.nbytes)


def _is_deferred(part: Sealed, segment: Segment) -> bool:
    return not segment.is_whole and part.first_payload < segment.first_payload


def _deferred(file: OutputFile, segments: Sequence[Segment]) -> Iterator[tuple[int, Sealed]]:
    for segment in segments:
        offset = segment.offset
        for part in file.parts[segment.start : segment.stop]:
            if isinstance(part, Sealed) and _is_deferred(part, segment):
                yield offset, part
            offset += part.nbytes


def _write_at(descriptor: int, data: memoryview, position: int) -> None:
    while len(data):
        count = os.pwrite(descriptor, data, position)
        data, position = data[count:], position + count
