"""Checkpoints with their truth, and comparisons."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

DATA = Path(__file__).parent.parent / "data" / "nemo"


def have_nemo() -> bool:
    """Return whether what the real classes need is installed."""
    try:
        found = [importlib.util.find_spec(name) for name in ("nemo.core", "megatron.core", "psutil", "wrapt")]
    except ImportError:
        return False
    return all(found)


@dataclass(frozen=True)
class Fixture:
    """A saved checkpoint and what is in it."""

    path: str
    truth: dict[str, Any]
    info: dict[str, Any]

    @property
    def moe(self) -> bool:
        return bool(self.info["model"]["moe"])


def read_fixture(name: str) -> Fixture:
    """Return a checkpoint of tests/data/nemo."""
    folder = DATA / name
    info = json.loads((folder / "truth.json").read_text())
    info.setdefault("model", {"moe": True})
    truth = load_file(DATA / f"{'moe' if info['model']['moe'] else 'dense'}.safetensors")
    return Fixture(str(folder / "ckpt"), truth, info)


def assemble(results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the global tensors from all ranks' boxes; replicas must agree and nothing may be missing."""
    whole: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for result in results:
        for key, shape, offset, values in result["boxes"]:
            tensor = whole.setdefault(key, np.zeros(shape, np.float32))
            done = filled.setdefault(key, np.zeros(shape, bool))
            where = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
            assert (tensor[where].view(np.int32) == values.view(np.int32))[done[where]].all(), f"replicas of {key}"
            tensor[where], done[where] = values, True
    assert all(done.all() for done in filled.values())
    return whole


def differences(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], masters_only: bool = True) -> list[str]:
    """Return what differs, bit by bit; model weights are left out unless asked for."""
    problems = []
    for key, values in wanted.items():
        if masters_only and key.startswith("model_param."):
            continue
        if key not in found:
            problems.append(f"{key} is missing")
        elif (count := int((found[key].view(np.int32) != values.view(np.int32)).sum())) > 0:
            problems.append(f"{key}: {count} of {values.size} differ")
    return problems
