"""Make a directory appear under its name only when it is complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_optim_bridge.errors import OutputError


def check_output(out: Path, sources: tuple[Path, ...], *, overwrite: bool) -> None:
    """Raise OutputError when ``out`` cannot become the output: it exists, lies in a source, or has no parent."""
    resolved = out.resolve()
    for source in sources:
        inside = source.resolve()
        if resolved == inside or inside in resolved.parents or resolved in inside.parents:
            raise OutputError("output and source overlap", path=out, hint="choose a directory beside the source")
    if not resolved.parent.is_dir():
        raise OutputError("the parent directory does not exist", path=out, hint=f"mkdir -p {resolved.parent}")
    if os.path.lexists(out):
        if not overwrite:
            raise OutputError("already exists", path=out, hint="choose another name, or add --overwrite")
        if out.is_symlink() or not out.is_dir():
            raise OutputError("is not a directory, it is not overwritten", path=out, hint="choose another name")


@contextmanager
def new_directory(out: Path, *, overwrite: bool, fsync: bool) -> Iterator[Path]:
    """Yield a scratch directory beside ``out`` that is renamed to it on success and removed on any failure.

    With ``overwrite`` an existing directory is set aside first and removed last, so that a complete checkpoint is
    under one of the two names at every moment. Raises OutputError.
    """
    out = out.absolute()
    try:
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", path=out.parent) from error
    try:
        scratch.chmod(0o777 & ~_umask())
        yield scratch
        try:
            if fsync:
                _sync_directories(scratch)
            _rename(scratch, out, overwrite=overwrite)
            if fsync:
                _sync(out.parent)
        except OSError as error:
            raise OutputError(f"cannot be put in place: {error.strerror}", path=out) from error
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _rename(scratch: Path, out: Path, *, overwrite: bool) -> None:
    if not os.path.lexists(out):
        scratch.rename(out)
        return
    if not overwrite:
        raise OutputError("appeared while the output was written", path=out, hint="choose another name")
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.replaced-", dir=out.parent))
    out.rename(aside / out.name)
    try:
        scratch.rename(out)
    except OSError:
        (aside / out.name).rename(out)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _sync_directories(root: Path) -> None:
    for folder, _, _ in os.walk(root, topdown=False):
        _sync(Path(folder))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
