"""Host memory in which boxes of tensors are filled: the tensors' own on the CPU, pinned buffers for other devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_optim_bridge.core.gather import STAGING_BYTES, bounded_boxes, unsigned
from nemo_optim_bridge.core.manifest import ITEMSIZE
from nemo_optim_bridge.core.staging import Opener, Stager, open_device

if TYPE_CHECKING:
    import torch


class Places:
    """Where to fill boxes of tensors on some devices; a context that waits for all copies to the devices."""

    def __init__(self, devices: Iterable[torch.device], open_device: Opener = open_device) -> None:
        """Raises TargetError for a device that cannot be filled, or when no host memory can be pinned."""
        with ExitStack() as stack:
            self._on: dict[torch.device, InPlace | Stager] = {}
            for device in devices:
                opened = open_device(device)
                self._on[device] = InPlace() if opened is None else stack.enter_context(Stager(opened))
            self._stack = stack.pop_all()

    def on(self, device: torch.device) -> InPlace | Stager:
        """Return what gives memory for boxes of tensors on one of the devices."""
        return self._on[device]

    def fill(self, tensor: torch.Tensor, values: Callable[[tuple[slice, ...]], torch.Tensor]) -> None:
        """Fill a tensor, box by box, with the CPU tensors that ``values`` returns; return when all is there.

        ``values`` is called with a box of the tensor, as slices, and returns its elements in the tensor's own dtype,
        one that numpy has. Boxes on their way to a device are copied while the next are made.
        """
        place = self.on(tensor.device)
        dtype, stride = str(tensor.dtype).removeprefix("torch."), tensor.stride()
        for offsets, size in bounded_boxes(tuple(tensor.shape), place.capacity // ITEMSIZE[dtype]):
            box = tuple(slice(start, start + count) for start, count in zip(offsets, size, strict=True))
            elements = values(box).numpy().view(unsigned(dtype))
            place.view(tensor, dtype, size, dot(offsets, stride), stride)[...] = elements
        place.finish()

    def __enter__(self) -> Places:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)


class InPlace:
    """Gives the memory of CPU tensors itself."""

    capacity = STAGING_BYTES

    def __init__(self) -> None:
        self._memory: dict[int, np.ndarray[Any, Any]] = {}

    def view(
        self, tensor: torch.Tensor, dtype: str, shape: tuple[int, ...], offset: int, stride: tuple[int, ...]
    ) -> np.ndarray[Any, Any]:
        """Return a box of a tensor as an array of unsigned integers."""
        kind = unsigned(dtype)
        start = (tensor.storage_offset() + offset) * kind.itemsize
        strides = tuple(s * kind.itemsize for s in stride)
        return np.ndarray(shape, kind, self._bytes_of(tensor).data, start, strides)

    def finish(self) -> None:
        """Forget the tensors, whose memory may now be given to others; what was filled is there already."""
        self._memory = {}

    def _bytes_of(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        import torch

        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._memory:
            self._memory[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        return self._memory[storage.data_ptr()]


def dot(offsets: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return how many elements lie between a tensor's first and the one at ``offsets``."""
    return sum(o * s for o, s in zip(offsets, stride, strict=True))
