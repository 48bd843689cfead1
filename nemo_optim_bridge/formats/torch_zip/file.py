"""Index a ``.pt`` file from its directory and its pickle; check its CRCs."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from nemo_optim_bridge.core.manifest import ITEMSIZE
from nemo_optim_bridge.core.region import contiguous_stride
from nemo_optim_bridge.errors import CorruptFileError, MissingSourceError, UnknownFormatError, unreadable
from nemo_optim_bridge.formats import pickle_data
from nemo_optim_bridge.formats.torch_zip.directory import RESAVE, Record, read_records
from nemo_optim_bridge.formats.torch_zip.tree import Rebuilder, StoredTensor
from nemo_optim_bridge.formats.torch_zip.window import Window


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

    def read(self, tensor: StoredTensor) -> bytes:
        """Return the elements of ``tensor`` in row-major order; meant for small ones.

        Raises CorruptFileError when the file has become shorter.
        """
        itemsize = ITEMSIZE[tensor.dtype]
        if not prod(tensor.shape):
            return b""
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride, strict=True))
        with Window.of(self.path, self._data) as window:
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
    return _index(Window(name, offset, nbytes, fd=fd), opaque)


def read_torch_bytes(data: bytes, *, path: str, opaque: bool = False) -> TorchFile:
    """Index a ``.pt`` file held in memory; offsets in the result are into ``data``, ``path`` is for messages."""
    return _index(Window(path, 0, len(data), data=data), opaque)


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
    with Window.of(file.path, file._data) as window:
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


def _index(window: Window, opaque: bool) -> TorchFile:
    folder, records = read_records(window)
    if "constants.pkl" in records:
        raise UnknownFormatError("file is a TorchScript archive, not a checkpoint", path=window.path, hint=RESAVE)
    if "data.pkl" not in records:
        raise window.corrupt("has no data.pkl")
    if "byteorder" in records:
        byteorder = window.read_exactly(records["byteorder"].offset, min(records["byteorder"].nbytes, 16))
        if byteorder != b"little":
            raise UnknownFormatError(
                f"file was written with byte order {byteorder[:16]!r}; only little-endian is read", path=window.path,
                hint=RESAVE,
            )  # fmt: skip
    pickled = window.read_exactly(records["data.pkl"].offset, records["data.pkl"].nbytes)
    rebuilder = Rebuilder(records, window)
    root = pickle_data.loads(
        pickled, path=window.path, allow=rebuilder.allow(), persistent_load=rebuilder.storage, opaque=opaque
    )
    return TorchFile(window.path, folder, root, records, window.data)
