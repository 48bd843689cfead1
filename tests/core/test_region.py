"""Laws of the box algebra, checked against sets of indices, and of flat ranges, against row-major order."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_optim_bridge.core.region import Region, contiguous_stride, flat_range_boxes

Index = tuple[int, ...]


def indices(region: Region) -> set[Index]:
    """Return every index in a region."""
    return {tuple(o + i for o, i in zip(region.offsets, at, strict=True)) for at in np.ndindex(*region.shape)}


@st.composite
def regions(draw: st.DrawFn, ndim: int) -> Region:
    """Return a small region, perhaps empty."""
    offsets = tuple(draw(st.integers(0, 4)) for _ in range(ndim))
    return Region(offsets, tuple(draw(st.integers(0, 4)) for _ in range(ndim)))


@st.composite
def two_regions(draw: st.DrawFn) -> tuple[Region, Region]:
    """Return two regions of the same number of dimensions."""
    ndim = draw(st.integers(0, 3))
    return draw(regions(ndim)), draw(regions(ndim))


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Return a shape and a flat range within it."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@given(two_regions())
def test_intersect_is_the_common_indices(drawn: tuple[Region, Region]) -> None:
    a, b = drawn
    common = a.intersect(b)
    assert (indices(common) if common else set()) == indices(a) & indices(b)
    assert common == b.intersect(a)
    assert common is None or common.numel


@given(two_regions())
def test_subtract_is_the_rest_in_disjoint_boxes(drawn: tuple[Region, Region]) -> None:
    a, b = drawn
    rest = a.subtract(b)
    assert set().union(*map(indices, rest)) == indices(a) - indices(b)
    assert all(one.intersect(two) is None for one, two in combinations(rest, 2))
    assert all(box.numel for box in rest)
    assert len(rest) <= max(1, 2 * len(a.shape))


@given(regions(3), st.integers(0, 2), st.integers(1, 4))
def test_split_gives_equal_parts_in_order(region: Region, dim: int, num_parts: int) -> None:
    if region.shape[dim] % num_parts:
        with pytest.raises(ValueError, match="do not divide"):
            region.split(dim, num_parts)
        return
    parts = region.split(dim, num_parts)
    assert len({part.shape for part in parts}) == 1
    assert parts[0].offsets == region.offsets
    assert parts[-1].stops == region.stops
    assert all(a.stops[dim] == b.offsets[dim] for a, b in pairwise(parts))


def test_split_into_no_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="0 parts"):
        Region.full((4,)).split(0, 0)


@given(regions(2))
def test_numel_and_stops_agree_with_the_indices(region: Region) -> None:
    assert region.numel == len(indices(region))
    assert all(all(i < stop for i, stop in zip(at, region.stops, strict=True)) for at in indices(region))


def test_a_scalar_has_one_element() -> None:
    scalar = Region.full(())
    assert scalar.numel == 1
    assert scalar.intersect(scalar) == scalar
    assert scalar.subtract(scalar) == ()


@pytest.mark.parametrize(("offsets", "shape"), [((0,), ()), ((-1,), (1,)), ((0,), (-1,))])
def test_malformed_regions_are_refused(offsets: Index, shape: Index) -> None:
    with pytest.raises(ValueError, match="offsets"):
        Region(offsets, shape)


def test_a_region_reads_as_slices() -> None:
    assert str(Region((2, 0), (3, 4))) == "[2:5, 0:4]"


@given(st.lists(st.integers(0, 4), max_size=4).map(tuple))
def test_contiguous_stride_is_numpys(shape: tuple[int, ...]) -> None:
    if all(shape):
        assert contiguous_stride(shape) == tuple(s // 8 for s in np.zeros(shape).strides)


@given(ranges())
def test_flat_range_boxes_hold_the_range_in_flat_order(drawn: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = drawn
    flat = np.arange(prod(shape)).reshape(shape)
    boxes = flat_range_boxes(shape, start, stop)
    parts = [flat[tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))].ravel() for box in boxes]
    assert [i for part in parts for i in part.tolist()] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel and len(box.shape) == len(shape) for box in boxes)


@given(ranges())
def test_flat_range_boxes_are_each_contiguous(drawn: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = drawn
    flat = np.arange(prod(shape)).reshape(shape)
    for box in flat_range_boxes(shape, start, stop):
        part = flat[tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))].ravel()
        assert np.array_equal(part, np.arange(part[0], part[0] + box.numel))


def test_the_most_boxes_are_reached() -> None:
    assert len(flat_range_boxes((4, 4, 4), 1, 63)) == 5


def test_whole_rows_are_one_box() -> None:
    assert flat_range_boxes((6, 4), 4, 20) == (Region((1, 0), (4, 4)),)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_flat_ranges_outside_the_tensor_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="outside a tensor"):
        flat_range_boxes((2, 3), start, stop)
