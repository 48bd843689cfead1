"""An output file: text that is known, around payloads that are not. Formats lay files out; the executor fills them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.manifest import IntArray


@dataclass(frozen=True, eq=False)
class Layout:
    """Where everything lies in a file, or in many alike; positions and sizes in bytes.

    Attributes:
        text: what is no payload, in order, with anything in the place of checksums.
        marks: (n,) where in the text each payload is put.
        sizes: (n,) of the payloads, none of them empty.
        crcs: (k, n) where in the text the CRC-32 of each payload goes, as four bytes, little-endian; rows ascend. The
            place is between its payload and the next, or after the last payload.
    """

    text: bytes
    marks: IntArray
    sizes: IntArray
    crcs: IntArray

    @classmethod
    def of(cls, text: bytes, nbytes: int = 0) -> Layout:
        """Return the layout of a text, and a payload of ``nbytes`` after it if that is not 0."""
        count = 1 if nbytes else 0
        marks, sizes = np.full(count, len(text), np.int64), np.full(count, nbytes, np.int64)
        return cls(text, marks, sizes, np.zeros((0, count), np.int64))

    @cached_property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.text) + int(self.sizes.sum())

    @cached_property
    def starts(self) -> IntArray:
        """Where in the file each payload begins."""
        return self.marks + np.cumsum(self.sizes) - self.sizes

    def sealed(self, start: int, stop: int, crcs: npt.NDArray[np.uint32]) -> memoryview:
        """Return the text from ``start`` to ``stop`` with the checksums of all payloads in their places."""
        if not len(self.crcs):
            return memoryview(self.text)[start:stop]
        text = np.frombuffer(self.text, np.uint8)[start:stop].copy()
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
