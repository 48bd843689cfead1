"""Megatron's distributed checkpoints (``torch_dist``), read without Megatron and without torch.

A directory holds ``metadata.json`` (which backend), ``.metadata`` (a pickle of torch's ``Metadata``: every global
tensor, its chunks, and where each lies), ``common.pt`` (what is not sharded, with the optimizers' param groups) and
``*.distcp`` files. The pickle is read by an allow-list; what it names is never imported. Classes in ``common.pt`` that
are not plain data (OmegaConf containers, ``argparse.Namespace``) stay opaque.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np

from nemo_optim_bridge.core.manifest import ITEMSIZE
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.core.store import identify
from nemo_optim_bridge.errors import (
    BridgeError,
    ContradictionError,
    CorruptFileError,
    MissingSourceError,
    UnknownFormatError,
    raise_all,
    unreadable,
)
from nemo_optim_bridge.formats import torch_zip
from nemo_optim_bridge.formats.crcs import require_valid
from nemo_optim_bridge.formats.torch_dist.document import (
    ChunkEntry,
    Document,
    Index,
    Place,
    Properties,
    TensorEntry,
    is_ints,
    load_document,
)

#: Masters of every parameter as fused_adam, megatron-core and the bridge write them.
UNIFORM_PREFIX: Final = "optimizer.state.fp32_param."

#: Masters of gated MLPs (ShardedTensorFactories) as NeMo's own distributed_fused_adam writes them.
STOCK_FACTORY_PREFIX: Final = "optimizer.state.param."

MASTER_PREFIXES: Final = (UNIFORM_PREFIX, STOCK_FACTORY_PREFIX)
STATE_PREFIX: Final = "optimizer.state."

_METADATA, _COMMON, _CONFIG = ".metadata", "common.pt", "metadata.json"
_LARGEST_CONFIG = 1 << 20  # bytes

#: How to read one element; a bfloat16 is the upper half of a float32.
_NUMPY: Final[Mapping[str, str]] = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<f4",
    "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "<i1", "uint8": "<u1", "bool": "?",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored box of a global tensor: ``nbytes`` bytes, a ``torch.save`` blob, at byte ``offset`` of ``file``.

    ``file`` is relative to the checkpoint.
    """

    region: Region
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DistTensor:
    """A global tensor and the boxes that it is stored in; several boxes may be in one file."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TorchDist:
    """A checkpoint's headers: its tensors by key, the keys of its pickled objects, and the tree of ``common.pt``.

    ``object_places`` is (file, offset, nbytes) of every object, in no particular order; ``document`` the whole of
    ``.metadata``.
    """

    path: str
    tensors: Mapping[str, DistTensor]
    objects: tuple[str, ...]
    common: Mapping[Any, Any]
    object_places: tuple[tuple[str, int, int], ...] = ()
    document: Document | None = None

    def places(self) -> Iterator[tuple[str, int, int]]:
        """Yield (file, offset, nbytes) of every stored box; boxes of two keys may be one."""
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                yield chunk.file, chunk.offset, chunk.nbytes


def is_torch_dist(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory is, by its ``metadata.json``, a Megatron ``torch_dist`` checkpoint; never raises."""
    try:
        return _backend(Path(path)) == "torch_dist"
    except BridgeError:
        return False


