"""Write a checkpoint of any format as one that ``torch.distributed.checkpoint`` loads, and name its entries."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.checkpoint import MODEL_STATES, WEIGHT, Checkpoint
from nemo_optim_bridge.core.compare import require_equal_replicas
from nemo_optim_bridge.core.execute import BufferFiller
from nemo_optim_bridge.core.gather import aligned_buffer, bounded_boxes
from nemo_optim_bridge.core.manifest import ITEMSIZE, Manifest, TensorSpec
from nemo_optim_bridge.core.plan import make_plan
from nemo_optim_bridge.core.publish import check_output, new_directory
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.core.store import FileStore
from nemo_optim_bridge.core.team import Workers
from nemo_optim_bridge.errors import BridgeError, CorruptFileError, OutputError, TargetError, raise_all
from nemo_optim_bridge.formats.checkpoints import open_checkpoint
from nemo_optim_bridge.formats.torch_zip import check_crcs, read_torch_file

if TYPE_CHECKING:
    import torch

Rename = Callable[[str], str]
KeyPath = tuple[str, ...]

#: Largest piece of a tensor in the written checkpoint, in bytes: as much is held in memory, and no more.
CHUNK_BYTES = 64 << 20
REPLICA_POLICIES = ("error", "lowest-rank")


@dataclass(frozen=True, slots=True, eq=False)
class Catalogue:
    """The entries of a checkpoint under the keys that torch.distributed.checkpoint knows them by.

    ``tensors`` are stored ones, ``steps`` 0-dim float32 tensors, ``values`` plain Python values. ``paths`` says where
    in a nested state dict each key lies; a key is its path joined by dots.

    ``model.<fqn>`` is a weight, ``optim.state.<fqn>.<state>`` a state (``fp32_param`` is the master, ``step`` among
    them), ``optim.param_groups.<fqn>.<name>`` a hyperparameter: the names that torch's own ``get_state_dict`` gives
    with ``flatten_optimizer_state_dict``, for ``{"model": ..., "optim": ...}``.
    """

    tensors: Mapping[str, TensorSpec]
    steps: Mapping[str, float]
    values: Mapping[str, Any]
    paths: Mapping[str, KeyPath]

    @classmethod
    def of(cls, manifest: Manifest, rename: Rename | None = None, *, model_state: str = WEIGHT) -> Catalogue:
        """Name all entries of a manifest.

        Args:
            rename: gives a parameter's name in the state dict; None keeps the checkpoint's.
            model_state: which state is ``model.<fqn>``: ``weight``, or ``fp32_param``, whose dtype is that of a model
                trained in fp32; then the rounded weights have no key.

        Raises TargetError when two entries get one key.
        """
        name = rename or (lambda fqn: fqn)
        tensors: dict[str, TensorSpec] = {}
        steps: dict[str, float] = {}
        values: dict[str, Any] = {}
        paths: dict[str, KeyPath] = {}
        problems: list[BridgeError] = []

        def enter(table: dict[str, Any], path: KeyPath, value: Any, fqn: str) -> None:
            key = ".".join(path)
            if key in paths:
                problems.append(TargetError(f"two entries would be called {key}", key=fqn, hint="change the renaming"))
            paths[key] = path
            table[key] = value

        for spec in manifest.tensors:
            fqn, state = spec.key
            if state == model_state:
                enter(tensors, ("model", name(fqn)), spec, fqn)
            elif state not in MODEL_STATES:
                enter(tensors, ("optim", "state", name(fqn), state), spec, fqn)
        for fqn, step in manifest.steps.items():
            enter(steps, ("optim", "state", name(fqn), "step"), step, fqn)
        for group in manifest.param_groups:
            for fqn in group.fqns:
                for option, value in group.hyperparameters.items():
                    enter(values, ("optim", "param_groups", name(fqn), option), value, fqn)
        raise_all(problems)
        return cls(tensors, steps, values, paths)


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written: number of tensors, their bytes, and remarks on the source."""

    num_tensors: int
    num_bytes: int
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A box of a tensor that is one item of the written checkpoint, and the target buffer that it is."""

    key: str
    spec: TensorSpec
    region: Region
    buffer: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.region.numel * ITEMSIZE[self.spec.dtype]


def export_dcp(
    source: str | Path | Checkpoint,
    out: str | Path,
    *,
    rename: Rename | None = None,
    model_state: str = WEIGHT,
    vocab_size: int | None = None,
    replicas: str = "error",
    check_crcs: bool = True,
    overwrite: bool = False,
    fsync: bool = True,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> ExportReport:
    """Write a checkpoint so that plain ``torch.distributed.checkpoint.load`` reads it; called by one process.

    ``Catalogue`` says under which keys. Tensors are written whole, in chunks, one held in memory at a time; torch's own
    writer makes the files.

    Args:
        source: a checkpoint directory of any known format, or one that was opened.
        out: the directory to make.
        rename, model_state: see ``Catalogue.of``.
        vocab_size: the true vocabulary; rows beyond it are left out.
        replicas: ``error`` compares copies of one box first, ``lowest-rank`` takes the lowest rank's.
        check_crcs: check the CRC-32 of every ``.pt`` file first.
        overwrite: replace ``out`` when it exists.
        progress: called with the stage's name, bytes done and bytes in total.

    Raises one BridgeError; ``out`` is then what it was.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(Path(source), vocab_size)
    out = Path(out)
    check_output(out, (checkpoint.path,), overwrite=overwrite)
    if replicas not in REPLICA_POLICIES:
        raise TargetError(f"unknown replica policy {replicas!r}", hint=f"choose {' or '.join(REPLICA_POLICIES)}")
    catalogue = Catalogue.of(checkpoint.manifest, rename, model_state=model_state)
    target, pieces = _lay_out(catalogue)
    plan = make_plan(checkpoint.manifest, target)
    if check_crcs:
        _require_valid_crcs(checkpoint.manifest)
    if replicas == "error":
        require_equal_replicas(plan, Workers(1))
    with FileStore.of(checkpoint.manifest) as store:
        filler = BufferFiller(plan, store)
        window = aligned_buffer(max((run.nbytes for run in target.buffers), default=0))
        total, done = plan.num_bytes, 0

        def fill(piece: _Piece) -> npt.NDArray[np.uint8]:
            nonlocal done
            data = window[: piece.nbytes]
            filler.fill(piece.buffer, 0, data)
            done += piece.nbytes
            progress("writing", done, total)
            return data

        with new_directory(out, overwrite=overwrite, fsync=fsync) as folder:
            _save(folder, catalogue, pieces, fill, fsync=fsync)
            store.check_unchanged()
    return ExportReport(len(catalogue.tensors), plan.num_bytes, checkpoint.remarks)


