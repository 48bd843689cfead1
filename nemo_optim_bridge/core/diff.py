"""Say how two checkpoints differ, whatever their topologies, formats and optimizer types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from nemo_optim_bridge.core.checkpoint import Checkpoint
from nemo_optim_bridge.core.compare import Difference, Pairs, compare
from nemo_optim_bridge.core.manifest import Manifest, TensorKey, TensorSpec
from nemo_optim_bridge.core.plan import make_plan
from nemo_optim_bridge.core.share import own_share
from nemo_optim_bridge.core.store import FileStore
from nemo_optim_bridge.core.team import Progress, Team, ignore


@dataclass(frozen=True, slots=True)
class ScalarDifference:
    """A step, hyperparameter or number of the run that differs; ``fqn`` is None for the run's."""

    fqn: str | None
    name: str
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class Diff:
    """Everything in which two checkpoints differ; tensors bit for bit, each listed once, at its worst."""

    num_tensors: int
    num_elements: int
    only_left: tuple[TensorKey, ...]
    only_right: tuple[TensorKey, ...]
    mismatched: tuple[tuple[TensorKey, str, str], ...]  # dtype and shape on either side
    tensors: tuple[Difference, ...]
    scalars: tuple[ScalarDifference, ...]

    @property
    def same(self) -> bool:
        """Tell whether nothing differs."""
        return not (self.only_left or self.only_right or self.mismatched or self.tensors or self.scalars)

    def to_json(self) -> dict[str, Any]:
        """Return the differences under the field names of ``--json``."""
        return {
            "same": self.same,
            "num_tensors": self.num_tensors,
            "num_elements": self.num_elements,
            "only_left": list(map(str, self.only_left)),
            "only_right": list(map(str, self.only_right)),
            "mismatched": [{"key": str(key), "left": a, "right": b} for key, a, b in self.mismatched],
            "tensors": [{**asdict(found), "key": str(found.key)} for found in self.tensors],
            "scalars": [asdict(found) for found in self.scalars],
        }

    def lines(self) -> Iterator[str]:
        """Yield the differences in words, the gravest first."""
        for keys, side in ((self.only_left, "first"), (self.only_right, "second")):
            for key in keys:
                yield f"{key}: only in the {side}"
        for key, left, right in self.mismatched:
            yield f"{key}: {left} and {right}"
        for found in self.tensors:
            yield (
                f"{found.key}: {found.num_elements} elements differ, by up to {found.max_abs:g} at "
                f"{list(found.position)} (relative {found.max_rel:.2g}): {found.left_file} and {found.right_file}"
            )
        for scalar in self.scalars:
            yield f"{scalar.fqn or 'run'}: {scalar.name} is {scalar.left} and {scalar.right}"


def diff(left: Checkpoint, right: Checkpoint, team: Team, progress: Progress = ignore) -> Diff:
    """Compare all tensors that both have, and all scalars per parameter; replicas within either count as well.

    Called by all members of a team, each of which compares a share. Raises CheckpointError when one cannot be read.
    """
    ours, theirs = ({spec.key: spec for spec in side.manifest.tensors} for side in (left, right))
    common = [key for key in ours if key in theirs]
    equal = [key for key in common if ours[key] == theirs[key]]
    mismatched = [(key, _shown(ours[key]), _shown(theirs[key])) for key in sorted(set(common) - set(equal))]
    return Diff(
        num_tensors=len(equal),
        num_elements=sum(prod(ours[key].shape) for key in equal),
        only_left=tuple(sorted(ours.keys() - theirs)),
        only_right=tuple(sorted(theirs.keys() - ours)),
        mismatched=tuple(mismatched),
        tensors=tuple(_tensor_differences(left.manifest, right.manifest, set(equal), team, progress)),
        scalars=tuple(_scalar_differences(left, right)),
    )


def _shown(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def _tensor_differences(
    left: Manifest, right: Manifest, keys: set[TensorKey], team: Team, progress: Progress
) -> list[Difference]:  # fmt: skip
    """Return one difference per tensor: every box of the second against the first, and the first's own replicas."""
    mine = own_share(right.restrict(keys), team)

    def make(report: Progress) -> Callable[[Pairs], list[Difference]]:
        one, two = FileStore.of(left), FileStore.of(right)

        def differences(part: Pairs) -> list[Difference]:
            found = list(compare(part, one, one if part.right is left else two))
            report(part.num_bytes())
            return found

        return differences

    def work() -> list[list[Difference]]:
        plan = make_plan(left, mine)
        parts = [*Pairs.of_plan(plan).parts(), *Pairs.of_replicas(plan).parts()]
        return team.local.map(make, parts, [part.num_bytes() for part in parts], progress)

    found: dict[TensorKey, Difference] = {}
    for part in (part for share in team.gather(work) for part in share):
        for difference in part:
            found[difference.key] = _worse(found.get(difference.key), difference)
    for side in (left, right):
        team.lead(FileStore.of(side).check_unchanged)
    return sorted(found.values(), key=lambda difference: -difference.max_abs)


def _worse(known: Difference | None, new: Difference) -> Difference:
    if known is None:
        return new
    worst = known if known.max_abs >= new.max_abs else new
    return replace(worst, num_elements=known.num_elements + new.num_elements, max_rel=max(known.max_rel, new.max_rel))


def _scalar_differences(left: Checkpoint, right: Checkpoint) -> Iterator[ScalarDifference]:
    sides: list[tuple[str | None, Mapping[str, Any], Mapping[str, Any]]] = [(None, left.shared, right.shared)]
    sides += [(fqn, ours, right.scalars[fqn]) for fqn, ours in left.scalars.items() if fqn in right.scalars]
    for fqn, ours, theirs in sides:
        for name in sorted({*ours, *theirs}):
            if not _same(ours.get(name), theirs.get(name)):
                yield ScalarDifference(fqn, name, ours.get(name), theirs.get(name))


def _same(left: Any, right: Any) -> bool:
    """Tell whether two values are equal, a list and a tuple of equal items being the same."""
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return left.hex() == right.hex()  # NaN is the same as NaN, and -0.0 another number than 0.0
    return bool(left == right)
