"""Put the slices and shards of a written checkpoint together with torch alone, and edit every rank alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.edits import edit_pt
from tests.nanotron.pair_table import run_cli

ONE = "--tp 1 --pp 1 --dp 1 --ep 1 --zero 0"
WHOLE = "optimizer/optimizer_pp-0-of-1_tp-0-of-1_exp-0-of-1.pt"
MOMENTS = ("exp_avg", "exp_avg_sq")


def optimizer_files(folder: Path) -> list[Path]:
    """Return the optimizer files of all ranks."""
    paths = list((folder / "optimizer").glob("*.pt"))
    assert paths
    return paths


def rank(path: Path, axis: str) -> int:
    """Return the rank along an axis that a file name states, as a number."""
    match = re.search(rf"_{axis}-(?:rank-)?(\d+)-of-", path.name)
    assert match is not None
    return int(match[1])


def edit_ranks(root: Path, change: Callable[[Any], object], only: str = "") -> None:
    """Apply one edit to the optimizer file of every rank whose name contains ``only``."""
    paths = [path for path in optimizer_files(root) if only in path.name]
    assert paths
    for path in paths:
        edit_pt(path, change)


def number_of(content: Mapping[str, Any], fqn: str) -> int:
    """Return a parameter's integer id in a loaded optimizer file."""
    (number,) = (number for number, name in content["names"].items() if name == fqn)
    assert isinstance(number, int)
    return number


def state_of(content: Mapping[str, Any], fqn: str) -> dict[str, Any]:
    """Return a parameter's states in a loaded optimizer file."""
    entries = content["state"][number_of(content, fqn)]
    assert isinstance(entries, dict)
    return entries


def read_truth(fixtures: Path, model: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return the ground truth by parameter and state."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(fixtures / "truth" / f"{model}.safetensors").items():
        fqn, state = name.split("|")
        found.setdefault(fqn, {})[state] = tensor
    return found


def slices(folder: Path, order: Callable[[Path], Any]) -> dict[tuple[str, str], torch.Tensor]:
    """Return the moments and masters of a tp 1 ZeRO-1 checkpoint: the ranks' flat slices, joined in an order."""
    parts: dict[tuple[str, str], list[torch.Tensor]] = {}
    for path in sorted(optimizer_files(folder), key=order):
        content = torch.load(path, weights_only=True)
        for number, fqn in content["names"].items():
            values = {key: content["state"][number][key] for key in MOMENTS}
            for state, value in {**values, "fp32": content["gradient_accumulator"][fqn].detach()}.items():
                parts.setdefault((fqn, state), []).append(value)
    return {key: torch.cat(tensors) for key, tensors in parts.items()}


def same(one: Path, two: Path) -> None:
    """Fail unless ``verify`` finds two checkpoints equal."""
    code, printed = run_cli("verify", one, two)
    assert code == 0, printed
