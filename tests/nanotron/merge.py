"""Merge a checkpoint into whole tensors in memory: through the package's reader, planner and executor."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import torch

from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.execute import BufferFiller
from nemo_optim_bridge.core.manifest import ITEMSIZE, Manifest, TensorKey
from nemo_optim_bridge.core.plan import make_plan
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.core.store import FileStore
from nemo_optim_bridge.formats.nanotron.checkpoint import NanotronCheckpoint


def whole_tensors(source: Manifest) -> Manifest:
    """Return a manifest of the same tensors, each whole in a buffer of its own."""
    builder = ManifestBuilder()
    for spec in source.tensors:
        buffer = builder.buffer(str(spec.key), 0, prod(spec.shape) * ITEMSIZE[spec.dtype], spec.dtype)
        builder.shard(builder.tensor(spec.key, spec.shape, spec.dtype), Region.full(spec.shape), 0, buffer)
    return builder.build()


def merge(checkpoint: NanotronCheckpoint) -> dict[TensorKey, torch.Tensor]:
    """Return every tensor of a checkpoint, whole."""
    target = whole_tensors(checkpoint.manifest)
    merged = {}
    with FileStore(checkpoint.manifest.buffers) as store:
        filler = BufferFiller(make_plan(checkpoint.manifest, target), store)
        for number, (spec, buffer) in enumerate(zip(target.tensors, target.buffers, strict=True)):
            memory = np.full(buffer.nbytes, 0xA5, np.uint8)
            filler.fill(number, 0, memory)
            merged[spec.key] = torch.from_numpy(memory).view(getattr(torch, spec.dtype)).reshape(spec.shape)
    return merged


def load_optimizer(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the states and masters by parameter of the only optimizer file of a tp 1, pp 1, dp 1 checkpoint."""
    (path,) = (folder / "optimizer").glob("*.pt")
    content = torch.load(path, weights_only=True)
    states = {name: dict(content["state"][number]) for number, name in content["names"].items()}
    for name, master in content.get("gradient_accumulator", {}).items():
        states[name]["fp32"] = master.detach()
    return states
