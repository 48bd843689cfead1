"""Megatron's distributed checkpoints (``torch_dist``): read, compared, and converted between optimizer types."""

from __future__ import annotations

from nemo_optim_bridge.formats.torch_dist.reader import (
    MASTER_PREFIXES,
    STATE_PREFIX,
    STOCK_FACTORY_PREFIX,
    UNIFORM_PREFIX,
    Chunk,
    DistTensor,
    TorchDist,
    is_megatron,
    is_torch_dist,
    read_common,
    read_metadata,
    read_torch_dist,
    stored_tensors,
)

__all__ = [
    "MASTER_PREFIXES",
    "STATE_PREFIX",
    "STOCK_FACTORY_PREFIX",
    "UNIFORM_PREFIX",
    "Chunk",
    "DistTensor",
    "TorchDist",
    "is_megatron",
    "is_torch_dist",
    "read_common",
    "read_metadata",
    "read_torch_dist",
    "stored_tensors",
]
