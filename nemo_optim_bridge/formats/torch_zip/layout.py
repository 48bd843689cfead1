"""Lay out a ``.pt`` file for writing, to the byte position of every record as torch writes it."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Final

from nemo_optim_bridge.core.manifest import ITEMSIZE
from nemo_optim_bridge.core.output import Literal, Part, Payload, Sealed
from nemo_optim_bridge.core.region import contiguous_stride
from nemo_optim_bridge.errors import TargetError
from nemo_optim_bridge.formats import pickle_data
from nemo_optim_bridge.formats.pickle_data import Call, Global
from nemo_optim_bridge.formats.torch_zip.dtypes import MAX_NDIM, STORAGE_CLASS
from nemo_optim_bridge.formats.torch_zip.structs import (
    CENTRAL,
    CENTRAL_SIGNATURE,
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


@dataclass(frozen=True, slots=True, eq=False)
class NewTensor:
    """A contiguous tensor to write: ``data`` is its bytes, or the number of the target manifest's buffer."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | int
    requires_grad: bool = False

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


def lay_out(root: object, archive: str) -> tuple[Part, ...]:
    """Lay out ``root`` as a ``.pt`` file of the folder name ``archive`` (torch uses the file's stem).

    ``root`` is made of what ``pickle_data.dumps`` takes, and of ``NewTensor`` leaves, each of which gets a storage of
    its own; the same object twice is one storage. Equal trees give equal parts. Buffer contents come later: their
    CRCs are filled in by Sealed parts.

    Raises TargetError for a tree, tensor or name that cannot be written.
    """
    if not archive or "/" in archive or is_tricky(archive) or "\n" in archive:
        raise TargetError(f"{archive!r} cannot be the folder name of a torch file")
    pickled, tensors = _pickle_tree(root)
    layout = _Layout(archive)
    layout.literal("data.pkl", pickled)
    layout.literal(".format_version", b"1")
    layout.literal(".storage_alignment", str(_ALIGNMENT).encode())
    layout.literal("byteorder", b"little")
    for number, tensor in enumerate(tensors):
        if isinstance(tensor.data, int):
            layout.payload(f"data/{number}", tensor.data, tensor.nbytes)
        else:
            layout.literal(f"data/{number}", tensor.data)
    layout.literal("version", b"3\n")
    digest = int.from_bytes(hashlib.sha256(pickled).digest(), "little") % 10**40
    layout.literal(".data/serialization_id", f"{digest:040d}".encode())
    return layout.finish()


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


def _pickle_tree(root: object) -> tuple[bytes, list[NewTensor]]:
    """Return ``data.pkl`` and the tensors in the order of their storage keys."""
    tensors: list[NewTensor] = []

    def persistent_id(value: object) -> object:
        return value.pid if type(value) is _StorageReference else None

    def rebuild(value: object) -> object:
        if type(value) is not NewTensor:
            raise TargetError(f"value of type {type(value).__name__} cannot be written to a torch file")
        function, storage_class, numel, view, dtype = _rebuild_call(value.dtype, value.shape, value.requires_grad)
        if isinstance(value.data, bytes) and len(value.data) != value.nbytes:
            raise TargetError(f"{len(value.data)} bytes given for a tensor of {value.nbytes}")
        storage = _StorageReference(("storage", storage_class, str(len(tensors)), "cpu", numel))
        tensors.append(value)
        return Call(function, (storage, *view, *dtype))

    return pickle_data.dumps(root, persistent_id=persistent_id, replace=rebuild), tensors


@lru_cache(maxsize=4096)
def _rebuild_call(
    dtype: str, shape: tuple[int, ...], requires_grad: bool
) -> tuple[Global, Global, int, tuple[object, ...], tuple[object, ...]]:
    """Return torch's rebuild function, storage class, its number of elements, and the arguments around the storage."""
    if dtype not in ITEMSIZE or any(type(size) is not int or size < 0 for size in shape) or len(shape) > MAX_NDIM:
        raise TargetError(f"no tensor of dtype {dtype} and shape {shape} can be written")
    view = (0, shape, contiguous_stride(shape), requires_grad, Call(_ORDERED_DICT))
    storage_class = _STORAGE_GLOBALS.get(dtype)
    if storage_class is None:
        return _REBUILD_TENSOR_V3, _UNTYPED, prod(shape) * ITEMSIZE[dtype], view, (Global("torch", dtype),)
    return _REBUILD_TENSOR, storage_class, prod(shape), view, ()


