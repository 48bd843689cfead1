"""Which optimizer saved a ``torch_dist`` checkpoint, and its groups and step, by ``common.pt``'s tree and the keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nemo_optim_bridge.core.groups import (
    common_step,
    find_steps,
    group_problems,
    is_full_group,
    without_params,
)
from nemo_optim_bridge.errors import (
    BridgeError,
    ContradictionError,
    MissingSourceError,
    UnknownFormatError,
    raise_all,
)
from nemo_optim_bridge.formats.torch_dist.keys import belongs_to_optimizer

FUSED, DISTRIBUTED = "fused_adam", "distributed_fused_adam"
FLOAT16, DISTOPT = "mcore_float16", "mcore_distributed"
KINDS: Final = (FUSED, DISTRIBUTED, FLOAT16, DISTOPT)
MEGATRON_KINDS: Final = frozenset({FLOAT16, DISTOPT})
LIGHTNING, MEGATRON = "lightning", "megatron"
CONTAINERS: Final = (LIGHTNING, MEGATRON)

FULLY_RESHARDABLE: Final = "fully_reshardable"
_RESAVE: Final = (
    "start Megatron-LM from it at the same tensor and pipeline parallel sizes and save once with "
    "--dist-ckpt-optim-fully-reshardable; that checkpoint can be converted"
)
_REFUSED: Final[Mapping[str, str]] = {
    "dp_reshardable": "it stores buckets of one parallel layout, without parameter names; " + _RESAVE,
    "fully_sharded_bucket_space": "it stores buckets of one parallel layout, without parameter names; " + _RESAVE,
    "dp_zero_gather_scatter": "it stores one pickled flat buffer a rank; " + _RESAVE,
    "fully_sharded_model_space": "its tensors are flattened per data-parallel rank; load it with a megatron-core older "
    "than 0.16 and save it as fully_reshardable, or without dist_ckpt_parallel_save",
    "fsdp_dtensor": "it is Megatron-FSDP's; only the optimizers of megatron-core's plain data parallelism are known",
}
#: Fields of an optimizer's state that are understood; others are kept or reported.
_KNOWN: Final = frozenset(
    {
        "optimizer",
        "param_groups",
        "state",
        "format",
        "param_state_sharding_type",
        "param_state",
        "fp32_from_fp16_params",
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class SavedOptimizer:
    """One optimizer's state without its tensors.

    ``kind`` is one of ``KINDS``, ``container`` one of ``CONTAINERS``. ``groups`` are all groups in order, without
    parameters and steps, and ``chain[i]`` is the number of the chained optimizer that group ``i`` belongs to;
    ``chained`` says whether they were chained at all. ``step`` is 0 before the first one. ``extras`` are fields of
    the state that belong to no group (``grad_scaler``), by chained optimizer.
    """

    kind: str
    container: str
    groups: tuple[dict[str, Any], ...]
    chain: tuple[int, ...]
    chained: bool
    step: int
    extras: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_megatron(self) -> bool:
        """Return whether the groups are megatron-core's (``wd_mult``) and not NeMo's."""
        return self.kind in MEGATRON_KINDS


def read_saved(common: Mapping[Any, Any], keys: Iterable[str], path: str) -> SavedOptimizer:
    """Recognize the optimizer of a checkpoint.

    Raises MissingSourceError for one without an optimizer, UnknownFormatError, with the way out, for layouts that
    cannot be converted, ContradictionError for steps that disagree.
    """
    container, state = _optimizer_state(common, path)
    keys = list(keys)
    parts = {key: part for key, part in state.items() if type(key) is int}
    chained = bool(parts)
    if chained and len(parts) != len([key for key in state if key != "param_state_sharding_type"]):
        raise _unknown(state, path)
    if not chained:
        parts = {0: state}
    if any(not isinstance(part, Mapping) for part in parts.values()):
        raise _unknown(state, path)
    _check_sharding(common, [state, *parts.values()], keys, path)
    if not any(map(belongs_to_optimizer, keys)):
        raise MissingSourceError(
            "the checkpoint holds no optimizer tensors", path=path, hint="it was saved without its optimizer"
        )
    groups: list[dict[str, Any]] = []
    chain: list[int] = []
    kept: list[tuple[object, Mapping[Any, Any]]] = []
    kinds: set[str] = set()
    for number, part in sorted(parts.items()):
        kind, found, general = _part(part, path)
        kinds.add(kind)
        groups += [without_params(group) for group in found]
        chain += [number] * len(found)
        kept.append((f"optimizer {number}" if chained else "optimizer", general))
    if len(kinds) != 1:
        raise UnknownFormatError(f"chained optimizers of different kinds: {', '.join(sorted(kinds))}", path=path)
    raise_all(_group_problems(groups, path))
    try:
        step = common_step(find_steps(groups, kept)) or 0
    except BridgeError as error:
        raise error.at(path) from error
    return SavedOptimizer(
        kind=kinds.pop(),
        container=container,
        groups=tuple({name: value for name, value in group.items() if name != "step"} for group in groups),
        chain=tuple(chain),
        chained=chained,
        step=step,
        extras={n: {k: v for k, v in part.items() if k not in _KNOWN and k not in parts} for n, part in parts.items()},
    )


def _optimizer_state(common: Mapping[Any, Any], path: str) -> tuple[str, Mapping[Any, Any]]:
    """Return the container's name and the one optimizer's state in it."""
    states = common.get("optimizer_states")
    if states is not None:
        if "optimizer" in common:
            raise ContradictionError("common.pt has both optimizer_states and optimizer: two containers", path=path)
        if not isinstance(states, list | tuple) or len(states) > 1:
            count = len(states) if isinstance(states, list | tuple) else "no"
            raise UnknownFormatError(
                f"{count} optimizers were saved; one is supported", path=path,
                hint="train and save with one optimizer",
            )  # fmt: skip
        if states and isinstance(states[0], Mapping):
            return LIGHTNING, states[0]
    elif isinstance(common.get("optimizer"), Mapping):
        return MEGATRON, common["optimizer"]
    raise MissingSourceError(
        "common.pt has no optimizer state", path=path,
        hint="the checkpoint was saved without its optimizer (save_optimizer, --no-save-optim), or is a weights export",
    )  # fmt: skip


def _check_sharding(common: Mapping[Any, Any], states: Iterable[Any], keys: list[str], path: str) -> None:
    content = common.get("content_metadata")
    named = content.get("distrib_optim_sharding_type") if isinstance(content, Mapping) else None
    found = [state.get("param_state_sharding_type") for state in states]
    found += [named] if isinstance(named, str) else []
    if not any(found) and any(".optimizer.distributed." in f".{key}" for key in keys):
        found.append("dp_reshardable")
    for kind in filter(None, found):
        if kind != FULLY_RESHARDABLE:
            known = isinstance(kind, str) and kind in _REFUSED
            told = f"{kind!r:.80}{'' if known else ', which is not known'}"
            raise UnknownFormatError(
                f"megatron-core's DistributedOptimizer saved it as {told}",
                path=path, hint=_REFUSED.get(str(kind), "convert with a newer version of this package"),
            )  # fmt: skip


def _part(part: Mapping[Any, Any], path: str) -> tuple[str, list[Mapping[str, Any]], Mapping[Any, Any]]:
    """Return the kind, the groups and the general state of one optimizer."""
    inner = part.get("optimizer")
    if isinstance(inner, Mapping) and _are_groups(inner.get("param_groups")):
        groups = list(inner["param_groups"])
        general = inner.get("state")
        if part.get("param_state_sharding_type"):
            kind = DISTOPT
        elif any("wd_mult" in group or "pre_wd_mult" in group for group in groups):
            kind = FLOAT16
        else:
            kind = FUSED
    elif _are_groups(part.get("param_groups")):
        groups, general = list(part["param_groups"]), part.get("state")
        if part.get("format") not in (None, 2):
            raise UnknownFormatError(
                f"state dict format {part['format']!r}: pickled buckets of one fixed parallel layout", path=path,
                hint="load it with NeMo's own distributed_fused_adam on the layout that saved it, and save it again",
            )  # fmt: skip
        kind = DISTRIBUTED if isinstance(general, Mapping) and "step" in general else FUSED
    else:
        raise _unknown(part, path)
    return kind, groups, general if isinstance(general, Mapping) else {}


def _are_groups(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(group, Mapping) for group in value)


def _unknown(state: Mapping[Any, Any], path: str) -> UnknownFormatError:
    return UnknownFormatError(
        f"no optimizer is known that saves {sorted(map(str, state))[:12]}", path=path,
        hint="known are fused_adam, distributed_fused_adam and megatron-core's Float16Optimizer and "
        "DistributedOptimizer (fully_reshardable)",
    )  # fmt: skip


def _group_problems(groups: list[dict[str, Any]], path: str) -> Iterable[BridgeError]:
    for number, group in enumerate(groups):
        if not is_full_group(group):
            yield MissingSourceError(f"param group {number} has no hyperparameters", path=path)
            continue
        for problem in group_problems(group):
            yield ContradictionError(f"param group {number}: {problem}", path=path)
