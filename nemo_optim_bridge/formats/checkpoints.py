"""Open a checkpoint of any known format; a format's reader is imported when there is something to read for it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_optim_bridge.errors import BridgeError, UnknownFormatError
from nemo_optim_bridge.formats.torch_dist import is_megatron, read_torch_dist

if TYPE_CHECKING:
    from nemo_optim_bridge.core.checkpoint import Checkpoint
    from nemo_optim_bridge.core.health import Finding
    from nemo_optim_bridge.core.team import Team
    from nemo_optim_bridge.formats.nanotron.checkpoint import NanotronCheckpoint


def open_checkpoint(
    path: Path, vocab_size: int | None = None, team: Team | None = None, no_decay: Iterable[str] | None = None
) -> Checkpoint:
    """Read a checkpoint's headers; raises UnknownFormatError when no reader knows the directory.

    Args:
        vocab_size: the true vocabulary, for checkpoints that store a padded one; the stored size when None.
        team: the processes that share the files; all ranks call this. None is this process alone.
        no_decay: the parameters without weight decay, for checkpoints that do not say; their default rule when None.
    """
    if is_megatron(path):
        from nemo_optim_bridge.formats.torch_dist.membership import Rule
        from nemo_optim_bridge.formats.torch_dist.view import open_torch_dist

        return open_torch_dist(path, None if no_decay is None else Rule.listed(no_decay, "as in the receipt"))[0]
    from nemo_optim_bridge.formats.nanotron.view import as_checkpoint

    return as_checkpoint(_read_nanotron(path, vocab_size, team))


def open_pair(
    left: Path, right: Path, vocab_size: int | None = None, team: Team | None = None
) -> tuple[Checkpoint, Checkpoint, list[str]]:
    """Read two checkpoints to compare, without vocabulary padding, and say what was left out.

    Padding is what lies beyond ``vocab_size``, or, when that is None, beyond the smaller of two stored vocabularies
    where the larger one is what nanotron pads it to.
    """
    if is_megatron(left) and is_megatron(right):
        from nemo_optim_bridge.formats.torch_dist.view import open_torch_dist

        first, rule = open_torch_dist(left)
        return first, open_torch_dist(right, rule)[0], list(first.remarks)
    from nemo_optim_bridge.formats.nanotron.layout import padded_vocab_size
    from nemo_optim_bridge.formats.nanotron.reader import is_nanotron, read_checkpoint, resolve

    roots = [resolve(path) for path in (left, right)]
    remarks: list[str] = []
    if vocab_size is None and all(map(is_nanotron, roots)):
        small, large = sorted(
            (read_checkpoint(root, None, team) for root in roots), key=lambda found: found.facts.vocab_size
        )
        true, stored = small.facts.vocab_size, large.facts.vocab_size
        if true < stored == padded_vocab_size(true, large.topology.tp, large.documents.vocab_multiple):
            remarks.append(f"{large.path}: vocabulary rows from {true} on are padding and were not compared")
            vocab_size = true
    one, two = (open_checkpoint(root, vocab_size, team) for root in roots)
    return one, two, remarks


def describe(path: Path, *, deep: bool = False) -> dict[str, Any]:
    """Return what a checkpoint holds, under the field names of ``inspect --json``.

    Args:
        deep: look at every element as well, for ``findings``; the finding in words is a problem then.

    Raises CheckpointError.
    """
    checkpoint = None
    if is_megatron(path):
        from nemo_optim_bridge.formats.torch_dist.inspect import inspect as inspect_torch_dist

        found = inspect_torch_dist(path)
        if deep and not found["problems"]:
            checkpoint = open_checkpoint(path)
    else:
        from nemo_optim_bridge.formats.nanotron.inspect import inspect as inspect_nanotron
        from nemo_optim_bridge.formats.nanotron.view import as_checkpoint

        source = _read_nanotron(path)
        found = inspect_nanotron(source)
        if deep:
            checkpoint = as_checkpoint(source)
    if checkpoint is not None:
        findings = _look_at_elements(checkpoint)
        found["findings"] = [finding.to_json() for finding in findings]
        found["problems"] += [finding.in_words() for finding in findings]
    return found


def _look_at_elements(checkpoint: Checkpoint) -> list[Finding]:
    from nemo_optim_bridge.core.store import FileStore
    from nemo_optim_bridge.core.survey import survey
    from nemo_optim_bridge.core.team import find_team

    findings = survey(checkpoint, find_team(None), digests=False).findings
    FileStore.of(checkpoint.manifest).check_unchanged()
    return list(findings)


def _read_nanotron(path: Path, vocab_size: int | None = None, team: Team | None = None) -> NanotronCheckpoint:
    from nemo_optim_bridge.formats.nanotron.reader import is_nanotron, read_checkpoint, resolve

    root = resolve(path)
    if is_nanotron(root):
        return read_checkpoint(root, vocab_size, team)
    raise _unknown(root)


def _unknown(root: Path) -> BridgeError:
    """Return the error for a directory that no reader knows; a metadata.json that cannot be read says more."""
    try:
        read_torch_dist(root)
    except UnknownFormatError:
        pass
    except BridgeError as error:
        return error
    return UnknownFormatError(
        "is not a checkpoint of a known format",
        path=root,
        hint="give the directory of one nanotron step, which holds model_config.json and model/, or of a Megatron "
        "distributed checkpoint, which holds metadata.json",
    )
