"""How a parameter is cut: every element of every topology once, spelled as real checkpoints spell it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.formats.nanotron.layout import (
    Experts,
    ParamLayout,
    Slices,
    expert_matrix,
    format_shape,
    format_slices,
    padded_vocab_size,
    parse_shape,
    parse_slices,
    shard_metadata,
    zero_slice,
)
from nemo_optim_bridge.formats.nanotron.names import parse_weight_name
from nemo_optim_bridge.formats.nanotron.reader import read_checkpoint
from nemo_optim_bridge.formats.topology import Topology
from tests.nanotron.fixtures import Fixture, read_index

FIXTURES = read_index()
BF16 = "bfloat16"
ROWS = ParamLayout("a.rows", (16, 6), BF16, 0, (16,))
COLUMNS = ParamLayout("a.columns", (6, 16), BF16, 1, (16,))
QKV = ParamLayout("a.qkv_proj.weight", (64, 32), BF16, 0, (32, 16, 16))
GATE_UP = ParamLayout("a.gate_up_proj.weight", (128, 32), BF16, 0, (64, 64))
BIAS = ParamLayout("a.bias", (16,), BF16, 0, (16,))
WHOLE = ParamLayout("a.norm", (7,), BF16)
STACKED = ParamLayout("a.experts", (4, 6, 10), BF16)
VOCABULARY = ParamLayout("a.embedding", (13, 6), BF16, 0, (16,), padded_rows=3)
W1 = ParamLayout("a.w1", (8 * 12, 5), BF16, 0, (96,), experts=Experts(8, 12, True))
W2 = ParamLayout("a.w2", (8 * 12, 5), BF16, 0, (96,), experts=Experts(8, 12, False))
LAYOUTS = [ROWS, COLUMNS, QKV, GATE_UP, BIAS, WHOLE, STACKED, VOCABULARY, W1, W2]
TOPOLOGIES = [Topology(tp, 1, dp, ep) for tp in (1, 2, 4) for dp in (1, 2, 3, 5, 50) for ep in (1, 2, 4, 8)]


def logical(layout: ParamLayout) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return the whole tensor, elements numbered from 1 in row-major order."""
    return np.arange(1, prod(layout.shape) + 1).reshape(layout.shape)


