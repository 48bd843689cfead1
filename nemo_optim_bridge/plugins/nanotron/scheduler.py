"""A drop-in for nanotron's ``load_lr_scheduler`` that accepts the files of any topology and dialect."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from nemo_optim_bridge.core.agree import together
from nemo_optim_bridge.errors import MissingSourceError, TargetError
from nemo_optim_bridge.formats.nanotron.dialects import DIALECTS
from nemo_optim_bridge.formats.nanotron.reader import read_checkpoint

_GROUPS: WeakKeyDictionary[torch.optim.Optimizer, tuple[tuple[str, ...], ...]] = WeakKeyDictionary()


def remember_groups(optimizer: torch.optim.Optimizer, group_fqns: Sequence[Sequence[str]]) -> None:
    """Note which parameters each param group holds: an lr scheduler knows groups by their position only."""
    _GROUPS[optimizer] = tuple(map(tuple, group_fqns))


def load_lr_scheduler(lr_scheduler: Any, root_folder: str | os.PathLike[str], *_: Any, **__: Any) -> None:
    """Restore the lr scheduler of a checkpoint of any topology and dialect.

    Called by every rank, after this plugin's ``load_optimizer``, in place of nanotron's function of the same name;
    further arguments, which later revisions pass, are not needed. Learning rates follow the parameters by name.

    Raises one BridgeError on all ranks, the scheduler being as it was.
    """
    state = together(lambda: _state(lr_scheduler, root_folder))
    lr_scheduler.load_state_dict(state)


def _state(lr_scheduler: Any, root_folder: str | os.PathLike[str]) -> dict[str, Any]:
    source = read_checkpoint(root_folder)
    if source.scheduler is None:
        raise MissingSourceError("the checkpoint has no lr_scheduler", path=source.path, hint="copy it from the run")
    groups = _GROUPS.get(lr_scheduler.optimizer)
    if groups is None or len(groups) != len(lr_scheduler.base_lrs):
        raise TargetError(
            "the param groups of the lr scheduler's optimizer are not known",
            hint="load the optimizer first, with nemo_optim_bridge.plugins.nanotron.load_optimizer",
        )
    if len(groups) == 1:
        return source.scheduler.state_dict(DIALECTS["0.4"], groups[0])
    uneven = [group for group in groups if len(group) != 1]
    if uneven:
        raise TargetError(
            f"{len(groups)} param groups, one of them of {len(uneven[0])} parameters",
            hint="nanotron's revisions build one group in total, or one for each parameter",
        )
    return source.scheduler.state_dict(DIALECTS["head"], [group[0] for group in groups])
