"""bf16 model weights and the 16 remaining bits: how Apex's remainder mode splits an fp32 master.

Apex keeps the low half of the master and takes the high half from the bf16 weight, less one where the low half is
0x8000 or more: it assumes weights rounded half *up*. ``MainParamsOptimizerWrapper`` rounds half to even, and so at a
tie (low half 0x8000, high half even) its weight makes Apex rebuild a master one bf16 ulp too small.
"""

from __future__ import annotations

import torch


def round_half_up(master: torch.Tensor) -> torch.Tensor:
    """Return the bf16 bits (int16, same shape) from which Apex rebuilds exactly this fp32 master."""
    bits = master.contiguous().view(torch.int32)
    high = (bits >> 16) + ((bits >> 15) & 1)
    return (((high + 0x8000) & 0xFFFF) - 0x8000).to(torch.int16)


def rebuild(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the fp32 master of a bf16 weight and its int16 remainder, as Apex does."""
    high = weight.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


@torch.no_grad()
def resync_weight(weight: torch.Tensor, master: torch.Tensor) -> int:
    """Write into a bf16 weight what Apex needs beside the master's low half; return how many elements changed.

    Both have the same shape, on any device.
    """
    live = weight.detach().view(torch.int16)
    wanted = round_half_up(master).to(live.device)
    changed = int((live != wanted).sum())
    if changed:
        live.copy_(wanted)
    return changed
