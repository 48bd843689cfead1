"""Load checkpoints of other topologies into running nanotron 0.4 optimizers, by the plugin, and train on.

    NANOTRON_PYTHON live_load_driver.py '{"tp": 2, "pp": 1, "dp": 1, "zero": 0, "cases": [...]}'

Every rank is a process (gloo). First an uninterrupted run takes four steps of synthetic training, the one that the
fixtures' checkpoints were saved in the middle of. Then for each case, ``{"source", "truth"}``, a fresh model gets the
true weights, nanotron's own names ``load_optimizer`` and ``load_lr_scheduler`` are called after ``install()``, the
optimizer is compared with the truth, and after one more step everything is compared with the uninterrupted run, bit for
bit. A case with ``"fault"`` must be refused, on every rank, and leave the optimizer as it was.

Prints one JSON object: per case, what each rank found.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import real_nanotron_driver as real
import torch

NUM_STEPS = 3  # that the fixtures' checkpoints have taken


@dataclass(frozen=True)
class Job(real.Job):
    """A topology, and the checkpoints to load at it; ``checkpoint`` and ``truth`` are those of the model's config."""

    cases: tuple[dict[str, Any], ...] = ()


# ---- the fixtures' synthetic training


def random_values(kind: str, low: int, high: int, scale: float, shape: tuple[int, ...]) -> torch.Tensor:
    """Return integers of [low, high) times scale, a function of the parameter's name and the global index."""
    seed = int.from_bytes(hashlib.sha256(kind.encode()).digest()[:8], "little")
    return torch.from_numpy((np.random.default_rng(seed).integers(low, high, size=shape) * scale).astype(np.float32))


