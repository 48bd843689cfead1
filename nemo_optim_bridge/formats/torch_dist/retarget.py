"""Rewrite param groups, lr schedulers and the optimizer's general state for another optimizer type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nemo_optim_bridge.core.groups import LR_MULTIPLIERS, WD_MULTIPLIERS, both_sides, flag_of, identify, scalar
from nemo_optim_bridge.core.regroup import Members, effective_weight_decay, has_expert_groups, regroup
from nemo_optim_bridge.errors import ParamGroupError, TargetError
from nemo_optim_bridge.formats.torch_dist.saved import (
    DISTOPT,
    DISTRIBUTED,
    FULLY_RESHARDABLE,
    FUSED,
    MEGATRON_KINDS,
    SavedOptimizer,
)

#: Lists of an lr scheduler that have one entry a group.
_PER_GROUP: Final = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "_initial_lrs")


@dataclass(frozen=True, slots=True, eq=False)
class TargetOptimizer:
    """What to write: groups in the order of the target, with the chained optimizer that each belongs to.

    ``partner[i]`` is the saved group that the values of group ``i`` are of.
    """

    kind: str
    groups: tuple[dict[str, Any], ...]
    chain: tuple[int, ...]
    chained: bool
    partner: tuple[int, ...]
    step: int
    remarks: tuple[str, ...]


def retarget(saved: SavedOptimizer, kind: str, members: Members, target_ep: int | None) -> TargetOptimizer:
    """Return the target's groups; raises ParamGroupError or TargetError when they cannot have the same values."""
    if kind == DISTRIBUTED and (target_ep or 1) > 1:
        raise TargetError(
            f"distributed_fused_adam cannot run with an expert parallel size of {target_ep}: Apex's optimizer reduces "
            "all gradients over one data-parallel group and would mix different experts",
            hint="leave out --target-ep, and set expert_model_parallel_size: 1 in the run",
        )
    experts = members.expert_decay or members.expert_no_decay
    was_split = has_expert_groups(saved.groups)
    split = was_split if target_ep is None else target_ep > 1
    split = split and experts and kind != DISTRIBUTED
    remarks = []
    to_megatron = kind in MEGATRON_KINDS
    if to_megatron == saved.is_megatron and split == was_split:
        groups: Sequence[dict[str, Any]] = saved.groups
        partner = tuple(range(len(groups)))
        if to_megatron:  # dense ones first, as they are chained
            partner = tuple(sorted(partner, key=lambda i: identify(groups[i]).expert))
            groups = [groups[i] for i in partner]
    else:
        neutral = [_neutral(group, saved.groups) for group in saved.groups]
        cut = regroup(neutral, members, split_experts=split, nemo_order=not to_megatron)
        partner = cut.partner
        make = _as_megatron if to_megatron else _as_nemo
        groups = [make(group, decays) for group, decays in zip(cut.groups, cut.decays, strict=True)]
    if was_split and not split:
        remarks.append(
            "the saved expert groups became part of the ordinary ones: the target has expert parallel size 1"
        )
    elif split and not was_split:
        remarks.append("experts have groups of their own: the target has an expert parallel size above 1")
    if to_megatron:
        _require_distinct(groups)
    return TargetOptimizer(
        kind=kind,
        groups=tuple(dict(group) for group in groups),
        chain=tuple(int(split and identify(group).expert) for group in groups) if to_megatron else (0,) * len(groups),
        chained=to_megatron and split,
        partner=partner,
        step=saved.step,
        remarks=tuple(remarks),
    )


def _neutral(group: Mapping[str, Any], siblings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a group with its effective weight decay, and of Megatron's own fields only those that say something."""
    identity = identify(group)
    kept = {
        name: value
        for name, value in group.items()
        if name not in (*WD_MULTIPLIERS, *LR_MULTIPLIERS, "is_expert", "is_expert_parallel", "is_decoupled_lr")
    }
    kept["weight_decay"] = effective_weight_decay(group, siblings)
    kept["is_expert"] = identity.expert
    if identity.lr_mult != 1.0:
        kept["lr_mult"] = identity.lr_mult
    if flag_of(group, "is_decoupled_lr"):
        kept["is_decoupled_lr"] = True
    return kept


def _as_nemo(group: Mapping[str, Any], decays: bool) -> dict[str, Any]:
    for name in ("lr_mult", "is_decoupled_lr"):
        if name in group:
            raise ParamGroupError(
                f"NeMo has no groups with {name} {group[name]}",
                hint="only megatron-core's optimizers can go on from it: --to mcore_float16 or mcore_distributed",
            )
    return dict(group)


def _as_megatron(group: Mapping[str, Any], decays: bool) -> dict[str, Any]:
    made = {name: value for name, value in group.items() if name != "is_expert"}
    lr_mult = float(scalar(made.get("lr_mult", 1.0)))
    decoupled = bool(made.get("is_decoupled_lr", False))
    made |= {
        "wd_mult": 1.0 if decays else 0.0,
        "lr_mult": lr_mult,
        "is_expert_parallel": bool(group["is_expert"]),
        "is_decoupled_lr": decoupled,
    }
    made.setdefault("default_config", lr_mult == 1.0 and not decoupled)
    return made


def _require_distinct(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ParamGroupError when megatron-core would take one group for another: it keeps the last of equal ones."""
    seen: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for group in groups:
        names = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
        key = tuple(group.get(name, group.get(f"pre_{name}")) for name in names)
        other = seen.setdefault(key, group)
        if other is not group and other != group:
            raise ParamGroupError(
                f"megatron-core cannot tell groups with equal {', '.join(names)} apart\n" + both_sides(groups, groups)
            )


def optimizer_state(
    target: TargetOptimizer, extras: Mapping[int, Mapping[str, Any]], *, step_in_state: bool
) -> dict[Any, Any]:
    """Return the optimizer's part of ``common.pt``.

    Args:
        extras: more fields of every (chained) optimizer's state.
        step_in_state: also write the step where megatron-core looks with torch's own Adam.
    """
    if target.kind == DISTRIBUTED:
        return {"state": {"step": target.step}, "param_groups": list(target.groups), "format": 2}
    groups = [{**group, "step": target.step} if target.step else dict(group) for group in target.groups]
    parts: dict[Any, dict[Any, Any]] = {}
    for number in sorted(set(target.chain)):
        own = [group for group, chain in zip(groups, target.chain, strict=True) if chain == number]
        inner: dict[str, Any] = {"param_groups": own}
        if step_in_state and target.step and target.kind != FUSED:
            inner["state"] = {"common_step": target.step}
        parts[number] = {"optimizer": inner, **extras.get(number, {})}
        if target.kind == DISTOPT:
            parts[number]["param_state_sharding_type"] = FULLY_RESHARDABLE
    return parts if target.chained else parts[min(parts)]


def matched_schedulers(schedulers: Sequence[Any], num_saved: int, partner: Sequence[int]) -> list[Any]:
    """Return lr schedulers whose lists have one entry for each of the target's groups, in its order."""
    made = []
    for scheduler in schedulers:
        if isinstance(scheduler, Mapping):
            scheduler = dict(scheduler)
            for name in _PER_GROUP:
                values = scheduler.get(name)
                if isinstance(values, list | tuple) and len(values) == num_saved:
                    scheduler[name] = type(values)([values[j] for j in partner])
        made.append(scheduler)
    return made
