"""Kills at random moments: a few here, 200 with ``python -m tests.faults.kill_table``."""

from __future__ import annotations

from pathlib import Path

from tests.faults.kill_table import BEFORE, COMPLETE, WRITING, kill_runs


def test_kills_at_random_moments(fast_folder: Path) -> None:
    tally, problems = kill_runs(fast_folder, 15, 10, seed=7)
    assert problems == []
    assert tally[BEFORE] + tally[WRITING] + tally[COMPLETE] == 15
    assert tally[WRITING] + tally[COMPLETE] >= 10
    assert tally["next"] >= 15
