"""The optimizer's tensors by parameter, whatever their spelling, and whether all their bytes are there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from nemo_optim_bridge.core.manifest import ITEMSIZE
from nemo_optim_bridge.errors import (
    BridgeError,
    ContradictionError,
    CorruptFileError,
    MissingSourceError,
    TargetError,
    UnknownFormatError,
    raise_all,
)
from nemo_optim_bridge.formats.torch_dist.keys import (
    MASTER,
    MASTER_SPELLINGS,
    MOMENTS,
    belongs_to_optimizer,
    parse_state_key,
)
from nemo_optim_bridge.formats.torch_dist.reader import DistTensor, TorchDist

STATES = (MASTER, *MOMENTS)


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """Stored tensors: ``tensors[fqn][state]`` with ``state`` one of ``STATES``.

    ``from_weights`` are the parameters without a master of their own, whose float32 weight is one.
    """

    tensors: Mapping[str, Mapping[str, DistTensor]]
    from_weights: frozenset[str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the global shape of every parameter."""
        return {fqn: found[MASTER].shape for fqn, found in self.tensors.items()}


def read_states(checkpoint: TorchDist) -> States:
    """Return the optimizer's tensors; raises CheckpointError kinds with everything that is missing or contradictory."""
    found: dict[str, dict[str, DistTensor]] = {}
    problems: list[BridgeError] = []
    for key, tensor in checkpoint.tensors.items():
        parsed = parse_state_key(key)
        if parsed is None:
            if belongs_to_optimizer(key):
                problems.append(UnknownFormatError("optimizer tensor of an unknown layout", key=key))
            continue
        state = MASTER if parsed.state in MASTER_SPELLINGS else parsed.state
        if state not in STATES:
            problems.append(
                UnknownFormatError(
                    f"state {state!r} is not Adam's", key=key, hint="only Adam's masters and moments can be converted"
                )
            )
            continue
        other = found.setdefault(parsed.fqn, {}).setdefault(state, tensor)
        if other is not tensor and (other.chunks, other.shape, other.dtype) != (
            tensor.chunks, tensor.shape, tensor.dtype,
        ):  # fmt: skip
            problems.append(
                ContradictionError(f"also stored under {other.key}, and not as the same bytes", key=tensor.key)
            )
    raise_all(_at(checkpoint.path, problems))
    from_weights = frozenset(_weights_as_masters(found, checkpoint))
    problems += _incomplete(found, checkpoint)
    raise_all(_at(checkpoint.path, problems))
    return States(found, from_weights)


def _weights_as_masters(found: dict[str, dict[str, DistTensor]], checkpoint: TorchDist) -> Iterator[str]:
    """Fill in float32 weights where there is no master, and yield their parameters: such a weight is the master."""
    for fqn, states in found.items():
        weight = checkpoint.tensors.get(fqn)
        if MASTER not in states and weight is not None and weight.dtype == "float32":
            states[MASTER] = weight
            yield fqn


def _incomplete(found: Mapping[str, Mapping[str, DistTensor]], checkpoint: TorchDist) -> Iterator[BridgeError]:
    for fqn, states in found.items():
        for state in STATES:
            if state in states:
                continue
            if state != MASTER:
                yield MissingSourceError(f"the checkpoint has no {state} for this parameter", key=fqn)
                continue
            weight = checkpoint.tensors.get(fqn)
            stored = "no weight" if weight is None else f"a weight of {weight.dtype}, whose lower bits are lost"
            yield MissingSourceError(
                f"the checkpoint has no fp32 master for this parameter, and {stored}", key=fqn,
                hint="save from fused_adam with megatron_amp_O2, which keeps fp32 masters",
            )  # fmt: skip
        shapes = {state: tensor.shape for state, tensor in states.items()}
        if fqn in checkpoint.tensors:
            shapes["weight"] = checkpoint.tensors[fqn].shape
        if len(set(shapes.values())) > 1:
            yield ContradictionError(f"states of one parameter differ in shape: {shapes}", key=fqn)


def _at(path: str, problems: Sequence[BridgeError]) -> list[BridgeError]:
    return [problem.at(path) for problem in problems]


def check_bytes(checkpoint: TorchDist) -> dict[str, int]:
    """Return the size of every ``.distcp`` file; raises for files missing or too short and tensors with holes."""
    needed: dict[str, int] = {}
    problems: list[BridgeError] = []
    for tensor in checkpoint.tensors.values():
        itemsize = ITEMSIZE.get(tensor.dtype, 1)
        if sum(chunk.region.numel for chunk in tensor.chunks) != prod(tensor.shape):
            problems.append(
                ContradictionError("chunks do not add up to the tensor", path=checkpoint.path, key=tensor.key)
            )
        for chunk in tensor.chunks:
            needed[chunk.file] = max(needed.get(chunk.file, 0), chunk.offset + chunk.nbytes)
            if chunk.nbytes < chunk.region.numel * itemsize:
                text = f"{chunk.nbytes} bytes are too few for {chunk.region.numel} {tensor.dtype}"
                problems.append(ContradictionError(text, path=checkpoint.path, key=tensor.key, region=chunk.region))
    for place in checkpoint.object_places:
        needed[place[0]] = max(needed.get(place[0], 0), place[1] + place[2])
    sizes: dict[str, int] = {}
    for name, size in sorted(needed.items()):
        file = Path(checkpoint.path) / name
        if not file.is_file():
            problems.append(MissingSourceError("is missing", path=file, hint="copy it from the original run"))
            continue
        sizes[name] = file.stat().st_size
        if sizes[name] < size:
            text = f"has {sizes[name]} bytes, at least {size} are needed"
            problems.append(CorruptFileError(text, path=file, hint="copy it again from the original run"))
    raise_all(problems)
    return sizes


def gated_parameters(states: States) -> frozenset[str]:
    """Return the parameters that NeMo's own class spells ``param``: first layers of gated MLPs.

    They are recognized by their width, twice the input of the second layer. Raises TargetError when a model has
    layers for which that does not tell.
    """
    found = set()
    for fqn, shape in states.shapes.items():
        if ".mixer." in fqn or ".experts.weight" in fqn:
            raise TargetError(
                "which masters NeMo's own class spells in the stock style cannot be told for this model", key=fqn,
                hint="use --key-style both, which it loads as well",
            )  # fmt: skip
        if ".linear_fc1." not in fqn or fqn.endswith(("layer_norm_weight", "layer_norm_bias")):
            continue
        partner = states.shapes.get(fqn.rpartition(".linear_fc1.")[0] + ".linear_fc2.weight")
        rows = shape[-1] if fqn.endswith("bias") else shape[-2] if len(shape) > 1 else None
        if partner is None or rows is None:
            raise TargetError(
                "whether this layer is gated cannot be told", key=fqn, hint="use --key-style both"
            )  # fmt: skip
        if rows == 2 * partner[-1]:
            found.add(fqn)
    return frozenset(found)
