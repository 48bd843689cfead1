"""The commands ``fingerprint``, ``diff`` and ``verify``: what two checkpoints hold, whatever their layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_optim_bridge.cli.guard import EXIT_DIFFERENT, EXIT_OK, errors_reported
from nemo_optim_bridge.cli.options import Checkpoint, Json, NumWorkers, VocabSize
from nemo_optim_bridge.cli.output import print_notes, print_result, printable, progress
from nemo_optim_bridge.errors import TargetError

if TYPE_CHECKING:
    from nemo_optim_bridge.core.checkpoint import Checkpoint as CheckpointView
    from nemo_optim_bridge.core.diff import Diff
    from nemo_optim_bridge.core.survey import Survey
    from nemo_optim_bridge.core.team import Team

Left = Annotated[Path, typer.Argument(metavar="A")]
Right = Annotated[Path, typer.Argument(metavar="B")]


def fingerprint(
    checkpoint: Checkpoint,
    vocab_size: VocabSize = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Print the digest of every tensor as well.")] = False,
    workers: NumWorkers = None,
    as_json: Json = False,
) -> None:
    """Print digests of what a checkpoint holds; they do not depend on topology, ZeRO stage, file names or dialect."""
    with errors_reported(as_json):
        from nemo_optim_bridge.core.team import find_team
        from nemo_optim_bridge.formats.checkpoints import open_checkpoint

        team = find_team(workers)
        opened = open_checkpoint(checkpoint, vocab_size, team)
        surveyed = _survey(opened, team, scan=False)
    digests = surveyed.fingerprint.to_json() if surveyed.fingerprint else {}
    if not (as_json or tensors):
        digests.pop("tensors")
    if team.is_leader:
        print_result({**digests, "remarks": list(opened.remarks)} if as_json else digests, as_json)


def _survey(opened: CheckpointView, team: Team, *, scan: bool) -> Survey:
    """Read a checkpoint once with all processes there are."""
    from nemo_optim_bridge.core.store import FileStore
    from nemo_optim_bridge.core.survey import survey
    from nemo_optim_bridge.core.whole import whole_bytes

    num_bytes = whole_bytes(opened.manifest)
    with progress(team) as report:
        surveyed = survey(opened, team, scan=scan, progress=report("hashing", num_bytes))
    team.lead(FileStore.of(opened.manifest).check_unchanged)
    return surveyed


def diff(
    left: Left, right: Right, vocab_size: VocabSize = None, workers: NumWorkers = None, as_json: Json = False
) -> None:  # fmt: skip
    """Say how two checkpoints differ, whatever their topologies and formats. Exit code 1 if they do."""
    with errors_reported(as_json):
        found, remarks, is_leader = _diff(left, right, vocab_size, workers)
    if not is_leader:
        raise typer.Exit(EXIT_OK if found.same else EXIT_DIFFERENT)
    if as_json:
        typer.echo(json.dumps({**found.to_json(), "remarks": remarks}, indent=2))
    else:
        print_notes(remarks)
        for line in found.lines():
            typer.echo(printable(line))
        typer.echo(_verdict(found))
    raise typer.Exit(EXIT_OK if found.same else EXIT_DIFFERENT)


def verify(
    left: Left,
    right: Annotated[Path | None, typer.Argument(metavar="[B]")] = None,
    receipt: Annotated[Path | None, typer.Option(help="Check A against this receipt instead of B.")] = None,
    vocab_size: VocabSize = None,
    workers: NumWorkers = None,
    as_json: Json = False,
) -> None:
    """Tell whether A and B, or A and a receipt, hold the same optimizer state, bit for bit."""
    with errors_reported(as_json):
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
        print_notes(remarks)
        for line in lines[:20]:
            typer.echo(printable(line))
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

    team = find_team(workers)
    one, two, remarks = open_pair(left, right, vocab_size, team)
    num_bytes = whole_bytes(one.manifest)
    with progress(team) as report:
        found = diff_checkpoints(one, two, team, report("comparing", num_bytes))
    return found, remarks, team.is_leader


def _verdict(found: Diff) -> str:
    counted = f"{found.num_tensors} tensors, {found.num_elements:,} elements"
    return f"the same: {counted}" if found.same else f"different: {len(list(found.lines()))} differences in {counted}"


def _check_receipt(
    path: Path, receipt_path: Path, vocab_size: int | None, workers: int | None
) -> tuple[list[str], dict[str, int], bool]:  # fmt: skip
    from nemo_optim_bridge.core.receipt import check_receipt, read_receipt
    from nemo_optim_bridge.core.team import find_team
    from nemo_optim_bridge.formats.checkpoints import open_checkpoint

    team = find_team(workers)
    receipt = read_receipt(receipt_path)
    opened = open_checkpoint(path, vocab_size or receipt["vocab_size"], team, receipt["no_decay"])
    surveyed = _survey(opened, team, scan=True)
    lines = list(check_receipt(receipt, opened, surveyed))
    return lines, {"num_tensors": len(opened.manifest.tensors)}, team.is_leader
