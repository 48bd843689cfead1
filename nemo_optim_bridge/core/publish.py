"""Make a directory appear under its name only when it is complete."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_optim_bridge.errors import OutputError

_LOG = logging.getLogger(__name__)
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF}


def check_output(out: Path, sources: tuple[Path, ...], *, overwrite: bool) -> None:
    """Raise OutputError when ``out`` cannot become the output: it exists, lies in a source, or has no parent."""
    try:
        resolved = out.resolve()
        for source in sources:
            inside = source.resolve()
            if resolved == inside or inside in resolved.parents or resolved in inside.parents:
                raise OutputError("output and source overlap", path=out, hint="choose a directory beside the source")
        if not resolved.parent.is_dir():
            raise OutputError(
                "the parent directory does not exist", path=out, hint=f"make it first: mkdir -p {resolved.parent}"
            )
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise OutputError(f"is not a usable path: {error}", path=out) from error
    if os.path.lexists(out):
        if not overwrite:
            raise OutputError("already exists", path=out, hint="choose another name, or add --overwrite")
        if out.is_symlink() or not out.is_dir():
            raise OutputError("is not a directory, it is not overwritten", path=out, hint="choose another name")


@contextmanager
def new_directory(out: Path, *, overwrite: bool, fsync: bool) -> Iterator[Path]:
    """Yield a scratch directory beside ``out`` that is renamed to it on success and removed on any failure.

    With ``overwrite`` an existing directory is set aside first and removed last, so that a complete checkpoint is
    under one of the two names at every moment. One run at a time writes to ``out``; what a killed one left beside it
    is cleared up first. Raises OutputError.
    """
    out = out.absolute()
    with _only_writer(out) as is_alone:
        if is_alone:
            _clear_up(out, overwrite=overwrite)
        try:
            scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
        except OSError as error:
            raise OutputError(f"cannot be written: {error.strerror}", path=out.parent) from error
        try:
            scratch.chmod(0o777 & ~_umask())
            yield scratch
            try:
                _put_in_place(scratch, out, overwrite=overwrite, fsync=fsync)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # where there are no locks
                    raise _appeared(out) from error
                raise OutputError(f"cannot be put in place: {error.strerror}", path=out) from error
        except BaseException:
            _remove(scratch)
            raise


def _remove(folder: Path) -> None:
    """Remove a folder, even if an impatient user or batch system interrupts that as well."""
    while True:
        try:
            shutil.rmtree(folder, ignore_errors=True)
            return
        except KeyboardInterrupt:
            continue


def _put_in_place(scratch: Path, out: Path, *, overwrite: bool, fsync: bool) -> None:
    """Rename ``scratch`` to ``out``; when any step fails, all names are as they were."""
    if fsync:
        _sync_directories(scratch)
    aside: Path | None = None
    complete = scratch.stat()
    try:
        if os.path.lexists(out):
            if not overwrite:
                raise _appeared(out)
            aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.replaced-", dir=out.parent))
            out.rename(aside / out.name)
        scratch.rename(out)
        if fsync:
            _sync(out.parent)
    except BaseException:
        if os.path.lexists(out) and os.path.samestat(
            out.lstat(), complete
        ):  # also where the rename only seemed to fail
            out.rename(scratch)
        if aside is not None:
            _put_back(aside, out)
        raise
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def _appeared(out: Path) -> OutputError:
    return OutputError("appeared while the output was written", path=out, hint="choose another name")


def _put_back(aside: Path, out: Path) -> None:
    """Give a directory that was set aside its name again, unless it is taken."""
    kept = aside / out.name
    if os.path.lexists(kept) and not os.path.lexists(out):
        kept.rename(out)
    if not os.path.lexists(kept):
        aside.rmdir()


@contextmanager
def _only_writer(out: Path) -> Iterator[bool]:
    """Hold the lock of an output; tell whether it could be had: some file systems have no locks.

    The kernel frees the lock when its process ends, however it ends; a file that is left over locks nothing. Raises
    OutputError while another run holds it.
    """
    path = out.with_name(f".{out.name}.lock")
    descriptor, is_alone = _lock(path)
    try:
        yield is_alone
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _lock(path: Path) -> tuple[int, bool]:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise OutputError(f"cannot be written: {error.strerror}", path=path.parent) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_still(path, descriptor):  # its holder ended and removed it between the two calls
                os.close(descriptor)
                continue
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace")
            os.close(descriptor)
            raise OutputError(
                f"another run is writing it{f' ({holder})' if holder else ''}", path=path.parent / path.name[1:-5],
                hint="wait for it, or choose another name",
            ) from None  # fmt: skip
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return descriptor, False
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)
            raise OutputError(f"cannot be written: {error.strerror}", path=path.parent) from error
        return descriptor, True


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _clear_up(out: Path, *, overwrite: bool) -> None:
    """Remove what killed runs left beside ``out``; the lock says that none is alive.

    A kill between the two renames of an overwrite leaves the old output set aside: it gets its name again.
    """
    pattern = re.compile(rf"\.{re.escape(out.name)}\.(partial|replaced)-[a-z0-9_]{{8}}")
    try:
        for path in sorted(out.parent.iterdir()):
            kind = pattern.fullmatch(path.name)
            if kind is None or path.is_symlink() or not path.is_dir():
                continue
            if kind[1] == "replaced" and os.path.lexists(path / out.name) and not os.path.lexists(out):
                _put_back(path, out)
                _LOG.warning("%s: put back, a killed run had set it aside", out)
            else:
                shutil.rmtree(path, ignore_errors=True)
                _LOG.warning("%s: removed, a killed run had left it", path)
    except OSError as error:
        raise OutputError(f"cannot be cleared up after a killed run: {error.strerror}", path=out) from error
    if os.path.lexists(out) and not overwrite:
        raise OutputError("already exists", path=out, hint="choose another name, or add --overwrite")


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
