"""The command ``reshard``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nemo_optim_bridge.cli.guard import EXIT_DIFFERENT, EXIT_OK, errors_reported
from nemo_optim_bridge.cli.options import (
    AllowCold,
    Checkpoint,
    CrcCheck,
    DryRun,
    Fsync,
    Json,
    NumWorkers,
    Out,
    Overwrite,
    VocabSize,
)
from nemo_optim_bridge.cli.output import carried, print_result, progress
from nemo_optim_bridge.errors import TargetError


def reshard(
    checkpoint: Checkpoint,
    out: Out,
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
    crc_check: CrcCheck = True,
    receipt: Annotated[bool, typer.Option(help="Write a receipt with digests of every tensor.")] = True,
    allow_cold: AllowCold = False,
    workers: NumWorkers = None,
    overwrite: Overwrite = False,
    fsync: Fsync = True,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Re-shard CKPT to another topology. Omitted sizes are the source's. OUT appears only when it is complete."""
    with errors_reported(as_json):
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
        team = find_team(workers)
        planned = plan_reshard(checkpoint, out, options, team)
        summary = planned.summary()
        if not dry_run:
            with progress(team) as report:
                summary.update(planned.run(report))
            summary["remarks"] += carried(summary)
        summary["written"] = not dry_run
    if team.is_leader:
        print_result(summary, as_json)
    raise typer.Exit(EXIT_DIFFERENT if dry_run and summary["problems"] else EXIT_OK)


def _split(text: str | None) -> tuple[int, ...] | None:
    """Parse ``--pp-split``; raises TargetError."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts):
        raise TargetError(f"--pp-split {text!r} is not a list of numbers", hint="write it like --pp-split 3,1")
    return tuple(map(int, parts))
