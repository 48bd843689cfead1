"""Re-shard a nanotron checkpoint: plan from headers, check, then write a complete directory or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_optim_bridge.core.checkpoint import Checkpoint
from nemo_optim_bridge.core.compare import Pairs, require_equal_replicas
from nemo_optim_bridge.core.gather import STAGING_BYTES
from nemo_optim_bridge.core.manifest import BoolArray
from nemo_optim_bridge.core.output import Layout, OutputFile
from nemo_optim_bridge.core.plan import Plan, make_plan
from nemo_optim_bridge.core.publish import check_output, new_directory
from nemo_optim_bridge.core.receipt import FILE_NAME as RECEIPT_NAME
from nemo_optim_bridge.core.receipt import encode, make_receipt
from nemo_optim_bridge.core.store import FileStore
from nemo_optim_bridge.core.survey import Survey, survey_warm
from nemo_optim_bridge.core.team import Progress as Meter
from nemo_optim_bridge.core.team import Team, Workers, ignore
from nemo_optim_bridge.core.whole import whole_bytes
from nemo_optim_bridge.core.write import WINDOW_BYTES, share_files, write_files
from nemo_optim_bridge.errors import OutputError, TargetError
from nemo_optim_bridge.formats.crcs import require_valid_crcs
from nemo_optim_bridge.formats.nanotron.checkpoint import NanotronCheckpoint
from nemo_optim_bridge.formats.nanotron.dialects import find_dialect
from nemo_optim_bridge.formats.nanotron.reader import read_checkpoint, resolve
from nemo_optim_bridge.formats.nanotron.target_spec import TargetSpec
from nemo_optim_bridge.formats.nanotron.view import as_checkpoint
from nemo_optim_bridge.formats.nanotron.writer import Target
from nemo_optim_bridge.formats.topology import Topology

REPLICA_POLICIES = ("error", "lowest-rank")
#: Called with the name of a stage and its bytes in total; what it returns is called with bytes done.
Progress = Callable[[str, int], Meter]


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may choose. None means: as in the source."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    zero_stage: int | None = None
    dialect: str | None = None
    layers_per_stage: tuple[int, ...] | None = None
    like: Path | None = None
    vocab_size: int | None = None
    replicas: str = "error"
    check_crcs: bool = True
    receipt: bool = True
    allow_cold: bool = False
    overwrite: bool = False
    fsync: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Reshard:
    """A re-shard that was planned from headers alone: what it reads, writes and remarks. ``run`` does it.

    Every rank of ``team`` has one, with the ``files`` that it has a part in and a plan for those; ``writers`` are the
    ranks that write each of them. ``totals`` are sums over all files, each counted once. ``replicas`` are this rank's
    share of those to compare.
    """

    source: NanotronCheckpoint
    target: Target
    files: tuple[OutputFile, ...]
    writers: tuple[range, ...]
    plan: Plan
    replicas: Plan
    totals: Mapping[str, int]
    out: Path
    options: Options
    team: Team

    def summary(self) -> dict[str, Any]:
        """Return the plan in numbers, under the field names of ``--json``."""
        return {
            "source": str(self.source.path),
            "output": str(self.out),
            "source_topology": describe(self.source.topology, self.source.zero_stage, self.source.dialect.name),
            "target_topology": describe(
                self.target.spec.topology, self.target.spec.zero_stage, self.target.spec.dialect.name
            ),
            "files_to_read": len(self.source.manifest.buffers.files),
            "files_to_write": len(self.target.outlines),
            "bytes_to_read": self._bytes_to_read(),
            "bytes_to_write": self.totals["bytes_to_write"],
            "pieces": self.totals["pieces"],
            "replicas": self.totals["replicas"],
            "peak_memory_bytes": WINDOW_BYTES + 4 * STAGING_BYTES + 150 * self.totals["most_pieces"],
            "remarks": [*self.source.remarks, *self.target.remarks],
            "problems": list(self.source.problems),
        }

    def _bytes_to_read(self) -> int:
        """Return the bytes that ``run`` reads, each as often as it is read: checked, compared, hashed, and copied."""
        num_bytes = self.totals["bytes_copied"]
        if self.options.check_crcs:
            num_bytes += sum(path.stat().st_size for path in self.source.torch_files)
        if self.options.replicas == "error":
            num_bytes += 2 * self.totals["replica_bytes"]
        if self.options.receipt:
            num_bytes += whole_bytes(self.source.manifest)
        return num_bytes

    def run(self, progress: Progress = lambda stage, total: ignore) -> dict[str, Any]:
        """Check the source's bytes, write the target, and rename it into place; return what was found on the way.

        Called by all ranks of the team. ``progress`` is called with the name of each stage and its bytes; what it
        returns is called with bytes done.

        Raises one BridgeError, on every rank; the source is untouched and the output absent then.
        """
        team = self.team
        source = as_checkpoint(self.source)
        if self.options.check_crcs:
            checked = self.source.torch_files
            total = sum(path.stat().st_size for path in checked)
            require_valid_crcs(checked, team, progress("checking", total))
        if self.options.replicas == "error":
            report = progress("comparing replicas", Pairs.of_replicas(self.replicas).num_bytes())
            team.gather(lambda: require_equal_replicas(self.replicas, team.local, report))
        report = progress("hashing", whole_bytes(source.manifest)) if self.options.receipt else ignore
        surveyed = survey_warm(
            source, team, everything=self.options.receipt, allow_cold=self.options.allow_cold, progress=report
        )
        receipt = list(self._receipt(source, surveyed)) if team.is_leader else []
        files, writers = [*self.files, *receipt], [*self.writers, *(range(1) for _ in receipt)]
        with ExitStack() as stack:
            scratch = new_directory(self.out, overwrite=self.options.overwrite, fsync=self.options.fsync)
            folder = team.lead(lambda: stack.enter_context(scratch))
            report = progress("writing", sum(file.nbytes for file in files))
            write_files(folder, files, self.plan, team, fsync=self.options.fsync, progress=report, writers=writers)
            team.lead(FileStore.of(self.source.manifest).check_unchanged)
            team.lead(lambda: stack.pop_all().close())
        found: dict[str, Any] = {"findings": [finding.to_json() for finding in surveyed.findings]}
        if surveyed.fingerprint is not None:
            digests = surveyed.fingerprint.to_json()
            found.update((name, digest) for name, digest in digests.items() if name != "tensors")
        return found

    def _receipt(self, source: Checkpoint, surveyed: Survey) -> Iterator[OutputFile]:
        if not self.options.receipt:
            return
        spec = self.target.spec
        receipt = make_receipt(
            source,
            surveyed,
            target={
                "framework": "nanotron",
                "layout": spec.dialect.name,
                "topology": {**asdict(spec.topology), "zero_stage": spec.zero_stage},
            },
            vocab_size=self.source.true_vocab_size,
            replicas=self.totals["replicas"] if self.options.replicas == "error" else None,
            remarks=[*self.source.remarks, *self.target.remarks, *self.source.problems],
        )
        yield OutputFile(RECEIPT_NAME, Layout.of(encode(receipt)))


def plan_reshard(path: Path, out: Path, options: Options, team: Team | None = None) -> Reshard:
    """Plan a re-shard from headers alone.

    Args:
        team: the processes that share the work; all ranks call this. None is this process alone.

    Raises BridgeError, on all ranks, with every reason why it is not possible.
    """
    team = team or Workers(1)
    check_output(out, (resolve(path), *([options.like] if options.like else [])), overwrite=options.overwrite)
    if options.replicas not in REPLICA_POLICIES:
        raise TargetError(
            f"unknown replica policy {options.replicas!r}", hint=f"choose {' or '.join(REPLICA_POLICIES)}"
        )
    like = read_checkpoint(options.like) if options.like else None
    vocab_size = options.vocab_size
    source = read_checkpoint(path, vocab_size, team)
    if vocab_size is None and like is not None and like.facts.vocab_size < source.facts.vocab_size:
        source = read_checkpoint(path, like.facts.vocab_size, team)
    target = Target(source, _target_spec(source, like, options))
    if options.overwrite:
        _refuse_to_replace_what_is_read(source, out)
    writers = share_files([outline.nbytes for outline in target.outlines], team.num_ranks)
    mine = [number for number, ranks in enumerate(writers) if team.rank in ranks]

    planned: list[tuple[tuple[OutputFile, ...], Plan]] = []

    def plan() -> BoolArray:
        files, manifest = target.lay_out(mine)
        planned.append((files, make_plan(source.manifest, manifest)))
        return planned[0][1].source_tensors()

    known = team.gather(plan)
    ((files, own),) = planned
    replicas = own.compare_only(_compared_here(known, team))
    ranks = tuple(writers[number] for number in mine)
    totals = _totals(files, ranks, own, replicas, team)
    return Reshard(source, target, files, ranks, own, replicas, totals, out, options, team)


def _compared_here(known: Sequence[BoolArray], team: Team) -> BoolArray:
    """Tell which source tensors this rank compares the replicas of: those of several ranks' plans in turn."""
    holders = np.stack(known)
    turn = np.arange(holders.shape[1]) % np.maximum(holders.sum(axis=0), 1)
    before = holders[: team.rank].sum(axis=0)
    chosen: BoolArray = holders[team.rank] & (before == turn)
    return chosen


