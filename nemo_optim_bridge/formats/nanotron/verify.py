"""Tell whether two checkpoints hold the same optimizer state, whatever their topologies and dialects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from nemo_optim_bridge.core.compare import Difference, Pairs, compare
from nemo_optim_bridge.core.plan import make_plan
from nemo_optim_bridge.core.store import FileStore
from nemo_optim_bridge.formats.nanotron.layout import padded_vocab_size
from nemo_optim_bridge.formats.nanotron.reader import NanotronCheckpoint, read_checkpoint


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


def verify(left: Path, right: Path, vocab_size: int | None = None) -> Verification:
    """Compare every tensor bit for bit, and every scalar and hyperparameter per parameter.

    Vocabulary padding is left out: rows beyond ``vocab_size``, or, when that is None, beyond the smaller stored
    vocabulary where the larger one is what nanotron pads it to.
    """
    a, b = read_checkpoint(left, vocab_size), read_checkpoint(right, vocab_size)
    remarks: list[str] = []
    if vocab_size is None:
        small, large = sorted((a, b), key=lambda checkpoint: checkpoint.facts.vocab_size)
        true, stored = small.facts.vocab_size, large.facts.vocab_size
        if true < stored == padded_vocab_size(true, large.topology.tp, large.documents.vocab_multiple):
            remarks.append(f"{large.path}: vocabulary rows from {true} on are padding and were not compared")
            vocab_size = true
            a, b = (read_checkpoint(path, true) for path in (left, right))
    differences = [*_structure(a, b)]
    if not differences:
        differences = [*_scalars(a, b), *_tensors(a, b)]
    shapes = [spec.shape for spec in a.manifest.tensors]
    return Verification(len(shapes), sum(prod(shape) for shape in shapes), tuple(differences), tuple(remarks))


def _structure(a: NanotronCheckpoint, b: NanotronCheckpoint) -> Iterator[str]:
    """Yield tensors that only one side has, and differing shapes and dtypes."""
    left, right = ({spec.key: spec for spec in side.manifest.tensors} for side in (a, b))
    for key in sorted({*left, *right}):
        if key not in left or key not in right:
            yield f"{key}: only in {(a if key in left else b).path}"
        elif left[key] != right[key]:
            yield f"{key}: {left[key].dtype} {left[key].shape} and {right[key].dtype} {right[key].shape}"


def _scalars(a: NanotronCheckpoint, b: NanotronCheckpoint) -> Iterator[str]:
    """Yield differing steps, hyperparameters and lr scheduler entries, per parameter."""
    if a.tied != b.tied:
        yield f"embedding and lm_head are tied only in {(a if a.tied else b).path}"
    for fqn in a.hyperparameters:
        pairs = (
            (_numbers(a, fqn), _numbers(b, fqn)),
            (a.hyperparameters[fqn], b.hyperparameters.get(fqn, {})),
            (_scheduler_entry(a, fqn), _scheduler_entry(b, fqn)),
        )
        for left, right in pairs:
            for name in sorted({*left, *right}):
                if left.get(name) != right.get(name):
                    yield f"{fqn}: {name} is {left.get(name)} and {right.get(name)}"
    if a.scheduler is not None and b.scheduler is not None:
        for name in sorted({*a.scheduler.template, *b.scheduler.template}):
            one, two = (side.scheduler.template.get(name) for side in (a, b) if side.scheduler)
            if one != two:
                yield f"lr_scheduler: {name} is {one} and {two}"
    elif a.scheduler is not b.scheduler:
        yield f"lr_scheduler: only in {(a if a.scheduler else b).path}"


def _numbers(checkpoint: NanotronCheckpoint, fqn: str) -> Mapping[str, Any]:
    return {key: entry.value for key, entry in checkpoint.states.get(fqn, {}).items() if not isinstance(entry, str)}


def _scheduler_entry(checkpoint: NanotronCheckpoint, fqn: str) -> Mapping[str, Any]:
    """Return a parameter's scheduler entry; an absent lambda is the same whether spelled None or {}."""
    if checkpoint.scheduler is None:
        return {}
    entry = checkpoint.scheduler.entries.get(fqn, checkpoint.scheduler.common) or {}
    return {key: value or None if key == "lr_lambdas" else value for key, value in entry.items()}


def _tensors(a: NanotronCheckpoint, b: NanotronCheckpoint) -> Iterator[str]:
    """Yield differing tensors: each box of the second against the first, and the first's replicas among themselves."""
    plan = make_plan(a.manifest, b.manifest)
    found: dict[tuple[str, str], Difference] = {}
    with FileStore(a.manifest.buffers) as left, FileStore(b.manifest.buffers) as right:
        for pairs, other in ((Pairs.of_plan(plan), right), (Pairs.of_replicas(plan), left)):
            for difference in compare(pairs, left, other):
                known = found.get(difference.key)
                if known is None or (difference.max_abs or 0) > (known.max_abs or 0):
                    found[difference.key] = difference
        left.check_unchanged()
        right.check_unchanged()
    for key, worst in sorted(found.items()):
        yield (
            f"{key[0]}|{key[1]}: differs by up to {worst.max_abs:g} at {list(worst.position)} "
            f"({worst.left_file} and {worst.right_file})"
        )