class _Layout:
    """Places records one after the other, as torch's zip writer (miniz) does."""

    def __init__(self, archive: str) -> None:
        self._folder = archive.encode() + b"/"
        self._parts: list[Part] = []
        self._pending: list[bytes] = []  # literal bytes not yet made a part
        self._position = 0
        self._directory: list[bytes] = []
        self._directory_nbytes = 0
        self._open_crcs: list[int] = []  # where in the directory the CRC of each payload goes
        self._num_records = 0

    def literal(self, name: str, data: bytes) -> None:
        """Place a record whose bytes are known."""
        crc = zlib.crc32(data)
        header, wide = self._begin(name, len(data), crc)
        self._append(header)
        self._append(data)
        if data:
            self._append(_descriptor(wide, len(data), crc))

    def payload(self, name: str, buffer: int, nbytes: int) -> None:
        """Place a record that the executor fills; its CRC is known only then."""
        if not nbytes:
            self.literal(name, b"")
            return
        crc_position = self._directory_nbytes + 16
        header, wide = self._begin(name, nbytes, 0)
        self._append(header)
        self._flush()
        self._parts.append(Payload(buffer, nbytes))
        number = len(self._open_crcs)
        self._open_crcs.append(crc_position)
        size = 24 if wide else 16
        self._parts.append(Sealed(size, partial(_seal_descriptor, number, wide, nbytes), number))
        self._position += nbytes + size

    def finish(self) -> tuple[Part, ...]:
        """Place the directory and the end records; return all parts."""
        start, size, count = self._position, self._directory_nbytes, self._num_records
        end = (
            END64.pack(END64_SIGNATURE, END64.size - 12, 0x031E, 45, 0, 0, count, count, size, start)
            + LOCATOR.pack(LOCATOR_SIGNATURE, 0, start + size, 1)
            + END.pack(
                END_SIGNATURE, 0, 0, min(count, UINT16), min(count, UINT16), min(size, UINT32),
                min(start, UINT32), 0,
            )
        )  # fmt: skip
        directory = b"".join(self._directory) + end
        if self._open_crcs:
            self._flush()
            seal = partial(_seal_directory, directory, tuple(self._open_crcs))
            self._parts.append(Sealed(len(directory), seal))
        else:
            self._append(directory)
            self._flush()
        return tuple(self._parts)

    def _begin(self, name: str, nbytes: int, crc: int) -> tuple[bytes, bool]:
        """Enter a record into the directory; return its local header and whether its descriptor has 64-bit sizes."""
        full = self._folder + name.encode()
        header = self._position
        wide = nbytes >= UINT32 or header >= UINT32
        extra = _zip64_extra(nbytes, header) if wide else b""
        # torch pads with an extra field "FB" so that the data start at a multiple of 64
        unpadded = header + LOCAL.size + len(full) + len(extra) + 4
        padding = -unpadded % _ALIGNMENT
        flags = UTF8 | (HAS_DESCRIPTOR if nbytes else 0)
        self._num_records += 1
        short = min(nbytes, UINT32)
        central = CENTRAL.pack(
            CENTRAL_SIGNATURE, 0, 0, flags, 0, 0, 0, crc, short, short, len(full), len(extra), 0, 0, 0, 0,
            min(header, UINT32),
        )  # fmt: skip
        self._directory.append(central + full + extra)
        self._directory_nbytes += len(central) + len(full) + len(extra)
        local = LOCAL.pack(LOCAL_SIGNATURE, 0, flags, 0, 0, 0, 0, 0, 0, len(full), len(extra) + 4 + padding)
        return local + full + extra + struct.pack("<2sH", b"FB", padding) + b"Z" * padding, wide

    def _append(self, data: bytes) -> None:
        self._pending.append(data)
        self._position += len(data)

    def _flush(self) -> None:
        if self._pending:
            self._parts.append(Literal(b"".join(self._pending)))
            self._pending = []


def _zip64_extra(nbytes: int, header: int) -> bytes:
    """Return the zip64 extra field with those of the values that do not fit 32 bits, as miniz writes it."""
    values = [nbytes, nbytes] if nbytes >= UINT32 else []
    if header >= UINT32:
        values.append(header)
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values)


def _descriptor(wide: bool, nbytes: int, crc: int) -> bytes:
    return struct.pack("<IIQQ" if wide else "<IIII", DESCRIPTOR_SIGNATURE, crc, nbytes, nbytes)


def _seal_descriptor(number: int, wide: bool, nbytes: int, crcs: Sequence[int]) -> bytes:
    return _descriptor(wide, nbytes, crcs[number])


def _seal_directory(template: bytes, positions: tuple[int, ...], crcs: Sequence[int]) -> bytes:
    directory = bytearray(template)
    for position, crc in zip(positions, crcs, strict=True):
        struct.pack_into("<I", directory, position, crc)
    return bytes(directory)
