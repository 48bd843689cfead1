"""The arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Checkpoint = Annotated[Path, typer.Argument(metavar="CKPT", help="Directory of one step, or its parent.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Directory to create.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
NumWorkers = Annotated[
    int | None, typer.Option(help="Worker processes. Default: up to four for large checkpoints.", min=1)
]
VocabSize = Annotated[
    int | None, typer.Option(help="The true vocabulary; rows beyond it are padding. Default: the stored size.", min=1)
]
CrcCheck = Annotated[bool, typer.Option(help="Check the CRC-32 of every source record first.")]
AllowCold = Annotated[
    bool, typer.Option("--allow-cold", help="Carry an optimizer whose moments are all zero although it took steps.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT when it exists.")]
Fsync = Annotated[bool, typer.Option(help="Sync files and directories to disk.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Plan from headers alone and write nothing.")]
