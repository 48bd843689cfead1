"""Write output files: bytes move from file to file through one small, aligned, reused buffer.

Files are cut into segments that can be written in any order, by any process; small files are written several at a time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from nemo_optim_bridge.core.execute import BufferFiller
from nemo_optim_bridge.core.gather import aligned_buffer
from nemo_optim_bridge.core.manifest import ITEMSIZE, Manifest
from nemo_optim_bridge.core.output import OutputFile
from nemo_optim_bridge.core.plan import Plan
from nemo_optim_bridge.core.store import FileStore, Store
from nemo_optim_bridge.core.team import Progress, Team, ignore
from nemo_optim_bridge.errors import OutputError

WINDOW_BYTES = 1 << 20
SEGMENT_BYTES = 64 << 20
_ALIGNMENT = 64  # of torch's records; unaligned copies are far slower

Crcs = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes ``begin`` to ``end`` of file number ``file``, in which its payloads ``start`` to ``stop`` lie.

    ``is_whole`` says that there is no other segment of this file.
    """

    file: int
    start: int
    stop: int
    begin: int
    end: int
    is_whole: bool

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.end - self.begin


def cut_files(files: Sequence[OutputFile]) -> list[Segment]:
    """Return segments of about SEGMENT_BYTES that cover all files; a cut is only made before a payload."""
    segments: list[Segment] = []
    for number, file in enumerate(files):
        bounds = [(0, 0)]  # payload, byte
        if file.nbytes > SEGMENT_BYTES:
            for payload, position in enumerate(file.layout.starts[1:].tolist(), 1):
                if position - bounds[-1][1] >= SEGMENT_BYTES:
                    bounds.append((payload, position))
        ends = [*bounds[1:], (len(file.layout.sizes), file.nbytes)]
        for (start, begin), (stop, end) in zip(bounds, ends, strict=True):
            segments.append(Segment(number, start, stop, begin, end, len(bounds) == 1))
    return segments


def write_files(
    directory: Path, files: Sequence[OutputFile], plan: Plan, team: Team, *, fsync: bool, progress: Progress = ignore,
    writers: Sequence[range] | None = None, open_store: Callable[[Manifest], Store] = FileStore.of,
) -> None:  # fmt: skip
    """Write files below a new, empty ``directory``; every rank of a team calls this with those that it has a part in.

    Args:
        plan: fills the buffers of ``files``.
        writers: by file, the ranks that write it, each its share of the segments, as ``share_files`` tells them. None:
            ``files`` are all there are, the same on all ranks.

    Raises OutputError when the system refuses, CheckpointError when a source cannot be read.
    """
    segments = cut_files(files)
    ranks = share_files([file.nbytes for file in files], team.num_ranks) if writers is None else writers
    mine = list(_bundles(_own_segments(segments, ranks, team.rank), files))

    def writer(report: Progress) -> SegmentWriter:
        filler = BufferFiller(plan, open_store(plan.source))
        return SegmentWriter(directory, files, filler, plan, fsync=fsync, progress=report)

    def write() -> dict[tuple[str, int], Crcs]:
        sizes = [sum(segment.nbytes for segment in bundle) for bundle in mine]
        crcs = team.local.map(lambda report: writer(report).write, mine, sizes, progress)
        return {
            (files[segment.file].path, segment.start): found
            for (segment, *_), found in zip(mine, crcs, strict=True)
            if found is not None
        }

    found = {place: crcs for share in team.gather(write) for place, crcs in share.items()}

    def finish() -> None:
        unfinished: dict[int, list[Crcs]] = {}
        for segment in segments:
            if not segment.is_whole and ranks[segment.file][0] == team.rank:
                unfinished.setdefault(segment.file, []).append(found[files[segment.file].path, segment.start])
        if unfinished:
            writer(ignore).finish({number: np.concatenate(crcs) for number, crcs in unfinished.items()})

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


