"""A checkpoint of any format, as the operations on all formats see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_optim_bridge.core.manifest import Manifest

#: State names that are no optimizer state but the model's own.
MODEL_STATES = frozenset({"weight"})
MASTER = "fp32_param"
WEIGHT = "weight"
#: A float64 counts no further.
LARGEST_STEP = 2**53


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """What is known of a checkpoint from its headers.

    ``scalars`` holds, per parameter, its steps and the hyperparameters of its group, under the optimizer's own names;
    ``weight_decay`` among them is the effective one. ``shared`` holds numbers of the whole run, such as the lr
    scheduler's. ``no_decay`` are the parameters that a rule took to have no weight decay, None where the checkpoint
    itself says. ``remarks`` say what was inferred, defaulted, cut, dropped or rebuilt; ``problems`` what is wrong.
    """

    path: Path
    framework: str
    layout: str  # dialect or optimizer layout
    topology: Mapping[str, Any]
    manifest: Manifest
    scalars: Mapping[str, Mapping[str, Any]]
    shared: Mapping[str, Any] = field(default_factory=dict)
    no_decay: tuple[str, ...] | None = None
    remarks: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def has_long_int(value: object) -> bool:
    """Tell whether a number, or one in a list or mapping, is an int of more than 64 bits, as no optimizer has any.

    It would become no float, and receipts with one are not read.
    """
    if isinstance(value, Mapping):
        return any(map(has_long_int, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_long_int, value))
    return isinstance(value, int) and not -(1 << 63) <= value < 1 << 63
