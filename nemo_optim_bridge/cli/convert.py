"""The command ``convert``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nemo_optim_bridge.cli.guard import errors_reported
from nemo_optim_bridge.cli.options import (
    AllowCold,
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

if TYPE_CHECKING:
    from nemo_optim_bridge.formats.torch_dcp import ExportOptions


def convert(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="Directory of a Megatron torch_dist checkpoint.")],
    out: Out,
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
    crc_check: CrcCheck = True,
    allow_cold: AllowCold = False,
    vocab_size: VocabSize = None,
    workers: NumWorkers = None,
    overwrite: Overwrite = False,
    fsync: Fsync = True,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Convert CKPT to another optimizer type; only metadata is new. Or any checkpoint to PyTorch's format: --to dcp."""
    with errors_reported(as_json):
        if to == "dcp":
            from nemo_optim_bridge.formats.torch_dcp import ExportOptions

            wanted = ExportOptions(
                vocab_size=vocab_size, check_crcs=crc_check, receipt=receipt, allow_cold=allow_cold,
                overwrite=overwrite, fsync=fsync,
            )  # fmt: skip
            exported, is_leader = _export_dcp(checkpoint, out, wanted, workers, dry_run=dry_run)
            if is_leader:
                print_result(exported, as_json)
            return
        from nemo_optim_bridge.core.team import Workers, is_torchrun
        from nemo_optim_bridge.formats.torch_dist.convert import Options, plan_convert

        if is_torchrun():
            raise TargetError(f"--to {to} is done by one process", hint="run it without torchrun; see --workers")

        options = Options(
            to=to, key_style=key_style, container=container, target_ep=target_ep, no_decay=tuple(no_decay or ()),
            exact_remainders=exact_remainders, chained_prefix=chained_prefix, torch_adam=torch_adam,
            scheduler_state=scheduler_state, link=link, receipt=receipt, check_crcs=crc_check,
            allow_cold=allow_cold, overwrite=overwrite, fsync=fsync,
        )  # fmt: skip
        planned = plan_convert(checkpoint, out, options)
        found: dict[str, Any] = {}
        if not dry_run:
            team = Workers(workers)
            with progress(team) as report:
                found = planned.run(team, report)
        summary = {**planned.summary(), **found, "written": not dry_run}
        summary["remarks"] += carried(found)
    print_result(summary, as_json)


def _export_dcp(
    checkpoint: Path, out: Path, options: ExportOptions, workers: int | None, *, dry_run: bool
) -> tuple[dict[str, Any], bool]:  # fmt: skip
    """Export with all processes there are; also tell whether this one is to print."""
    from nemo_optim_bridge.core.team import find_team
    from nemo_optim_bridge.formats.torch_dcp import plan_export

    team = find_team(workers)
    planned = plan_export(checkpoint, out, options)
    summary: dict[str, Any] = {
        "source": str(checkpoint),
        "output": str(out),
        "num_tensors": len(planned.catalogue.tensors),
        "num_bytes": planned.num_bytes,
        "num_files": len(planned.files),
        "remarks": list(planned.source.remarks),
        "written": not dry_run,
    }
    if not dry_run:
        with progress(team) as meter:
            report = planned.run(team, meter)
        summary.update(report.digests)
        summary["findings"] = [finding.to_json() for finding in report.findings]
        summary["remarks"] += carried(summary)
    return summary, team.is_leader
