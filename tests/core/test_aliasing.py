"""Views of one buffer that share an element are found; views that only interleave are not."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nemo_optim_bridge.core.aliasing import shared_storage
from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.manifest import Manifest, TensorKey
from nemo_optim_bridge.core.region import Region

View = tuple[int, tuple[int, ...], tuple[int, ...]]  # storage offset, shape, stride


def manifest_of(views: list[tuple[int, View]]) -> Manifest:
    """Return a manifest of views, each of a tensor of its own, of the buffers with the given numbers."""
    builder = ManifestBuilder()
    for _ in range(3):
        builder.buffer("f", 0, 4 * 4096, "float32")
    for number, (buffer, (offset, shape, stride)) in enumerate(views):
        tensor = builder.tensor(TensorKey(f"t{number}", "weight"), shape, "float32")
        builder.shard(tensor, Region.full(shape), number, buffer, offset, stride)
    return builder.build()


def problems(views: list[tuple[int, View]]) -> list[str]:
    """Return the messages for views in buffers."""
    manifest = manifest_of(views)
    rows = np.lexsort((manifest.shards.storage_offset, manifest.shards.buffer))
    return [str(problem) for problem in shared_storage(manifest, rows)]


def addresses(view: View) -> list[int]:
    """Return where each element of a view lies."""
    offset, shape, stride = view
    return [offset + sum(i * s for i, s in zip(index, stride, strict=True)) for index in np.ndindex(*shape)]


@st.composite
def views(draw: st.DrawFn) -> View:
    """Return a small view, often with row-major strides of a wider tensor."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)))
    if draw(st.booleans()):
        stride = tuple(draw(st.integers(0, 13)) for _ in shape)
    else:
        width = draw(st.sampled_from([4, 5, 8]))
        stride = tuple(width**power for power in reversed(range(len(shape))))
    return draw(st.integers(0, 40)), shape, stride


@given(st.lists(st.tuples(st.integers(0, 2), views()), max_size=6))
def test_problems_are_found_exactly_where_an_address_occurs_twice(drawn: list[tuple[int, View]]) -> None:
    held = [(buffer, address) for buffer, view in drawn for address in addresses(view)]
    folded = any(len(set(addresses(view))) < len(addresses(view)) for _, view in drawn)
    found = problems(drawn)
    if len(set(held)) < len(held):
        assert found
    elif found:  # strides that interleave within one view, which no layout has, are refused as well
        assert not folded
        assert all("elements of the shard" in message for message in found)


def test_column_blocks_may_interleave() -> None:
    assert not problems([(0, (8 * block, (16, 8), (64, 1))) for block in range(8)])


def test_overlapping_column_blocks_are_named() -> None:
    (message,) = problems([(0, (0, (16, 9), (64, 1))), (0, (8, (16, 8), (64, 1)))])
    assert "t0|weight" in message
    assert "shares storage with t1|weight [0:16, 0:8] of rank 1" in message


def test_equal_offsets_in_different_buffers_are_fine() -> None:
    assert not problems([(0, (5, (3,), (1,))), (1, (5, (3,), (1,)))])


def test_a_repeated_element_is_refused() -> None:
    (message,) = problems([(0, (0, (4, 3), (0, 1)))])
    assert "share storage" in message
