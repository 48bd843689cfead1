"""Read every element of a checkpoint once: digests and health in the same pass, in a few blocks of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from nemo_optim_bridge.core.checkpoint import MASTER, MODEL_STATES, WEIGHT, Checkpoint
from nemo_optim_bridge.core.fingerprint import Fingerprint, TensorDigest, combine
from nemo_optim_bridge.core.health import (
    FIRST_MOMENTS,
    SECOND_MOMENTS,
    Finding,
    RoundingScan,
    TensorScan,
    cold,
    judge,
    require_warm,
)
from nemo_optim_bridge.core.manifest import ITEMSIZE, Manifest, TensorKey
from nemo_optim_bridge.core.share import own_share
from nemo_optim_bridge.core.store import FileStore
from nemo_optim_bridge.core.team import Progress, Team, ignore
from nemo_optim_bridge.core.whole import WholeTensors, plan_whole


@dataclass(frozen=True, slots=True)
class Survey:
    """What a pass over a checkpoint found: its fingerprint, what was seen in each tensor, and what is wrong."""

    fingerprint: Fingerprint | None
    scans: Mapping[TensorKey, TensorScan] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    digests: Mapping[TensorKey, str]
    scans: Mapping[TensorKey, TensorScan]
    findings: tuple[Finding, ...]


def survey(
    checkpoint: Checkpoint, team: Team, *, digests: bool = True, scan: bool = True, progress: Progress = ignore
) -> Survey:  # fmt: skip
    """Read a checkpoint once; called by all members of a team, each of which reads a share of the tensors.

    Args:
        digests: hash every tensor.
        scan: look at every element for NaN, infinity, negative second moments and weights that are no rounded master.
        progress: called with bytes done since the last call.

    Raises MissingSourceError when a tensor has a hole, CorruptFileError when a file cannot be read.
    """
    manifest = own_share(checkpoint.manifest, team)

    def work() -> list[_Part]:
        plan = plan_whole(manifest)

        def make(report: Progress) -> Callable[[list[int]], _Part]:
            whole = WholeTensors(plan, FileStore.of(manifest))
            return lambda members: _survey_group(whole, members, digests=digests, scan=scan, progress=report)

        groups = _together(manifest)
        nbytes = plan.target.buffers.nbytes
        return team.local.map(make, groups, [int(nbytes[members].sum()) for members in groups], progress)

    parts = [part for share in team.gather(work) for part in share]
    scans = {key: found for part in parts for key, found in part.scans.items()}
    verdicts = judge(scans, checkpoint.scalars) if scan else ()
    hashes = {key: digest for part in parts for key, digest in part.digests.items()}
    return Survey(
        combine(hashes, checkpoint.scalars) if digests else None,
        scans,
        (*verdicts, *(finding for part in parts for finding in part.findings)),
    )


def _survey_group(
    whole: WholeTensors, members: list[int], *, digests: bool, scan: bool, progress: Progress
) -> _Part:  # fmt: skip
    """Read one tensor, or a master and its weight side by side."""
    specs = [whole.specs[number] for number in members]
    hashes = {spec.key: TensorDigest(spec) for spec in specs if digests}
    scans = {spec.key: TensorScan() for spec in specs if scan and spec.key.state not in MODEL_STATES}
    rounding = RoundingScan()
    for start, blocks in whole.blocks(members):
        for spec, block in zip(specs, blocks, strict=True):
            if spec.key in hashes:
                hashes[spec.key].add(block.data)
            if spec.key in scans:
                scans[spec.key].add(spec, start, block)
        if scan and len(blocks) == 2:
            rounding.add(specs[0], start, blocks[0], blocks[1])
        progress(sum(map(len, blocks)))
    found = tuple(rounding.finding(specs[0].key.fqn))
    return _Part({key: digest.hexdigest() for key, digest in hashes.items()}, scans, found)


def _together(manifest: Manifest) -> list[list[int]]:
    """Return tensor numbers in the manifest's order; a float32 master and its bfloat16 weight are read side by side."""
    specs = manifest.tensors
    numbers = manifest.index()
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


def survey_warm(
    checkpoint: Checkpoint, team: Team, *, everything: bool, allow_cold: bool, progress: Progress
) -> Survey:  # fmt: skip
    """Look at a checkpoint that is to be carried: at all of its values, or only whether they are cold.

    Raises ColdOptimizerError, unless ``allow_cold``: everything else is carried as it is and reported.
    """
    if everything:
        surveyed = survey(checkpoint, team, progress=progress)
    else:
        surveyed = Survey(None, findings=team.lead(lambda: tuple(cold_findings(checkpoint))))
    if not allow_cold:
        require_warm(surveyed.findings, checkpoint.path)
    return surveyed


def cold_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a finding when steps were taken and yet all moments are zero; stops at the first element that is not."""
    steps = [values.get("step") or 0 for values in checkpoint.scalars.values()]
    moments = {spec.key for spec in checkpoint.manifest.tensors if spec.key.state in FIRST_MOMENTS | SECOND_MOMENTS}
    if not moments or max(steps, default=0) <= 0:
        return
    part = checkpoint.manifest.restrict(moments)
    with FileStore.of(part) as store:
        whole = WholeTensors(plan_whole(part), store)
        for number, spec in enumerate(whole.specs):
            for _, (block,) in whole.blocks([number]):
                if np.count_nonzero(block.view(f"u{ITEMSIZE[spec.dtype]}") << 1):  # the sign of zero does not count
                    return
    yield cold(max(steps))
