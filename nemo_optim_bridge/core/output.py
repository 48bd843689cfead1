"""An output file as a sequence of parts, written front to back. Formats lay files out; the executor fills them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that are known when the file is laid out."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Payload:
    """The bytes of buffer number ``buffer`` of the target manifest; what no shard covers is zero."""

    buffer: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Sealed:
    """Bytes that depend on the CRC-32 of payloads that came before in this file.

    ``seal`` is given those of all of them in order, of which the ones before ``first_payload`` do not matter.
    """

    nbytes: int
    seal: Callable[[Sequence[int]], bytes]
    first_payload: int = 0


Part = Literal | Payload | Sealed


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to write: its path relative to the output directory, and its parts in order."""

    path: str
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(part.nbytes for part in self.parts)
