"""Plans by example: what is read, in which order, and what is refused with which words."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.manifest import Manifest, TensorKey
from nemo_optim_bridge.core.plan import make_plan
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.errors import ContradictionError, MissingSourceError, TargetError

KEY = TensorKey("layers.0.weight", "exp_avg")
Shards = list[tuple[int, Region]]  # rank, box


def manifest_of(
    shards: Shards,
    shape: tuple[int, ...] = (8, 6),
    dtype: str = "float32",
    key: TensorKey = KEY,
    stored: str = "float32",
) -> Manifest:
    """Return a manifest of one tensor with a buffer for each shard."""
    builder = ManifestBuilder()
    tensor = builder.tensor(key, shape, dtype)
    for rank, region in shards:
        builder.shard(tensor, region, rank, builder.buffer(f"rank{rank}.pt", 0, region.numel * 8, stored))
    return builder.build()


def split(dim: int, num_parts: int, shape: tuple[int, ...] = (8, 6)) -> Shards:
    """Return one part for each rank."""
    return list(enumerate(Region.full(shape).split(dim, num_parts)))


def test_a_plan_says_where_every_box_lies() -> None:
    plan = make_plan(manifest_of(split(0, 4)), manifest_of(split(1, 2)))
    assert (plan.pieces, plan.num_bytes, plan.num_bytes_read) == (8, 8 * 6 * 4, 8 * 6 * 4)
    assert [(copy.source.rank, copy.target.rank, copy.region) for copy in plan] == [
        (rank, side, Region((2 * rank, 3 * side), (2, 3))) for side in range(2) for rank in range(4)
    ]
    assert plan.source_offsets().tolist() == [0, 0, 0, 0, 3, 3, 3, 3]
    assert plan.target_offsets().tolist() == [0, 6, 12, 18] * 2
    assert (plan.pieces_of(0), plan.pieces_of(1)) == (slice(0, 4), slice(4, 8))
    assert plan.target_offsets(plan.pieces_of(1)).tolist() == [0, 6, 12, 18]
    assert plan.source_offsets(np.array([7, 0])).tolist() == [3, 0]


def test_bytes_are_counted_in_each_sides_own_dtype() -> None:
    plan = make_plan(manifest_of(split(0, 4)), manifest_of(split(0, 2), stored="bfloat16"))
    assert (plan.num_bytes, plan.num_bytes_read) == (48 * 2, 48 * 4)


@pytest.mark.parametrize(("low", "high"), [(9, 10), (99, 100), (2, 10)])
@pytest.mark.parametrize("backwards", [False, True])
def test_the_lowest_rank_is_lowest_as_a_number(low: int, high: int, backwards: bool) -> None:
    shards = [(high, Region.full((8, 6))), (low, Region.full((8, 6)))]
    plan = make_plan(manifest_of(shards[::-1] if backwards else shards), manifest_of(split(0, 2)))
    assert {copy.source.rank for copy in plan} == {low}
    ((primary, replica),) = plan.replicas.tolist()
    assert (plan.source.shards[primary].rank, plan.source.shards[replica].rank) == (low, high)


@pytest.mark.parametrize("files", ["ab", "ba"])
def test_replicas_of_one_rank_are_told_apart_by_their_place(files: str) -> None:
    builder = ManifestBuilder()
    tensor = builder.tensor(KEY, (8, 6), "float32")
    for file in files:
        builder.shard(tensor, Region.full((8, 6)), 0, builder.buffer(file, 0, 192, "float32"))
    plan = make_plan(builder.build(), manifest_of(split(0, 1)))
    assert [plan.source.buffers[copy.source.buffer].file for copy in plan] == ["a"]


def test_only_the_targets_tensors_are_planned() -> None:
    builder = ManifestBuilder()
    for name in ("a", "b"):
        for rank in (0, 1):  # overlaps in b do not matter to a
            tensor = builder.tensor(TensorKey(name, "weight"), (8,), "float32")
            region = Region((0,), (8 if name == "a" else 5 + rank,))
            builder.shard(tensor, region, rank, builder.buffer(name, 0, 32, "float32"))
    plan = make_plan(builder.build(), manifest_of([(0, Region.full((8,)))], (8,), key=TensorKey("a", "weight")))
    assert [(copy.source.key.fqn, copy.source.rank) for copy in plan] == [("a", 0)]
    assert len(plan.replicas) == 1


def test_the_two_sides_may_differ_in_the_most_dimensions() -> None:
    builder = ManifestBuilder()
    for key, shape in ((TensorKey("cube", "weight"), (2, 3, 4)), (KEY, (8, 6))):
        buffer = builder.buffer("f", 0, 1000, "float32")
        builder.shard(builder.tensor(key, shape, "float32"), Region.full(shape), 0, buffer)
    wide, narrow = builder.build(), manifest_of(split(1, 3))
    plan = make_plan(wide, narrow)
    assert [copy.region.shape for copy in plan] == [(8, 2)] * 3
    assert plan.source_offsets().tolist() == [0, 2, 4]
    assert plan.target_offsets().tolist() == [0, 0, 0]


def test_nothing_wanted_is_an_empty_plan() -> None:
    source = manifest_of(split(0, 2))
    for plan in (make_plan(source, ManifestBuilder().build()), make_plan(source, source, ranks=[])):
        assert (plan.pieces, plan.num_bytes, list(plan)) == (0, 0, [])
        assert plan.source_offsets().tolist() == plan.target_offsets().tolist() == []
    assert make_plan(source, source, ranks=[]).pieces_of(1) == slice(0, 0)


def test_a_missing_tensor_is_named_with_the_first_rank_that_wants_it() -> None:
    target = manifest_of(split(0, 2)[::-1], key=TensorKey("other", "weight"))
    with pytest.raises(MissingSourceError, match="no such tensor") as caught:
        make_plan(manifest_of(split(0, 2)), target)
    error = caught.value
    assert (error.key, error.region, error.rank) == (TensorKey("other", "weight"), Region((0, 0), (4, 6)), 0)


def test_the_first_missing_box_of_each_shard_is_named() -> None:
    source = manifest_of([part for part in split(0, 8) if part[0] not in (1, 2, 6)])
    with pytest.raises(MissingSourceError, match="2 problems") as caught:
        make_plan(source, manifest_of(split(0, 2)))
    message = str(caught.value)
    assert "tensor layers.0.weight|exp_avg, box [1:3, 0:6], rank 0" in message
    assert "tensor layers.0.weight|exp_avg, box [6:7, 0:6], rank 1" in message
    assert make_plan(manifest_of(split(0, 8)[:4]), manifest_of(split(0, 2)), ranks=[0]).pieces == 4


@pytest.mark.parametrize(("shape", "dtype"), [((8, 7), "float32"), ((48,), "float32"), ((8, 6), "bfloat16")])
def test_another_shape_or_dtype_is_refused(shape: tuple[int, ...], dtype: str) -> None:
    source = manifest_of([(0, Region.full(shape))], shape, dtype)
    with pytest.raises(TargetError, match="the source has") as caught:
        make_plan(source, manifest_of(split(0, 2)))
    assert caught.value.key == KEY


def test_an_overlap_names_both_boxes_and_both_ranks() -> None:
    source = manifest_of([(4, Region((0, 0), (5, 6))), (2, Region((4, 0), (4, 6)))])
    with pytest.raises(ContradictionError) as caught:
        make_plan(source, manifest_of(split(0, 1)))
    for part in ("layers.0.weight|exp_avg", "[0:5, 0:6]", "[4:8, 0:6]", "rank 2", "rank 4"):
        assert part in str(caught.value)


def test_an_overlap_cannot_hide_a_hole() -> None:
    source = manifest_of([(0, Region((0, 0), (5, 6))), (1, Region((4, 0), (3, 6)))])
    with pytest.raises(ContradictionError):
        make_plan(source, manifest_of(split(0, 1)))


def test_target_shards_that_share_storage_are_refused() -> None:
    builder = ManifestBuilder()
    tensor, buffer = builder.tensor(KEY, (8, 6), "float32"), builder.buffer("out.pt", 0, 8 * 6 * 4, "float32")
    top, bottom = Region.full((8, 6)).split(0, 2)
    builder.shard(tensor, top, 0, buffer, 0)
    builder.shard(tensor, bottom, 0, buffer, 20)
    with pytest.raises(ContradictionError, match="shares storage") as caught:
        make_plan(manifest_of(split(0, 2)), builder.build())
    assert caught.value.path == "out.pt"
