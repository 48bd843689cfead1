"""A drop-in for ``nanotron.serialize.optimizer.load_optimizer`` that accepts checkpoints of any topology."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from nemo_optim_bridge.core.agree import together
from nemo_optim_bridge.core.compare import Pairs, require_equal_replicas
from nemo_optim_bridge.core.live import TensorLoad, plan_tensors
from nemo_optim_bridge.core.plan import Plan
from nemo_optim_bridge.core.team import Ranks, Workers
from nemo_optim_bridge.errors import TargetError
from nemo_optim_bridge.formats.crcs import require_valid_crcs
from nemo_optim_bridge.formats.nanotron.checkpoint import NanotronCheckpoint
from nemo_optim_bridge.formats.nanotron.layout import ParamLayout
from nemo_optim_bridge.formats.nanotron.reshard import REPLICA_POLICIES
from nemo_optim_bridge.plugins.nanotron.running import RunningOptimizer, read_running
from nemo_optim_bridge.plugins.nanotron.scheduler import remember_groups
from nemo_optim_bridge.plugins.nanotron.target import (
    check_model,
    master_boxes,
    new_hyperparameters,
    new_states,
    read_for,
)

logger = logging.getLogger(__name__)

#: Replicas smaller than this, in elements, may be missing from ranks with empty ZeRO-1 slices: one rank checks them.
_SMALL_REPLICA = 1 << 18
_PART = 1 << 20  # elements compared at a time


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a rank loaded: bytes of its states and masters, and bytes that it read from tensors to fill them."""

    num_bytes: int
    num_bytes_read: int


def load_optimizer(
    optimizer: Any,
    parallel_context: Any,
    root_folder: str | os.PathLike[str],
    map_location: Any = None,
    param_shard_metadata: Any = None,
    model: Any = None,
    *,
    vocab_size: int | None = None,
    check_crcs: bool = True,
    replicas: str = "error",
) -> LoadReport:
    """Restore a checkpoint of any topology, ZeRO stage and dialect into a running nanotron optimizer, bit for bit.

    Called by every rank, after the weights were loaded and the optimizer was built, in place of nanotron's function
    of the same name. The ranks share the headers, and each reads of the tensors its own boxes only. Moments, steps and
    hyperparameters go to the torch optimizer, masters are filled in place. Rows of vocabulary padding get zero moments
    and keep their masters.

    Args:
        optimizer, parallel_context: nanotron's.
        root_folder: of one step, or its parent with ``latest.txt``.
        map_location, param_shard_metadata, model: accepted and not needed; states go to their parameter's device.
        vocab_size: the true vocabulary of the checkpoint, where padding was stored. None: as found.
        check_crcs: check every optimizer file's CRC-32 first; the ranks share the files.
        replicas: ``error`` compares copies of one box first, the ranks sharing the work; ``lowest-rank`` does not.

    Raises one BridgeError on all ranks, and leaves the optimizer of every rank as it was. A rank that fails otherwise,
    for want of memory say, raises its own error, and the others a BridgeError that quotes it.
    """
    world = parallel_context.world_pg
    running = together(lambda: read_running(optimizer, parallel_context), world)
    fqns = _all_fqns(running, parallel_context.pp_pg)
    load = _plan(root_folder, running, fqns, vocab_size, replicas, Ranks(world))
    together(lambda: load.check(check_crcs, replicas), world)
    num_bytes_read = together(load.read_states, world)
    undo = together(lambda: Undo(running), world)
    try:
        num_bytes_read += together(load.read_masters, world)
    except BaseException:
        undo.run()
        raise
    load.commit()
    report = LoadReport(load.num_bytes, num_bytes_read)
    logger.info("loaded %d bytes of optimizer state, read %d", report.num_bytes, report.num_bytes_read)
    return report


def _all_fqns(running: RunningOptimizer, stages: Any) -> set[str]:
    """Return the parameters of all pipeline stages; a collective over the ranks of ``stages``."""
    gathered: list[Any] = [None] * distributed.get_world_size(stages)
    distributed.all_gather_object(gathered, running.fqns, group=stages)
    return {fqn for stage in gathered for fqn in stage}


