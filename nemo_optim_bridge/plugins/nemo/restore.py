"""From the state dict that arrives to the one that Apex's optimizer loads: read, check everything, change nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_optim_bridge.core.groups import (
    Group,
    Matching,
    Policy,
    both_sides,
    common_step,
    find_steps,
    group_error,
    match_groups,
    merge_group,
    without_params,
)
from nemo_optim_bridge.errors import (
    BridgeError,
    CheckpointError,
    ColdOptimizerError,
    ContradictionError,
    MissingSourceError,
    ParamGroupError,
    UnknownFormatError,
    raise_all,
)

MASTER, MOMENTS = "param", ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Arrived:
    """A state dict, taken apart: nothing in it is changed or copied.

    ``source`` is the optimizer that wrote it, ``saved_groups`` its groups in the order it had them, ``ids`` for each
    group of *this* optimizer the keys of its parameters in ``state``.
    """

    source: str
    saved_groups: tuple[dict[str, Any], ...]
    ids: tuple[tuple[Any, ...], ...]
    state: Mapping[Any, Any]
    step: int | None


def read_arrived(state_dict: Mapping[str, Any]) -> Arrived:
    """Take apart what NeMo hands over after a load.

    Three layouts, told apart by where the hyperparameters are: fused_adam under MainParamsOptimizerWrapper
    (``optimizer.param_groups``), distributed_fused_adam (``state.step``) and a plain fused Adam (steps in the groups).
    megatron-core has put the current parameter ids into the outer ``param_groups``.
    Raises UnknownFormatError, ContradictionError (steps).
    """
    if state_dict.get("format") not in (None, 2) or "buckets" in state_dict or "gathered_states" in state_dict:
        raise UnknownFormatError(
            "this is Apex's deprecated state dict format 1, pickled buckets of one fixed parallel layout",
            hint="load it with NeMo's own distributed_fused_adam on the layout that saved it, and save it again",
        )
    groups, state = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(groups, list | tuple) or not isinstance(state, Mapping):
        raise UnknownFormatError(
            f"an optimizer state with {sorted(map(str, state_dict))} did not come from a distributed checkpoint",
            hint="the bridge reads Megatron distributed checkpoints (a directory with metadata.json)",
        )
    if any(not isinstance(group, Mapping) or "params" not in group for group in groups):
        raise UnknownFormatError("param_groups of the optimizer state list no parameters")
    inner = state_dict.get("optimizer")
    steps: dict[str, int] = {}
    if isinstance(inner, Mapping) and isinstance(inner.get("param_groups"), list | tuple):
        saved = inner["param_groups"]
        source = "mcore Float16Optimizer" if any("wd_mult" in group for group in saved) else "fused_adam"
        inner_state = inner.get("state")
        kept = [("optimizer.state", inner_state)] if isinstance(inner_state, Mapping) else []
        steps = find_steps(saved, kept)
    else:
        source, saved = "distributed_fused_adam", groups
        if "step" not in state:
            source = "fused_adam (without masters)"
        per_parameter = [(f"state[{i}]", s) for i, s in state.items() if isinstance(s, Mapping)]
        steps = find_steps(saved, [("state", state), *per_parameter])
    return Arrived(
        source=source,
        saved_groups=tuple(without_params(group) for group in saved),
        ids=tuple(tuple(group["params"]) for group in groups),
        state=state,
        step=common_step(steps),
    )


@dataclass(frozen=True, slots=True)
class Facts:
    """What every rank has to know of every other before any of them changes anything."""

    num_saved_groups: int
    unmatched: frozenset[int]
    moments: bool  # any moment that is not zero
    step: int | None


@dataclass(frozen=True, slots=True)
class Restore:
    """A checked restore: ``state_dict`` is for Apex, ``masters`` per parameter in the order of the groups."""

    arrived: Arrived
    matching: Matching | None
    groups: tuple[dict[str, Any], ...]
    state_dict: dict[str, Any]
    masters: tuple[torch.Tensor, ...]
    facts: Facts


def prepare(state_dict: Mapping[str, Any], current_groups: Sequence[Group], policy: Policy) -> Restore:
    """Check a state dict against the optimizer's groups and build the one to load; the input is not mutated.

    Raises ParamGroupError, CheckpointError and its kinds, with every problem found.
    """
    arrived = read_arrived(state_dict)
    matching = match_groups(arrived.saved_groups, current_groups) if policy.needs_checkpoint else None
    merged = []
    for i, group in enumerate(current_groups):
        saved = arrived.saved_groups[matching.partner[i]] if matching else None
        merged.append(merge_group(saved, group, policy))
    _check_membership(arrived, current_groups)
    state: dict[Any, Any] = {"step": arrived.step or 0}
    problems: list[BridgeError] = []
    masters: list[torch.Tensor] = []
    for i, (ids, group) in enumerate(zip(arrived.ids, current_groups, strict=True)):
        merged[i]["params"] = list(range(len(masters), len(masters) + len(ids)))
        for name, parameter in zip(ids, group["params"], strict=True):
            tensors, found = _check_tensors(arrived.state.get(name), parameter, f"group {i}, parameter {name}")
            problems += found
            state[len(masters)] = tensors
            masters.append(tensors.get(MASTER, torch.empty(0)))
    raise_all(problems)
    moments = any(bool(t.count_nonzero()) for s in state.values() if isinstance(s, dict) for t in _moments(s))
    unmatched = frozenset() if matching is None else matching.unmatched
    return Restore(
        arrived=arrived,
        matching=matching,
        groups=tuple(merged),
        state_dict={"state": state, "param_groups": [dict(group) for group in merged], "format": 2},
        masters=tuple(masters),
        facts=Facts(len(arrived.saved_groups), unmatched, moments, arrived.step),
    )


def _moments(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[name] for name in MOMENTS]


def _check_membership(arrived: Arrived, current_groups: Sequence[Group]) -> None:
    """Raise ParamGroupError unless the ids are laid out as this optimizer's groups are."""
    theirs, mine = [len(ids) for ids in arrived.ids], [len(group["params"]) for group in current_groups]
    if theirs != mine:
        raise ParamGroupError(
            f"the state lists {theirs} parameters a group, this optimizer has {mine}",
            hint="the model differs from the one that asked for the state\n"
            + both_sides(arrived.saved_groups, current_groups),
        )


