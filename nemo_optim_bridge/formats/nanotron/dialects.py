"""What differs between the revisions of nanotron whose checkpoints are read and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_optim_bridge.errors import TargetError


@dataclass(frozen=True, slots=True)
class Dialect:
    """One revision's habits, read off checkpoints that it saved."""

    name: str
    released: str
    version: str  # of checkpoint_metadata.json
    shard_version: str  # in the metadata of weight shards
    names_experts: bool  # file and config names carry the expert-parallel rank
    group_per_parameter: bool  # one param group for each parameter, not one for all
    scheduler_per_rank: bool  # an lr_scheduler file for each (pp, tp, ep), not one in total
    group_keys: tuple[str, ...]  # leading keys of a param group, in order
    ties: bool  # embedding and lm_head can be tied
    families: tuple[str, ...]  # models that it builds, see config.ModelFacts
    expert_parallel: bool
    data_stages: bool  # checkpoint_metadata.json lists them


_LR_BETAS = ("lr", "betas", "eps", "weight_decay")
_MOE = ("llama", "llamoe")
_LR_DECAY = ("lr", "weight_decay", "betas", "eps")

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect("v0.1", "v0.1", "1.2", "1.2", False, False, False, _LR_BETAS, False, ("llama",), False, False),
        Dialect("0.4", "PyPI 0.4", "1.2", "1.2", True, False, False, _LR_BETAS, True, ("llama",), False, False),
        Dialect("moe24", "2024-04", "1.2", "1.2", True, True, False, _LR_BETAS, True, _MOE, True, False),
        Dialect("moe", "2025-03", "1.4", "1.4", True, True, True, _LR_DECAY, True, _MOE, True, True),
        Dialect("head", "2026-04", "1.5", "1.5", True, True, True, _LR_DECAY, True, ("llama", "qwen2"), False, True),
    )
}


def find_dialect(name: str) -> Dialect:
    """Return a dialect by name; raises TargetError with the known names."""
    try:
        return DIALECTS[name]
    except KeyError:
        raise TargetError(f"unknown dialect {name!r}", hint=f"choose one of {', '.join(DIALECTS)}") from None
