"""Ranks that fail together, as real processes over gloo."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from nemo_optim_bridge.core.agree import exchange, lead, together
from nemo_optim_bridge.core.manifest import TensorKey
from nemo_optim_bridge.errors import BridgeError, CorruptFileError, MissingSourceError
from tests.plugins.world import run_world

KEY = TensorKey("w", "exp_avg")


def caught(action: Callable[[], Any]) -> Any:
    """Return what an action returns, or its error's type, fields and text."""
    try:
        return action()
    except Exception as error:
        fields = (error.path, error.key, error.rank) if isinstance(error, BridgeError) else ()
        return type(error).__name__, *fields, str(error)


def fail(rank: int, failing: dict[int, Exception]) -> int:
    if rank in failing:
        raise failing[rank]
    return rank * rank


def cases(rank: int) -> list[Any]:
    own = {
        1: CorruptFileError("ends early", path="a.pt", key=KEY, rank=7),
        2: MissingSourceError("is gone", path="b.pt"),
    }
    unforeseen = {2: ZeroDivisionError("by zero")}
    return [
        caught(lambda: exchange(lambda: fail(rank, {}))),
        caught(lambda: together(lambda: fail(rank, {}))),
        caught(lambda: lead(lambda: rank + 5)),
        caught(lambda: exchange(lambda: fail(rank, own))),
        caught(lambda: together(lambda: fail(rank, own))),
        caught(lambda: together(lambda: fail(rank, unforeseen))),
        caught(lambda: lead(lambda: fail(rank, {0: own[1]}))),
        caught(lambda: lead(lambda: fail(rank, {0: unforeseen[2]}))),
        caught(lambda: exchange(lambda: rank)),  # and all go on in step
    ]


def test_results_and_errors_reach_all_ranks() -> None:
    found = run_world(3, cases)
    early = "ends early [file a.pt, tensor w|exp_avg, rank 7]. Copy the file again from the original run"
    gone = "is gone [file b.pt]. Copy it from the original run: nothing can stand in for it"
    own = ("CorruptFileError", "a.pt", KEY, 7, early)
    told = ("CorruptFileError", "a.pt", KEY, 7, f"rank 1 failed: {early}")
    missing = ("MissingSourceError", "b.pt", None, None, gone)
    unforeseen = ("BridgeError", None, None, None, "rank 2 failed: ZeroDivisionError: by zero")
    of_leader = ("BridgeError", None, None, None, "ZeroDivisionError: by zero")
    assert found == [
        [[0, 1, 4], 0, 5, told, told, unforeseen, own, ("ZeroDivisionError", "by zero"), [0, 1, 2]],
        [[0, 1, 4], 1, 5, own, own, unforeseen, own, of_leader, [0, 1, 2]],
        [[0, 1, 4], 4, 5, missing, missing, ("ZeroDivisionError", "by zero"), own, of_leader, [0, 1, 2]],
    ]


def lose_a_rank(rank: int) -> Any:
    return caught(lambda: exchange(lambda: os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else rank))


def test_a_killed_rank_ends_the_others() -> None:
    survivor, _ = run_world(2, lose_a_rank, killed=(1,))
    assert survivor == ("OutputError", None, None, None, "another rank ended before its work was done")


def test_without_a_process_group_the_work_is_done_here_alone() -> None:
    assert exchange(lambda: 3) == [3]
    assert together(lambda: 3) == lead(lambda: 3) == 3
    for run in (exchange, together, lead):
        with pytest.raises(ZeroDivisionError):
            run(lambda: 1 // 0)
