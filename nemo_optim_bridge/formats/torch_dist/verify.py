"""Tell whether two ``torch_dist`` checkpoints hold the same optimizer state, whatever optimizers they are for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from nemo_optim_bridge.core.compare import Difference, Pairs, compare
from nemo_optim_bridge.core.manifest import TensorKey
from nemo_optim_bridge.core.plan import make_plan
from nemo_optim_bridge.core.store import FileStore
from nemo_optim_bridge.formats.torch_dist.manifest import TorchDistState, read_manifest
from nemo_optim_bridge.formats.torch_dist.membership import Rule


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome: ``differences`` in words, empty when the two are the same; ``remarks`` on what was left out."""

    num_tensors: int
    num_elements: int
    differences: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Tell whether nothing differs."""
        return not self.differences


def verify(left: Path, right: Path, no_decay: tuple[str, ...] = ()) -> Verification:
    """Compare masters, moments and weights bit for bit, and step and hyperparameters per parameter.

    Which parameters have no weight decay is decided by one rule for both: ``no_decay``, or that of the first one's
    framework. Raises CheckpointError kinds.
    """
    a = read_manifest(left, rule=Rule.of("", no_decay) if no_decay else None, bare_names=True)
    b = read_manifest(right, rule=a.rule, bare_names=True)
    differences = [*_structure(a, b)]
    if not differences:
        differences = [*_scalars(a, b), *_tensors(a, b)]
    shapes = [spec.shape for spec in a.manifest.tensors]
    remarks = (f"groups were told apart by this rule: {a.rule}",)
    return Verification(len(shapes), sum(map(prod, shapes)), tuple(differences), remarks)


def _structure(a: TorchDistState, b: TorchDistState) -> Iterator[str]:
    """Yield tensors that only one side has, and differing shapes and dtypes."""
    left, right = ({spec.key: spec for spec in side.manifest.tensors} for side in (a, b))
    for key in sorted({*left, *right}):
        if key not in left or key not in right:
            yield f"{key}: only in {(a if key in left else b).checkpoint.path}"
        elif left[key] != right[key]:
            one, two = left[key], right[key]
            yield f"{key}: {one.dtype} {one.shape} and {two.dtype} {two.shape}"


def _scalars(a: TorchDistState, b: TorchDistState) -> Iterator[str]:
    """Yield differing steps and hyperparameters, per parameter."""
    for fqn, values in a.hyperparameters.items():
        others = b.hyperparameters[fqn]
        if a.manifest.steps[fqn] != b.manifest.steps[fqn]:
            yield f"{fqn}: step {a.manifest.steps[fqn]:g} and {b.manifest.steps[fqn]:g}"
        for name in sorted({*values, *others}):
            if values.get(name) != others.get(name):
                yield f"{fqn}: {name} {values.get(name)} and {others.get(name)}"


def _tensors(a: TorchDistState, b: TorchDistState) -> Iterator[str]:
    plan = make_plan(a.manifest, b.manifest)
    worst: dict[TensorKey, Difference] = {}
    with FileStore(a.manifest.buffers) as left, FileStore(b.manifest.buffers) as right:
        for difference in compare(Pairs.of_plan(plan), left, right):
            known = worst.get(difference.key)
            if known is None or (difference.max_abs or 0) > (known.max_abs or 0):
                worst[difference.key] = difference
        left.check_unchanged()
        right.check_unchanged()
    for key, found in sorted(worst.items()):
        yield (
            f"{key}: differs by up to {found.max_abs:g} at {list(found.position)} "
            f"({found.left_file} and {found.right_file})"
        )
