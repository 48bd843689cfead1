"""One rank's refusal is every rank's refusal: collective error handling."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

import nemo_optim_bridge.errors as errors
from nemo_optim_bridge.errors import BridgeError, CheckpointError

T = TypeVar("T")


def as_bridge_error(error: Exception) -> BridgeError:
    """Return the project's own errors as they are, and anything unforeseen as one of them."""
    if isinstance(error, BridgeError):
        return error
    wrapped = CheckpointError(f"the optimizer state cannot be used: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def share(problem: BridgeError | None, facts: T) -> list[T]:
    """Return every rank's facts, by rank; raise on all ranks when any has a problem.

    Called by all ranks of the default group: NeMo's optimizer communicates over it as well (``grad_norm``). The rank
    that has the problem raises it; the others raise the same type, naming the lowest such rank.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        if problem is not None:
            raise problem
        return [facts]
    told: list[Any] = [None] * dist.get_world_size()
    mine = None
    if problem is not None:
        key = None if problem.key is None else str(problem.key)
        mine = (type(problem).__name__, problem.problem, problem.path, key, problem.hint)
    dist.all_gather_object(told, (mine, None if problem is not None else facts))
    if problem is not None:
        raise problem
    for rank, (theirs, _) in enumerate(told):
        if theirs is not None:
            name, text, path, key, hint = theirs
            raise getattr(errors, name, CheckpointError)(text, path=path, key=key, rank=rank, hint=hint)
    return [fact for _, fact in told]
