"""Ask the real nanotron 0.4 whether it loads a checkpoint, and whether it then holds the truth.

    NANOTRON_PYTHON real_nanotron_driver.py CHECKPOINT TRUTH.safetensors --tp 2 --pp 2 --dp 2 --zero 1

Builds the model of the checkpoint's ``model_config.json`` with nanotron's own classes in tp*pp*dp processes (gloo),
calls nanotron's load_meta, load_weights, load_optimizer and load_lr_scheduler in the trainer's order, and compares
weights, masters, moments and steps of every rank with the truth, bit for bit. Prints one JSON object. Exit code 0: all
exact; 1: loaded, but something differs; 2: nanotron raised.

Needs no GPU: the imports that only a forward pass uses are replaced by empty ones, and "cuda" devices become the CPU.
nanotron's files are not touched. Runs under an interpreter that has nanotron, not under the project's.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

GPU_ONLY = ("flash_attn",)


# ---- what has to give on a CPU


class EmptyModule(types.ModuleType):
    """A module in which every name is a class without behaviour."""

    __path__: list[str] = []  # noqa: RUF012  a package's attribute

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (torch.nn.Module,), {"__init__": lambda self, *a, **k: torch.nn.Module.__init__(self)})


class EmptyImports(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import packages that only a forward pass uses as empty modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in GPU_ONLY:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> EmptyModule:
        return EmptyModule(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


class CudaMeansCpu(TorchFunctionMode):
    """Replace every "cuda" device argument by the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: self.on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*(self.on_cpu(value) for value in args), **kwargs)

    @staticmethod
    def on_cpu(value: Any) -> Any:
        is_cuda = isinstance(value, torch.device) and value.type == "cuda"
        is_cuda = is_cuda or (isinstance(value, str) and value.split(":")[0] == "cuda")
        return torch.device("cpu") if is_cuda else value


def prepare_imports() -> None:
    """Let nanotron be imported without a GPU, and 0.4 at all."""
    os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    import datasets  # noqa: F401  it looks for optional packages, so it comes before the empty ones
    import transformers  # noqa: F401

    sys.meta_path.insert(0, EmptyImports())
    torch.cuda.set_device = lambda *args: None
    torch.cuda.device = lambda *args: "cpu"
    _break_import_cycle()
    import nanotron.config
    import nanotron.trainer  # noqa: F401  brings in the rest, in an order that works


def _break_import_cycle() -> None:
    """Import nanotron.logging first: it takes a name from nanotron.config for an annotation, which imports it again."""
    import nanotron

    names = ("nanotron.config", "nanotron.config.config")
    package, module = (types.ModuleType(name) for name in names)
    package.__path__, module.LoggingArgs = [], object  # type: ignore[attr-defined]
    sys.modules.update(zip(names, (package, module), strict=True))
    import nanotron.logging

    for name in names:
        del sys.modules[name]
    if hasattr(nanotron, "config"):
        del nanotron.config


# ---- one rank


@dataclass(frozen=True)
class Job:
    """What to load, and at which topology."""

    checkpoint: Path
    truth: Path
    tp: int
    pp: int
    dp: int
    zero: int

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp


