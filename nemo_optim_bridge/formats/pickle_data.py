"""Read and write pickles as data; nothing that a pickle names is ever imported or called.

How reading stays both safe and fast: one pass over the bytes admits only the opcodes that picklers emit for data, and
rewrites every opcode that could change an object (BUILD, SETITEM(S), APPEND(S), BINPERSID) into "pack the operands into
a tuple and hand it to ``persistent_load``", and NEWOBJ into REDUCE. The C unpickler then only ever pushes constants,
tuples, empty containers and memo entries, and calls ``Global`` objects, the only callable thing there is in it; all the
rest is decided here, where types are checked.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, cast

from nemo_optim_bridge.errors import BridgeError, CorruptFileError, TargetError, UnsafePickleError

#: Nesting of containers that any reader may recurse into; real checkpoints stay below 20.
MAX_DEPTH: Final = 100
#: Containers and leaves of the tree once shared parts are counted every time, per byte of pickle.
_MAX_UNFOLDED_PER_BYTE: Final = 200
_MAX_ARGS: Final = 64
_MAX_ATTRIBUTES: Final = 64


class Global:
    """A module-level name, as data: ``Global("torch", "bfloat16")``. Two with the same name are equal."""

    __slots__ = ("_function", "module", "name")

    def __init__(self, module: str, name: str, _function: Callable[..., object] | None = None) -> None:
        self.module = module
        self.name = name
        self._function = _function

    def __call__(self, *args: object) -> object:
        """Make what a pickle calls this name for; only ``loads`` gives names a function, others make an Opaque."""
        if len(args) > _MAX_ARGS:
            raise ValueError(f"call with {len(args)} arguments")
        return Opaque(self, args) if self._function is None else self._function(*args)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"Global({self.module!r}, {self.name!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Global):
            return NotImplemented
        return (self.module, self.name) == (other.module, other.name)

    def __hash__(self) -> int:
        return hash((self.module, self.name))


class Call:
    """What ``dumps`` writes as a call of ``function`` with ``args`` that the reader of the pickle will make."""

    __slots__ = ("args", "function")

    def __init__(self, function: Global, args: tuple[object, ...] = ()) -> None:
        self.function = function
        self.args = args


class Opaque:
    """An object of a class that is not ours: everything the pickle says of it, unopened.

    ``newobj`` says whether it is made by ``function.__new__(function, *args)`` or by ``function(*args)``; then it
    gets the list ``items``, the ``(key, value)`` ``pairs`` and the ``state`` (None: no state). ``dumps`` writes the
    same again, so that a reader that has the class gets the original object. Compared by identity.
    """

    __slots__ = ("args", "function", "items", "newobj", "pairs", "state")

    def __init__(self, function: Global, args: tuple[object, ...] = (), *, newobj: bool = False) -> None:
        self.function = function
        self.args = args
        self.newobj = newobj
        self.state: object = None
        self.items: list[object] = []
        self.pairs: list[tuple[object, object]] = []

    @property
    def module(self) -> str:
        """Module of the class or function that makes the object."""
        return self.function.module

    @property
    def qualname(self) -> str:
        """Name of the class or function that makes the object, within its module."""
        return self.function.name

    def __repr__(self) -> str:
        return f"<Opaque {self.function}>"


def loads(
    data: bytes,
    *,
    path: str,
    allow: Mapping[tuple[str, str], object],
    persistent_load: Callable[[object], object] | None = None,
    opaque: bool = False,
) -> object:
    """Return what a pickle describes, made of plain containers and of what ``allow`` maps its names to.

    ``allow`` maps ``(module, name)`` to a callable of ours (called with the pickled arguments, for REDUCE and NEWOBJ
    alike) or to a constant. A callable must check its arguments' types, must not copy them when they are long, and
    may raise any Exception to refuse them; what it, or ``persistent_load``, returns must not be callable. A BUILD
    state is given to the object's ``__setstate__``; an object without one accepts no state. Objects used as dict keys
    are hashed: check their fields in ``__setstate__``.
    ``collections.OrderedDict``, bytes and sets of scalars are always understood.

    With ``opaque``, names that are not in ``allow`` become ``Global`` and what is made from them ``Opaque``.

    Raises UnsafePickleError for a name or opcode that is not allowed, CorruptFileError for anything malformed: nesting
    deeper than MAX_DEPTH, cycles outside of Opaque objects, shared parts that unfold to far more than the file holds,
    container keys.
    """
    try:
        rewritten = _rewrite(data, path, opaque)
        machine = _Machine(rewritten, path, allow, persistent_load, opaque, data[1] < 3, len(data))
        root = machine.load()
        _check_tree(root, _MAX_UNFOLDED_PER_BYTE * len(data) + 10_000, path)
    except (BridgeError, MemoryError):
        raise
    except Exception as error:
        raise CorruptFileError(f"malformed pickle: {_short(str(error))}", path=path) from error
    return root


# --- the pass over the bytes -------------------------------------------------------------------------------------

_NEWOBJ, _BUILD, _SETITEMS, _APPENDS, _PERSID, _FILL_BUILD = range(6)
_TUPLE, _TUPLE1, _TUPLE2 = b"t", b"\x85", b"\x86"


def _hand_over(code: int) -> bytes:
    """Return opcodes that replace the two topmost values by ``persistent_load((first, second, code))``."""
    return b"K" + bytes([code]) + b"\x87Q"


_REWRITTEN: Final[Mapping[int, bytes]] = {
    0x81: b"R",  # NEWOBJ, where the difference to REDUCE does not matter
    ord("b"): _hand_over(_BUILD),
    ord("s"): _TUPLE2 + _hand_over(_SETITEMS),
    ord("u"): _TUPLE + _hand_over(_SETITEMS),
    ord("a"): _TUPLE1 + _hand_over(_APPENDS),
    ord("e"): _TUPLE + _hand_over(_APPENDS),
    ord("Q"): b"N" + _hand_over(_PERSID),
}
_REWRITTEN_OPAQUE: Final[Mapping[int, bytes]] = {**_REWRITTEN, 0x81: _hand_over(_NEWOBJ)}
#: SETITEMS then BUILD, the end of most objects, as one step: (object, dict, items).
_FILLED_AND_BUILT: Final = _TUPLE + b"\x87N" + _hand_over(_FILL_BUILD)
#: Width in bytes of the length that follows. LONG1 is at most 255 bytes; LONG4 is refused: no real int needs it.
_SIZED: Final[Mapping[int, int]] = {
    ord("X"): 4, ord("B"): 4, ord("C"): 1, 0x8C: 1, 0x8D: 8, 0x8E: 8, 0x8A: 1,
}  # fmt: skip
_PROTO, _FRAME, _STOP = 0x80, 0x95, ord(".")
_SETITEMS_OPCODE, _BUILD_OPCODE = ord("u"), b"b"
_PLAIN: Final = frozenset(b"(01NR)]}t\x88\x89\x85\x86\x87\x94\x93Kqh\x80MJjGcr")


@lru_cache(maxsize=16)
def _plain_run(memo_bits: int) -> Callable[[bytes, int], re.Match[bytes] | None]:
    """Return a matcher of a run of opcodes that need no check; memo numbers stay below ``2**memo_bits``."""
    high = b"[\\x00-\\x%02x]" % ((1 << (memo_bits - 24)) - 1) if memo_bits > 24 else b"\\x00"
    third = b"." if memo_bits >= 24 else b"[\\x00-\\x%02x]" % ((1 << (memo_bits - 16)) - 1)
    short = b"|".join(b"\\x%02x\\x00\\x00\\x00.{%d}" % (n, n) for n in range(1, 9))
    tiny = b"|".join(b"\\x%02x.{%d}" % (n, n) for n in range(1, 9))
    pattern = (
        b"(?:[(01NR)\\]}t\\x88\\x89\\x85\\x86\\x87\\x94\\x93]|[Kqh].|M..|[Jj].{4}|G.{8}|r.." + third + high
        + b"|X(?:" + short + b")|\\x8c(?:" + tiny + b")|c[^\\n]{1,200}\\n[^\\n]{1,200}\\n|\\x80[\\x02-\\x05]){0,100}"
    )  # fmt: skip
    return re.compile(pattern, re.DOTALL).match


def _rewrite(data: bytes, path: str, opaque: bool = False) -> bytes:
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


# --- what the opcodes that act do -----------------------------------------------------------------------------------

_SCALARS: Final = frozenset({str, int, float, bool, type(None), bytes})
_MAX_INT_KEY: Final = 1 << 32  # beyond it, hash(int) can be made to collide at will


class _Machine(pickle.Unpickler):
    """The C unpickler on rewritten opcodes: it calls only ``find_class`` and ``persistent_load`` of this class."""

    def __init__(
        self, rewritten: bytes, path: str, allow: Mapping[tuple[str, str], object],
        load_persistent: Callable[[object], object] | None, opaque: bool, old_names: bool, budget: int,
    ) -> None:  # fmt: skip
        super().__init__(io.BytesIO(rewritten))
        self._path = path
        self._allow = allow
        self._load_persistent = load_persistent
        self._opaque = opaque
        self._old_names = old_names  # Python 2's, which protocol 2 writes
        self._budget = budget  # bytes that calls may still copy
        self._handlers = (
            self._newobj, self._build, self._setitems, self._appends, self._persid,
            self._fill_build,
        )  # fmt: skip
        self._always: Mapping[tuple[str, str], Callable[..., object]] = {
            ("collections", "OrderedDict"): _ordered_dict,
            ("_codecs", "encode"): self._encode,
            ("builtins", "bytes"): _empty_bytes,
            ("builtins", "set"): self._set,
        }

    def find_class(self, module: str, name: str) -> Any:
        if self._old_names:
            if (module, name) in NAME_MAPPING:
                module, name = NAME_MAPPING[module, name]
            else:
                module = IMPORT_MAPPING.get(module, module)
        value = self._allow.get((module, name), self)
        if value is self:
            value = self._always.get((module, name))
            if value is None:
                if self._opaque:
                    return Global(module, name)
                raise UnsafePickleError(
                    f"pickle names {_short(module)}.{_short(name)}, which is not on the allow-list; nothing was run",
                    path=self._path,
                    hint="if the file is yours, load it where it comes from and save plain data and tensors only",
                )
        return Global(module, name, value) if callable(value) and not isinstance(value, Global) else value

    def persistent_load(self, pid: Any) -> Any:
        return self._handlers[pid[2]](pid[0], pid[1])

    def _newobj(self, function: object, args: object) -> object:
        if type(function) is not Global or type(args) is not tuple:
            raise self._corrupt(f"object made from {_kind(function)} with {_kind(args)}")
        made = function(*args)
        if type(made) is Opaque:
            made.newobj = True
        return made

    def _build(self, target: object, state: object) -> object:
        kind = type(target)
        if kind is Opaque:
            target.state = state  # type: ignore[attr-defined]
        elif kind is OrderedDict:
            self._set_attributes(cast("OrderedDict[object, object]", target), state)
        else:
            set_state = getattr(kind, "__setstate__", None)
            if set_state is None:
                raise self._corrupt(f"state for {_kind(target)}")
            set_state(target, state)
        return target

    def _set_attributes(self, target: OrderedDict[object, object], state: object) -> None:
        if type(state) is not dict or len(state) > _MAX_ATTRIBUTES:
            raise self._corrupt("state of an OrderedDict is no small dict")
        for name in state:
            if type(name) is not str or hasattr(OrderedDict, name):
                raise self._corrupt("attribute of an OrderedDict that is one of its own")
        vars(target).update(state)

    def _setitems(self, target: Any, items: tuple[object, ...]) -> object:
        if len(items) % 2:
            raise self._corrupt("odd number of keys and values")
        kind = type(target)
        values = iter(items)
        if kind is dict or kind is OrderedDict:
            for key in values:
                if type(key) is not str and not _is_key(key):
                    raise self._corrupt(f"{_kind(key)} as a key")
                target[key] = next(values)
        elif kind is Opaque:
            target.pairs.extend(zip(values, values, strict=True))
        else:
            raise self._corrupt(f"items set on {_kind(target)}")
        return target

    def _fill_build(self, parts: tuple[Any, Any, Any], _: object) -> object:
        target, state, items = parts
        return self._build(target, self._setitems(state, items))

    def _appends(self, target: object, items: tuple[object, ...]) -> object:
        if type(target) is list:
            target.extend(items)
        elif type(target) is Opaque:
            target.items.extend(items)
        else:
            raise self._corrupt(f"items appended to {_kind(target)}")
        return target

    def _persid(self, pid: object, _: object) -> object:
        if self._load_persistent is None:
            raise self._corrupt("reference to something outside of the pickle")
        return self._load_persistent(pid)

    def _spend(self, amount: int) -> None:
        self._budget -= amount
        if self._budget < 0:
            raise self._corrupt("shared parts are copied to more than the file's own size")

    def _encode(self, text: object, encoding: object) -> bytes:
        if type(text) is not str or encoding != "latin1":
            raise self._corrupt("_codecs.encode of something else than bytes")
        self._spend(len(text))
        return text.encode("latin1")

    def _set(self, items: object = ()) -> set[object]:
        if type(items) not in (list, tuple):
            raise self._corrupt(f"set of {_kind(items)}")
        listed = cast("list[object]", items)
        self._spend(len(listed))
        if not all(map(_is_key, listed)):
            raise self._corrupt("set of containers")
        return set(listed)

    def _corrupt(self, problem: str) -> CorruptFileError:
        return CorruptFileError(f"malformed pickle: {problem}", path=self._path)


def _ordered_dict() -> OrderedDict[object, object]:
    return OrderedDict()


def _empty_bytes() -> bytes:
    return b""


def _is_key(value: object, nested: int = 2) -> bool:
    """Say whether hashing ``value`` is cheap; C hashes nested tuples without any limit on depth or time."""
    kind = type(value)
    if kind is int:
        return -_MAX_INT_KEY < cast("int", value) < _MAX_INT_KEY
    if kind in _SCALARS:
        return True
    if isinstance(value, tuple):
        return nested > 0 and len(value) <= 32 and all(_is_key(item, nested - 1) for item in value)
    return not isinstance(value, list | dict | set | frozenset)


def _check_tree(root: object, limit: int, path: str) -> None:
    """Refuse what would make a recursive reader overflow its stack, loop or take forever."""
    finished: dict[int, tuple[int, int]] = {}  # container -> its height, its size when unfolded
    open_: list[tuple[object, list[object]]] = []
    on_path: set[int] = set()

    def enter(value: object) -> None:
        kind = type(value)
        if kind is dict or kind is OrderedDict:
            children: Iterable[object] = cast("dict[object, object]", value).values()
        elif kind is list or kind is tuple:
            children = cast("list[object]", value)
        else:
            return
        if id(value) in finished:
            return
        if id(value) in on_path:
            raise CorruptFileError("malformed pickle: a container contains itself", path=path)
        if len(open_) >= MAX_DEPTH:
            raise CorruptFileError(f"malformed pickle: nested deeper than {MAX_DEPTH}", path=path)
        on_path.add(id(value))
        open_.append((value, [child for child in children if type(child) in _CONTAINERS]))

    sized = 0
    enter(root)
    while open_:
        value, children = open_[-1]
        pending = len(open_)
        while children and len(open_) == pending:
            child = children[-1]
            enter(child)
            if len(open_) == pending:
                children.pop()
        if len(open_) != pending:
            continue
        open_.pop()
        on_path.discard(id(value))
        nested = (
            cast("dict[object, object]", value).values() if isinstance(value, dict) else cast("list[object]", value)
        )
        height, sized = 1, 1 + len(cast("list[object]", value))
        for child in nested:
            if type(child) in _CONTAINERS:
                below, count = finished[id(child)]
                height = max(height, below + 1)
                sized += count
        if height > MAX_DEPTH:
            raise CorruptFileError(f"malformed pickle: nested deeper than {MAX_DEPTH}", path=path)
        if sized > limit:
            raise CorruptFileError("malformed pickle: shared parts unfold to far more than the file holds", path=path)
        finished[id(value)] = (height, sized)


_CONTAINERS: Final = frozenset({dict, OrderedDict, list, tuple})


def _kind(value: object) -> str:
    return _short(str(value)) if type(value) is Global else f"a value of type {type(value).__name__}"


def _short(text: str) -> str:
    """Return text of unknown origin fit for a message: short, and without control characters."""
    return repr(text[:200])[1:-1] + ("..." if len(text) > 200 else "")


# --- writing --------------------------------------------------------------------------------------------------------

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

    Takes dict, OrderedDict, list, tuple, set of scalars, str, bytes, int, float, bool, None, ``Global``, ``Call`` and
    ``Opaque``. An object of any other type is first shown to ``persistent_id``; what that returns, unless None, is
    written as the object's persistent id. Else ``replace`` returns what to write in its place, once per object.
    Equal trees give equal bytes; containers that are shared stay shared, cycles included.

    Raises TargetError for a value that cannot be written.
    """
    writer = _Writer(persistent_id, replace)
    try:
        writer.save(obj)
    except RecursionError as error:
        raise TargetError("value is nested too deeply to be pickled") from error
    return b"\x80\x02" + b"".join(writer.parts) + b"."


