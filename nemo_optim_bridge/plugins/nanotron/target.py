"""What a checkpoint offers to a running optimizer: layouts, states and hyperparameters, or why they do not fit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from nemo_optim_bridge.core.checkpoint import MASTER
from nemo_optim_bridge.core.manifest import TensorKey
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.core.team import Team
from nemo_optim_bridge.errors import (
    BridgeError,
    MissingSourceError,
    ParamGroupError,
    TargetError,
    raise_all,
)
from nemo_optim_bridge.formats.nanotron.checkpoint import NanotronCheckpoint
from nemo_optim_bridge.formats.nanotron.layout import ParamLayout, padded_vocab_size
from nemo_optim_bridge.formats.nanotron.names import EMBEDDING, LM_HEAD
from nemo_optim_bridge.formats.nanotron.optimizer import Scalar
from nemo_optim_bridge.formats.nanotron.reader import read_checkpoint
from nemo_optim_bridge.plugins.nanotron.running import RunningOptimizer, RunningParameter, check_cut

Box = tuple[TensorKey, Region, torch.Tensor]

#: Keys that torch's versions and lr schedulers add to param groups; their absence tells nothing about the optimizer.
_ADDED_KEYS = {
    "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay", "initial_lr",
}  # fmt: skip


def read_for(
    path: str | os.PathLike[str], running: RunningOptimizer, vocab_size: int | None, team: Team
) -> tuple[NanotronCheckpoint, Mapping[str, ParamLayout]]:
    """Read a checkpoint's headers; return it with the layout of every parameter as the run's topology pads it.

    Called by all ranks of the run, ``team``, which share the files. A checkpoint that stores more vocabulary rows than
    the run has must owe them to padding: then they are left out.
    Raises CheckpointError, or TargetError when the vocabularies cannot be of one model.
    """
    source = read_checkpoint(path, vocab_size, team)
    rows = _agreed_rows(running, team)
    stored = source.facts.vocab_size
    multiple = source.documents.vocab_multiple
    if rows is None or EMBEDDING not in source.layouts:
        return source, source.layouts
    if vocab_size is None and rows < stored:
        if padded_vocab_size(rows, source.topology.tp, multiple) != stored:
            raise _other_vocabulary(rows, stored)
        source = read_checkpoint(path, rows, team)
    true = source.layouts[EMBEDDING].shape[0]
    if rows < true or (
        vocab_size is None and rows not in (true, padded_vocab_size(true, running.topology.tp, multiple))
    ):
        raise _other_vocabulary(rows, stored)
    padded = {fqn: layout.pad(rows - true) for fqn, layout in source.layouts.items() if fqn in (EMBEDDING, LM_HEAD)}
    return source, {**source.layouts, **padded}


def _agreed_rows(running: RunningOptimizer, team: Team) -> int | None:
    """Return the rows of the run's vocabulary matrices, padding included; None when no rank holds one."""
    found = sorted({rows for rows in team.gather(lambda: _running_rows(running)) if rows is not None})
    if len(found) > 1:
        raise TargetError(f"ranks of the run have vocabularies of {found} rows", key=EMBEDDING)
    return found[0] if found else None


def _running_rows(running: RunningOptimizer) -> int | None:
    """Return the rows as this rank's matrices tell them; None when it holds neither."""
    for parameter in running.parameters:
        if parameter.fqn in (EMBEDDING, LM_HEAD):
            return int(parameter.weight.shape[0]) * running.topology.tp
    return None


def _other_vocabulary(rows: int, stored: int) -> TargetError:
    return TargetError(
        f"the run's vocabulary has {rows} rows and the checkpoint's {stored}, and padding does not explain it",
        key=EMBEDDING, hint="pass the true vocabulary as vocab_size",
    )  # fmt: skip


def check_model(
    source: NanotronCheckpoint, layouts: Mapping[str, ParamLayout], running: RunningOptimizer, all_fqns: Iterable[str]
) -> None:
    """Raise unless the run trains exactly the checkpoint's parameters and this rank cuts them alike.

    Args:
        all_fqns: the parameters of all pipeline stages of the run.

    Raises TargetError or MissingSourceError with every problem found.
    """
    trained = set(all_fqns)
    problems: list[BridgeError] = []
    if source.has_masters != (running.masters is not None):
        has, lacks = ("the checkpoint", "the run") if source.has_masters else ("the run", "the checkpoint")
        problems.append(
            TargetError(
                f"{has} has fp32 masters and {lacks} has none", path=source.path,
                hint=f"set optimizer.accumulate_grad_in_fp32 to {str(source.has_masters).lower()}",
            )
        )  # fmt: skip
    for fqn in sorted(set(source.hyperparameters) - trained):
        problems.append(TargetError("has optimizer state that the run has no use for", path=source.path, key=fqn))
    for fqn in sorted(trained - set(source.hyperparameters)):
        problems.append(
            MissingSourceError(
                "has no optimizer state of what the run trains", path=source.path, key=fqn,
                hint="load it into the model that saved it",
            )
        )  # fmt: skip
    raise_all(problems)
    for parameter in running.parameters:
        try:
            check_cut(layouts[parameter.fqn], parameter, running.topology, running.at)
        except BridgeError as error:
            problems.append(error)
    raise_all(problems)