def build_model(job: Job, parallel_context: Any) -> Any:
    """Return the model of the checkpoint's config, with zero weights."""
    from nanotron.config import ParallelismArgs
    from nanotron.config.models_config import LlamaConfig
    from nanotron.models import build_model
    from nanotron.models.llama import LlamaForTraining
    from nanotron.parallel.parameters import sanity_check
    from nanotron.random import RandomStates
    from nanotron.trainer import mark_tied_parameters

    stored = json.loads((job.checkpoint / "model_config.json").read_text())
    known = {field.name for field in fields(LlamaConfig)}
    config = LlamaConfig(**{name: value for name, value in stored.items() if name in known})
    parallelism = ParallelismArgs(
        dp=job.dp, pp=job.pp, tp=job.tp, pp_engine="1f1b", tp_mode="ALL_REDUCE", tp_linear_async_communication=False
    )
    model = build_model(
        model_builder=lambda: LlamaForTraining(
            config=config,
            parallel_context=parallel_context,
            parallel_config=parallelism,
            random_states=RandomStates({}),
        ),
        parallel_context=parallel_context,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    mark_tied_parameters(model=model, parallel_context=parallel_context, parallel_config=parallelism)
    model.module_id_to_prefix = {id(module): f"{name}." for name, module in model.named_modules()}
    model.module_id_to_prefix[id(model)] = ""
    sanity_check(root_module=model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def build_optimizer(job: Job, model: Any, parallel_context: Any, *, has_masters: bool) -> tuple[Any, Any]:
    """Return nanotron's optimizer and lr scheduler for the loaded model."""
    from nanotron.config import LRSchedulerArgs, OptimizerArgs
    from nanotron.helpers import init_optimizer_and_grad_accumulator, lr_scheduler_builder

    schedule = LRSchedulerArgs(
        learning_rate=1e-2, lr_warmup_steps=2, lr_warmup_style="linear", lr_decay_style="cosine", min_decay_lr=1e-3
    )
    schedule.lr_decay_steps = 8
    args = OptimizerArgs(
        zero_stage=job.zero,
        weight_decay=0.01,
        clip_grad=None,
        accumulate_grad_in_fp32=has_masters,
        adam_eps=1e-8,
        adam_beta1=0.9,
        adam_beta2=0.95,
        torch_adam_is_fused=False,
        learning_rate_scheduler=schedule,
    )
    optimizer, _ = init_optimizer_and_grad_accumulator(
        model=model, optimizer_args=args, parallel_context=parallel_context
    )
    return optimizer, lr_scheduler_builder(optimizer=optimizer, lr_scheduler_args=schedule, total_training_steps=10)


def load_rank(job: Job) -> dict[str, Any]:
    """Load the checkpoint on this rank as the trainer does; return tallies of what equals the truth."""
    from nanotron import distributed as dist
    from nanotron.parallel import ParallelContext
    from nanotron.serialize.metadata import load_meta
    from nanotron.serialize.optimizer import load_lr_scheduler, load_optimizer
    from nanotron.serialize.weights import load_weights
    from safetensors.torch import load_file

    truth = load_file(job.truth)
    context = ParallelContext(
        tensor_parallel_size=job.tp, pipeline_parallel_size=job.pp, data_parallel_size=job.dp, expert_parallel_size=1
    )
    metadata = load_meta(parallel_context=context, root_folder=job.checkpoint)
    model = build_model(job, context)
    shards = load_weights(model=model, parallel_context=context, root_folder=job.checkpoint)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    has_masters = any(key.endswith("|fp32") for key in truth)
    optimizer, scheduler = build_optimizer(job, model, context, has_masters=has_masters)
    load_optimizer(
        optimizer=optimizer,
        parallel_context=context,
        root_folder=job.checkpoint,
        param_shard_metadata=shards,
        model=model,
    )
    load_lr_scheduler(lr_scheduler=scheduler, root_folder=job.checkpoint)
    tally, wrong = compare(
        model, optimizer, weights, truth, dp_rank=dist.get_rank(context.dp_pg), has_masters=has_masters
    )
    return {"tally": tally, "wrong": wrong, "step": metadata.metas["last_train_step"], "epoch": scheduler.last_epoch}


# ---- the comparison


def compare(
    model: Any, optimizer: Any, weights: dict[str, Any], truth: dict[str, Any], *, dp_rank: int, has_masters: bool
) -> tuple[dict[str, int], list[str]]:
    """Compare what this rank holds with its part of the truth; return counts per state and the names that differ."""
    parameters = {canonical_name(model, name, parameter): parameter for name, parameter in model.named_parameters()}
    states = held_states(optimizer)
    for name, weight in weights.items():
        states[canonical_name(model, name, model.get_parameter(name)), "weight"] = weight
    ranges = getattr(optimizer, "param_name_to_dp_rank_offsets", None)
    tally: collections.Counter[str] = collections.Counter()
    wrong = []
    for name, parameter in parameters.items():
        for state in ("weight", "exp_avg", "exp_avg_sq", "step", *(["fp32"] if has_masters else [])):
            expected = truth[f"{name}|{state}"]
            expected = expected.reshape(()) if state == "step" else local_part(expected, parameter)
            if ranges is not None and state not in ("weight", "step"):
                expected = expected.reshape(-1)[slice(*ranges[name].get(dp_rank, (0, 0)))]
            if ranges is not None and state != "weight" and dp_rank not in ranges[name]:
                continue
            got = states.get((name, state))
            if got is not None and is_exact(got, expected):
                tally[state] += 1
            else:
                wrong.append(f"{name}|{state}" + (" (absent)" if got is None else ""))
    return dict(tally), wrong


def canonical_name(model: Any, name: str, parameter: Any) -> str:
    """Return the name under which a parameter is stored."""
    if not parameter.is_tied:
        return name
    return parameter.get_tied_info().get_full_name_from_module_id_to_prefix(
        module_id_to_prefix=model.module_id_to_prefix
    )


def held_states(optimizer: Any) -> dict[tuple[str, str], torch.Tensor]:
    """Return the loaded optimizer's tensors by (name, state)."""
    content = optimizer.state_dict()
    held = {
        (name, state): value
        for i, name in content["names"].items()
        for state, value in content["state"].get(i, {}).items()
    }
    held.update({(name, "fp32"): value for name, value in content.get("gradient_accumulator", {}).items()})
    return held


def local_part(full: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Cut this rank's shard out of the full tensor by nanotron's own slices; rows of vocabulary padding become NaN."""
    if not parameter.is_sharded:
        return full
    info = parameter.get_sharded_info()
    padded = torch.full(tuple(info.unsharded_shape), torch.nan, dtype=full.dtype)
    padded[: full.shape[0]] = full
    local = torch.empty(tuple(parameter.shape), dtype=full.dtype)
    for pair in info.local_global_slices_pairs:
        local[pair.local_slices] = padded[pair.global_slices]
    return local


def is_exact(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit agree, except where the truth knows nothing (NaN)."""
    got = got.detach()
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
    return bool(((got.view(bits) == expected.view(bits)) | expected.isnan()).all())


# ---- the world


def run_rank(rank: int, job: Job, rendezvous: str, results: Any, work: Callable[[Any], dict[str, Any]]) -> None:
    """Run one rank and send what it found."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.num_ranks),
        LOCAL_WORLD_SIZE=str(job.num_ranks),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    try:
        with CudaMeansCpu():
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=job.num_ranks,
                timeout=datetime.timedelta(seconds=60),
            )
            results.put((rank, work(job)))
    except BaseException as error:
        results.put((rank, {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc(limit=-6)}))
    results.close()
    results.join_thread()
    os._exit(0)  # no teardown: a rank whose neighbour failed would wait for it


def run_world(job: Any, timeout: float, work: Callable[[Any], dict[str, Any]] = load_rank) -> dict[int, Any]:
    """Run ``work`` on every rank in a process of its own; a rank that does not answer in time is missing."""
    fork = multiprocessing.get_context("fork")  # nanotron is imported once, before
    results = fork.Queue()
    found: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder, "rendezvous"))
        ranks = [fork.Process(target=run_rank, args=(r, job, rendezvous, results, work)) for r in range(job.num_ranks)]
        for process in ranks:
            process.start()
        try:
            while len(found) < job.num_ranks and not any("error" in value for value in found.values()):
                rank, value = results.get(timeout=timeout)
                found[rank] = value
        except Exception as error:
            found[-1] = {"error": f"ranks did not answer within {timeout} s: {error!r}"}
        for process in ranks:
            process.kill()
            process.join()
    return found


def main() -> int:
    """Load, compare, print one JSON object; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("truth", type=Path)
    for name, default in (("tp", 1), ("pp", 1), ("dp", 1), ("zero", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    job = Job(**vars(parser.parse_args()))
    prepare_imports()
    found = run_world(job, timeout=120)
    errors = {rank: value for rank, value in found.items() if "error" in value}
    if errors:
        print(json.dumps({"errors": errors}))
        return 2
    total: collections.Counter[str] = collections.Counter()
    for value in found.values():
        total.update(value["tally"])
    wrong = {rank: value["wrong"] for rank, value in found.items() if value["wrong"]}
    seen = {key: sorted({value[key] for value in found.values()}) for key in ("step", "epoch")}
    print(json.dumps({"exact": dict(sorted(total.items())), "wrong": wrong, "ranks": len(found), **seen}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