def stored(
    layout: ParamLayout, topology: Topology, tp: int, ep: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return what a rank stores, by the rules of the format and not by the code under test; padding is 0."""
    whole = logical(layout)
    if layout.padded_rows:
        whole = np.concatenate([whole, np.zeros((layout.padded_rows, *whole.shape[1:]), np.int64)])
    if layout.dim is None:
        return whole
    if layout.experts is not None:
        size = len(whole) // (topology.ep * topology.tp)
        mine = whole[(ep * topology.tp + tp) * size :][:size]
        one_expert = layout.experts.num_experts == topology.ep
        if layout.experts.is_w1:
            return mine.T if topology.tp == 1 and not one_expert else mine
        return mine.T if one_expert else mine
    parts, start = [], 0
    for chunk in layout.chunks:
        width = chunk // topology.tp
        parts.append(np.take(whole, range(start + tp * width, start + (tp + 1) * width), axis=layout.dim))
        start += chunk
    return np.concatenate(parts, axis=layout.dim)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.fqn)
@pytest.mark.parametrize("zero", [False, True])
def test_views_are_what_ranks_store_and_cover_once(layout: ParamLayout, zero: bool) -> None:
    for topology in TOPOLOGIES:
        merged = np.zeros(layout.shape, np.int64)
        times = np.zeros(layout.shape, np.int64)
        for ep in range(topology.ep if layout.experts else 1):
            for tp in range(topology.tp if layout.is_sharded else 1):
                local = stored(layout, topology, tp, ep)
                assert layout.local_shape(topology) == local.shape
                for dp in range(topology.dp if zero else 1):
                    flat = zero_slice(local.size, topology.dp, dp) if zero else None
                    kept = local.reshape(-1)[slice(*flat)] if flat else local.reshape(-1)
                    for view in layout.views(topology, tp, ep, flat):
                        index = region_index(view.region)
                        addresses = view_addresses(view.region, view.storage_offset, view.stride)
                        merged[index] = kept[addresses]
                        times[index] += 1
        assert np.array_equal(merged, logical(layout))
        assert (times == 1).all()


def region_index(region: Region) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(region.offsets, region.shape, strict=True))


def view_addresses(
    region: Region, offset: int, stride: tuple[int, ...]
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    grid = np.indices(region.shape)
    return offset + sum(
        (axis * step for axis, step in zip(grid, stride, strict=True)), np.zeros(region.shape, np.int64)
    )


def test_a_stored_stride_is_followed() -> None:
    """A file may hold a transposed tensor: addresses follow the file's strides."""
    topology = Topology(tp=2)
    local = stored(QKV, topology, 1, 0)
    memory = local.T.copy().reshape(-1)
    merged = np.zeros(QKV.shape, np.int64)
    for view in QKV.views(topology, 1, 0, None, (1, len(local))):
        merged[region_index(view.region)] = memory[view_addresses(*view)]
    assert np.array_equal(np.unique(merged[merged > 0]), np.sort(local.reshape(-1)))
    assert np.array_equal(merged[merged > 0], logical(QKV)[merged > 0])


@pytest.mark.parametrize(
    ("numel", "dp", "sizes"),
    [
        (4096, 3, [1366, 1365, 1365]), (32, 3, [11, 11, 10]), (32, 1, [32]), (32, 2, [16, 16]), (1, 4, [1, 0, 0, 0]),
        (3, 5, [1, 1, 1, 0, 0]), (7, 4, [2, 2, 2, 1]), (5, 5, [1] * 5), (6, 5, [2, 1, 1, 1, 1]),
    ],
)  # fmt: skip
def test_zero_slices(numel: int, dp: int, sizes: list[int]) -> None:
    slices = [zero_slice(numel, dp, rank) for rank in range(dp)]
    assert [stop - start for start, stop in slices] == sizes


@given(st.integers(1, 10**9), st.integers(1, 2000))
def test_zero_slices_cover_once(numel: int, dp: int) -> None:
    stops = 0
    for rank in range(dp):
        start, stop = zero_slice(numel, dp, rank)
        assert start == stops
        assert stop - start in ((numel - 1) // dp + 1, (numel - 1) // dp)
        stops = stop
    assert stops == numel


@pytest.mark.parametrize(
    ("vocab", "tp", "multiple", "padded"),
    [(126, 1, 1, 126), (126, 2, 1, 126), (126, 4, 1, 128), (128, 4, 1, 128), (50257, 8, 128, 51200), (1, 1, 1, 1)],
)
def test_padded_vocabulary(vocab: int, tp: int, multiple: int, padded: int) -> None:
    assert padded_vocab_size(vocab, tp, multiple) == padded


def test_slices_as_nanotron_prints_them() -> None:
    none = "None,None,None"
    assert format_slices(QKV.slices(Topology(tp=4), 1, 0)) == (
        f"0,8,None|{none}#8,16,None|{none};8,12,None|{none}#36,40,None|{none};12,16,None|{none}#52,56,None|{none}"
    )
    assert format_slices(GATE_UP.slices(Topology(tp=2), 1, 0)) == (
        f"0,32,None|{none}#32,64,None|{none};32,64,None|{none}#96,128,None|{none}"
    )
    assert format_slices(COLUMNS.slices(Topology(tp=2), 1, 0)) == f"{none}|{none}#{none}|8,16,None"
    assert format_slices(ROWS.slices(Topology(), 0, 0)) == f"{none}|{none}#0,16,None|{none}"


def all_shards(root: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    for path in sorted((root / "model").rglob("*.safetensors")):
        with safe_open(path, "np") as file:
            yield path, dict(file.metadata() or {})


@pytest.mark.parametrize("fixture", FIXTURES.values(), ids=FIXTURES)
def test_metadata_is_what_real_checkpoints_say(fixture: Fixture, nanotron_fixtures: Path) -> None:
    root = nanotron_fixtures / "checkpoints" / fixture.name
    checkpoint = read_checkpoint(root)
    count = 0
    for path, metadata in all_shards(root):
        name = parse_weight_name(path.relative_to(root / "model").as_posix())
        assert name is not None
        layout = checkpoint.layouts[name.fqn]
        tp, ep = (name.tp or (0, 1))[0], (name.ep or (0, 1))[0]
        ours = shard_metadata(layout, checkpoint.topology, tp, ep, checkpoint.dialect.shard_version)
        if "unsharded_shape" in metadata:
            metadata["unsharded_shape"] = format_shape(parse_shape(metadata["unsharded_shape"]))
        assert ours == metadata
        count += 1
    assert count == len(list((root / "model").rglob("*.safetensors"))) > 10


slices = st.none() | st.tuples(st.integers(0, 10**6), st.integers(0, 10**6))


@given(
    st.integers(1, 3).flatmap(
        lambda n: st.lists(st.tuples(st.tuples(*[slices] * n), st.tuples(*[slices] * n)), min_size=1, max_size=4).map(
            tuple
        )
    )
)
def test_slices_round_trip(pairs: Slices) -> None:
    assert parse_slices(format_slices(pairs)) == pairs


@pytest.mark.parametrize(
    "text",
    ["", "all", "0,1,None", "0,1#0,1", "0,1,None#0,1,2", "None,1,None#0,1,None", "0,1,None#0,1,None;", "a,b,c#d,e,f"],
)
def test_malformed_slices(text: str) -> None:
    with pytest.raises(ValueError):
        parse_slices(text)


@given(st.lists(st.integers(0, 10**9), max_size=4).map(tuple))
def test_shapes_round_trip(shape: tuple[int, ...]) -> None:
    assert parse_shape(format_shape(shape)) == shape
    assert parse_shape("(" + ", ".join(f"np.int64({n})" for n in shape) + ")") == shape


@pytest.mark.parametrize("text", ["", "32", "(a,)", "[1, 2]", "(1, 2", "(np.int64(3)", "(1; 2)", "(1.5,)"])
def test_malformed_shapes(text: str) -> None:
    with pytest.raises(ValueError):
        parse_shape(text)


def test_expert_matrices_are_known_by_name() -> None:
    prefix = "model.decoder.0.pp_block.block_sparse_moe"
    assert expert_matrix(f"{prefix}.experts.mlp.w1.module.weight") is True
    assert expert_matrix(f"{prefix}.experts.mlp.w2.module.weight") is False
    for other in (f"{prefix}.gate.layer.weight", f"{prefix}.experts.mlp.w3.module.weight", "model.w1.module.weight"):
        assert expert_matrix(other) is None


def test_one_expert_a_rank_states_one_experts_shape() -> None:
    topology = Topology(tp=2, ep=8)
    assert W1.unsharded_shape(topology) == (12, 5)
    assert W2.unsharded_shape(topology) == (5, 12)
    assert W1.slices(topology, 1, 3) == (((None, None), ((6, 12), None)),)
    assert W2.slices(topology, 1, 3) == (((None, None), (None, (6, 12))),)
    assert W1.unsharded_shape(Topology(tp=1, ep=4)) == (96, 5)
