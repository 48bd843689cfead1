"""A bounded run of the fuzzer; ``python -m tests.fuzz.mutations --count 10000`` is the long one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.fuzz import megatron
from tests.fuzz.harness import BAD
from tests.fuzz.mutations import run_all
from tests.fuzz.mutators import MUTATORS

#: Cases of the long run that once went wrong, by number; its seed is 2026.
FOUND = (818, 1215, 1890, 2570, 2888, 3218, 3590)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_outcome_is_right_or_a_typed_refusal(seed: int, nanotron_fixtures: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(nanotron_fixtures, tmp_path / "fixtures")
    count = 3 * len(MUTATORS)
    outcomes = list(run_all(folder, tmp_path, count=count, seed=seed))
    assert [outcome for outcome in outcomes if outcome.verdict == BAD] == []
    assert {outcome.kind for outcome in outcomes} == set(MUTATORS)
    assert len(outcomes) == count


def test_megatron_checkpoints(tmp_path: Path) -> None:
    folder = megatron.unpack(tmp_path / "fixtures")
    count = 5 * len(megatron.MUTATORS)
    outcomes = list(
        run_all(folder, tmp_path, count=count, seed=1, prepare=megatron.prepare, case=megatron.run_case)
    )  # fmt: skip
    assert [outcome for outcome in outcomes if outcome.verdict == BAD] == []
    assert {outcome.kind for outcome in outcomes} == set(megatron.MUTATORS)


def test_what_was_found_stays_found(nanotron_fixtures: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(nanotron_fixtures, tmp_path / "fixtures")
    outcomes = list(run_all(folder, tmp_path, numbers=FOUND, seed=2026))
    assert [outcome for outcome in outcomes if outcome.verdict == BAD] == []
