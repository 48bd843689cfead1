"""The optimizer's parameters for NeMo's ``args: {name: auto}``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemo.core.config.optimizers import AdamParams


@dataclass
class DistributedFusedAdamBridgeParams(AdamParams):
    """Adam's parameters as NeMo knows them, less ``amsgrad``, which Apex lacks, and this class's own."""

    amsgrad: bool = False
    fp32_key_style: str = "auto"
    hyperparameters: Any = "checkpoint"
    masters_from_weights: bool = False
    allow_cold_optimizer: bool = False
    allow_lossy_state: bool = False
