"""A run of bytes of a file, or of bytes in memory, read by absolute address."""

from __future__ import annotations

import os
from typing import Final

from nemo_optim_bridge.errors import CorruptFileError

#: Small records lie side by side: reads that begin this near to the last one's end are read ahead, twice as far each
#: time; large records lie far apart, and nothing is read that is not asked for.
_NEAR: Final = 1 << 12
_LEAST_AHEAD, _MOST_AHEAD = 1 << 10, 1 << 14


class Window:
    """``nbytes`` bytes at ``start`` of a file or of bytes in memory; addresses are absolute."""

    def __init__(
        self, path: str, start: int, nbytes: int, *, fd: int = -1, data: bytes | None = None, owned: bool = False
    ) -> None:
        self.path, self.start, self.stop, self.data = path, start, start + nbytes, data
        self._fd, self._owned = fd, owned
        self._block, self._block_start = data or b"", 0
        self._ahead = _LEAST_AHEAD

    @classmethod
    def of(cls, path: str, data: bytes | None, fd: int | None = None) -> Window:
        """Return a window on a whole file, or on ``data``; opens the file unless it is open as ``fd``."""
        if data is not None:
            return cls(path, 0, len(data), data=data)
        opened = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)) if fd is None else fd
        return cls(path, 0, os.fstat(opened).st_size, fd=opened, owned=fd is None)

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owned:
            os.close(self._fd)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return up to ``nbytes`` bytes at ``offset``, fewer where the window ends."""
        if offset + nbytes > self.stop:
            nbytes = self.stop - offset
        at = offset - self._block_start
        if at < 0 or at + nbytes > len(self._block):
            if nbytes >= _MOST_AHEAD:
                return os.pread(self._fd, nbytes, offset)
            is_near = 0 <= at <= len(self._block) + _NEAR
            self._ahead = min(2 * self._ahead, _MOST_AHEAD) if is_near else _LEAST_AHEAD
            count = max(nbytes, self._ahead) if is_near else nbytes
            self._block = os.pread(self._fd, min(count, self.stop - offset), offset)
            self._block_start, at = offset, 0
        return self._block[at : at + nbytes]

    def read_exactly(self, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes at ``offset``."""
        data = self.read(offset, nbytes) if self.start <= offset <= self.stop and nbytes >= 0 else b""
        while len(data) < nbytes:
            more = self.read(offset + len(data), nbytes - len(data)) if data else b""
            if not more:
                raise self.corrupt(f"is truncated: {nbytes} bytes expected at byte {offset}")
            data += more
        return data

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill ``view`` from ``offset`` as far as one read goes; return the number of bytes."""
        if self.data is not None:
            data = self.read(offset, len(view))
            view[: len(data)] = data
            return len(data)
        return os.preadv(self._fd, [view], offset)

    def corrupt(self, problem: str) -> CorruptFileError:
        return CorruptFileError(f"torch file {problem}", path=self.path)
