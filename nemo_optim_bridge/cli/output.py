"""How results are printed: as tables or as JSON, both on stdout, with progress bars on a terminal's stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from nemo_optim_bridge.core.team import Team


def printable(text: str) -> str:
    """Return text with every control character spelled out: names in a checkpoint come from strangers."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_result(found: Mapping[str, Any], as_json: bool) -> None:
    """Print a result as JSON, or as a table."""
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print_table(found)


def carried(found: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with values that were carried as they are."""
    return [
        f"carried as it is: {finding['key'] or 'optimizer'}: {finding['message']}"
        for finding in found.get("findings", ())
    ]


def print_notes(remarks: Sequence[str]) -> None:
    """Print remarks, one a line."""
    for remark in remarks:
        typer.echo(f"note: {printable(remark)}")


def _print_table(found: Mapping[str, Any]) -> None:
    """Print a result's fields, one a line; lists of remarks and problems last, one item a line."""
    width = max(map(len, found))
    for name, value in found.items():
        if name in ("remarks", "advice", "problems", "findings"):
            continue
        typer.echo(
            f"{name:{width}}  {printable(_shown(value))}" if "\n" not in _shown(value) else f"{name}{_shown(value)}"
        )
    for name, label in (("remarks", "note"), ("advice", "advice"), ("problems", "problem")):
        for line in found.get(name, ()):
            typer.echo(f"{label}: {printable(line)}")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_shown(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], dict):
            return "\n  ".join(["", *map(_shown, value)]) if len(value) > 1 else _shown(value[0])
        return ", ".join(map(_shown, value)) if value else "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


@contextmanager
def progress(team: Team) -> Iterator[Callable[[str, int], Callable[[int], None]]]:
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
