"""What a rank's running nanotron optimizer holds, seen through nanotron's wrappers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from nemo_optim_bridge.errors import TargetError
from nemo_optim_bridge.formats.nanotron.layout import ParamLayout, Slices
from nemo_optim_bridge.formats.topology import Coordinates, Topology

#: Names of the attributes by which nanotron's optimizer classes are known, v0.1 to 2026-04.
_ZERO, _ACCUMULATOR, _INNER = "param_name_to_dp_rank_offsets", "gradient_accumulator", "optimizer"


@dataclass(frozen=True, slots=True, eq=False)
class RunningParameter:
    """One parameter that this rank updates.

    ``updated`` is the tensor in the torch optimizer's param groups: the model's parameter, its fp32 master, or under
    ZeRO-1 a flat slice of either, elements ``flat`` of it. ``weight`` is the model's own parameter.
    """

    fqn: str
    updated: torch.Tensor
    weight: torch.Tensor
    flat: tuple[int, int] | None


@dataclass(frozen=True, slots=True, eq=False)
class RunningOptimizer:
    """A rank's optimizer: the torch optimizer at its core, and what nanotron knows around it.

    ``masters`` are (fp32 master, what it was copied from) by parameter, None without fp32 accumulation.
    ``group_fqns`` names the parameters of each param group, also those of which this rank's ZeRO-1 slice is empty.
    """

    base: torch.optim.Optimizer
    topology: Topology
    at: Coordinates
    parameters: tuple[RunningParameter, ...]
    masters: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None
    group_fqns: tuple[tuple[str, ...], ...]

    @property
    def fqns(self) -> tuple[str, ...]:
        """Return the parameters of this rank's pipeline stage."""
        return tuple(fqn for group in self.group_fqns for fqn in group)


def read_running(optimizer: Any, parallel_context: Any) -> RunningOptimizer:
    """Look through nanotron's optimizer wrappers; each rank calls it for itself, nothing is communicated.

    Raises TargetError when the object is not one of nanotron's optimizers.
    """
    layers = list(_layers(optimizer))
    base = layers[-1]
    zero = next((layer for layer in layers if hasattr(layer, _ZERO)), None)
    accumulator = next((getattr(layer, _ACCUMULATOR) for layer in layers if hasattr(layer, _ACCUMULATOR)), None)
    names: dict[int, str] = {number: _fqn(name) for number, name in optimizer.id_to_name.items()}
    elements = None if accumulator is None else {_fqn(name): e for name, e in accumulator.parameters.items()}
    groups = [[names[id(tensor)] for tensor in group["params"]] for group in base.param_groups]
    weights: dict[str, torch.Tensor] = {}
    flat: dict[str, tuple[int, int]] = {}
    if zero is not None:
        named = [group["named_params"] for group in zero.zero_named_param_groups]
        groups = [[_fqn(name) for name, _ in group] for group in named]
        weights = {_fqn(name): parameter for group in named for name, parameter in group}
        dp = distributed.get_rank(zero.dp_pg)
        for name, ranges in zero.param_name_to_dp_rank_offsets.items():
            if dp in ranges:
                flat[_fqn(name)] = (int(ranges[dp][0]), int(ranges[dp][1]))
    parameters = []
    for tensor in (tensor for group in base.param_groups for tensor in group["params"]):
        fqn = names[id(tensor)]
        weight = weights.get(fqn, tensor if elements is None else elements[fqn]["half"])
        parameters.append(RunningParameter(fqn, tensor, weight, flat.get(fqn)))
    masters = None if elements is None else {fqn: (e["fp32"], e["half"]) for fqn, e in elements.items()}
    topology, at = _position(parallel_context)
    return RunningOptimizer(base, topology, at, tuple(parameters), masters, tuple(map(tuple, groups)))


def _layers(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizer and what it wraps, down to torch's."""
    layer = optimizer
    while not isinstance(layer, torch.optim.Optimizer):
        if not (hasattr(layer, _INNER) and hasattr(layer, "id_to_name")):
            raise TargetError(
                f"{type(layer).__name__} is not an optimizer that nanotron builds",
                hint="pass the first result of nanotron.helpers.init_optimizer_and_grad_accumulator",
            )
        yield layer
        layer = getattr(layer, _INNER)
    if layer is optimizer:
        raise TargetError("a bare torch optimizer does not know its parameters' names", hint="pass nanotron's wrapper")
    yield layer


def _fqn(name: str) -> str:
    """Return a parameter's name in checkpoints: without what wrapping in DistributedDataParallel adds."""
    return name.removeprefix("module.")


def _position(parallel_context: Any) -> tuple[Topology, Coordinates]:
    """Return the run's topology and this rank's place in it."""
    expert = getattr(parallel_context, "expert_pg", None) or getattr(parallel_context, "ep_pg", None)
    groups = [parallel_context.tp_pg, parallel_context.pp_pg, parallel_context.dp_pg]
    groups += [] if expert is None else [expert]
    sizes = [distributed.get_world_size(group) for group in groups]
    ranks = [distributed.get_rank(group) for group in groups]
    return Topology(*sizes), Coordinates(*ranks, *([0] if expert is None else []))


def check_cut(layout: ParamLayout, parameter: RunningParameter, topology: Topology, at: Coordinates) -> None:
    """Raise TargetError when the run cuts a parameter otherwise than the layout says."""
    weight: Any = parameter.weight
    expected = layout.local_shape(topology)

    def refuse(problem: str) -> TargetError:
        return TargetError(problem, key=parameter.fqn, rank=str(at), hint="is this a checkpoint of the same model?")

    if tuple(weight.shape) != expected:
        raise refuse(f"the run holds shape {tuple(weight.shape)}; the checkpoint's model at {topology} has {expected}")
    start, stop = parameter.flat or (0, weight.numel())
    shape = (stop - start,) if parameter.flat else expected
    if tuple(parameter.updated.shape) != shape or not parameter.updated.is_contiguous():
        raise refuse(f"the optimizer updates shape {tuple(parameter.updated.shape)} instead of {shape}")
    if not hasattr(weight, "is_sharded"):
        return
    if weight.is_sharded != layout.is_sharded:
        raise refuse(f"is {'' if weight.is_sharded else 'not '}sharded in the run, unlike in the checkpoint")
    if layout.is_sharded:
        info = weight.get_sharded_info()
        found = tuple(map(int, info.unsharded_shape)), _slices(info.local_global_slices_pairs)
        wanted = layout.unsharded_shape(topology), layout.slices(topology, at.tp, at.ep)
        if found != wanted:
            raise refuse(f"the run cuts it as {found}, the checkpoint's model is cut as {wanted}")


def _slices(pairs: Any) -> Slices:
    """Return nanotron's slice pairs as the layout spells them."""

    def side(slices: Any) -> tuple[tuple[int, int] | None, ...]:
        return tuple(None if s.start is None else (int(s.start), int(s.stop)) for s in slices)

    return tuple((side(pair.local_slices), side(pair.global_slices)) for pair in pairs)