def _lay_out(catalogue: Catalogue) -> tuple[Manifest, list[_Piece]]:
    """Return every tensor in chunks: the manifest of the chunks, and what they are."""
    builder = ManifestBuilder()
    pieces: list[_Piece] = []
    for key, spec in catalogue.tensors.items():
        tensor = builder.tensor(spec.key, spec.shape, spec.dtype)
        itemsize = ITEMSIZE[spec.dtype]
        for offsets, shape in bounded_boxes(spec.shape, CHUNK_BYTES // itemsize):
            region = Region(offsets, shape)
            buffer = builder.buffer(key, 0, prod(shape) * itemsize, spec.dtype)
            builder.shard(tensor, region, 0, buffer)
            pieces.append(_Piece(key, spec, region, buffer))
    return builder.build(), pieces


def _require_valid_crcs(manifest: Manifest) -> None:
    buffer = bytearray(1 << 20)
    for file in sorted({run.file for run in manifest.buffers if run.file.endswith(".pt")}):
        for record in check_crcs(read_torch_file(Path(file)), buffer):
            raise CorruptFileError(
                "bytes do not match their CRC-32", path=file, key=record.name,
                hint="copy the file again from the original run",
            )  # fmt: skip


def _save(
    folder: Path,
    catalogue: Catalogue,
    pieces: list[_Piece],
    fill: Callable[[_Piece], npt.NDArray[np.uint8]],
    *,
    fsync: bool,
) -> None:
    """Let torch.distributed.checkpoint write all entries, each tensor chunk being made when it is its turn.

    All chunks come in the same memory, because torch's writer keeps every tensor until its file is complete. That is
    right only as long as it writes one before it asks for the next, which is checked.
    """
    import torch
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
    from torch.distributed.checkpoint.state_dict_saver import save

    by_index = {(piece.key, piece.region.offsets): piece for piece in pieces}

    def item(key: str, shape: tuple[int, ...], dtype: str, region: Region) -> WriteItem:
        size = torch.Size(shape)
        chunk = ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.shape))
        data = TensorWriteData(chunk, TensorProperties(dtype=getattr(torch, dtype)), size)
        return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    def items() -> Iterator[WriteItem]:
        for key in catalogue.values:
            yield WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
        for key in catalogue.steps:
            yield item(key, (), "float32", Region((), ()))
        for piece in pieces:
            yield item(piece.key, piece.spec.shape, piece.spec.dtype, piece.region)

    class Files(FileSystem):
        """Remembers the file that is being written."""

        current: Any = None

        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Any:
            with super().create_stream(path, mode) as stream:
                self.current = stream
                yield stream

    files = Files()

    def refuse(piece: _Piece) -> OutputError:
        return OutputError(
            "torch's checkpoint writer did not write the whole box in its turn", path=folder, key=piece.key,
            region=piece.region, hint="please report it with the version of torch",
        )  # fmt: skip

    class Planner(DefaultSavePlanner):
        """Plans all entries, and makes the data of each when the writer asks for it."""

        previous: _Piece | None = None
        expected = 0  # bytes that the file must have by now

        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            self.state_dict, self.mappings, self.is_coordinator = {}, dict(catalogue.paths), is_coordinator

        def create_local_plan(self) -> SavePlan:
            self.plan = SavePlan(list(items()), planner_data=self.mappings)
            return self.plan

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            key = write_item.index.fqn
            if key in catalogue.values:
                data = io.BytesIO()
                torch.save(catalogue.values[key], data)
                return data
            if key in catalogue.steps:
                return torch.tensor(catalogue.steps[key], dtype=torch.float32)
            if self.previous is not None and files.current.tell() < self.expected:
                raise refuse(self.previous)
            piece = self.previous = by_index[key, tuple(write_item.index.offset or ())]
            self.expected += piece.nbytes
            dtype = getattr(torch, piece.spec.dtype)
            if not piece.nbytes:
                return torch.empty(piece.region.shape, dtype=dtype)
            return torch.from_numpy(fill(piece)).view(dtype).view(piece.region.shape)

    class Writer(FileSystemWriter):
        """Makes sure that every item was written in full."""

        def finish(self, metadata: Metadata, results: Any) -> None:
            written = {(r.index.fqn, tuple(r.index.offset or ())): r.size_in_bytes for part in results for r in part}
            for piece in pieces:
                if written.get((piece.key, piece.region.offsets), -1) < piece.nbytes:
                    raise refuse(piece)
            super().finish(metadata, results)

    writer = Writer(folder, single_file_per_rank=True, sync_files=fsync, thread_count=1, per_thread_copy_ahead=0)
    writer.fs = files
    try:
        save({}, storage_writer=writer, planner=Planner(), no_dist=True)
    except CheckpointException as error:
        raise first_failure(error) from None


def first_failure(error: Any) -> BridgeError:
    """Return what made a CheckpointException of torch's: the lowest failing rank's own error where it is ours."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, BridgeError):
        return cause
    if isinstance(cause, OSError):
        return OutputError(f"rank {rank}: {cause.strerror or cause}", path=cause.filename)
    return BridgeError(f"{type(cause).__name__}: {cause}", rank=rank)
