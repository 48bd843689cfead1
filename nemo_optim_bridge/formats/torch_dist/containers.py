"""The two containers of ``common.pt``: Lightning's, which NeMo reads, and Megatron-LM's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from nemo_optim_bridge.errors import ContradictionError, TargetError
from nemo_optim_bridge.formats.torch_dist.keys import MODEL_PREFIXES, NEMO_MODEL
from nemo_optim_bridge.formats.torch_dist.retarget import TargetOptimizer, matched_schedulers
from nemo_optim_bridge.formats.torch_dist.saved import DISTOPT, FULLY_RESHARDABLE, LIGHTNING, MEGATRON

#: Sharded entries that are not the model's, in Megatron-LM's container.
_NOT_MODEL: Final = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state", "opt_param_scheduler")
#: The oldest Lightning whose checkpoints have this shape.
_LIGHTNING_VERSION: Final = "2.4.0"


def model_prefix(fqns: Sequence[str]) -> str:
    """Return what all parameters' names begin with: ``model.``, ``module.`` or nothing."""
    return next((p for p in MODEL_PREFIXES if fqns and all(fqn.startswith(p) for fqn in fqns)), "")


def respell_model_key(key: str, source_prefix: str, target_prefix: str) -> str:
    """Return the key of a model's tensor or object in the target's container."""
    if source_prefix == target_prefix:
        return key
    if source_prefix:
        return target_prefix + key.removeprefix(source_prefix) if key.startswith(source_prefix) else key
    return key if key.startswith(_NOT_MODEL) else target_prefix + key


def target_prefix(source: str, target: str, prefix: str) -> str:
    """Return how parameters' names begin in the target's container."""
    if source == target:
        return prefix
    return NEMO_MODEL if target == LIGHTNING else ""


def rewrap(
    tree: Mapping[Any, Any], state: Mapping[Any, Any], target: TargetOptimizer, source: str, container: str, *,
    num_saved: int, avoid_prefix: bool, scheduler: Mapping[str, Any] | None, path: str,
) -> tuple[dict[Any, Any], list[str]]:  # fmt: skip
    """Return the new tree of ``common.pt`` with the optimizer's state in it, and remarks.

    Fields without a counterpart stay as extra keys, which both frameworks ignore. Raises TargetError for what the
    container needs and the checkpoint does not have.
    """
    made = {name: value for name, value in tree.items() if name not in ("optimizer_states", "optimizer")}
    remarks: list[str] = []
    if "lr_schedulers" in made and isinstance(made["lr_schedulers"], list | tuple):
        made["lr_schedulers"] = matched_schedulers(made["lr_schedulers"], num_saved, target.partner)
    if container == LIGHTNING:
        _lightning(made, target, remarks, path)
        made["optimizer_states"] = [state]
        if source != LIGHTNING:
            made.pop("content_metadata", None)
    else:
        _megatron(made, scheduler, remarks, path)
        made["optimizer"] = state
    if container == MEGATRON:
        made["content_metadata"] = _content(made.get("content_metadata"), target, avoid_prefix)
    if source != container:
        kept = sorted(str(name) for name in tree if name in made and name not in _SHARED)
        if kept:
            remarks.append(f"kept as extra keys of common.pt, without a counterpart: {', '.join(kept)}")
    return made, remarks


_SHARED: Final = frozenset({"lr_schedulers", "content_metadata", "opt_param_scheduler"})


def _iteration(tree: Mapping[Any, Any], path: str) -> int:
    found: dict[str, int] = {name: tree[name] for name in ("global_step", "iteration") if type(tree.get(name)) is int}
    if len(set(found.values())) > 1:
        raise ContradictionError(f"common.pt has {found}", path=path)
    if not found:
        raise TargetError("common.pt tells neither global_step nor iteration", path=path)
    return next(iter(found.values()))


def _lightning(made: dict[Any, Any], target: TargetOptimizer, remarks: list[str], path: str) -> None:
    """Add what Lightning cannot resume without."""
    wanted: dict[str, Any] = {
        "epoch": 0, "global_step": None, "pytorch-lightning_version": _LIGHTNING_VERSION, "state_dict": {}, "loops": {},
        "callbacks": {},
    }  # fmt: skip
    added = [name for name in wanted if name not in made]
    for name in added:
        made[name] = _iteration(made, path) if name == "global_step" else wanted[name]
    if "lr_schedulers" not in made:
        last = [group["lr"] for group in target.groups]
        made["lr_schedulers"] = [{"last_epoch": _iteration(made, path), "_last_lr": last}]
        added.append("lr_schedulers (the iteration and the groups' lr)")
    if added:
        remarks.append(f"Lightning needs, and the source does not have: {', '.join(added)}; added")


def _megatron(made: dict[Any, Any], scheduler: Mapping[str, Any] | None, remarks: list[str], path: str) -> None:
    """Add what Megatron-LM cannot resume without."""
    if "iteration" not in made:
        made["iteration"] = _iteration(made, path)
    made.setdefault("checkpoint_version", 3.0)
    known = made.get("lr_schedulers")
    first = known[0] if isinstance(known, list | tuple) and known and isinstance(known[0], Mapping) else {}
    if scheduler is not None:
        made["opt_param_scheduler"] = dict(scheduler)
    elif "opt_param_scheduler" not in made and {"num_steps", "max_lr"} <= first.keys():
        made["opt_param_scheduler"] = dict(first)
    if "opt_param_scheduler" not in made:
        raise TargetError(
            "Megatron-LM's container needs the state of its scheduler (opt_param_scheduler), which this checkpoint "
            "does not have", path=path,
            hint="give a JSON file with --scheduler-state: max_lr, min_lr, lr_warmup_steps, lr_decay_steps, "
            "lr_decay_style, start_wd, end_wd, wd_incr_style, wd_incr_steps, and num_steps in samples",
        )  # fmt: skip
    if "args" not in made:
        remarks.append("there are no Megatron-LM args in it: start without --use-checkpoint-args")
    remarks.append(f"Megatron-LM looks for it under the name iter_{made['iteration']:07d}, beside a file "
                   "latest_checkpointed_iteration.txt")  # fmt: skip


def _content(known: Any, target: TargetOptimizer, avoid_prefix: bool) -> dict[str, Any]:
    """Return the ``content_metadata`` that tells Megatron-LM's loader how the keys are spelled."""
    content = dict(known) if isinstance(known, Mapping) else {}
    content.pop("distrib_optim_sharding_type", None)
    if target.kind == DISTOPT:
        content["distrib_optim_sharding_type"] = FULLY_RESHARDABLE
    content.setdefault("singleton_local_shards", False)
    content["chained_optim_avoid_prefix"] = avoid_prefix
    return content
