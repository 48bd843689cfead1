"""The command line. Results go to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from nemo_optim_bridge import __version__
from nemo_optim_bridge.errors import BridgeError, TargetError

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
VocabSize = Annotated[
    int | None, typer.Option(help="The true vocabulary; rows beyond it are padding. Default: the stored size.", min=1)
]


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    try:
        app(list(argv), prog_name="nemo-optim-bridge")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_OK
    return EXIT_OK


@contextmanager
def _errors_reported(as_json: bool) -> Iterator[None]:
    """Turn the package's errors into one message and exit code 2."""
    try:
        yield
    except BridgeError as error:
        typer.echo(f"error: {error}", err=True)
        if as_json:
            typer.echo(json.dumps({"error": type(error).__name__, "message": str(error)}))
        raise typer.Exit(EXIT_REFUSED) from None
    except KeyboardInterrupt:
        typer.echo("error: interrupted; nothing was written", err=True)
        raise typer.Exit(EXIT_REFUSED) from None


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
def inspect(checkpoint: Checkpoint, as_json: Json = False) -> None:
    """Say what a checkpoint holds, from its headers alone. Exit code 1 when there are problems."""
    with _errors_reported(as_json):
        if _is_torch_dist(checkpoint):
            from nemo_optim_bridge.formats.torch_dist.inspect import inspect as inspect_any
        else:
            from nemo_optim_bridge.formats.nanotron.inspect import inspect as inspect_any

        found = inspect_any(checkpoint)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print_table(found)
    raise typer.Exit(EXIT_DIFFERENT if found["problems"] else EXIT_OK)


@app.command()
def reshard(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to create.")],
    tp: Annotated[int | None, typer.Option(help="Tensor parallel size.", min=1)] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline parallel size.", min=1)] = None,
    dp: Annotated[int | None, typer.Option(help="Data parallel size.", min=1)] = None,
    ep: Annotated[int | None, typer.Option(help="Expert parallel size.", min=1)] = None,
    zero: Annotated[int | None, typer.Option(help="ZeRO stage, 0 or 1.", min=0, max=1)] = None,
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
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT when it exists.")] = False,
    fsync: Annotated[bool, typer.Option(help="Sync files and directories to disk.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan from headers alone and write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Re-shard CKPT to another topology. Omitted sizes are the source's. OUT appears only when it is complete."""
    with _errors_reported(as_json):
        from nemo_optim_bridge.formats.nanotron.reshard import Options, plan_reshard

        options = Options(
            tp=tp, pp=pp, dp=dp, ep=ep, zero_stage=zero, dialect=dialect, layers_per_stage=_split(pp_split), like=like,
            vocab_size=vocab_size, replicas=replicas, check_crcs=crc_check, overwrite=overwrite, fsync=fsync,
        )  # fmt: skip
        planned = plan_reshard(checkpoint, out, options)
        if not dry_run:
            with _progress() as report:
                planned.run(report)
        summary = {**planned.summary(), "written": not dry_run}
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        _print_table(summary)
    raise typer.Exit(EXIT_DIFFERENT if dry_run and summary["problems"] else EXIT_OK)


@app.command()
def convert(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="Directory of a Megatron torch_dist checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to create.")],
    to: Annotated[str, typer.Option(help="fused_adam, distributed_fused_adam, mcore_float16 or mcore_distributed.")],
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
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT when it exists.")] = False,
    fsync: Annotated[bool, typer.Option(help="Sync files and directories to disk.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan from headers alone and write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Convert CKPT to another optimizer type. Only metadata is new; OUT appears only when it is complete."""
    with _errors_reported(as_json):
        from nemo_optim_bridge.formats.torch_dist.convert import Options, plan_convert

        options = Options(
            to=to, key_style=key_style, container=container, target_ep=target_ep, no_decay=tuple(no_decay or ()),
            exact_remainders=exact_remainders, chained_prefix=chained_prefix, torch_adam=torch_adam,
            scheduler_state=scheduler_state, link=link, overwrite=overwrite, fsync=fsync,
        )  # fmt: skip
        planned = plan_convert(checkpoint, out, options)
        if not dry_run:
            with _progress() as report:
                planned.run(report)
        summary = {**planned.summary(), "written": not dry_run}
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        _print_table(summary)
    raise typer.Exit(EXIT_OK)


@app.command()
def verify(
    left: Annotated[Path, typer.Argument(metavar="A")],
    right: Annotated[Path, typer.Argument(metavar="B")],
    vocab_size: VocabSize = None,
    as_json: Json = False,
) -> None:
    """Tell whether two checkpoints hold the same optimizer state, bit for bit, whatever their topologies."""
    with _errors_reported(as_json):
        found: Any
        if _is_torch_dist(left) and _is_torch_dist(right):
            from nemo_optim_bridge.formats.torch_dist.verify import verify as verify_torch_dist

            found = verify_torch_dist(left, right)
        else:
            from nemo_optim_bridge.formats.nanotron.verify import verify as verify_nanotron

            found = verify_nanotron(left, right, vocab_size)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "same": found.same,
                    "num_tensors": found.num_tensors,
                    "num_elements": found.num_elements,
                    "differences": found.differences,
                    "remarks": found.remarks,
                },
                indent=2,
            )
        )
    else:
        for remark in found.remarks:
            typer.echo(f"note: {remark}")
        for difference in found.differences[:20]:
            typer.echo(difference)
        if len(found.differences) > 20:
            typer.echo(f"... and {len(found.differences) - 20} more differences")
        counted = f"{found.num_tensors} tensors, {found.num_elements:,} elements"
        typer.echo(f"the same: {counted}" if found.same else f"different: {len(found.differences)} of {counted}")
    raise typer.Exit(EXIT_OK if found.same else EXIT_DIFFERENT)


def _is_torch_dist(path: Path) -> bool:
    from nemo_optim_bridge.formats.torch_dist import is_megatron

    return is_megatron(path)


def _split(text: str | None) -> tuple[int, ...] | None:
    """Parse ``--pp-split``; raises TargetError."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise TargetError(f"--pp-split {text!r} is not a list of numbers", hint="write it like --pp-split 3,1")
    return tuple(map(int, parts))


def _print_table(found: Mapping[str, Any]) -> None:
    """Print a result's fields, one a line; lists of remarks and problems last, one item a line."""
    width = max(map(len, found))
    for name, value in found.items():
        if name in ("remarks", "problems"):
            continue
        typer.echo(f"{name:{width}}  {_shown(value)}")
    for name, label in (("remarks", "note"), ("problems", "problem")):
        for line in found.get(name, ()):
            typer.echo(f"{label}: {line}")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_shown(item)}" for name, item in value.items())
    if isinstance(value, list):
        if value and isinstance(value[0], dict):
            return "\n  ".join(["", *map(_shown, value)]) if len(value) > 1 else _shown(value[0])
        return ", ".join(map(_shown, value)) if value else "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a progress callback that draws a bar on a terminal's stderr and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            task = tasks.setdefault(stage, None)
            if task is None:
                task = tasks[stage] = bars.add_task(stage, total=total)
            bars.update(task, completed=done)

        yield report
