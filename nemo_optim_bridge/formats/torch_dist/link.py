"""Bring a file under a second name without copying its bytes, where the file system can."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Final

from nemo_optim_bridge.errors import OutputError, TargetError

LINKS: Final = ("auto", "reflink", "hard", "copy")
#: Linux's request to share extents between files, on file systems that copy on write (btrfs, xfs, ...).
_FICLONE: Final = 0x40049409


def check_link(link: str) -> None:
    """Raise TargetError for an unknown way to link."""
    if link not in LINKS:
        raise TargetError(f"unknown way to link {link!r}", hint=f"choose one of {', '.join(LINKS)}")


def link_file(source: Path, target: Path, link: str) -> str:
    """Make ``target`` hold what ``source`` holds, and return how: ``reflink``, ``hard`` or ``copy``.

    ``auto`` tries them in this order. The source is opened for reading only. Raises OutputError.
    """
    tried: list[str] = []
    for way in LINKS[1:] if link == "auto" else (link,):
        try:
            _WAYS[way](source, target)
        except OSError as error:
            target.unlink(missing_ok=True)
            tried.append(f"{way}: {error.strerror or error}")
            continue
        return way
    hint = "use --link auto, which falls back to other ways" if link != "auto" else "check permissions and free space"
    raise OutputError(f"cannot be linked ({'; '.join(tried)})", path=target, hint=hint)


def _reflink(source: Path, target: Path) -> None:
    if not sys.platform.startswith("linux"):
        raise OSError("reflinks are made on Linux only")
    import fcntl

    with source.open("rb") as reading, target.open("xb") as writing:
        fcntl.ioctl(writing.fileno(), _FICLONE, reading.fileno())


def _hard(source: Path, target: Path) -> None:
    os.link(source.resolve(), target)  # not the symbolic link, should it be one


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as reading, target.open("xb") as writing:
        shutil.copyfileobj(reading, writing, 1 << 20)
        writing.flush()
        os.fsync(writing.fileno())


_WAYS: Final = {"reflink": _reflink, "hard": _hard, "copy": _copy}