def _totals(
    files: Sequence[OutputFile], writers: Sequence[range], plan: Plan, replicas: Plan, team: Team
) -> Mapping[str, int]:
    """Return sums over the files of all ranks, those with several writers counted once."""
    led = [file for file, ranks in zip(files, writers, strict=True) if ranks[0] == team.rank]
    buffers = [file.first_buffer + payload for file in led for payload in range(len(file.layout.sizes))]
    counts = plan.buffer_starts[1:] - plan.buffer_starts[:-1]
    pairs = Pairs.of_replicas(replicas)
    mine = {
        "bytes_to_write": sum(file.nbytes for file in led),
        "bytes_copied": int(plan.buffer_bytes_read()[buffers].sum()),
        "pieces": int(counts[buffers].sum()),
        "replicas": len(pairs),
        "replica_bytes": pairs.num_bytes(),
    }
    found = team.gather(lambda: (mine, plan.pieces))
    sums = {name: sum(counts[name] for counts, _ in found) for name in mine}
    return {**sums, "most_pieces": max(pieces for _, pieces in found)}


def _refuse_to_replace_what_is_read(source: NanotronCheckpoint, out: Path) -> None:
    """Raise OutputError when a link of the source leads to a file below the output that is to be replaced."""
    replaced = out.resolve()
    folders = {Path(file).parent for file in source.manifest.identities}
    for folder in folders | {source.path / "lr_scheduler"}:
        if folder.resolve().is_relative_to(replaced):
            raise OutputError(
                f"a link in the source leads into it: {folder}", path=out, hint="choose a directory beside the source"
            )


def _target_spec(source: NanotronCheckpoint, like: NanotronCheckpoint | None, options: Options) -> TargetSpec:
    given = {"tp": options.tp, "pp": options.pp, "dp": options.dp, "ep": options.ep}
    if options.layers_per_stage is not None and options.pp is None:
        given["pp"] = len(options.layers_per_stage)
    topology = Topology(**{**asdict(source.topology), **{axis: n for axis, n in given.items() if n is not None}})
    zero_stage = source.zero_stage if options.zero_stage is None else options.zero_stage
    if zero_stage not in (0, 1):
        raise TargetError(f"nanotron has no ZeRO stage {zero_stage}", hint="choose --zero 0 or --zero 1")
    if like is not None and options.layers_per_stage is not None:
        raise TargetError("--like and --pp-split both say how layers are split", hint="give one of them")
    dialect = source.dialect if options.dialect is None else find_dialect(options.dialect)
    return TargetSpec(topology, zero_stage, dialect, options.layers_per_stage, like)


def describe(topology: Topology, zero_stage: int, dialect: str) -> Mapping[str, Any]:
    """Return a topology under the field names of ``--json``."""
    return {**asdict(topology), "zero_stage": zero_stage, "dialect": dialect}
