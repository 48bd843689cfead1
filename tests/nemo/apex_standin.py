"""A stand-in for Apex on CPU, written from Apex's documented behaviour; no line of it is Apex's.

What matters for a resume is modelled: flat buckets cut into one shard a data-parallel rank, masters stored whole or as
the 16 bits beside a bf16 weight (rounded half up), the version 2 state dict (full tensors on every rank, gathered),
and a load that replaces the param groups first, reads the step next, and then fills this rank's shards and nothing
else. The fused and the distributed optimizer share one formula, so that their results can be compared bit by bit.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

ALIGNMENT = 8  # elements; every parameter starts at a multiple of it


@torch.no_grad()
def adam(master, exp_avg, exp_avg_sq, grad, group, step) -> None:
    """One AdamW step in fp32, in place."""
    beta1, beta2 = group["betas"]
    correct1 = 1 - beta1**step if group["bias_correction"] else 1.0
    correct2 = 1 - beta2**step if group["bias_correction"] else 1.0
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    update = (exp_avg / correct1) / ((exp_avg_sq / correct2).sqrt() + group["eps"])
    master.sub_((update + group["weight_decay"] * master) * float(group["lr"]))


class FusedAdam(torch.optim.Optimizer):
    """The optimizer under MainParamsOptimizerWrapper: the step is kept in every group that has parameters."""

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
                adam(parameter.data, state["exp_avg"], state["exp_avg_sq"], parameter.grad, group, group["step"])


class DistributedFusedAdam(torch.optim.Optimizer):
    """Adam whose state is cut over the data-parallel ranks."""

    @dataclass
    class ParameterFragment:
        """Part of a parameter within one bucket; ranges are half-open, in elements."""

        param_group_id: int
        param_id: int
        bucket_id: int
        param_range: tuple[int, int]
        bucket_range: tuple[int, int]
        in_local_shard: bool
        shard_range: tuple[int, int] | None
        shard_bucket_range: tuple[int, int] | None
        shard_param_range: tuple[int, int] | None

    class StateBucket:
        """This rank's shard of one bucket."""

        def __init__(self, bucket_size, shard_size, store_params, store_remainders):
            self.bucket_size, self.shard_size = bucket_size, shard_size
            self.filled = 0
            self.fragments: list[Any] = []
            self.exp_avg_shard = torch.zeros(shard_size)
            self.exp_avg_sq_shard = torch.zeros(shard_size)
            self.params_shard = torch.zeros(shard_size) if store_params else None
            self.param_remainders_shard = torch.zeros(shard_size, dtype=torch.int16) if store_remainders else None

    class ParameterBucket:
        """Named in annotations of NeMo's class."""

    def __init__(
        self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
        dtype=torch.float32, grad_sync_dtype=None, param_sync_dtype=None, process_group=None,
        distributed_process_group=None, redundant_process_group=None, overlap_grad_sync=True,
        overlap_param_sync=False, bucket_cap_mb=100.0, contiguous_param_buffer=False, contiguous_grad_buffer=False,
        store_params=True, store_param_remainders=False, with_scaled_states=False, capturable=False,
    ):  # fmt: skip
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self.dtype, self.param_sync_dtype = dtype, param_sync_dtype or dtype
        self.device = torch.device("cpu")
        self.process_group = process_group
        self.distributed_rank, self.distributed_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.redundant_size = 1
        self.overlap_grad_sync = overlap_grad_sync
        self.contiguous_param_buffer, self.contiguous_grad_buffer = contiguous_param_buffer, contiguous_grad_buffer
        self.store_params, self.store_param_remainders = store_params, store_param_remainders
        self.with_scaled_states, self.capturable = with_scaled_states, capturable
        shard = int(bucket_cap_mb * (1 << 20) / 4 / self.distributed_size) // ALIGNMENT * ALIGNMENT
        self.default_shard_size = max(shard, ALIGNMENT)
        self.state["buckets"] = []
        self.state["step"] = torch.zeros(1, dtype=torch.int) if capturable else 0
        if capturable:
            for group in self.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]))

    # ------------------------------------------------------------------------------------------ layout

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def parameter(self, fragment) -> torch.nn.Parameter:
        return self.param_groups[fragment.param_group_id]["params"][fragment.param_id]

    def init_params(self, params: Iterable[Any] | None = None, **kwargs) -> None:
        places = {p: (g, i) for g, group in enumerate(self.param_groups) for i, p in enumerate(group["params"])}
        for parameter in self.parameters() if params is None else params:
            if "fragments" not in self.state[parameter]:
                self._init_param_state(parameter, *places[parameter], **kwargs)

    def _init_param_state(self, param, param_group_id, param_id, param_sync_dtype=None, **kwargs) -> None:
        fragments = self.state[param]["fragments"] = []
        buckets, start, size, shard = self.state["buckets"], 0, param.numel(), self.default_shard_size
        while start < size:
            if not buckets or buckets[-1].filled >= buckets[-1].bucket_size:
                total = shard * self.distributed_size
                buckets.append(self.StateBucket(total, shard, self.store_params, self.store_param_remainders))
            bucket = buckets[-1]
            taken = min(size - start, bucket.bucket_size - bucket.filled)
            low = max(bucket.filled, shard * self.distributed_rank)
            high = min(bucket.filled + taken, shard * (self.distributed_rank + 1))
            local = low < high
            shift = start - bucket.filled
            fragment = self.ParameterFragment(
                param_group_id, param_id, len(buckets) - 1, (start, start + taken),
                (bucket.filled, bucket.filled + taken), local,
                (low - shard * self.distributed_rank, high - shard * self.distributed_rank) if local else None,
                (low, high) if local else None, (low + shift, high + shift) if local else None,
            )  # fmt: skip
            fragments.append(fragment)
            bucket.fragments.append(fragment)
            if local and bucket.params_shard is not None:
                bucket.params_shard[slice(*fragment.shard_range)] = param.detach().view(-1)[low + shift : high + shift]
            bucket.filled = -(-(bucket.filled + taken) // ALIGNMENT) * ALIGNMENT
            start += taken

    def _local(self) -> Iterator[tuple[Any, Any, torch.Tensor, slice]]:
        """Yield (fragment, bucket, flat piece of the parameter, range in the shard) of this rank's shards."""
        for bucket in self.state["buckets"]:
            for fragment in bucket.fragments:
                if fragment.in_local_shard:
                    flat = self.parameter(fragment).detach().view(-1)
                    yield fragment, bucket, flat[slice(*fragment.shard_param_range)], slice(*fragment.shard_range)

    # -------------------------------------------------------------------------------------------- step

    def grad_sync(self) -> None:
        pass

    def param_sync(self) -> None:
        pass

    def zero_grad(self, set_to_none=False) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    def grad_buffer_view(self, param):
        return self.state[param].setdefault("main_grad", torch.zeros_like(param, dtype=torch.float32))

    def _master(self, bucket, weight, where) -> torch.Tensor:
        if bucket.params_shard is not None:
            return bucket.params_shard[where].clone()
        if bucket.param_remainders_shard is None:
            return weight.float()
        low = bucket.param_remainders_shard[where].to(torch.int32)
        high = weight.view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
        return ((high << 16) | (low & 0xFFFF)).view(torch.float32)

    @torch.no_grad()
    def step(self, closure=None):
        self.init_params()
        self.state["step"] += 1
        step = int(self.state["step"])
        grads = {}
        for parameter in self.parameters():
            grads[parameter] = parameter.grad.float()
            dist.all_reduce(grads[parameter], group=self.process_group)
            grads[parameter] /= dist.get_world_size(self.process_group)
        sent = [torch.zeros(bucket.shard_size, dtype=self.param_sync_dtype) for bucket in self.state["buckets"]]
        for fragment, bucket, weight, where in self._local():
            master = self._master(bucket, weight, where)
            grad = grads[self.parameter(fragment)].view(-1)[slice(*fragment.shard_param_range)]
            group = self.param_groups[fragment.param_group_id]
            adam(master, bucket.exp_avg_shard[where], bucket.exp_avg_sq_shard[where], grad, group, step)
            out = sent[fragment.bucket_id][where]
            if bucket.param_remainders_shard is not None:
                bits = master.view(torch.int32)
                bucket.param_remainders_shard[where] = bits.to(torch.int16)  # keeps the low half
                half_up = (bits + 0x8000) >> 16
                out.view(torch.int16).copy_(half_up.to(torch.int16))
            else:
                if bucket.params_shard is not None:
                    bucket.params_shard[where] = master
                out.copy_(master)
        for bucket, shard in zip(self.state["buckets"], sent, strict=True):
            whole = self._gather(shard)
            for fragment in bucket.fragments:
                weight = self.parameter(fragment).detach().view(-1)[slice(*fragment.param_range)]
                weight.copy_(whole[slice(*fragment.bucket_range)])

    def _gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Return all ranks' shards, one after the other; as bytes, since gloo does not know every dtype."""
        mine = shard.contiguous().view(torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.distributed_size)]
        dist.all_gather(parts, mine, group=self.process_group)
        return torch.cat(parts).view(shard.dtype)

    # -------------------------------------------------------------------------------------- state dict

    @torch.no_grad()
    def state_dict(self, *, state_dict_format=None, gather_on_root=None):
        """Return format 2: full fp32 tensors of every parameter, the same on every rank. Collective."""
        self.init_params()
        packed = super().state_dict()
        state: dict[Any, Any] = {"step": packed["state"]["step"]}
        ids = [i for group in packed["param_groups"] for i in group["params"]]
        by_parameter = dict(zip(self.parameters(), ids, strict=True))
        for parameter, index in by_parameter.items():
            names = ("param", "exp_avg", "exp_avg_sq")
            state[index] = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in names}
        local = {name: [torch.zeros(b.shard_size) for b in self.state["buckets"]] for name in ("param",)}
        for fragment, bucket, weight, where in self._local():
            local["param"][fragment.bucket_id][where] = self._master(bucket, weight, where)
        local["exp_avg"] = [bucket.exp_avg_shard for bucket in self.state["buckets"]]
        local["exp_avg_sq"] = [bucket.exp_avg_sq_shard for bucket in self.state["buckets"]]
        for name, shards in local.items():
            for bucket, shard in zip(self.state["buckets"], shards, strict=True):
                whole = self._gather(shard)
                for fragment in bucket.fragments:
                    flat = state[by_parameter[self.parameter(fragment)]][name].view(-1)
                    flat[slice(*fragment.param_range)] = whole[slice(*fragment.bucket_range)]
        return {"state": state, "param_groups": packed["param_groups"], "format": 2}

    @torch.no_grad()
    def load_state_dict(self, state_dict) -> None:
        if state_dict.pop("format", 2) != 2:
            raise NotImplementedError("the stand-in knows format 2 only")
        self.init_params()
        state, self.state = self.state, {}
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.state = state
        self.state["step"] = state_dict["state"]["step"]
        for fragment, bucket, _, where in self._local():
            index = state_dict["param_groups"][fragment.param_group_id]["params"][fragment.param_id]
            taken = slice(*fragment.shard_param_range)
            master = state_dict["state"][index]["param"].view(-1)[taken]
            if bucket.params_shard is not None:
                bucket.params_shard[where] = master
            if bucket.param_remainders_shard is not None:
                bucket.param_remainders_shard[where] = master.view(torch.int32).to(torch.int16)
            bucket.exp_avg_shard[where] = state_dict["state"][index]["exp_avg"].view(-1)[taken]
            bucket.exp_avg_sq_shard[where] = state_dict["state"][index]["exp_avg_sq"].view(-1)[taken]


