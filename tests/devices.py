"""Where tests put live tensors: the CPU, and CUDA where there is one. None has run on CUDA so far; its id says so."""

from __future__ import annotations

import pytest
import torch

CUDA = pytest.param("cuda", id="cuda-unrun", marks=pytest.mark.gpu)
DEVICES = ["cpu", CUDA]


def require(device: str) -> None:
    """Skip the test where there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
