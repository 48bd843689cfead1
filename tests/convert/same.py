"""Compare two checkpoints: every tensor's bytes, every parameter's step and hyperparameters."""

from __future__ import annotations

from pathlib import Path

from nemo_optim_bridge.core.diff import Diff, diff
from nemo_optim_bridge.core.team import Workers
from nemo_optim_bridge.formats.checkpoints import open_pair


def verify(left: Path, right: Path) -> Diff:
    """Return the differences, groups being told apart by the first one's rule."""
    one, two, _ = open_pair(left, right)
    return diff(one, two, Workers(1))
