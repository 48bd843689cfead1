"""The pass over a pickle's bytes: admit the opcodes of data, route all that can act to ``persistent_load``.

BUILD, SETITEM(S) and APPEND(S) become "pack the operands into a tuple and hand it to ``persistent_load``",
and NEWOBJ becomes REDUCE, so that the C unpickler only ever pushes constants, tuples, empty containers
and memo entries. BINPERSID stays: the tuples made here end in a bytearray, which no admitted opcode makes.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final, cast

from nemo_optim_bridge.errors import CorruptFileError, UnsafePickleError

#: What is handed to ``persistent_load`` besides two operands: which opcode it stands for, as the byte of a bytearray.
NEWOBJ, BUILD, SETITEMS, APPENDS, FILL_BUILD = range(5)
_TUPLE, _TUPLE1, _TUPLE2 = b"t", b"\x85", b"\x86"


def _hand_over(code: int) -> bytes:
    """Return opcodes that replace the two topmost values by ``persistent_load((first, second, code))``."""
    return b"\x96" + (1).to_bytes(8, "little") + bytes([code]) + b"\x87Q"


_REWRITTEN: Final[Mapping[int, bytes]] = {
    0x81: b"R",  # NEWOBJ, where the difference to REDUCE does not matter
    ord("b"): _hand_over(BUILD),
    ord("s"): _TUPLE2 + _hand_over(SETITEMS),
    ord("u"): _TUPLE + _hand_over(SETITEMS),
    ord("a"): _TUPLE1 + _hand_over(APPENDS),
    ord("e"): _TUPLE + _hand_over(APPENDS),
}
_REWRITTEN_OPAQUE: Final[Mapping[int, bytes]] = {**_REWRITTEN, 0x81: _hand_over(NEWOBJ)}
#: SETITEMS then BUILD, the end of most objects, as one step: (object, dict, items).
_FILLED_AND_BUILT: Final = _TUPLE + b"\x87N" + _hand_over(FILL_BUILD)
#: Width in bytes of the length that follows. LONG1 is at most 255 bytes; LONG4 is refused: no real int needs it.
_SIZED: Final[Mapping[int, int]] = {
    ord("X"): 4, ord("B"): 4, ord("C"): 1, 0x8C: 1, 0x8D: 8, 0x8E: 8, 0x8A: 1,
}  # fmt: skip
_PROTO, _FRAME, _STOP = 0x80, 0x95, ord(".")
_SETITEMS_OPCODE, _BUILD_OPCODE = ord("u"), b"b"
_PLAIN: Final = frozenset(b"(01NQR)]}t\x88\x89\x85\x86\x87\x94\x93Kqh\x80MJjGcr")


@lru_cache(maxsize=16)
def _plain_run(memo_bits: int) -> Callable[[bytes, int], re.Match[bytes] | None]:
    """Return a matcher of a run of opcodes that need no check; memo numbers stay below ``2**memo_bits``."""
    high = b"[\\x00-\\x%02x]" % ((1 << (memo_bits - 24)) - 1) if memo_bits > 24 else b"\\x00"
    third = b"." if memo_bits >= 24 else b"[\\x00-\\x%02x]" % ((1 << (memo_bits - 16)) - 1)
    short = b"|".join(b"\\x%02x\\x00\\x00\\x00.{%d}" % (n, n) for n in range(1, 9))
    tiny = b"|".join(b"\\x%02x.{%d}" % (n, n) for n in range(1, 9))
    pattern = (
        b"(?:[(01NQR)\\]}t\\x88\\x89\\x85\\x86\\x87\\x94\\x93]|[Kqh].|M..|[Jj].{4}|G.{8}|r.." + third + high
        + b"|X(?:" + short + b")|\\x8c(?:" + tiny + b")|c[^\\n]{1,200}\\n[^\\n]{1,200}\\n|\\x80[\\x02-\\x05]){0,100}"
    )  # fmt: skip
    return re.compile(pattern, re.DOTALL).match


def admit(data: bytes, path: str, opaque: bool = False) -> bytes:
    """Admit the opcodes of ``data`` and route all that can act to ``persistent_load``; drops frames."""
    size = len(data)
    if size < 2 or data[0] != _PROTO:
        raise CorruptFileError("pickle does not start with a protocol number; 2 to 5 are read", path=path)
    # Picklers number memo entries 0, 1, 2, ...; an entry takes 3 bytes or more. C reserves 16 bytes per number.
    memo_bits = min(32, max(16, (size // 3).bit_length() + 1 & ~1))
    match = _plain_run(memo_bits)
    parts: list[bytes] = []
    add, rewritten = parts.append, (_REWRITTEN_OPAQUE if opaque else _REWRITTEN).get
    start = position = 0
    while True:
        found = cast("re.Match[bytes]", match(data, position)).end()
        if found >= size:
            raise CorruptFileError("pickle is truncated", path=path)
        opcode = data[found]
        after = found + 1
        replacement = rewritten(opcode)
        if replacement is not None:
            if opcode == _SETITEMS_OPCODE and data[after : after + 1] == _BUILD_OPCODE:
                replacement = _FILLED_AND_BUILT
                after += 1
            add(data[start:found])
            add(replacement)
            start = position = after
        elif opcode in _SIZED:
            after += _SIZED[opcode]
            position = after + int.from_bytes(data[found + 1 : after], "little")
            if position > size:
                raise CorruptFileError("string in pickle is longer than the pickle", path=path)
        elif opcode == _STOP:
            if after != size:
                raise CorruptFileError(f"{size - after} bytes follow the end of the pickle", path=path)
            add(data[start:])
            return b"".join(parts)
        elif opcode == _FRAME:
            add(data[start:found])
            start = position = after + 8
            if start + int.from_bytes(data[after:start], "little") > size:
                raise CorruptFileError("frame in pickle is longer than the pickle", path=path)
        elif found > position and opcode in _PLAIN:
            position = found
        else:
            raise _refused_opcode(data, found, path)


def _refused_opcode(data: bytes, position: int, path: str) -> CorruptFileError:
    """Return the error for the opcode at ``position``."""
    if data[position] in _PLAIN:
        return CorruptFileError(f"malformed pickle opcode at byte {position}", path=path)
    names = [
        name for name in pickle.__all__ if name.isupper() and getattr(pickle, name) == data[position : position + 1]
    ]
    if not names:
        return CorruptFileError(f"no pickle opcode 0x{data[position]:02x} (byte {position})", path=path)
    return UnsafePickleError(
        f"pickle uses opcode {names[0]} (byte {position}), which this package does not run", path=path,
        hint="load the file where it comes from and save it again with pickle protocol 2 or 4, as plain data",
    )  # fmt: skip
