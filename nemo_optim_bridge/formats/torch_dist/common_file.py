"""Write ``common.pt`` back: plain data and tensors as they were, objects of unknown classes unopened."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from nemo_optim_bridge.errors import CorruptFileError, MissingSourceError
from nemo_optim_bridge.formats import torch_zip
from nemo_optim_bridge.formats.crcs import require_valid
from nemo_optim_bridge.formats.pickle_data import Opaque
from nemo_optim_bridge.formats.torch_zip import NewTensor, StoredTensor, TorchFile


class CommonFile:
    """The tree of a ``common.pt``; its leaves may be ``StoredTensor`` and ``Opaque``."""

    def __init__(self, root: Path) -> None:
        self.path = root / "common.pt"
        if not self.path.is_file():
            raise MissingSourceError("no common.pt", path=root, hint="the checkpoint is incomplete")
        self._file: TorchFile = torch_zip.read_torch_file(self.path, opaque=True)
        require_valid(self._file, bytearray(1 << 16))
        if not isinstance(self._file.root, dict):
            raise CorruptFileError("common.pt holds no dict", path=self.path)
        self.tree: dict[Any, Any] = self._file.root

    def dumps(self, tree: Mapping[Any, Any]) -> bytes:
        """Return a ``common.pt`` of ``tree``, which may share any part of this file's tree.

        Raises TargetError for a value that cannot be written.
        """
        return torch_zip.lay_out(_Rewriter(self._file).rewrite(tree), "common").text


class _Rewriter:
    """Copies a tree with every stored tensor replaced by one to write; shared parts stay shared, cycles included."""

    def __init__(self, file: TorchFile) -> None:
        self._file = file
        self._done: dict[int, tuple[object, Any]] = {}

    def rewrite(self, value: Any) -> Any:
        kind = type(value)
        if kind not in (dict, OrderedDict, list, tuple, Opaque, StoredTensor):
            return value
        known = self._done.get(id(value))
        if known is not None:
            return known[1]
        if kind is StoredTensor:
            data = self._file.read(value)
            return self._finish(value, NewTensor(value.dtype, value.shape, data, value.requires_grad))
        if kind is tuple:
            return self._finish(value, tuple(map(self.rewrite, value)))
        if kind is list:
            items: list[Any] = self._finish(value, [])
            items.extend(map(self.rewrite, value))
            return items
        if kind is Opaque:
            return self._opaque(value)
        made: dict[Any, Any] = self._finish(value, kind())
        made.update((self.rewrite(key), self.rewrite(item)) for key, item in value.items())
        if kind is OrderedDict:
            vars(made).update(self.rewrite(vars(value)))
        return made

    def _opaque(self, value: Opaque) -> Opaque:
        made = Opaque(value.function, (), newobj=value.newobj)
        self._finish(value, made)
        made.args = tuple(map(self.rewrite, value.args))
        made.items = [self.rewrite(item) for item in value.items]
        made.pairs = [(self.rewrite(key), self.rewrite(item)) for key, item in value.pairs]
        made.state = self.rewrite(value.state)
        return made

    def _finish(self, value: Any, made: Any) -> Any:
        self._done[id(value)] = (value, made)
        return made


def opaque_classes(tree: object) -> list[str]:
    """Return the classes of unopened objects in a tree, sorted, for reports."""
    found: set[str] = set()
    seen: set[int] = set()
    todo: list[object] = [tree]
    while todo:
        value = todo.pop()
        if isinstance(value, dict | list | tuple | Opaque):
            if id(value) in seen:
                continue
            seen.add(id(value))
            todo.extend(_children(value))
        if type(value) is Opaque:
            found.add(str(value.function))
    return sorted(found)


def _children(value: object) -> Iterator[object]:
    if isinstance(value, Opaque):
        yield from value.args
        yield from value.items
        for key, item in value.pairs:
            yield from (key, item)
        yield value.state
    elif isinstance(value, dict):
        yield from value.values()
    else:
        yield from cast("list[object]", value)
