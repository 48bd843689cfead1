"""A nanotron checkpoint as the operations on all formats see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from nemo_optim_bridge.core.checkpoint import Checkpoint
from nemo_optim_bridge.formats.nanotron.checkpoint import NanotronCheckpoint
from nemo_optim_bridge.formats.nanotron.optimizer import Scalar


def as_checkpoint(source: NanotronCheckpoint) -> Checkpoint:
    """Return the format-neutral view: steps, hyperparameters and lr scheduler entries are per parameter."""
    shared: dict[str, Any] = {"tied": source.tied}
    if source.scheduler is not None:
        shared.update(
            (f"lr_scheduler.{key}", value) for key, value in source.scheduler.template.items() if value is not None
        )
    return Checkpoint(
        path=source.path,
        framework="nanotron",
        layout=source.dialect.name,
        topology={**asdict(source.topology), "zero_stage": source.zero_stage},
        manifest=source.manifest,
        scalars={fqn: _scalars(source, fqn) for fqn in source.hyperparameters},
        shared=shared,
        remarks=source.remarks,
        problems=source.problems,
    )


def _scalars(source: NanotronCheckpoint, fqn: str) -> Mapping[str, Any]:
    numbers = {key: entry.value for key, entry in source.states.get(fqn, {}).items() if isinstance(entry, Scalar)}
    return {**source.hyperparameters[fqn], **numbers, **_scheduler_entry(source, fqn)}


def _scheduler_entry(source: NanotronCheckpoint, fqn: str) -> Mapping[str, Any]:
    """Return a parameter's scheduler entry; an absent lambda is the same whether spelled None or {}."""
    if source.scheduler is None:
        return {}
    entry = source.scheduler.entries.get(fqn, source.scheduler.common) or {}
    return {f"lr_scheduler.{key}": value or None if key == "lr_lambdas" else value for key, value in entry.items()}
