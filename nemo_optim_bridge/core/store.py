"""Where the bytes of a manifest's buffers come from: files, or memory."""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from nemo_optim_bridge.core.manifest import BufferTable, Identity, Manifest
from nemo_optim_bridge.errors import CorruptFileError, MissingSourceError, SourceChangedError, unreadable

_MAX_OPEN_FILES = 128
_SMALL_BYTES = 4 << 10  # reads of fewer, and gaps between them, cost less to copy than a system call
_LEAST_AHEAD, _MOST_AHEAD = 1 << 10, 64 << 10  # twice as far each time, so that little is read in vain
_MAX_AHEAD = 16  # files that are read ahead at a time


class Store(Protocol):
    """Gives access to the bytes of numbered buffers."""

    def read_into(self, buffer: int, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes of a buffer from byte ``offset`` on."""


class FileStore:
    """Buffers that are runs of bytes in files, read with pread; few descriptors are open at a time.

    Small reads that follow each other are read ahead. A file must stay the one that ``identities`` knows, or that was
    opened first: see ``check_unchanged``.
    """

    def __init__(self, buffers: BufferTable, identities: Mapping[str, Identity] | None = None) -> None:
        self._files = buffers.files
        self._file, self._offset = buffers.file.data, buffers.offset.data  # as views: their items are Python's ints
        self._open: OrderedDict[int, int] = OrderedDict()  # by number of the file
        #: By number of the file, the latest last: position, bytes, and how far to read ahead.
        self._ahead: OrderedDict[int, tuple[int, bytes, int]] = OrderedDict()
        self._seen: dict[str, Identity] = dict(identities or {})
        self.num_bytes_read = 0

    @classmethod
    def of(cls, manifest: Manifest) -> FileStore:
        """Return a store of a manifest's buffers; its files must be the ones whose headers were read."""
        return cls(manifest.buffers, manifest.identities)

    def __enter__(self) -> FileStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def read_into(self, buffer: int, offset: int, out: memoryview) -> None:
        """Fill ``out``; raises CorruptFileError when the file ends too early, MissingSourceError without a file."""
        number = self._file[buffer]
        position = self._offset[buffer] + offset
        self.num_bytes_read += len(out)
        if len(out) < _SMALL_BYTES:
            done = self._take_ahead(number, position, out)
            position, out = position + done, out[done:]
        if len(out):
            self._read(number, position, out)

    def _take_ahead(self, number: int, position: int, out: memoryview) -> int:
        """Fill the start of ``out`` from what is read ahead of small reads of a file; return how many bytes."""
        start, ahead, reach = self._ahead.pop(number, (position + 1, b"", 0))
        stop = start + len(ahead)
        if position < start or position + len(out) > stop:
            if start <= position <= stop + _SMALL_BYTES:
                reach = min(2 * reach, _MOST_AHEAD)
                start, ahead = position, self._read_ahead(number, position, max(reach, len(out)))
            else:  # maybe the first of some
                start, ahead, reach = position + len(out), b"", _LEAST_AHEAD
        self._ahead[number] = start, ahead, reach
        if len(self._ahead) > _MAX_AHEAD:
            self._ahead.popitem(last=False)
        found = ahead[position - start : position - start + len(out)]
        out[: len(found)] = found
        return len(found)

    def _read_ahead(self, number: int, position: int, num_bytes: int) -> bytes:
        try:
            return os.pread(self._descriptor(number), num_bytes, position)
        except OSError as error:
            raise unreadable(self._files[number], error) from error

    def _read(self, number: int, position: int, out: memoryview) -> None:
        descriptor, stop = self._descriptor(number), position + len(out)
        while position < stop:
            try:
                count = os.preadv(descriptor, [out], position)
            except OSError as error:
                raise unreadable(self._files[number], error) from error
            if not count:
                raise CorruptFileError(
                    f"ends at byte {position}, {stop - position} bytes too early", path=self._files[number],
                    hint="copy the file again from the original run",
                )  # fmt: skip
            position += count
            out = out[count:]

    def check_unchanged(self) -> None:
        """Raise SourceChangedError when a file that was read is no longer the one that was opened first."""
        for file, seen in self._seen.items():
            try:
                now = _identity(os.stat(file))  # noqa: PTH116 - making a Path takes longer than the call
            except OSError as error:
                raise SourceChangedError(f"disappeared while it was read: {error.strerror}", path=file) from error
            if now != seen:
                raise SourceChangedError(
                    "changed while it was read", path=file, hint="wait until nothing writes there, then run again"
                )

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close every open descriptor."""
        self._ahead.clear()
        while self._open:
            os.close(self._open.popitem()[1])

    def _open_file(self, file: str) -> int:
        """Open a file without waiting for a pipe; when descriptors run out, give up the ones held here first."""
        try:
            return os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._open:
                raise
        self.close()
        return os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def _descriptor(self, number: int) -> int:
        descriptor = self._open.get(number)
        if descriptor is not None:
            self._open.move_to_end(number)
            return descriptor
        file = self._files[number]
        if len(self._open) >= _MAX_OPEN_FILES:
            closed, descriptor = self._open.popitem(last=False)
            os.close(descriptor)
            self._ahead.pop(closed, None)
        try:
            descriptor = self._open_file(file)
        except OSError as error:
            raise MissingSourceError(
                f"cannot be opened: {error.strerror}",
                path=file,
                hint="see that it is there and that this user may read it",
            ) from error
        self._open[number] = descriptor
        identity = _identity(os.fstat(descriptor))
        if self._seen.setdefault(file, identity) != identity:
            raise SourceChangedError(
                "changed while it was read", path=file, hint="wait until nothing writes there, then run again"
            )
        return descriptor


class MemoryStore:
    """Buffers that are objects in memory."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = [buffer.cast("B") for buffer in buffers]

    def read_into(self, buffer: int, offset: int, out: memoryview) -> None:
        """Fill ``out`` from a buffer."""
        out[:] = self._buffers[buffer][offset : offset + len(out)]


def identify(path: Path) -> Identity:
    """Return what tells a file from a later version of itself: inode, size, modification time.

    To be called before the file's headers are read. Raises CorruptFileError when it is no regular file, so that
    nothing waits for a pipe, and MissingSourceError when there is none.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise MissingSourceError("file is missing", path=path) from None
    except OSError as error:
        raise unreadable(path, error) from error
    return _regular(status, path)


def open_identified(path: str | os.PathLike[str]) -> tuple[int, Identity]:
    """Return a descriptor of a file, for reading, and what ``identify`` would; raises what that raises."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MissingSourceError("file is missing", path=path) from None
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        return descriptor, _regular(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise


def _regular(status: os.stat_result, path: str | os.PathLike[str]) -> Identity:
    if not stat.S_ISREG(status.st_mode):
        raise CorruptFileError("is not a regular file", path=path)
    return _identity(status)


def _identity(status: os.stat_result) -> Identity:
    return status.st_ino, status.st_size, status.st_mtime_ns
