"""Rebuilding fp32 masters from bf16 weights and 16 bits."""

from __future__ import annotations

from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
from nemo_optim_bridge.core.places import InPlace, Places  # noqa: E402
from nemo_optim_bridge.core.staging import Stager, open_device  # noqa: E402
from nemo_optim_bridge.plugins.nemo.remainders import rebuild, resync_weight, round_half_up, set_weight  # noqa: E402
from tests.devices import CUDA, LateDevice, opener, require  # noqa: E402

#: Even and odd, both signs, zero, subnormal, the largest finite one, infinity, NaN.
HIGH_HALVES = [0x3D1E, 0x3D1F, 0xBD1E, 0xBD1F, 0x0000, 0x8000, 0x0001, 0x7F7F, 0xFF7F, 0x7F80, 0x7FFF, 0xFFFF]


def masters(high: int) -> torch.Tensor:
    """Return every fp32 number with this upper half."""
    bits = (high << 16) + torch.arange(1 << 16, dtype=torch.int64)
    return (((bits + (1 << 31)) % (1 << 32)) - (1 << 31)).to(torch.int32).view(torch.float32)


def low_half(master: torch.Tensor) -> torch.Tensor:
    return master.view(torch.int16).view(-1, 2)[:, 0].contiguous()


class Place(NamedTuple):
    """Where weights are, and the places that fill them."""

    device: str
    places: Places


@pytest.fixture(params=["in place", "staged", CUDA])
def place(request, monkeypatch):
    """Give memory in place, on a stand-in for a device, and on CUDA: in small boxes, so that there are many."""
    device = "cuda" if request.param == "cuda" else "cpu"
    require(device)
    monkeypatch.setattr(InPlace, "capacity", 512)
    monkeypatch.setattr(Stager, "capacity", 512)
    late = LateDevice()
    opened = opener(late) if request.param == "staged" else open_device
    with Places([torch.zeros((), device=device).device], opened) as places:
        yield Place(device, places)
    assert late.done == len(late.sent)
    assert bool(late.sent) == (request.param == "staged")


@pytest.mark.parametrize("high", HIGH_HALVES)
def test_all_low_halves_are_rebuilt_exactly(high, place):
    master = masters(high)
    weight = torch.zeros(1 << 16, dtype=torch.bfloat16, device=place.device)
    resync_weight(weight, master, place.places)
    assert torch.equal(rebuild(weight.cpu(), low_half(master)).view(torch.int32), master.view(torch.int32))


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


def test_only_what_differs_is_counted_and_other_weights_stay(place):
    master = torch.randn(1000, generator=torch.Generator().manual_seed(0)).view(20, 50)
    weight = torch.zeros(20, 50, dtype=torch.bfloat16, device=place.device)
    assert resync_weight(weight, master, place.places) == 1000
    assert resync_weight(weight, master, place.places) == 0
    weight[3, 4] += 1
    assert resync_weight(weight, master, place.places) == 1


@pytest.mark.parametrize("shape", [(4, 8), (32,), (2, 2, 8)])
def test_weights_that_are_views_are_written_in_place(shape, place):
    buffer = torch.zeros(64, dtype=torch.bfloat16, device=place.device)
    resync_weight(buffer[32:].view(shape), torch.ones(shape), place.places)
    assert buffer.tolist() == [0.0] * 32 + [1.0] * 32


def test_a_transposed_weight(place):
    master = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
    weight = torch.zeros(40, 30, dtype=torch.bfloat16, device=place.device).t()
    resync_weight(weight, master, place.places)
    assert torch.equal(weight.cpu().view(torch.int16), round_half_up(master))


def test_a_weight_of_one_element(place):
    weight = torch.zeros((), dtype=torch.bfloat16, device=place.device)
    assert resync_weight(weight, torch.tensor(3.0), place.places) == 1
    assert weight.item() == 3.0


@pytest.mark.parametrize("high", HIGH_HALVES)
def test_a_weight_that_is_its_own_master_gets_all_of_its_bits(high, place):
    master = masters(high)
    weight = torch.nn.Parameter(torch.zeros(1 << 16, device=place.device))
    nonzero = int((master.view(torch.int32) != 0).sum())
    assert set_weight(weight, master, place.places) == nonzero
    assert torch.equal(weight.detach().cpu().view(torch.int32), master.view(torch.int32))
    assert set_weight(weight, master, place.places) == 0  # NaN too


def test_a_bf16_weight_that_is_its_own_master_is_rounded_as_torch_does(place):
    master = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    weight = torch.zeros(1000, dtype=torch.bfloat16, device=place.device)
    set_weight(weight, master, place.places)
    assert torch.equal(weight.cpu(), master.to(torch.bfloat16))
