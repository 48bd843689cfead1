"""The header of a safetensors file that holds one tensor, as nanotron writes its weight shards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Final

from nemo_optim_bridge.core.manifest import ITEMSIZE, Identity
from nemo_optim_bridge.core.store import open_identified
from nemo_optim_bridge.errors import CorruptFileError, MissingSourceError, unreadable

#: A header with one tensor takes a few hundred bytes.
MAX_HEADER_BYTES: Final = 1 << 16
_HEAD_BYTES: Final = 1 << 10
_MAX_NDIM: Final = 64
_DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
_NAMES = {name: code for code, name in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A tensor in a safetensors file: its dtype, shape, metadata, and the byte offset of its data."""

    dtype: str
    shape: tuple[int, ...]
    metadata: Mapping[str, str] = field(hash=False)
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


def read_single_tensor(path: str | os.PathLike[str], key: str) -> tuple[StoredArray, Identity]:
    """Read the header of a file that holds exactly the tensor ``key``, by pread: nothing is mapped into memory.

    Returns the file's identity too. Files with the same header share one StoredArray.

    Raises CorruptFileError for anything else, MissingSourceError when there is no file.
    """
    try:
        descriptor, identity = open_identified(path)
    except MissingSourceError:
        raise MissingSourceError("weight shard is missing", path=path) from None
    size = identity[1]
    try:
        head = os.pread(descriptor, _HEAD_BYTES, 0)
        length = int.from_bytes(head[:8], "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        found = _parse(head[8 : 8 + length] if 8 + length <= len(head) else os.pread(descriptor, length, 8), key)
        if size != found.offset + found.nbytes:
            raise ValueError(f"{size - found.offset} bytes of data for {found.dtype} {list(found.shape)}")
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(
            f"not a valid safetensors file: {error}", path=path, hint="copy the file again from the original run"
        ) from error
    finally:
        os.close(descriptor)
    return found, identity


@lru_cache(maxsize=1 << 10)  # layers repeat each other
def _parse(text: bytes, key: str) -> StoredArray:
    """Return what a header says of its only tensor; raises ValueError for anything else."""
    header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    found = StoredArray(*_fields(header, key), 8 + len(text))
    if header[key]["data_offsets"] != [0, found.nbytes]:
        raise ValueError(f"data at {header[key]['data_offsets']} for {found.dtype} {list(found.shape)}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name appears twice")
    return fields


def _fields(header: Any, key: str) -> tuple[str, tuple[int, ...], dict[str, str]]:
    """Return dtype, shape and metadata of a header's only tensor; raises ValueError for anything else."""
    if not isinstance(header, dict):
        raise ValueError("the header is no mapping")
    names = sorted(name for name in header if name != "__metadata__")
    if names != [key]:
        raise ValueError(f"it holds tensors {[name[:80] for name in names[:5]]} instead of only {key!r}")
    entry, metadata = header[key], header.get("__metadata__") or {}
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{key} has not exactly dtype, shape and data_offsets")
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is no mapping of names to text")
    code, shape = entry["dtype"], entry["shape"]
    if not isinstance(code, str) or code not in _DTYPES:
        raise ValueError(f"its elements are of unsupported dtype {str(code)[:40]}")
    if not isinstance(shape, list) or len(shape) > _MAX_NDIM or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("its shape is no list of sizes")
    return _DTYPES[code], tuple(shape), metadata


def format_header(key: str, dtype: str, shape: tuple[int, ...], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes that precede the data of a file with one tensor, padded to 8 bytes as the format asks."""
    nbytes = prod(shape) * ITEMSIZE[dtype]
    header = {
        "__metadata__": dict(metadata),
        key: {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [0, nbytes]},
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
