"""What the forked processes do: real optimizers ask for a converted checkpoint as they ask for their own.

Run by ``tests/nemo/nemo_rig.py`` on every rank; results are boxes of global tensors, each parameter's hyperparameters
by its key, and the step.
"""

from __future__ import annotations

import functools
from typing import Any

import apex.optimizers
import torch
from apex.optimizers import FusedAdam

apex.optimizers.FusedSGD = type("FusedSGD", (FusedAdam,), {})  # without it megatron-core takes torch's optimizers

import megatron.core.optimizer as megatron_optimizer  # noqa: E402
import nemo_jobs  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.validation import StrictHandling  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from nemo_jobs import TARGET  # noqa: E402

HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")


def load(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Load with what NeMo and Megatron-LM use: nothing that is asked for may be missing."""
    return dist_checkpointing.load(request, path, strict=StrictHandling.ASSUME_OK_UNEXPECTED)


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    found = {name: group[name] for name in HYPERPARAMETERS}
    if group.get("wd_mult") == 0.0:  # until megatron-core's scheduler runs, every group has the base value
        found["weight_decay"] = 0.0
    return {**found, "betas": tuple(found["betas"]), "step": int(group.get("step", 0))}


def zeroed(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


def _group_as_megatron() -> None:
    """Let NeMo's optimizers leave all one-dimensional parameters without weight decay."""

    def groups(model: Any, reverse: bool = False) -> list[dict[str, Any]]:
        places = {"decay": {"is_expert": False}, "expert": {"is_expert": True}}
        made: dict[str, dict[str, Any]] = {**places, "no decay": {"is_expert": False, "weight_decay": 0.0}}
        for parameter in model.parameters():
            expert = not getattr(parameter, "allreduce", True)
            name = "no decay" if parameter.ndim == 1 else "expert" if expert else "decay"
            made[name].setdefault("params", []).append(parameter)
        return [group for group in made.values() if "params" in group]

    nemo_jobs.groups_of = groups


def fused(
    path: str, tp: int = 1, pp: int = 1, ep: int = 1, moe: bool = True, bias_only: bool = True
) -> dict[str, Any]:  # fmt: skip
    """NeMo's MainParamsOptimizerWrapper over fused_adam."""
    if not bias_only:
        _group_as_megatron()
    nemo_jobs.start(tp, pp, ep)
    model = zeroed(nemo_jobs.build(moe, tp, pp, ep))
    with nemo_jobs.named_cuda():
        optimizer = nemo_jobs.MainParamsOptimizerWrapper(
            FusedAdam(nemo_jobs.groups_of(model), **TARGET), fp32_grad_accum=True, contiguous_grad_bucket=True
        )
    request = {"optimizer_states": [nemo_jobs.fused_sharded(model, optimizer)]}
    request["state_dict"] = nemo_jobs.sharded_model(model)
    state = load(path, request)["optimizer_states"][0]
    optimizer.load_state_dict(state)
    entries = nemo_jobs.sharded_of(model)
    by_master = {id(master): parameter for parameter, master in nemo_jobs.pairs_of(optimizer)}
    groups = [
        (hyperparameters(group), [entries[id(by_master[id(p)])].key for p in group["params"]])
        for group in optimizer.optimizer.param_groups
    ]
    return {**nemo_jobs.fused_result(model, optimizer), "groups": groups}


def distributed(
    path: str, tp: int = 1, pp: int = 1, ep: int = 1, moe: bool = True, bias_only: bool = True, **options: Any
) -> dict[str, Any]:  # fmt: skip
    """NeMo's own distributed_fused_adam."""
    if not bias_only:
        _group_as_megatron()
    result = nemo_jobs.resume(path, tp, pp, ep, moe, cls="stock", **options)
    if "error" in result:
        raise RuntimeError(result["error"])
    groups = [({**hyperparameters(group), "step": result["step"]}, keys) for group, keys in result["groups"]]
    return {"boxes": result["boxes"], "groups": groups}


# -------------------------------------------------------------------------------------------------- megatron-core


def _on_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return made


def _without_gpu() -> None:
    """Let megatron-core's optimizers run here: it moves everything to the GPU without asking."""
    for name in ("tensor", "zeros", "empty", "ones", "full"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]

    def adam(params: Any, **options: Any) -> Any:
        options.pop("adam_w_mode", None)
        return FusedAdam(params, **options)

    megatron_optimizer.Adam = adam


def megatron(
    path: str, kind: str, tp: int = 1, pp: int = 1, ep: int = 1, moe: bool = True, bias_only: bool = False,
    metadata: dict[str, Any] | None = None, container: str = "lightning",
) -> dict[str, Any]:  # fmt: skip
    """megatron-core's Float16Optimizer or DistributedOptimizer, chained where it chains them.

    Args:
        bias_only: leave only biases without weight decay, as NeMo does, instead of all one-dimensional parameters.
        metadata: what the request is made by; in Megatron-LM's container the checkpoint says so itself.
    """
    _without_gpu()
    nemo_jobs.start(tp, pp, ep)
    model = zeroed(nemo_jobs.build(moe, tp, pp, ep))
    sharded = kind == "mcore_distributed"
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=sharded), model
    )
    beta1, beta2 = TARGET["betas"]
    config = OptimizerConfig(
        optimizer="adam", lr=TARGET["lr"], weight_decay=TARGET["weight_decay"], adam_beta1=beta1, adam_beta2=beta2,
        adam_eps=TARGET["eps"], bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=sharded,
    )  # fmt: skip
    overrides = {ParamKey(name="*.bias"): {"wd_mult": 0.0}} if bias_only else None
    with nemo_jobs.named_cuda():
        optimizer = get_megatron_optimizer(config, [wrapped], config_overrides=overrides)
    prefix = "" if container == "megatron" else "model."
    weights = {k: v for k, v in model.sharded_state_dict(prefix=prefix).items() if not k.endswith("_extra_state")}
    common = dist_checkpointing.load_common_state_dict(path)
    if container == "megatron":
        metadata = common["content_metadata"]
    state = optimizer.sharded_state_dict(weights, is_loading=True, metadata=metadata or {})
    place = {"optimizer": state} if container == "megatron" else {"optimizer_states": [state]}
    loaded = load(path, {**place, "weights": weights})
    optimizer.load_state_dict(loaded["optimizer"] if container == "megatron" else loaded["optimizer_states"][0])
    entries = {id(entry.data): entry for entry in nemo_jobs.sharded_of(model).values()}
    boxes: list[Any] = []
    groups: list[Any] = []
    for part in optimizer.chained_optimizers:
        collect = _distributed_optimizer if isinstance(part, DistributedOptimizer) else _float16_optimizer
        collect(part, entries, boxes, groups)
    return {"boxes": boxes, "groups": groups, "optimizers": [type(o).__name__ for o in optimizer.chained_optimizers]}


