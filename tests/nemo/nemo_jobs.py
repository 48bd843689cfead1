"""What the forked processes do. Everything here runs on every rank; results are plain values and tensors."""

from __future__ import annotations

import contextlib
import itertools
import queue
import zlib
from typing import Any

import nemo_classes
import torch
import torch.distributed as dist
from apex.optimizers import FusedAdam
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from nemo.core.optim.optimizer_with_main_params import MainParamsOptimizerWrapper
from nemo.core.optim.optimizers import init_optimizer_states

# Megatron's writer forks once more and talks through a manager process, which cannot start in a forked worker.
_results: Any = queue.Queue()
filesystem_async._get_write_results_queue = lambda *_: _results

#: What the source was trained with, and what the target is constructed with: all different, so that leftovers show.
SOURCE = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
TARGET = {"lr": 7e-7, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.3}


def start(tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep
    )
    with contextlib.suppress(Exception):  # the CUDA generator's part of it
        tensor_parallel.model_parallel_cuda_manual_seed(1)


def build(moe: bool = True, tp: int = 1, pp: int = 1, ep: int = 1, dtype: torch.dtype = torch.bfloat16) -> GPTModel:
    """A GPT of 2 layers with gated MLPs; with ``moe`` 4 experts, else biases. The fixtures' model."""
    config = TransformerConfig(
        num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, use_cpu_initialization=True,
        num_moe_experts=4 if moe else None, moe_router_topk=2, moe_token_dispatcher_type="allgather",
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep,
        sequence_parallel=tp > 1, gated_linear_unit=True, add_bias_linear=not moe, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        persist_layer_norm=False, pipeline_dtype=torch.bfloat16,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(num_experts=4 if moe else None), vocab_size=64, max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=pp == 1,
    )  # fmt: skip
    return model.to(dtype)


def whole_model(model: GPTModel) -> dict[str, Any]:
    return dict(model.sharded_state_dict(prefix="model."))


def sharded_model(model: GPTModel) -> dict[str, Any]:
    """Return the parameters' entries, as NeMo's strategy hands them to the optimizer."""
    return {k: v for k, v in whole_model(model).items() if not k.endswith("_extra_state")}


def sharded_of(model: GPTModel) -> dict[int, Any]:
    """Return each parameter's sharded entry by ``id(parameter)``."""
    found: dict[int, Any] = {}
    for entry in nested_values(sharded_model(model)):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory):
            found.setdefault(id(entry.data), entry)
    return found


def groups_of(model: GPTModel, reverse: bool = False) -> list[dict[str, Any]]:
    """NeMo's rule: decay, expert decay (ep > 1 only), biases without decay; empty groups are dropped."""
    decay: dict[str, Any] = {"params": [], "is_expert": False}
    expert: dict[str, Any] = {"params": [], "is_expert": True}
    bias: dict[str, Any] = {"params": [], "weight_decay": 0.0, "is_expert": False}
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            bias["params"].append(parameter)
        else:
            (decay if getattr(parameter, "allreduce", True) else expert)["params"].append(parameter)
    groups = [group for group in (decay, expert, bias) if group["params"]]
    return groups[::-1] if reverse else groups


def local_value(entry: Any, salt: str) -> torch.Tensor:
    """Return this rank's part of a global tensor that only depends on its key and the salt."""
    if isinstance(entry, ShardedTensorFactory):
        parts = entry.build()
        cut = {id(x): local_value(x, salt) for x in nested_values(parts)}
        return entry.merge_fn(_replace(parts, cut))
    generator = torch.Generator().manual_seed(zlib.crc32(f"{entry.key}|{salt}".encode()))
    whole = torch.randn(entry.global_shape, generator=generator)
    prepended = len(entry.global_shape) - len(entry.local_shape)
    sizes = (1,) * prepended + tuple(entry.local_shape)
    index = tuple(slice(o, o + n) for o, n in zip(entry.global_offset, sizes, strict=True))
    return whole[index].reshape(entry.local_shape).clone()


def _replace(tree: Any, values: dict[int, Any]) -> Any:
    if isinstance(tree, dict):
        return {k: _replace(v, values) for k, v in tree.items()}
    if isinstance(tree, list):
        return [_replace(v, values) for v in tree]
    return values[id(tree)]


def initialize(model: GPTModel) -> None:
    entries = sharded_of(model)
    for parameter in model.parameters():
        parameter.data.copy_(local_value(entries[id(parameter)], "init") * 0.05)


