"""A ``torch_dist`` checkpoint as the operations on all formats see it."""

from __future__ import annotations

from pathlib import Path

from nemo_optim_bridge.core.checkpoint import Checkpoint
from nemo_optim_bridge.core.regroup import has_expert_groups
from nemo_optim_bridge.formats.torch_dist.containers import model_prefix
from nemo_optim_bridge.formats.torch_dist.manifest import read_manifest
from nemo_optim_bridge.formats.torch_dist.membership import Rule


def open_torch_dist(path: Path, rule: Rule | None = None) -> tuple[Checkpoint, Rule]:
    """Return the format-neutral view, and the rule by which parameters were assigned to groups.

    Parameters are named without what NeMo puts before all names, so that both containers name them alike. To compare
    two checkpoints, give the second one the first one's rule. Raises CheckpointError kinds.
    """
    found = read_manifest(path, rule=rule, bare_names=True)
    step = found.saved.step
    prefix = model_prefix(tuple(found.states.tensors))
    no_decay = [fqn for fqn, shape in found.states.shapes.items() if not found.rule.decays(fqn, shape)]
    view = Checkpoint(
        path=path,
        framework="megatron",
        layout=found.saved.kind,
        topology={"expert_groups": has_expert_groups(found.saved.groups)},
        manifest=found.manifest,
        scalars={fqn: {**values, "step": step} for fqn, values in found.hyperparameters.items()},
        no_decay=tuple(sorted(fqn.removeprefix(prefix) for fqn in no_decay)),
        remarks=(f"groups were told apart by this rule: {found.rule}",),
    )
    return view, found.rule
