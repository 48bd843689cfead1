"""Two copies are equal when their bits are; how they differ is measured and located exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_optim_bridge.core import compare as compare_module
from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.compare import Difference, Pairs, as_floats, compare, require_equal_replicas
from nemo_optim_bridge.core.manifest import ITEMSIZE, Manifest, TensorKey
from nemo_optim_bridge.core.plan import make_plan
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.core.store import MemoryStore
from nemo_optim_bridge.core.team import Workers
from nemo_optim_bridge.errors import ReplicaMismatchError

KEY = TensorKey("layer.weight", "exp_avg")
SHAPE = (6, 10)


def manifest(boxes: Sequence[tuple[int, Region]], dtype: str = "float32", label: str = "a") -> Manifest:
    """Return a manifest of boxes by rank, each row-major in a buffer of its own."""
    builder = ManifestBuilder()
    tensor = builder.tensor(KEY, SHAPE, dtype)
    for rank, box in boxes:
        buffer = builder.buffer(f"{label} {rank}", 0, box.numel * ITEMSIZE[dtype], dtype)
        builder.shard(tensor, box, rank, buffer)
    return builder.build()


def store(source: Manifest, tensors: Sequence[torch.Tensor]) -> MemoryStore:
    """Return one buffer a shard, cut from one whole tensor a shard."""
    buffers = []
    for shard, tensor in zip(source.shards, tensors, strict=True):
        cut = tuple(slice(o, o + n) for o, n in zip(shard.region.offsets, shard.region.shape, strict=True))
        buffers.append(memoryview(tensor[cut].contiguous().view(torch.uint8).numpy().tobytes()))
    return MemoryStore(buffers)


def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(60, dtype=torch.float32).reshape(SHAPE).to(dtype)


WHOLE = Region.full(SHAPE)
HALVES = [(0, Region((0, 0), (6, 4))), (1, Region((0, 4), (6, 6)))]


def differences(left: torch.Tensor, right: torch.Tensor, dtype: str = "float32") -> list[Difference]:
    """Compare a tensor in one piece with one cut into two blocks of columns."""
    a, b = manifest([(0, WHOLE)], dtype), manifest(HALVES, dtype, label="b")
    pairs = Pairs.of_plan(make_plan(a, b))
    return list(compare(pairs, store(a, [left]), store(b, [right, right])))


@pytest.mark.parametrize("block", [4, 12, 64, 1 << 20])
def test_equal_tensors_cut_differently_are_equal(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "_BLOCK_BYTES", block)
    assert differences(values(), values()) == []


@pytest.mark.parametrize("block", [4, 12, 64, 1 << 20])
def test_every_box_that_differs_is_measured(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "_BLOCK_BYTES", block)
    other = values()
    other[1, 2] += 0.5
    other[4, 3] -= 8
    other[5, 0] += 2
    other[5, 9] += 1
    first, second = differences(values(), other)
    assert (first.num_elements, first.max_abs, first.position) == (3, 8.0, (4, 3))
    assert (first.key, first.left_file, first.right_file) == (KEY, "a 0", "b 0")
    assert (second.num_elements, second.max_abs, second.position) == (1, 1.0, (5, 9))
    assert (second.left_rank, second.right_rank, second.right_file) == (0, 1, "b 1")


def test_bits_count_not_values() -> None:
    zeros, nan = torch.zeros(SHAPE), torch.full(SHAPE, math.nan)
    (minus, _) = differences(zeros, -zeros)
    assert (minus.num_elements, minus.max_abs) == (24, 0.0)
    assert differences(nan, nan.clone()) == []
    other = values()
    other[0, 0] = math.nan
    (difference,) = differences(values(), other)
    assert (difference.num_elements, difference.max_abs, difference.position) == (1, math.inf, (0, 0))


@given(st.integers(0, 59), st.integers(0, 31))
def test_one_flipped_bit_is_found(element: int, bit: int) -> None:
    other = values()
    other.view(torch.int32).view(-1)[element] ^= -(2**31) if bit == 31 else 1 << bit
    (difference,) = differences(values(), other)
    assert difference.num_elements == 1
    assert difference.position == (element // 10, element % 10)


@pytest.mark.parametrize(
    "name", ["float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8"]
)
def test_values_of_every_dtype(name: str) -> None:
    dtype = getattr(torch, name)
    tensor = torch.tensor([0, 1, 2, 100], dtype=dtype)
    bits = np.frombuffer(tensor.view(torch.uint8).numpy().tobytes(), f"u{ITEMSIZE[name]}")
    assert as_floats(bits, name).tolist() == [0.0, 1.0, 2.0, 100.0]
    other = values(dtype)
    other[3, 7] += 4
    (difference,) = differences(values(dtype), other, name)
    assert (difference.max_abs, difference.position) == (4.0, (3, 7))


def replicas(*tensors: torch.Tensor) -> tuple[Manifest, MemoryStore]:
    source = manifest([(rank, WHOLE) for rank in range(len(tensors))])
    return source, store(source, tensors)


def test_equal_replicas_are_counted() -> None:
    source, bytes_of = replicas(values(), values(), values())
    assert (
        require_equal_replicas(make_plan(source, manifest([(0, WHOLE)])), Workers(1), open_store=lambda _: bytes_of)
        == 2
    )


def test_a_differing_replica_is_named() -> None:
    other = values()
    other[2, 5] += 0.25
    other[3, 5] -= 16
    source, bytes_of = replicas(values(), values(), other)
    with pytest.raises(ReplicaMismatchError) as caught:
        require_equal_replicas(make_plan(source, manifest([(0, WHOLE)])), Workers(1), open_store=lambda _: bytes_of)
    error = caught.value
    assert "copies differ in 2 elements, by up to 16 at [3, 5]" in str(error)
    assert "the other copy is rank 0's in a 0" in str(error)
    assert (error.path, error.key, error.rank) == ("a 2", KEY, 2)
    assert error.region == Region((3, 5), (1, 1))


def test_bytes_of_pairs() -> None:
    source, _ = replicas(values(), values(), values())
    plan = make_plan(source, manifest(HALVES, label="b"))
    assert Pairs.of_plan(plan).num_bytes() == 240
    assert Pairs.of_replicas(plan).num_bytes() == 480
