"""NLPDDPStrategy and DistributedCheckpointIO of NeMo 2.4.1 around a rig's model: their own methods, the rest set up."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import types
from collections import OrderedDict
from pathlib import Path
from time import time
from typing import Any

import nemo_jobs
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import core, dict_utils, mapping, serialization
from megatron.core.dist_checkpointing import optimizer as sharded_optimizer
from megatron.core.dist_checkpointing.strategies import fully_parallel
from megatron.core.dist_checkpointing.validation import StrictHandling
from nemo.core.optim import distributed_adam, optimizer_with_main_params, optimizers
from nemo_wheel import methods


class McoreDistributedOptimizer:
    """Named by the strategy; nothing here is one."""


def make_strategy(wheel: str, model: Any, optimizer: Any, strict: Any) -> Any:
    """Return an object with the strategy's own load_checkpoint and save_checkpoint."""
    nemo = Path(wheel) / "nemo"
    shared: dict[str, Any] = {}
    for module in (
        core, dict_utils, mapping, serialization, sharded_optimizer, fully_parallel, distributed_adam,
        optimizer_with_main_params, optimizers,
    ):  # fmt: skip
        shared |= vars(module)
    shared |= {
        "itertools": itertools, "time": time, "torch": torch, "OrderedDict": OrderedDict,
        "StrictHandling": StrictHandling, "McoreDistributedOptimizer": McoreDistributedOptimizer,
        "dist_checkpointing": dist_checkpointing, "logging": logging.getLogger("nemo"), "HAVE_MODELOPT": False,
        "LOAD_ERROR": "", "AppState": object, "ckpt_to_dir": Path,
        "get_data_parallel_group": parallel_state.get_data_parallel_group,
        "get_filesystem": lambda _: types.SimpleNamespace(isdir=os.path.isdir),
    }  # fmt: skip
    names = [
        "optimizer_sharded_state_dict", "load_checkpoint", "save_checkpoint", "_get_param_group",
        "_check_param_groups_mismatch", "_fix_param_groups",
    ]  # fmt: skip
    own = methods(nemo / "collections/nlp/parts/nlp_overrides.py", "NLPDDPStrategy", names, dict(shared))
    reader = ["load_checkpoint", "adjust_non_strict_load"]
    io = methods(nemo / "utils/callbacks/dist_ckpt_io.py", "DistributedCheckpointIO", reader, dict(shared))
    io["save_checkpoint"] = _save
    if isinstance(strict, bool):
        io["load_checkpoint"] = functools.partialmethod(io["load_checkpoint"], strict=strict)
        strict = None
    settings = {"parallel_load": False, "load_strictness": strict, "save_ckpt_format": "torch_dist"}
    strategy = type("Strategy", (), {**own, "use_distributed_checkpointing": True, "is_global_zero": True})()
    strategy.checkpoint_io = type("IO", (), {**io, **settings, "load_directly_on_device": False})()
    strategy.lightning_module = types.SimpleNamespace(
        optimizers=lambda use_pl_optimizer=True: optimizer, sharded_state_dict=lambda: nemo_jobs.whole_model(model)
    )
    return strategy


def _save(self: Any, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
    if torch.distributed.get_rank() == 0:
        Path(path).mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    strategy = serialization.get_default_save_sharded_strategy("torch_dist", 1)
    strategy.thread_count = 1
    dist_checkpointing.save(checkpoint, str(path), sharded_strategy=strategy)
