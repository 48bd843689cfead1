"""A ``torch_dist`` checkpoint as a manifest: every box of every tensor as a view of bytes in a ``.distcp`` file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.groups import HYPERPARAMETERS, scalar
from nemo_optim_bridge.core.manifest import Manifest, ParamGroup, TensorKey
from nemo_optim_bridge.core.regroup import effective_weight_decay
from nemo_optim_bridge.errors import BridgeError, ContradictionError, CorruptFileError, raise_all, unreadable
from nemo_optim_bridge.formats.torch_dist.containers import model_prefix
from nemo_optim_bridge.formats.torch_dist.membership import Rule, groups_of_parameters
from nemo_optim_bridge.formats.torch_dist.reader import Chunk, DistTensor, TorchDist, read_torch_dist
from nemo_optim_bridge.formats.torch_dist.saved import SavedOptimizer, read_saved
from nemo_optim_bridge.formats.torch_dist.states import States, check_bytes, read_states
from nemo_optim_bridge.formats.torch_zip import StoredTensor, read_torch_file

WEIGHT: Final = "weight"
_OF_THE_SCHEDULER: Final = ("initial_lr", "max_lr", "min_lr")
_RANK: Final = re.compile(r"__(\d{1,9})_\d+\.distcp")


@dataclass(frozen=True, slots=True, eq=False)
class TorchDistState:
    """A checkpoint's tensors, and per parameter its step and hyperparameters.

    ``hyperparameters[fqn]`` has lr, betas, eps, bias_correction, the scheduler's initial_lr, max_lr and min_lr if
    stored, and the *effective* weight decay. Which group a parameter is in is not stored; ``rule`` decided it.
    """

    checkpoint: TorchDist
    saved: SavedOptimizer
    states: States
    manifest: Manifest
    hyperparameters: Mapping[str, Mapping[str, Any]]
    rule: Rule


def read_manifest(
    path: str | os.PathLike[str], *, rule: Rule | None = None, weights: bool = True, bare_names: bool = False
) -> TorchDistState:  # fmt: skip
    """Read a checkpoint's headers, those of every stored box included; no tensor's bytes, no framework.

    Args:
        rule: which parameters have no weight decay; default: the framework's own rule.
        weights: whether the model's own tensors are of interest.
        bare_names: leave out what NeMo puts before all parameters' names, to compare with Megatron-LM's.

    Raises CheckpointError kinds as ``read_torch_dist`` does, and for layouts that cannot be converted.
    """
    checkpoint = read_torch_dist(path)
    saved = read_saved(checkpoint.common, (*checkpoint.tensors, *checkpoint.objects), checkpoint.path)
    states = read_states(checkpoint)
    check_bytes(checkpoint)
    prefix = model_prefix(tuple(states.tensors)) if bare_names else ""
    wanted: list[tuple[TensorKey, DistTensor]] = []
    for fqn, found in states.tensors.items():
        wanted += [(TensorKey(fqn.removeprefix(prefix), state), tensor) for state, tensor in found.items()]
        if weights and fqn in checkpoint.tensors:
            wanted.append((TensorKey(fqn.removeprefix(prefix), WEIGHT), checkpoint.tensors[fqn]))
    rule = rule or Rule.of(saved.kind, ())
    member = groups_of_parameters(saved.groups, states.shapes, rule)
    values = [_hyperparameters(group, saved.groups) for group in saved.groups]
    groups: list[list[str]] = [[] for _ in values]
    for fqn, number in member.items():
        groups[number].append(fqn.removeprefix(prefix))
    manifest = index_chunks(
        checkpoint.path, wanted,
        [ParamGroup(tuple(fqns), group) for fqns, group in zip(groups, values, strict=True)],
        {fqn.removeprefix(prefix): float(saved.step) for fqn in states.tensors},
    )  # fmt: skip
    hyperparameters = {fqn.removeprefix(prefix): values[number] for fqn, number in member.items()}
    return TorchDistState(checkpoint, saved, states, manifest, hyperparameters, rule)


def _hyperparameters(group: Mapping[str, Any], siblings: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    found = {name: scalar(group[name]) for name in (*HYPERPARAMETERS, *_OF_THE_SCHEDULER) if name in group}
    if "betas" in found:
        found["betas"] = tuple(scalar(beta) for beta in found["betas"])
    return {**found, "weight_decay": effective_weight_decay(group, siblings)}


def index_chunks(
    root: str, tensors: Iterable[tuple[TensorKey, DistTensor]], groups: Iterable[ParamGroup] = (),
    steps: Mapping[str, float] | None = None,
) -> Manifest:  # fmt: skip
    """Return the manifest of some of a checkpoint's tensors; opens every file once and reads every item's header.

    Raises CorruptFileError, MissingSourceError and ContradictionError with every problem found.
    """
    builder = ManifestBuilder()
    by_file: dict[str, list[tuple[int, TensorKey, DistTensor, Chunk]]] = {}
    for key, tensor in tensors:
        row = builder.tensor(key, tensor.shape, tensor.dtype)
        for chunk in tensor.chunks:
            by_file.setdefault(chunk.file, []).append((row, key, tensor, chunk))
    problems: list[BridgeError] = []
    for name, items in sorted(by_file.items()):
        file = Path(root) / name
        found = _RANK.fullmatch(Path(name).name)
        rank = int(found.group(1)) if found else 0
        items.sort(key=lambda item: item[3].offset)
        known: dict[int, tuple[StoredTensor, int]] = {}  # by offset: several keys may be aliases of one item
        with _opened(file) as descriptor:
            for row, key, tensor, chunk in items:
                try:
                    if chunk.offset not in known:
                        stored = _stored(file, chunk, descriptor)
                        record = stored.record
                        known[chunk.offset] = (
                            stored, builder.buffer(str(file), record.offset, record.nbytes, stored.dtype)
                        )  # fmt: skip
                    stored, buffer = known[chunk.offset]
                    _check_item(stored, tensor, chunk, file, key)
                except BridgeError as error:
                    problems.append(error)
                    continue
                stride = (0,) * (len(chunk.region.shape) - len(stored.stride)) + stored.stride
                builder.shard(row, chunk.region, rank, buffer, stored.storage_offset, stride)
    raise_all(problems)
    return builder.build(tuple(groups), steps)


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise unreadable(file, error) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _stored(file: Path, chunk: Chunk, descriptor: int) -> StoredTensor:
    stored = read_torch_file(file, offset=chunk.offset, nbytes=chunk.nbytes, fd=descriptor).root
    if not isinstance(stored, StoredTensor):
        raise CorruptFileError(f"item at byte {chunk.offset} is no tensor", path=file)
    return stored


def _check_item(stored: StoredTensor, tensor: DistTensor, chunk: Chunk, file: Path, key: TensorKey) -> None:
    """Raise ContradictionError when an item is not what ``.metadata`` says."""
    extra = len(chunk.region.shape) - len(stored.shape)
    shape = (1,) * extra + stored.shape if extra > 0 else stored.shape
    if shape != chunk.region.shape or stored.dtype != tensor.dtype:
        raise ContradictionError(
            f"item at byte {chunk.offset} is {stored.dtype} {stored.shape}, .metadata says {tensor.dtype} "
            f"{chunk.region.shape}", path=file, key=key, region=chunk.region,
        )  # fmt: skip
