"""Rebuilding fp32 masters from bf16 weights and 16 bits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from nemo_optim_bridge.plugins.nemo.remainders import rebuild, resync_weight, round_half_up  # noqa: E402

#: Even and odd, both signs, zero, subnormal, the largest finite one, infinity, NaN.
HIGH_HALVES = [0x3D1E, 0x3D1F, 0xBD1E, 0xBD1F, 0x0000, 0x8000, 0x0001, 0x7F7F, 0xFF7F, 0x7F80, 0x7FFF, 0xFFFF]


def masters(high: int) -> torch.Tensor:
    """Return every fp32 number with this upper half."""
    bits = (high << 16) + torch.arange(1 << 16, dtype=torch.int64)
    return (((bits + (1 << 31)) % (1 << 32)) - (1 << 31)).to(torch.int32).view(torch.float32)


def low_half(master: torch.Tensor) -> torch.Tensor:
    return master.view(torch.int16).view(-1, 2)[:, 0].contiguous()


@pytest.mark.parametrize("high", HIGH_HALVES)
def test_all_low_halves_are_rebuilt_exactly(high):
    master = masters(high)
    weight = torch.zeros(1 << 16, dtype=torch.bfloat16)
    resync_weight(weight, master)
    assert torch.equal(rebuild(weight, low_half(master)).view(torch.int32), master.view(torch.int32))


@pytest.mark.parametrize("high", [0x3D1E, 0xBD1E])
def test_rounding_to_even_is_wrong_at_the_tie_and_nowhere_else(high):
    master = masters(high)
    rebuilt = rebuild(master.to(torch.bfloat16), low_half(master))
    assert (rebuilt.view(torch.int32) != master.view(torch.int32)).nonzero().flatten().tolist() == [0x8000]
    assert ((master - rebuilt)[0x8000].abs() / master[0x8000].abs()).item() == pytest.approx(2**-7, rel=0.5)


@pytest.mark.parametrize("high", [0x3D1F, 0xBD1F])
def test_at_an_odd_upper_half_both_roundings_agree(high):
    master = masters(high)
    assert torch.equal(round_half_up(master), master.to(torch.bfloat16).view(torch.int16))


def test_only_what_differs_is_counted_and_other_weights_stay():
    master = torch.randn(1000, generator=torch.Generator().manual_seed(0)).view(20, 50)
    weight = torch.zeros(20, 50, dtype=torch.bfloat16)
    assert resync_weight(weight, master) == 1000
    assert resync_weight(weight, master) == 0
    weight[3, 4] += 1
    assert resync_weight(weight, master) == 1


def test_weights_that_are_views_are_written_in_place():
    buffer = torch.zeros(64, dtype=torch.bfloat16)
    resync_weight(buffer[32:].view(4, 8), torch.ones(4, 8))
    assert buffer.tolist() == [0.0] * 32 + [1.0] * 32
