"""Find cold and damaged optimizer state by looking at every element."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.gather import as_floats, round_to_bfloat16
from nemo_optim_bridge.core.manifest import TensorKey, TensorSpec
from nemo_optim_bridge.core.whole import position
from nemo_optim_bridge.errors import ColdOptimizerError

#: Names of second moments: never negative in a sound optimizer.
SECOND_MOMENTS = frozenset({"exp_avg_sq"})
FIRST_MOMENTS = frozenset({"exp_avg"})
Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class TensorScan:
    """What was seen in one tensor. ``first_bad`` is the global index of the first offending element."""

    sum_abs: float = 0.0
    has_nonzero: bool = False
    num_nonfinite: int = 0
    num_negative: int = 0
    first_bad: tuple[int, ...] | None = None

    def add(self, spec: TensorSpec, start: int, block: Bytes) -> None:
        """Look at the next block, ``start`` being its first element's number."""
        values = _values(block, spec.dtype)
        magnitude = np.abs(values)
        with np.errstate(over="ignore", invalid="ignore"):
            total = float(np.add.reduce(magnitude, dtype=magnitude.dtype))
        self.has_nonzero = self.has_nonzero or bool(values.any())
        if np.isfinite(total):
            self.sum_abs += total
        else:
            finite = np.isfinite(values)
            self.num_nonfinite += int(len(values) - np.count_nonzero(finite))
            self.sum_abs += float(np.add.reduce(magnitude[finite], dtype=np.float64))
            self._remember(spec, start, ~finite)
        if spec.key.state in SECOND_MOMENTS and len(values) and not values.min() >= 0:
            negative = values < 0
            self.num_negative += int(np.count_nonzero(negative))
            self._remember(spec, start, negative)

    def _remember(self, spec: TensorSpec, start: int, bad: npt.NDArray[np.bool_]) -> None:
        if self.first_bad is None and bad.any():
            self.first_bad = position(spec.shape, start + int(bad.argmax()))


def _values(block: Bytes, dtype: str) -> npt.NDArray[Any]:
    if dtype in ("float32", "float64"):
        return block.view(np.dtype(dtype))
    if dtype in ("bfloat16", "float16"):
        return as_floats(block.view(np.uint16), dtype).astype(np.float32)
    return as_floats(block, dtype) if dtype.startswith("float8") else block.view(np.dtype(dtype)).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with the values: what kind, how many elements, and where first."""

    kind: str  # cold, nonfinite, negative, unrounded, steps
    message: str
    key: str | None = None
    count: int = 0
    position: tuple[int, ...] | None = None

    def in_words(self) -> str:
        """Return one line about the finding."""
        where = f" from {list(self.position)} on" if self.position is not None else ""
        return (f"{self.key}: " if self.key else "") + self.message + where

    def to_json(self) -> dict[str, Any]:
        """Return the finding under the field names of ``--json``."""
        return asdict(self)


def cold(step: float) -> Finding:
    """Return the finding of an optimizer whose moments are all zero although it has taken steps."""
    return Finding("cold", f"all moments are zero at step {step:g}: a cold optimizer")


def judge(scans: Mapping[TensorKey, TensorScan], scalars: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield what is wrong with scanned tensors and their steps."""
    for key, scan in scans.items():
        if scan.num_nonfinite:
            message = f"{scan.num_nonfinite} elements are NaN or infinite"
            yield Finding("nonfinite", message, str(key), scan.num_nonfinite, scan.first_bad)
        if scan.num_negative:
            message = f"{scan.num_negative} elements of a second moment are negative"
            yield Finding("negative", message, str(key), scan.num_negative, scan.first_bad)
    moments = {key: scan for key, scan in scans.items() if key.state in FIRST_MOMENTS | SECOND_MOMENTS}
    steps = {fqn: values["step"] for fqn, values in scalars.items() if values.get("step") is not None}
    if moments and max(steps.values(), default=0) > 0 and not any(scan.has_nonzero for scan in moments.values()):
        yield cold(max(steps.values()))
    if len(set(steps.values())) > 1:
        low, high = (pick(steps, key=lambda fqn: steps[fqn]) for pick in (min, max))
        yield Finding(
            "steps",
            f"steps differ: {steps[low]:g} for {low}, {steps[high]:g} for {high}",
            None,
            len(set(steps.values())),
        )


@dataclass(slots=True)
class RoundingScan:
    """How many bfloat16 weights are their fp32 master by neither rounding, to even or half up, and where first."""

    count: int = 0
    first: tuple[int, ...] | None = None

    def add(self, spec: TensorSpec, start: int, master: Bytes, weight: Bytes) -> None:
        """Look at the next block of a master and its weight."""
        bits, stored = master.view(np.uint32), weight.view(np.uint16)
        if _is_nearest(bits, stored):
            return
        wrong = round_to_bfloat16(bits) != stored
        if wrong.any():
            half_up = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
            wrong &= (half_up != stored) & ((bits & np.uint32(0x7FFFFFFF)) <= np.uint32(0x7F800000))
        if wrong.any():
            self.first = self.first or position(spec.shape, start + int(wrong.argmax()))
            self.count += int(np.count_nonzero(wrong))

    def finding(self, fqn: str) -> Iterator[Finding]:
        """Yield a finding when there is something to tell."""
        if self.count:
            message = f"{self.count} elements of the weight are not their fp32 master rounded"
            yield Finding("unrounded", message, fqn, self.count, self.first)


def _is_nearest(bits: npt.NDArray[np.uint32], stored: npt.NDArray[np.uint16]) -> bool:
    """Tell quickly that all weights are half a step or less from their masters; a NaN master may be next to any."""
    distance = stored.astype(np.uint32)
    distance <<= np.uint32(16)
    np.subtract(bits, distance, out=distance)
    distance += np.uint32(0x8000)
    farthest = distance.max(initial=0)
    if farthest > 0x10000:
        return False
    return farthest < 0x10000 or not (stored[distance == 0x10000] & np.uint16(1)).any()  # a tie goes down to even only


def require_warm(findings: Iterable[Finding], path: Path) -> None:
    """Raise ColdOptimizerError for a cold optimizer: resuming it would not be what was saved."""
    for finding in findings:
        if finding.kind == "cold":
            raise ColdOptimizerError(
                finding.message, path=path, hint="resume from another step; --allow-cold carries it as it is"
            )