@dataclass(frozen=True, slots=True, eq=False)
class _Load:
    """A load that was planned and validated on this rank; nothing of the optimizer has been touched.

    What was read of the checkpoint's headers is gone but for what this rank's own boxes need: ``torch_files`` are those
    whose CRCs this rank checks.
    """

    torch_files: Sequence[Path]
    running: RunningOptimizer
    states: Sequence[dict[str, Any]]
    hyperparameters: Sequence[Mapping[str, Any]]
    states_load: TensorLoad
    masters_load: TensorLoad

    @property
    def num_bytes(self) -> int:
        """Bytes of the states and masters that are filled."""
        return self.states_load.plan.num_bytes + self.masters_load.plan.num_bytes

    def check(self, check_crcs: bool, replicas: str) -> None:
        """Check this rank's share of the source's bytes."""
        alone = Workers(1)  # the shares are this module's: ranks need not learn each other's results
        if check_crcs:
            require_valid_crcs(self.torch_files, alone)
        if replicas == "error":
            for load in (self.states_load, self.masters_load):
                require_equal_replicas(_share_of_replicas(load.plan, self.running), alone)

    def read_states(self) -> int:
        """Fill the new states, which the optimizer does not know yet; return the bytes read."""
        return self.states_load.run()

    def read_masters(self) -> int:
        """Fill the masters in place; return the bytes read."""
        return self.masters_load.run()

    def commit(self) -> None:
        """Hand the new states and hyperparameters to the torch optimizer: assignments only, which cannot fail."""
        base = self.running.base
        for parameter, state in zip(self.running.parameters, self.states, strict=True):
            base.state[parameter.updated] = state
        for group, values in zip(base.param_groups, self.hyperparameters, strict=True):
            group.update(values)
        remember_groups(base, self.running.group_fqns)


def _plan(
    path: str | os.PathLike[str], running: RunningOptimizer, fqns: Iterable[str], vocab_size: int | None,
    replicas: str, team: Ranks,
) -> _Load:  # fmt: skip
    """Read the headers, validate and plan; a collective. What was read is freed but for what the load needs."""
    if replicas not in REPLICA_POLICIES:
        raise TargetError(f"unknown replica policy {replicas!r}", hint=f"choose {' or '.join(REPLICA_POLICIES)}")
    source, layouts = read_for(path, running, vocab_size, team)
    share = slice(team.rank, None, team.num_ranks)
    return together(lambda: _prepare(source, layouts, running, fqns, share), team.group)


def _prepare(
    source: NanotronCheckpoint, layouts: Mapping[str, ParamLayout], running: RunningOptimizer, fqns: Iterable[str],
    share: slice,
) -> _Load:  # fmt: skip
    """Validate and plan; allocates this rank's new states. ``share`` is of the torch files: those that it checks."""
    check_model(source, layouts, running, fqns)
    hyperparameters = new_hyperparameters(source, running)
    states, boxes = new_states(source, layouts, running)
    rank = running.topology.rank(running.at)
    moments = plan_tensors(source.manifest, boxes, rank=rank)
    masters = plan_tensors(source.manifest, master_boxes(layouts, running), rank=rank)
    return _Load(source.torch_files[share], running, states, hyperparameters, moments, masters)


def _share_of_replicas(plan: Plan, running: RunningOptimizer) -> Plan:
    """Return the plan with the replicas that this rank compares: those of its stage are divided among its ranks."""
    topology, at = running.topology, running.at
    pairs = Pairs.of_replicas(plan)
    small = pairs.shape.prod(axis=1) < _SMALL_REPLICA
    size = topology.tp * topology.dp * topology.ep
    number = (at.ep * topology.dp + at.dp) * topology.tp + at.tp
    turn = np.cumsum(~small) % size  # the large ones are the same on every rank of the stage
    return replace(plan, replicas=plan.replicas[np.where(small, 0, turn) == number])


class Undo:
    """Puts the fp32 masters back; keeps a copy only of those that are no longer equal to the weights they came from.

    In a run that has just been built every master is its weight, widened: then nothing is kept.
    """

    def __init__(self, running: RunningOptimizer) -> None:
        self._masters = running.masters or {}
        self._kept = {
            fqn: master.detach().clone() for fqn, (master, weight) in self._masters.items() if not _same(master, weight)
        }

    def run(self) -> None:
        """Restore every master."""
        with torch.no_grad():
            for fqn, (master, weight) in self._masters.items():
                master.detach().copy_(self._kept.get(fqn, weight))


def _same(master: torch.Tensor, weight: torch.Tensor) -> bool:
    """Tell whether a master holds the bits of its weight, widened, comparing a bounded part at a time."""
    master, weight = master.detach().reshape(-1), weight.detach().reshape(-1)
    parts = (slice(start, start + _PART) for start in range(0, master.numel(), _PART))
    return all(torch.equal(master[part].view(torch.int32), weight[part].float().view(torch.int32)) for part in parts)
