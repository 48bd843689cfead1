"""Which keys of a checkpoint become which: spelling of masters, prefixes of chained optimizers and of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nemo_optim_bridge.errors import ContradictionError, TargetError
from nemo_optim_bridge.formats.torch_dist.containers import respell_model_key
from nemo_optim_bridge.formats.torch_dist.keys import (
    MASTER,
    StateKey,
    belongs_to_optimizer,
    format_state_key,
    is_expert,
)
from nemo_optim_bridge.formats.torch_dist.reader import TorchDist
from nemo_optim_bridge.formats.torch_dist.retarget import TargetOptimizer
from nemo_optim_bridge.formats.torch_dist.saved import DISTOPT, DISTRIBUTED, MEGATRON
from nemo_optim_bridge.formats.torch_dist.states import States, gated_parameters

KEY_STYLES: Final = ("both", "uniform", "stock")
CHAINED_PREFIXES: Final = ("auto", "no", "yes", "both")
_STOCK_MASTER: Final = "param"


@dataclass(frozen=True, slots=True)
class Spelling:
    """How keys are spelled in the target.

    ``key_style`` is about distributed_fused_adam's masters, ``chained_prefix`` about megatron-core's chained
    optimizers; the prefixes are the parameters' in the source and in the target.
    """

    key_style: str
    chained_prefix: str
    source_prefix: str
    target_prefix: str

    def __post_init__(self) -> None:
        if self.key_style not in KEY_STYLES:
            raise TargetError(f"unknown key style {self.key_style!r}", hint=f"choose one of {', '.join(KEY_STYLES)}")
        if self.chained_prefix not in CHAINED_PREFIXES:
            raise TargetError(
                f"unknown choice {self.chained_prefix!r} for the chained prefix",
                hint=f"choose one of {', '.join(CHAINED_PREFIXES)}",
            )


def resolve_chained_prefix(choice: str, container: str) -> str:
    """Return ``no``, ``yes`` or ``both``.

    Megatron-LM's own container tells its loader that there is none. Elsewhere the loader decides by its version, so
    that both are there.
    """
    return choice if choice != "auto" else "no" if container == MEGATRON else "both"


def new_names(
    checkpoint: TorchDist, states: States, target: TargetOptimizer, spelling: Spelling
) -> dict[str, tuple[str, ...]]:  # fmt: skip
    """Return the target's keys of every key of the checkpoint: several where one is an alias, none where it was one.

    Raises ContradictionError when two would get the same name.
    """
    names: dict[str, list[str]] = {}
    gated = gated_parameters(states) if target.kind == DISTRIBUTED and spelling.key_style == "stock" else frozenset()
    for key in (*checkpoint.tensors, *checkpoint.objects):
        if belongs_to_optimizer(key):
            names[key] = []
        else:
            names[key] = [respell_model_key(key, spelling.source_prefix, spelling.target_prefix)]
    for fqn, found in states.tensors.items():
        renamed = respell_model_key(fqn, spelling.source_prefix, spelling.target_prefix)
        chains: tuple[int | None, ...] = (None,)
        if target.chained and spelling.chained_prefix != "no":
            chain = int(is_expert(fqn))
            chains = (chain,) if spelling.chained_prefix == "yes" else (None, chain)
        for state, tensor in found.items():
            spelled = _masters(target.kind, spelling.key_style, fqn in gated) if state == MASTER else (state,)
            names[tensor.key] += [format_state_key(StateKey(c, s, renamed)) for c in chains for s in spelled]
    _require_distinct(names, checkpoint.path)
    return {key: tuple(new) for key, new in names.items()}


def _masters(kind: str, style: str, gated: bool) -> tuple[str, ...]:
    if kind == DISTOPT:
        return (_STOCK_MASTER,)
    if kind != DISTRIBUTED or style == "uniform":
        return (MASTER,)
    if style == "stock":
        return (_STOCK_MASTER if gated else MASTER,)
    return (MASTER, _STOCK_MASTER)


def _require_distinct(names: Mapping[str, list[str]], path: str) -> None:
    owner: dict[str, str] = {}
    for key, new in names.items():
        for name in new:
            if owner.setdefault(name, key) != key:
                raise ContradictionError(f"{owner[name]} and {key} would both be called so", path=path, key=name)
