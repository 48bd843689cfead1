"""File names are parsed to what they were formatted from, and nothing else is taken for one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_optim_bridge.formats.nanotron.names import (
    RankName,
    WeightName,
    block_of,
    format_rank_name,
    format_weight_name,
    is_fqn,
    parse_rank_name,
    parse_weight_name,
)
from nemo_optim_bridge.formats.topology import Coordinates, Topology
from tests.nanotron.fixtures import read_index

FIXTURES = read_index()


@st.composite
def ranks(draw: st.DrawFn) -> tuple[int, int]:
    size = draw(st.one_of(st.sampled_from([1, 9, 10, 11, 99, 100, 101]), st.integers(1, 10**6)))
    return draw(st.integers(0, size - 1)), size


rank_names = st.builds(RankName, ranks(), ranks(), st.none() | ranks(), st.none() | ranks())
identifiers = st.from_regex(r"[A-Za-z0-9_]{1,12}", fullmatch=True)
weight_names = st.builds(
    lambda folders, last, axes: WeightName(".".join([*folders, last]), *axes),
    st.lists(identifiers, min_size=1, max_size=5),
    st.from_regex(r"[a-z][a-z0-9]{0,8}(_proj)?", fullmatch=True),
    st.just((None, None, None)) | st.tuples(ranks(), ranks(), st.none() | ranks()),
)


@given(rank_names, st.sampled_from(["optimizer", "lr_scheduler"]))
def test_rank_names_round_trip(name: RankName, prefix: str) -> None:
    assert parse_rank_name(prefix, format_rank_name(prefix, name)) == name


@given(weight_names)
def test_weight_names_round_trip(name: WeightName) -> None:
    assert parse_weight_name(format_weight_name(name)) == name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (RankName((0, 1), (0, 2)), "optimizer_pp-0-of-1_tp-0-of-2.pt"),
        (RankName((0, 1), (0, 2), (0, 2)), "optimizer_pp-0-of-1_dp-0-of-2_tp-0-of-2.pt"),
        (RankName((0, 1), (0, 2), None, (0, 1)), "optimizer_pp-0-of-1_tp-0-of-2_exp-0-of-1.pt"),
        (
            RankName((3, 16), (10, 100), (99, 128), (9, 10)),
            "optimizer_pp-3-of-16_dp-99-of-128_tp-10-of-100_exp-9-of-10.pt",
        ),
    ],
)
def test_rank_names_are_nanotrons(name: RankName, text: str) -> None:
    assert format_rank_name("optimizer", name) == text
    assert parse_rank_name("optimizer", text) == name


@pytest.mark.parametrize(
    "text",
    [
        "optimizer.pt",
        "optimizer_config.json",
        "optimizer_pp-0-of-1_tp-2-of-2.pt",
        "optimizer_pp-0-of-0_tp-0-of-1.pt",
        "optimizer_pp-00-of-1_tp-0-of-2.pt",
        "optimizer_pp-0-of-01_tp-0-of-2.pt",
        "optimizer_tp-0-of-2_pp-0-of-1.pt",
        "optimizer_pp-0-of-1_tp-0-of-2.pt.tmp",
        "optimizer_pp-0-of-1_tp-0-of-2.pt\n",
        "optimizer_pp-\u0660-of-1_tp-0-of-2.pt",
        "lr_scheduler_pp-0-of-1_tp-0-of-2.pt",
        "optimizer_pp--1-of-1_tp-0-of-2.pt",
        "xoptimizer_pp-0-of-1_tp-0-of-2.pt",
        "optimizer_pp-0-of-1_tp-0-of-2_dp-0-of-1.pt",
        "",
    ],
)
def test_what_is_no_rank_name(text: str) -> None:
    assert parse_rank_name("optimizer", text) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a/b/model_weight.safetensors", WeightName("a.b.weight")),
        (
            "a/b/model_weight_pp-rank-1-of-2_tp-rank-10-of-16.safetensors",
            WeightName("a.b.weight", (1, 2), (10, 16)),
        ),
        (
            "a/b/model_weight_pp-rank-0-of-1_tp-rank-0-of-1_exp-rank-100-of-101.safetensors",
            WeightName("a.b.weight", (0, 1), (0, 1), (100, 101)),
        ),
        (
            "a/model_model_weight.safetensors_pp-rank-0-of-1_tp-rank-0-of-2.safetensors",
            WeightName("a.weight", (0, 1), (0, 2), doubled=True),
        ),
        ("a/experts/model_merged_gate_up_proj.safetensors", WeightName("a.experts.merged_gate_up_proj")),
    ],
)
def test_weight_names_are_nanotrons(text: str, name: WeightName) -> None:
    assert parse_weight_name(text) == name
    assert (format_weight_name(name) == text) != name.doubled


@pytest.mark.parametrize(
    "text",
    [
        "model_weight.safetensors",
        "../a/model_weight.safetensors",
        "a/../../model_weight.safetensors",
        "a//model_weight.safetensors",
        "a.b/model_weight.safetensors",
        "a/weight.safetensors",
        "a/model_.safetensors",
        "a/model_weight.safetensors.tmp",
        "a/model_weight_pp-rank-0-of-1.safetensors/x",
        "a/b c/model_weight.safetensors",
        "a/model_weight_pp-rank-1-of-1_tp-rank-0-of-1.safetensors",
        "a/model_weight_pp-rank-0-of-1_tp-rank-00-of-1.safetensors",
        "a/model_weight\n.safetensors",
        "a/model_wéight.safetensors",
    ],
)
def test_what_is_no_weight_name(text: str) -> None:
    assert parse_weight_name(text) is None


@pytest.mark.parametrize("fqn", ["a.b", "model.decoder.0.pp_block.attn.qkv_proj.weight", "A_1.b"])
def test_a_parameter_name(fqn: str) -> None:
    assert is_fqn(fqn)


@pytest.mark.parametrize("fqn", ["", "a", ".a", "a.", "a..b", "../a", "a/b.c", "a.b\n", "a.b\0", "a.é", "a b.c"])
def test_no_parameter_name(fqn: str) -> None:
    assert not is_fqn(fqn)


@pytest.mark.parametrize("fixture", FIXTURES.values(), ids=FIXTURES)
def test_every_real_file_name_is_understood(fixture: object, nanotron_fixtures: Path) -> None:
    root = nanotron_fixtures / "checkpoints" / fixture.name  # type: ignore[attr-defined]
    topology = Topology(*(getattr(fixture, axis) for axis in ("tp", "pp", "dp", "ep")))
    seen = set()
    for path in (root / "optimizer").glob("*.pt"):
        name = parse_rank_name("optimizer", path.name)
        assert name is not None
        assert name.matches(topology)
        seen.add(name.coordinates)
    zero = fixture.zero  # type: ignore[attr-defined]
    assert seen == {at for at in topology if zero or at.dp == 0}
    for path in (root / "model").rglob("*.safetensors"):
        weight = parse_weight_name(path.relative_to(root / "model").as_posix())
        assert weight is not None
        assert weight.matches(topology)
        if not weight.doubled:
            assert format_weight_name(weight) == path.relative_to(root / "model").as_posix()


def test_names_match_their_topology_only() -> None:
    name = RankName((0, 2), (1, 4), (0, 3), (0, 2))
    assert name.matches(Topology(tp=4, pp=2, dp=3, ep=2))
    for other in (Topology(2, 2, 3, 2), Topology(4, 1, 3, 2), Topology(4, 2, 1, 2), Topology(4, 2, 3, 1)):
        assert not name.matches(other)
    legacy = RankName((0, 1), (1, 2))
    assert legacy.matches(Topology(tp=2, dp=7))
    assert not legacy.matches(Topology(tp=2, ep=2))
    assert legacy.coordinates == Coordinates(tp=1, pp=0, dp=0, ep=0)
    assert WeightName("a.b").matches(Topology(3, 3, 3, 3))
    assert not WeightName("a.b", (0, 1), (0, 2)).matches(Topology(tp=2, pp=2))
    assert not WeightName("a.b", (0, 1), (0, 2), (0, 4)).matches(Topology(tp=2, ep=2))


def test_blocks() -> None:
    assert block_of("model.decoder.10.pp_block.attn.qkv_proj.weight") == "decoder.10"
    assert block_of("model.lm_head.pp_block.weight") == "lm_head"
    assert block_of("model.token_position_embeddings.pp_block.token_embedding.weight") == "token_position_embeddings"
    assert block_of("decoder.1.weight") is None
    assert block_of("model.decoder.weight") != "decoder.weight"
