"""Stages are split as nanotron splits them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_optim_bridge.errors import TargetError
from nemo_optim_bridge.formats.nanotron.pipeline import blocks_of, split_as_given, split_by_cost
from nemo_optim_bridge.formats.nanotron.reader import read_checkpoint
from tests.nanotron.fixtures import Fixture, read_index

STAGED = {name: fixture for name, fixture in read_index().items() if fixture.pp > 1}
LAYER = 4 * 8 * 4 * 32 + 3 * 64 * 32  # the llama fixtures: 8 heads of 4, hidden 32, intermediate 64
HEAD = 128 * 32
SHORT = {"token_position_embeddings": "e", "final_layer_norm": "n", "lm_head": "h"}


def shown(stages: dict[str, int]) -> str:
    """Spell a split as the format's notes do: ``e012 3nh``."""
    parts = [
        "".join(SHORT.get(b, b[8:]) for b, s in stages.items() if s == stage)
        for stage in range(max(stages.values()) + 1)
    ]
    return " ".join(parts)


@pytest.mark.parametrize(
    ("pp", "expected"),
    [(1, "e0123nh"), (2, "e012 3nh"), (3, "e01 2 3nh"), (4, "e01 2 3 nh"), (6, "e0 1 2 3 n h")],
)
def test_splits_of_the_fixtures_model(pp: int, expected: str) -> None:
    assert shown(dict(split_by_cost(4, LAYER, HEAD, pp))) == expected


def test_stages_without_parameters_are_refused() -> None:
    with pytest.raises(TargetError, match=r"pp 8 leaves stage 6, 7 .* Choose pp from 1, 2, 3, 4, 5, 6, or"):
        split_by_cost(4, LAYER, HEAD, 8)


@pytest.mark.parametrize("fixture", STAGED.values(), ids=STAGED)
def test_real_checkpoints_are_split_like_this(fixture: Fixture, nanotron_fixtures: Path) -> None:
    checkpoint = read_checkpoint(nanotron_fixtures / "checkpoints" / fixture.name)
    facts = checkpoint.facts
    assert facts.layer_cost == LAYER
    ours = split_by_cost(facts.num_layers, facts.layer_cost, facts.vocab_size * facts.hidden_size, fixture.pp)
    assert checkpoint.stage_of == ours


def test_a_large_vocabulary_leaves_nothing_for_later_stages() -> None:
    """lm_head alone exceeds the first stage's share, and nothing with parameters comes after it."""
    with pytest.raises(TargetError, match=r"pp 2 leaves stage 1 without parameters. Choose pp from 1, or"):
        split_by_cost(4, 1, 100, 2)
    assert shown(dict(split_by_cost(4, 10, 30, 2))) == "e0123 nh"


@given(st.integers(1, 60), st.integers(1, 10**9), st.integers(0, 10**12), st.integers(1, 20))
def test_stages_grow_one_at_a_time(num_layers: int, layer: int, head: int, pp: int) -> None:
    try:
        stages = list(split_by_cost(num_layers, layer, head, pp).values())
    except TargetError:
        return
    assert stages[0] == 0
    assert stages[-1] == pp - 1
    assert all(b - a in (0, 1) for a, b in pairwise(stages))


def test_blocks_in_order() -> None:
    assert blocks_of(2) == ("token_position_embeddings", "decoder.0", "decoder.1", "final_layer_norm", "lm_head")


@pytest.mark.parametrize(
    ("given_layers", "expected"),
    [((4,), "e0123nh"), ((3, 1), "e012 3nh"), ((0, 4), "e 0123nh"), ((4, 0), "e0123 nh"), ((1, 1, 1, 1), "e0 1 2 3nh")],
)
def test_splits_as_given(given_layers: tuple[int, ...], expected: str) -> None:
    assert shown(dict(split_as_given(4, given_layers))) == expected


@pytest.mark.parametrize("given_layers", [(3,), (3, 2), (5, -1), (2, 0, 2)])
def test_wrong_splits_are_refused(given_layers: tuple[int, ...]) -> None:
    with pytest.raises(TargetError):
        split_as_given(4, given_layers)