def is_megatron(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory is, by its ``metadata.json``, any of Megatron's distributed checkpoints."""
    try:
        return bool(_backend(Path(path)))
    except BridgeError:
        return False


def read_torch_dist(path: str | os.PathLike[str]) -> TorchDist:
    """Read the headers of a checkpoint: no tensor, no framework.

    Raises UnknownFormatError for other formats, MissingSourceError for missing files, CorruptFileError and
    UnsafePickleError for damaged ones.
    """
    return read_with_document(path)[0]


def read_with_document(path: str | os.PathLike[str]) -> tuple[TorchDist, Document]:
    """Read the headers, and return the whole of ``.metadata`` beside them, to be written again."""
    root = Path(path)
    backend = _backend(root)
    if backend != "torch_dist":
        raise UnknownFormatError(
            f"the sharded backend is {backend!r}, not 'torch_dist'",
            path=root,
            hint="load it where it was saved and save it with dist_ckpt_format: torch_dist",
        )
    _check_versions(root)
    document = load_document(root)
    tensors, objects, places = _read_metadata(root, document)
    return TorchDist(str(root), tensors, objects, read_common(root), places), document


def _check_versions(root: Path) -> None:
    """Raise UnknownFormatError for a backend of a version that this reader does not know."""
    config = _config(root)
    for name, known in (("sharded_backend_version", 1), ("common_backend_version", 1)):
        if config.get(name, known) != known:
            raise UnknownFormatError(
                f"{name} is {config[name]!r}; version {known} is known", path=root / _CONFIG,
                hint="use a newer version of this package",
            )  # fmt: skip
    if config.get("common_backend", "torch") != "torch":
        raise UnknownFormatError(f"the common backend {config['common_backend']!r} is not known", path=root / _CONFIG)


def _backend(root: Path) -> str:
    backend = _config(root).get("sharded_backend")
    if not isinstance(backend, str):
        raise CorruptFileError("metadata.json names no sharded_backend", path=root / _CONFIG)
    return backend


def _config(root: Path) -> dict[str, Any]:
    config = root / _CONFIG
    try:
        _, size, *_ = identify(config)
    except MissingSourceError as error:
        raise UnknownFormatError(
            "no metadata.json: this is not a Megatron distributed checkpoint", path=root,
            hint="give the directory that holds metadata.json, .metadata and common.pt",
        ) from error  # fmt: skip
    if size > _LARGEST_CONFIG:
        raise CorruptFileError("metadata.json is too large to be one", path=config)
    try:
        parsed = json.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(config, error) from error
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"metadata.json cannot be read ({error})", path=config) from error
    if not isinstance(parsed, dict):
        raise CorruptFileError("metadata.json holds no object", path=config)
    return parsed


