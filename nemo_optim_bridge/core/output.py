"""An output file: text that is known, around payloads that are not. Formats lay files out; the executor fills them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.manifest import IntArray

_BLOCK_BYTES = 32 << 10


@dataclass(frozen=True, slots=True, eq=False)
class _Text:
    """Bytes of which all whole blocks are kept deflated: what surrounds many payloads repeats itself."""

    nbytes: int
    blocks: tuple[bytes, ...]
    rest: bytes

    @classmethod
    def of(cls, text: bytes | bytearray) -> _Text:
        from isal import isal_zlib  # headers are read without it

        view, whole = memoryview(text), len(text) - len(text) % _BLOCK_BYTES
        blocks = (view[start : start + _BLOCK_BYTES] for start in range(0, whole, _BLOCK_BYTES))
        return cls(len(text), tuple(isal_zlib.compress(block, 0) for block in blocks), bytes(view[whole:]))

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` to ``stop``."""
        first, last = start // _BLOCK_BYTES, -(-stop // _BLOCK_BYTES)
        parts = [_inflated(block) for block in self.blocks[first:last]]
        if last > len(self.blocks):
            parts.append(self.rest)
        return b"".join(parts)[start - first * _BLOCK_BYTES : stop - first * _BLOCK_BYTES]


@lru_cache(maxsize=2)  # texts are read from their beginning to their end, often much less than a block at a time
def _inflated(block: bytes) -> bytes:
    from isal import isal_zlib

    return isal_zlib.decompress(block, bufsize=_BLOCK_BYTES + 1)


@dataclass(frozen=True, eq=False)
class Layout:
    """Where everything lies in a file, or in many alike; positions and sizes in bytes.

    Attributes:
        marks: (n,) where in the text each payload is put.
        sizes: (n,) of the payloads, none of them empty.
        crcs: (k, n) where in the text the CRC-32 of each payload goes, as four bytes, little-endian; rows ascend. The
            place is between its payload and the next, or after the last payload.
    """

    _text: _Text
    marks: IntArray
    sizes: IntArray
    crcs: IntArray

    @classmethod
    def of(cls, text: bytes, nbytes: int = 0) -> Layout:
        """Return the layout of a text, and a payload of ``nbytes`` after it if that is not 0."""
        count = 1 if nbytes else 0
        marks, sizes = np.full(count, len(text), np.int64), np.full(count, nbytes, np.int64)
        return cls.around(text, marks, sizes, np.zeros((0, count), np.int64))

    @classmethod
    def around(cls, text: bytes | bytearray, marks: IntArray, sizes: IntArray, crcs: IntArray) -> Layout:
        """Return the layout of a text with payloads in it. The text has anything in the place of checksums."""
        return cls(_Text.of(text), marks, sizes, crcs)

    @property
    def text(self) -> bytes:
        """What is no payload, in order, with anything in the place of checksums."""
        return self._text.read(0, self.text_bytes)

    @property
    def text_bytes(self) -> int:
        """Size of the text."""
        return self._text.nbytes

    @cached_property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.text_bytes + int(self.sizes.sum())

    @cached_property
    def starts(self) -> IntArray:
        """Where in the file each payload begins."""
        return self.marks + np.cumsum(self.sizes) - self.sizes

    def sealed(self, start: int, stop: int, crcs: npt.NDArray[np.uint32]) -> memoryview:
        """Return the text from ``start`` to ``stop`` with the checksums of all payloads in their places."""
        known = self._text.read(start, stop)
        if not len(self.crcs):
            return memoryview(known)
        text = np.frombuffer(known, np.uint8).copy()
        for places in self.crcs:
            first, last = np.searchsorted(places, (start, stop))
            found = crcs[first:last].astype("<u4").view(np.uint8).reshape(-1, 4)
            text[places[first:last, None] - start + np.arange(4)] = found
        return text.data


@dataclass(frozen=True, slots=True, eq=False)
class OutputFile:
    """A file to write, below the output directory.

    Payload ``i`` holds the bytes of buffer number ``first_buffer + i`` of the target manifest; what no shard covers is
    zero.
    """

    path: str
    layout: Layout
    first_buffer: int = 0

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.layout.nbytes
