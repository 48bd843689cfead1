"""The header of a safetensors file that holds one tensor, as nanotron writes its weight shards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from nemo_optim_bridge.core.manifest import ITEMSIZE
from nemo_optim_bridge.errors import CorruptFileError, MissingSourceError

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
    metadata: Mapping[str, str]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


def read_single_tensor(path: Path, key: str) -> StoredArray:
    """Read the header of a file that holds exactly the tensor ``key``; the safetensors library validates it.

    Raises CorruptFileError for anything else, MissingSourceError when there is no file.
    """
    try:
        with safe_open(os.fspath(path), framework="np") as file:
            keys = list(file.keys())
            metadata = dict(file.metadata() or {})
            if keys != [key]:
                raise CorruptFileError(f"holds tensors {keys[:5]} instead of only {key!r}", path=path)
            view = file.get_slice(key)
            code, shape = str(view.get_dtype()), tuple(int(n) for n in view.get_shape())
        size = path.stat().st_size
    except FileNotFoundError:
        raise MissingSourceError("weight shard is missing", path=path) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptFileError(
            f"not a valid safetensors file: {error}", path=path, hint="copy the file again from the original run"
        ) from error
    if code not in _DTYPES:
        raise CorruptFileError(f"holds elements of unsupported dtype {code}", path=path, key=key)
    dtype = _DTYPES[code]
    return StoredArray(dtype, shape, metadata, size - prod(shape) * ITEMSIZE[dtype])


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
