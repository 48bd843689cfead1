"""Write data as a pickle of protocol 2; equal trees give equal bytes."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

from nemo_optim_bridge.errors import TargetError
from nemo_optim_bridge.formats.pickle_data.names import SCALARS, Alike, Call, Global, Opaque

_LATIN1_ENCODE: Final = Global("_codecs", "encode")
_ORDERED_DICT: Final = Global("collections", "OrderedDict")
_SET: Final = Global("builtins", "set")
_SMALL_INTS: Final = tuple(b"K" + bytes((value,)) for value in range(256))
_SMALL_TUPLES: Final = (b")", b"\x85", b"\x86", b"\x87")


def dumps(
    obj: object,
    *,
    persistent_id: Callable[[object], object] | None = None,
    replace: Callable[[object], object] | None = None,
) -> bytes:
    """Return ``obj`` as a pickle of protocol 2, which torch.load(weights_only=True) understands.

    Takes dict, OrderedDict, list, tuple, set of scalars, str, bytes, int, float, bool, None, ``Global``, ``Call``,
    ``Alike`` and ``Opaque``. An object of any other type is first shown to ``persistent_id``; what that returns, unless
    None, is written as the object's persistent id. Else ``replace`` returns what to write instead, once per object.
    Equal trees give equal bytes; containers that are shared stay shared, cycles included.

    Raises TargetError for a value that cannot be written.
    """
    writer = _Writer(persistent_id, replace)
    try:
        writer.save(obj)
    except RecursionError as error:
        raise TargetError("value is nested too deeply to be pickled") from error
    return bytes(writer.pickle + b".")


class _Hole:
    """Stands where the key of an ``Alike`` goes; ``place`` and ``memos`` are the ranges of what is written for it."""

    __slots__ = ("key", "memos", "place")

    def __init__(self, key: str) -> None:
        self.key = key
        self.place = self.memos = range(0)


class _Writer:
    """Collects the opcodes of one pickle."""

    def __init__(
        self, persistent_id: Callable[[object], object] | None, replace: Callable[[object], object] | None
    ) -> None:
        self.pickle = bytearray(b"\x80\x02")
        self._emit = self.pickle.extend
        self._persistent_id = persistent_id
        self._replace = replace
        self._shared: dict[int, tuple[bytes, object]] = {}  # by identity: opcode that fetches it; keeps it alive
        self._named: dict[object, bytes] = {}  # by value: strings and globals
        self._num_memo = 0
        self._templates: dict[object, tuple[bytes, bytes]] = {}  # by form: what goes before the key, and after it

    def save(self, value: object) -> None:
        _SAVERS.get(type(value), _Writer._other)(self, value)

    def _save_all(self, values: Iterable[object]) -> None:
        for value in values:
            _SAVERS.get(type(value), _Writer._other)(self, value)

    def _memoize(self) -> bytes:
        """Number the topmost value; return the opcode that fetches it again."""
        number = self._num_memo
        self._num_memo += 1
        if number < 256:
            self._emit(b"q" + bytes((number,)))
            return b"h" + bytes((number,))
        packed = struct.pack("<I", number)
        self._emit(b"r" + packed)
        return b"j" + packed

    def _fetch(self, value: object) -> bool:
        known = self._shared.get(id(value))
        if known is None:
            return False
        self._emit(known[0])
        return True

    def _share(self, value: object) -> None:
        self._shared[id(value)] = (self._memoize(), value)

    def _none(self, value: None) -> None:
        self._emit(b"N")

    def _bool(self, value: bool) -> None:
        self._emit(b"\x88" if value else b"\x89")

    def _int(self, value: int) -> None:
        if 0 <= value < 256:
            self._emit(_SMALL_INTS[value])
        elif 0 <= value < 65536:
            self._emit(struct.pack("<cH", b"M", value))
        elif -(1 << 31) <= value < 1 << 31:
            self._emit(struct.pack("<ci", b"J", value))
        else:
            width = (value.bit_length() >> 3) + 1
            if width > 255:
                raise TargetError(f"int of {width} bytes cannot be written")
            self._emit(b"\x8a" + bytes((width,)) + value.to_bytes(width, "little", signed=True))

    def _float(self, value: float) -> None:
        self._emit(struct.pack(">cd", b"G", value))

    def _str(self, value: str) -> None:
        known = self._named.get(value)
        if known is not None:
            self._emit(known)
            return
        encoded = value.encode("utf-8", "surrogatepass")
        self._emit(struct.pack("<cI", b"X", len(encoded)) + encoded)
        if len(encoded) > 4:  # else fetching it takes as many bytes as writing it again
            self._named[value] = self._memoize()

    def _bytes(self, value: bytes) -> None:
        self._call(Call(_LATIN1_ENCODE, (value.decode("latin1"), "latin1")))

    def _global(self, value: Global) -> None:
        known = self._named.get(value)
        if known is not None:
            self._emit(known)
            return
        if not value.module or not value.name or "\n" in value.module + value.name:
            raise TargetError(f"{value!r} is no name that a pickle can hold")
        self._emit(f"c{value.module}\n{value.name}\n".encode())
        self._named[value] = self._memoize()

    def _call(self, value: Call) -> None:
        self._global(value.function)
        self._unshared_tuple(value.args)
        self._emit(b"R")

    def _unshared_tuple(self, value: tuple[object, ...]) -> None:
        count = len(value)
        if count > 3:
            self._emit(b"(")
            self._save_all(value)
            self._emit(b"t")
        else:
            self._save_all(value)
            self._emit(_SMALL_TUPLES[count])

    def _tuple(self, value: tuple[object, ...]) -> None:
        # Flat tuples are not shared: whether two equal ones are the same object is an accident of the interpreter.
        if SCALARS.issuperset(map(type, value)):
            self._unshared_tuple(value)
        elif not self._fetch(value):
            self._unshared_tuple(value)
            if id(value) in self._shared:  # a cycle through the tuple has made it meanwhile: take that one
                self._emit(b"0")
                self._fetch(value)
            else:
                self._share(value)

    def _list(self, value: list[object]) -> None:
        if self._fetch(value):
            return
        self._emit(b"]")
        self._share(value)
        self._items(value)

    def _items(self, items: Iterable[object]) -> None:
        listed = list(items)
        if listed:
            self._emit(b"(")
            self._save_all(listed)
            self._emit(b"e")

    def _dict(self, value: dict[object, object]) -> None:
        if self._fetch(value):
            return
        self._emit(b"}")
        self._share(value)
        self._pairs(value.items())

    def _pairs(self, pairs: Iterable[tuple[object, object]]) -> None:
        listed = list(pairs)
        if listed:
            self._emit(b"(")
            for key, item in listed:
                self.save(key)
                self.save(item)
            self._emit(b"u")

    def _ordered_dict(self, value: OrderedDict[object, object]) -> None:
        if self._fetch(value):
            return
        self._global(_ORDERED_DICT)
        self._emit(b")R")
        self._share(value)
        self._pairs(value.items())
        if vars(value):
            self._dict(cast("dict[object, object]", vars(value).copy()))
            self._emit(b"b")

    def _set(self, value: set[object]) -> None:
        if not all(type(item) in SCALARS for item in value):
            raise TargetError("set of something else than scalars cannot be written")
        if self._fetch(value):
            return
        self._global(_SET)
        self._list(sorted(value, key=lambda item: (type(item).__name__, repr(item))))
        self._emit(b"\x85R")
        self._share(value)

    def _opaque(self, value: Opaque) -> None:
        if self._fetch(value):
            return
        self._global(value.function)
        self._tuple(value.args)
        self._emit(b"\x81" if value.newobj else b"R")
        self._share(value)
        self._items(value.items)
        self._pairs(value.pairs)
        if value.state is not None:
            self.save(value.state)
            self._emit(b"b")

    def _alike(self, value: Alike) -> None:
        template = self._templates.get(value.form)
        if template is not None:
            before, after = template
            self._emit(before)
            self._str(value.key)
            self._emit(after)
            return
        hole, first, num_memo = _Hole(value.key), len(self.pickle), self._num_memo
        self.save(value.form(hole))
        if self._num_memo - num_memo == len(hole.memos):  # all names in it were known: the next is written alike
            written = bytes(self.pickle[first:])
            start, stop = hole.place.start - first, hole.place.stop - first
            self._templates[value.form] = written[:start], written[stop:]

    def _hole(self, value: _Hole) -> None:
        start, memo = len(self.pickle), self._num_memo
        self._str(value.key)
        value.place, value.memos = range(start, len(self.pickle)), range(memo, self._num_memo)

    def _other(self, value: object) -> None:
        if self._fetch(value):
            return
        pid = None if self._persistent_id is None else self._persistent_id(value)
        if pid is not None:
            if type(pid) is tuple:
                self._unshared_tuple(pid)
            else:
                self.save(pid)
            self._emit(b"Q")
            return  # fetching it would save nothing: ids are short
        elif self._replace is not None:
            self.save(self._replace(value))
        else:
            raise TargetError(f"value of type {type(value).__name__} cannot be written to a pickle")
        self._share(value)


_SAVERS: Final[Mapping[type, Callable[[_Writer, Any], None]]] = {
    bool: _Writer._bool, type(None): _Writer._none, int: _Writer._int, float: _Writer._float, str: _Writer._str,
    bytes: _Writer._bytes, tuple: _Writer._tuple, list: _Writer._list, dict: _Writer._dict, set: _Writer._set,
    OrderedDict: _Writer._ordered_dict, Global: _Writer._global, Call: _Writer._call, Opaque: _Writer._opaque,
    Alike: _Writer._alike, _Hole: _Writer._hole,
}  # fmt: skip
