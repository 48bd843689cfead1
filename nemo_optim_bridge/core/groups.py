"""Param groups and steps: who is who, which of two optimizers' groups belong together, and whose values count.

Pure functions over plain dicts as optimizers keep them (``param_groups`` entries). Nothing here knows a framework:
values may be tensors, and are only asked for ``item()``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_optim_bridge.core.checkpoint import LARGEST_STEP, has_long_int
from nemo_optim_bridge.errors import BridgeError, ContradictionError, ParamGroupError, raise_all

Group = Mapping[str, Any]

#: Fields that a policy can choose per field.
HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "bias_correction")

#: Fields that go with ``lr``: whoever decides the rate decides its schedule's ends as well.
LR_FIELDS = frozenset({"lr", "initial_lr", "max_lr", "min_lr"})

#: Spellings of the factors that a group applies to the run's weight decay and learning rate.
WD_MULTIPLIERS = ("wd_mult", "pre_wd_mult", "pre_mult_wd")
LR_MULTIPLIERS = ("lr_mult", "pre_lr_mult", "pre_mult_lr")

#: Fields that never pass from one optimizer to another: membership and progress live elsewhere.
_OWN_FIELDS = frozenset({"params", "param_names", "step", "is_expert", "is_expert_parallel"})

#: Fields that say how a group is stepped, not which group it is (torch's own, Apex's, and schedulers').
_NOT_MARKERS = _OWN_FIELDS | LR_FIELDS | frozenset((*HYPERPARAMETERS, *WD_MULTIPLIERS, *LR_MULTIPLIERS)) | frozenset(
    {
        "momentum", "dampening", "nesterov", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused",
        "decoupled_weight_decay", "default_config", "swap_epoch", "start_wd", "end_wd",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupIdentity:
    """What tells a param group from its siblings, whatever place it has in the list.

    ``decays`` is whether weight decay is not zero, ``expert`` whether the parameters are expert-parallel, ``lr_mult``
    the multiplier of the learning rate, ``markers`` every other plain field that is set and no hyperparameter.
    """

    decays: bool
    expert: bool
    lr_mult: float = 1.0
    markers: tuple[tuple[str, bool | int | float | str], ...] = ()

    def __str__(self) -> str:
        parts = ["decay" if self.decays else "no decay", "expert" if self.expert else "not expert"]
        if self.lr_mult != 1.0:
            parts.append(f"lr_mult {self.lr_mult:g}")
        parts.extend(f"{name} {value!r}" for name, value in self.markers)
        return ", ".join(parts)


def scalar(value: Any) -> Any:
    """Return a one-element tensor or array as a Python number, anything else as it is."""
    return value.item() if hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1 else value


def identify(group: Group) -> GroupIdentity:
    """Return a group's identity.

    megatron-core keeps the base weight decay in every group until its scheduler runs, so a ``wd_mult`` decides
    there; elsewhere ``weight_decay`` itself does. Raises ParamGroupError for a multiplier that is no number >= 0, and
    for an ``is_expert`` that is neither true nor false.
    """
    lr_mult = number_of(group, *LR_MULTIPLIERS)
    markers = {
        name: scalar(value) for name, value in group.items() if isinstance(name, str) and name not in _NOT_MARKERS
    }
    return GroupIdentity(
        decays=bool(number_of(group, *WD_MULTIPLIERS, "weight_decay")),
        expert=flag_of(group, "is_expert", "is_expert_parallel"),
        lr_mult=1.0 if lr_mult is None else lr_mult,
        markers=tuple(sorted((k, v) for k, v in markers.items() if isinstance(v, bool | int | float | str) and v)),
    )


def number_of(group: Group, *names: str) -> float | None:
    """Return the first of some fields that is set; raises ParamGroupError when that is no number >= 0."""
    for name in names:
        value = scalar(group.get(name))
        if _is_number(value):
            return float(value)
        if value is not None:
            raise ParamGroupError(f"{name} of a param group is {value!r:.80}, not a number >= 0")
    return None


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf and not has_long_int(value)


def flag_of(group: Group, *names: str) -> bool:
    """Return the first of some flags that is set, False without any; raises ParamGroupError when that is no flag."""
    for name in names:
        value = scalar(group.get(name))
        if isinstance(value, bool | int) and value in (0, 1):
            return bool(value)
        if value is not None:
            raise ParamGroupError(f"{name} of a param group is {value!r:.80}, not true or false")
    return False


def describe(group: Group) -> str:
    """Return one line about a group for errors and summaries: identity, lr, weight decay, number of parameters."""
    shown = [f"({identify(group)})"]
    shown.extend(f"{name}={_short(group[name])}" for name in ("lr", "weight_decay", "betas", "eps") if name in group)
    if "params" in group:
        shown.append(f"{len(group['params'])} parameters")
    return " ".join(shown)


def _short(value: Any) -> str:
    value = scalar(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def both_sides(saved: Sequence[Group], current: Sequence[Group]) -> str:
    """Return both lists of groups, one group a line."""
    lines = ["checkpoint:", *(f"  {i}: {describe(g)}" for i, g in enumerate(saved))]
    lines += ["this optimizer:", *(f"  {i}: {describe(g)}" for i, g in enumerate(current))]
    return "\n".join(lines)


def group_error(problem: str, saved: Sequence[Group], current: Sequence[Group]) -> ParamGroupError:
    """Return the error for groups that do not fit, with the ways out and both lists."""
    return ParamGroupError(
        problem,
        hint="keep this run's own values with hyperparameters: current, or group the parameters as the saved run did\n"
        + both_sides(saved, current),
    )


@dataclass(frozen=True, slots=True)
class Matching:
    """Which saved group every current group takes its values from.

    ``partner[i]`` is the saved group of current group ``i``; ``folded`` are saved expert groups whose parameters live
    in a non-expert group now; ``unmatched`` are saved groups that no current group takes anything from. On one
    pipeline stage that may be right: the caller decides once every stage has spoken.
    """

    partner: tuple[int, ...]
    folded: frozenset[int] = frozenset()
    unmatched: frozenset[int] = frozenset()


def match_groups(saved: Sequence[Group], current: Sequence[Group]) -> Matching:
    """Pair groups by identity; the order of neither list means anything.

    Being an expert group counts only where both sides make that difference: with an expert parallel size of 1 the
    experts are ordinary parameters. Markers count likewise when both sides use them. Groups of equal identity are
    told apart by the values that both sides agree on. Raises ParamGroupError, with both lists, for a current group
    without a partner and for every ambiguity.
    """
    mine, theirs = [identify(g) for g in current], [identify(g) for g in saved]
    experts = any(i.expert for i in mine) and any(i.expert for i in theirs)
    problems: list[str] = []
    partner = [-1] * len(current)
    used: set[int] = set()
    for members, rivals in _classes(mine, theirs, experts):
        if not members:
            continue
        if not rivals:
            problems += [f"group {i} ({mine[i]}) has no partner in the checkpoint" for i in members]
            continue
        chosen = _pair(saved, current, members, rivals)
        if isinstance(chosen, str):
            problems.append(chosen)
            continue
        for i, j in chosen.items():
            partner[i] = j
        used.update(rivals)
    if problems:
        raise group_error("; ".join(problems), saved, current)
    taken = set(partner)
    folded = frozenset(used - taken)
    return Matching(tuple(partner), folded, frozenset(range(len(saved))) - used)


def _classes(
    mine: Sequence[GroupIdentity], theirs: Sequence[GroupIdentity], experts: bool
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (current, saved) group numbers that share an identity."""

    shared = {name for i in mine for name, _ in i.markers} & {name for i in theirs for name, _ in i.markers}

    def key(identity: GroupIdentity) -> tuple[Any, ...]:
        markers = tuple(marker for marker in identity.markers if marker[0] in shared)
        return (identity.decays, identity.expert and experts, identity.lr_mult, markers)

    for wanted in dict.fromkeys(map(key, [*mine, *theirs])):
        yield [i for i, m in enumerate(mine) if key(m) == wanted], [j for j, t in enumerate(theirs) if key(t) == wanted]


