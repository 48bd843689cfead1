"""Write ``.metadata`` anew: the same places under other keys. Nothing that the pickle names is imported.

The items of a ``.distcp`` file do not carry their keys, so that renaming here is all that renaming takes, and two keys
for one place are an alias. Plans of the save (``planner_data``, ``all_local_plans``) name the old keys; no load needs
them, and they are left out.

There may be a million keys, so opcodes are put together from few parts that are made once: names and fields are put
into the pickle's memo at its beginning and fetched from then on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from nemo_optim_bridge.errors import UnknownFormatError
from nemo_optim_bridge.formats.torch_dist.document import (
    NAME,
    BytesEntry,
    ChunkEntry,
    Document,
    Fields,
    Index,
    Place,
    Properties,
    TensorEntry,
    is_ints,
)

#: Where the chunk of a tensor lies now: (key, offsets) -> (file, offset, nbytes).
Moved = Mapping[tuple[str, tuple[int, ...]], tuple[str, int, int]]

_CHECKPOINT: Final = "torch.distributed.checkpoint"
_DROPPED: Final = ("planner_data", "all_local_plans", "all_global_plans")
_BATCH: Final = 1000  # entries that are set at a time, as Python's own pickler does
_NONE: Final = b"N"


def renamed_metadata(document: Document, rename: Callable[[str], Sequence[str]], moved: Moved | None = None) -> bytes:
    """Return the pickle with every key replaced by those that ``rename`` gives: none, one, or several aliases.

    Raises UnknownFormatError for parts that this version does not know how to write.
    """
    return _Writer(rename, moved or {}).write(document)


class _Writer:
    """Puts the opcodes of one pickle together."""

    def __init__(self, rename: Callable[[str], Sequence[str]], moved: Moved) -> None:
        self._out = bytearray(b"\x80\x02")
        self._num_memo = 0
        self._rename = rename
        self._moved = moved
        self._names: dict[str, tuple[str, ...]] = {}
        self._fetch: dict[str, bytes] = {}
        self._properties_of: dict[tuple[object, ...], bytes] = {}
        self._objects = {
            name: self._constant(f"c{_CHECKPOINT}.{module}\n{name}\n".encode()) + b")\x81"
            for module, name in (
                ("filesystem", "_StorageInfo"), ("metadata", "BytesStorageMetadata"),
                ("metadata", "ChunkStorageMetadata"), ("metadata", "MetadataIndex"), ("metadata", "StorageMeta"),
                ("metadata", "TensorProperties"), ("metadata", "TensorStorageMetadata"),
            )
        }  # fmt: skip
        self._torch_size = self._constant(b"ctorch\nSize\n")
        self._layout = self._constant(b"ctorch.serialization\n_get_layout\n")
        self._encoding = self._constant(f"c{_CHECKPOINT}.metadata\n_MEM_FORMAT_ENCODING\n".encode())
        self.size = lru_cache(maxsize=1 << 14)(self._size)

    def write(self, document: Document) -> bytes:
        """Return the whole pickle."""
        fields = {name: value for name, value in document.fields.items() if name not in _DROPPED}
        entries, places = fields.pop("state_dict_metadata"), fields.pop("storage_data")
        mcore = fields.pop("mcore_data", None)
        self._append(f"c{_CHECKPOINT}.metadata\nMetadata\n".encode(), b")\x81}(")
        self._append(self._shared("state_dict_metadata"))
        self._dict(self._entries(entries))
        self._append(self._shared("storage_data"))
        self._dict(self._places(places))
        self._append(self._shared("planner_data"), _NONE)
        if isinstance(mcore, dict):
            self._append(self._shared("mcore_data"))
            self._dict((name, self.plain(value)) for key, value in mcore.items() for name in self._new_names(key))
        for name, value in fields.items():
            self._append(self._shared(name), self._field(value))
        self._append(b"ub.")
        return bytes(self._out)

    def _append(self, *opcodes: bytes) -> None:
        for part in opcodes:
            self._out += part

    def _dict(self, items: Iterable[tuple[str, bytes]]) -> None:
        """Write a dict; a key that is a name is put into the memo, any other comes as opcodes with its value."""
        out = self._out
        out += b"}"
        count = 0
        for name, opcodes in items:
            if count % _BATCH == 0:
                out += b"u(" if count else b"("
            if name:  # put into the memo first, if it is not there yet
                fetch = self._shared(name)
                out += fetch
            out += opcodes
            count += 1
        if count:
            out += b"u"

    # ------------------------------------------------------------------------------------------------- entries

    def _new_names(self, key: str) -> tuple[str, ...]:
        found = self._names.get(key)
        if found is None:
            found = self._names[key] = tuple(self._rename(key))
        return found

    def _entries(self, entries: Mapping[str, Any]) -> Iterable[tuple[str, bytes]]:
        for key, entry in entries.items():
            opcodes = self._entry(key, entry)
            for name in self._new_names(key):
                yield name, opcodes

    def _entry(self, key: str, entry: object) -> bytes:
        if isinstance(entry, BytesEntry) and not entry.fields:
            return self._objects["BytesStorageMetadata"]
        if not isinstance(entry, TensorEntry) or entry.fields.keys() != {"properties", "size", "chunks"}:
            raise _unknown(key, entry)
        shared, objects = self._shared, self._objects
        parts = [
            objects["TensorStorageMetadata"], b"}(", shared("properties"),
            self._properties(key, entry.fields["properties"]), shared("size"), self.size(entry.fields["size"]),
            shared("chunks"), b"](",
        ]  # fmt: skip
        for chunk in entry.fields["chunks"]:
            if not isinstance(chunk, ChunkEntry) or chunk.fields.keys() != {"offsets", "sizes"}:
                raise _unknown(key, chunk)
            offsets, sizes = self.size(chunk.fields["offsets"]), self.size(chunk.fields["sizes"])
            parts += (
                objects["ChunkStorageMetadata"], b"}(", shared("offsets"), offsets, shared("sizes"), sizes, b"ub",
            )  # fmt: skip
        parts.append(b"eub")
        return b"".join(parts)

    def _properties(self, key: str, properties: Properties) -> bytes:
        """Write dtype, layout, requires_grad, memory format and pin_memory, as torch pickles them."""
        state = properties.state
        known = self._properties_of.get(state) if isinstance(state, tuple) else None
        if known is not None:
            return known
        if not isinstance(state, tuple) or tuple(map(type, state)) != (str, str, bool, int, bool):
            raise _unknown(key, properties)
        dtype, layout, requires_grad, encoding, pinned = state
        parts = (
            self._objects["TensorProperties"], b"(", self._constant(f"ctorch\n{dtype}\n".encode()),
            self._layout, _string(layout), b"\x85R", _bool(requires_grad),
            self._encoding, _int(encoding), b"\x85R", _bool(pinned), b"tb",
        )  # fmt: skip
        known = self._properties_of[state] = b"".join(parts)
        return known

    # -------------------------------------------------------------------------------------------------- places

    def _places(self, places: Mapping[Index, Place]) -> Iterable[tuple[str, bytes]]:
        start = self._objects["MetadataIndex"] + b"}(" + self._shared("fqn")
        for index, place in places.items():
            key, offset = index.fields["fqn"], index.fields.get("offset")
            rest = self._index_rest(key, index) + self._place(key, offset, place)
            for name in self._new_names(key):
                yield "", start + self._shared(name) + rest

    def _index_rest(self, key: str, index: Index) -> bytes:
        parts = []
        for name, value in index.fields.items():
            if name == "offset":
                parts += [self._shared(name), _NONE if value is None else self.size(value)]
            elif name == "index" and (value is None or type(value) is int):
                parts += [self._shared(name), _NONE if value is None else _int(value)]
            elif name != "fqn":
                raise _unknown(key, index)
        return b"".join((*parts, b"ub"))

    def _place(self, key: str, offset: tuple[int, ...] | None, place: Place) -> bytes:
        fields = place.fields
        found = self._moved.get((key, offset)) if offset is not None else None
        if found is not None:
            fields = {**fields, "relative_path": found[0], "offset": found[1], "length": found[2]}
        parts = [self._objects["_StorageInfo"], b"}("]
        for name, value in fields.items():
            written = self._shared(value) if name == "relative_path" else self.plain(value)
            parts += (self._shared(name), written)
        parts.append(b"ub")
        return b"".join(parts)

    # --------------------------------------------------------------------------------------------------- parts

    def _field(self, value: object) -> bytes:
        """Write a field of the whole: plain, or the ``StorageMeta``."""
        if type(value) is Fields:
            return self._objects["StorageMeta"] + self.plain(value.fields) + b"b"
        return self.plain(value)

    def plain(self, value: object) -> bytes:
        """Write plain data; raises UnknownFormatError for anything else."""
        kind = type(value)
        if value is None:
            return _NONE
        if isinstance(value, bool):
            return _bool(value)
        if isinstance(value, int):
            return _int(value)
        if isinstance(value, float):
            return struct.pack(">cd", b"G", value)
        if isinstance(value, str):
            return _string(value)
        if kind is tuple or kind is list:
            items = b"".join(map(self.plain, value))  # type: ignore[call-overload]
            return b"(" + items + b"t" if kind is tuple else b"](" + items + b"e"
        if isinstance(value, dict):
            return b"}(" + b"".join(self.plain(k) + self.plain(v) for k, v in value.items()) + b"u"
        raise _unknown(None, value)

    def _size(self, size: tuple[int, ...]) -> bytes:
        if not is_ints(size):
            raise _unknown(None, size)
        return self._torch_size + b"(" + b"".join(map(_int, size)) + b"t\x85R"

    def _constant(self, opcodes: bytes) -> bytes:
        """Put a value into the memo, and return the opcodes that fetch it.

        It is pushed and popped, so that this may happen between any two values.
        """
        number = self._num_memo
        self._num_memo += 1
        self._out += opcodes + _put(number) + b"0"
        return _get(number)

    def _shared(self, text: str) -> bytes:
        """Return the opcodes that fetch a string from the memo."""
        known = self._fetch.get(text)
        if known is None:
            known = self._fetch[text] = self._constant(_string(text))
        return known


def _put(number: int) -> bytes:
    return b"q" + bytes((number,)) if number < 256 else b"r" + number.to_bytes(4, "little")


def _get(number: int) -> bytes:
    return b"h" + bytes((number,)) if number < 256 else b"j" + number.to_bytes(4, "little")


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def _bool(value: bool) -> bytes:
    return b"\x88" if value else b"\x89"


def _int(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes((value,))
    if -(1 << 31) <= value < 1 << 31:
        return struct.pack("<ci", b"J", value)
    width = (value.bit_length() >> 3) + 1
    return b"\x8a" + bytes((width,)) + value.to_bytes(width, "little", signed=True)


def _unknown(key: str | None, value: object) -> UnknownFormatError:
    return UnknownFormatError(
        f"{NAME} has a {type(value).__name__} that cannot be written again", key=key,
        hint="use a newer version of this package",
    )  # fmt: skip
