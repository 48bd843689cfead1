"""Let torch.distributed.checkpoint's own writer make the files of a checkpoint, each by any process, in any order."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_optim_bridge.core.execute import BufferFiller
from nemo_optim_bridge.core.gather import aligned_buffer
from nemo_optim_bridge.core.manifest import ITEMSIZE, TensorSpec
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.core.team import Progress
from nemo_optim_bridge.errors import OutputError

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.checkpoint.storage import WriteResult


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A box of a tensor that is one item of the written checkpoint, its number in the tensor, and its target buffer."""

    key: str
    spec: TensorSpec
    region: Region
    number: int
    buffer: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.region.numel * ITEMSIZE[self.spec.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class DcpFile:
    """One file of the written checkpoint: keys of plain values and of steps, and pieces."""

    number: int
    values: tuple[str, ...]
    steps: tuple[str, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    def items(self) -> Iterator[WriteItem]:
        """Yield what the file holds, in torch's words."""
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

        for key in self.values:
            yield WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
        for key in self.steps:
            yield _tensor_item(key, (), "float32", Region((), ()), 0)
        for piece in self.pieces:
            yield _tensor_item(piece.key, piece.spec.shape, piece.spec.dtype, piece.region, piece.number)


def _tensor_item(key: str, shape: tuple[int, ...], dtype: str, region: Region, number: int) -> WriteItem:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    chunk = ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.shape))
    data = TensorWriteData(chunk, TensorProperties(dtype=getattr(torch, dtype)), torch.Size(shape))
    return WriteItem(MetadataIndex(key, chunk.offsets, number), WriteItemType.SHARD, tensor_data=data)


class DcpWriter:
    """Writes files, each tensor chunk being made when it is its turn; each process has its own.

    All chunks come in the same memory, because torch's writer keeps every tensor until its file is complete. That is
    right only as long as it writes one before it asks for the next, which is checked.
    """

    def __init__(
        self, folder: Path, steps: Mapping[str, float], values: Mapping[str, Any], filler: BufferFiller,
        progress: Progress, *, fsync: bool,
    ) -> None:  # fmt: skip
        self._folder, self._steps, self._values, self._filler = folder, steps, values, filler
        self._progress, self._fsync = progress, fsync
        self._window = aligned_buffer(0)

    def write(self, file: DcpFile) -> list[WriteResult]:
        """Write a file and return torch's word for where each of its items lies; raises OutputError."""
        from torch.distributed.checkpoint.planner import SavePlan

        self._grow(max((piece.nbytes for piece in file.pieces), default=0))
        files = _file_system()
        writer = _file_writer(self._folder, fsync=self._fsync)
        writer.fs = files
        plan = SavePlan(list(file.items()))
        named = writer.prepare_global_plan([SavePlan([])] * file.number + [plan])[-1]  # torch names files by place
        with _refusals_told(self._folder):
            results: list[WriteResult] = writer.write_data(named, self._planner(file, files)).wait()
        sizes = {(r.index.fqn, tuple(r.index.offset or ())): r.size_in_bytes for r in results}
        for piece in file.pieces:
            if sizes.get((piece.key, piece.region.offsets), -1) < piece.nbytes:
                raise self._refusal(piece)
        return results

    def _grow(self, nbytes: int) -> None:
        if len(self._window) < nbytes:
            self._window = aligned_buffer(nbytes)

    def _refusal(self, piece: Piece) -> OutputError:
        return OutputError(
            "torch's checkpoint writer did not write the whole box in its turn", path=self._folder, key=piece.key,
            region=piece.region, hint="please report it with the version of torch",
        )  # fmt: skip

    def _planner(self, file: DcpFile, files: Any) -> Any:
        """Return what torch's writer asks for the data of each item."""
        import torch
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        pieces = {(piece.key, piece.region.offsets): piece for piece in file.pieces}
        make = self

        class Planner(DefaultSavePlanner):
            previous: Piece | None = None
            expected = 0  # bytes that the file must have by now

            def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
                key = write_item.index.fqn
                if key in make._values:
                    data = io.BytesIO()
                    torch.save(make._values[key], data)
                    return data
                if key in make._steps:
                    return torch.tensor(make._steps[key], dtype=torch.float32)
                if self.previous is not None and files.current.tell() < self.expected:
                    raise make._refusal(self.previous)
                piece = self.previous = pieces[key, tuple(write_item.index.offset or ())]
                self.expected += piece.nbytes
                return make._tensor(piece)

        return Planner()

    def _tensor(self, piece: Piece) -> torch.Tensor:
        import torch

        dtype = getattr(torch, piece.spec.dtype)
        if not piece.nbytes:
            return torch.empty(piece.region.shape, dtype=dtype)
        data = self._window[: piece.nbytes]
        self._filler.fill(piece.buffer, 0, data)
        self._progress(piece.nbytes)
        return torch.from_numpy(data).view(dtype).view(piece.region.shape)


def write_metadata(
    folder: Path, files: Sequence[DcpFile], written: Sequence[Sequence[WriteResult]], paths: Mapping[str, Any], *,
    fsync: bool,
) -> None:  # fmt: skip
    """Write ``.metadata``, which says where every item lies; called by one process when all files are written.

    ``written`` is what ``DcpWriter.write`` returned for each file. The bytes depend on nothing else: neither on which
    process wrote a file, nor on the folder's name or the time. Raises OutputError.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan

    items = [item for file in files for item in file.items()]
    _, metadata = DefaultSavePlanner().create_global_plan([SavePlan(items, planner_data=dict(paths))])
    # pickle writes an object that occurs twice once: what came from other processes must not differ in that
    index = {item.index: item.index for item in items}
    names: dict[str, str] = {}
    results = [
        replace(
            result,
            index=index[result.index],
            storage_data=replace(
                result.storage_data,
                relative_path=names.setdefault(result.storage_data.relative_path, result.storage_data.relative_path),
            ),
        )
        for part in written
        for result in part
    ]
    with _refusals_told(folder):
        _file_writer(folder, fsync=fsync).finish(metadata, [results])


def _file_writer(folder: Path, *, fsync: bool) -> FileSystemWriter:
    """Return torch's writer, which holds nothing back and notes neither where nor when it wrote."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Writer(FileSystemWriter):
        def storage_meta(self) -> StorageMeta:
            return StorageMeta()

    return Writer(folder, single_file_per_rank=True, sync_files=fsync, thread_count=1, per_thread_copy_ahead=0)


def _file_system() -> FileSystem:
    """Return torch's file system, which remembers the file that is being written as ``current``."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    class Files(FileSystem):
        current: Any = None

        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Any:
            with super().create_stream(path, mode) as stream:
                self.current = stream
                yield stream

    return Files()


@contextmanager
def _refusals_told(folder: Path) -> Iterator[None]:
    """Turn the system's refusals, also those that torch's serializer passes on, into OutputError."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", path=error.filename or folder) from error
    except RuntimeError as error:
        raise OutputError(f"cannot be written: {error}", path=folder) from error