def first_weights(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if "norm" in name:
        return 1.0 + random_values(f"w|{name}", -16, 16, 2.0**-6, shape)
    return random_values(f"w|{name}", -64, 64, 2.0**-8, shape)


def unsharded_shape(parameter: Any) -> tuple[int, ...]:
    if not parameter.is_sharded:
        return tuple(parameter.shape)
    return tuple(int(size) for size in parameter.get_sharded_info().unsharded_shape)


class Run:
    """One model with its optimizer and lr scheduler."""

    def __init__(self, job: Job, context: Any, weights: Any, *, has_masters: bool) -> None:
        self.context = context
        self.model = real.build_model(job, context)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                canonical = real.canonical_name(self.model, name, parameter)
                parameter.copy_(real.local_part(weights(canonical, unsharded_shape(parameter)), parameter))
        self.optimizer, self.scheduler = real.build_optimizer(job, self.model, context, has_masters=has_masters)
        self.has_masters = has_masters

    def train(self, step: int) -> None:
        """Take one step; data-parallel replicas see the same data, so their mean gradient is the gradient."""
        from nanotron.parallel.tied_parameters import sync_tied_weights_gradients

        loss = torch.zeros(())
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            gradient = random_values(f"g|{name}|{step}", -63, 64, 2.0**-10, unsharded_shape(parameter))
            loss = loss + (parameter.float() * real.local_part(gradient, parameter)).sum()
        accumulator = accumulator_of(self.optimizer)
        loss.backward() if accumulator is None else accumulator.backward(loss)
        sync_tied_weights_gradients(self.model, parallel_context=self.context, grad_accumulator=accumulator)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def snapshot(self) -> dict[str, Any]:
        """Return copies of all that training goes on from."""
        tensors = {f"{name}|{state}": value for (name, state), value in real.held_states(self.optimizer).items()}
        tensors.update((f"{name}|weight", parameter) for name, parameter in self.model.named_parameters())
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        kept = {key: torch.as_tensor(value).detach().clone() for key, value in tensors.items()}
        return {
            "tensors": kept,
            "groups": groups,
            "lr": self.scheduler.get_last_lr(),
            "epoch": self.scheduler.last_epoch,
        }

    def against(self, truth: dict[str, Any]) -> tuple[dict[str, int], list[str]]:
        """Compare with the fixtures' truth."""
        from nanotron import distributed as dist

        weights = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        rank = dist.get_rank(self.context.dp_pg)
        return real.compare(self.model, self.optimizer, weights, truth, dp_rank=rank, has_masters=self.has_masters)


def accumulator_of(optimizer: Any) -> Any:
    while not isinstance(optimizer, torch.optim.Optimizer):
        if hasattr(optimizer, "gradient_accumulator"):
            return optimizer.gradient_accumulator
        optimizer = optimizer.optimizer
    return None


def differences(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """Name what two snapshots do not have in common, bit for bit."""
    found = [key for key in ("groups", "lr", "epoch") if one[key] != two[key]]
    a, b = one["tensors"], two["tensors"]
    found += sorted(a.keys() ^ b.keys())
    return found + [key for key in a.keys() & b.keys() if not real.is_exact(a[key], b[key])]


# ---- one rank


def load_rank(job: Job) -> dict[str, Any]:
    """Run every case on this rank."""
    from nanotron.parallel import ParallelContext
    from safetensors.torch import load_file

    from nemo_optim_bridge.plugins import nanotron as plugin

    plugin.install()
    plugin.install()
    context = ParallelContext(
        tensor_parallel_size=job.tp, pipeline_parallel_size=job.pp, data_parallel_size=job.dp, expert_parallel_size=1
    )
    truths = {case["truth"]: load_file(case["truth"]) for case in job.cases}
    has_masters = any(key.endswith("|fp32") for key in next(iter(truths.values())))
    uninterrupted = Run(job, context, first_weights, has_masters=has_masters)
    for step in range(NUM_STEPS):
        uninterrupted.train(step)
    _, wrong = uninterrupted.against(next(iter(truths.values())))
    uninterrupted.train(NUM_STEPS)
    expected = uninterrupted.snapshot()
    result: dict[str, Any] = {"uninterrupted": wrong, "cases": []}
    for case in job.cases:
        truth = truths[case["truth"]]
        run = Run(job, context, lambda name, shape, truth=truth: truth[f"{name}|weight"], has_masters=has_masters)
        result["cases"].append(refuse(run, case) if "fault" in case else resume(run, case, truth, expected))
    return result


def load(run: Run, case: dict[str, Any]) -> Any:
    """Call what the trainer calls."""
    import nanotron.serialize.optimizer as serialize
    from nanotron import trainer

    assert trainer.load_optimizer is serialize.load_optimizer
    root = Path(case["source"])
    if case.get("as_documented"):
        return load_as_documented(run, root)
    report = trainer.load_optimizer(
        optimizer=run.optimizer,
        parallel_context=run.context,
        root_folder=root,
        param_shard_metadata=None,
        model=run.model,
        **case.get("options", {}),
    )
    trainer.load_lr_scheduler(lr_scheduler=run.scheduler, root_folder=root)
    return report


def load_as_documented(run: Run, root: Path) -> Any:
    """Run the example of docs/nanotron-plugin.md that calls the loader."""
    from nemo_optim_bridge.plugins import nanotron as bridge

    page = Path(__file__).parents[2] / "docs" / "nanotron-plugin.md"
    [example] = [
        block for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if "report" in block
    ]
    names = {"optimizer": run.optimizer, "parallel_context": run.context, "checkpoint_path": root, "model": run.model}
    scope = {"bridge": bridge, "print": lambda *values: None, **names}
    exec(compile(example, page.name, "exec"), scope)
    bridge.load_lr_scheduler(run.scheduler, root)
    return scope["report"]


def resume(run: Run, case: dict[str, Any], truth: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    report = load(run, case)
    tally, wrong = run.against(truth)
    run.train(NUM_STEPS)
    differing = [] if case.get("no_step") else differences(run.snapshot(), expected)
    sizes = {"bytes": report.num_bytes, "read": report.num_bytes_read}
    return {"tally": tally, "wrong": wrong, "next_step": differing, **sizes}


def refuse(run: Run, case: dict[str, Any]) -> dict[str, Any]:
    """Load what must be refused, on a disk that fails in a phase of the last rank; return the error and changes."""
    if case.get("trained"):  # the masters are no longer the weights, widened, and there are moments already
        run.train(0)
    before, masters = run.snapshot(), master_ids(run)
    try:
        with failing_disk(case["fault"]):
            load(run, case)
    except Exception as error:
        changed = differences(run.snapshot(), before) + ([] if master_ids(run) == masters else ["other masters"])
        return {"error": f"{type(error).__name__}: {error}", "changed": changed}
    return {"error": None, "changed": []}


def master_ids(run: Run) -> set[int]:
    return {id(entry["fp32"]) for entry in accumulator_of(run.optimizer).parameters.values()}


@contextlib.contextmanager
def failing_disk(phase: str) -> Iterator[None]:
    """Let the last rank's fifth read in a phase of the load fail; a phase that does not exist never fails."""
    from nemo_optim_bridge.core.store import FileStore
    from nemo_optim_bridge.plugins.nanotron.loader import _Load

    if not hasattr(_Load, phase) or torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
        yield
        return
    whole_phase, whole_read = getattr(_Load, phase), FileStore.read_into
    reads = itertools.count(1)

    def read_into(store: FileStore, buffer: int, offset: int, out: memoryview) -> None:
        whole_read(store, buffer, offset, out)
        if next(reads) == 5:
            raise OSError("the disk is gone")

    def run_phase(load: _Load) -> None:
        with mock.patch.object(FileStore, "read_into", read_into):
            whole_phase(load)

    with mock.patch.object(_Load, phase, run_phase):
        yield


def main() -> int:
    """Run one topology's cases and print what every rank found."""
    given = json.loads(sys.argv[1])
    first = given["cases"][0]
    config = Path(given.get("config", first["source"]))
    job = Job(
        config, Path(first["truth"]), *(given[axis] for axis in ("tp", "pp", "dp", "zero")), tuple(given["cases"])
    )
    real.prepare_imports()
    found = real.run_world(job, 240, load_rank)
    print(json.dumps({str(rank): value for rank, value in sorted(found.items())}))
    return 2 if any("error" in value for value in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
