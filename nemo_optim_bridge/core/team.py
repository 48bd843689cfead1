"""Share work among processes: workers of one machine, or the ranks of a process group.

Every pass over a checkpoint is a ``map``: each member does its share of the items, and every member of a process group
gets all results, or the same error.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nemo_optim_bridge.core.agree import exchange, lead
from nemo_optim_bridge.errors import BridgeError, OutputError, TargetError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int], None]
_WORTH_WORKERS = 256 << 20
#: Every message of a worker wakes the leader, which takes the processor from some worker.
_REPORT_SECONDS = 0.1
#: Makes the function that handles one item, in the process that does; it reports bytes to the callback given.
Maker = Callable[[Progress], Callable[[Item], Result]]


def ignore(num_bytes: int) -> None:
    """Report progress to nobody."""


class Team(Protocol):
    """Processes that share work. All members call the same methods in the same order."""

    rank: int
    num_ranks: int

    @property
    def is_leader(self) -> bool:
        """Tell whether this process is the one that creates, finishes and prints."""

    @property
    def local(self) -> Team:
        """The part of the team that this process can hand work to without the other ranks."""

    def gather(self, work: Callable[[], Result]) -> list[Result]:
        """Run work on every rank; return the results of all, or raise the first error of any, on all of them."""

    def map(
        self, make: Maker[Item, Result], items: Sequence[Item], weights: Sequence[int], progress: Progress
    ) -> list[Result]:
        """Return the results of all items in order; raises the first error of any member, on all of them."""

    def lead(self, action: Callable[[], Result]) -> Result:
        """Run an action on the leader alone and return its result, or raise its error, on all members."""


def shares(weights: Sequence[int], members: int) -> list[list[int]]:
    """Return item numbers for each member, about equally heavy, each beginning at its own place in their order.

    Members then rarely write one file at the same time, in which the system would make them wait for each other.
    """
    loads, member = [0] * members, 0
    result: list[list[int]] = [[] for _ in range(members)]
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        least = min(loads)
        if loads[member] > least:  # otherwise once more the same: items of two kinds in turn are dealt out evenly
            member = loads.index(least)
        loads[member] += weights[item]
        result[member].append(item)
    return [_from_place(sorted(items), member, members) for member, items in enumerate(result)]


def _from_place(items: list[int], place: int, places: int) -> list[int]:
    """Return the items in order, round from one of several equally distant places."""
    first = len(items) * place // places
    return [*items[first:], *items[:first]]


def find_team(workers: int | None) -> Team:
    """Return the ranks that torchrun started, or worker processes of this machine: ``workers``, see ``Workers``."""
    return Ranks.start() if is_torchrun() else Workers(workers)


def is_torchrun() -> bool:
    """Tell whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class Workers:
    """This process, and ``size`` forked ones for each pass when ``size`` is more than 1.

    None is up to four, as many as there are processors, for passes whose weights say that it pays off.
    """

    is_leader = True
    rank, num_ranks = 0, 1

    def __init__(self, size: int | None) -> None:
        if (size or 1) > 1 and not hasattr(os, "fork"):
            raise TargetError("several workers need an operating system with fork", hint="use --workers 1")
        self.size = size

    def map(
        self, make: Maker[Item, Result], items: Sequence[Item], weights: Sequence[int], progress: Progress
    ) -> list[Result]:
        """Run every item, in forked workers when there are several; an error or a killed worker ends all of them."""
        size = self.size or (_worth(weights) if len(items) > 1 else 1)
        if size == 1 or len(items) < 2:
            function = make(progress)
            return [function(item) for item in items]
        import multiprocessing

        context = multiprocessing.get_context("fork")
        results: dict[int, Any] = {}
        running: dict[Any, Any] = {}
        try:
            for share in shares(weights, size):
                if share:
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(target=_work, args=(make, items, share, sender), daemon=True)
                    process.start()
                    sender.close()
                    running[receiver] = process
            while running:
                for receiver in _ready(running):
                    _receive(receiver, running, results, progress)
        finally:
            for process in running.values():
                process.kill()
                process.join()
        return [results[item] for item in range(len(items))]

    @property
    def local(self) -> Workers:
        """This team."""
        return self

    def gather(self, work: Callable[[], Result]) -> list[Result]:
        """Run the work."""
        return [work()]

    def lead(self, action: Callable[[], Result]) -> Result:
        """Run the action."""
        return action()


