"""Real NeMo optimizers, a real megatron-core model and real distributed checkpoints, in forked gloo processes on CPU.

``Rig`` starts one process that imports everything once; every job is forked from it, one process a rank.
Jobs are the functions of ``nemo_jobs.py``, or of the module that is given, named by their name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

JOB_TIMEOUT = 120  # seconds


class Rig:
    """Runs jobs; ``run`` returns what each rank returned, or raises with the traceback of the first that failed."""

    def __init__(self, jobs: str = "nemo_jobs") -> None:
        context = mp.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, jobs), daemon=False)
        self._process.start()
        theirs.close()

    def run(self, job: str, world: int = 1, **arguments: Any) -> list[Any]:
        self._connection.send((job, world, arguments))
        results = self._connection.recv()
        failed = [text for status, text in results if status == "failed"]
        if failed:
            raise RuntimeError("\n".join(failed))
        return [value for _, value in results]

    def close(self) -> None:
        self._connection.send(None)
        self._process.join(10)


def prepare_process(apex: bool = True) -> None:
    """Make NeMo's and megatron-core's GPU-only corners work here; call before they are imported."""
    import torch

    if apex:
        import apex_standin

        apex_standin.install()
        version = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.0" if name == "transformer-engine" else version(name)
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None


def _serve(connection: Any, jobs: str) -> None:
    for stream in (1, 2):  # NeMo and megatron-core warn on every rank of every job; errors come back as text
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    prepare_process()
    module = importlib.import_module(jobs)

    while (request := connection.recv()) is not None:
        name, world, arguments = request
        try:
            connection.send(_run(getattr(module, name), world, arguments))
        except Exception:
            connection.send([("failed", traceback.format_exc())])


def _run(job: Any, world: int, arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        workers = [
            context.Process(target=_work, args=(job, rank, world, str(store), pipes[rank][1], arguments))
            for rank in range(world)
        ]
        for worker in workers:
            worker.start()
        deadline = time.monotonic() + JOB_TIMEOUT
        results = []
        for (receiver, sender), worker in zip(pipes, workers, strict=True):
            sender.close()
            if receiver.poll(max(0.0, deadline - time.monotonic())):
                try:
                    results.append(receiver.recv())
                except EOFError:
                    results.append(("failed", f"a worker died with {worker.exitcode}"))
            else:
                results.append(("failed", "a worker hangs"))
        for worker in workers:
            worker.join(0.5)
            if worker.is_alive():
                worker.kill()
        return results


def _work(job: Any, rank: int, world: int, store: str, sender: Any, arguments: dict[str, Any]) -> None:
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        result = ("done", job(**arguments))
    except BaseException:
        result = ("failed", traceback.format_exc())
    sender.send(result)
    sender.close()
    os._exit(0)  # no teardown of a process group whose peers may hang
