"""A run of bytes of a file, or of bytes in memory, read by absolute address."""

from __future__ import annotations

import os
from typing import Final

from nemo_optim_bridge.errors import CorruptFileError

_WHOLE: Final = 1 << 17  # windows up to this many bytes are read at once: one system call instead of one a record


class Window:
    """``nbytes`` bytes at ``start`` of a file or of bytes in memory; addresses are absolute."""

    def __init__(
        self,
        path: str,
        start: int,
        nbytes: int,
        *,
        fd: int = -1,
        data: bytes | None = None,
        cache: bool = True,
        owned: bool = False,
    ) -> None:
        self.path, self.start, self.stop, self.data = path, start, start + nbytes, data
        self._fd, self._owned = fd, owned
        self._cache, self._cached_at = data, 0 if data is not None else start
        if data is None and nbytes <= _WHOLE and cache:
            self._cache = os.pread(fd, nbytes, start)

    @classmethod
    def of(cls, path: str, data: bytes | None, fd: int | None = None) -> Window:
        """Return a window on a whole file, or on ``data``; opens the file unless it is open as ``fd``."""
        if data is not None:
            return cls(path, 0, len(data), data=data)
        opened = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)) if fd is None else fd
        return cls(path, 0, os.fstat(opened).st_size, fd=opened, cache=False, owned=fd is None)

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owned:
            os.close(self._fd)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return up to ``nbytes`` bytes at ``offset``, fewer where the window ends."""
        nbytes = min(nbytes, self.stop - offset)
        if self._cache is not None:
            at = offset - self._cached_at
            return self._cache[at : at + nbytes]
        return os.pread(self._fd, nbytes, offset)

    def read_exactly(self, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes at ``offset``."""
        data = self.read(offset, nbytes) if self.start <= offset and nbytes >= 0 else b""
        while len(data) < nbytes:
            more = self.read(offset + len(data), nbytes - len(data)) if data else b""
            if not more:
                raise self.corrupt(f"is truncated: {nbytes} bytes expected at byte {offset}")
            data += more
        return data

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill ``view`` from ``offset`` as far as one read goes; return the number of bytes."""
        if self._cache is not None:
            data = self.read(offset, len(view))
            view[: len(data)] = data
            return len(data)
        return os.preadv(self._fd, [view], offset)

    def corrupt(self, problem: str) -> CorruptFileError:
        return CorruptFileError(f"torch file {problem}", path=self.path)