def _worth(weights: Sequence[int]) -> int:
    """Return how many processes a pass is worth; forking costs some 20 ms a process."""
    if sum(weights) < _WORTH_WORKERS or not hasattr(os, "fork"):
        return 1
    return min(4, len(os.sched_getaffinity(0)))


def _work(make: Any, items: Sequence[Any], share: Sequence[int], sender: Connection) -> None:
    """Handle a share of the items in a forked process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    unsent, sent_at = 0, time.monotonic()

    def report(num_bytes: int) -> None:
        nonlocal unsent, sent_at
        unsent += num_bytes
        now = time.monotonic()
        if now - sent_at >= _REPORT_SECONDS:
            sender.send(("progress", unsent))
            unsent, sent_at = 0, now

    try:
        function = make(report)
        results = {item: function(items[item]) for item in share}
        sender.send(("done", unsent, results))
    except BridgeError as error:
        sender.send(("error", error))
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    except Exception as error:
        sender.send(("error", RuntimeError(f"{type(error).__name__}: {error}")))


def _ready(running: dict[Any, Any]) -> list[Any]:
    from multiprocessing.connection import wait

    return list(wait(list(running)))


def _receive(receiver: Any, running: dict[Any, Any], results: dict[int, Any], progress: Progress) -> None:
    """Take one message of a worker; raises its error, or OutputError when it ended without a word."""
    try:
        message = receiver.recv()
    except EOFError:
        process = running.pop(receiver)
        process.join()
        raise OutputError(
            f"a worker process ended with exit code {process.exitcode} before its work was done",
            hint="negative codes are signals; -9 is often the system running out of memory",
        ) from None
    if message[0] == "error":
        raise message[1]
    progress(message[1])
    if message[0] == "done":
        results.update(message[2])
        running.pop(receiver).join()


class Ranks:
    """The ranks of a torch.distributed process group, the default one when None; every rank runs the same program."""

    def __init__(self, group: Any = None) -> None:
        from torch import distributed

        self.group = group
        self.rank, self.num_ranks = distributed.get_rank(group), distributed.get_world_size(group)

    @classmethod
    def start(cls) -> Ranks:
        """Join the process group that the environment describes: gloo, and nccl too where there are devices."""
        import torch

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
            atexit.register(torch.distributed.destroy_process_group)  # its threads must end before the interpreter does
        return cls()

    @property
    def is_leader(self) -> bool:
        """Tell whether this is rank 0."""
        return self.rank == 0

    @property
    def local(self) -> Workers:
        """This process alone."""
        return Workers(1)

    def map(
        self, make: Maker[Item, Result], items: Sequence[Item], weights: Sequence[int], progress: Progress
    ) -> list[Result]:
        """Run this rank's share and exchange results; every rank raises when one fails."""
        share = shares(weights, self.num_ranks)[self.rank]

        def work() -> dict[int, Any]:
            function = make(progress)
            return {item: function(items[item]) for item in share}

        results: dict[int, Any] = {}
        for part in self.gather(work):
            results.update(part)
        return [results[item] for item in range(len(items))]

    def lead(self, action: Callable[[], Result]) -> Result:
        """Run an action on rank 0; every rank gets its result or its error."""
        return lead(action, self.group)

    def gather(self, work: Callable[[], Result]) -> list[Result]:
        """Run work on every rank and exchange the results; every rank raises when one fails."""
        return exchange(work, self.group)
