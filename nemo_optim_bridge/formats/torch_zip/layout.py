"""Lay out a ``.pt`` file for writing, to the byte position of every record as torch writes it."""

from __future__ import annotations

import hashlib
import struct
import zlib
from array import array
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final, NamedTuple

import numpy as np

from nemo_optim_bridge.core.manifest import ITEMSIZE
from nemo_optim_bridge.core.output import Layout
from nemo_optim_bridge.core.region import contiguous_stride
from nemo_optim_bridge.errors import TargetError
from nemo_optim_bridge.formats import pickle_data
from nemo_optim_bridge.formats.pickle_data import Alike, Call, Global
from nemo_optim_bridge.formats.torch_zip.dtypes import MAX_NDIM, STORAGE_CLASS
from nemo_optim_bridge.formats.torch_zip.structs import (
    CENTRAL,
    CENTRAL_SIGNATURE,
    DESCRIPTOR,
    DESCRIPTOR64,
    DESCRIPTOR_SIGNATURE,
    END,
    END64,
    END64_SIGNATURE,
    END_SIGNATURE,
    HAS_DESCRIPTOR,
    LOCAL,
    LOCAL_SIGNATURE,
    LOCATOR,
    LOCATOR_SIGNATURE,
    UINT16,
    UINT32,
    UTF8,
    is_tricky,
)

_ALIGNMENT: Final = 64


