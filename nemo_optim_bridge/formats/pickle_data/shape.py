"""The shape of what a pickle described: neither cyclic, nor deep, nor unfolding to far more than its bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from nemo_optim_bridge.errors import CorruptFileError

#: Nesting of containers that any reader may recurse into; real checkpoints stay below 20.
MAX_DEPTH: Final = 100
_CONTAINERS: Final = frozenset({dict, OrderedDict, list, tuple})


def check_tree(root: object, limit: int, path: str) -> None:
    """Refuse what would make a recursive reader overflow its stack, loop or take forever."""
    if type(root) in _CONTAINERS:
        _Measure(limit, path).container(root)


class _Measure:
    """Measures every container of a tree once; recurses no deeper than MAX_DEPTH itself."""

    def __init__(self, limit: int, path: str) -> None:
        self._limit, self._path = limit, path
        self._finished: dict[int, tuple[int, int]] = {}
        self._open: set[int] = set()

    def container(self, value: Any) -> tuple[int, int]:
        """Return the height of a container, and its size when unfolded."""
        known = self._finished.get(id(value))
        if known is not None:
            return known
        if id(value) in self._open:
            raise self._corrupt("a container contains itself")
        if len(self._open) >= MAX_DEPTH:
            raise self._corrupt(f"nested deeper than {MAX_DEPTH}")
        self._open.add(id(value))
        height, size = 1, 1 + len(value)
        for child in value.values() if isinstance(value, dict) else value:
            if type(child) in _CONTAINERS:
                below, inside = self.container(child)
                height = max(height, below + 1)
                size += inside
        self._open.discard(id(value))
        if height > MAX_DEPTH:
            raise self._corrupt(f"nested deeper than {MAX_DEPTH}")
        if size > self._limit:
            raise self._corrupt("shared parts unfold to far more than the file holds")
        self._finished[id(value)] = height, size
        return height, size

    def _corrupt(self, problem: str) -> CorruptFileError:
        return CorruptFileError(f"malformed pickle: {problem}", path=self._path)
