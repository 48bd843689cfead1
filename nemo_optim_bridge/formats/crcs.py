"""Check the CRC-32 of whole torch files, the members of a team sharing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_optim_bridge.core.team import Progress, Team, ignore
from nemo_optim_bridge.errors import CorruptFileError
from nemo_optim_bridge.formats.torch_zip import TorchFile, check_crcs, read_torch_file

_BUFFER_BYTES = 1 << 20


def require_valid(file: TorchFile, buffer: bytearray) -> None:
    """Raise CorruptFileError when a record of an archive is not what was written; archives without CRCs pass."""
    from isal.isal_zlib import crc32  # headers are read without it

    for record in check_crcs(file, buffer, crc32=crc32):
        raise CorruptFileError(
            "bytes do not match their CRC-32", path=file.path, key=record.name,
            hint="copy the file again from the original run",
        )  # fmt: skip


def require_valid_crcs(files: Sequence[Path], team: Team, progress: Progress = ignore) -> None:
    """Raise CorruptFileError, which names file and record, when bytes do not match their CRC-32.

    Called by all members of a team, each of which reads a share of the files. Files that were written without CRCs
    (all are 0) pass.
    """

    def make(report: Progress) -> Callable[[Path], None]:
        buffer = bytearray(_BUFFER_BYTES)

        def check(path: Path) -> None:
            require_valid(read_torch_file(path), buffer)
            report(path.stat().st_size)

        return check

    team.map(make, files, [path.stat().st_size for path in files], progress)
