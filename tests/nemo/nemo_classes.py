"""Optimizer classes under test, and harm done to a state on its way."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from nemo.core.optim.distributed_adam import MegatronDistributedFusedAdam


class RenameOnly(MegatronDistributedFusedAdam):
    """The obvious fix of the first failure: rename the factories' keys too, whatever the checkpoint holds."""

    def sharded_state_dict(self, model_sharded_state_dict, optimizer_state_dict=None):
        state = super().sharded_state_dict(model_sharded_state_dict, optimizer_state_dict)
        for entry in nested_values(state):
            if hasattr(entry, "key"):
                entry.key = entry.key.replace("optimizer.state.param.", "optimizer.state.fp32_param.")
        return state


class ByIndex(RenameOnly):
    """The obvious fix of the second as well: take step and groups from where they are, group by group."""

    def load_state_dict(self, state_dict):
        if "optimizer" in state_dict:
            saved = state_dict.pop("optimizer")["param_groups"]
            state_dict["state"]["step"] = saved[0]["step"]
            for mine, theirs in zip(state_dict["param_groups"], saved, strict=False):
                mine.update({k: v for k, v in theirs.items() if k not in ("params", "step")})
        super().load_state_dict(state_dict)


def get(name: str) -> Any:
    from nemo_optim_bridge.plugins.nemo import DistributedFusedAdamBridge

    known = {"stock": MegatronDistributedFusedAdam, "rename": RenameOnly, "by index": ByIndex}
    return known.get(name, DistributedFusedAdamBridge)


def _last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def _drop_moment(state: dict[str, Any]) -> None:
    if _last_rank():
        del state["state"][0]["exp_avg"]


def _break_on_last_rank(state: dict[str, Any]) -> None:
    if _last_rank():
        state["state"][3] = "not a state"


def _reshape(state: dict[str, Any]) -> None:
    state["state"][1]["param"] = state["state"][1]["param"].flatten()


def _zero_moments(state: dict[str, Any]) -> None:
    for entry in state["state"].values():
        if isinstance(entry, dict):
            entry["exp_avg"].zero_()
            entry["exp_avg_sq"].zero_()


def _drop_steps(state: dict[str, Any]) -> None:
    for group in state["optimizer"]["param_groups"]:
        group.pop("step", None)


def _disagreeing_steps(state: dict[str, Any]) -> None:
    state["optimizer"]["param_groups"][1]["step"] += 1


def _reverse_saved(state: dict[str, Any]) -> None:
    state["optimizer"]["param_groups"].reverse()


def _ambiguous(state: dict[str, Any]) -> None:
    groups = state["optimizer"]["param_groups"]
    groups.append({**groups[0], "lr": 0.5})


def _nothing(state: dict[str, Any]) -> None:
    pass


HARM = {
    "": _nothing,
    "drop moment": _drop_moment,
    "break on last rank": _break_on_last_rank,
    "reshape": _reshape,
    "zero moments": _zero_moments,
    "drop steps": _drop_steps,
    "disagreeing steps": _disagreeing_steps,
    "reverse saved": _reverse_saved,
    "ambiguous": _ambiguous,
}
