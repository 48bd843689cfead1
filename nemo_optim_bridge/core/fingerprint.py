"""Digests of a checkpoint that depend on what it holds, not on how it is cut, named or spelled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from nemo_optim_bridge.core.checkpoint import MODEL_STATES
from nemo_optim_bridge.core.manifest import TensorKey, TensorSpec
from nemo_optim_bridge.core.whole import BLOCK_BYTES

#: Scalars of a parameter that count, an absent one being None; an absent step is 0.
HYPERPARAMETERS = ("lr", "initial_lr", "betas", "eps", "weight_decay")


class TensorDigest:
    """A tree hash over the global bytes of one tensor.

    XXH3-128 of each block of BLOCK_BYTES in row-major order, then SHA-256 over fqn, state, dtype, shape and the block
    digests. XXH3 runs as fast as memory, ten times faster than BLAKE3: it is proof against accidents, not against an
    adversary.
    """

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec
        self._blocks: list[bytes] = []
        self._open: Any = None
        self._filled = 0

    def add(self, chunk: memoryview) -> None:
        """Hash the next bytes; they must not cross the end of a block."""
        if not self._filled and len(chunk) == BLOCK_BYTES:
            self._blocks.append(xxhash.xxh3_128_digest(chunk))
            return
        self._open = self._open or xxhash.xxh3_128()
        self._open.update(chunk)
        self._filled += len(chunk)
        if self._filled == BLOCK_BYTES:
            self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._blocks.append(self._open.digest())
            self._open, self._filled = None, 0

    def hexdigest(self) -> str:
        """Return the tensor's digest; nothing is added after it."""
        self._close()
        spec = self._spec
        head = json.dumps([spec.key.fqn, spec.key.state, spec.dtype, list(spec.shape)]).encode()
        return hashlib.sha256(head + b"\n" + b"".join(self._blocks)).hexdigest()


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Three digests of a checkpoint, and those of its tensors."""

    tensors_digest: str
    hyperparameters_digest: str
    weights_digest: str
    tensors: Mapping[TensorKey, str]

    def to_json(self) -> dict[str, Any]:
        """Return the digests under the field names of ``--json``."""
        return {
            "tensors_digest": self.tensors_digest,
            "hyperparameters_digest": self.hyperparameters_digest,
            "weights_digest": self.weights_digest,
            "tensors": {str(key): digest for key, digest in sorted(self.tensors.items())},
        }


def combine(digests: Mapping[TensorKey, str], scalars: Mapping[str, Mapping[str, Any]]) -> Fingerprint:
    """Return the fingerprint of tensors whose digests are known."""
    state = {key: digest for key, digest in digests.items() if key.state not in MODEL_STATES}
    weights = {key: digest for key, digest in digests.items() if key.state in MODEL_STATES}
    return Fingerprint(
        _digest(f"{key} {digest}" for key, digest in sorted(state.items())),
        _digest(json.dumps([fqn, canonical(values)]) for fqn, values in sorted(scalars.items())),
        _digest(f"{key} {digest}" for key, digest in sorted(weights.items())),
        digests,
    )


def canonical(values: Mapping[str, Any]) -> list[Any]:
    """Return a parameter's step and hyperparameters, floats as exact hexadecimal, in a fixed order."""
    return [int(values.get("step") or 0), *(_exact(values.get(name)) for name in HYPERPARAMETERS)]


def _exact(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_exact(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value).hex()
    return value


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
