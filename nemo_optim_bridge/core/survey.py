"""Read every element of a checkpoint once: digests and health in the same pass, in a few blocks of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from nemo_optim_bridge.core.checkpoint import MASTER, MODEL_STATES, WEIGHT, Checkpoint
from nemo_optim_bridge.core.fingerprint import Fingerprint, TensorDigest, combine
from nemo_optim_bridge.core.health import FIRST_MOMENTS, SECOND_MOMENTS, Finding, RoundingScan, TensorScan, cold, judge
from nemo_optim_bridge.core.manifest import ITEMSIZE, TensorKey
from nemo_optim_bridge.core.store import FileStore
from nemo_optim_bridge.core.whole import WholeTensors, plan_whole, whole_bytes

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Survey:
    """What a pass over a checkpoint found: its fingerprint, what was seen in each tensor, and what is wrong."""

    fingerprint: Fingerprint | None
    scans: Mapping[TensorKey, TensorScan] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


def survey(
    checkpoint: Checkpoint,
    store: FileStore,
    *,
    digests: bool = True,
    scan: bool = True,
    progress: Progress | None = None,
) -> Survey:
    """Read a checkpoint once; called by one process.

    Args:
        store: of the checkpoint's manifest.
        digests: hash every tensor.
        scan: look at every element for NaN, infinity, negative second moments and weights that are no rounded master.
        progress: called with bytes done and bytes in total.

    Raises MissingSourceError when a tensor has a hole, CorruptFileError when a file cannot be read.
    """
    plan = plan_whole(checkpoint.manifest)
    numbers = {spec.key: number for number, spec in enumerate(checkpoint.manifest.tensors)}
    total = whole_bytes(checkpoint.manifest)
    hashes: dict[TensorKey, TensorDigest] = {}
    scans: dict[TensorKey, TensorScan] = {}
    findings: list[Finding] = []
    done = 0
    whole = WholeTensors(plan, store)
    for members in _together(checkpoint, numbers):
        specs = [whole.specs[number] for number in members]
        rounding = RoundingScan()
        for start, blocks in whole.blocks(members):
            for spec, block in zip(specs, blocks, strict=True):
                if digests:
                    hashes.setdefault(spec.key, TensorDigest(spec)).add(block.data)
                if scan and spec.key.state not in MODEL_STATES:
                    scans.setdefault(spec.key, TensorScan()).add(spec, start, block)
                done += len(block)
            if scan and len(blocks) == 2:
                rounding.add(specs[0], start, blocks[0], blocks[1])
            if progress:
                progress(done, total)
        findings.extend(rounding.finding(specs[0].key.fqn))
        for spec in specs:
            if digests and not prod(spec.shape):
                hashes[spec.key] = TensorDigest(spec)
    found = combine({key: digest.hexdigest() for key, digest in hashes.items()}, checkpoint.scalars)
    verdicts = judge(scans, checkpoint.scalars) if scan else ()
    return Survey(found if digests else None, scans, (*verdicts, *findings))


def _together(checkpoint: Checkpoint, numbers: Mapping[TensorKey, int]) -> list[list[int]]:
    """Return tensor numbers in the manifest's order; a float32 master and its bfloat16 weight are read side by side."""
    specs = checkpoint.manifest.tensors
    weight_of: dict[int, int] = {}
    for key, number in numbers.items():
        weight = numbers.get(TensorKey(key.fqn, WEIGHT)) if key.state == MASTER else None
        if weight is not None and (specs[number].dtype, specs[weight].dtype) == ("float32", "bfloat16"):
            weight_of[number] = weight
    with_master = set(weight_of.values())
    return [
        [number, weight_of[number]] if number in weight_of else [number]
        for number in numbers.values()
        if number not in with_master
    ]


def cold_findings(checkpoint: Checkpoint, store: FileStore) -> Iterator[Finding]:
    """Yield a finding when steps were taken and yet all moments are zero; stops at the first element that is not."""
    steps = [values.get("step") or 0 for values in checkpoint.scalars.values()]
    moments = {spec.key for spec in checkpoint.manifest.tensors if spec.key.state in FIRST_MOMENTS | SECOND_MOMENTS}
    if not moments or max(steps, default=0) <= 0:
        return
    whole = WholeTensors(plan_whole(checkpoint.manifest.restrict(moments)), store)
    for number, spec in enumerate(whole.specs):
        for _, (block,) in whole.blocks([number]):
            if np.count_nonzero(block.view(f"u{ITEMSIZE[spec.dtype]}") << 1):  # the sign of zero does not count
                return
    yield cold(max(steps))
