"""torch's ``.pt`` container without torch: index a file from its directory and pickle, lay one out for writing.

A ``.pt`` file is a zip archive of stored members under one folder: ``data.pkl``, the tree; ``data/0``, ``data/1``, ...
the storages, little-endian, aligned to 64 bytes; ``byteorder`` and a few small marks. What torch 2.13 writes is what
``lay_out`` writes, to the byte position of every record, because torch may compute positions instead of reading them.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np

from nemo_optim_bridge.core.manifest import ITEMSIZE
from nemo_optim_bridge.core.output import Literal, Part, Payload, Sealed
from nemo_optim_bridge.core.region import contiguous_stride
from nemo_optim_bridge.errors import CorruptFileError, MissingSourceError, TargetError, UnknownFormatError, unreadable
from nemo_optim_bridge.formats import pickle_data
from nemo_optim_bridge.formats.pickle_data import Call, Global

_MAX_NDIM: Final = 64
_RESAVE: Final = "load it with torch.load where it comes from, and torch.save it again with a current torch (2.1+)"

#: Storage classes by dtype, as torch.save names them; dtypes that have none are stored as UntypedStorage.
_STORAGE_CLASS: Final[Mapping[str, str]] = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "bfloat16": "BFloat16Storage", "float16": "HalfStorage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage",
}  # fmt: skip


class Record(NamedTuple):
    """One member of the archive: ``nbytes`` bytes at absolute byte ``offset`` of the file, and the CRC-32 it claims."""

    name: str
    offset: int
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class StoredStorage:
    """A storage of ``numel`` elements at the start of a record."""

    dtype: str
    record: Record
    numel: int


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True, eq=False)
class TorchFile:
    """An indexed ``.pt`` file: its folder inside the archive (the name that it was saved under, without the
    extension), the tree with ``StoredTensor`` leaves, and its records by their name in that folder.
    """

    path: str
    folder: str
    root: object
    records: Mapping[str, Record]
    _data: bytes | None = None

    @property
    def has_crcs(self) -> bool:
        """Say whether CRCs were computed: under ``set_crc32_options(False)`` torch writes 0 for every record."""
        return any(record.crc for record in self.records.values())

    def read(self, tensor: StoredTensor, *, fd: int | None = None) -> bytes:
        """Return the elements of ``tensor`` in row-major order; meant for small ones such as ``step``.

        ``fd`` is an open descriptor of the file, to save opening it for each of many. Raises CorruptFileError when
        the file has become shorter.
        """
        itemsize = ITEMSIZE[tensor.dtype]
        if not prod(tensor.shape):
            return b""
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride, strict=True))
        with _Window.of(self, fd) as window:
            data = window.read_exactly(tensor.record.offset + tensor.storage_offset * itemsize, span * itemsize)
        if span == prod(tensor.shape) and tensor.stride == contiguous_stride(tensor.shape):
            return data
        strides = tuple(stride * itemsize for stride in tensor.stride)
        elements = np.frombuffer(data, dtype=f"V{itemsize}")
        return np.lib.stride_tricks.as_strided(elements, tensor.shape, strides, writeable=False).tobytes()


def read_torch_file(
    path: str | os.PathLike[str],
    *,
    offset: int = 0,
    nbytes: int | None = None,
    fd: int | None = None,
    opaque: bool = False,
) -> TorchFile:
    """Index the ``.pt`` file at ``path``, or the one embedded at byte ``offset`` and ``nbytes`` long.

    Reads the directory, the record headers and the pickle, no tensors. Offsets in the result are absolute. ``fd`` is
    an open descriptor of the same file, for indexing many embedded ones. ``opaque`` keeps objects of classes that are
    not torch's as ``pickle_data.Opaque`` instead of refusing the file.

    Raises CorruptFileError for a malformed archive, UnsafePickleError when the pickle names what is not data,
    UnknownFormatError for a file that is no zip archive or was written on a big-endian machine.
    """
    name = os.fspath(path)
    if fd is None:
        try:
            with Path(path).open("rb") as file:
                return read_torch_file(path, offset=offset, nbytes=nbytes, fd=file.fileno(), opaque=opaque)
        except FileNotFoundError:
            raise MissingSourceError("torch file is missing", path=path) from None
        except OSError as error:
            raise unreadable(path, error) from error
    size = os.fstat(fd).st_size
    if nbytes is None:
        nbytes = size - offset
    if offset < 0 or nbytes < 0 or offset + nbytes > size:
        raise CorruptFileError(f"file has {size} bytes; {nbytes} were expected at byte {offset}", path=name)
    return _index(_Window(name, offset, nbytes, fd=fd), opaque)


def read_torch_bytes(data: bytes, *, path: str, opaque: bool = False) -> TorchFile:
    """Index a ``.pt`` file held in memory; offsets in the result are into ``data``, ``path`` is for messages."""
    return _index(_Window(path, 0, len(data), data=data), opaque)


def check_crcs(
    file: TorchFile, buffer: bytearray | memoryview, *, crc32: Callable[[Any, int], int] = zlib.crc32
) -> Iterator[Record]:
    """Yield every record whose bytes do not match its CRC-32; reads through ``buffer`` and holds nothing else.

    A file without CRCs (``has_crcs`` is False) yields nothing: ask first. Raises CorruptFileError when the file ends
    early.
    """
    if not file.has_crcs:
        return
    view = memoryview(buffer)
    with _Window.of(file) as window:
        for record in file.records.values():
            crc, position, stop = 0, record.offset, record.offset + record.nbytes
            while position < stop:
                count = window.read_into(view[: stop - position], position)
                if not count:
                    raise CorruptFileError("file ends within a record", path=file.path, key=record.name)
                crc = crc32(view[:count], crc)
                position += count
            if crc != record.crc:
                yield record


# --- reading: the bytes ---------------------------------------------------------------------------------------------

_WHOLE: Final = 1 << 17  # windows up to this many bytes are read at once: one system call instead of one a record


class _Window:
    """``nbytes`` bytes at ``start`` of a file or of bytes in memory; addresses are absolute."""

    def __init__(
        self,
        path: str,
        start: int,
        nbytes: int,
        *,
        fd: int = -1,
        data: bytes | None = None,
        cache: bool = True,
        owned: bool = False,
    ) -> None:
        self.path, self.start, self.stop, self.data = path, start, start + nbytes, data
        self._fd, self._owned = fd, owned
        self._cache, self._cached_at = data, 0 if data is not None else start
        if data is None and nbytes <= _WHOLE and cache:
            self._cache = os.pread(fd, nbytes, start)

    @classmethod
    def of(cls, file: TorchFile, fd: int | None = None) -> _Window:
        """Return a window on all of an indexed file; opens it, unless it is open as ``fd``."""
        if file._data is not None:
            return cls(file.path, 0, len(file._data), data=file._data)
        opened = os.open(file.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)) if fd is None else fd
        return cls(file.path, 0, os.fstat(opened).st_size, fd=opened, cache=False, owned=fd is None)

    def __enter__(self) -> _Window:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owned:
            os.close(self._fd)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return up to ``nbytes`` bytes at ``offset``, fewer where the window ends."""
        nbytes = min(nbytes, self.stop - offset)
        if self._cache is not None:
            at = offset - self._cached_at
            return self._cache[at : at + nbytes]
        return os.pread(self._fd, nbytes, offset)

    def read_exactly(self, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes at ``offset``."""
        data = self.read(offset, nbytes) if self.start <= offset and nbytes >= 0 else b""
        while len(data) < nbytes:
            more = self.read(offset + len(data), nbytes - len(data)) if data else b""
            if not more:
                raise self.corrupt(f"is truncated: {nbytes} bytes expected at byte {offset}")
            data += more
        return data

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill ``view`` from ``offset`` as far as one read goes; return the number of bytes."""
        if self._cache is not None:
            data = self.read(offset, len(view))
            view[: len(data)] = data
            return len(data)
        return os.preadv(self._fd, [view], offset)

    def corrupt(self, problem: str) -> CorruptFileError:
        return CorruptFileError(f"torch file {problem}", path=self.path)


# --- reading: the zip directory -------------------------------------------------------------------------------------

_LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
_CENTRAL: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
_END: Final = struct.Struct("<IHHHHIIH")
_END64: Final = struct.Struct("<IQHHIIQQQQ")
_LOCATOR: Final = struct.Struct("<IIQI")
_LOCAL_SIGNATURE, _CENTRAL_SIGNATURE, _END_SIGNATURE = 0x04034B50, 0x02014B50, 0x06054B50
_END64_SIGNATURE, _LOCATOR_SIGNATURE, _DESCRIPTOR_SIGNATURE = 0x06064B50, 0x07064B50, 0x08074B50
_UINT16, _UINT32 = 0xFFFF, 0xFFFFFFFF
_HAS_DESCRIPTOR, _UTF8 = 0x8, 0x800
_LEGACY_MAGIC: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
#: Member names that could mean another place to some unpacker; one name a line.
_TRICK: Final = re.compile(r"^/|(?:^|/)\.{0,2}(?:/|$)|[\\:\x00-\x09\x0b-\x1f\x7f]|/$", re.MULTILINE)


def _directory_bounds(window: _Window) -> tuple[int, int, int]:
    """Return the absolute start and stop of the central directory and its number of entries."""
    head = window.read(window.start, len(_LEGACY_MAGIC))
    if head[:4] != b"PK\x03\x04":
        if head == _LEGACY_MAGIC:
            raise UnknownFormatError(
                "file is in torch's old format from before 1.6, not a zip archive", path=window.path, hint=_RESAVE
            )
        raise window.corrupt("does not start like a zip archive")
    end = window.stop - _END.size
    signature, disk, first_disk, here, count, size, offset, comment = _END.unpack(window.read_exactly(end, _END.size))
    if signature != _END_SIGNATURE or disk or first_disk or here != count or comment:
        raise window.corrupt("does not end with a zip directory: it is truncated or has something appended")
    locator = window.read(end - _LOCATOR.size, _LOCATOR.size) if end - _LOCATOR.size > window.start else b""
    if len(locator) == _LOCATOR.size and int.from_bytes(locator[:4], "little") == _LOCATOR_SIGNATURE:
        _, disk, offset64, disks = _LOCATOR.unpack(locator)
        stop = end - _LOCATOR.size - _END64.size
        if disk or disks != 1 or window.start + offset64 != stop:
            raise window.corrupt("has a zip64 locator that points elsewhere")
        signature, length, _, _, disk, first_disk, here, count64, size64, start64 = _END64.unpack(
            window.read_exactly(stop, _END64.size)
        )
        if signature != _END64_SIGNATURE or length != _END64.size - 12 or disk or first_disk or here != count64:
            raise window.corrupt("has a malformed zip64 end record")
        pairs = ((count, count64, _UINT16), (size, size64, _UINT32), (offset, start64, _UINT32))
        if any(short != long and short != limit for short, long, limit in pairs):
            raise window.corrupt("has two end records that disagree")
        count, size, offset = count64, size64, start64
        end = stop
    start = window.start + offset
    if start + size != end or count * _CENTRAL.size > size:
        raise window.corrupt("has a zip directory that does not lie where it should")
    return start, end, count


class _Entry(NamedTuple):
    """What the central directory says of one member; ``header`` is the absolute offset of its local header."""

    header: int
    nbytes: int
    crc: int
    flags: int
    name: bytes


def _read_entries(window: _Window, start: int, stop: int, count: int) -> list[_Entry]:
    """Return the members in the order of the directory."""
    directory = window.read_exactly(start, stop - start)
    unpack, width = _CENTRAL.unpack_from, _CENTRAL.size
    limit = len(directory)
    position = 0
    entries = []
    for _ in range(count):
        if position + width > limit:
            raise window.corrupt("has fewer directory entries than it says")
        (
            signature, _, _, flags, method, _, _, crc, packed, nbytes, name_length, extra_length, comment_length,
            disk, _, _, header,
        ) = unpack(directory, position)  # fmt: skip
        name_stop = position + width + name_length
        if signature != _CENTRAL_SIGNATURE or name_stop + extra_length > limit or disk or comment_length:
            raise window.corrupt("has a malformed directory entry")
        name = directory[position + width : name_stop]
        if method or flags & ~(_HAS_DESCRIPTOR | _UTF8):
            raise window.corrupt(f"has a compressed or encrypted member {_quote(name)}; torch stores them plain")
        if nbytes == _UINT32 or packed == _UINT32 or header == _UINT32:
            nbytes, packed, header = _zip64_sizes(
                directory[name_stop : name_stop + extra_length], nbytes, packed, header, window
            )
        if packed != nbytes:
            raise window.corrupt(f"has two sizes for member {_quote(name)}")
        entries.append(_Entry(window.start + header, nbytes, crc, flags, name))
        position = name_stop + extra_length
    if position != limit:
        raise window.corrupt("has more directory entries than it says")
    return entries


def _zip64_sizes(extra: bytes, nbytes: int, packed: int, header: int, window: _Window) -> tuple[int, int, int]:
    """Return size, stored size and header offset, taking those that are all ones from the zip64 extra field."""
    while len(extra) >= 4:
        tag, length = struct.unpack_from("<HH", extra)
        field, extra = extra[4 : 4 + length], extra[4 + length :]
        if tag == 1:
            values = list(struct.unpack_from(f"<{len(field) // 8}Q", field))
            wanted = [value == _UINT32 for value in (nbytes, packed, header)]
            if len(values) != sum(wanted):
                break
            taken = iter(values)
            resolved = [
                next(taken) if long else value for long, value in zip(wanted, (nbytes, packed, header), strict=True)
            ]
            return resolved[0], resolved[1], resolved[2]
    raise window.corrupt("lacks the zip64 sizes of a large member")


def _read_records(window: _Window) -> tuple[str, dict[str, Record]]:
    """Return the archive's folder name and its records by their name below it, checked against local headers."""
    start, stop, count = _directory_bounds(window)
    entries = _read_entries(window, start, stop, count)
    names = _member_names([entry.name for entry in entries], window)
    folder = names[0].partition("/")[0] if names else ""
    strip = len(folder) + 1
    prefix = folder + "/"
    records: dict[str, Record] = {}
    position = window.start
    read, unpack, width = window.read, _LOCAL.unpack_from, _LOCAL.size
    order = range(count)
    if any(entries[i].header > entries[i + 1].header for i in range(count - 1)):
        order = cast("range", sorted(order, key=lambda i: entries[i].header))
    offsets = [0] * count
    for i in order:
        header, nbytes, crc, flags, name = entries[i]
        if header < position or header + width > start:
            raise window.corrupt(f"has members that overlap at {_quote(name)}")
        local = read(header, width + len(name))
        if len(local) < width + len(name):
            raise window.corrupt("is truncated within a record header")
        signature, _, local_flags, method, _, _, local_crc, packed, size, name_length, extra_length = unpack(local)
        data = header + width + name_length + extra_length
        if signature != _LOCAL_SIGNATURE or local_flags != flags or method or local[width:] != name:
            raise window.corrupt(f"has a header that contradicts the directory for {_quote(name)}")
        if name_length != len(name) or data + nbytes > start:
            raise window.corrupt(f"has a member {_quote(name)} that reaches past its place")
        if (size not in (0, _UINT32) and (size, packed) != (nbytes, nbytes)) or (local_crc and local_crc != crc):
            raise window.corrupt(f"has a header that contradicts the directory for {_quote(name)}")
        offsets[i] = data
        position = data + nbytes
    for member, entry, data in zip(names, entries, offsets, strict=True):
        if not member.startswith(prefix):
            raise window.corrupt(f"has a member {_quote(entry.name)} outside of its folder {folder[:80]!r}")
        short = member[strip:]
        records[short] = Record(short, data, entry.nbytes, entry.crc)
    if len(records) != count:
        raise window.corrupt("has two members of the same name")
    return folder, records


def _member_names(names: list[bytes], window: _Window) -> list[str]:
    """Decode member names; refuse any that is not a plain relative path."""
    try:
        joined = b"\n".join(names).decode("utf-8")
    except UnicodeDecodeError:
        raise window.corrupt("has member names that are not UTF-8") from None
    listed = joined.split("\n") if names else []
    if len(listed) != len(names):
        raise window.corrupt("has a member name with a line break")
    if names and _TRICK.search(joined):
        raise window.corrupt("has a member name that is not a plain relative path")
    return listed


def _quote(name: bytes) -> str:
    return repr(name[:80].decode("utf-8", "replace"))


# --- reading: the tree ----------------------------------------------------------------------------------------------


def _index(window: _Window, opaque: bool) -> TorchFile:
    folder, records = _read_records(window)
    if "constants.pkl" in records:
        raise UnknownFormatError("file is a TorchScript archive, not a checkpoint", path=window.path, hint=_RESAVE)
    if "data.pkl" not in records:
        raise window.corrupt("has no data.pkl")
    if "byteorder" in records:
        byteorder = window.read_exactly(records["byteorder"].offset, min(records["byteorder"].nbytes, 16))
        if byteorder != b"little":
            raise UnknownFormatError(
                f"file was written with byte order {byteorder[:16]!r}; only little-endian is read", path=window.path,
                hint=_RESAVE,
            )  # fmt: skip
    pickled = window.read_exactly(records["data.pkl"].offset, records["data.pkl"].nbytes)
    rebuilder = _Rebuilder(records, window)
    root = pickle_data.loads(
        pickled, path=window.path, allow=rebuilder.allow, persistent_load=rebuilder.storage, opaque=opaque
    )
    return TorchFile(window.path, folder, root, records, window.data)


class _StorageClass(NamedTuple):
    """A storage class of torch; ``dtype`` is that of its elements."""

    dtype: str


def _constants() -> dict[tuple[str, str], object]:
    """Return what torch's data names stand for; dtypes stay names, so that they can be written again."""
    allow: dict[tuple[str, str], object] = {}
    for dtype, storage in _STORAGE_CLASS.items():
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
    if type(values) not in (tuple, list) or len(cast("tuple[object]", values)) > _MAX_NDIM:
        raise ValueError("sizes are no short tuple")
    sizes = tuple(cast("tuple[int]", values))
    if any(type(size) is not int for size in sizes):
        raise ValueError("sizes are not ints")
    return sizes


_CONSTANTS: Final = _constants()
_TENSOR_CLASSES: Final = (Global("torch", "Tensor"), Global("torch.nn.parameter", "Parameter"))


class _Rebuilder:
    """Stands in for torch's rebuild functions while one file's pickle is read."""

    def __init__(self, records: Mapping[str, Record], window: _Window) -> None:
        self._records = records
        self._window = window
        self._storages: dict[str, StoredStorage] = {}
        self.allow: dict[tuple[str, str], object] = {
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
        if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride) or len(shape) > _MAX_NDIM:
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


# --- writing --------------------------------------------------------------------------------------------------------

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
    if not archive or "/" in archive or _TRICK.search(archive) or "\n" in archive:
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
_STORAGE_GLOBALS: Final = {dtype: Global("torch", name) for dtype, name in _STORAGE_CLASS.items()}


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
    if dtype not in ITEMSIZE or any(type(size) is not int or size < 0 for size in shape) or len(shape) > _MAX_NDIM:
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
            _END64.pack(_END64_SIGNATURE, _END64.size - 12, 0x031E, 45, 0, 0, count, count, size, start)
            + _LOCATOR.pack(_LOCATOR_SIGNATURE, 0, start + size, 1)
            + _END.pack(
                _END_SIGNATURE, 0, 0, min(count, _UINT16), min(count, _UINT16), min(size, _UINT32),
                min(start, _UINT32), 0,
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
        wide = nbytes >= _UINT32 or header >= _UINT32
        extra = _zip64_extra(nbytes, header) if wide else b""
        # torch pads with an extra field "FB" so that the data start at a multiple of 64
        unpadded = header + _LOCAL.size + len(full) + len(extra) + 4
        padding = -unpadded % _ALIGNMENT
        flags = _UTF8 | (_HAS_DESCRIPTOR if nbytes else 0)
        self._num_records += 1
        short = min(nbytes, _UINT32)
        central = _CENTRAL.pack(
            _CENTRAL_SIGNATURE, 0, 0, flags, 0, 0, 0, crc, short, short, len(full), len(extra), 0, 0, 0, 0,
            min(header, _UINT32),
        )  # fmt: skip
        self._directory.append(central + full + extra)
        self._directory_nbytes += len(central) + len(full) + len(extra)
        local = _LOCAL.pack(_LOCAL_SIGNATURE, 0, flags, 0, 0, 0, 0, 0, 0, len(full), len(extra) + 4 + padding)
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
    values = [nbytes, nbytes] if nbytes >= _UINT32 else []
    if header >= _UINT32:
        values.append(header)
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values)


def _descriptor(wide: bool, nbytes: int, crc: int) -> bytes:
    return struct.pack("<IIQQ" if wide else "<IIII", _DESCRIPTOR_SIGNATURE, crc, nbytes, nbytes)


def _seal_descriptor(number: int, wide: bool, nbytes: int, crcs: Sequence[int]) -> bytes:
    return _descriptor(wide, nbytes, crcs[number])


def _seal_directory(template: bytes, positions: tuple[int, ...], crcs: Sequence[int]) -> bytes:
    directory = bytearray(template)
    for position, crc in zip(positions, crcs, strict=True):
        struct.pack_into("<I", directory, position, crc)
    return bytes(directory)
