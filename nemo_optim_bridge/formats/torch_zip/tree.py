"""The tree in ``data.pkl``: torch's rebuild functions as checks that make views of records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, NamedTuple, cast

from nemo_optim_bridge.core.manifest import ITEMSIZE
from nemo_optim_bridge.errors import CorruptFileError, UnknownFormatError
from nemo_optim_bridge.formats.pickle_data import Global
from nemo_optim_bridge.formats.torch_zip.directory import Record
from nemo_optim_bridge.formats.torch_zip.dtypes import MAX_NDIM, STORAGE_CLASS
from nemo_optim_bridge.formats.torch_zip.window import Window


@dataclass(slots=True, unsafe_hash=True)  # freezing takes as long as all the rest of making one
class StoredStorage:
    """A storage of ``numel`` elements at the start of a record."""

    dtype: str
    record: Record
    numel: int


@dataclass(slots=True, unsafe_hash=True)
class StoredTensor:
    """A strided view of a record; ``stride`` and ``storage_offset`` are in elements from the record's start."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    record: Record
    requires_grad: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the view's elements in bytes."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


class _StorageClass(NamedTuple):
    """A storage class of torch; ``dtype`` is that of its elements."""

    dtype: str


def _constants() -> dict[tuple[str, str], object]:
    """Return what torch's data names stand for; dtypes stay names, so that they can be written again."""
    allow: dict[tuple[str, str], object] = {}
    for dtype, storage in STORAGE_CLASS.items():
        for module in ("torch", "torch.cuda"):
            allow[module, storage] = _StorageClass(dtype)
    for module in ("torch", "torch.storage"):
        allow[module, "UntypedStorage"] = _StorageClass("uint8")
    for name in (*ITEMSIZE, "uint16", "uint32", "uint64", "complex64", "complex128"):
        allow["torch", name] = Global("torch", name)
    for module, name in (
        ("torch", "device"), ("torch", "Tensor"), ("torch.nn.parameter", "Parameter"),
        ("torch.serialization", "_get_layout"), ("collections", "Counter"), ("builtins", "complex"),
    ):  # fmt: skip
        allow[module, name] = Global(module, name)
    allow["torch", "Size"] = _size
    return allow


def _size(values: object) -> tuple[int, ...]:
    if type(values) not in (tuple, list) or len(cast("tuple[object]", values)) > MAX_NDIM:
        raise ValueError("sizes are no short tuple")
    sizes = tuple(cast("tuple[int]", values))
    if any(type(size) is not int for size in sizes):
        raise ValueError("sizes are not ints")
    return sizes


_CONSTANTS: Final = _constants()
_TENSOR_CLASSES: Final = (Global("torch", "Tensor"), Global("torch.nn.parameter", "Parameter"))


class Rebuilder:
    """Stands in for torch's rebuild functions while one file's pickle is read."""

    def __init__(self, records: Mapping[str, Record], window: Window) -> None:
        self._records = records
        self._window = window
        self._storages: dict[str, StoredStorage] = {}

    def allow(self) -> dict[tuple[str, str], object]:
        """Return what torch's names stand for in the file's pickle."""
        return {
            **_CONSTANTS,
            ("torch._utils", "_rebuild_tensor"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._tensor_v3,
            ("torch._utils", "_rebuild_parameter"): self._parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): self._parameter,
            ("torch._tensor", "_rebuild_from_type_v2"): self._from_type,
        }

    def storage(self, pid: object) -> StoredStorage:
        """Return the storage that a persistent id ``("storage", class, key, device, numel)`` names."""
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
            raise self._corrupt("refers to something that is not a storage")
        _, kind, key, _, numel = pid
        if type(kind) is not _StorageClass or type(key) is not str or type(numel) is not int or numel < 0:
            raise self._corrupt("has a malformed storage reference")
        known = self._storages.get(key)
        if known is not None:
            if known.dtype != kind.dtype or known.numel != numel:
                raise self._corrupt(f"describes storage {_short(key)} in two ways")
            return known
        record = self._records.get("data/" + key)
        if record is None:
            raise self._corrupt(f"lacks the record of storage {_short(key)}")
        if numel * ITEMSIZE[kind.dtype] > record.nbytes:
            raise self._corrupt(f"has storage {_short(key)} of {record.nbytes} bytes, too few for {numel} {kind.dtype}")
        storage = self._storages[key] = StoredStorage(kind.dtype, record, numel)
        return storage

    def _tensor(
        self, storage: Any, storage_offset: Any, shape: Any, stride: Any, requires_grad: Any = False,
        _hooks: object = None, metadata: object = None,
    ) -> StoredTensor:  # fmt: skip
        if type(storage) is not StoredStorage or type(requires_grad) is not bool:
            raise self._corrupt("has a tensor without a storage")
        if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride) or len(shape) > MAX_NDIM:
            raise self._corrupt("has a tensor with malformed sizes or strides")
        if type(storage_offset) is not int or storage_offset < 0:
            raise self._corrupt("has a tensor with a malformed offset")
        if metadata:
            raise self._corrupt("has a tensor that is a conjugate or negative view")
        last, empty = storage_offset, False
        for size, step in zip(shape, stride, strict=True):
            if type(size) is not int or type(step) is not int or size < 0 or step < 0:
                raise self._corrupt("has a tensor with malformed sizes or strides")
            if not size:
                empty = True
            last += (size - 1) * step
        if not empty and last >= storage.numel:
            raise self._corrupt(f"has a tensor that reaches past the end of record {storage.record.name}")
        return StoredTensor(storage.dtype, shape, stride, storage_offset, storage.record, requires_grad)

    def _tensor_v3(
        self, storage: Any, storage_offset: object, shape: object, stride: object, requires_grad: object,
        hooks: object, dtype: Any, metadata: object = None,
    ) -> StoredTensor:  # fmt: skip
        if type(storage) is not StoredStorage or type(dtype) is not Global or dtype.module != "torch":
            raise self._corrupt("has a tensor without a storage or dtype")
        if dtype.name not in ITEMSIZE:
            raise UnknownFormatError(f"file holds a tensor of dtype {dtype.name}", path=self._window.path)
        numel = storage.numel * ITEMSIZE[storage.dtype] // ITEMSIZE[dtype.name]
        viewed = StoredStorage(dtype.name, storage.record, numel)
        return self._tensor(viewed, storage_offset, shape, stride, requires_grad, hooks, metadata)

    def _parameter(self, data: object, requires_grad: object, _hooks: object, _state: object = None) -> StoredTensor:
        if type(data) is not StoredTensor or type(requires_grad) is not bool:
            raise self._corrupt("has a parameter that is not a tensor")
        return replace(data, requires_grad=requires_grad)

    def _from_type(self, function: object, kind: object, args: object, _state: object) -> StoredTensor:
        """Rebuild a tensor that carries Python attributes; those are dropped. Subclasses of ours to read are none."""
        if type(function) is not Global or kind not in _TENSOR_CLASSES or type(args) is not tuple or len(args) > 8:
            raise self._corrupt("has a tensor subclass")
        for rebuild in (self._tensor, self._tensor_v3, self._parameter):
            if function._function == rebuild:
                return cast("Callable[..., StoredTensor]", rebuild)(*args)
        raise self._corrupt("has a tensor subclass")

    def _corrupt(self, problem: str) -> CorruptFileError:
        return self._window.corrupt(problem)


def _short(text: str) -> str:
    return repr(text[:40])
