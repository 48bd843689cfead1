"""Where tests put live tensors: the CPU, CUDA where there is one, and a stand-in for a device.

None has run on CUDA so far; its id says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import pytest
import torch

from nemo_optim_bridge.core.staging import Device, StagedBox, Stager, scatter

CUDA = pytest.param("cuda", id="cuda-unrun", marks=pytest.mark.gpu)
DEVICES = ["cpu", CUDA]


def require(device: str) -> None:
    """Skip the test where there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


class LateDevice:
    """Copies nothing until it is waited for; ``log`` says what was asked of it, ``sent`` what lay in each buffer."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.sent: list[tuple[int, int]] = []  # buffer, number of boxes
        self.buffers: list[weakref.ref[torch.UntypedStorage]] = []
        self._addresses: list[int] = []
        self._queue: list[tuple[torch.Tensor, Sequence[StagedBox]]] = []
        self.done = 0

    def allocate(self) -> torch.Tensor:
        memory = torch.empty(Stager.capacity, dtype=torch.uint8)
        self._addresses.append(memory.data_ptr())
        self.buffers.append(weakref.ref(memory))
        return memory

    def send(self, staged: torch.Tensor, boxes: Sequence[StagedBox]) -> LateEvent:
        self.log.append(f"send {len(self._queue)}")
        self.sent.append((self._addresses.index(staged.data_ptr()), len(boxes)))
        self._queue.append((staged, list(boxes)))
        return LateEvent(self, len(self._queue) - 1)

    def copy_until(self, number: int) -> None:
        self.log.append(f"wait {number}")
        while self.done <= number:
            scatter(*self._queue[self.done])
            self.done += 1

    def forget(self) -> None:
        self._queue.clear()


class LateEvent:
    def __init__(self, device: LateDevice, number: int) -> None:
        self.device, self.number = device, number

    def synchronize(self) -> None:
        self.device.copy_until(self.number)


def opener(device: Device) -> Callable[[torch.device], Device]:
    return lambda where: device
