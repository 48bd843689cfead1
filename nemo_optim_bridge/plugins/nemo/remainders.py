"""bf16 model weights and the 16 remaining bits: how Apex's remainder mode splits an fp32 master.

Apex keeps the low half of the master and takes the high half from the bf16 weight, less one where the low half is
0x8000 or more: it assumes weights rounded half *up*. ``MainParamsOptimizerWrapper`` rounds half to even, and so at a
tie (low half 0x8000, high half even) its weight makes Apex rebuild a master one bf16 ulp too small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from nemo_optim_bridge.core.places import Places


def round_half_up(master: torch.Tensor) -> torch.Tensor:
    """Return the bf16 bits (int16, same shape) from which Apex rebuilds exactly this fp32 master."""
    bits = master.contiguous().view(torch.int32)
    high = (bits >> 16) + ((bits >> 15) & 1)
    return (((high + 0x8000) & 0xFFFF) - 0x8000).to(torch.int16)


def rebuild(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the fp32 master of a bf16 weight and its int16 remainder, as Apex does."""
    high = weight.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def resync_weight(weight: torch.Tensor, master: torch.Tensor, places: Places) -> int:
    """Write into a bf16 weight what Apex needs beside the master's low half; return how many elements changed.

    Both have the same shape; the weight is on one of the devices of ``places``.
    """
    return _overwrite(weight, lambda box: round_half_up(master[box].cpu()), places)


@torch.no_grad()
def set_weight(weight: torch.Tensor, master: torch.Tensor, places: Places) -> int:
    """Write a master into a weight that is its own master; arguments and result are those of ``resync_weight``."""
    kind = _INTEGERS[weight.itemsize]
    return _overwrite(weight, lambda box: master[box].cpu().to(weight.dtype).contiguous().view(kind), places)


def _overwrite(weight: torch.Tensor, wanted: Callable[[tuple[slice, ...]], torch.Tensor], places: Places) -> int:
    """Give a weight the wanted bits, box by box; return how many elements had others."""
    live = weight.detach().view(_INTEGERS[weight.itemsize])
    new = torch.empty_like(live)
    places.fill(new, wanted)
    changed = int((live != new).sum())
    if changed:
        live.copy_(new)
    return changed
