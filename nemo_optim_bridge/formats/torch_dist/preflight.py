"""Say from a checkpoint's headers alone whether NeMo can resume it under a distributed optimizer, and how."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from nemo_optim_bridge.core.groups import (
    HYPERPARAMETERS,
    GroupIdentity,
    Policy,
    common_step,
    find_steps,
    group_problems,
    identify,
    is_full_group,
    match_groups,
    merge_group,
    without_params,
)
from nemo_optim_bridge.errors import BridgeError, TargetError
from nemo_optim_bridge.formats.torch_dist.reader import (
    STATE_PREFIX,
    STOCK_FACTORY_PREFIX,
    UNIFORM_PREFIX,
    DistTensor,
    TorchDist,
    read_torch_dist,
)

BRIDGE: Final = "distributed_fused_adam_bridge"
TARGETS: Final = ("distributed_fused_adam", BRIDGE)

_CONVERT: Final = (
    "convert it first (nemo-optim-bridge convert), or load it where it was saved and save it from fused_adam or "
    "megatron-core's Float16Optimizer"
)


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """What a resume will meet.

    ``resumes`` is about the bridge, ``stock_resumes`` about NeMo's own distributed_fused_adam on the same target.
    ``key_style`` is ``uniform``, ``stock``, ``both`` (every master under both spellings) or ``none``. ``groups`` are
    the saved ones with their values; ``problems`` is empty exactly when ``resumes``; ``advice`` says what to change
    or to know.
    """

    path: str
    target: str
    resumes: bool
    stock_resumes: bool
    source: str
    step: int | None
    groups: tuple[Mapping[str, Any], ...]
    key_style: str
    parameters: int
    elements: int
    problems: tuple[str, ...]
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values only."""
        return asdict(self)


def preflight(path: str | os.PathLike[str], optimizer: str = "distributed_fused_adam") -> PreflightReport:
    """Check a Megatron ``torch_dist`` checkpoint for a resume in NeMo under ``optimizer``.

    Reads headers only, needs no framework. What only tensors or the target can tell (moments that are all zero, the
    target's own groups) is checked by the optimizer when it loads. Raises TargetError for another optimizer, and what
    ``read_torch_dist`` raises for a directory that is no such checkpoint or a damaged one.
    """
    if optimizer not in TARGETS:
        raise TargetError(f"no preflight for optimizer {optimizer!r}", hint=f"use {' or '.join(TARGETS)}")
    checkpoint = read_torch_dist(path)
    layout = _layout(checkpoint.common)
    problems, advice = list(layout.problems), list[str]()
    step = _step(layout, problems)
    states = _states(checkpoint)
    style = _key_style(states)
    if not layout.problems:
        problems += _incomplete(states, checkpoint)
        problems += _group_problems(layout.groups)
        problems += _master_problems(states, checkpoint, advice)
    problems += _missing_bytes(checkpoint)
    if any(identify(group).expert for group in layout.groups):
        advice.append("set expert_model_parallel_size: 1; the saved expert groups become part of the ordinary ones")
    if layout.from_megatron:
        advice.append(
            "which parameter decays is this run's choice: megatron-core leaves norm weights without decay, NeMo not"
        )
    if layout.from_megatron and any(group.get("wd_mult", 1.0) not in (0.0, 1.0) for group in layout.groups):
        advice.append("wd_mult other than 0 and 1: check that the stored weight_decay already contains it")
    stock = _stock_resumes(layout, style, states) and not problems
    if problems:
        advice.append("the resume will be refused; nothing is changed by trying")
    elif not stock:
        advice.append(f"set optim.name: {BRIDGE}; NeMo's own distributed_fused_adam {_why_not(layout, style)}")
    else:
        advice.append(
            "NeMo's own distributed_fused_adam reads it too, but in remainder mode gets masters wrong at rounding "
            f"ties; optim.name: {BRIDGE} is exact"
        )
    masters = states.get("fp32_param", {}) | states.get("param", {}) or states.get("exp_avg", {})
    return PreflightReport(
        path=checkpoint.path,
        target=optimizer,
        resumes=not problems,
        stock_resumes=stock,
        source=layout.source,
        step=step,
        groups=tuple(_shown(group) for group in layout.groups),
        key_style=style,
        parameters=len(masters),
        elements=sum(prod(tensor.shape) for tensor in masters.values()),
        problems=tuple(problems),
        advice=tuple(advice),
    )


