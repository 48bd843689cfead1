"""Rewrite ``.metadata``: the same places under other keys. Nothing that the pickle names is imported.

The items of a ``.distcp`` file do not carry their keys, so that renaming here is all that renaming takes, and two keys
for one place are an alias. Plans of the save (``planner_data``, ``all_local_plans``) name the old keys; no load needs
them, and they are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from nemo_optim_bridge.errors import CorruptFileError, MissingSourceError
from nemo_optim_bridge.formats import pickle_data
from nemo_optim_bridge.formats.pickle_data import Global, Opaque
from nemo_optim_bridge.formats.torch_dist.reader import ALLOWED_NAMES

_CHECKPOINT: Final = "torch.distributed.checkpoint"
_INDEX: Final = Global(f"{_CHECKPOINT}.metadata", "MetadataIndex")
_METADATA: Final = Global(f"{_CHECKPOINT}.metadata", "Metadata")
_STORAGE: Final = Global(f"{_CHECKPOINT}.filesystem", "_StorageInfo")
_DROPPED: Final = ("planner_data", "all_local_plans", "all_global_plans")


#: Names that a pickle calls; all others are classes whose objects are made empty and then given their fields.
_CALLED: Final = frozenset({"Size", "_get_layout", "_MEM_FORMAT_ENCODING", "WriteItemType"})


def _keep(name: Global, *args: object) -> Opaque:
    return Opaque(name, args, newobj=name.name not in _CALLED)


def _allow_list() -> dict[tuple[str, str], object]:
    """Admit the names that the reader admits; objects stay unopened and are written back as they are."""
    allow: dict[tuple[str, str], object] = {}
    for module, name in ALLOWED_NAMES:
        known = Global(module, name)
        is_dtype = module == "torch" and name != "Size"
        allow[module, name] = known if is_dtype else partial(_keep, known)
    return allow


_ALLOW: Final = _allow_list()


class MetadataFile:
    """The unopened contents of a ``.metadata`` file."""

    def __init__(self, root: Path) -> None:
        file = root / ".metadata"
        try:
            data = file.read_bytes()
        except OSError as error:
            raise MissingSourceError(f".metadata cannot be read ({error.strerror})", path=file) from error
        loaded = pickle_data.loads(data, path=str(file), allow=_ALLOW)
        if type(loaded) is not Opaque or loaded.function != _METADATA or type(loaded.state) is not dict:
            raise CorruptFileError(".metadata does not hold torch's Metadata", path=file)
        self._fields: dict[str, Any] = loaded.state

    def renamed(
        self,
        rename: Callable[[str], Sequence[str]],
        replaced: Mapping[tuple[str, tuple[int, ...]], tuple[str, int, int]] | None = None,
    ) -> bytes:
        """Return the pickle with every key replaced by those that ``rename`` gives: none, one, or several aliases.

        ``replaced`` maps (old key, offsets) of chunks to another (file, offset, nbytes) that they are stored at.
        """
        names: dict[str, tuple[str, ...]] = {}

        def new(key: str) -> tuple[str, ...]:
            found = names.get(key)
            if found is None:
                found = names[key] = tuple(rename(key))
            return found

        fields = {name: value for name, value in self._fields.items() if name not in _DROPPED}
        fields["planner_data"] = None
        fields["state_dict_metadata"] = _renamed_dict(fields["state_dict_metadata"], new)
        if isinstance(fields.get("mcore_data"), dict):
            fields["mcore_data"] = _renamed_dict(fields["mcore_data"], new)
        places: dict[object, object] = {}
        for index, place in fields["storage_data"].items():
            if replaced:
                place = _moved(index, place, replaced)
            key = index.state["fqn"]
            for name in new(key):
                places[_renamed_index(index, name)] = place
        fields["storage_data"] = places
        metadata = Opaque(_METADATA, newobj=True)
        metadata.state = fields
        return pickle_data.dumps(metadata)


def _renamed_dict(entries: Mapping[str, Any], new: Callable[[str], Sequence[str]]) -> dict[str, Any]:
    return {name: entry for key, entry in entries.items() for name in new(key)}


def _renamed_index(index: Opaque, name: str) -> Opaque:
    state: Any = index.state
    if state["fqn"] == name:
        return index
    renamed = Opaque(_INDEX, newobj=True)
    renamed.state = {**state, "fqn": name}
    return renamed


def _moved(
    index: Opaque, place: Opaque, replaced: Mapping[tuple[str, tuple[int, ...]], tuple[str, int, int]]
) -> Opaque:
    state: Any = index.state
    offset = state.get("offset")
    if not isinstance(offset, Opaque):
        return place
    found = replaced.get((state["fqn"], tuple(cast("tuple[int, ...]", offset.args[0]))))
    if found is None:
        return place
    moved = Opaque(_STORAGE, newobj=True)
    moved.state = {"relative_path": found[0], "offset": found[1], "length": found[2]}
    return moved