def _pair(
    saved: Sequence[Group], current: Sequence[Group], members: Sequence[int], rivals: Sequence[int]
) -> dict[int, int] | str:
    """Return the partner of every member among rivals of the same identity, or what is ambiguous."""
    values = [_values(saved[j]) for j in rivals]
    if all(_same(value, values[0]) for value in values):  # whichever is taken, the values are the same
        plain = [j for j in rivals if not identify(saved[j]).expert] or list(rivals)
        distinct = len(members) == 1 or len(rivals) == len(members)
        if not distinct and any(not _same(_values(current[i]), _values(current[members[0]])) for i in members):
            return f"groups {list(members)} differ here and are one group {list(rivals)} in the checkpoint"
        return {i: (rivals[n] if len(rivals) == len(members) else plain[0]) for n, i in enumerate(members)}
    if len(rivals) > len(members):
        return (
            f"saved groups {list(rivals)} ({identify(saved[rivals[0]])}, ...) have different values and share "
            f"group(s) {list(members)} here"
        )
    for names in (("initial_lr",), ("max_lr",), ("lr",), ("weight_decay",), ("betas",), ("eps",)):
        found = {
            i: [j for j in rivals if all(_same(current[i].get(n), saved[j].get(n)) for n in names)]
            for i in members
            if all(current[i].get(n) is not None for n in names)
        }
        if len(found) == len(members) and all(len(js) == 1 for js in found.values()):
            pairs = {i: js[0] for i, js in found.items()}
            if len(set(pairs.values())) == len(rivals):
                return pairs
    return f"groups {list(members)} and saved groups {list(rivals)} look alike ({identify(saved[rivals[0]])})"


