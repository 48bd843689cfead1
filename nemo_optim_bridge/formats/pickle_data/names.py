"""What a pickle names, calls and makes, as data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

_MAX_ARGS: Final = 64
#: Types that hold nothing else.
SCALARS: Final = frozenset({str, int, float, bool, type(None), bytes})


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


class Alike(NamedTuple):
    """What ``dumps`` writes as ``form(key)``: values of one form differ in nothing but ``key``, which they hold once.

    ``form`` takes anything for a key, and is told from others by equality.
    """

    form: Callable[[object], object]
    key: str


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


def short(text: str) -> str:
    """Return text of unknown origin fit for a message: short, and without control characters."""
    return repr(text[:200])[1:-1] + ("..." if len(text) > 200 else "")
