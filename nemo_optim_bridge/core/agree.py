"""Let the ranks of a process group fail together: what stops one of them stops all, with its error.

Called by all ranks of ``group`` (None: of the default one), in the same order; without a process group the work is done
here alone. A rank that fails raises its own error. Every other rank raises the lowest failing rank's, of the same
type and with the same fields, or a BridgeError that quotes one which is not the package's own. Results travel between
ranks; the work itself must not communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from nemo_optim_bridge.errors import BridgeError, OutputError

Result = TypeVar("Result")


def exchange(work: Callable[[], Result], group: Any = None) -> list[Result]:
    """Do ``work`` on every rank and return what each of them got, by rank."""
    size = _size(group)
    if size == 1:
        return [work()]
    from torch import distributed

    mine = _attempt(work)
    outcomes: list[Any] = [None] * size
    with _peers():
        distributed.all_gather_object(outcomes, mine.told(distributed.get_rank(group)), group=group)
    mine.get()
    return [outcome.get() for outcome in outcomes]


def together(action: Callable[[], Result], group: Any = None) -> Result:
    """Run ``action`` on every rank and return what this rank got, which no other rank hears of."""
    mine: list[Result] = []
    exchange(lambda: mine.append(action()), group)
    return mine[0]


def lead(action: Callable[[], Result], group: Any = None) -> Result:
    """Run ``action`` on rank 0 alone and return its result on all; its error concerns all ranks alike."""
    if _size(group) == 1:
        return action()
    from torch import distributed

    is_leader = distributed.get_rank(group) == 0
    mine = _attempt(action) if is_leader else None
    outcomes: list[Any] = [mine.told() if mine else None]
    with _peers():
        distributed.broadcast_object_list(
            outcomes, 0 if group is None else distributed.get_global_rank(group, 0), group=group
        )
    outcome: _Outcome[Result] = mine or outcomes[0]
    return outcome.get()


class _Outcome(NamedTuple, Generic[Result]):
    """What became of some work."""

    results: tuple[Result, ...] = ()
    failure: Exception | None = None

    def get(self) -> Result:
        """Return the result, or raise what came instead."""
        if self.failure is not None:
            raise self.failure
        return self.results[0]

    def told(self, by: int | None = None) -> _Outcome[Result]:
        """Return it as other ranks hear of it; ``by`` is the rank that failed, where that is of interest."""
        error = self.failure
        if error is None:
            return self
        if not isinstance(error, BridgeError):
            error = BridgeError(f"{type(error).__name__}: {error}")
        return _Outcome(failure=error if by is None else error.told_by(by))


def _attempt(work: Callable[[], Result]) -> _Outcome[Result]:
    try:
        return _Outcome((work(),))
    except Exception as error:
        return _Outcome(failure=error)


def _size(group: Any) -> int:
    from torch import distributed

    return distributed.get_world_size(group) if distributed.is_available() and distributed.is_initialized() else 1


@contextmanager
def _peers() -> Iterator[None]:
    """Say it clearly when a collective fails because a rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise OutputError("another rank ended before its work was done") from error
