"""Columns of boxes and buffers enter a manifest as they would one by one, errors included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.manifest import DTYPES, LARGEST, Buffer, BufferTable, Manifest, TensorKey
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.errors import BridgeError, ContradictionError

BOX = Region((1, 0), (2, 3))


def filled(count: int, *, bulk: bool, region: Region = BOX, offset: int = 64, nbytes: int = 100) -> ManifestBuilder:
    """Return a builder with ``count`` tensors, each stored as one box in a buffer of its own."""
    builder = ManifestBuilder()
    builder.buffer("another", 0, 8, "float32")
    tensors = [builder.tensor(TensorKey(f"w{i}", "exp_avg"), (4, 3), "float32") for i in range(count)]
    offsets, sizes = [offset * i for i in range(count)], [nbytes] * count
    if bulk:
        dtype = np.full(count, DTYPES.index("float32"))
        buffers = builder.buffers("file", np.array(offsets, np.int64), np.array(sizes, np.int64), dtype)
        builder.shards(np.array(tensors, np.int64), region, 5, buffers, 2, (3, 1))
    else:
        numbers = [builder.buffer("file", start, size, "float32") for start, size in zip(offsets, sizes, strict=True)]
        for tensor, buffer in zip(tensors, numbers, strict=True):
            builder.shard(tensor, region, 5, buffer, 2, (3, 1))
    return builder


def outcome(builder: ManifestBuilder) -> Manifest | str:
    try:
        return builder.build()
    except BridgeError as error:
        return str(error)


@given(
    st.integers(0, 20),
    st.sampled_from([BOX, Region((0, 0), (0, 3)), Region((3, 0), (2, 3)), Region((0,), (4,)), Region((0, 0), (2, 3))]),
    st.sampled_from([64, -1, LARGEST]),
    st.sampled_from([100, 20, -4]),
)
def test_columns_are_the_same_as_one_by_one(count: int, region: Region, offset: int, nbytes: int) -> None:
    one, many = (
        outcome(filled(count, bulk=bulk, region=region, offset=offset, nbytes=nbytes)) for bulk in (False, True)
    )
    if isinstance(one, str) or isinstance(many, str):
        assert one == many
        return
    assert (one.tensors, list(one.buffers), list(one.shards)) == (many.tensors, list(many.buffers), list(many.shards))


def test_a_column_of_tensors_with_other_dimensions() -> None:
    builder = ManifestBuilder()
    tensors = [builder.tensor(TensorKey("a", "x"), (4, 3), "int8"), builder.tensor(TensorKey("b", "x"), (12,), "int8")]
    buffers = builder.buffers("f", np.zeros(2, np.int64), np.full(2, 12), np.full(2, DTYPES.index("int8")))
    builder.shards(np.array(tensors), Region((0, 0), (4, 3)), 0, buffers, 0, (3, 1))
    with pytest.raises(ContradictionError, match="has not the tensor's 1 dimensions"):
        builder.build()


def test_buffers_as_columns() -> None:
    buffers = [Buffer("a", 2, 8, "float32"), Buffer("b", 0, 6, "bfloat16"), Buffer("a", 9, 0, "int8")]
    table = BufferTable.of(buffers)
    assert list(table) == buffers and table.files == ("a", "b")
    assert list(table[1:]) == buffers[1:]
    assert table.capacity().tolist() == [2, 3, 0]
    taken = table.take(np.array([1]))
    assert list(taken) == [buffers[1]] and taken.files == ("b",)


def test_columns_and_single_boxes_of_several_dimensions_in_turn() -> None:
    builder, expected = ManifestBuilder(), []
    buffer = builder.buffer("file", 0, 4096, "int8")
    shapes = [(), (12,), (4, 3), (2, 2, 3)]
    rows = [[builder.tensor(TensorKey(f"{shape}.{i}", "x"), shape, "int8") for i in range(3)] for shape in shapes]
    for turn in range(2):
        for shape, tensors in zip(shapes, rows, strict=True):
            for count in (2, 0, 1):
                region = Region((turn,) * len(shape), (1,) * len(shape))
                stride = tuple(range(turn, turn + len(shape)))
                numbers = np.array(tensors[:count], np.int64)
                builder.shards(numbers, region, count, np.full(count, buffer), turn, stride)
                builder.shard(tensors[2], region, 7, buffer, turn, stride)
                keys = [f"{shape}.{i}" for i in range(count)]
                expected += [(key, region, count, stride) for key in keys] + [(f"{shape}.2", region, 7, stride)]
    found = [(shard.key.fqn, shard.region, shard.rank, shard.stride) for shard in builder.build().shards]
    assert found == expected
