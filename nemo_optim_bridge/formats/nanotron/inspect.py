"""Describe a nanotron checkpoint from its headers."""

from __future__ import annotations

from math import prod
from typing import Any

from nemo_optim_bridge.core.checkpoint import MASTER, WEIGHT
from nemo_optim_bridge.formats.nanotron.checkpoint import NanotronCheckpoint


def inspect(checkpoint: NanotronCheckpoint) -> dict[str, Any]:
    """Return what a checkpoint holds, under the field names of ``--json``."""
    manifest = checkpoint.manifest
    states: dict[str, set[str]] = {}
    num_elements = 0
    for spec in manifest.tensors:
        states.setdefault(spec.key.state, set()).add(spec.dtype)
        if spec.key.state == WEIGHT:
            num_elements += prod(spec.shape)
    steps = sorted(set(manifest.steps.values()))
    topology = checkpoint.topology
    return {
        "path": str(checkpoint.path),
        "framework": "nanotron",
        "dialect": checkpoint.dialect.name,
        "topology": {"tp": topology.tp, "pp": topology.pp, "dp": topology.dp, "ep": topology.ep},
        "zero_stage": checkpoint.zero_stage,
        "num_parameters": len(checkpoint.layouts),
        "num_elements": num_elements,
        "states": {name: sorted(dtypes) for name, dtypes in states.items()},
        "has_masters": MASTER in states,
        "step": int(steps[0]) if len(steps) == 1 else [int(step) for step in steps],
        "param_groups": [
            {"num_parameters": len(group.fqns), **group.hyperparameters} for group in manifest.param_groups
        ],
        "ties": [["model.token_position_embeddings", "model.lm_head"]] if checkpoint.tied else [],
        "num_experts": checkpoint.facts.num_experts,
        "vocab_size": checkpoint.facts.vocab_size,
        "stages": [[block for block, stage in checkpoint.stage_of.items() if stage == pp] for pp in range(topology.pp)],
        "remarks": list(checkpoint.remarks),
        "problems": list(checkpoint.problems),
    }
