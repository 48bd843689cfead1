"""Which bfloat16 weights count as their fp32 master, rounded to nearest with ties to even or half up."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_optim_bridge.core.health import RoundingScan
from nemo_optim_bridge.core.manifest import TensorKey, TensorSpec


def wrong(master: np.ndarray, weight: np.ndarray) -> int:
    scan = RoundingScan()
    scan.add(
        TensorSpec(TensorKey("w", "fp32_param"), master.shape, "float32"),
        0,
        master.view(np.uint8),
        weight.view(np.uint8),
    )
    return scan.count


def rounded(bits: np.ndarray) -> np.ndarray:
    """Return what torch rounds to: nearest, ties to even."""
    return torch.from_numpy(bits.view(np.float32).copy()).bfloat16().view(torch.uint16).numpy()


@pytest.mark.parametrize("stored", [0, 1, 2, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x8000, 0x8001, 0xBF80, 0xFF7F])
def test_around_every_tie(stored: int) -> None:
    """Every master near a weight, one by one: equal to torch's rounding, or half up."""
    for step in (*range(-0x8003, -0x7FFC), -1, 0, 1, *range(0x7FFD, 0x8004), 0x10000):
        bits = np.array([((stored << 16) + step) & 0xFFFFFFFF], np.uint32)
        half_up = (int(bits[0]) + 0x8000 & 0xFFFFFFFF) >> 16
        is_nan = (bits[0] & 0x7FFFFFFF) > 0x7F800000
        right = is_nan or stored in (int(rounded(bits)[0]), half_up)  # NaNs are a finding of their own
        assert wrong(bits, np.array([stored], np.uint16)) == (not right), hex(int(bits[0]))


def test_not_finite() -> None:
    inf, largest = 0x7F800000, 0x7F7FFFFF
    for bits, stored, count in (
        (inf, 0x7F80, 0), (largest, 0x7F80, 0), (largest, 0x7F7F, 1), (inf, 0x7F7F, 1), (inf, 0x7F81, 1),
        (0x7FC00000, 0x7FC0, 0), (0x3F800000, 0x7FC0, 1), (0x3F800000, 0x7F80, 1), (0x80000000, 0x0000, 1),
    ):  # fmt: skip
        assert wrong(np.array([bits], np.uint32), np.array([stored], np.uint16)) == count, hex(bits)


def test_one_wrong_weight_among_many_with_ties() -> None:
    generator = np.random.default_rng(0)
    bits = generator.standard_normal(1 << 18).astype(np.float32).view(np.uint32)
    bits[::7] = bits[::7] & np.uint32(0xFFFF0000) | np.uint32(0x8000)
    stored = rounded(bits).copy()
    assert wrong(bits, stored) == 0
    half_up = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    assert wrong(bits, half_up) == 0
    stored[12345] ^= 1
    assert wrong(bits, stored) == 1
