"""What a user sees when a command fails: one message, one exit code, and never a traceback."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from nemo_optim_bridge.cli.output import printable
from nemo_optim_bridge.errors import BridgeError

EXIT_OK, EXIT_DIFFERENT, EXIT_REFUSED = 0, 1, 2


@contextmanager
def terminations_raised() -> Iterator[None]:
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
def errors_reported(as_json: bool) -> Iterator[None]:
    """Turn the package's errors into one message and exit code 2."""
    try:
        yield
    except BridgeError as error:
        lines = [printable(line) for line in str(error).split("\n")]
        typer.echo("error: " + "\n".join(lines), err=True)
        if as_json:
            typer.echo(json.dumps({"error": type(error).__name__, "message": str(error)}))
        raise typer.Exit(EXIT_REFUSED) from None
    except KeyboardInterrupt:
        typer.echo("error: interrupted; nothing was written", err=True)
        raise typer.Exit(EXIT_REFUSED) from None
    except Exception as error:
        import logging

        logging.getLogger(__name__).debug("unexpected error", exc_info=True)
        what = f"{type(error).__name__}: {error}"
        typer.echo(f"error: unexpected {printable(what)}; nothing was written. Please report it", err=True)
        raise typer.Exit(EXIT_REFUSED) from None


def end_rank(code: int) -> NoReturn:
    """End a process that torchrun started, without the interpreter's own end: torch's threads may abort that."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
