"""Boxes of every dtype and shape to fill, with what they must hold; for stand-in devices and for real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.gather import round_to_bfloat16, unsigned
from nemo_optim_bridge.core.live import execute_into, plan_tensors
from nemo_optim_bridge.core.manifest import ITEMSIZE, Manifest, TensorKey
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.core.staging import Opener, open_device
from nemo_optim_bridge.core.store import MemoryStore, Store

ROWS, COLS = 24, 50
KEY = TensorKey("w", "exp_avg")
Bits = npt.NDArray[Any]


class Case:
    """A tensor of random bits, stored as two replicas of column shards and one row shard, and targets for parts of it.

    ``memory`` holds for each target the whole storage that it is a view of, as it was and as it must be.
    """

    def __init__(self, dtype: str, stored: str | None = None, device: str = "cpu") -> None:
        stored = stored or dtype
        random = np.random.default_rng(0)
        whole = np.frombuffer(random.bytes(ROWS * COLS * ITEMSIZE[stored]), unsigned(stored)).reshape(ROWS, COLS)
        self.bits: Bits = whole if stored == dtype else round_to_bfloat16(whole)
        self.dtype, self.device = dtype, device
        self.manifest, self.store = self._shards(whole, stored)
        self.boxes: list[tuple[TensorKey, Region, torch.Tensor]] = []
        self.memory: list[tuple[torch.Tensor, Bits]] = []
        self._target((0, 0), (ROWS, COLS), (ROWS, COLS), lambda t: t)
        self._target((3, 7), (11, 30), (40, 23), lambda t: t[5:35, 6:17].t())  # transposed, with gaps
        self._target((0, 4), (ROWS, 9), (2 * ROWS, 20), lambda t: t[::2, 1:19:2])
        self._target((6, 0), (1, COLS), (COLS + 2,), lambda t: t[1:-1].view(1, COLS))  # flat, as ZeRO-1's slices
        for row in range(ROWS):
            for col in range(0, COLS, 10):
                self._target((row, col), (1, 3), (5,), lambda t: t[1:4].view(1, 3))

    def _shards(self, whole: Bits, stored: str) -> tuple[Manifest, Store]:
        builder, parts = ManifestBuilder(), []
        tensor = builder.tensor(KEY, (ROWS, COLS), self.dtype)
        for rank, (rows, cols) in enumerate(
            ((slice(0, 20), slice(0, 17)), (slice(0, 20), slice(17, COLS)), (slice(20, ROWS), slice(0, COLS))) * 2
        ):
            part = np.ascontiguousarray(whole[rows, cols])
            parts.append(memoryview(part.tobytes()))
            buffer = builder.buffer(f"part {rank}", 0, part.nbytes, stored)
            builder.shard(tensor, Region((rows.start, cols.start), part.shape), rank, buffer)
        return builder.build(), MemoryStore(parts)

    def _target(
        self, at: tuple[int, int], shape: tuple[int, int], around: tuple[int, ...],
        view: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:  # fmt: skip
        kind = getattr(torch, f"int{8 * ITEMSIZE[self.dtype]}") if ITEMSIZE[self.dtype] > 1 else torch.uint8
        before = torch.full(around, 85, dtype=kind)
        after = before.clone()
        part = np.ascontiguousarray(self.bits[at[0] : at[0] + shape[0], at[1] : at[1] + shape[1]])
        view(after).copy_(torch.from_numpy(part.view(np.dtype(f"i{part.itemsize}")).copy()).view(kind))
        live = before.to(self.device)
        self.memory.append((live, after.numpy()))
        self.boxes.append((KEY, Region(at, shape), view(live).view(getattr(torch, self.dtype))))

    def fill(self, open_device: Opener = open_device, store: Store | None = None) -> None:
        """Fill all targets."""
        load = plan_tensors(self.manifest, self.boxes)
        execute_into(load.plan, store or self.store, load.tensors, open_device)

    def wrong(self) -> list[int]:
        """Return the numbers of the targets whose memory is not what it must be, bit for bit, gaps included."""
        pairs = enumerate(self.memory)
        return [number for number, (live, after) in pairs if not np.array_equal(live.cpu().numpy(), after)]


class FailingStore:
    """A store that fails at the ``count``-th read."""

    def __init__(self, store: Store, count: int, error: Exception) -> None:
        self.store, self.left, self.error = store, count, error

    def read_into(self, buffer: int, offset: int, out: memoryview) -> None:
        """Read, or raise."""
        self.left -= 1
        if self.left < 0:
            raise self.error
        self.store.read_into(buffer, offset, out)