@contextlib.contextmanager
def _disable_pre_forward_hook(param):
    yield


def _multi_tensor_copy(sources, targets, dummy_overflow_buf=None) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def install() -> None:
    """Put modules named ``apex...`` and ``amp_C`` in place, with what NeMo and megatron-core import from them."""

    def module(name: str, **contents: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__path__ = []  # a package without anything else in it
        made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        made.__dict__.update(contents)
        sys.modules[name] = made
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, made)
        return made

    def not_here(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the stand-in has no such kernel")

    module("amp_C", multi_tensor_scale=not_here, multi_tensor_l2norm=not_here, multi_tensor_adam=not_here)
    module("apex")
    module("apex.multi_tensor_apply", multi_tensor_applier=not_here)
    module("apex.optimizers", FusedAdam=FusedAdam, FusedLAMB=type("FusedLAMB", (FusedAdam,), {}))
    module("apex.normalization")  # megatron-core's norms ask for it; no test runs a forward pass
    module("apex.normalization.fused_layer_norm", FusedLayerNormAffineFunction=not_here)
    module("apex.contrib")
    module("apex.contrib.optimizers")
    module(
        "apex.contrib.optimizers.distributed_fused_adam",
        DistributedFusedAdam=DistributedFusedAdam,
        _disable_pre_forward_hook=_disable_pre_forward_hook,
        _multi_tensor_copy=_multi_tensor_copy,
    )
