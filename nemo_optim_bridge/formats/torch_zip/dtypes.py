"""Torch's names of storages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MAX_NDIM: Final = 64

#: Storage classes by dtype, as torch.save names them; dtypes that have none are stored as UntypedStorage.
STORAGE_CLASS: Final[Mapping[str, str]] = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "bfloat16": "BFloat16Storage", "float16": "HalfStorage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage",
}  # fmt: skip
