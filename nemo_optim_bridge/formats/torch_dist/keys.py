"""The keys of optimizer tensors in a ``torch_dist`` checkpoint: ``[chained_I.]optimizer.state.STATE.PARAMETER``."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

MASTER: Final = "fp32_param"
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
#: How masters are spelled: by fused_adam, by megatron-core's Float16Optimizer, and by the bridge; or by NeMo's
#: distributed_fused_adam for gated MLPs, and by megatron-core's DistributedOptimizer for all.
MASTER_SPELLINGS: Final = (MASTER, "param")
#: The prefix of a NeMo model's keys; Megatron-LM has none.
NEMO_MODEL: Final = "model."
#: What all parameters' names may begin with, in one container or another.
MODEL_PREFIXES: Final = (NEMO_MODEL, "module.")

_OPTIMIZER_KEY: Final = re.compile(r"(?:chained_(\d{1,4})\.)?optimizer\.state\.([^.]+)\.(.+)", re.DOTALL)
_OPTIMIZER_PREFIX: Final = re.compile(r"(?:chained_\d{1,4}\.)?optimizer\.")


class StateKey(NamedTuple):
    """One optimizer tensor: ``chain`` is the number of the chained optimizer, None without that prefix."""

    chain: int | None
    state: str
    fqn: str


def parse_state_key(key: str) -> StateKey | None:
    """Return the parts of an optimizer tensor's key, None for a key that is none."""
    found = _OPTIMIZER_KEY.fullmatch(key)
    if found is None:
        return None
    chain, state, fqn = found.groups()
    return StateKey(None if chain is None else int(chain), state, fqn)


def format_state_key(key: StateKey) -> str:
    """Return the key of an optimizer tensor; the inverse of ``parse_state_key``."""
    prefix = "" if key.chain is None else f"chained_{key.chain}."
    return f"{prefix}optimizer.state.{key.state}.{key.fqn}"


def belongs_to_optimizer(key: str) -> bool:
    """Return whether a key is an optimizer's, of whatever layout."""
    return _OPTIMIZER_PREFIX.match(key) is not None


def is_expert(fqn: str) -> bool:
    """Return whether a parameter belongs to routed experts; nothing but its name tells."""
    return ".experts." in fqn


def num_own_dims(fqn: str, shape: tuple[int, ...]) -> int:
    """Return the dimensions of a parameter without those that megatron-core puts before them.

    Layers that are all alike share one key, with the layer as the first dimension; experts likewise.
    """
    stacked = re.search(r"\.layers\.(?!\d)", fqn) is not None
    experts = re.search(r"\.experts\.experts\.(?!\d)", fqn) is not None
    return len(shape) - stacked - experts


def matches_any(fqn: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a parameter's name matches one of the shell-style patterns."""
    return any(fnmatchcase(fqn, pattern) for pattern in patterns)
