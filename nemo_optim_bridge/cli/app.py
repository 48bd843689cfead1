"""The commands under one name, and how a process runs one of them."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from nemo_optim_bridge.cli.compare import diff, fingerprint, verify
from nemo_optim_bridge.cli.convert import convert
from nemo_optim_bridge.cli.guard import EXIT_OK, EXIT_REFUSED, terminations_raised
from nemo_optim_bridge.cli.inspect import inspect
from nemo_optim_bridge.cli.reshard import reshard
from nemo_optim_bridge.version import __version__

app = typer.Typer(
    name="nemo-optim-bridge",
    help="Carry an optimizer's state across optimizer types and parallel topologies, bit for bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start a thread a processor, for nothing
    gc.set_threshold(100_000, 20, 20)  # checkpoints are described by millions of small objects, few of them garbage
    try:
        with terminations_raised():
            app(list(argv), prog_name="nemo-optim-bridge")
            sys.stdout.flush()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_OK
    except OSError as error:
        sys.stderr.write(f"error: the result cannot be printed: {error.strerror}\n")
        return EXIT_REFUSED
    return EXIT_OK


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Carry an optimizer's state across optimizer types and parallel topologies, bit for bit."""


for command in (inspect, reshard, convert, fingerprint, diff, verify):
    app.command()(command)
