"""Let the ranks of a process group fail together: what stops one of them stops all, with its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from nemo_optim_bridge import errors
from nemo_optim_bridge.errors import BridgeError

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")

_MAX_MESSAGE = 20_000  # characters


def together(action: Callable[[], Result], group: Any = None) -> Result:
    """Run ``action`` on every rank of ``group`` and return its result where all ranks succeeded.

    Called by all ranks of the group (None: of the default one); without a process group it only calls the action.
    A rank that fails raises its own error. Every other rank raises the error of the lowest failing rank, of the same
    type, with that rank in the message. The action itself must not communicate.
    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as error:
        failure = error
    told = _lowest_failure(failure, group)
    if failure is not None:
        raise failure
    if told is not None:
        raise told
    final: Result = result
    return final


def _lowest_failure(failure: Exception | None, group: Any) -> BridgeError | None:
    """Return the error of the lowest failing rank of the group, or None when there is none."""
    import torch
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size(group) == 1:
        return None
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    lowest = torch.tensor([size if failure is None else rank], dtype=torch.int64, device=_device(group))
    distributed.all_reduce(lowest, distributed.ReduceOp.MIN, group=group)
    failing = int(lowest.item())
    if failing == size:
        return None
    told: list[Any] = [_description(failure) if rank == failing else None]
    source = failing if group is None else distributed.get_global_rank(group, failing)
    distributed.broadcast_object_list(told, source, group=group)
    return _error(failing, *told[0])


def _device(group: Any) -> torch.device:
    """Return where the group's collectives want their tensors."""
    import torch
    from torch import distributed

    return torch.device("cuda" if distributed.get_backend(group) == "nccl" else "cpu")


def _description(failure: Exception | None) -> tuple[str, str]:
    """Return the name of an error's type and its message, as text."""
    if isinstance(failure, BridgeError):
        return type(failure).__name__, str(failure)[:_MAX_MESSAGE]
    return "BridgeError", f"{type(failure).__name__}: {failure}"[:_MAX_MESSAGE]


def _error(rank: int, kind: str, message: str) -> BridgeError:
    """Return the error that another rank described."""
    cls = getattr(errors, kind, BridgeError)
    if not (isinstance(cls, type) and issubclass(cls, BridgeError)):
        cls = BridgeError
    error = cls(f"rank {rank} failed: {message}")
    error.rank = rank
    return error
