"""How nanotron cuts one parameter over ranks: the single rule that both the reader and the writer follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from nemo_optim_bridge.core.region import Region, contiguous_stride, flat_range_boxes
from nemo_optim_bridge.formats.topology import Topology

Slice = tuple[int, int] | None
Slices = tuple[tuple[tuple[Slice, ...], tuple[Slice, ...]], ...]  # (local, global) per chunk


class View(NamedTuple):
    """A box of the global tensor as a strided view of local storage; offset and stride in elements."""

    region: Region
    storage_offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Experts:
    """What the mixture-of-experts example needs to know beyond a matrix; sizes per expert."""

    num_experts: int
    intermediate_size: int
    is_w1: bool

    def per_rank(self, topology: Topology) -> int:
        """Return how many experts an expert-parallel rank holds."""
        return self.num_experts // topology.ep


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """A parameter's global shape, and how ranks share it.

    ``shape`` is the logical shape in elements. ``padded_rows`` are rows that a topology's vocabulary padding adds to
    dimension 0: they are stored, but belong to no tensor. ``chunks`` are sizes along ``dim`` (with padding), each of
    which is cut evenly over the tensor-parallel ranks: one for a plain matrix, three for fused q/k/v. ``dim`` None is
    a parameter that every rank holds whole. ``experts`` are one stack of rows cut over (ep, tp), ep first.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    dim: int | None = None
    chunks: tuple[int, ...] = ()
    padded_rows: int = 0
    experts: Experts | None = None

    @property
    def is_sharded(self) -> bool:
        """Tell whether the ranks of a tensor-parallel group hold different parts."""
        return self.dim is not None

    def pad(self, rows: int) -> ParamLayout:
        """Return the same vocabulary matrix with another number of padding rows."""
        return replace(self, padded_rows=rows, chunks=(self.shape[0] + rows,))

    def is_transposed(self, topology: Topology) -> bool:
        """Tell whether the stored data is the transpose of the logical matrix.

        The MoE example stores w1 transposed when experts are stacked and tp is 1, and w2 when a rank has one expert.
        """
        if self.experts is None:
            return False
        stacked = self.experts.per_rank(topology) > 1
        return (stacked and topology.tp == 1) if self.experts.is_w1 else not stacked

    def local_pieces(self, topology: Topology, tp: int, ep: int) -> Iterator[tuple[Region, int]]:
        """Yield a rank's boxes of the global tensor, padding included, with their local offset along ``dim``."""
        stored = (self.shape[0] + self.padded_rows, *self.shape[1:]) if self.padded_rows else self.shape
        whole = Region.full(stored)
        if self.dim is None:
            yield whole, 0
            return
        part, parts = (ep * topology.tp + tp, topology.ep * topology.tp) if self.experts else (tp, topology.tp)
        start, local = 0, 0
        for size in self.chunks:
            width = size // parts
            offsets, shape = list(whole.offsets), list(whole.shape)
            offsets[self.dim], shape[self.dim] = start + part * width, width
            yield Region(tuple(offsets), tuple(shape)), local
            start, local = start + size, local + width

    def local_shape(self, topology: Topology) -> tuple[int, ...]:
        """Return the shape of the data that a rank stores (transposed where the data is)."""
        shape = list(self.shape)
        if self.padded_rows:
            shape[0] += self.padded_rows
        if self.dim is not None:
            shape[self.dim] //= topology.tp * (topology.ep if self.experts else 1)
        return tuple(reversed(shape)) if self.is_transposed(topology) else tuple(shape)

    def kept(self, topology: Topology, zero_stage: int, dp: int) -> tuple[int, int]:
        """Return the flat half-open range of the local data whose optimizer state a data-parallel rank keeps."""
        numel = prod(self.local_shape(topology))
        return zero_slice(numel, topology.dp, dp) if zero_stage else (0, numel)

    def views(
        self,
        topology: Topology,
        tp: int,
        ep: int,
        flat: tuple[int, int] | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> tuple[View, ...]:
        """Return what a rank's local storage holds of the logical tensor.

        Args:
            flat: the half-open range of the flattened local storage that is kept (a ZeRO-1 slice); offsets of the
                views are relative to its start. None keeps all.
            stride: strides of the stored data, in elements; row-major when None.
        """
        return _views(replace(self, fqn=""), topology, tp, ep, flat, stride)

    def unsharded_shape(self, topology: Topology) -> tuple[int, ...]:
        """Return what a weight shard's metadata calls the unsharded shape."""
        if self.experts is not None and self.experts.per_rank(topology) == 1:
            one = (self.experts.intermediate_size, self.shape[1])
            return one if self.experts.is_w1 else one[::-1]
        return (self.shape[0] + self.padded_rows, *self.shape[1:])

    def slices(self, topology: Topology, tp: int, ep: int) -> Slices:
        """Return the (local, global) slice pairs that a weight shard's metadata lists.

        They ignore the transposition of stacked experts, and with one expert a rank they are relative to that expert.
        """
        if self.dim is None:
            raise ValueError(f"{self.fqn} is not sharded")
        none: tuple[Slice, ...] = (None,) * len(self.shape)

        def along(dim: int, start: int, size: int) -> tuple[Slice, ...]:
            return (*none[:dim], (start, start + size), *none[dim + 1 :])

        if self.experts is not None and self.experts.per_rank(topology) == 1:
            width = self.experts.intermediate_size // topology.tp
            return ((none, along(0 if self.experts.is_w1 else 1, tp * width, width)),)
        pairs = [
            (
                along(self.dim, local, region.shape[self.dim]),
                along(self.dim, region.offsets[self.dim], region.shape[self.dim]),
            )
            for region, local in self.local_pieces(topology, tp, ep)
        ]
        return ((none, pairs[0][1]),) if len(pairs) == 1 else tuple(pairs)


@lru_cache(maxsize=1 << 14)  # layers repeat each other, and so do the states of a parameter
def _views(
    layout: ParamLayout, topology: Topology, tp: int, ep: int, flat: tuple[int, int] | None,
    stride: tuple[int, ...] | None,
) -> tuple[View, ...]:  # fmt: skip
    stored_shape = layout.local_shape(topology)
    turn = -1 if layout.is_transposed(topology) else 1
    stride = (stride or contiguous_stride(stored_shape))[::turn]
    start, stop = flat or (0, prod(stored_shape))
    limit = Region.full(layout.shape)
    kept = [Region(box.offsets[::turn], box.shape[::turn]) for box in flat_range_boxes(stored_shape, start, stop)]
    views: list[View] = []
    for region, local_start in layout.local_pieces(topology, tp, ep):
        shift = [0] * len(layout.shape)
        local_offsets = [0] * len(layout.shape)
        if layout.dim is not None:
            shift[layout.dim] = region.offsets[layout.dim] - local_start
            local_offsets[layout.dim] = local_start
        local = Region(tuple(local_offsets), region.shape)
        for box in kept:
            common = box.intersect(local)
            if common is None:
                continue
            moved = Region(tuple(o + s for o, s in zip(common.offsets, shift, strict=True)), common.shape)
            inside = moved.intersect(limit)
            if inside is not None:
                offset = sum(o * s for o, s in zip(common.offsets, stride, strict=True)) - start
                views.append(View(inside, offset, stride))
    return tuple(views)


def number_alike(layouts: Mapping[str, ParamLayout]) -> dict[str, int]:
    """Return a number for each parameter, the same for those that are cut alike, as in all decoder layers."""
    numbers: dict[ParamLayout, int] = {}
    return {fqn: numbers.setdefault(replace(layout, fqn=""), len(numbers)) for fqn, layout in layouts.items()}


def zero_slice(numel: int, dp_size: int, dp: int) -> tuple[int, int]:
    """Return the flat half-open range of a local tensor that a data-parallel rank owns under ZeRO-1.

    Every rank gets ``(numel - 1) // dp_size + 1`` elements, the last ones one less; no padding is stored.
    """
    size = (numel - 1) // dp_size + 1
    num_full = dp_size - (size * dp_size - numel)
    start = dp * size - max(0, dp - num_full)
    return start, start + size - (dp >= num_full)


def padded_vocab_size(vocab_size: int, tp: int, divisible_by: int) -> int:
    """Return the vocabulary that nanotron allocates: the next multiple of ``divisible_by * tp``."""
    multiple = divisible_by * tp
    return (vocab_size + multiple - 1) // multiple * multiple


def expert_matrix(fqn: str) -> bool | None:
    """Tell whether a parameter of the MoE example is a stack of w1 (True) or w2 (False) matrices; None: neither."""
    for suffix, is_w1 in ((".w1.module.weight", True), (".w2.module.weight", False)):
        if fqn.endswith(".block_sparse_moe.experts.mlp" + suffix):
            return is_w1
    return None


def format_slices(slices: Slices) -> str:
    """Return slice pairs in the spelling of a weight shard's metadata."""

    def side(dims: tuple[Slice, ...]) -> str:
        return "|".join("None,None,None" if s is None else f"{s[0]},{s[1]},None" for s in dims)

    return ";".join(f"{side(local)}#{side(whole)}" for local, whole in slices)


def _size(text: str) -> int:
    """Return a number spelled as nanotron spells it; ``int`` would take signs, underscores and other scripts too."""
    if not (text.isascii() and text.isdigit() and len(text) < 20) or str(int(text)) != text:
        raise ValueError(f"not a size: {text[:40]!r}")
    return int(text)


@lru_cache(maxsize=1 << 10)  # layers repeat each other
def parse_slices(text: str) -> Slices:
    """Return the slice pairs of a weight shard's metadata; raises ValueError when they are malformed."""

    def one(part: str) -> Slice:
        start, stop, step = part.split(",")
        if start == stop == "None" and step == "None":
            return None
        if step not in ("None", "1"):
            raise ValueError(f"slice step {step}")
        return _size(start), _size(stop)

    def side(part: str) -> tuple[Slice, ...]:
        return tuple(one(dim) for dim in part.split("|"))

    pairs = []
    for pair in text.split(";"):
        local, whole = pair.split("#")
        pairs.append((side(local), side(whole)))
    return tuple(pairs)


def format_shape(shape: tuple[int, ...]) -> str:
    """Return a shape in the spelling of a weight shard's metadata."""
    return str(tuple(int(n) for n in shape))


@lru_cache(maxsize=1 << 10)
def parse_shape(text: str) -> tuple[int, ...]:
    """Return the shape that metadata spells, also as numpy 2 prints it; raises ValueError when it is malformed."""
    inner = text.strip()
    if not (inner.startswith("(") and inner.endswith(")")):
        raise ValueError(f"not a shape: {text!r}")
    parts = [part.strip() for part in inner[1:-1].split(",") if part.strip()]
    numbers = [
        part[len("np.int64(") : -1] if part.startswith("np.int64(") and part[-1] == ")" else part for part in parts
    ]
    return tuple(map(_size, numbers))


def shard_metadata(layout: ParamLayout, topology: Topology, tp: int, ep: int, version: str) -> Mapping[str, str]:
    """Return the safetensors metadata of a weight shard; empty for a parameter that is not sharded."""
    if not layout.is_sharded:
        return {}
    return {
        "version": version,
        "unsharded_shape": format_shape(layout.unsharded_shape(topology)),
        "local_global_slices_pairs": format_slices(layout.slices(topology, tp, ep)),
    }