def gradient(entry: Any, step: int) -> torch.Tensor:
    return (local_value(entry, f"gradient {step}") * 0.1).bfloat16().float()


def rate(step: int) -> float:
    return SOURCE["lr"] * (1 - 0.02 * step)


# ----------------------------------------------------------------------------------------------------- optimizers


@contextlib.contextmanager
def named_cuda():
    """NeMo's wrapper takes parameters whose type is called torch.cuda...Tensor."""
    original = torch.Tensor.type

    def named(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        return found if args or kwargs else found.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = named
    try:
        yield
    finally:
        torch.Tensor.type = original


def make_fused(model: GPTModel) -> MainParamsOptimizerWrapper:
    with named_cuda():
        return MainParamsOptimizerWrapper(
            FusedAdam(groups_of(model), **SOURCE), fp32_grad_accum=True, contiguous_grad_bucket=True
        )


def pairs_of(optimizer: MainParamsOptimizerWrapper) -> Any:
    """Return (bf16 parameter, fp32 master) of every parameter."""
    masters = itertools.chain(*optimizer.fp32_from_float16_groups)
    return zip(itertools.chain(*optimizer.float16_groups), masters, strict=True)


def train_fused(model: GPTModel, optimizer: MainParamsOptimizerWrapper, steps: range) -> None:
    entries = sharded_of(model)
    for step in steps:
        pairs = zip(
            itertools.chain(*optimizer.float16_groups),
            itertools.chain(*optimizer.fp32_from_float16_groups),
            strict=True,
        )
        for parameter, master in pairs:
            master.grad.copy_(gradient(entries[id(parameter)], step))
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()


def make_distributed(model: GPTModel, cls: str = "bridge", reverse: bool = False, **options: Any) -> Any:
    arguments = {
        **TARGET, "bucket_cap_mb": 0.02, "contiguous_grad_buffer": True, "dtype": torch.float32,
        "param_sync_dtype": torch.bfloat16, "store_params": False, "store_param_remainders": True, **options,
    }  # fmt: skip
    optimizer = nemo_classes.get(cls)(groups_of(model, reverse), **arguments)
    optimizer.init_params(list(reversed(list(model.parameters()))))
    return optimizer


def train_distributed(model: GPTModel, optimizer: Any, steps: range) -> None:
    entries = sharded_of(model)
    for step in steps:
        for parameter in model.parameters():
            parameter.grad = gradient(entries[id(parameter)], step).to(parameter.dtype)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------------------------------------------- checkpoints


def fused_sharded(model: GPTModel, optimizer: MainParamsOptimizerWrapper) -> dict[str, Any]:
    """What NeMo's strategy makes of a wrapped fused_adam's state."""
    init_optimizer_states(optimizer.optimizer)
    state = optimizer.state_dict()
    entries = get_param_id_to_sharded_param_map(sharded_model(model), itertools.chain(*optimizer.float16_groups))
    state["fp32_from_fp16_params"] = [
        [
            make_sharded_optimizer_tensor(entries[i], master, "optimizer.state.fp32_param")
            for i, master in zip(group["params"], masters, strict=True)
        ]
        for masters, group in zip(
            state["fp32_from_fp16_params"], state["optimizer"]["param_groups"], strict=True
        )
    ]  # fmt: skip
    optim_state_to_sharding_state(state["optimizer"], entries)
    return state


def save(path: str, model: GPTModel, optimizer_state: dict[str, Any], step: int) -> None:
    """Save as NeMo's strategy does: model weights and one optimizer's state in Lightning's container."""
    checkpoint = {
        "epoch": 0, "global_step": step, "state_dict": {}, "lr_schedulers": [{"last_epoch": step}], "loops": {},
        "sharded_state_dict": whole_model(model), "optimizer_states": [optimizer_state],
    }  # fmt: skip
    strategy = get_default_save_sharded_strategy("torch_dist", 1)
    strategy.thread_count = 1
    dist_checkpointing.save(checkpoint, path, sharded_strategy=strategy)
    dist.barrier()


def ask(path: str, model: GPTModel, optimizer: Any, **options: Any) -> dict[str, Any]:
    """Load as NeMo's strategy does; put the weights into the model and return the optimizer's state."""
    request = {"state_dict": whole_model(model), "optimizer_states": [None]}
    request["optimizer_states"] = [optimizer.sharded_state_dict(sharded_model(model), None)]
    loaded = dist_checkpointing.load(sharded_state_dict=request, checkpoint_dir=path, **options)
    weights = {key.removeprefix("model."): value for key, value in loaded["state_dict"].items()}
    model.load_state_dict(weights, strict=False)
    return loaded["optimizer_states"][0]


# --------------------------------------------------------------------------------------------------------- results


def pieces(entry: Any, tensor: torch.Tensor, name: str) -> list[tuple[Any, ...]]:
    """Return a local tensor as boxes of its global tensor: (name|key, global shape, offset, values)."""
    built = {"x": make_sharded_optimizer_tensor(entry, tensor.detach().float().contiguous(), "x")}
    apply_factories(built)
    found = []
    for x in nested_values(built):
        prepended = len(x.global_shape) - len(x.local_shape)
        values = x.data.reshape((1,) * prepended + tuple(x.local_shape)).clone()
        found.append((f"{name}.{entry.key}", tuple(x.global_shape), tuple(x.global_offset), values.numpy()))
    return found


def distributed_result(model: GPTModel, optimizer: Any) -> dict[str, Any]:
    state = optimizer.state_dict()
    entries = sharded_of(model)
    boxes = []
    groups = []
    ids = (i for group in state["param_groups"] for i in group["params"])
    for parameter, i in zip(optimizer.parameters(), ids, strict=True):
        entry = entries[id(parameter)]
        for name, key in (("fp32_param", "param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            boxes += pieces(entry, state["state"][i][key], name)
        boxes += pieces(entry, parameter, "model_param")
    for group in optimizer.param_groups:
        values = {k: v for k, v in group.items() if k != "params"}
        groups.append((values, sorted({entries[id(p)].key for p in group["params"]})))
    report = getattr(optimizer, "restore_report", None)
    return {
        "boxes": boxes,
        "groups": groups,
        "step": int(optimizer.state["step"]),
        "report": None if report is None else report.to_json(),
    }


def fused_result(model: GPTModel, optimizer: MainParamsOptimizerWrapper) -> dict[str, Any]:
    entries = sharded_of(model)
    boxes = []
    for parameter, master in pairs_of(optimizer):
        state = optimizer.optimizer.state[master]
        boxes += pieces(entries[id(parameter)], master, "fp32_param")
        boxes += pieces(entries[id(parameter)], state["exp_avg"], "exp_avg")
        boxes += pieces(entries[id(parameter)], state["exp_avg_sq"], "exp_avg_sq")
        boxes += pieces(entries[id(parameter)], parameter, "model_param")
    return {"boxes": boxes}


def fingerprint(model: GPTModel, optimizer: Any) -> dict[str, Any]:
    """Everything of an optimizer and its model that a refused load must not touch."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    state = optimizer.state_dict()["state"]
    tensors = {f"{i}.{k}": t.clone().numpy() for i, s in state.items() if isinstance(s, dict) for k, t in s.items()}
    weights = [p.detach().float().numpy().copy() for p in model.parameters()]
    return {"groups": groups, "step": int(optimizer.state["step"]), "tensors": tensors, "weights": weights}


# ------------------------------------------------------------------------------------------------------------ jobs


def resume(
    path: str, tp: int = 1, pp: int = 1, ep: int = 1, moe: bool = True, cls: str = "bridge", reverse: bool = False,
    steps: int = 0, load: dict[str, Any] | None = None, harm: str = "", save_to: str = "", dtype: str = "bfloat16",
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Resume a checkpoint; with ``steps`` train on from step 3. Returns the result, or the error and what it left."""
    start(tp, pp, ep)
    model = build(moe, tp, pp, ep, getattr(torch, dtype))
    for parameter in model.parameters():
        parameter.data.zero_()
    try:
        optimizer = make_distributed(model, cls, reverse, **options)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "stage": "construct"}
    try:
        state = ask(path, model, optimizer, **(load or {}))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "stage": "ask"}
    except BaseException as error:  # torch's CheckpointException derives from BaseException
        return {"error": f"{type(error).__name__}: {error}", "stage": "ask"}
    nemo_classes.HARM[harm](state)
    before = fingerprint(model, optimizer)
    try:
        optimizer.load_state_dict(state)
    except Exception as error:
        after = fingerprint(model, optimizer)
        return {"error": f"{type(error).__name__}: {error}", "stage": "load", "before": before, "after": after}
    if steps:
        train_distributed(model, optimizer, range(4, 4 + steps))
    if save_to:
        save(save_to, model, optimizer.sharded_state_dict(sharded_model(model), optimizer.state_dict()), 3)
    return distributed_result(model, optimizer)


def fused(
    tp: int = 1, pp: int = 1, ep: int = 1, moe: bool = True, steps: int = 3, save_to: str = "", tie: bool = False
) -> dict[str, Any]:  # fmt: skip
    """Train fused_adam under NeMo's wrapper from the common start; save when asked."""
    start(tp, pp, ep)
    model = build(moe, tp, pp, ep)
    initialize(model)
    optimizer = make_fused(model)
    train_fused(model, optimizer, range(1, 1 + steps))
    if tie:  # masters exactly between two bf16 values, above an even one: where the two roundings differ
        for master in itertools.chain(*optimizer.fp32_from_float16_groups):
            bits = master.data.view(torch.int32)
            bits.copy_((bits & ~0x1FFFF) | 0x8000)
        optimizer._copy_main_params_to_model_params()
    if save_to:
        save(save_to, model, fused_sharded(model, optimizer), steps)
    return fused_result(model, optimizer)


def resume_by_strategy(
    path: str, wheel: str, tp: int = 1, moe: bool = True, cls: str = "bridge", save_to: str = "", strict: Any = None,
    reverse: bool = False, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Resume, and save when asked, through the methods that NeMo 2.4.1's NLPDDPStrategy and checkpoint IO have."""
    from nemo_strategy import make_strategy

    start(tp)
    model = build(moe, tp)
    for parameter in model.parameters():
        parameter.data.zero_()
    optimizer = make_distributed(model, cls, reverse, **options)
    strategy = make_strategy(wheel, model, optimizer, strict)
    try:
        loaded = strategy.load_checkpoint(path)
        weights = {key.removeprefix("model."): value for key, value in loaded["state_dict"].items()}
        model.load_state_dict(weights, strict=False)
        optimizer.load_state_dict(loaded["optimizer_states"][0])
    except BaseException as error:  # torch's CheckpointException derives from BaseException
        return {"error": f"{type(error).__name__}: {error}"}
    if save_to:
        checkpoint = {"lr_schedulers": [], "optimizer_states": [optimizer.state_dict()]}
        strategy.save_checkpoint({**checkpoint, "sharded_state_dict": whole_model(model)}, save_to)
        dist.barrier()
    return distributed_result(model, optimizer)


def resume_with_one_argument(path: str) -> dict[str, Any]:
    """Resume where the base class's ``sharded_state_dict`` takes the model's state only, as in NeMo 1.23."""
    from nemo.core.optim.distributed_adam import MegatronDistributedFusedAdam

    original = MegatronDistributedFusedAdam.sharded_state_dict

    def old(self, model_sharded_state_dict):
        return original(self, model_sharded_state_dict)

    MegatronDistributedFusedAdam.sharded_state_dict = old
    start()
    model = build()
    optimizer = make_distributed(model)
    request = {
        "state_dict": sharded_model(model),
        "optimizer_states": [optimizer.sharded_state_dict(sharded_model(model))],
    }
    loaded = dist_checkpointing.load(sharded_state_dict=request, checkpoint_dir=path)
    weights = {key.removeprefix("model."): value for key, value in loaded["state_dict"].items()}
    model.load_state_dict(weights, strict=False)
    optimizer.load_state_dict(loaded["optimizer_states"][0])
    return distributed_result(model, optimizer)


def plain(steps: int = 3, save_to: str = "", dtype: str = "float32") -> dict[str, Any]:
    """Train fused_adam without NeMo's wrapper: the weights are the masters, the state has moments only."""
    start()
    model = build(dtype=getattr(torch, dtype))
    initialize(model)
    optimizer = FusedAdam(groups_of(model), **SOURCE)
    entries = sharded_of(model)
    for step in range(1, 1 + steps):
        for parameter in model.parameters():
            parameter.grad = gradient(entries[id(parameter)], step).to(parameter.dtype)
        optimizer.step()
    state = optimizer.state_dict()
    optim_state_to_sharding_state(
        state, get_param_id_to_sharded_param_map(sharded_model(model), model_order(optimizer))
    )
    save(save_to, model, state, steps)
    boxes = []
    for parameter in model.parameters():
        found = optimizer.state[parameter]
        for name, value in (("fp32_param", parameter), *((n, found[n]) for n in ("exp_avg", "exp_avg_sq"))):
            boxes += pieces(entries[id(parameter)], value, name)
    return {"boxes": boxes}


def model_order(optimizer: torch.optim.Optimizer) -> Any:
    """Return the optimizer's parameters in its own order."""
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
