"""Work shared by real processes: the same results, one error, and nobody is left hanging."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_optim_bridge.core.manifest import TensorKey
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.core.team import Workers, find_team, ignore, shares
from nemo_optim_bridge.errors import CorruptFileError, OutputError

Handler = Callable[[int], Any]


def run(size: int, handle: Callable[[int], Any], count: int = 7, progress: Callable[[int], None] = ignore) -> list[Any]:
    def make(report: Callable[[int], None]) -> Handler:
        def handle_and_report(item: int) -> Any:
            result = handle(item)
            report(item)
            return result

        return handle_and_report

    return Workers(size).map(make, list(range(count)), [1] * count, progress)


@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_results_come_in_the_order_of_the_items(size: int) -> None:
    seen: list[int] = []
    assert run(size, lambda item: (item * item, os.getpid()), progress=seen.append) != []
    results = run(size, lambda item: (item * item, os.getpid()))
    assert [square for square, _ in results] == [item * item for item in range(7)]
    pids = {pid for _, pid in results}
    assert pids == {os.getpid()} if size == 1 else (len(pids) == min(size, 7) and os.getpid() not in pids)
    assert sum(seen) == 21


def test_the_error_of_a_worker_arrives_whole() -> None:
    def fail(item: int) -> None:
        if item == 4:
            raise CorruptFileError(
                "ends early",
                path="a/b.pt",
                key=TensorKey("w", "exp_avg"),
                region=Region((1,), (2,)),
                rank=9,
                hint="look",
            )

    with pytest.raises(CorruptFileError) as caught:
        run(3, fail)
    error = caught.value
    assert str(error) == "ends early [file a/b.pt, tensor w|exp_avg, box [1:3], rank 9]. Look"
    assert (error.path, error.key, error.region, error.rank, error.hint) == (
        "a/b.pt", TensorKey("w", "exp_avg"), Region((1,), (2,)), 9, "look",
    )  # fmt: skip


def test_an_unexpected_error_of_a_worker_is_told() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(2, lambda item: 1 // (item - 3))


def test_a_killed_worker_ends_all() -> None:
    pids: list[int] = []

    def die(item: int) -> int:
        if item == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    with pytest.raises(OutputError, match="exit code -9 before its work was done"):
        run(2, die, progress=pids.append)
    assert multiprocessing.active_children() == []


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_shares_are_a_partition_and_about_equally_heavy(weights: list[int], members: int) -> None:
    parts = shares(weights, members)
    assert sorted(item for part in parts for item in part) == list(range(len(weights)))
    loads = [sum(weights[item] for item in part) for part in parts]
    assert max(loads) - min(loads) <= max(weights, default=0)
    assert parts == shares(weights, members)


def test_members_begin_at_their_own_places_and_two_kinds_in_turn_are_dealt_out_evenly() -> None:
    first, second = shares([5] * 8, 2)
    assert first == [0, 3, 4, 7]
    assert second == [5, 6, 1, 2]
    assert [part[0] for part in shares([1] * 400, 4)] == sorted(part[0] for part in shares([1] * 400, 4))


def test_workers_are_found_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    def processes(workers: int | None, num_bytes: int) -> int:
        return len(set(find_team(workers).map(lambda _: lambda _: os.getpid(), range(8), [num_bytes // 8] * 8, ignore)))

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    assert processes(None, 1 << 20) == 1
    assert processes(None, 1 << 30) == 4
    assert processes(3, 8) == 3
