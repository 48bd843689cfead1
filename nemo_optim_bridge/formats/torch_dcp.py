"""Write a checkpoint of any format as one that ``torch.distributed.checkpoint`` loads, and name its entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.checkpoint import MODEL_STATES, WEIGHT, Checkpoint
from nemo_optim_bridge.core.compare import Pairs, require_equal_replicas
from nemo_optim_bridge.core.execute import BufferFiller
from nemo_optim_bridge.core.gather import bounded_boxes
from nemo_optim_bridge.core.health import Finding
from nemo_optim_bridge.core.manifest import ITEMSIZE, Manifest, TensorSpec
from nemo_optim_bridge.core.output import Layout, OutputFile
from nemo_optim_bridge.core.plan import Plan, make_plan
from nemo_optim_bridge.core.publish import check_output, new_directory
from nemo_optim_bridge.core.receipt import FILE_NAME, encode, make_receipt
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.core.store import FileStore
from nemo_optim_bridge.core.survey import Survey, survey_warm
from nemo_optim_bridge.core.team import Progress, Team, Workers, ignore
from nemo_optim_bridge.core.whole import whole_bytes
from nemo_optim_bridge.core.write import write_files
from nemo_optim_bridge.errors import BridgeError, OutputError, TargetError, raise_all
from nemo_optim_bridge.formats.checkpoints import open_checkpoint
from nemo_optim_bridge.formats.crcs import require_valid_crcs
from nemo_optim_bridge.formats.torch_dcp_writer import DcpFile, DcpWriter, Piece, write_metadata

Rename = Callable[[str], str]
KeyPath = tuple[str, ...]
#: Called with a stage's name and its bytes; what it returns is called with bytes done.
Stages = Callable[[str, int], Progress]

#: Largest piece of a tensor in the written checkpoint, in bytes: as much is held in memory, and no more.
CHUNK_BYTES = 64 << 20
#: Bytes of tensors in a written file, about. Files are cut by the data alone, whoever writes them.
FILE_BYTES = 256 << 20
REPLICA_POLICIES = ("error", "lowest-rank")


@dataclass(frozen=True, slots=True, eq=False)
class Catalogue:
    """The entries of a checkpoint under the keys that torch.distributed.checkpoint knows them by.

    ``tensors`` are stored ones, ``steps`` 0-dim float32 tensors, ``values`` plain Python values. ``paths`` says where
    in a nested state dict each key lies; a key is its path joined by dots.

    ``model.<fqn>`` is a weight, ``optim.state.<fqn>.<state>`` a state (``fp32_param`` is the master, ``step`` among
    them), ``optim.param_groups.<fqn>.<name>`` a hyperparameter: the names that torch's own ``get_state_dict`` gives
    with ``flatten_optimizer_state_dict``, for ``{"model": ..., "optim": ...}``.
    """

    tensors: Mapping[str, TensorSpec]
    steps: Mapping[str, float]
    values: Mapping[str, Any]
    paths: Mapping[str, KeyPath]

    @classmethod
    def of(cls, manifest: Manifest, rename: Rename | None = None, *, model_state: str = WEIGHT) -> Catalogue:
        """Name all entries of a manifest.

        Args:
            rename: gives a parameter's name in the state dict; None keeps the checkpoint's.
            model_state: which state is ``model.<fqn>``: ``weight``, or ``fp32_param``, whose dtype is that of a model
                trained in fp32; then the rounded weights have no key.

        Raises TargetError when two entries get one key.
        """
        name = rename or (lambda fqn: fqn)
        tensors: dict[str, TensorSpec] = {}
        steps: dict[str, float] = {}
        values: dict[str, Any] = {}
        paths: dict[str, KeyPath] = {}
        problems: list[BridgeError] = []

        def enter(table: dict[str, Any], path: KeyPath, value: Any, fqn: str) -> None:
            key = ".".join(path)
            if key in paths:
                problems.append(TargetError(f"two entries would be called {key}", key=fqn, hint="change the renaming"))
            paths[key] = path
            table[key] = value

        for spec in manifest.tensors:
            fqn, state = spec.key
            if state == model_state:
                enter(tensors, ("model", name(fqn)), spec, fqn)
            elif state not in MODEL_STATES:
                enter(tensors, ("optim", "state", name(fqn), state), spec, fqn)
        for fqn, step in manifest.steps.items():
            enter(steps, ("optim", "state", name(fqn), "step"), step, fqn)
        for group in manifest.param_groups:
            for fqn in group.fqns:
                for option, value in group.hyperparameters.items():
                    enter(values, ("optim", "param_groups", name(fqn), option), value, fqn)
        raise_all(problems)
        return cls(tensors, steps, values, paths)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What ``plan_export`` is asked for; see ``export_dcp``."""

    rename: Rename | None = None
    model_state: str = WEIGHT
    vocab_size: int | None = None
    replicas: str = "error"
    check_crcs: bool = True
    receipt: bool = True
    allow_cold: bool = False
    overwrite: bool = False
    fsync: bool = True


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written: number of tensors, their bytes, remarks on the source, and what a receipt's survey found."""

    num_tensors: int
    num_bytes: int
    remarks: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """An export that was planned from headers alone; nothing is written yet. ``source`` is what is carried."""

    source: Checkpoint
    out: Path
    options: ExportOptions
    catalogue: Catalogue
    plan: Plan
    files: tuple[DcpFile, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that are written."""
        return self.plan.num_bytes

    def run(self, team: Team | None = None, progress: Stages = lambda stage, total: ignore) -> ExportReport:
        """Check the source's bytes, write all files, and rename the folder into place.

        Args:
            team: the processes that share the work; all members call this. None is this process alone.

        Raises one BridgeError, on every member; the output is then what it was.
        """
        team = team or Workers(1)
        manifest = self.source.manifest
        if self.options.check_crcs:
            files = [Path(file) for file in sorted({run.file for run in manifest.buffers}) if file.endswith(".pt")]
            total = sum(file.stat().st_size for file in files)
            require_valid_crcs(files, team, progress("checking", total))
        if self.options.replicas == "error":
            total = Pairs.of_replicas(self.plan).num_bytes()
            require_equal_replicas(self.plan, team, progress("comparing replicas", total))
        report = progress("hashing", whole_bytes(manifest)) if self.options.receipt else ignore
        surveyed = survey_warm(
            self.source, team, everything=self.options.receipt, allow_cold=self.options.allow_cold, progress=report
        )
        with ExitStack() as stack:
            scratch = new_directory(self.out, overwrite=self.options.overwrite, fsync=self.options.fsync)
            folder = team.lead(lambda: stack.enter_context(scratch))
            self._write(folder, surveyed, team, progress("writing", self.num_bytes))
            team.lead(FileStore.of(manifest).check_unchanged)
            team.lead(lambda: stack.pop_all().close())
        prints = surveyed.fingerprint.to_json() if surveyed.fingerprint else {}
        digests = {name: digest for name, digest in prints.items() if name != "tensors"}
        return ExportReport(
            len(self.catalogue.tensors), self.num_bytes, self.source.remarks, surveyed.findings, digests
        )  # fmt: skip

    def _write(self, folder: Path, surveyed: Survey, team: Team, progress: Progress) -> None:
        """Write all files below ``folder``; every member writes its share, the leader what describes them."""
        catalogue, fsync = self.catalogue, self.options.fsync

        def make(report: Progress) -> Callable[[DcpFile], Any]:
            filler = BufferFiller(self.plan, FileStore.of(self.plan.source))
            return DcpWriter(folder, catalogue.steps, catalogue.values, filler, report, fsync=fsync).write

        written = team.map(make, self.files, [file.nbytes for file in self.files], progress)
        team.lead(lambda: write_metadata(folder, self.files, written, catalogue.paths, fsync=fsync))
        if self.options.receipt:
            receipt = OutputFile(FILE_NAME, Layout.of(self._receipt(surveyed)))
            write_files(folder, [receipt], self.plan, team, fsync=fsync)

    def _receipt(self, surveyed: Survey) -> bytes:
        return encode(
            make_receipt(
                self.source,
                surveyed,
                target={"framework": "torch", "layout": "distributed.checkpoint", "topology": {}},
                vocab_size=self.options.vocab_size,
                replicas=len(self.plan.replicas) if self.options.replicas == "error" else None,
                remarks=[*self.source.remarks, *self.source.problems],
            )
        )


def plan_export(source: str | Path | Checkpoint, out: str | Path, options: ExportOptions) -> Export:
    """Plan an export from headers alone; raises BridgeError with every reason why it is not possible."""
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(Path(source), options.vocab_size)
    out = Path(out)
    check_output(out, (checkpoint.path,), overwrite=options.overwrite)
    if options.replicas not in REPLICA_POLICIES:
        raise TargetError(
            f"unknown replica policy {options.replicas!r}", hint=f"choose {' or '.join(REPLICA_POLICIES)}"
        )
    catalogue = Catalogue.of(checkpoint.manifest, options.rename, model_state=options.model_state)
    target, pieces = _lay_out(catalogue)
    plan = make_plan(checkpoint.manifest, target)
    carried = checkpoint.manifest.restrict({spec.key for spec in catalogue.tensors.values()})
    return Export(replace(checkpoint, manifest=carried), out, options, catalogue, plan, _cut(catalogue, pieces))


def export_dcp(
    source: str | Path | Checkpoint,
    out: str | Path,
    *,
    rename: Rename | None = None,
    model_state: str = WEIGHT,
    vocab_size: int | None = None,
    replicas: str = "error",
    check_crcs: bool = True,
    receipt: bool = True,
    allow_cold: bool = False,
    overwrite: bool = False,
    fsync: bool = True,
    team: Team | None = None,
    progress: Stages = lambda stage, total: ignore,
) -> ExportReport:
    """Write a checkpoint so that plain ``torch.distributed.checkpoint.load`` reads it.

    ``Catalogue`` says under which keys. Tensors are written whole, in chunks, of which each process holds one in memory
    at a time; torch's own writer makes the files. The files are the same, byte for byte, however many processes share
    the work.

    Args:
        source: a checkpoint directory of any known format, or one that was opened.
        out: the directory to make.
        rename, model_state: see ``Catalogue.of``.
        vocab_size: the true vocabulary; rows beyond it are left out.
        replicas: ``error`` compares copies of one box first, ``lowest-rank`` takes the lowest rank's.
        check_crcs: check the CRC-32 of every ``.pt`` file first.
        receipt: read all data first, and write a receipt with digests of what is carried.
        allow_cold: carry an optimizer whose moments are all zero although it took steps; it is refused otherwise.
        overwrite: replace ``out`` when it exists.
        team: the processes that share the work, all of which call this. None is this process alone.
        progress: called with a stage's name and its bytes; what it returns is called with bytes done.

    Raises one BridgeError; ``out`` is then what it was.
    """
    options = ExportOptions(
        rename, model_state, vocab_size, replicas, check_crcs, receipt, allow_cold, overwrite, fsync
    )  # fmt: skip
    return plan_export(source, out, options).run(team, progress)


def _lay_out(catalogue: Catalogue) -> tuple[Manifest, list[Piece]]:
    """Return every tensor in chunks: the manifest of the chunks, and what they are."""
    builder = ManifestBuilder()
    pieces: list[Piece] = []
    for key, spec in catalogue.tensors.items():
        tensor = builder.tensor(spec.key, spec.shape, spec.dtype)
        itemsize = ITEMSIZE[spec.dtype]
        for number, (offsets, shape) in enumerate(bounded_boxes(spec.shape, CHUNK_BYTES // itemsize)):
            region = Region(offsets, shape)
            buffer = builder.buffer(key, 0, region.numel * itemsize, spec.dtype)
            builder.shard(tensor, region, 0, buffer)
            pieces.append(Piece(key, spec, region, number, buffer))
    return builder.build(), pieces


def _cut(catalogue: Catalogue, pieces: Sequence[Piece]) -> tuple[DcpFile, ...]:
    """Return the files: steps and plain values in the first, pieces in order, about FILE_BYTES in each."""
    runs: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if size and size + piece.nbytes > FILE_BYTES:
            runs.append([])
            size = 0
        runs[-1].append(piece)
        size += piece.nbytes
    first, *others = (tuple(run) for run in runs)
    files = [DcpFile(0, tuple(catalogue.values), tuple(catalogue.steps), first)]
    return (*files, *(DcpFile(number, (), (), run) for number, run in enumerate(others, 1)))


def first_failure(error: Any) -> BridgeError:
    """Return what made a CheckpointException of torch's: the lowest failing rank's own error where it is ours."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, BridgeError):
        return cause
    if isinstance(cause, OSError):
        return OutputError(f"rank {rank}: {cause.strerror or cause}", path=cause.filename)
    return BridgeError(f"{type(cause).__name__}: {cause}", rank=rank)
