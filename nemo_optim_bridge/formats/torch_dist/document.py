"""The pickle of ``.metadata`` as data: torch's classes as the dicts of their fields. Nothing it names is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, TypeGuard, cast

from nemo_optim_bridge.core.manifest import ITEMSIZE
from nemo_optim_bridge.core.store import identify
from nemo_optim_bridge.errors import CorruptFileError, unreadable
from nemo_optim_bridge.formats import pickle_data

NAME: Final = ".metadata"
#: Bytes; two million keys take about as many.
_LARGEST: Final = 1 << 30


class Fields:
    """A dataclass of torch's, as the dict of its fields."""

    __slots__ = ("fields",)

    def __init__(self, *args: object) -> None:
        if args:
            raise ValueError("arguments where fields were expected")
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        if type(state) is not dict or not all(type(name) is str for name in state):
            raise ValueError("state is no dict of fields")
        self.fields = state


class Index(Fields):
    """A ``MetadataIndex``: the key of a stored item, compared by name and offset as torch does."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        super().__setstate__(state)
        offset = self.fields.get("offset")
        if type(self.fields.get("fqn")) is not str or not (offset is None or is_ints(offset)):
            raise ValueError("MetadataIndex is not a name and an offset")

    def __hash__(self) -> int:
        return hash((self.fields.get("fqn"), self.fields.get("offset")))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Index):
            return NotImplemented
        mine, theirs = self.fields, other.fields
        return bool(mine.get("fqn") == theirs.get("fqn") and mine.get("offset") == theirs.get("offset"))


class Properties:
    """``TensorProperties``: the dtype, and the whole of the pickled state."""

    __slots__ = ("dtype", "state")

    def __init__(self, *args: object) -> None:
        if args:
            raise ValueError("TensorProperties takes no arguments")
        self.dtype = ""
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        found = state[0] if type(state) is tuple and state else state.get("dtype") if type(state) is dict else None
        if type(found) is not str:
            raise ValueError("TensorProperties name no dtype")
        self.dtype = found
        self.state = state


class TensorEntry(Fields):
    """A ``TensorStorageMetadata``: ``properties``, ``size``, ``chunks``."""

    __slots__ = ()


class BytesEntry(Fields):
    """A ``BytesStorageMetadata``, which has no fields."""

    __slots__ = ()


class ChunkEntry(Fields):
    """A ``ChunkStorageMetadata``: ``offsets`` and ``sizes``."""

    __slots__ = ()


class Place(Fields):
    """A ``_StorageInfo``: ``relative_path``, ``offset`` and ``length`` in bytes."""

    __slots__ = ()


class Document(Fields):
    """The whole: ``state_dict_metadata``, ``storage_data``, and others."""

    __slots__ = ()


def is_ints(value: object) -> TypeGuard[tuple[int, ...]]:
    """Return whether a value is a short tuple of lengths or offsets."""
    return type(value) is tuple and len(value) <= 64 and all(type(n) is int and n >= 0 for n in value)


def _size(*args: object) -> tuple[int, ...]:
    values = args[0] if args else ()
    if len(args) > 1 or type(values) not in (tuple, list):
        raise ValueError("torch.Size takes one tuple")
    size: tuple[object, ...] = tuple(cast("tuple[object, ...]", values))
    if not is_ints(size):
        raise ValueError("torch.Size holds something else than lengths")
    return size


def _enum(*args: object) -> object:
    return args[0] if len(args) == 1 and type(args[0]) in (int, str) else None


def _allow_list() -> dict[tuple[str, str], object]:
    checkpoint = "torch.distributed.checkpoint"
    allow: dict[tuple[str, str], object] = {("torch", dtype): dtype for dtype in ITEMSIZE}
    allow |= {("torch", name): name for name in ("uint16", "uint32", "uint64", "complex64", "complex128")}
    allow |= {
        ("torch", "Size"): _size,
        ("torch.serialization", "_get_layout"): _enum,
        (f"{checkpoint}.filesystem", "_StorageInfo"): Place,
        (f"{checkpoint}.metadata", "_MEM_FORMAT_ENCODING"): _enum,
        (f"{checkpoint}.metadata", "BytesStorageMetadata"): BytesEntry,
        (f"{checkpoint}.metadata", "ChunkStorageMetadata"): ChunkEntry,
        (f"{checkpoint}.metadata", "Metadata"): Document,
        (f"{checkpoint}.metadata", "MetadataIndex"): Index,
        (f"{checkpoint}.metadata", "StorageMeta"): Fields,
        (f"{checkpoint}.metadata", "TensorProperties"): Properties,
        (f"{checkpoint}.metadata", "TensorStorageMetadata"): TensorEntry,
        # from planner data (all_local_plans), which nothing here uses
        (f"{checkpoint}.planner", "SavePlan"): Fields,
        (f"{checkpoint}.planner", "TensorWriteData"): Fields,
        (f"{checkpoint}.planner", "WriteItem"): Fields,
        (f"{checkpoint}.planner", "WriteItemType"): _enum,
    }
    return allow


_ALLOW: Final = _allow_list()


def load_document(root: Path) -> Document:
    """Return the contents of a checkpoint's ``.metadata``.

    Raises MissingSourceError without one, CorruptFileError and UnsafePickleError for one that is damaged or no such
    pickle.
    """
    file = root / NAME
    _, size, *_ = identify(file)
    if size > _LARGEST:
        raise CorruptFileError(f"{NAME} is larger than {_LARGEST >> 20} MiB", path=file)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from error
    loaded = pickle_data.loads(data, path=str(file), allow=_ALLOW)
    if not isinstance(loaded, Document):
        raise CorruptFileError(f"{NAME} does not hold torch's Metadata", path=file)
    entries, places = loaded.fields.get("state_dict_metadata"), loaded.fields.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise CorruptFileError(f"{NAME} lacks its tensors or their places", path=file)
    return loaded
