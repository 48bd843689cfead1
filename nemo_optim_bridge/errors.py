"""Every error that this package raises on purpose.

BridgeError
|-- CheckpointError            a checkpoint cannot be read as what it claims to be
|   |-- UnknownFormatError       no reader knows this directory, dialect or version
|   |-- CorruptFileError         truncated, damaged or malformed file
|   |   `-- UnsafePickleError      a pickle names something that is not on the allow-list
|   |-- MissingSourceError       a file, tensor or box that must exist does not
|   |-- ContradictionError       two parts of the checkpoint disagree
|   |   `-- ReplicaMismatchError   copies of one box hold different bytes
|   |-- ColdOptimizerError       moments are all zero although steps were taken
|   `-- SourceChangedError       a source file changed while it was read
|-- TargetError                the target asked for cannot be built, or not without loss
|-- ParamGroupError            param_groups cannot be matched, merged or split
|-- OutputError                the output cannot be written (exists, no space, not permitted)
`-- MissingDependencyError     an optional package is not installed
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from copy import copy
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from typing import Self

    from nemo_optim_bridge.core.region import Region


class BridgeError(Exception):
    """Say what is wrong, where, and what to do.

    Args:
        problem: one sentence, without a full stop.
        path: the file or directory concerned.
        key: the tensor (``fqn|state``) or field concerned.
        region: the box of the global tensor, in elements.
        rank: the rank that owns or wants the box.
        hint: what the user can do about it; an error about a file has its kind's ``usual_hint`` otherwise.
    """

    usual_hint: ClassVar[str | None] = None

    def __init__(
        self,
        problem: str,
        *,
        path: str | os.PathLike[str] | None = None,
        key: object = None,
        region: Region | None = None,
        rank: int | str | None = None,
        hint: str | None = None,
    ) -> None:
        self.problem = problem
        self.path = None if path is None else os.fspath(path)
        self.key = key
        self.region = region
        self.rank = rank
        self.hint = hint = hint or (None if path is None else self.usual_hint)
        where = [
            f"{name} {value}"
            for name, value in (("file", self.path), ("tensor", key), ("box", region), ("rank", rank))
            if value is not None
        ]
        message = problem
        if where:
            message += " [" + ", ".join(where) + "]"
        if hint:
            message += f". {hint[0].upper()}{hint[1:]}"
        super().__init__(message)

    def at(self, path: str | os.PathLike[str]) -> Self:
        """Return the same error about a file or directory, unless it names one."""
        if self.path is not None:
            return self
        return type(self)(
            self.problem, path=path, key=self.key, region=self.region, rank=self.rank, hint=self.hint
        )  # fmt: skip

    def told_by(self, rank: int) -> Self:
        """Return the same error as other ranks hear of it."""
        told = copy(self)
        told.args = (f"rank {rank} failed: {self}",)
        return told

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the fields when an error travels from a worker process or another rank."""
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[BridgeError], args: tuple[object, ...], fields: dict[str, object]) -> BridgeError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class CheckpointError(BridgeError):
    """A checkpoint cannot be read as what it claims to be."""


class UnknownFormatError(CheckpointError):
    """No reader knows this directory, dialect or version."""

    usual_hint = "such a checkpoint is not supported: please report it"


class CorruptFileError(CheckpointError):
    """A file is truncated, damaged or malformed."""

    usual_hint = "copy the file again from the original run"


class UnsafePickleError(CorruptFileError):
    """A pickle names something that is not on the allow-list; nothing was executed."""


class MissingSourceError(CheckpointError):
    """A file, tensor or box that must exist does not."""

    usual_hint = "copy it from the original run: nothing can stand in for it"


class ContradictionError(CheckpointError):
    """Two parts of a checkpoint disagree."""

    usual_hint = "copy the checkpoint again from the run that saved it: these files are not of one save, or were edited"


class ReplicaMismatchError(ContradictionError):
    """Copies of one box hold different bytes."""


class ColdOptimizerError(CheckpointError):
    """All moments are zero although steps were taken."""


class SourceChangedError(CheckpointError):
    """A source file changed while it was read."""

    usual_hint = "wait until nothing writes there, then run again"


class TargetError(BridgeError):
    """The target asked for cannot be built, or not without loss."""


class ParamGroupError(BridgeError):
    """Param groups cannot be matched, merged or split."""


class OutputError(BridgeError):
    """The output cannot be written."""


class MissingDependencyError(BridgeError):
    """An optional package is not installed."""


def unreadable(path: str | os.PathLike[str], error: OSError) -> CorruptFileError:
    """Return the error for a file or directory that the system refuses to read."""
    return CorruptFileError(
        f"cannot be read: {error.strerror}", path=path,
        hint="see that this user may read it and that the disk is sound, then run again",
    )  # fmt: skip


def raise_all(problems: Iterable[BridgeError]) -> None:
    """Raise the only problem as it is, or several as one error of the first one's type; return if there are none."""
    found = list(problems)
    if not found:
        return
    if len(found) == 1:
        raise found[0]
    shown = [f"  {i}. {problem}" for i, problem in enumerate(found[:20], 1)]
    if len(found) > 20:
        shown.append(f"  ... and {len(found) - 20} more")
    error = type(found[0])(f"{len(found)} problems:\n" + "\n".join(shown))
    error.path, error.key, error.region, error.rank = found[0].path, found[0].key, found[0].region, found[0].rank
    raise error