class _Writer:
    """Collects the opcodes of one pickle."""

    def __init__(
        self, persistent_id: Callable[[object], object] | None, replace: Callable[[object], object] | None
    ) -> None:
        self.parts: list[bytes] = []
        self._emit = self.parts.append
        self._persistent_id = persistent_id
        self._replace = replace
        self._shared: dict[int, tuple[bytes, object]] = {}  # by identity: opcode that fetches it; keeps it alive
        self._named: dict[object, bytes] = {}  # by value: strings and globals
        self._num_memo = 0
        self._savers: dict[type, Callable[[Any], None]] = {
            bool: self._bool, type(None): self._none, int: self._int, float: self._float, str: self._str,
            bytes: self._bytes, tuple: self._tuple, list: self._list, dict: self._dict, set: self._set,
            OrderedDict: self._ordered_dict, Global: self._global, Call: self._call, Opaque: self._opaque,
        }  # fmt: skip

    def save(self, value: object) -> None:
        (self._savers.get(type(value)) or self._other)(value)

    def _save_all(self, values: Iterable[object]) -> None:
        savers, other = self._savers, self._other
        for value in values:
            (savers.get(type(value)) or other)(value)

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
        if _SCALARS.issuperset(map(type, value)):
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
        if not all(type(item) in _SCALARS for item in value):
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
