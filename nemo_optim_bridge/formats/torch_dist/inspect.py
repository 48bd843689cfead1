"""Describe a ``torch_dist`` checkpoint from its headers."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from nemo_optim_bridge.core.groups import HYPERPARAMETERS, identify
from nemo_optim_bridge.errors import BridgeError
from nemo_optim_bridge.formats.torch_dist.common_file import CommonFile, opaque_classes
from nemo_optim_bridge.formats.torch_dist.keys import MASTER, MASTER_SPELLINGS, parse_state_key
from nemo_optim_bridge.formats.torch_dist.reader import TorchDist, read_torch_dist
from nemo_optim_bridge.formats.torch_dist.saved import read_saved
from nemo_optim_bridge.formats.torch_dist.states import check_bytes, read_states


def inspect(path: Path) -> dict[str, Any]:
    """Return what a checkpoint holds, under the field names of ``--json``.

    Raises CheckpointError kinds for a directory that cannot be read, or whose optimizer cannot be converted.
    """
    checkpoint = read_torch_dist(path)
    saved = read_saved(checkpoint.common, (*checkpoint.tensors, *checkpoint.objects), checkpoint.path)
    problems = []
    for check in (read_states, check_bytes):
        try:
            check(checkpoint)
        except BridgeError as error:
            problems.append(str(error))
    parsed = {key: parse_state_key(key) for key in checkpoint.tensors}
    states: dict[str, set[str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for key, tensor in checkpoint.tensors.items():
        found = parsed[key]
        if found is not None:
            state = MASTER if found.state in MASTER_SPELLINGS else found.state
            states.setdefault(state, set()).add(tensor.dtype)
            shapes[found.fqn] = tensor.shape
    weights = {tensor.dtype for key, tensor in checkpoint.tensors.items() if key in shapes}
    if weights:
        states["weight"] = weights
    classes = opaque_classes(CommonFile(Path(checkpoint.path)).tree)
    return {
        "path": checkpoint.path,
        "framework": "megatron (torch_dist)",
        "optimizer": saved.kind,
        "container": saved.container,
        "key_style": _key_style(checkpoint),
        "chained": saved.chained,
        "num_parameters": len(shapes),
        "num_elements": sum(map(prod, shapes.values())),
        "states": {name: sorted(dtypes) for name, dtypes in sorted(states.items())},
        "has_masters": MASTER in states,
        "step": saved.step,
        "param_groups": [
            {
                **{name: group[name] for name in HYPERPARAMETERS if name in group},
                "decays": identify(group).decays,
                "expert": identify(group).expert,
            }
            for group in saved.groups
        ],
        "remarks": [f"objects of {', '.join(classes[:6])} in common.pt were not opened"] if classes else [],
        "problems": problems,
    }


def _key_style(checkpoint: TorchDist) -> str:
    """Return how masters are spelled: ``uniform``, ``stock`` (or megatron-core's), ``both`` or ``none``."""
    found: dict[str, set[str]] = {}
    for key in checkpoint.tensors:
        parsed = parse_state_key(key)
        if parsed is not None and parsed.state in MASTER_SPELLINGS:
            found.setdefault(parsed.fqn, set()).add(parsed.state)
    if not found:
        return "none"
    if any(len(spellings) > 1 for spellings in found.values()):
        return "both"
    return "uniform" if all(spellings == {MASTER} for spellings in found.values()) else "stock"
