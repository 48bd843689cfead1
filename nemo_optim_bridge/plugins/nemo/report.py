"""What a load did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The outcome of one load on this rank; counts are of this rank's local parameters.

    ``source`` is the optimizer that wrote the state, ``key_style`` how its masters were spelled (``uniform``,
    ``stock``, or ``unknown`` when the state did not come through megatron-core's load), ``masters`` where they came
    from, ``groups`` each group's values after the load with the number of the saved group they came from,
    ``ties_resynced`` how many model weights were rewritten so that the masters are exact: rounding ties, and whatever
    else disagreed.
    """

    source: str
    checkpoint: str | None
    step: int
    parameters: int
    elements: int
    groups: tuple[Mapping[str, Any], ...]
    folded_groups: tuple[int, ...]
    key_style: str
    masters: str
    ties_resynced: int

    def to_json(self) -> dict[str, Any]:
        """Return plain values only."""
        return asdict(self)

    def summary(self) -> str:
        """Return the log message."""
        where = f" from {self.checkpoint}" if self.checkpoint else ""
        lines = [
            f"distributed_fused_adam_bridge: restored the state of {self.source}{where}: step {self.step}, "
            f"{self.parameters} parameters, {self.elements} elements on this rank; masters from {self.masters} "
            f"(key style {self.key_style}), {self.ties_resynced} model weights set to the masters' rounding",
        ]
        for number, group in enumerate(self.groups):
            origin = "this run" if group["saved_group"] is None else f"saved group {group['saved_group']}"
            lines.append(
                f"  group {number} (values of {origin}): {group['parameters']} parameters, lr {group['lr']:g}, "
                f"weight_decay {group['weight_decay']:g}, betas {tuple(group['betas'])}, eps {group['eps']:g}"
            )
        if self.folded_groups:
            lines.append(f"  saved expert groups {list(self.folded_groups)} are part of these groups now")
        return "\n".join(lines)
