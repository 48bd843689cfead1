"""Fill tensors of a device through host memory: small boxes share a buffer, and buffers take turns.

While the device copies one buffer, the next is filled from files. A buffer is filled again only when the device has
said that it is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from nemo_optim_bridge.core.gather import unsigned
from nemo_optim_bridge.errors import TargetError

if TYPE_CHECKING:
    import torch

BUFFER_BYTES = 4 << 20
NUM_BUFFERS = 2
_ALIGNMENT = 64  # bytes between the starts of boxes: enough for every dtype, and for fast reads


class StagedBox(NamedTuple):
    """Where a staged box goes: the elements of ``tensor`` from ``offset`` on, with ``shape`` and ``stride``.

    ``start`` is its first byte in the buffer, where it lies row-major; all else is in elements.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]
    start: int


class Event(Protocol):
    """A point in a device's queue."""

    def synchronize(self) -> None:
        """Return when the device has come past it."""


class Device(Protocol):
    """What copies buffers to a device, in the order in which they are sent, while the caller goes on."""

    def allocate(self) -> torch.Tensor:
        """Return a host buffer of BUFFER_BYTES bytes that the device can copy from by itself."""

    def send(self, staged: torch.Tensor, boxes: Sequence[StagedBox]) -> Event:
        """Queue the copy of a buffer's used bytes into its boxes' tensors; until the event, both are the device's."""


Opener = Callable[["torch.device"], Device | None]


class Stager:
    """Fills tensors of one device; a context that waits for all copies, also when it is left by an error."""

    capacity = BUFFER_BYTES

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers = [device.allocate() for _ in range(NUM_BUFFERS)]
        self._events: list[Event | None] = [None] * NUM_BUFFERS
        self._turn = 0
        self._used = 0
        self._boxes: list[StagedBox] = []

    def view(
        self, tensor: torch.Tensor, dtype: str, shape: tuple[int, ...], offset: int, stride: tuple[int, ...]
    ) -> np.ndarray[Any, Any]:
        """Return an array of unsigned integers for a box of at most ``capacity`` bytes.

        It is to be filled before the next call, which may send it off.
        """
        kind = unsigned(dtype)
        nbytes = prod(shape) * kind.itemsize
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + nbytes > self.capacity:
            self._send()
            start = 0
        if not self._boxes:
            self._wait(self._turn)
        self._boxes.append(StagedBox(tensor, shape, offset, stride, start))
        self._used = start + nbytes
        return np.ndarray(shape, kind, self._buffers[self._turn].numpy().data, start)

    def finish(self) -> None:
        """Send what is staged and return when all copies are over."""
        self._send()
        self._wait_for_all()

    def __enter__(self) -> Stager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._send()
        finally:
            self._boxes = []
            self._wait_for_all()
            self._buffers = []

    def _send(self) -> None:
        if self._boxes:
            self._events[self._turn] = self._device.send(self._buffers[self._turn][: self._used], self._boxes)
            self._turn = (self._turn + 1) % NUM_BUFFERS
            self._boxes, self._used = [], 0

    def _wait_for_all(self) -> None:
        for turn in range(NUM_BUFFERS):
            self._wait(turn)

    def _wait(self, turn: int) -> None:
        event, self._events[turn] = self._events[turn], None
        if event is not None:
            event.synchronize()


class CudaDevice:
    """A CUDA device with a stream of its own for copies, and memory there in which buffers land."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._landing = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)

    def allocate(self) -> torch.Tensor:
        """Return pinned memory; raises TargetError when the system gives none."""
        import torch

        try:
            return torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise TargetError(
                f"no {BUFFER_BYTES} bytes of pinned host memory can be had: {error}",
                hint="free host memory, or raise the limit on locked memory (ulimit -l)",
            ) from error

    def send(self, staged: torch.Tensor, boxes: Sequence[StagedBox]) -> Event:
        """Queue one copy to the device, and from there into the tensors: the stream keeps their order.

        It begins after everything that the current stream has been given: filling the tensors with zeros, or the last
        use of memory that is theirs now.
        """
        import torch

        self._stream.wait_stream(torch.cuda.current_stream(self._landing.device))
        with torch.cuda.stream(self._stream):
            landed = self._landing[: len(staged)].copy_(staged, non_blocking=True)
            scatter(landed, boxes)
            event: Event = self._stream.record_event()
        return event


def open_device(device: torch.device) -> Device | None:
    """Return what copies to a device, or None for the CPU; raises TargetError for devices that are not CUDA's."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise TargetError(
            f"tensors on {device} cannot be filled from files", hint="load into CPU tensors, then move them there"
        )
    return CudaDevice(device)


def scatter(staged: torch.Tensor, boxes: Sequence[StagedBox]) -> None:
    """Copy boxes out of staged bytes on the same device, as bits: no value is ever converted."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for tensor, shape, offset, stride, start in boxes:
        kind = kinds[tensor.element_size()]
        source = staged[start : start + prod(shape) * tensor.element_size()].view(kind).view(shape)
        bits = tensor.detach().view(kind)
        bits.as_strided(shape, stride, bits.storage_offset() + offset).copy_(source)
