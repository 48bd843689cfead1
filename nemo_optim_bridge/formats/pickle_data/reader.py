"""Read a pickle as data: the C unpickler on admitted opcodes; every decision is taken here, where types are checked."""

from __future__ import annotations

import io
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from nemo_optim_bridge.errors import BridgeError, CorruptFileError, UnsafePickleError
from nemo_optim_bridge.formats.pickle_data.admit import admit
from nemo_optim_bridge.formats.pickle_data.names import SCALARS, Global, Opaque, short
from nemo_optim_bridge.formats.pickle_data.shape import check_tree

#: Containers and leaves of the tree once shared parts are counted every time, per byte of pickle.
_MAX_UNFOLDED_PER_BYTE: Final = 200
_MAX_ATTRIBUTES: Final = 64
_MAX_INT_KEY: Final = 1 << 32  # beyond it, hash(int) can be made to collide at will


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
    may raise any Exception to refuse them; what it, or ``persistent_load``, returns must be neither callable nor a
    bytearray. A BUILD state is given to the object's ``__setstate__``; an object without one accepts no state. Objects
    used as dict keys are hashed: check their fields in ``__setstate__``.
    ``collections.OrderedDict``, bytes and sets of scalars are always understood.

    With ``opaque``, names that are not in ``allow`` become ``Global`` and what is made from them ``Opaque``.

    Raises UnsafePickleError for a name or opcode that is not allowed, CorruptFileError for anything malformed: nesting
    deeper than MAX_DEPTH, cycles outside of Opaque objects, shared parts that unfold to far more than the file holds,
    container keys.
    """
    try:
        rewritten = admit(data, path, opaque)
        machine = _Machine(rewritten, path, allow, persistent_load, opaque, data[1] < 3, len(data))
        root = machine.load()
        machine.memo.clear()  # it holds names that hold the machine
        check_tree(root, _MAX_UNFOLDED_PER_BYTE * len(data) + 10_000, path)
    except (BridgeError, MemoryError):
        raise
    except Exception as error:
        raise CorruptFileError(f"malformed pickle: {short(str(error))}", path=path) from error
    return root


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

    def find_class(self, module: str, name: str) -> Any:
        if self._old_names:
            if (module, name) in NAME_MAPPING:
                module, name = NAME_MAPPING[module, name]
            else:
                module = IMPORT_MAPPING.get(module, module)
        value = self._allow.get((module, name), self)
        if value is self:
            value = self._always(module, name)
            if value is None:
                if self._opaque:
                    return Global(module, name)
                raise UnsafePickleError(
                    f"pickle names {short(module)}.{short(name)}, which is not on the allow-list; nothing was run",
                    path=self._path,
                    hint="if the file is yours, load it where it comes from and save plain data and tensors only",
                )
        return Global(module, name, value) if callable(value) and not isinstance(value, Global) else value

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is tuple and len(pid) == 3 and type(pid[2]) is bytearray:
            return _HANDLERS[pid[2][0]](self, pid[0], pid[1])
        if self._load_persistent is None:
            raise self._corrupt("reference to something outside of the pickle")
        return self._load_persistent(pid)

    def _always(self, module: str, name: str) -> Callable[..., object] | None:
        """Return what a name stands for in every pickle, if it does."""
        always: Mapping[tuple[str, str], Callable[..., object]] = {
            ("collections", "OrderedDict"): _ordered_dict,
            ("_codecs", "encode"): self._encode,
            ("builtins", "bytes"): _empty_bytes,
            ("builtins", "set"): self._set,
        }
        return always.get((module, name))

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


#: By the numbers that ``admit`` hands over. No machine holds a method of its own: it goes with its last user.
_HANDLERS: Final[tuple[Callable[[_Machine, Any, Any], object], ...]] = (
    _Machine._newobj, _Machine._build, _Machine._setitems, _Machine._appends, _Machine._fill_build,
)  # fmt: skip


def _ordered_dict() -> OrderedDict[object, object]:
    return OrderedDict()


def _empty_bytes() -> bytes:
    return b""


def _is_key(value: object, nested: int = 2) -> bool:
    """Say whether hashing ``value`` is cheap; C hashes nested tuples without any limit on depth or time."""
    kind = type(value)
    if kind is int:
        return -_MAX_INT_KEY < cast("int", value) < _MAX_INT_KEY
    if kind in SCALARS:
        return True
    if isinstance(value, tuple):
        return nested > 0 and len(value) <= 32 and all(_is_key(item, nested - 1) for item in value)
    return not isinstance(value, list | dict | set | frozenset)


def _kind(value: object) -> str:
    return short(str(value)) if type(value) is Global else f"a value of type {type(value).__name__}"