def _bundles(segments: Iterable[Segment], files: Sequence[OutputFile]) -> Iterator[list[Segment]]:
    """Yield segments one by one, but small files together that the window holds and whose buffers follow each other."""
    bundle: list[Segment] = []
    nbytes = buffer = 0
    for segment in segments:
        first = files[segment.file].first_buffer + segment.start
        nbytes += _aligned(segment.nbytes)
        follows = nbytes <= WINDOW_BYTES and first == buffer
        if bundle and not (bundle[0].is_whole and segment.is_whole and follows):
            yield bundle
            bundle, nbytes = [], _aligned(segment.nbytes)
        bundle.append(segment)
        buffer = first + segment.stop - segment.start
    if bundle:
        yield bundle


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class _Run(NamedTuple):
    """What of a file goes to byte ``base`` of the window: from byte ``begin`` on, payloads ``start`` to ``stop``.

    The text after the last of them goes with it, and the text before the first when ``begin`` is 0.
    """

    file: OutputFile
    start: int
    stop: int
    begin: int
    base: int


class SegmentWriter:
    """Writes segments through one reused buffer; each process has its own."""

    def __init__(
        self, directory: Path, files: Sequence[OutputFile], filler: BufferFiller, plan: Plan, *, fsync: bool,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._directory, self._files, self._filler, self._plan = str(directory), files, filler, plan
        self._fsync, self._progress = fsync, progress
        self._window = aligned_buffer(WINDOW_BYTES + _ALIGNMENT)
        self._made = {""}

    def write(self, bundle: Sequence[Segment]) -> Crcs | None:
        """Write a segment, or several whole files that the window holds together.

        Returns the CRC-32 of the payloads of a segment that is no whole file, for ``finish``.

        Raises OutputError when the system refuses.
        """
        if len(bundle) > 1:
            self._write_together([self._files[segment.file] for segment in bundle])
            return None
        (segment,) = bundle
        file = self._files[segment.file]
        crcs = np.zeros(len(file.layout.sizes), np.uint32)
        with self._opened(file, os.O_CREAT | (os.O_EXCL if segment.is_whole else 0)) as descriptor:
            position = segment.begin
            for chunk in self._chunks(file, segment, crcs):
                _write_at(descriptor, chunk, position)
                position += len(chunk)
                self._progress(len(chunk))
        return None if segment.is_whole else crcs[segment.start : segment.stop]

    def _write_together(self, files: Sequence[OutputFile]) -> None:
        runs, base = [], 0
        for file in files:
            runs.append(_Run(file, 0, len(file.layout.sizes), 0, base))
            base += _aligned(file.nbytes)
        self._fill(runs, [np.zeros(run.stop, np.uint32) for run in runs])
        for file, _, _, _, base in runs:
            with self._opened(file, os.O_CREAT | os.O_EXCL) as descriptor:
                _write_at(descriptor, self._window.data[base : base + file.nbytes], 0)
        self._progress(sum(file.nbytes for file in files))

    def _chunks(self, file: OutputFile, segment: Segment, crcs: Crcs) -> Iterator[memoryview]:
        """Yield a segment's bytes in order, in runs of the window's size where possible; collect payloads' CRCs."""
        starts = file.layout.starts[segment.start : segment.stop]
        bounds = np.concatenate(
            ([segment.begin], starts, [segment.end])
        )  # text, then payloads with the text after them
        at = 0
        while at <= len(starts):
            begin, payload = int(bounds[at]), segment.start + max(at - 1, 0)
            stop = int(np.searchsorted(bounds, begin + WINDOW_BYTES, "right")) - 1
            if stop > at:
                run = _Run(file, payload, segment.start + stop - 1, begin, begin % _ALIGNMENT)
                self._fill([run], [crcs])
                yield self._window.data[run.base : run.base + int(bounds[stop]) - begin]
            else:  # too large for the window
                stop = at + 1
                if at:
                    yield from self._stream(file, payload, crcs)
                yield file.layout.sealed(*_text_of(file, begin, payload, segment.start + at), crcs)
            at = stop

    def _fill(self, runs: Sequence[_Run], crcs: Sequence[Crcs]) -> None:
        """Put runs, whose buffers follow each other, into the window, and the CRCs of each's payloads among its file's.

        What is aligned in a file is so in memory.
        """
        view = self._window.data
        places = [run.file.layout.starts[run.start : run.stop] + (run.base - run.begin) for run in runs]
        payloads = np.concatenate(places)
        if len(payloads):
            self._filler.fill_whole(runs[0].file.first_buffer + runs[0].start, payloads, self._window)
        for run, starts, known in zip(runs, places, crcs, strict=True):
            layout = run.file.layout
            stops = starts + layout.sizes[run.start : run.stop]
            bounds = list(zip(starts.tolist(), stops.tolist(), strict=True))
            if len(layout.crcs):
                known[run.start : run.stop] = [crc32(view[start:stop]) for start, stop in bounds]
            first, last = _text_of(run.file, run.begin, run.start, run.stop)
            text = layout.sealed(first, last, known)
            done, at = 0, run.base
            for start, stop in bounds:
                view[at:start] = text[done : done + start - at]
                done, at = done + start - at, stop
            view[at : at + len(text) - done] = text[done:]

    def _stream(self, file: OutputFile, payload: int, crcs: Crcs) -> Iterator[memoryview]:
        """Yield the bytes of a payload, a window at a time."""
        crc, buffer, nbytes = 0, file.first_buffer + payload, int(file.layout.sizes[payload])
        step = self._step(buffer)
        for start in range(0, nbytes, step):
            out = self._window[: min(step, nbytes - start)]
            self._filler.fill(buffer, start, out)
            if len(file.layout.crcs):
                crc = crc32(out.data, crc)
            yield out.data
        crcs[payload] = crc

    def _step(self, buffer: int) -> int:
        """Return how many bytes of a buffer to fill at a time: whole rows of interleaved pieces where they fit."""
        row = self._filler.row_elements(buffer) * ITEMSIZE[self._plan.target.buffers[buffer].dtype]
        return WINDOW_BYTES // row * row if row <= WINDOW_BYTES else WINDOW_BYTES

    def finish(self, crcs: Mapping[int, Crcs]) -> None:
        """Write the text after the last payload of files that are in several segments, and sync those files.

        Args:
            crcs: of all payloads of each such file, by file number.
        """
        for number, known in crcs.items():
            file = self._files[number]
            layout = file.layout
            with self._opened(file, 0) as descriptor:
                text = layout.sealed(int(layout.marks[-1]), layout.text_bytes, known)
                _write_at(descriptor, text, file.nbytes - len(text))

    @contextmanager
    def _opened(self, file: OutputFile, flags: int) -> Iterator[int]:
        """Open a file for writing, and sync it in the end if that is wanted."""
        try:
            self._make(file.path.rpartition("/")[0])
            descriptor = os.open(f"{self._directory}/{file.path}", os.O_WRONLY | os.O_CLOEXEC | flags, 0o666)
            try:
                yield descriptor
                if self._fsync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            path = Path(self._directory, file.path)
            raise OutputError(f"cannot be written: {error.strerror}", path=path) from error

    def _make(self, folder: str) -> None:
        """Make a folder and those that it is in, unless this writer has done so."""
        if folder not in self._made:
            self._made.add(folder)
            self._make(folder.rpartition("/")[0])
            with suppress(FileExistsError):
                os.mkdir(f"{self._directory}/{folder}")  # noqa: PTH102 - making a Path takes half as long again


def _text_of(file: OutputFile, begin: int, start: int, stop: int) -> tuple[int, int]:
    """Return the range of the text from byte ``begin``, with the payloads from ``start`` on, to payload ``stop``."""
    marks = file.layout.marks
    return int(marks[start]) if begin else 0, int(marks[stop]) if stop < len(marks) else file.layout.text_bytes


def _write_at(descriptor: int, data: memoryview, position: int) -> None:
    while len(data):
        count = os.pwrite(descriptor, data, position)
        data, position = data[count:], position + count
