"""The command ``inspect``."""

from __future__ import annotations

from typing import Annotated

import typer

from nemo_optim_bridge.cli.guard import EXIT_DIFFERENT, EXIT_OK, errors_reported
from nemo_optim_bridge.cli.options import Checkpoint, Json
from nemo_optim_bridge.cli.output import print_result


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
    with errors_reported(as_json):
        if optimizer is not None:
            from nemo_optim_bridge.formats.torch_dist.preflight import preflight

            found = preflight(checkpoint, optimizer).to_json()
        else:
            from nemo_optim_bridge.formats.checkpoints import describe

            found = describe(checkpoint, deep=deep)
    print_result(found, as_json)
    raise typer.Exit(EXIT_DIFFERENT if found["problems"] else EXIT_OK)