def stored_tensors(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the dtype of every stored tensor by its key, for ``torch_dist`` and (NeMo 1.23's default) ``zarr``.

    Raises as ``read_torch_dist`` does.
    """
    root = Path(path)
    backend = _backend(root)
    if backend == "zarr":
        return {entry.parent.name: _zarr_dtype(entry) for entry in sorted(root.glob("*/.zarray"))}
    if backend != "torch_dist":
        raise UnknownFormatError(f"the sharded backend {backend!r} is not known", path=root)
    tensors, _ = read_metadata(root)
    return {key: tensor.dtype for key, tensor in tensors.items()}


def _zarr_dtype(file: Path) -> str:
    """Return the dtype that a zarr array's header names; bfloat16 is stored as 2-byte opaque elements."""
    try:
        name = str(json.loads(file.read_text(encoding="utf-8"))["dtype"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptFileError("zarr array header cannot be read", path=file) from error
    known = {"<f4": "float32", "<f8": "float64", "<f2": "float16", "bfloat16": "bfloat16", "|V2": "bfloat16"}
    return known.get(name, name)


# ------------------------------------------------------------------------------------------------------- .metadata


def read_metadata(root: Path) -> tuple[dict[str, DistTensor], tuple[str, ...]]:
    """Return the tensors by key and the keys of pickled objects, from ``.metadata`` alone."""
    return _read_metadata(root, load_document(root))[:2]


def _read_metadata(
    root: Path, document: Document
) -> tuple[dict[str, DistTensor], tuple[str, ...], tuple[tuple[str, int, int], ...]]:
    """Return tensors, keys of objects, and where those lie."""
    file = root / _METADATA
    entries, places = document.fields["state_dict_metadata"], document.fields["storage_data"]
    where = _places(places, file)
    tensors: dict[str, DistTensor] = {}
    objects: list[str] = []
    problems: list[BridgeError] = []
    for key, entry in entries.items():
        if not isinstance(key, str):
            raise CorruptFileError(f"{_METADATA} has a key that is no name", path=file)
        if not isinstance(entry, TensorEntry):
            objects.append(key)
            continue
        try:
            tensors[key] = _tensor(key, entry, where, file)
        except BridgeError as error:
            problems.append(error)
    raise_all(problems)
    return tensors, tuple(objects), tuple(where[key, None] for key in objects if (key, None) in where)


def _places(places: dict[Any, Any], file: Path) -> dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]:
    where: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
    inside: dict[str, bool] = {}  # few files hold everything
    for index, info in places.items():
        if not isinstance(index, Index) or not isinstance(info, Place):
            raise CorruptFileError(f"{_METADATA} places something that is no stored item", path=file)
        name, offset, length = (info.fields.get(field) for field in ("relative_path", "offset", "length"))
        place = (offset, length)
        if type(name) is str and name not in inside:
            inside[name] = _is_inside(name)
        if type(name) is not str or not inside[name] or not is_ints(place):
            raise CorruptFileError(f"{_METADATA} has a malformed place", path=file, key=index.fields["fqn"])
        where[index.fields["fqn"], index.fields.get("offset")] = (name, place[0], place[1])
    return where


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _tensor(
    key: str, entry: TensorEntry, where: Mapping[tuple[str, tuple[int, ...] | None], tuple[str, int, int]], file: Path
) -> DistTensor:
    size, chunks, properties = (entry.fields.get(name) for name in ("size", "chunks", "properties"))
    if not is_ints(size) or not isinstance(chunks, list) or not isinstance(properties, Properties):
        raise CorruptFileError("tensor metadata is malformed", path=file, key=key)
    shape = size
    stored = []
    for chunk in chunks:
        fields = chunk.fields if isinstance(chunk, ChunkEntry) else {}
        offsets, sizes = fields.get("offsets"), fields.get("sizes")
        if not is_ints(offsets) or not is_ints(sizes) or len(offsets) != len(sizes) or len(sizes) != len(shape):
            raise CorruptFileError("chunk metadata is malformed", path=file, key=key)
        region = Region(offsets, sizes)
        if any(stop > length for stop, length in zip(region.stops, shape, strict=True)):
            raise ContradictionError(
                f"chunk lies outside the tensor's shape {shape}", path=file, key=key, region=region
            )
        place = where.get((key, region.offsets))
        if place is None:
            raise MissingSourceError("chunk is stored nowhere", path=file, key=key, region=region)
        stored.append(Chunk(region, *place))
    return DistTensor(key, shape, properties.dtype, tuple(stored))


# ------------------------------------------------------------------------------------------------------- common.pt


def read_common(root: Path) -> Mapping[Any, Any]:
    """Return the tree of ``common.pt``: plain data, one-element tensors as numbers, other classes opaque."""
    file = root / _COMMON
    if not file.is_file():
        raise MissingSourceError(f"no {_COMMON}", path=root, hint="the checkpoint is incomplete")
    stored = torch_zip.read_torch_file(file, opaque=True)
    require_valid(stored, bytearray(1 << 16))
    tree = _numbers(stored.root, stored)
    if not isinstance(tree, Mapping):
        raise CorruptFileError(f"{_COMMON} holds no dict", path=file)
    return tree


def _numbers(value: Any, file: torch_zip.TorchFile) -> Any:
    """Return the tree with every one-element tensor replaced by its number (a capturable optimizer's step or lr)."""
    if isinstance(value, dict):
        return {name: _numbers(item, file) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_numbers(item, file) for item in value]) if type(value) in (list, tuple) else value
    if isinstance(value, torch_zip.StoredTensor) and value.dtype in _NUMPY and value.nbytes == ITEMSIZE[value.dtype]:
        data = file.read(value)
        return np.frombuffer(b"\0\0" + data if value.dtype == "bfloat16" else data, _NUMPY[value.dtype])[0].item()
    return value
