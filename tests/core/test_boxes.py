"""The index finds every overlap once, and few others, whatever the boxes look like."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_optim_bridge.core.boxes import Boxes, BoxIndex, intersect, ranges, volume
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.errors import CheckpointError

Drawn = list[tuple[int, Region]]  # tensor number, box
SIZES = np.full((3, 3), 6)


def columns(drawn: Drawn) -> Boxes:
    """Return boxes as columns."""
    empty = np.zeros((0, 3), np.int64)
    return Boxes(
        np.array([tensor for tensor, _ in drawn], np.int64),
        np.array([region.offsets for _, region in drawn], np.int64) if drawn else empty,
        np.array([region.shape for _, region in drawn], np.int64) if drawn else empty,
    )


@st.composite
def boxes(draw: st.DrawFn, most: int = 14) -> Drawn:
    """Return boxes at random, equal and overlapping ones among them."""
    drawn: Drawn = []
    for _ in range(draw(st.integers(0, most))):
        offsets = tuple(draw(st.integers(0, 5)) for _ in range(3))
        shape = tuple(draw(st.integers(1, 6 - offset)) for offset in offsets)
        drawn.append((draw(st.integers(0, 2)), Region(offsets, shape)))
        if draw(st.booleans()):
            drawn.append(draw(st.sampled_from(drawn)))
    return drawn


@given(boxes(), boxes())
def test_find_gives_each_overlap_once_and_one_of_equal_boxes(sources: Drawn, targets: Drawn) -> None:
    index, sought = BoxIndex(columns(sources), SIZES), columns(targets)
    query, found = index.find(sought)
    volumes = volume(intersect(sought, query, columns(sources), found)[1])
    pairs = [(q, sources[f]) for q, f, numel in zip(query.tolist(), found.tolist(), volumes, strict=True) if numel]
    expected = {
        (q, source)
        for q, target in enumerate(targets)
        for source in sources
        if source[0] == target[0] and source[1].intersect(target[1])
    }
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == expected


@given(boxes())
def test_equal_lists_exactly_the_boxes_that_occur_twice(drawn: Drawn) -> None:
    rows, groups = BoxIndex(columns(drawn), SIZES).equal
    assert sorted(rows.tolist()) == [row for row, box in enumerate(drawn) if drawn.count(box) > 1]
    by_group = {group: drawn[row] for row, group in zip(rows.tolist(), groups.tolist(), strict=True)}
    assert all(drawn[row] == by_group[group] for row, group in zip(rows.tolist(), groups.tolist(), strict=True))
    assert len(set(by_group.values())) == len(by_group)


@given(boxes())
def test_find_overlaps_lists_boxes_that_overlap_without_being_equal(drawn: Drawn) -> None:
    a, b = BoxIndex(columns(drawn), SIZES).find_overlaps()
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    expected = {
        frozenset((one, two))
        for one in drawn
        for two in drawn
        if one[0] == two[0] and one != two and one[1].intersect(two[1])
    }
    assert len(pairs) == len(set(pairs))
    assert {frozenset((drawn[x], drawn[y])) for x, y in pairs} == expected


def test_a_grid_is_searched_without_a_product() -> None:
    def grid(rows: int, columns: int) -> Drawn:
        height, width = 64 // rows, 64 // columns
        return [
            (0, Region((0, row * height, column * width), (1, height, width)))
            for row in range(rows)
            for column in range(columns)
        ]

    index = BoxIndex(columns(grid(32, 16)), np.array([[1, 64, 64]]))
    query, _ = index.find(columns(grid(16, 32)))
    assert len(query) == 32 * 32


def test_long_intervals_among_short_ones_do_not_make_a_product() -> None:
    left = [(0, Region((0, 0, 0), (1, 64, 32)))]
    right = [(0, Region((0, row, 32), (1, 1, 32))) for row in range(64)]
    index = BoxIndex(columns(left + right), np.array([[1, 64, 64]]))
    query, _ = index.find(columns([(0, Region((0, row, 0), (1, 1, 64))) for row in range(64)]))
    assert len(query) == 2 * 64


def test_tensors_too_large_for_one_line_are_refused() -> None:
    box = Boxes(np.array([0]), np.array([[0]]), np.array([[1]]))
    with pytest.raises(CheckpointError, match="too large"):
        BoxIndex(box, np.full((1024, 1), 2**53))


def test_ranges_follow_each_other() -> None:
    assert ranges(np.array([5, 9, 2]), np.array([2, 0, 3])).tolist() == [5, 6, 2, 3, 4]
