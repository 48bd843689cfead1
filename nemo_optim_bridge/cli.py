"""The command line. Results go to stdout, progress and errors to stderr."""

from __future__ import annotations

import gc
import io
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nemo_optim_bridge.errors import BridgeError, TargetError
from nemo_optim_bridge.version import __version__

if TYPE_CHECKING:
    from nemo_optim_bridge.core.checkpoint import Checkpoint as CheckpointView
    from nemo_optim_bridge.core.diff import Diff
    from nemo_optim_bridge.core.survey import Survey
    from nemo_optim_bridge.core.team import Team

EXIT_OK, EXIT_DIFFERENT, EXIT_REFUSED = 0, 1, 2

app = typer.Typer(
    name="nemo-optim-bridge",
    help="Carry an optimizer's state across optimizer types and parallel topologies, bit for bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Checkpoint = Annotated[Path, typer.Argument(metavar="CKPT", help="Directory of one step, or its parent.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Left = Annotated[Path, typer.Argument(metavar="A")]
Right = Annotated[Path, typer.Argument(metavar="B")]
NumWorkers = Annotated[
    int | None, typer.Option(help="Worker processes. Default: up to four for large checkpoints.", min=1)
]
VocabSize = Annotated[
    int | None, typer.Option(help="The true vocabulary; rows beyond it are padding. Default: the stored size.", min=1)
]


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    gc.set_threshold(100_000, 20, 20)  # checkpoints are described by millions of small objects, few of them garbage
    try:
        with _terminations_raised():
            app(list(argv), prog_name="nemo-optim-bridge")
            sys.stdout.flush()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_OK
    except OSError as error:
        sys.stderr.write(f"error: the result cannot be printed: {error.strerror}\n")
        return EXIT_REFUSED
    return EXIT_OK


@contextmanager
def _terminations_raised() -> Iterator[None]:
    """Let SIGTERM and SIGHUP, a batch system's time limit, end the run like an interrupt: nothing is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _errors_reported(as_json: bool) -> Iterator[None]:
    """Turn the package's errors into one message and exit code 2."""
    try:
        yield
    except BridgeError as error:
        lines = [_printable(line) for line in str(error).split("\n")]
        typer.echo("error: " + "\n".join(lines), err=True)
        if as_json:
            typer.echo(json.dumps({"error": type(error).__name__, "message": str(error)}))
        raise typer.Exit(EXIT_REFUSED) from None
    except KeyboardInterrupt:
        typer.echo("error: interrupted; nothing was written", err=True)
        raise typer.Exit(EXIT_REFUSED) from None
    except Exception as error:
        logging.getLogger(__name__).debug("unexpected error", exc_info=True)
        what = f"{type(error).__name__}: {error}"
        typer.echo(f"error: unexpected {_printable(what)}; nothing was written. Please report it", err=True)
        raise typer.Exit(EXIT_REFUSED) from None


def _printable(text: str) -> str:
    """Return text with every control character spelled out: names in a checkpoint come from strangers."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Carry an optimizer's state across optimizer types and parallel topologies, bit for bit."""


@app.command()
def inspect(
    checkpoint: Checkpoint,
    deep: Annotated[
        bool, typer.Option("--deep", help="Look at every element: cold, damaged or unrounded state.")
    ] = False,
    optimizer: Annotated[
        str | None,
        typer.Option("--for", metavar="OPTIMIZER", help="Will NeMo resume under it? E.g. distributed_fused_adam."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a checkpoint holds, from its headers alone. Exit code 1 when there are problems."""
    with _errors_reported(as_json):
        if optimizer is not None:
            from nemo_optim_bridge.formats.torch_dist.preflight import preflight

            found = preflight(checkpoint, optimizer).to_json()
        else:
            from nemo_optim_bridge.formats.checkpoints import describe

            found = describe(checkpoint, deep=deep)
    _print_result(found, as_json)
    raise typer.Exit(EXIT_DIFFERENT if found["problems"] else EXIT_OK)


@app.command()
def reshard(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to create.")],
    tp: Annotated[int | None, typer.Option(help="Tensor parallel size.", min=1)] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline parallel size.", min=1)] = None,
    dp: Annotated[int | None, typer.Option(help="Data parallel size.", min=1)] = None,
    ep: Annotated[int | None, typer.Option(help="Expert parallel size.", min=1)] = None,
    zero: Annotated[int | None, typer.Option(help="ZeRO stage, 0 or 1.", min=0)] = None,
    dialect: Annotated[str | None, typer.Option(help="v0.1, 0.4, moe24, moe or head.")] = None,
    pp_split: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Decoder layers per stage. Default: as nanotron computes it.")
    ] = None,
    like: Annotated[
        Path | None, typer.Option(help="A checkpoint of the target run: take its split, order and vocabulary.")
    ] = None,
    vocab_size: VocabSize = None,
    replicas: Annotated[
        str, typer.Option(metavar="error|lowest-rank", help="What to do when copies of one box differ.")
    ] = "error",
    crc_check: Annotated[bool, typer.Option(help="Check the CRC-32 of every source record first.")] = True,
    receipt: Annotated[bool, typer.Option(help="Write a receipt with digests of every tensor.")] = True,
    allow_cold: Annotated[
        bool, typer.Option("--allow-cold", help="Carry an optimizer whose moments are all zero although it took steps.")
    ] = False,
    workers: NumWorkers = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT when it exists.")] = False,
    fsync: Annotated[bool, typer.Option(help="Sync files and directories to disk.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan from headers alone and write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Re-shard CKPT to another topology. Omitted sizes are the source's. OUT appears only when it is complete."""
    with _errors_reported(as_json):
        from nemo_optim_bridge.core.team import find_team
        from nemo_optim_bridge.formats.nanotron.reshard import Options, plan_reshard

        options = Options(
            tp=tp,
            pp=pp,
            dp=dp,
            ep=ep,
            zero_stage=zero,
            dialect=dialect,
            layers_per_stage=_split(pp_split),
            like=like,
            vocab_size=vocab_size,
            replicas=replicas,
            check_crcs=crc_check,
            receipt=receipt,
            allow_cold=allow_cold,
            overwrite=overwrite,
            fsync=fsync,
        )
        planned = plan_reshard(checkpoint, out, options)
        summary = planned.summary()
        is_leader = True
        if not dry_run:
            team = find_team(workers, summary["bytes_to_read"])
            with _progress(team) as report:
                summary.update(planned.run(team, report))
            is_leader = team.is_leader
            summary["remarks"] += _carried(summary)
        summary["written"] = not dry_run
    if is_leader:
        _print_result(summary, as_json)
    raise typer.Exit(EXIT_DIFFERENT if dry_run and summary["problems"] else EXIT_OK)


def _carried(found: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with values that were carried as they are."""
    return [
        f"carried as it is: {finding['key'] or 'optimizer'}: {finding['message']}"
        for finding in found.get("findings", ())
    ]


@app.command()
def convert(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="Directory of a Megatron torch_dist checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to create.")],
    to: Annotated[str, typer.Option(help="fused_adam, distributed_fused_adam, mcore_float16, mcore_distributed, dcp.")],
    key_style: Annotated[
        str, typer.Option(metavar="both|uniform|stock", help="How distributed_fused_adam's masters are spelled.")
    ] = "both",
    container: Annotated[
        str | None, typer.Option(metavar="lightning|megatron", help="Whose common.pt. Default: the source's.")
    ] = None,
    target_ep: Annotated[
        int | None, typer.Option(help="Expert parallel size of the target. Default: experts grouped as saved.", min=1)
    ] = None,
    no_decay: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Parameters without weight decay. Default: the source framework's rule."),
    ] = None,
    exact_remainders: Annotated[
        bool, typer.Option("--exact-remainders", help="Read all masters; make a stock remainder-mode resume exact.")
    ] = False,
    chained_prefix: Annotated[
        str, typer.Option(metavar="auto|no|yes|both", help="megatron-core's chained_I. before keys.")
    ] = "auto",
    torch_adam: Annotated[
        bool, typer.Option("--torch-adam", help="The target has neither Apex nor Transformer Engine.")
    ] = False,
    scheduler_state: Annotated[
        Path | None, typer.Option(help="JSON of Megatron-LM's opt_param_scheduler, where the source has none.")
    ] = None,
    link: Annotated[str, typer.Option(metavar="auto|reflink|hard|copy", help="How OUT gets the data files.")] = "auto",
    receipt: Annotated[
        bool, typer.Option(help="Read all data and write a receipt; without it, take seconds at any size.")
    ] = True,
    crc_check: Annotated[bool, typer.Option(help="Check the CRC-32 of every record that is read.")] = True,
    allow_cold: Annotated[
        bool, typer.Option("--allow-cold", help="Carry an optimizer whose moments are all zero although it took steps.")
    ] = False,
    vocab_size: VocabSize = None,
    workers: NumWorkers = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT when it exists.")] = False,
    fsync: Annotated[bool, typer.Option(help="Sync files and directories to disk.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan from headers alone and write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Convert CKPT to another optimizer type; only metadata is new. Or any checkpoint to PyTorch's format: --to dcp."""
    with _errors_reported(as_json):
        if to == "dcp":
            summary = _export_dcp(checkpoint, out, vocab_size, overwrite=overwrite, fsync=fsync, dry_run=dry_run)
            _print_result(summary, as_json)
            return
        from nemo_optim_bridge.core.team import Workers, worth_workers
        from nemo_optim_bridge.formats.torch_dist.convert import Options, plan_convert

        options = Options(
            to=to, key_style=key_style, container=container, target_ep=target_ep, no_decay=tuple(no_decay or ()),
            exact_remainders=exact_remainders, chained_prefix=chained_prefix, torch_adam=torch_adam,
            scheduler_state=scheduler_state, link=link, receipt=receipt, check_crcs=crc_check,
            allow_cold=allow_cold, overwrite=overwrite, fsync=fsync,
        )  # fmt: skip
        planned = plan_convert(checkpoint, out, options)
        found: dict[str, Any] = {}
        if not dry_run:
            team = Workers(workers or worth_workers(planned.num_bytes_read))
            with _progress(team) as report:
                found = planned.run(team, report)
        summary = {**planned.summary(), **found, "written": not dry_run}
        summary["remarks"] += _carried(found)
    _print_result(summary, as_json)


def _export_dcp(
    checkpoint: Path, out: Path, vocab_size: int | None, *, overwrite: bool, fsync: bool, dry_run: bool
) -> dict[str, Any]:  # fmt: skip
    if dry_run:
        raise TargetError("--to dcp knows no --dry-run")
    from nemo_optim_bridge.formats.torch_dcp import export_dcp

    report = export_dcp(checkpoint, out, vocab_size=vocab_size, overwrite=overwrite, fsync=fsync)
    return {
        "source": str(checkpoint),
        "output": str(out),
        "num_tensors": report.num_tensors,
        "num_bytes": report.num_bytes,
        "remarks": list(report.remarks),
        "written": True,
    }


@app.command()
def fingerprint(
    checkpoint: Checkpoint,
    vocab_size: VocabSize = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Print the digest of every tensor as well.")] = False,
    workers: NumWorkers = None,
    as_json: Json = False,
) -> None:
    """Print digests of what a checkpoint holds; they do not depend on topology, ZeRO stage, file names or dialect."""
    with _errors_reported(as_json):
        from nemo_optim_bridge.formats.checkpoints import open_checkpoint

        opened = open_checkpoint(checkpoint, vocab_size)
        surveyed, is_leader = _survey(opened, workers, scan=False)
    digests = surveyed.fingerprint.to_json() if surveyed.fingerprint else {}
    if not (as_json or tensors):
        digests.pop("tensors")
    if is_leader:
        _print_result({**digests, "remarks": list(opened.remarks)} if as_json else digests, as_json)


def _survey(opened: CheckpointView, workers: int | None, *, scan: bool) -> tuple[Survey, bool]:
    """Read a checkpoint once with all processes there are; also tell whether this one is to print."""
    from nemo_optim_bridge.core.store import FileStore
    from nemo_optim_bridge.core.survey import survey
    from nemo_optim_bridge.core.team import find_team
    from nemo_optim_bridge.core.whole import whole_bytes

    num_bytes = whole_bytes(opened.manifest)
    team = find_team(workers, num_bytes)
    with _progress(team) as report:
        surveyed = survey(opened, team, scan=scan, progress=report("hashing", num_bytes))
    team.lead(FileStore.of(opened.manifest).check_unchanged)
    return surveyed, team.is_leader


@app.command()
def diff(
    left: Left, right: Right, vocab_size: VocabSize = None, workers: NumWorkers = None, as_json: Json = False
) -> None:  # fmt: skip
    """Say how two checkpoints differ, whatever their topologies and formats. Exit code 1 if they do."""
    with _errors_reported(as_json):
        found, remarks, is_leader = _diff(left, right, vocab_size, workers)
    if not is_leader:
        raise typer.Exit(EXIT_OK if found.same else EXIT_DIFFERENT)
    if as_json:
        typer.echo(json.dumps({**found.to_json(), "remarks": remarks}, indent=2))
    else:
        _print_notes(remarks)
        for line in found.lines():
            typer.echo(_printable(line))
        typer.echo(_verdict(found))
    raise typer.Exit(EXIT_OK if found.same else EXIT_DIFFERENT)


@app.command()
def verify(
    left: Left,
    right: Annotated[Path | None, typer.Argument(metavar="[B]")] = None,
    receipt: Annotated[Path | None, typer.Option(help="Check A against this receipt instead of B.")] = None,
    vocab_size: VocabSize = None,
    workers: NumWorkers = None,
    as_json: Json = False,
) -> None:
    """Tell whether A and B, or A and a receipt, hold the same optimizer state, bit for bit."""
    with _errors_reported(as_json):
        if (right is None) == (receipt is None):
            raise TargetError("verify wants either a second checkpoint or --receipt")
        if right is not None:
            found, remarks, is_leader = _diff(left, right, vocab_size, workers)
            lines, same, verdict = list(found.lines()), found.same, _verdict(found)
            counts = {"num_tensors": found.num_tensors, "num_elements": found.num_elements}
        else:
            lines, counts, is_leader = _check_receipt(left, receipt or left, vocab_size, workers)
            same, remarks = not lines, []
            verdict = (
                f"{'as the receipt says' if same else f'{len(lines)} differences'}: {counts['num_tensors']} tensors"
            )
    if not is_leader:
        raise typer.Exit(EXIT_OK if same else EXIT_DIFFERENT)
    if as_json:
        typer.echo(json.dumps({"same": same, **counts, "differences": lines, "remarks": remarks}, indent=2))
    else:
        _print_notes(remarks)
        for line in lines[:20]:
            typer.echo(_printable(line))
        if len(lines) > 20:
            typer.echo(f"... and {len(lines) - 20} more differences: see `nemo-optim-bridge diff`")
        typer.echo(verdict)
    raise typer.Exit(EXIT_OK if same else EXIT_DIFFERENT)


def _diff(left: Path, right: Path, vocab_size: int | None, workers: int | None) -> tuple[Diff, list[str], bool]:
    """Compare two checkpoints with all processes there are; also tell whether this one is to print."""
    from nemo_optim_bridge.core.diff import diff as diff_checkpoints
    from nemo_optim_bridge.core.team import find_team
    from nemo_optim_bridge.core.whole import whole_bytes
    from nemo_optim_bridge.formats.checkpoints import open_pair

    one, two, remarks = open_pair(left, right, vocab_size)
    num_bytes = whole_bytes(one.manifest)
    team = find_team(workers, num_bytes)
    with _progress(team) as report:
        found = diff_checkpoints(one, two, team, report("comparing", num_bytes))
    return found, remarks, team.is_leader


def _verdict(found: Diff) -> str:
    counted = f"{found.num_tensors} tensors, {found.num_elements:,} elements"
    return f"the same: {counted}" if found.same else f"different: {len(list(found.lines()))} differences in {counted}"


def _check_receipt(
    path: Path, receipt_path: Path, vocab_size: int | None, workers: int | None
) -> tuple[list[str], dict[str, int], bool]:  # fmt: skip
    from nemo_optim_bridge.core.receipt import check_receipt, read_receipt
    from nemo_optim_bridge.formats.checkpoints import open_checkpoint

    receipt = read_receipt(receipt_path)
    opened = open_checkpoint(path, vocab_size or receipt["vocab_size"], receipt["no_decay"])
    surveyed, is_leader = _survey(opened, workers, scan=True)
    lines = list(check_receipt(receipt, opened, surveyed))
    return lines, {"num_tensors": len(opened.manifest.tensors)}, is_leader


def _split(text: str | None) -> tuple[int, ...] | None:
    """Parse ``--pp-split``; raises TargetError."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts):
        raise TargetError(f"--pp-split {text!r} is not a list of numbers", hint="write it like --pp-split 3,1")
    return tuple(map(int, parts))


def _print_result(found: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print_table(found)


def _print_notes(remarks: Sequence[str]) -> None:
    for remark in remarks:
        typer.echo(f"note: {_printable(remark)}")


def _print_table(found: Mapping[str, Any]) -> None:
    """Print a result's fields, one a line; lists of remarks and problems last, one item a line."""
    width = max(map(len, found))
    for name, value in found.items():
        if name in ("remarks", "advice", "problems", "findings"):
            continue
        typer.echo(
            f"{name:{width}}  {_printable(_shown(value))}" if "\n" not in _shown(value) else f"{name}{_shown(value)}"
        )
    for name, label in (("remarks", "note"), ("advice", "advice"), ("problems", "problem")):
        for line in found.get(name, ()):
            typer.echo(f"{label}: {_printable(line)}")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_shown(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], dict):
            return "\n  ".join(["", *map(_shown, value)]) if len(value) > 1 else _shown(value[0])
        return ", ".join(map(_shown, value)) if value else "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


@contextmanager
def _progress(team: Team) -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Yield a progress callback that draws bars on a terminal's stderr, for one process, and nothing elsewhere."""
    if not sys.stderr.isatty() or not team.is_leader:
        yield lambda stage, total: lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def report(stage: str, total: int) -> Callable[[int], None]:
            task = bars.add_task(stage, total=total)
            return lambda num_bytes: bars.advance(task, num_bytes)

        yield report