def _float16_optimizer(part: Any, entries: dict[int, Any], boxes: list[Any], groups: list[Any]) -> None:
    triples = zip(part.optimizer.param_groups, part.float16_groups, part.fp32_from_float16_groups, strict=True)
    for group, parameters, masters in triples:
        groups.append((hyperparameters(group), [entries[id(p)].key for p in parameters]))
        for parameter, master in zip(parameters, masters, strict=True):
            entry, state = entries[id(parameter)], part.optimizer.state[master]
            boxes += nemo_jobs.pieces(entry, master, "fp32_param")
            for name in ("exp_avg", "exp_avg_sq"):
                boxes += nemo_jobs.pieces(entry, state[name], name)


def _distributed_optimizer(part: Any, entries: dict[int, Any], boxes: list[Any], groups: list[Any]) -> None:
    """Gather the flat shards of all data-parallel ranks, as the optimizer itself does to save them."""
    for group, parameters in zip(part.optimizer.param_groups, _model_parameters(part), strict=True):
        groups.append((hyperparameters(group), [entries[id(p)].key for p in parameters]))
    state = part.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
    for number, ranges in enumerate(part.gbuf_ranges):
        buffer = part.buffers[number]
        for dtype in ranges:
            tensors = state[number][dtype]
            for parameter, (start, stop, _) in buffer.param_index_map.items():
                for name, key in (("param", "fp32_param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
                    value = tensors[name][start:stop].reshape(parameter.shape)
                    boxes += nemo_jobs.pieces(entries[id(parameter)], value, key)


def _model_parameters(part: Any) -> list[list[Any]]:
    """Return the model's parameters by group; only those that this rank has a shard of."""
    found: list[list[Any]] = [[] for _ in part.optimizer.param_groups]
    for parameter, (group, _) in part.model_param_group_index_map.items():
        found[group].append(parameter)
    return found
