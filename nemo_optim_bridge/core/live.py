"""Run a plan into live torch tensors, on the CPU or on a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.gather import Gatherer, bounded_boxes
from nemo_optim_bridge.core.manifest import ITEMSIZE, Manifest, TensorKey
from nemo_optim_bridge.core.narrow import narrow
from nemo_optim_bridge.core.places import Places, dot
from nemo_optim_bridge.core.plan import Plan, make_plan
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.core.staging import Opener, open_device
from nemo_optim_bridge.core.store import FileStore, Store
from nemo_optim_bridge.errors import BridgeError, MissingSourceError, TargetError, raise_all

if TYPE_CHECKING:
    import torch

    Box = tuple[TensorKey, Region, torch.Tensor]


def merge_tensors(
    source: Manifest, keys: Iterable[TensorKey] | None = None, *, device: str | torch.device = "cpu"
) -> dict[TensorKey, torch.Tensor]:  # fmt: skip
    """Return whole global tensors, assembled from the files of all ranks on ``device``.

    Called by one process. ``keys`` None means every tensor. Raises CheckpointError before a byte is read when a
    tensor or box has no source, or when a file cannot be read.
    """
    import torch

    index = source.index()
    wanted = list(index) if keys is None else list(keys)
    raise_all(TargetError("the checkpoint has no such tensor", key=key) for key in wanted if key not in index)
    specs = [source.tensors[index[key]] for key in wanted]
    tensors = {spec.key: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device) for spec in specs}
    load_tensors(source, ((key, Region.full(tuple(t.shape)), t) for key, t in tensors.items()))
    return tensors


def load_tensors(source: Manifest, boxes: Iterable[Box], *, rank: int = 0) -> int:
    """Fill tensors with boxes of global tensors, from files; each rank calls it for what it owns, without negotiation.

    Args:
        boxes: key, box in elements of the global tensor, and the tensor of the box's shape that receives it, of any
            strides, on any device, and of the checkpoint's dtype.
        rank: for error messages only.

    Returns the bytes read. Raises MissingSourceError or TargetError before any tensor is touched.
    """
    return plan_tensors(source, boxes, rank=rank).run()


@dataclass(frozen=True, slots=True, eq=False)
class TensorLoad:
    """A load into live tensors that was planned and can no longer miss a source; ``run`` reads the bytes.

    It keeps of the source only what the plan reads, or compares as replicas.
    """

    plan: Plan
    tensors: tuple[torch.Tensor, ...]

    def run(self) -> int:
        """Fill the tensors and return the bytes read; raises CheckpointError when a file cannot be read."""
        with FileStore.of(self.plan.source) as store:
            execute_into(self.plan, store, self.tensors)
            store.check_unchanged()
            return store.num_bytes_read


def plan_tensors(source: Manifest, boxes: Iterable[Box], *, rank: int = 0) -> TensorLoad:
    """Plan what ``load_tensors`` does, with the same arguments and errors, and touch neither a tensor nor a file."""
    builder = ManifestBuilder()
    index = source.index()
    targets: list[torch.Tensor] = []
    problems: list[BridgeError] = []
    for key, region, tensor in boxes:
        if tuple(tensor.shape) != region.shape:
            problem = TargetError(f"tensor has shape {tuple(tensor.shape)}", key=key, region=region, rank=rank)
            problems.append(problem)
            continue
        if key not in index:
            problems.append(MissingSourceError("the source has no such tensor", key=key, region=region, rank=rank))
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        row = builder.tensor(key, source.tensors[index[key]].shape, dtype)
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = span * ITEMSIZE[dtype] if tensor.numel() else 0
        builder.shard(row, region, rank, builder.buffer(str(key), 0, nbytes, dtype), 0, tensor.stride())
        targets.append(tensor)
    raise_all(problems)
    return TensorLoad(narrow(make_plan(source, builder.build())), tuple(targets))


def execute_into(
    plan: Plan, store: Store, tensors: Sequence[torch.Tensor], open_device: Opener = open_device
) -> None:  # fmt: skip
    """Run a plan whose target buffer number ``i`` is the memory of ``tensors[i]`` from its first element on.

    Boxes for the CPU are read straight into place; boxes for a device pass through pinned buffers, are copied while
    the next are read, and are scattered on the device. What no piece covers is left as it is. All copies are over when
    this returns or raises; a device's own failures are torch's RuntimeError.
    """
    gatherer = Gatherer(store)
    with Places({tensor.device for tensor in tensors}, open_device) as places:
        for piece in _pieces(plan):
            tensor = tensors[piece.target_buffer]
            place = places.on(tensor.device)
            dtype = plan.target.buffers[piece.target_buffer].dtype
            source_dtype = plan.source.buffers[piece.source_buffer].dtype
            for offsets, size in bounded_boxes(piece.shape, place.capacity // ITEMSIZE[dtype]):
                source = piece.source_offset + dot(offsets, piece.source_stride)
                target = piece.target_offset + dot(offsets, piece.target_stride)
                view = place.view(tensor, dtype, size, target, piece.target_stride)
                gatherer.gather(view, dtype, piece.source_buffer, source_dtype, source, piece.source_stride)


class _Piece(NamedTuple):
    shape: tuple[int, ...]
    source_buffer: int
    source_offset: int
    source_stride: tuple[int, ...]
    target_buffer: int
    target_offset: int
    target_stride: tuple[int, ...]


def _pieces(plan: Plan) -> Iterator[_Piece]:
    source_offsets, target_offsets = plan.source_offsets(), plan.target_offsets()
    for number, copy in enumerate(plan):
        yield _Piece(
            copy.region.shape, copy.source.buffer, int(source_offsets[number]), copy.source.stride,
            copy.target.buffer, int(target_offsets[number]), copy.target.stride,
        )  # fmt: skip
