"""Share work among processes: workers of one machine, or the ranks of a process group.

Every pass over a checkpoint is a ``map``: each member does its share of the items, and every member of a process group
gets all results, or the same error.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeVar

from nemo_optim_bridge.errors import BridgeError, OutputError, TargetError

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int], None]
_WORTH_WORKERS = 256 << 20
#: Makes the function that handles one item, in the process that does; it reports bytes to the callback given.
Maker = Callable[[Progress], Callable[[Item], Result]]


def ignore(num_bytes: int) -> None:
    """Report progress to nobody."""


class Team(Protocol):
    """Processes that share work. All members call the same methods in the same order."""

    @property
    def is_leader(self) -> bool:
        """Tell whether this process is the one that creates, finishes and prints."""

    def map(
        self, make: Maker[Item, Result], items: Sequence[Item], weights: Sequence[int], progress: Progress
    ) -> list[Result]:
        """Return the results of all items in order; raises the first error of any member, on all of them."""

    def lead(self, action: Callable[[], Result]) -> Result:
        """Run an action on the leader alone and return its result, or raise its error, on all members."""


def shares(weights: Sequence[int], members: int) -> list[list[int]]:
    """Return item numbers for each member, about equally heavy, each in order: the heaviest first to the lightest."""
    loads = [0] * members
    result: list[list[int]] = [[] for _ in range(members)]
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        member = loads.index(min(loads))
        loads[member] += weights[item]
        result[member].append(item)
    return [sorted(items) for items in result]


def find_team(workers: int | None, num_bytes: int) -> Team:
    """Return the ranks that torchrun started, or worker processes of this machine.

    Args:
        workers: how many the user asked for; None is up to four, as many as there are processors, if it pays off.
        num_bytes: of the work.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return Ranks.start()
    return Workers(workers or worth_workers(num_bytes))


def worth_workers(num_bytes: int) -> int:
    """Return how many workers of this machine pay off: up to four, as many as there are processors."""
    return min(4, len(os.sched_getaffinity(0))) if num_bytes >= _WORTH_WORKERS else 1


class Workers:
    """This process, and ``size`` forked ones for each pass when ``size`` is more than 1."""

    is_leader = True

    def __init__(self, size: int) -> None:
        if size > 1 and "fork" not in multiprocessing.get_all_start_methods():
            raise TargetError("several workers need an operating system with fork", hint="use --workers 1")
        self.size = size

    def map(
        self, make: Maker[Item, Result], items: Sequence[Item], weights: Sequence[int], progress: Progress
    ) -> list[Result]:
        """Run every item, in forked workers when there are several; an error or a killed worker ends all of them."""
        if self.size == 1 or len(items) < 2:
            function = make(progress)
            return [function(item) for item in items]
        context = multiprocessing.get_context("fork")
        results: dict[int, Any] = {}
        running: dict[Any, Any] = {}
        try:
            for share in shares(weights, self.size):
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

    def lead(self, action: Callable[[], Result]) -> Result:
        """Run the action."""
        return action()


def _work(make: Any, items: Sequence[Any], share: Sequence[int], sender: Connection) -> None:
    """Handle a share of the items in a forked process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        function = make(lambda num_bytes: sender.send(("progress", num_bytes)))
        for item in share:
            sender.send(("result", item, function(items[item])))
        sender.send(("done",))
    except BridgeError as error:
        sender.send(("error", error))
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    except Exception as error:
        sender.send(("error", RuntimeError(f"{type(error).__name__}: {error}")))


def _ready(running: dict[Any, Any]) -> list[Any]:
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
    if message[0] == "progress":
        progress(message[1])
    elif message[0] == "result":
        results[message[1]] = message[2]
    elif message[0] == "error":
        raise message[1]
    else:
        running.pop(receiver).join()


class Ranks:
    """The ranks of the default torch.distributed process group; every rank runs the same program."""

    def __init__(self) -> None:
        import torch.distributed

        self._dist = torch.distributed

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
        return self._dist.get_rank() == 0

    def map(
        self, make: Maker[Item, Result], items: Sequence[Item], weights: Sequence[int], progress: Progress
    ) -> list[Result]:
        """Run this rank's share and exchange results; every rank raises when one fails."""
        share = shares(weights, self._dist.get_world_size())[self._dist.get_rank()]

        def work() -> dict[int, Any]:
            function = make(progress)
            return {item: function(items[item]) for item in share}

        results: dict[int, Any] = {}
        for part in self._exchange(work):
            results.update(part)
        return [results[item] for item in range(len(items))]

    def lead(self, action: Callable[[], Result]) -> Result:
        """Run an action on rank 0; every rank gets its result or its error."""
        result: Result = self._exchange(lambda: action() if self.is_leader else None)[0]
        return result

    def _exchange(self, work: Callable[[], Any]) -> list[Any]:
        outcome: tuple[Any, BridgeError | None]
        try:
            outcome = work(), None
        except BridgeError as error:
            outcome = None, error
        except Exception as error:
            outcome = None, OutputError(f"{type(error).__name__}: {error}", rank=self._dist.get_rank())
        outcomes: list[Any] = [None] * self._dist.get_world_size()
        try:
            self._dist.all_gather_object(outcomes, outcome)
        except RuntimeError as error:
            raise OutputError("another rank ended before its work was done") from error
        for _, error_of_rank in outcomes:
            if error_of_rank is not None:
                raise error_of_rank
        return [result for result, _ in outcomes]
