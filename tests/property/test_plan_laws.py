"""The laws of every plan, for random tensors and random layouts on both sides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_optim_bridge.core.manifest import Manifest, TensorSpec
from nemo_optim_bridge.core.plan import Copy, Plan, make_plan
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.errors import ContradictionError, MissingSourceError

from .layouts import Array, Layout, empty_buffers, execute, fill, layouts, tensor_specs, truth


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[TensorSpec], Layout, Layout]:
    """Return tensors and two layouts of them."""
    specs = draw(tensor_specs())
    return specs, draw(layouts(specs)), draw(layouts(specs))


def moved(source: Manifest, sources: list[Array], target: Manifest) -> list[Array]:
    """Return the target's buffers after running the plan."""
    targets = empty_buffers(target)
    execute(make_plan(source, target), sources, targets)
    return targets


def same(a: list[Array], b: list[Array]) -> bool:
    """Tell whether all buffers are equal, what no shard covers included."""
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def identities(plan: Plan) -> set[tuple[object, ...]]:
    """Return the copies without what depends on the order of listing: buffers by their place, not their number."""

    def of(copy: Copy) -> tuple[object, ...]:
        a, b = plan.source.buffers[copy.source.buffer], plan.target.buffers[copy.target.buffer]
        return copy.target.key, copy.region, copy.source.rank, copy.source.region, a.file, copy.target.rank, b.file

    return {of(copy) for copy in plan}


@given(pairs())
def test_every_element_is_written_once_and_right(drawn: tuple[list[TensorSpec], Layout, Layout]) -> None:
    specs, a, b = drawn
    source, target = a.build(), b.build()
    tensors = truth(specs)
    assert same(moved(source, fill(source, tensors), target), fill(target, tensors))


@given(pairs())
def test_there_and_back_is_the_identity(drawn: tuple[list[TensorSpec], Layout, Layout]) -> None:
    specs, a, b = drawn
    source, target = a.build(), b.build()
    before = fill(source, truth(specs))
    assert same(moved(target, moved(source, before, target), source), before)


@given(pairs())
def test_pieces_are_sorted_by_buffer_and_offset(drawn: tuple[list[TensorSpec], Layout, Layout]) -> None:
    _, a, b = drawn
    plan = make_plan(a.build(), b.build())
    offsets = plan.target_offsets()
    buffers = plan.target.shards.buffer[plan.target_rows]
    assert plan.pieces == sum(1 for _ in plan)
    for number in range(len(plan.target.buffers)):
        rows = plan.pieces_of(number)
        assert np.array_equal(np.flatnonzero(buffers == number), np.arange(rows.start, rows.stop))
        assert (np.diff(offsets[rows]) > 0).all()
    assert plan.num_bytes == plan.num_bytes_read == sum(shard.region.numel * 4 for shard in plan.target.shards)


@given(pairs())
def test_plans_of_single_ranks_add_up(drawn: tuple[list[TensorSpec], Layout, Layout]) -> None:
    _, a, b = drawn
    source, target = a.build(), b.build()
    whole = make_plan(source, target)
    ranks = sorted(set(target.shards.rank.tolist()))
    parts = [make_plan(source, target, ranks=[rank]) for rank in ranks]
    assert sum(part.pieces for part in parts) == whole.pieces
    assert {copy for part in parts for copy in part} == set(whole)
    replicas = {tuple(pair) for part in parts for pair in part.replicas.tolist()}
    assert replicas == {tuple(pair) for pair in whole.replicas.tolist()}


@given(pairs(), st.data())
def test_order_of_listing_changes_nothing(drawn: tuple[list[TensorSpec], Layout, Layout], data: st.DataObject) -> None:
    specs, a, b = drawn
    other_a = replace(
        a,
        specs=data.draw(st.permutations(specs)),
        listing=data.draw(st.permutations(a.listing)),
    )
    other_b = replace(b, listing=data.draw(st.permutations(b.listing)))
    plan, other = make_plan(a.build(), b.build()), make_plan(other_a.build(), other_b.build())
    assert identities(plan) == identities(other)
    assert len(plan.replicas) == len(other.replicas)


@given(pairs())
def test_the_lowest_rank_is_read(drawn: tuple[list[TensorSpec], Layout, Layout]) -> None:
    _, a, b = drawn
    plan = make_plan(a.build(), b.build())
    ranks: dict[object, set[int]] = {}
    for shard in plan.source.shards:
        ranks.setdefault((shard.key, shard.region), set()).add(shard.rank)
    assert all(copy.source.rank == min(ranks[copy.source.key, copy.source.region]) for copy in plan)
    for primary, replica in plan.replicas.tolist():
        one, two = plan.source.shards[primary], plan.source.shards[replica]
        assert (one.key, one.region) == (two.key, two.region)
        assert one.rank <= two.rank
    assert len(plan.replicas) == len(plan.source.shards) - len(ranks)


@given(pairs(), st.data())
def test_a_missing_source_is_named(drawn: tuple[list[TensorSpec], Layout, Layout], data: st.DataObject) -> None:
    _, a, b = drawn
    lost = data.draw(st.sampled_from(a.pieces))
    kept = [p for p in a.pieces if (p.spec.key, p.region) != (lost.spec.key, lost.region)]
    target = b.build()
    wanting = {
        (shard.rank, rest)
        for shard in target.shards
        if shard.key == lost.spec.key and (rest := shard.region.intersect(lost.region))
    }
    with pytest.raises(MissingSourceError) as caught:
        make_plan(Layout(a.specs, kept, a.per_buffer).build(), target)
    assert caught.value.key == lost.spec.key
    assert caught.value.region is not None
    assert any(rank == caught.value.rank and not caught.value.region.subtract(box) for rank, box in wanting)
    assert str(lost.spec.key) in str(caught.value)
    healthy = {shard.rank for shard in target.shards} - {rank for rank, _ in wanting}
    make_plan(Layout(a.specs, kept, a.per_buffer).build(), target, ranks=sorted(healthy))


@given(pairs(), st.data())
def test_overlapping_sources_contradict(drawn: tuple[list[TensorSpec], Layout, Layout], data: st.DataObject) -> None:
    _, a, b = drawn
    piece = data.draw(st.sampled_from(a.pieces))
    full = Region.full(piece.spec.shape)
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in full.shape)
    shape = tuple(data.draw(st.integers(1, size - at)) for size, at in zip(full.shape, offsets, strict=True))
    intruder = replace(piece, region=Region(offsets, shape), rank=data.draw(st.integers(0, 120)))
    boxes = {p.region for p in a.pieces if p.spec == piece.spec}
    source = Layout(a.specs, [*a.pieces, intruder], a.per_buffer).build()
    if intruder.region in boxes:
        make_plan(source, b.build())
        return
    with pytest.raises(ContradictionError, match="overlaps") as caught:
        make_plan(source, b.build())
    assert caught.value.key == piece.spec.key
    assert str(intruder.region) in str(caught.value)
    assert any(str(box) in str(caught.value) for box in boxes)