# ------------------------------------------------------------------------------------------------------- common.pt


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which optimizer's state a ``common.pt`` describes, its groups, and where its steps may be."""

    source: str
    groups: tuple[dict[str, Any], ...] = ()
    kept: tuple[tuple[object, Mapping[Any, Any]], ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def from_megatron(self) -> bool:
        return any("wd_mult" in group for group in self.groups)


def _layout(common: Mapping[Any, Any]) -> _Layout:
    states = common.get("optimizer_states")
    if not isinstance(states, list | tuple) or not states or not isinstance(states[0], Mapping):
        if isinstance(common.get("optimizer"), Mapping):
            text = "this is Megatron-LM's own container, not Lightning's: NeMo cannot open it; " + _CONVERT
            return _Layout("megatron-core (Megatron-LM's container)", problems=(text,))
        return _Layout("none", problems=("the checkpoint was saved without its optimizer",))
    problems = []
    if len(states) > 1:
        problems.append(f"{len(states)} optimizers were saved; one is supported")
    if "lr_schedulers" not in common:
        problems.append("common.pt has no lr_schedulers: Lightning refuses to resume")
    state = states[0]
    inner = state.get("optimizer")
    chained = {key: part for key, part in state.items() if type(key) is int}
    sharding = [
        part.get("param_state_sharding_type") for part in (state, *chained.values()) if isinstance(part, Mapping)
    ]
    if any(sharding):
        text = f"megatron-core's DistributedOptimizer ({next(filter(None, sharding))}) saved it; " + _CONVERT
        return _Layout("mcore DistributedOptimizer", _chained_groups(chained), problems=(*problems, text))
    if chained:
        text = "megatron-core's ChainedOptimizer saved it; " + _CONVERT
        return _Layout("mcore ChainedOptimizer", _chained_groups(chained), problems=(*problems, text))
    if isinstance(inner, Mapping) and _are_groups(inner.get("param_groups")):
        groups = _groups(inner["param_groups"])
        kept = tuple(("optimizer.state", s) for s in (inner.get("state"),) if isinstance(s, Mapping))
        source = "mcore Float16Optimizer" if any("wd_mult" in group for group in groups) else "fused_adam"
        return _Layout(source, groups, kept, tuple(problems))
    if _are_groups(state.get("param_groups")):
        groups = _groups(state["param_groups"])
        general = state.get("state")
        general = general if isinstance(general, Mapping) else {}
        if state.get("format") not in (None, 2):
            problems.append(f"state dict format {state['format']!r}: pickled buckets of one fixed parallel layout")
        source = "distributed_fused_adam" if "step" in general else "fused_adam (without masters)"
        return _Layout(source, groups, (("state", general),), tuple(problems))
    text = f"no optimizer is known that saves {sorted(map(str, state))}"
    return _Layout("unknown", problems=(*problems, text))


def _are_groups(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(group, Mapping) for group in value)


def _groups(value: Any) -> tuple[dict[str, Any], ...]:
    return tuple(without_params(group) for group in value)


def _chained_groups(chained: Mapping[int, Any]) -> tuple[dict[str, Any], ...]:
    found: list[dict[str, Any]] = []
    for part in chained.values():
        inner = part.get("optimizer") if isinstance(part, Mapping) else None
        groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
        if _are_groups(groups):
            found += _groups(groups)
    return tuple(found)


def _step(layout: _Layout, problems: list[str]) -> int | None:
    try:
        return common_step(find_steps(layout.groups, layout.kept))
    except BridgeError as error:
        problems.append(str(error))
        return None


def _shown(group: Mapping[str, Any]) -> dict[str, Any]:
    identity = identify(group)
    values = {name: group.get(name) for name in HYPERPARAMETERS}
    return {**values, "decays": identity.decays, "expert": identity.expert, "lr_mult": identity.lr_mult}


def _group_problems(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is wrong with the groups' values, and with joining expert groups to ordinary ones."""
    problems = []
    for number, group in enumerate(groups):
        if not is_full_group(group):
            problems.append(f"saved group {number} has no hyperparameters")
        else:
            problems += [f"saved group {number}: {problem}" for problem in group_problems(group)]
    if problems:
        return problems
    target: dict[GroupIdentity, Mapping[str, Any]] = {}
    for group in sorted(groups, key=lambda g: identify(g).expert):
        identity = identify(group)
        joined = GroupIdentity(identity.decays, False, identity.lr_mult, identity.markers)
        target.setdefault(joined, merge_group(group, {"is_expert": False}, Policy()))
    try:
        match_groups(groups, list(target.values()))
    except BridgeError as error:
        problems.append(str(error))
    return problems


# --------------------------------------------------------------------------------------------------------- tensors


def _states(checkpoint: TorchDist) -> dict[str, dict[str, DistTensor]]:
    """Return the optimizer's tensors: by state name (``fp32_param``, ...), then by the parameter's key."""
    states: dict[str, dict[str, DistTensor]] = {}
    for key, tensor in checkpoint.tensors.items():
        if key.startswith(STATE_PREFIX):
            state, _, parameter = key[len(STATE_PREFIX) :].partition(".")
            states.setdefault(state, {})[parameter] = tensor
    return states


def _key_style(states: Mapping[str, Mapping[str, DistTensor]]) -> str:
    uniform = set(states.get(_state(UNIFORM_PREFIX), ()))
    stock = set(states.get(_state(STOCK_FACTORY_PREFIX), ()))
    if not uniform and not stock:
        return "none"
    return "both" if uniform & stock else "stock" if stock else "uniform"


def _state(prefix: str) -> str:
    return prefix[len(STATE_PREFIX) : -1]


def _incomplete(states: Mapping[str, Mapping[str, DistTensor]], checkpoint: TorchDist) -> list[str]:
    """Return which parameters lack a moment, or a master although others have one, or differ in shape."""
    moments = {name: states.get(name, {}) for name in ("exp_avg", "exp_avg_sq")}
    masters = {**states.get("param", {}), **states.get("fp32_param", {})}
    parameters = sorted({*moments["exp_avg"], *moments["exp_avg_sq"], *masters})
    if not parameters:
        return ["the checkpoint holds no optimizer tensors"]
    problems = []
    for name, found in (*moments.items(), *([("fp32 master", masters)] if masters else [])):
        lacking = [key for key in parameters if key not in found]
        if lacking:
            problems.append(f"{len(lacking)} of {len(parameters)} parameters have no {name}: {_some(lacking)}")
        weights = checkpoint.tensors
        wrong = [key for key, t in found.items() if key in weights and t.shape != weights[key].shape]
        if wrong:
            problems.append(f"{name} and weight differ in shape: {_some(wrong)}")
    return problems


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:3]) + (f", ... ({len(keys)})" if len(keys) > 3 else "")


