"""The shape of what a pickle described: neither cyclic, nor deep, nor unfolding to far more than its bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, cast

from nemo_optim_bridge.errors import CorruptFileError

#: Nesting of containers that any reader may recurse into; real checkpoints stay below 20.
MAX_DEPTH: Final = 100
_CONTAINERS: Final = frozenset({dict, OrderedDict, list, tuple})


def check_tree(root: object, limit: int, path: str) -> None:
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
