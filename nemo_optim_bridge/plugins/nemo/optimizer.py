"""NeMo's distributed_fused_adam that restores what fused_adam saved, with nothing lost."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from nemo.core.optim.distributed_adam import MegatronDistributedFusedAdam

from nemo_optim_bridge.core.agree import exchange
from nemo_optim_bridge.core.groups import Policy, scalar
from nemo_optim_bridge.core.places import Places
from nemo_optim_bridge.errors import TargetError
from nemo_optim_bridge.plugins.nemo import masters
from nemo_optim_bridge.plugins.nemo.alias import check_alias
from nemo_optim_bridge.plugins.nemo.refusing import refusing
from nemo_optim_bridge.plugins.nemo.remainders import resync_weight, set_weight
from nemo_optim_bridge.plugins.nemo.report import RestoreReport
from nemo_optim_bridge.plugins.nemo.restore import Facts, Restore, check_together, prepare

logger = logging.getLogger("nemo_logger.nemo_optim_bridge")  # below NeMo's own logger, whose handlers users see


class DistributedFusedAdamBridge(MegatronDistributedFusedAdam):
    """Apex's distributed Adam as NeMo has it, whose loads accept checkpoints of fused_adam and its own.

    Args:
        params: as for the base class.
        fp32_key_style: how masters are spelled. ``auto`` asks for what the checkpoint has and saves as NeMo's own
            class does; ``stock`` does the latter for loads as well; ``uniform`` spells all ``fp32_param``.
        hyperparameters: ``checkpoint``, ``current``, or a mapping of lr, betas, eps, weight_decay, bias_correction
            (and ``default``) to either of them or to a value.
        masters_from_weights: accept a checkpoint without fp32 masters although its weights are rounded.
        allow_cold_optimizer: accept moments that are all zero after the first step.
        allow_lossy_state: accept optimizer settings that cannot hold fp32 masters and moments.
        kwargs: as for the base class.

    ``restore_report`` tells what the last load did, None before it. Raises TargetError for settings under which a
    restore cannot be right: expert parallelism, which Apex's optimizer does not know (it reduces all gradients over
    one data-parallel group, mixing different experts), and NeMo's nlp collection without the alias.
    """

    def __init__(
        self,
        params: Any,
        *args: Any,
        fp32_key_style: str = "auto",
        hyperparameters: Any = "checkpoint",
        masters_from_weights: bool = False,
        allow_cold_optimizer: bool = False,
        allow_lossy_state: bool = False,
        **kwargs: Any,
    ) -> None:
        check_alias()
        _refuse_expert_parallel()
        self.fp32_key_style = masters.check_key_style(fp32_key_style)
        self.hyperparameter_policy = Policy.parse(hyperparameters)
        self.masters_from_weights = masters_from_weights
        self.allow_cold_optimizer = allow_cold_optimizer
        self.allow_lossy_state = allow_lossy_state
        self.restore_report: RestoreReport | None = None
        self._request = masters.Request(masters_from_weights)
        super().__init__(params, *args, **kwargs)

    def sharded_state_dict(self, model_sharded_state_dict: Any, optimizer_state_dict: Any = None) -> Any:
        """Return the sharded state with the masters spelled as ``fp32_key_style`` says.

        Called by all ranks, to save and to load; with ``auto`` a load spells them again once it knows the checkpoint.
        NeMo 1.23 passes one argument and its base class takes one.
        """
        takes_state = "optimizer_state_dict" in inspect.signature(super().sharded_state_dict).parameters
        more = (optimizer_state_dict,) if takes_state else ()
        state_dict = super().sharded_state_dict(model_sharded_state_dict, *more)
        automatic = self.fp32_key_style == "auto"
        if automatic:
            self._request = masters.Request(self.masters_from_weights)
            masters.install()
        masters.spell(state_dict, self.fp32_key_style, self._request if automatic else None)
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore masters, moments, step and hyperparameters; on every rank or, with an error, on none.

        Called by all ranks, after the model's weights were loaded. ``state_dict`` is what megatron-core's load made
        of ``sharded_state_dict``; it is not changed. When this raises, the optimizer is as it was.
        """
        prepared: list[Restore] = []

        def check() -> Facts:
            _refuse_expert_parallel()
            self._refuse_lossy()
            prepared.append(prepare(state_dict, self.param_groups, self.hyperparameter_policy))
            return prepared[0].facts

        facts = exchange(refusing(check))  # NeMo's optimizer communicates over the default group as well
        restore = prepared[0]
        check_together(facts, restore.arrived.saved_groups, self.param_groups, self.allow_cold_optimizer)
        super().load_state_dict(self._as_kept(restore))
        self.restore_report = self._report(restore, self._resync(restore.masters))
        self._request = masters.Request(self.masters_from_weights)  # the next load may come another way
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.info(self.restore_report.summary())

    def _as_kept(self, restore: Restore) -> dict[str, Any]:
        """Return the state dict with step and rates as tensors where a capturable optimizer has them."""
        state_dict = restore.state_dict
        if getattr(self, "capturable", False):
            step = torch.tensor([state_dict["state"]["step"]], dtype=torch.int, device=self.device)
            state_dict["state"]["step"] = step
        for new, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                new["lr"] = torch.full_like(group["lr"], float(scalar(new["lr"])))
            elif isinstance(new["lr"], torch.Tensor):
                new["lr"] = scalar(new["lr"])
        return state_dict

    def _resync(self, values: Sequence[torch.Tensor]) -> int:
        """Set model weights that hold (part of) the masters to what the masters need; return how many changed."""
        changed = 0
        parameters = list(self.parameters())
        with Places({parameter.device for parameter in parameters}) as places:
            for parameter, master in zip(parameters, values, strict=True):
                bucket = self.state["buckets"][self.state[parameter]["fragments"][0].bucket_id]
                if bucket.param_remainders_shard is not None:
                    changed += resync_weight(parameter, master, places)
                elif bucket.params_shard is None:  # the weight itself is the master
                    changed += set_weight(parameter, master, places)
        return changed

    def _refuse_lossy(self) -> None:
        """Raise TargetError when these settings cannot hold fp32 masters and moments."""
        if self.allow_lossy_state:
            return
        problem = None
        if self.dtype != torch.float32 or self.with_scaled_states:
            problem = f"an optimizer with dtype {self.dtype} cannot hold fp32 masters and moments"
        elif not (self.store_params or self.store_param_remainders) and any(
            parameter.dtype != torch.float32 for parameter in self.parameters()
        ):
            problem = "with neither store_params nor store_param_remainders the masters' lower bits are dropped"
        if problem:
            raise TargetError(
                problem,
                hint="use dtype float32 with store_params or store_param_remainders, or accept the loss with "
                "optim.allow_lossy_state: true",
            )

    def _report(self, restore: Restore, resynced: int) -> RestoreReport:
        partner = restore.matching.partner if restore.matching else (None,) * len(self.param_groups)
        groups = tuple(
            {
                "parameters": len(group["params"]),
                "saved_group": saved,
                "lr": float(scalar(group["lr"])),
                "weight_decay": float(group["weight_decay"]),
                "betas": tuple(group["betas"]),
                "eps": float(group["eps"]),
                "is_expert": bool(group.get("is_expert", False)),
            }
            for group, saved in zip(self.param_groups, partner, strict=True)
        )
        return RestoreReport(
            source=restore.arrived.source,
            checkpoint=self._request.checkpoint,
            step=restore.arrived.step or 0,
            parameters=len(restore.masters),
            elements=sum(master.numel() for master in restore.masters),
            groups=groups,
            folded_groups=tuple(sorted(restore.matching.folded)) if restore.matching else (),
            key_style=self._request.key_style,
            masters=self._request.masters,
            ties_resynced=resynced,
        )


def _refuse_expert_parallel() -> None:
    """Raise TargetError when this run's expert parallel size is above 1."""
    size = 1
    with contextlib.suppress(AssertionError, AttributeError):  # groups not made yet, or a version without them
        size = parallel_state.get_expert_model_parallel_world_size()
    if size > 1:
        raise TargetError(
            f"expert_model_parallel_size is {size}: Apex's distributed Adam reduces all gradients over one "
            "data-parallel group and would mix different experts without an error",
            hint="set model.expert_model_parallel_size: 1; the checkpoint may have been saved with a larger one",
        )