def new_states(
    source: NanotronCheckpoint, layouts: Mapping[str, ParamLayout], running: RunningOptimizer
) -> tuple[list[dict[str, Any]], list[Box]]:
    """Return a new state of each of the running parameters, and the boxes of the checkpoint that fill it.

    Tensors are zero where no box covers them: in the padding of the vocabulary. Numbers such as ``step`` are set
    already. Raises TargetError for a state whose dtype the running optimizer does not keep.
    """
    on_device = {
        id(tensor): bool(group.get("fused") or group.get("capturable"))
        for group in running.base.param_groups
        for tensor in group["params"]
    }
    states: list[dict[str, Any]] = []
    boxes: list[Box] = []
    problems: list[BridgeError] = []
    for parameter in running.parameters:
        state: dict[str, Any] = {}
        for key, entry in source.states[parameter.fqn].items():
            if isinstance(entry, Scalar):
                device = parameter.updated.device if on_device[id(parameter.updated)] else torch.device("cpu")
                state[key] = _number(entry, device)
                continue
            dtype = parameter.updated.dtype
            if getattr(torch, entry) != dtype:
                problems.append(
                    TargetError(
                        f"{key} is {entry} in the checkpoint and {dtype} in the run", key=parameter.fqn,
                        hint="resume with the source's accumulate_grad_in_fp32 and model dtype",
                    )
                )  # fmt: skip
                continue
            state[key] = torch.zeros(parameter.updated.shape, dtype=dtype, device=parameter.updated.device)
            boxes += _boxes(layouts[parameter.fqn], key, state[key], parameter, running)
        known = running.base.state.get(parameter.updated)
        if known and set(known) != set(source.states[parameter.fqn]):
            problems.append(
                TargetError(
                    f"the run's optimizer keeps {', '.join(known)}; the checkpoint has {', '.join(state)}",
                    key=parameter.fqn, hint="resume with the optimizer that saved the checkpoint",
                )
            )  # fmt: skip
        states.append(state)
    raise_all(problems)
    return states, boxes


def master_boxes(layouts: Mapping[str, ParamLayout], running: RunningOptimizer) -> list[Box]:
    """Return the boxes of the checkpoint that fill the run's fp32 masters, in place."""
    if running.masters is None:
        return []
    found: list[Box] = []
    for parameter in running.parameters:
        master = running.masters[parameter.fqn][0].detach()
        if master.dtype != torch.float32 or not master.is_contiguous():
            raise TargetError(f"the fp32 master is {master.dtype}, or not contiguous", key=parameter.fqn)
        found += _boxes(layouts[parameter.fqn], MASTER, master, parameter, running)
    return found


def _boxes(
    layout: ParamLayout, state: str, tensor: torch.Tensor, parameter: RunningParameter, running: RunningOptimizer
) -> Iterator[Box]:
    """Yield what a local tensor holds of a global one, each box with its view of the tensor."""
    key = TensorKey(parameter.fqn, state)
    base = tensor.storage_offset()
    for view in layout.views(running.topology, running.at.tp, running.at.ep, parameter.flat):
        yield key, view.region, tensor.as_strided(view.region.shape, view.stride, base + view.storage_offset)


def _number(scalar: Scalar, device: torch.device) -> Any:
    """Return a scalar state as torch keeps it: a 0-dim tensor of the stored dtype and bits, or a Python number."""
    if scalar.dtype is None:
        return scalar.value
    bits = torch.frombuffer(bytearray(scalar.data), dtype=getattr(torch, scalar.dtype))
    return bits.reshape(()).clone().to(device)


def new_hyperparameters(source: NanotronCheckpoint, running: RunningOptimizer) -> list[Mapping[str, Any]]:
    """Return what the checkpoint says of each running param group, matched by parameter name.

    Raises ParamGroupError when a running group joins parameters whose hyperparameters differ in the checkpoint, or
    when the two come from different optimizers.
    """
    found: list[Mapping[str, Any]] = []
    problems: list[BridgeError] = []
    for fqns, group in zip(running.group_fqns, running.base.param_groups, strict=True):
        values = source.hyperparameters[fqns[0]] if fqns else {}
        problems += _group_problems(source, fqns, values, group)
        found.append(values)
    raise_all(problems)
    return found


def _group_problems(
    source: NanotronCheckpoint, fqns: Sequence[str], values: Mapping[str, Any], group: Mapping[str, Any]
) -> Iterator[BridgeError]:
    for fqn in fqns:
        other = source.hyperparameters[fqn]
        if other != values:
            keys = sorted(k for k in {*values, *other} if values.get(k) != other.get(k))
            yield ParamGroupError(
                f"shares a param group of the run with {fqns[0]}, but their {', '.join(keys)} differ in the checkpoint",
                path=source.path, key=fqn, hint="build the optimizer with the checkpoint's param groups",
            )  # fmt: skip
            break
    unknown = sorted(set(values) - set(group) - _ADDED_KEYS)
    if unknown:
        yield ParamGroupError(
            f"the checkpoint's optimizer has {', '.join(unknown)}, the run's {type(group).__name__} has not",
            path=source.path, key=fqns[0], hint="resume with the optimizer that saved the checkpoint",
        )  # fmt: skip