def _values(group: Group) -> dict[str, Any]:
    return {
        name: value
        for name, value in group.items()
        if name in HYPERPARAMETERS or name in LR_FIELDS
    }  # fmt: skip


def _same(a: Any, b: Any) -> bool:
    a, b = scalar(a), scalar(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


# ------------------------------------------------------------------------------------------------ hyperparameters

CHECKPOINT, CURRENT = "checkpoint", "current"


@dataclass(frozen=True, slots=True)
class Policy:
    """Whose hyperparameters count: ``default`` for all fields, unless ``fields`` says otherwise.

    A field's entry is ``checkpoint``, ``current``, or the value to use. A weight decay given as a value leaves groups
    without decay without it; a rate given as a value is multiplied by the group's ``lr_mult``.
    """

    default: str = CHECKPOINT
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, value: Any) -> Policy:
        """Return the policy of a config value: ``checkpoint``, ``current`` or a mapping; raises ParamGroupError."""
        if isinstance(value, Policy):
            return value
        if value in (CHECKPOINT, CURRENT):
            return cls(value)
        if not isinstance(value, Mapping):
            raise ParamGroupError(
                f"hyperparameters is {value!r}", hint="use 'checkpoint', 'current' or a mapping of field to either"
            )
        fields = dict(value)
        default = fields.pop("default", CHECKPOINT)
        problems: list[BridgeError] = []
        if default not in (CHECKPOINT, CURRENT):
            problems.append(
                ParamGroupError(f"hyperparameters.default is {default!r}", hint="use checkpoint or current")
            )
        for name, wanted in fields.items():
            if name not in HYPERPARAMETERS:
                known = ", ".join(HYPERPARAMETERS)
                problems.append(
                    ParamGroupError(f"hyperparameters names an unknown field {name!r}", hint=f"use {known}")
                )
            elif wanted not in (CHECKPOINT, CURRENT):
                problem = check_hyperparameter(name, wanted)
                if problem:
                    problems.append(ParamGroupError(f"hyperparameters.{problem}"))
        raise_all(problems)
        return cls(default, fields)

    @property
    def needs_checkpoint(self) -> bool:
        """Whether any value comes from the checkpoint, so that groups have to be matched."""
        return self.default == CHECKPOINT or CHECKPOINT in [v for v in self.fields.values() if isinstance(v, str)]

    def source(self, name: str) -> Any:
        """Return ``checkpoint``, ``current`` or the value for a field."""
        return self.fields.get("lr" if name in LR_FIELDS else name, self.default)


def check_hyperparameter(name: str, value: Any) -> str | None:
    """Return what is wrong with a value, or None."""
    value = scalar(value)
    if name == "betas":
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        fine = is_pair and all(_is_number(scalar(beta)) and beta < 1 for beta in value)
        return None if fine else f"betas is {value!r:.80}, not two numbers in [0, 1)"
    if name == "bias_correction":
        fine = isinstance(value, bool | int) and value in (0, 1)
        return None if fine else f"bias_correction is {value!r:.80}, not true or false"
    return None if _is_number(value) else f"{name} is {value!r:.80}, not a number >= 0"


