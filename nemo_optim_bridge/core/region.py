"""Boxes of an n-dimensional tensor, and flat ranges as boxes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A half-open box of a tensor: ``offsets[d] <= index[d] < offsets[d] + shape[d]``, in elements.

    A 0-dimensional region holds one element.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.shape):
            raise ValueError(f"offsets {self.offsets} and shape {self.shape} differ in length")
        if any(n < 0 for n in self.shape) or any(o < 0 for o in self.offsets):
            raise ValueError(f"negative offsets {self.offsets} or shape {self.shape}")

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> Region:
        """Return the box that covers a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offsets, self.shape, strict=True)) + "]"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def stops(self) -> tuple[int, ...]:
        """First index past the box, per dimension."""
        return tuple(o + n for o, n in zip(self.offsets, self.shape, strict=True))

    def intersect(self, other: Region) -> Region | None:
        """Return the common box, or None when there is no common element."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = tuple(map(min, self.stops, other.stops))
        if any(a >= b for a, b in zip(starts, stops, strict=True)):
            return None
        return Region(starts, tuple(b - a for a, b in zip(starts, stops, strict=True)))

    def subtract(self, other: Region) -> tuple[Region, ...]:
        """Return disjoint boxes that hold what is in this box and not in ``other``: at most 2 per dimension."""
        common = self.intersect(other)
        if common is None:
            return (self,) if self.numel else ()
        rest: list[Region] = []
        offsets, stops = list(self.offsets), list(self.stops)
        for dim, (start, stop) in enumerate(zip(common.offsets, common.stops, strict=True)):
            for a, b in ((offsets[dim], start), (stop, stops[dim])):
                if a < b:
                    shape = [t - o for o, t in zip(offsets, stops, strict=True)]
                    shape[dim] = b - a
                    rest.append(Region((*offsets[:dim], a, *offsets[dim + 1 :]), tuple(shape)))
            offsets[dim], stops[dim] = start, stop
        return tuple(rest)

    def split(self, dim: int, num_parts: int) -> tuple[Region, ...]:
        """Return equal parts along ``dim``; raises ValueError when ``num_parts`` does not divide it."""
        size, rest = divmod(self.shape[dim], num_parts) if num_parts > 0 else (0, 1)
        if rest:
            raise ValueError(f"{num_parts} parts do not divide dimension {dim} of {self}")
        return tuple(
            Region(
                (*self.offsets[:dim], self.offsets[dim] + part * size, *self.offsets[dim + 1 :]),
                (*self.shape[:dim], size, *self.shape[dim + 1 :]),
            )
            for part in range(num_parts)
        )


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row-major strides of ``shape``, in elements."""
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * shape[dim + 1]
    return tuple(stride)


def flat_range_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Region, ...]:
    """Return the elements ``start <= i < stop`` of a row-major tensor as at most 2n-1 boxes, in flat order.

    Each box is contiguous in the flat storage. This is all that ZeRO-1 slices and bucketed optimizers need.
    Raises ValueError when the range does not lie within the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"flat range {start}:{stop} is outside a tensor of shape {shape}")
    if start == stop:
        return ()
    if not shape:
        return (Region((), ()),)
    inner = shape[1:]
    row = prod(inner)
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)

    def part(index: int, start: int, stop: int) -> tuple[Region, ...]:
        boxes = flat_range_boxes(inner, start, stop)
        return tuple(Region((index, *box.offsets), (1, *box.shape)) for box in boxes)

    if first == last:
        return part(first, head, tail)
    before = part(first, head, row) if head else ()
    after = part(last, 0, tail) if tail else ()
    first += bool(head)
    whole = (Region((first, *(0,) * len(inner)), (last - first, *inner)),) if first < last else ()
    return (*before, *whole, *after)