def _check_tensors(
    found: Any, parameter: torch.Tensor, where: str
) -> tuple[dict[str, torch.Tensor], list[BridgeError]]:  # fmt: skip
    """Return one parameter's master and moments, contiguous, and what is wrong with them."""
    tensors: dict[str, torch.Tensor] = {}
    problems: list[BridgeError] = []
    for name in (MASTER, *MOMENTS):
        value = found.get(name) if isinstance(found, Mapping) else None
        if not isinstance(value, torch.Tensor):
            hint = (
                "the load left it out: load with strict handling, and leave fp32_key_style at auto"
                if name == MASTER
                else "the checkpoint was saved without its optimizer, or by an optimizer that is not Adam"
            )
            problems.append(MissingSourceError(f"the optimizer state lacks {name}", key=where, hint=hint))
        elif value.shape != parameter.shape:
            problem = f"{name} has shape {tuple(value.shape)}, the parameter has {tuple(parameter.shape)}"
            problems.append(ContradictionError(problem, key=where))
        elif not value.is_floating_point() or value.is_meta:
            problems.append(CheckpointError(f"{name} holds {value.dtype}, no floating-point values", key=where))
        else:
            tensors[name] = value.detach().to(torch.float32).contiguous()
    return tensors, problems


def check_together(told: Sequence[Facts], saved: Sequence[Group], current: Sequence[Group], allow_cold: bool) -> None:
    """Raise what only all ranks together can see; the outcome is the same on every rank.

    ``told`` is every rank's. A saved group that no rank has a partner for is a ParamGroupError; ranks of other
    pipeline stages may have other groups. Moments that are zero everywhere after the first step, or not zero before
    it, are errors: ColdOptimizerError and ContradictionError.
    """
    orphans = frozenset.intersection(*(facts.unmatched for facts in told)) if told else frozenset()
    if orphans:
        raise group_error(f"saved groups {sorted(orphans)} have no partner in this optimizer", saved, current)
    steps = {facts.step or 0 for facts in told}
    if len(steps) > 1:
        raise ContradictionError(f"ranks read different steps: {sorted(steps)}")
    step = steps.pop() if steps else 0
    moments = any(facts.moments for facts in told)
    if step and not moments and not allow_cold:
        raise ColdOptimizerError(
            f"cold optimizer: all moments are zero at step {step}",
            hint="the checkpoint lost its optimizer state; to start from zero moments on purpose, set "
            "optim.allow_cold_optimizer: true",
        )
    if not step and moments:
        raise ContradictionError(
            "the checkpoint has no step, or step 0, and moments that are not zero",
            hint="bias correction would go wrong; check how the checkpoint was converted",
        )