def group_problems(group: Group) -> Iterator[str]:
    """Yield what is wrong with a saved group's values: with one of these it can be neither used nor carried."""
    for name in ("lr", "betas", "eps", "weight_decay"):
        if name not in group:
            yield f"has no {name}"
    for name, value in group.items():
        if name in HYPERPARAMETERS:
            if problem := check_hyperparameter(name, value):
                yield problem
        elif has_long_int(value):
            yield f"{name} has an int of more than 64 bits"
    try:
        identify({name: value for name, value in group.items() if name != "weight_decay"})
        flag_of(group, "is_decoupled_lr")
    except ParamGroupError as error:
        yield error.problem


def merge_group(saved: Group | None, current: Group, policy: Policy) -> dict[str, Any]:
    """Return the current group with the values that the policy takes from its saved partner.

    ``params`` and ``is_expert`` stay the current ones, ``step`` is dropped, and fields that only the saved group has
    (``initial_lr``, ...) survive. ``saved`` may be None when the policy takes nothing from the checkpoint. Raises
    ParamGroupError for values that no Adam can use.
    """
    merged = {name: value for name, value in current.items() if name != "step"}
    for name, value in (saved or {}).items():
        if name in _OWN_FIELDS:
            continue
        if policy.source(name) == CHECKPOINT or name not in merged:
            merged[name] = value
    decays = identify(saved if saved is not None else current).decays
    if saved is not None and not decays and policy.source("weight_decay") == CHECKPOINT:
        merged["weight_decay"] = 0.0  # megatron-core's groups hold the base value beside wd_mult 0
    lr_mult = identify(current).lr_mult
    for name, wanted in policy.fields.items():
        if isinstance(wanted, str):
            continue
        if name == "weight_decay" and not decays:
            merged[name] = 0.0
        elif name == "lr":
            merged[name] = wanted * lr_mult
        else:
            merged[name] = tuple(wanted) if name == "betas" else wanted
    if "betas" in merged:
        merged["betas"] = tuple(scalar(beta) for beta in merged["betas"])
    problems = [check_hyperparameter(name, merged[name]) for name in HYPERPARAMETERS if name in merged]
    raise_all(ParamGroupError(problem, key=describe(current)) for problem in problems if problem)
    return merged


# ------------------------------------------------------------------------------------------------------------ steps


def find_steps(
    groups: Iterable[Group], states: Iterable[tuple[object, Mapping[Any, Any]]] = ()
) -> dict[str, int]:  # fmt: skip
    """Return every step that is kept anywhere, by where it was found.

    Groups keep ``step`` (Apex FusedAdam); a state keeps ``step`` (Apex DistributedFusedAdam, torch per parameter) or
    ``common_step`` (megatron-core). Raises ContradictionError for a step that is no whole number from 0 to
    ``LARGEST_STEP``.
    """
    found: dict[str, int] = {}
    places: list[tuple[str, Any]] = [(f"param_groups[{i}].step", g.get("step")) for i, g in enumerate(groups)]
    for name, state in states:
        places += [(f"{name}.{field_}", state.get(field_)) for field_ in ("step", "common_step")]
    problems: list[BridgeError] = []
    for place, value in places:
        if value is None:
            continue
        number = scalar(value)
        whole = isinstance(number, int | float) and not isinstance(number, bool) and number == number // 1
        if not whole or not 0 <= number <= LARGEST_STEP:
            text = f"step is {number!r:.80}, not a whole number from 0 to 2**53"
            problems.append(ContradictionError(text, key=place))
        else:
            found[place] = int(number)
    raise_all(problems)
    return found


def common_step(found: Mapping[str, int]) -> int | None:
    """Return the one step of ``find_steps``, None when there is none (saved before the first step).

    Raises ContradictionError when two places disagree.
    """
    steps = set(found.values())
    if len(steps) > 1:
        shown = [f"{place} = {step}" for place, step in found.items()]
        text = ", ".join(shown[:12]) + (f", ... ({len(shown)} places)" if len(shown) > 12 else "")
        raise ContradictionError(f"the optimizer's steps disagree: {text}", hint="one Adam has one step")
    return steps.pop() if steps else None


def is_full_group(group: Group) -> bool:
    """Return whether a group carries hyperparameters, not only a list of parameters."""
    return "lr" in group and ("betas" in group or "eps" in group)


def without_params(group: Group) -> dict[str, Any]:
    """Return a copy of a group without its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
