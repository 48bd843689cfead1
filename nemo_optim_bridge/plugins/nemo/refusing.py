"""A state that comes from a file and cannot be used is a CheckpointError, also where that was not foreseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from nemo_optim_bridge.errors import BridgeError, CheckpointError

Result = TypeVar("Result")


def refusing(work: Callable[[], Result]) -> Callable[[], Result]:
    """Return the work, all of whose errors are BridgeErrors."""

    def refuse() -> Result:
        try:
            return work()
        except BridgeError:
            raise
        except Exception as error:
            problem = f"the optimizer state cannot be used: {type(error).__name__}: {error}"
            raise CheckpointError(problem) from error

    return refuse
