"""JSON and YAML documents of a checkpoint, read without trusting them."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_optim_bridge.core.manifest import Identity
from nemo_optim_bridge.core.store import identify
from nemo_optim_bridge.errors import ContradictionError, CorruptFileError, MissingSourceError, unreadable

MAX_DOCUMENT_BYTES = 64 << 20
_DEEPEST = 64
_MOST_VALUES = 1 << 20

_REPR = reprlib.Repr()
_REPR.maxlevel = 2


def shown(value: object) -> str:
    """Return a value of a document for a message, shortened: aliases can make it endless."""
    return _REPR.repr(value)


class Document(Mapping[str, Any]):
    """A mapping read from a file; its typed getters raise errors that name the file and the field.

    ``identity`` tells the file from later versions of itself.
    """

    def __init__(self, path: Path, data: Mapping[str, Any], identity: Identity, prefix: str = "") -> None:
        self.path = path
        self.data = data
        self.identity = identity
        self._prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __iter__(self) -> Any:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def section(self, key: str) -> Document:
        """Return a nested mapping, empty when absent; raises ContradictionError when it is something else."""
        value = self.data.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise ContradictionError(f"{self._prefix}{key} is not a mapping of names", path=self.path)
        return Document(self.path, value, self.identity, f"{self._prefix}{key}.")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return an integer field (also spelled as a string), or the default when absent; raises when it is not one."""
        value = self.data.get(key, default)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < 1 << 60:
            raise ContradictionError(
                f"{self._prefix}{key} is {shown(value)}, not an integer from {minimum} up", path=self.path
            )
        return value


def read_json(path: Path) -> Document:
    """Read a JSON object; raises MissingSourceError or CorruptFileError."""

    def parse(text: str) -> Any:
        return json.loads(text)

    return _read(path, parse, "JSON")


def read_yaml(path: Path) -> Document:
    """Read a YAML mapping by the safe loader: tags that name Python objects are refused."""

    def parse(text: str) -> Any:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))

    return _read(path, parse, "YAML")


def _is_shallow(data: object) -> bool:
    """Tell whether a document can be walked without fear: few levels, and no value that contains itself."""
    level, seen = [data], 0
    for _ in range(_DEEPEST):
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, dict | list)
        ]
        seen += len(level)
        if not level:
            return True
        if seen > _MOST_VALUES:
            return False
    return False


def _read(path: Path, parse: Any, language: str) -> Document:
    if not path.exists() and not path.is_symlink():
        raise MissingSourceError(f"{path.name} is missing", path=path, hint="copy it from the original run")
    identity = identify(path)
    if identity[1] > MAX_DOCUMENT_BYTES:
        raise CorruptFileError(f"{language} document larger than {MAX_DOCUMENT_BYTES >> 20} MiB", path=path)
    try:
        with path.open("rb") as file:
            data = parse(file.read(MAX_DOCUMENT_BYTES).decode("utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CorruptFileError(f"cannot be read as {language}: {reason}", path=path) from error
    if not _is_shallow(data):
        raise CorruptFileError(f"{language} document is nested deeper than {_DEEPEST} levels", path=path)
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise CorruptFileError(f"{language} document is not a mapping of names", path=path)
    return Document(path, data, identity)
