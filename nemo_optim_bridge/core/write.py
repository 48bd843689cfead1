"""Write output files: bytes move from file to file through one small, aligned, reused buffer.

Files are cut into segments of whole parts that can be written in any order, by any process.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from isal.isal_zlib import crc32

from nemo_optim_bridge.core.execute import BufferFiller
from nemo_optim_bridge.core.gather import aligned_buffer
from nemo_optim_bridge.core.manifest import ITEMSIZE, Manifest
from nemo_optim_bridge.core.output import Literal, OutputFile, Part, Payload, Sealed
from nemo_optim_bridge.core.plan import Plan
from nemo_optim_bridge.core.store import FileStore, Store
from nemo_optim_bridge.core.team import Progress, Team, ignore
from nemo_optim_bridge.errors import OutputError

WINDOW_BYTES = 1 << 20
SEGMENT_BYTES = 64 << 20
_ALIGNMENT = 64  # of torch's records; unaligned copies are far slower


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
    writers: Sequence[range] | None = None, open_store: Callable[[Manifest], Store] = FileStore.of,
) -> None:  # fmt: skip
    """Write files below a new ``directory``; every rank of a team calls this with the files that it has a part in.

    Args:
        plan: fills the buffers of ``files``.
        writers: by file, the ranks that write it, each its share of the segments, as ``share_files`` tells them. None:
            ``files`` are all there are, the same on all ranks.

    Raises OutputError when the system refuses, CheckpointError when a source cannot be read.
    """
    segments = cut_files(files)
    ranks = share_files([file.nbytes for file in files], team.num_ranks) if writers is None else writers
    mine = list(_own_segments(segments, ranks, team.rank))

    def writer(report: Progress) -> SegmentWriter:
        filler = BufferFiller(plan, open_store(plan.source))
        return SegmentWriter(directory, files, filler, plan, fsync=fsync, progress=report)

    def write() -> dict[tuple[str, int], list[int]]:
        crcs = team.local.map(lambda report: writer(report).write, mine, [s.nbytes for s in mine], progress)
        return {
            (files[segment.file].path, segment.start): found
            for segment, found in zip(mine, crcs, strict=True)
            if not segment.is_whole
        }

    found = {place: crcs for share in team.gather(write) for place, crcs in share.items()}

    def finish() -> None:
        unfinished: dict[int, list[int]] = {}
        for segment in segments:
            if not segment.is_whole and ranks[segment.file][0] == team.rank:
                unfinished.setdefault(segment.file, []).extend(found[files[segment.file].path, segment.start])
        if unfinished:
            writer(ignore).finish(unfinished, segments)

    team.gather(finish)


def share_files(nbytes: Sequence[int], num_ranks: int) -> list[range]:
    """Return the ranks that write each of some files, which lie one after the other on a line cut into equal parts.

    A file is shared only if it is larger than a segment.
    """
    total = max(sum(nbytes), 1)
    writers, start = [], 0
    for size in nbytes:
        first = min(start * num_ranks // total, num_ranks - 1)
        last = min(max(start + size - 1, start) * num_ranks // total, num_ranks - 1)
        writers.append(range(first, last + 1 if size > SEGMENT_BYTES else first + 1))
        start += size
    return writers


def _own_segments(segments: Sequence[Segment], writers: Sequence[range], rank: int) -> Iterator[Segment]:
    """Yield the segments that ``rank`` writes: of a file with several writers, each takes a run of them."""
    count = Counter(segment.file for segment in segments)
    seen: Counter[int] = Counter()
    for segment in segments:
        ranks = writers[segment.file]
        if ranks[seen[segment.file] * len(ranks) // count[segment.file]] == rank:
            yield segment
        seen[segment.file] += 1


class SegmentWriter:
    """Writes segments through one reused buffer; each process has its own."""

    def __init__(
        self, directory: Path, files: Sequence[OutputFile], filler: BufferFiller, plan: Plan, *, fsync: bool,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._directory, self._files, self._filler, self._plan = directory, files, filler, plan
        self._fsync, self._progress = fsync, progress
        self._window = aligned_buffer(WINDOW_BYTES + _ALIGNMENT)
        self._made: set[Path] = set()

    def write(self, segment: Segment) -> list[int]:
        """Write a segment, but for sealed parts that depend on others; return the CRC-32 of its payloads.

        Raises OutputError when the system refuses.
        """
        file = self._files[segment.file]
        path = self._directory / file.path
        crcs = [0] * segment.first_payload
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
                if self._fsync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise OutputError(f"cannot be written: {error.strerror}", path=path) from error
        return crcs[segment.first_payload :]

    def _chunks(self, file: OutputFile, segment: Segment, crcs: list[int]) -> Iterator[memoryview]:
        """Yield a segment's bytes in order, in runs of the window's size where possible; collect payloads' CRCs.

        ``crcs`` begins with those of the payloads before this segment.
        """
        needs_crc = any(isinstance(part, Sealed) for part in file.parts)
        position = segment.offset
        for parts in _runs(file.parts[segment.start : segment.stop]):
            first = parts[0]
            if sum(part.nbytes for part in parts) <= WINDOW_BYTES:
                chunk = self._fill(parts, position % _ALIGNMENT, segment, crcs, needs_crc)
                position += len(chunk)
                yield chunk
            elif isinstance(first, Payload):
                position += first.nbytes
                yield from self._stream(first, crcs, needs_crc)
            else:
                position += first.nbytes
                yield memoryview(_bytes_of(first, segment, crcs))

    def _fill(
        self, parts: Sequence[Part], shift: int, segment: Segment, crcs: list[int], needs_crc: bool
    ) -> memoryview:
        """Return the bytes of parts that the window holds together; what is aligned in the file is so in memory."""
        window = self._window[shift:]
        view = window.data
        ends = list(accumulate(part.nbytes for part in parts))
        payloads = [(part.buffer, end - part.nbytes) for part, end in zip(parts, ends, strict=True)
                    if isinstance(part, Payload)]  # fmt: skip
        if payloads:
            self._filler.fill_whole(payloads[0][0], [start for _, start in payloads], window)
        for part, end in zip(parts, ends, strict=True):
            start = end - part.nbytes
            if isinstance(part, Payload):
                crcs.append(crc32(view[start:end]) if needs_crc else 0)
            else:
                view[start:end] = _bytes_of(part, segment, crcs)
        return view[: ends[-1]]

    def _stream(self, part: Payload, crcs: list[int], needs_crc: bool) -> Iterator[memoryview]:
        """Yield the bytes of a payload that is larger than the window."""
        crc, step = 0, self._step(part)
        for start in range(0, part.nbytes, step):
            out = self._window[: min(step, part.nbytes - start)]
            self._filler.fill(part.buffer, start, out)
            if needs_crc:
                crc = crc32(out.data, crc)
            yield out.data
        crcs.append(crc)

    def _step(self, part: Payload) -> int:
        """Return how many bytes of a payload to fill at a time: whole rows of interleaved pieces where they fit."""
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


def _runs(parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
    """Yield parts in runs that the window holds, their buffers numbered one after the other, or one that is larger."""
    start, nbytes, buffer = 0, 0, None
    for index, part in enumerate(parts):
        follows = not isinstance(part, Payload) or buffer is None or part.buffer == buffer + 1
        if index > start and (nbytes + part.nbytes > WINDOW_BYTES or not follows):
            yield parts[start:index]
            start, nbytes, buffer = index, 0, None
        nbytes += part.nbytes
        if isinstance(part, Payload):
            buffer = part.buffer
    if parts:
        yield parts[start:]


def _bytes_of(part: Literal | Sealed, segment: Segment, crcs: Sequence[int]) -> bytes:
    """Return a part's bytes; zeros for a sealed one that depends on other segments."""
    if isinstance(part, Literal):
        return part.data
    return bytes(part.nbytes) if _is_deferred(part, segment) else part.seal(crcs)


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