def _master_problems(
    states: Mapping[str, Mapping[str, DistTensor]], checkpoint: TorchDist, advice: list[str]
) -> list[str]:  # fmt: skip
    if states.get("fp32_param") or states.get("param"):
        return []
    rounded = {}
    for key in states.get("exp_avg", {}):
        weight = checkpoint.tensors.get(key)
        if weight is None:
            return [f"neither an fp32 master nor a weight of {key} is stored"]
        if weight.dtype != "float32":
            rounded[key] = weight.dtype
    if not rounded:
        advice.append("there are no fp32 masters; the fp32 weights are the masters, exactly")
        return []
    advice.append("to go on from the rounded weights all the same, set optim.masters_from_weights: true")
    return [f"no fp32 masters, and weights of {', '.join(sorted(set(rounded.values())))}: the lower bits are lost"]


def _missing_bytes(checkpoint: TorchDist) -> list[str]:
    """Return files that are missing or too short, and tensors whose chunks do not add up."""
    needed: dict[str, int] = {}
    holes = []
    for tensor in checkpoint.tensors.values():
        if sum(chunk.region.numel for chunk in tensor.chunks) != prod(tensor.shape):
            holes.append(tensor.key)
        for chunk in tensor.chunks:
            needed[chunk.file] = max(needed.get(chunk.file, 0), chunk.offset + chunk.nbytes)
    problems = [f"chunks do not add up to the tensor: {_some(holes)}"] if holes else []
    for name, size in sorted(needed.items()):
        file = Path(checkpoint.path) / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif not os.access(file, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
            problems.append(f"{name} may not be read by this user: Permission denied")
        elif file.stat().st_size < size:
            problems.append(f"{name} has {file.stat().st_size} bytes, at least {size} are needed")
    return problems


# ----------------------------------------------------------------------------------------------------- NeMo's own


def _is_gated(states: Mapping[str, Mapping[str, DistTensor]]) -> bool:
    """Guess whether any fc1 is gated: twice as wide as fc2's input. Only advice depends on it."""
    moments = states.get("exp_avg", {})
    for key, tensor in moments.items():
        partner = moments.get(key.replace("linear_fc1.", "linear_fc2."))
        if "linear_fc1.weight" in key and partner is not None and len(tensor.shape) >= 2:
            return tensor.shape[-2] == 2 * partner.shape[-1]
    return False


def _stock_resumes(layout: _Layout, style: str, states: Mapping[str, Mapping[str, DistTensor]]) -> bool:
    if layout.source != "distributed_fused_adam":
        return False
    return style in ("stock", "both") or (style == "uniform" and not _is_gated(states))


def _why_not(layout: _Layout, style: str) -> str:
    if layout.source != "distributed_fused_adam":
        return "looks for masters under other keys, for the step where it is not, and pairs groups by place"
    return f"does not find masters spelled in {style} style"
