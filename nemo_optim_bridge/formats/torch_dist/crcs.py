"""Check the CRC-32 of what a ``torch_dist`` checkpoint stores: every item is a torch archive of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from nemo_optim_bridge.core.team import Progress, Team
from nemo_optim_bridge.errors import unreadable
from nemo_optim_bridge.formats.crcs import require_valid
from nemo_optim_bridge.formats.torch_zip import read_torch_file

_Items = tuple[Path, Sequence[tuple[int, int]]]  # a file, and (offset, nbytes) of items in it


def require_valid_crcs(
    root: Path, places: Iterable[tuple[str, int, int]], team: Team, progress: Callable[[str, int], Progress]
) -> None:  # fmt: skip
    """Read every item once, given as (file, offset, nbytes); raises CorruptFileError kinds that name the file."""
    by_file: dict[str, list[tuple[int, int]]] = {}
    for name, offset, nbytes in sorted(set(places)):  # several keys may be names of one item
        by_file.setdefault(name, []).append((offset, nbytes))
    files: list[_Items] = [(root / name, items) for name, items in by_file.items()]
    weights = [sum(nbytes for _, nbytes in items) for _, items in files]

    def make(report: Progress) -> Callable[[_Items], None]:
        buffer = bytearray(1 << 20)

        def check(part: _Items) -> None:
            path, items = part
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise unreadable(path, error) from error
            try:
                for offset, nbytes in items:
                    require_valid(read_torch_file(path, offset=offset, nbytes=nbytes, fd=descriptor), buffer)
                    report(nbytes)
            finally:
                os.close(descriptor)

        return check

    team.map(make, files, weights, progress("checking", sum(weights)))
