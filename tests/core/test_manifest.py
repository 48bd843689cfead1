"""A manifest refuses what cannot be true, lists every problem, and raises once."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.manifest import Manifest, ParamGroup, Shard, TensorKey
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.errors import ContradictionError

KEY = TensorKey("w", "exp_avg")
SHAPE = (4, 6)


def built(region: Region, storage_offset: int = 0, stride: tuple[int, ...] | None = None, nbytes: int = 96) -> Manifest:
    """Return a manifest of one shard."""
    builder = ManifestBuilder()
    tensor = builder.tensor(KEY, SHAPE, "float32")
    builder.shard(tensor, region, 3, builder.buffer("file.pt", 64, nbytes, "float32"), storage_offset, stride)
    return builder.build()


def test_shards_come_back_as_they_were_declared() -> None:
    builder = ManifestBuilder()
    vector, matrix = builder.tensor(KEY, (6,), "float32"), builder.tensor(TensorKey("w", "weight"), SHAPE, "bfloat16")
    scalar = builder.tensor(TensorKey("step", "step"), (), "float32")
    buffer = builder.buffer("file.pt", 0, 1000, "float32")
    builder.shard(vector, Region((2,), (3,)), 1, buffer, 7)
    builder.shard(scalar, Region((), ()), 0, buffer)
    builder.shard(matrix, Region((0, 1), (4, 2)), 10, buffer, 20, (1, 4))
    builder.shard(matrix, Region((0, 0), (0, 2)), 10, buffer)  # empty: dropped
    groups = (ParamGroup(("w",), {"lr": 0.1}),)
    manifest = builder.build(groups, {"w": 5.0})
    assert list(manifest.shards) == [
        Shard(KEY, Region((2,), (3,)), 1, buffer, 7, (1,)),
        Shard(TensorKey("step", "step"), Region((), ()), 0, buffer, 0, ()),
        Shard(TensorKey("w", "weight"), Region((0, 1), (4, 2)), 10, buffer, 20, (1, 4)),
    ]
    assert list(manifest.shards.take(np.array([2]))) == [manifest.shards[2]]
    assert manifest.index() == {spec.key: row for row, spec in enumerate(manifest.tensors)}
    assert manifest.sizes(3).tolist() == [[1, 1, 6], [1, 4, 6], [1, 1, 1]]
    assert (manifest.param_groups, manifest.steps) == (groups, {"w": 5.0})


def test_an_empty_manifest_is_fine() -> None:
    manifest = ManifestBuilder().build()
    assert (len(manifest.shards), manifest.tensors, len(manifest.buffers)) == (0, (), 0)


@pytest.mark.parametrize(
    ("region", "storage_offset", "stride", "problem"),
    [
        (Region((2, 0), (3, 6)), 0, None, "outside the tensor's shape"),
        (Region((0, 6), (1, 1)), 0, None, "outside the tensor's shape"),
        (Region.full(SHAPE), 1, None, "past its buffer of 96 bytes"),
        (Region.full(SHAPE), -1, None, "past its buffer"),
        (Region.full(SHAPE), 0, (7, 1), "past its buffer"),
        (Region.full(SHAPE), 18, (-6, 1), "negative stride"),
        (Region.full(SHAPE), 0, (6,), "has not the tensor's 2 dimensions"),
        (Region((0,), (4,)), 0, None, "has not the tensor's 2 dimensions"),
        (Region.full(SHAPE), 2**70, None, "too large"),
        (Region.full(SHAPE), 0, (2**70, 1), "too large"),
        (Region.full(SHAPE), 0, (2**52, 2**52), "past its buffer"),
        (Region((2**70, 0), (1, 1)), 0, None, "too large"),
    ],
)
def test_impossible_shards_are_refused(
    region: Region, storage_offset: int, stride: tuple[int, ...] | None, problem: str
) -> None:
    with pytest.raises(ContradictionError, match=problem) as caught:
        built(region, storage_offset, stride)
    error = caught.value
    assert (error.path, error.key, error.region, error.rank) == ("file.pt", KEY, region, 3)


def test_a_view_may_end_with_its_buffer_and_skip_elements() -> None:
    built(Region.full(SHAPE))
    built(Region((0, 0), (4, 3)), 3, (6, 1))
    built(Region((0, 0), (4, 6)), 0, (1, 4))
    built(Region((0, 0), (4, 6)), 0, (0, 1), nbytes=24)


def test_products_that_would_wrap_are_refused() -> None:
    builder = ManifestBuilder()
    tensor = builder.tensor(KEY, (2**50,), "float32")
    builder.shard(tensor, Region((0,), (2**50,)), 0, builder.buffer("f", 0, 4, "float32"), 0, (2**20,))
    with pytest.raises(ContradictionError, match="past its buffer"):
        builder.build()


@pytest.mark.parametrize(
    ("shape", "dtype", "problem"),
    [
        ((-1, 2), "float32", "negative size"),
        ((2**30, 2**30), "float32", "more than"),
        ((0, 2**70), "float32", "more than"),
        ((2,), "complex64", "unknown dtype complex64"),
    ],
)
def test_impossible_tensors_are_refused(shape: tuple[int, ...], dtype: str, problem: str) -> None:
    builder = ManifestBuilder()
    tensor = builder.tensor(KEY, shape, dtype)
    assert builder.tensor(KEY, shape, dtype) == tensor
    builder.shard(tensor, Region((0,), (1,)), 0, builder.buffer("f", 0, 4, "float32"))
    with pytest.raises(ContradictionError, match=problem) as caught:
        builder.build()
    assert caught.value.key == KEY
    assert "problems" not in str(caught.value)


@pytest.mark.parametrize(
    ("offset", "nbytes", "dtype", "problem"),
    [
        (-1, 8, "float32", "no file has 8 bytes at -1"),
        (0, -8, "float32", "no file has -8 bytes"),
        (0, 2**70, "float32", "no file has"),
        (0, 8, "int4", "unknown dtype int4"),
    ],
)
def test_impossible_buffers_are_refused(offset: int, nbytes: int, dtype: str, problem: str) -> None:
    builder = ManifestBuilder()
    builder.shard(
        builder.tensor(KEY, (2,), "float32"), Region((0,), (2,)), 0, builder.buffer("f", offset, nbytes, dtype)
    )
    with pytest.raises(ContradictionError, match=problem) as caught:
        builder.build()
    assert caught.value.path == "f"
    assert "problems" not in str(caught.value)


def test_a_tensor_declared_twice_differently_is_refused() -> None:
    builder = ManifestBuilder()
    assert builder.tensor(KEY, (2,), "float32") == builder.tensor(KEY, (3,), "float32")
    with pytest.raises(ContradictionError, match=r"float32 \(2,\) and as float32 \(3,\)"):
        builder.build()


def test_every_problem_is_listed_and_raised_once() -> None:
    builder = ManifestBuilder()
    tensor, buffer = builder.tensor(KEY, SHAPE, "float32"), builder.buffer("file.pt", 0, 8, "float32")
    builder.tensor(KEY, (1,), "float32")
    builder.buffer("other.pt", 0, 8, "int4")
    builder.shard(tensor, Region((0, 0), (1, 2)), 0, buffer)
    builder.shard(tensor, Region((9, 0), (1, 1)), 1, buffer)
    builder.shard(tensor, Region((0, 0), (1, 3)), 2, buffer)
    builder.shard(tensor, Region((0, 0), (1, 1)), 3, buffer, 0, (1,))
    with pytest.raises(ContradictionError, match="5 problems") as caught:
        builder.build()
    for part in ("declared as", "int4", "[9:10, 0:1]", "rank 2", "rank 3"):
        assert part in str(caught.value)


@pytest.mark.parametrize(("tensor", "buffer"), [(1, 0), (-1, 0), (0, 1), (0, -1)])
def test_numbers_of_another_builder_are_refused(tensor: int, buffer: int) -> None:
    builder = ManifestBuilder()
    builder.tensor(KEY, SHAPE, "float32")
    builder.buffer("f", 0, 96, "float32")
    with pytest.raises(IndexError):
        builder.shard(tensor, Region.full(SHAPE), 0, buffer)
