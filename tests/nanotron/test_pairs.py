"""A part of the pair table: every dialect, and every trap of the format, at least once in each direction."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nanotron.fixtures import read_index
from tests.nanotron.pair_table import EQUAL, REFUSED, check_pair

FIXTURES = read_index()

PAIRS = [
    # tp, pp, dp and the ZeRO stage in one go; the embedding tied across stages, wherever lm_head lands
    ("nt04-llama_tied-z0-tp2-pp1-dp1-ep1", "nt04-llama_tied-z1-tp2-pp2-dp2-ep1"),
    ("nt04-llama_tied-z1-tp2-pp2-dp2-ep1", "nt04-llama_tied-z0-tp4-pp1-dp1-ep1"),
    ("nt04-llama_tied-z1-tp1-pp1-dp2-ep1", "nt04-llama_tied-z0-tp2-pp2-dp1-ep1"),
    ("nt04-llama_untied-z0-tp2-pp1-dp1-ep1", "nt04-llama_untied-z1-tp1-pp1-dp4-ep1"),
    ("nt04-llama_untied-z1-tp1-pp1-dp4-ep1", "nt04-llama_untied-z0-tp1-pp2-dp1-ep1"),
    # unchanged
    ("nt04-llama_tied-z1-tp2-pp2-dp2-ep1", "nt04-llama_tied-z1-tp2-pp2-dp2-ep1"),
    ("head-llama_untied-z1-tp1-pp1-dp3-ep1", "head-llama_untied-z1-tp1-pp1-dp3-ep1"),
    # one param group per parameter, and from one to many and back
    ("head-llama_tied-z0-tp1-pp4-dp1-ep1", "head-llama_tied-z1-tp2-pp1-dp2-ep1"),
    ("head-llama_tied-z1-tp2-pp1-dp2-ep1", "head-llama_tied-z0-tp1-pp4-dp1-ep1"),
    ("nt04-llama_tied-z0-tp4-pp1-dp1-ep1", "head-llama_tied-z1-tp1-pp2-dp2-ep1"),
    ("head-llama_tied-z1-tp1-pp2-dp2-ep1", "nt04-llama_tied-z0-tp2-pp1-dp1-ep1"),
    ("head-llama_untied-z0-tp4-pp1-dp1-ep1", "v0.1-llama_untied-z1-tp2-pp1-dp2-ep1"),
    # legacy names; hybrids and numpy 2 metadata as sources and, upgraded, as targets
    ("v0.1-llama_untied-z1-tp2-pp1-dp2-ep1", "v0.1-llama_untied-z0-tp1-pp2-dp1-ep1"),
    ("v0.1-llama_untied-z0-tp1-pp2-dp1-ep1", "head-llama_untied-z1-tp1-pp1-dp3-ep1"),
    ("nt04-llama_untied-z0-tp2-pp1-dp1-ep1-np2", "v0.1-llama_untied-z0-tp1-pp1-dp1-ep1"),
    ("nt04-llama_untied-z1-tp2-pp1-dp2-ep1", "nt04-llama_untied-z0-tp2-pp1-dp1-ep1-np2"),
    ("nt04-llama_tied-z0-tp2-pp1-dp1-ep1-renamed", "nt04-llama_tied-z0-tp1-pp1-dp1-ep1"),
    ("nt04-llama_tied-z0-tp1-pp1-dp1-ep1", "nt04-llama_tied-z0-tp2-pp1-dp1-ep1-renamed"),
    # vocabulary padding
    ("nt04-llama_vpad_untied-z0-tp4-pp1-dp1-ep1", "nt04-llama_vpad_untied-z0-tp1-pp1-dp1-ep1"),
    ("nt04-llama_vpad_untied-z0-tp1-pp1-dp1-ep1", "nt04-llama_vpad_untied-z0-tp4-pp1-dp1-ep1"),
    ("nt04-llama_vpad_untied-z0-tp4-pp1-dp1-ep1", "head-llama_vpad_untied-z0-tp2-pp1-dp1-ep1"),
    # bf16 moments without masters; fused AdamW; attention bias; grouped experts and a float32 router
    ("nt04-llama_noacc-z0-tp2-pp1-dp1-ep1", "nt04-llama_noacc-z0-tp1-pp1-dp1-ep1"),
    ("nt04-llama_fused-z0-tp2-pp1-dp1-ep1", "nt04-llama_fused-z0-tp2-pp1-dp1-ep1"),
    ("head-qwen_untied-z0-tp1-pp1-dp1-ep1", "head-qwen_untied-z0-tp2-pp1-dp1-ep1"),
    ("head-qwenmoe-z0-tp2-pp1-dp1-ep1", "head-qwenmoe-z0-tp1-pp1-dp1-ep1"),
    # expert parallelism: the transposed w1 of tp 1, both coordinates, ZeRO-1, the two revisions of the example
    ("moe-moe_e8-z0-tp1-pp1-dp1-ep2", "moe-moe_e8-z0-tp2-pp1-dp1-ep1"),
    ("moe-moe_e8-z0-tp2-pp1-dp1-ep1", "moe-moe_e8-z1-tp1-pp1-dp2-ep2"),
    ("moe-moe_e8-z1-tp1-pp1-dp2-ep2", "moe-moe_e8-z0-tp2-pp1-dp1-ep2"),
    ("moe24-moe_e8-z0-tp1-pp1-dp1-ep2", "moe-moe_e8-z0-tp1-pp1-dp1-ep1"),
    ("moe-moe_e8-z0-tp2-pp1-dp1-ep2", "moe24-moe_e8-z0-tp1-pp1-dp1-ep2"),
    # weights that ranks overwrote, rebuilt from the masters
    ("moe-moe_e4-z0-tp1-pp1-dp1-ep4", "moe-moe_e4-z0-tp1-pp1-dp1-ep1"),
]

REFUSED_PAIRS = [
    ("moe-moe_e4-z0-tp1-pp1-dp1-ep1", "moe-moe_e4-z0-tp1-pp1-dp1-ep4"),
    ("moe-moe_e4-z0-tp1-pp1-dp1-ep4", "moe-moe_e4-z0-tp1-pp1-dp1-ep4"),
]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_reshard_equals_what_nanotron_saved(source: str, target: str, nanotron_fixtures: Path) -> None:
    outcome = check_pair((FIXTURES[source], FIXTURES[target]), nanotron_fixtures)
    assert outcome.verdict == EQUAL, outcome.detail


@pytest.mark.parametrize(("source", "target"), REFUSED_PAIRS)
def test_what_the_dialect_cannot_hold_is_refused(source: str, target: str, nanotron_fixtures: Path) -> None:
    outcome = check_pair((FIXTURES[source], FIXTURES[target]), nanotron_fixtures)
    assert outcome.verdict == REFUSED, outcome.detail


def test_the_pairs_above_reach_every_revision_and_model() -> None:
    named = {name for pair in PAIRS + REFUSED_PAIRS for name in pair}
    assert {fixture.nanotron for fixture in FIXTURES.values()} == {FIXTURES[name].nanotron for name in named}
    assert {fixture.model for fixture in FIXTURES.values()} == {FIXTURES[name].model for name in named}
