"""The optimizer's parameters for NeMo's ``args: {name: auto}``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemo.core.config.optimizers import OptimizerParams


@dataclass
class DistributedFusedAdamBridgeParams(OptimizerParams):
    """Adam's parameters that NeMo's params classes have, and this class's own."""

    eps: float = 1e-8
    weight_decay: float = 0.0
    fp32_key_style: str = "auto"
    hyperparameters: Any = "checkpoint"
    masters_from_weights: bool = False
    allow_cold_optimizer: bool = False
    allow_lossy_state: bool = False
