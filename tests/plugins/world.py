"""Run a function on several ranks, each a process of its own, over gloo unless told otherwise."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed


def run_world(
    num_ranks: int, work: Callable[..., Any], *args: Any, timeout: float = 240, killed: tuple[int, ...] = (),
    backend: str = "gloo",
) -> list[Any]:  # fmt: skip
    """Return what ``work(rank, *args)`` returned on each rank; a rank's traceback fails the test.

    Ranks in ``killed`` are expected to die without a word: None stands for what they return.
    """
    spawn = multiprocessing.get_context("spawn")
    results: Any = spawn.Queue()
    found: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            spawn.Process(target=_rank, args=(rank, num_ranks, folder, results, backend, work, args))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        try:
            while len(found) < num_ranks - len(killed):
                rank, error, value = results.get(timeout=timeout)
                assert error is None, f"rank {rank}:\n{error}"
                found[rank] = value
        finally:
            for process in ranks:
                process.join(timeout=10)
                if process.is_alive():
                    process.kill()
                    process.join()
    return [found.get(rank) for rank in range(num_ranks)]


def _rank(
    rank: int, num_ranks: int, folder: str, results: Any, backend: str, work: Callable[..., Any], args: Any
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        distributed.init_process_group(
            backend,
            init_method=f"file://{Path(folder, 'rendezvous')}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=120),
        )
        results.put((rank, None, work(rank, *args)))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
    results.close()
    results.join_thread()
    os._exit(0)  # no teardown: a rank whose neighbour failed would wait for it
