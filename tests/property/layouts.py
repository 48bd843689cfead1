"""Random ways to lay the same tensors out over ranks, and a trivial executor on numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.manifest import Manifest, TensorKey, TensorSpec
from nemo_optim_bridge.core.plan import Plan
from nemo_optim_bridge.core.region import Region, flat_range_boxes

Array = npt.NDArray[Any]


@dataclass
class Piece:
    """One shard to be: where it lies and how its rank stores it."""

    spec: TensorSpec
    region: Region
    rank: int
    order: tuple[int, ...]  # dims from outermost to innermost in storage
    gap: int  # unused elements after it
    file: str


@dataclass
class Layout:
    """All shards of one side, in an order of listing."""

    specs: list[TensorSpec]
    pieces: list[Piece]
    per_buffer: int = 3
    listing: list[int] = field(default_factory=list)

    def build(self) -> Manifest:
        """Lay the pieces out: those of one rank and file share buffers, ``per_buffer`` in each."""
        builder = ManifestBuilder()
        order = self.listing or list(range(len(self.pieces)))
        runs: dict[tuple[int, str, int], list[Piece]] = {}
        for number in order:
            piece = self.pieces[number]
            runs.setdefault((piece.rank, piece.file, number // self.per_buffer), []).append(piece)
        rows = {spec.key: builder.tensor(spec.key, spec.shape, spec.dtype) for spec in self.specs}
        for (rank, file, run), pieces in runs.items():
            nbytes = sum(piece.region.numel + piece.gap for piece in pieces) * 4
            buffer = builder.buffer(f"{file}-{rank}", run, nbytes, "float32")
            offset = 0
            for piece in pieces:
                stride = strided(piece.region.shape, piece.order)
                builder.shard(rows[piece.spec.key], piece.region, rank, buffer, offset, stride)
                offset += piece.region.numel + piece.gap
        return builder.build()


def strided(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dense strides of ``shape`` when stored with its dims in ``order``."""
    stride, step = [1] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= shape[dim]
    return tuple(stride)


def truth(specs: list[TensorSpec]) -> dict[TensorKey, Array]:
    """Return tensors whose elements all differ."""
    tensors, start = {}, 1
    for spec in specs:
        tensors[spec.key] = np.arange(start, start + prod(spec.shape)).reshape(spec.shape)
        start += prod(spec.shape)
    return tensors


def empty_buffers(manifest: Manifest) -> list[Array]:
    """Return one array of -1 for each buffer."""
    return [np.full(buffer.nbytes // 4, -1) for buffer in manifest.buffers]


def view(buffer: Array, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Array:
    """Return ``torch.as_strided`` of a buffer."""
    return np.lib.stride_tricks.as_strided(buffer[offset:], shape, [s * buffer.itemsize for s in stride])


def fill(manifest: Manifest, tensors: Mapping[TensorKey, Array]) -> list[Array]:
    """Return the buffers of a manifest that holds ``tensors``."""
    buffers = empty_buffers(manifest)
    for shard in manifest.shards:
        box = tuple(slice(a, b) for a, b in zip(shard.region.offsets, shard.region.stops, strict=True))
        view(buffers[shard.buffer], shard.storage_offset, shard.region.shape, shard.stride)[...] = tensors[shard.key][
            box
        ]
    return buffers


def execute(plan: Plan, sources: list[Array], targets: list[Array]) -> None:
    """Run a plan; every element must be written for the first time."""
    source_offsets, target_offsets = plan.source_offsets(), plan.target_offsets()
    for piece, copy in enumerate(plan):
        shape = copy.region.shape
        old = view(targets[copy.target.buffer], int(target_offsets[piece]), shape, copy.target.stride)
        assert (old == -1).all()
        old[...] = view(sources[copy.source.buffer], int(source_offsets[piece]), shape, copy.source.stride)


def _cuts(draw: st.DrawFn, size: int, most: int) -> list[int]:
    inner = draw(st.lists(st.integers(1, size - 1), max_size=most - 1, unique=True)) if size > 1 else []
    return [0, *sorted(inner), size]


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """Return a grid of boxes with uneven cuts."""
    boxes: list[Region] = [Region((), ())]
    for size in shape:
        cuts = _cuts(draw, size, 3)
        boxes = [Region((*box.offsets, a), (*box.shape, b - a)) for box in boxes for a, b in pairwise(cuts)]
    return boxes


@st.composite
def flat_ranges(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """Return flat ranges as boxes, as ZeRO-1 cuts a tensor."""
    cuts = _cuts(draw, prod(shape), 5)
    return [box for a, b in pairwise(cuts) for box in flat_range_boxes(shape, a, b)]


@st.composite
def halvings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """Return a partition made by cutting boxes in two at random: nested intervals, no grid."""
    boxes = [Region.full(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, size in enumerate(box.shape) if size > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.shape[dim] - 1))
        left = Region(box.offsets, (*box.shape[:dim], at, *box.shape[dim + 1 :]))
        boxes.extend((left, *box.subtract(left)))
    return boxes


@st.composite
def tensor_specs(draw: st.DrawFn) -> list[TensorSpec]:
    """Return a few tensors of 0 to 4 dimensions."""
    shapes = draw(st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=1, max_size=4))
    return [
        TensorSpec(TensorKey(f"layer.{number}", draw(st.sampled_from(["exp_avg", "weight"]))), tuple(shape), "float32")
        for number, shape in enumerate(shapes)
    ]


@st.composite
def layouts(draw: st.DrawFn, specs: list[TensorSpec]) -> Layout:
    """Return a layout of all of ``specs``: boxes spread over ranks, some of them on several."""
    pieces: list[Piece] = []
    for spec in specs:
        kind = draw(st.sampled_from([grids, flat_ranges, halvings]))
        first = draw(st.integers(0, 12))  # as on a pipeline stage of its own
        for number, region in enumerate(draw(kind(spec.shape))):
            for copy in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
                order = tuple(draw(st.permutations(range(len(spec.shape)))))
                gap = draw(st.integers(0, 2))
                file = draw(st.sampled_from(["a", "b"]))
                pieces.append(Piece(spec, region, first + number + 7 * copy, order, gap, file))
    listing = list(draw(st.permutations(range(len(pieces)))))
    return Layout(specs, pieces, draw(st.integers(1, 4)), listing)