class NewTensor(NamedTuple):
    """A contiguous tensor to write: ``data`` is its bytes, or the number of its payload in the file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | int
    requires_grad: bool = False


def lay_out(root: object, archive: str) -> Layout:
    """Lay out ``root`` as a ``.pt`` file of the folder name ``archive`` (torch uses the file's stem).

    ``root`` is made of what ``pickle_data.dumps`` takes, and of ``NewTensor`` leaves, each of which gets a storage of
    its own; the same object twice is one storage. Equal trees give equal layouts. Payloads are numbered in the order in
    which ``root`` holds them; tensors without elements have none.

    Raises TargetError for a tree, tensor or name that cannot be written.
    """
    if not archive or "/" in archive or is_tricky(archive) or "\n" in archive:
        raise TargetError(f"{archive!r} cannot be the folder name of a torch file")
    pickled, storages = _pickle_tree(root)
    writer = _Archive(archive)
    writer.literal("data.pkl", pickled)
    writer.literal(".format_version", b"1")
    writer.literal(".storage_alignment", str(_ALIGNMENT).encode())
    writer.literal("byteorder", b"little")
    for number, data in enumerate(storages):
        if isinstance(data, int):
            writer.payload(f"data/{number}", data)
        else:
            writer.literal(f"data/{number}", data)
    writer.literal("version", b"3\n")
    digest = int.from_bytes(hashlib.sha256(pickled).digest(), "little") % 10**40
    writer.literal(".data/serialization_id", f"{digest:040d}".encode())
    return writer.finish()


_REBUILD_TENSOR: Final = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_TENSOR_V3: Final = Global("torch._utils", "_rebuild_tensor_v3")
_ORDERED_DICT: Final = Global("collections", "OrderedDict")
_UNTYPED: Final = Global("torch.storage", "UntypedStorage")
_STORAGE_GLOBALS: Final = {dtype: Global("torch", name) for dtype, name in STORAGE_CLASS.items()}


class _StorageReference:
    """Stands in for a storage while the tree is pickled."""

    __slots__ = ("pid",)

    def __init__(self, pid: tuple[object, ...]) -> None:
        self.pid = pid


def _pickle_tree(root: object) -> tuple[bytes, list[bytes | int]]:
    """Return ``data.pkl``, and by storage key its bytes, or its size where they are a payload."""
    storages: list[bytes | int] = []
    num_payloads = 0

    def persistent_id(value: object) -> object:
        return value.pid if type(value) is _StorageReference else None

    def rebuild(value: object) -> object:
        nonlocal num_payloads
        if type(value) is not NewTensor:
            raise TargetError(f"value of type {type(value).__name__} cannot be written to a torch file")
        dtype, shape, data, requires_grad = value
        form = _form(dtype, shape, requires_grad)
        if isinstance(data, bytes):
            if len(data) != form.nbytes:
                raise TargetError(f"{len(data)} bytes given for a tensor of {form.nbytes}")
            storages.append(data)
        elif form.nbytes:
            if data != num_payloads:
                raise TargetError(f"payload {data} stands where payload {num_payloads} belongs")
            num_payloads += 1
            storages.append(form.nbytes)
        else:
            storages.append(b"")
        return Alike(form, str(len(storages) - 1))

    return pickle_data.dumps(root, persistent_id=persistent_id, replace=rebuild), storages


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """How tensors of one dtype and shape are written; ``nbytes`` is the size of their storage."""

    nbytes: int
    function: Global
    storage_class: Global
    size: int  # of the storage, as its class counts
    view: tuple[object, ...]

    def __call__(self, key: object) -> Call:
        """Return the call that rebuilds the tensor whose storage has this key."""
        storage = _StorageReference(("storage", self.storage_class, key, "cpu", self.size))
        return Call(self.function, (storage, *self.view))


@lru_cache(maxsize=4096)
def _form(dtype: str, shape: tuple[int, ...], requires_grad: bool) -> _Form:
    if dtype not in ITEMSIZE or any(type(size) is not int or size < 0 for size in shape) or len(shape) > MAX_NDIM:
        raise TargetError(f"no tensor of dtype {dtype} and shape {shape} can be written")
    nbytes = prod(shape) * ITEMSIZE[dtype]
    view = (0, shape, contiguous_stride(shape), requires_grad, Call(_ORDERED_DICT))
    storage_class = _STORAGE_GLOBALS.get(dtype)
    if storage_class is None:
        return _Form(nbytes, _REBUILD_TENSOR_V3, _UNTYPED, nbytes, (*view, Global("torch", dtype)))
    return _Form(nbytes, _REBUILD_TENSOR, storage_class, prod(shape), view)


class _Archive:
    """Places records one after the other, as torch's zip writer (miniz) does."""

    def __init__(self, name: str) -> None:
        self._folder = name.encode() + b"/"
        self._text = bytearray()
        self._directory = bytearray()
        self._num_records = 0
        self._num_payload_bytes = 0
        self._marks = array("q")
        self._sizes = array("q")
        self._crcs = array("q"), array("q")  # of each payload: where in the text, and where in the directory

    def literal(self, name: str, data: bytes) -> None:
        """Place a record whose bytes are known."""
        crc = zlib.crc32(data)
        descriptor = self._begin(name, len(data), crc)
        self._text += data
        if data:
            self._text += descriptor.pack(DESCRIPTOR_SIGNATURE, crc, len(data), len(data))

    def payload(self, name: str, nbytes: int) -> None:
        """Place a record of ``nbytes`` > 0 that the executor fills; its CRC is known only then."""
        self._crcs[1].append(len(self._directory) + 16)
        descriptor = self._begin(name, nbytes, 0)
        self._marks.append(len(self._text))
        self._sizes.append(nbytes)
        self._num_payload_bytes += nbytes
        self._crcs[0].append(len(self._text) + 4)
        self._text += descriptor.pack(DESCRIPTOR_SIGNATURE, 0, nbytes, nbytes)

    def finish(self) -> Layout:
        """Place the directory and the end records."""
        start, size, count = len(self._text) + self._num_payload_bytes, len(self._directory), self._num_records
        crcs = np.array(self._crcs)
        crcs[1] += len(self._text)
        self._text += self._directory
        self._text += END64.pack(END64_SIGNATURE, END64.size - 12, 0x031E, 45, 0, 0, count, count, size, start)
        self._text += LOCATOR.pack(LOCATOR_SIGNATURE, 0, start + size, 1)
        self._text += END.pack(
            END_SIGNATURE, 0, 0, min(count, UINT16), min(count, UINT16), min(size, UINT32), min(start, UINT32), 0
        )
        return Layout.around(self._text, np.array(self._marks), np.array(self._sizes), crcs)

    def _begin(self, name: str, nbytes: int, crc: int) -> struct.Struct:
        """Place a record's header and enter it into the directory; return the form of its descriptor."""
        full = self._folder + name.encode()
        header = len(self._text) + self._num_payload_bytes
        wide = nbytes >= UINT32 or header >= UINT32
        extra = _zip64_extra(nbytes, header) if wide else b""
        # torch pads with an extra field "FB" so that the data start at a multiple of 64
        unpadded = header + LOCAL.size + len(full) + len(extra) + 4
        padding = -unpadded % _ALIGNMENT
        flags = UTF8 | (HAS_DESCRIPTOR if nbytes else 0)
        self._num_records += 1
        short = min(nbytes, UINT32)
        self._directory += CENTRAL.pack(
            CENTRAL_SIGNATURE, 0, 0, flags, 0, 0, 0, crc, short, short, len(full), len(extra), 0, 0, 0, 0,
            min(header, UINT32),
        )  # fmt: skip
        self._directory += full + extra
        self._text += LOCAL.pack(LOCAL_SIGNATURE, 0, flags, 0, 0, 0, 0, 0, 0, len(full), len(extra) + 4 + padding)
        self._text += full + extra + _PADDING[padding]
        return DESCRIPTOR64 if wide else DESCRIPTOR


_PADDING: Final = tuple(struct.pack("<2sH", b"FB", size) + b"Z" * size for size in range(_ALIGNMENT))


def _zip64_extra(nbytes: int, header: int) -> bytes:
    """Return the zip64 extra field with those of the values that do not fit 32 bits, as miniz writes it."""
    values = [nbytes, nbytes] if nbytes >= UINT32 else []
    if header >= UINT32:
        values.append(header)
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values)
