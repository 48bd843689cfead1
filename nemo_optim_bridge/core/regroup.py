"""Re-cut param groups for another optimizer: expert groups split off or folded in, groups put in another order.

Who belongs with whom is decided by ``groups.match_groups`` and values are taken by ``groups.merge_group``, as they are
when an optimizer loads a checkpoint by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_optim_bridge.core.groups import (
    WD_MULTIPLIERS,
    Group,
    Policy,
    both_sides,
    describe,
    identify,
    match_groups,
    merge_group,
    number_of,
)
from nemo_optim_bridge.errors import ParamGroupError


@dataclass(frozen=True, slots=True)
class Members:
    """Which kinds of parameters exist: decaying or not, dense or expert. A target makes no group for what is absent."""

    decay: bool
    no_decay: bool
    expert_decay: bool
    expert_no_decay: bool


@dataclass(frozen=True, slots=True)
class Regrouped:
    """The new groups in order, for each the number of the saved group that its values are of, and whether it decays.

    A group for parameters with weight decay is one even where that weight decay is 0.
    """

    groups: tuple[dict[str, Any], ...]
    partner: tuple[int, ...]
    decays: tuple[bool, ...]


def effective_weight_decay(group: Group, siblings: Sequence[Group]) -> float:
    """Return the weight decay that a group's parameters get.

    megatron-core keeps the base value in every group until its scheduler has run and ``weight_decay * wd_mult``
    afterwards. With a multiplier other than 0 and 1 a sibling with multiplier 1 tells which it is. Raises
    ParamGroupError when none does.
    """
    decay = number_of(group, "weight_decay") or 0.0
    multiplier = number_of(group, *WD_MULTIPLIERS)
    if multiplier in (None, 1.0) or not decay:
        return decay
    if not multiplier:
        return 0.0
    for base in (number_of(g, "weight_decay") or 0.0 for g in siblings if number_of(g, *WD_MULTIPLIERS) == 1.0):
        if decay == base:
            return decay * multiplier
        if math.isclose(decay, base * multiplier, rel_tol=1e-12):
            return decay
    raise ParamGroupError(
        f"whether weight_decay {decay:g} contains wd_mult {multiplier:g} cannot be told: {describe(group)}",
        hint="save the checkpoint once after the scheduler has run, with a group of wd_mult 1 beside it",
    )


def has_expert_groups(groups: Sequence[Group]) -> bool:
    """Return whether experts have groups of their own, as they have with an expert parallel size above 1."""
    return any(identify(group).expert for group in groups)


def regroup(saved: Sequence[Group], members: Members, *, split_experts: bool, nemo_order: bool) -> Regrouped:
    """Return the groups that a target makes of the same parameters, with the saved groups' values.

    Args:
        saved: groups whose ``weight_decay`` is the effective one.
        members: which kinds of parameters there are.
        split_experts: whether decaying experts get a group of their own.
        nemo_order: [decay, expert decay, no decay], with experts without decay among the last; else dense groups
            first and expert groups after them, as megatron-core chains them.

    Raises ParamGroupError, with both lists, where groups with different values would have to become one, or a group
    that is needed was not saved.
    """
    places = _wanted(saved, members, split_experts, nemo_order)
    wanted = [group for _, group in places]
    known = list(saved)
    origin = list(range(len(saved)))
    if nemo_order:
        known = [_dense(group) if not identify(group).decays else group for group in known]
    elif split_experts and has_expert_groups(saved):
        for number, group in enumerate(saved):  # one group may hold experts and others, as NeMo's last does
            twin = {**group, "is_expert": True}
            if not any(identify(twin) == identify(other) for other in known):
                known.append(twin)
                origin.append(number)
    matching = match_groups(known, wanted)
    needed = {j for j in matching.unmatched if origin[j] == j}
    if needed:
        raise ParamGroupError(
            f"saved groups {sorted(needed)} have no place among the target's\n" + both_sides(known, wanted),
            hint="the target optimizer cannot tell these parameters from others",
        )
    groups = []
    for target, j in zip(wanted, matching.partner, strict=True):
        merged = merge_group(known[j], target, Policy())
        groups.append({**merged, "weight_decay": known[j].get("weight_decay", merged["weight_decay"])})
    return Regrouped(
        tuple(groups), tuple(origin[j] for j in matching.partner), tuple(decays for decays, _ in places)
    )  # fmt: skip


def _wanted(
    saved: Sequence[Group], members: Members, split: bool, nemo_order: bool
) -> list[tuple[bool, dict[str, Any]]]:
    """Return the target's groups, with what identifies them and nothing else, after whether they decay."""
    if nemo_order:
        expert_decay = split and members.expert_decay
        places = [
            (True, False, members.decay or (members.expert_decay and not split)),
            (True, True, expert_decay),
            (False, False, members.no_decay or members.expert_no_decay),
        ]
    else:
        places = [
            (True, False, members.decay or (members.expert_decay and not split)),
            (False, False, members.no_decay or (members.expert_no_decay and not split)),
            (True, True, split and members.expert_decay),
            (False, True, split and members.expert_no_decay),
        ]
    variants = list(dict.fromkeys((identify(g).decays, identify(g).lr_mult, identify(g).markers) for g in saved))
    without_decay = not any(decays for decays, _, _ in variants)  # the run has no weight decay at all
    wanted = []
    for decays, expert, exists in places:
        kinds = [v for v in variants if v[0] == (decays and not without_decay)] or [(decays, 1.0, ())]
        for _, lr_mult, markers in kinds if exists else ():
            decay = next((g["weight_decay"] for g in saved if identify(g).decays), 0.0) if decays else 0.0
            group = {"weight_decay": decay, "is_expert": expert, **dict(markers)}
            wanted.append((decays, group if lr_mult == 1.0 else {**group, "lr_mult": lr_mult}))
    return wanted


def _dense(group: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in group.items() if name not in ("is_expert", "is_expert_parallel")}
    return {**kept, "is_expert": False}
