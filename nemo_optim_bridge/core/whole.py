"""Walk over whole global tensors in row-major blocks, wherever their shards lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.execute import BufferFiller
from nemo_optim_bridge.core.gather import aligned_buffer
from nemo_optim_bridge.core.manifest import ITEMSIZE, Manifest, TensorSpec
from nemo_optim_bridge.core.plan import Plan, make_plan
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.core.store import Store

#: Tensors are hashed and scanned in blocks of this many bytes, which never depend on sharding.
BLOCK_BYTES = 1 << 20


def plan_whole(source: Manifest) -> Plan:
    """Plan every tensor of a manifest as one contiguous buffer each, in the manifest's order.

    Raises MissingSourceError when a tensor has a hole.
    """
    builder = ManifestBuilder()
    for spec in source.tensors:
        row = builder.tensor(spec.key, spec.shape, spec.dtype)
        buffer = builder.buffer(str(spec.key), 0, prod(spec.shape) * ITEMSIZE[spec.dtype], spec.dtype)
        builder.shard(row, Region.full(spec.shape), 0, buffer)
    return make_plan(source, builder.build())


def whole_bytes(source: Manifest) -> int:
    """Return the size of all global tensors in bytes."""
    return sum(prod(spec.shape) * ITEMSIZE[spec.dtype] for spec in source.tensors)


class WholeTensors:
    """Reads blocks of the global tensors of a plan made by ``plan_whole``; tensor number ``i`` is the manifest's."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self.specs: Sequence[TensorSpec] = plan.source.tensors
        self._filler = BufferFiller(plan, store)

    def blocks(
        self, tensors: Sequence[int], block_elements: int | None = None
    ) -> Iterator[tuple[int, list[npt.NDArray[np.uint8]]]]:
        """Yield (first element, bytes of each tensor) for tensors of one shape, block by block.

        The arrays are reused from one step to the next. ``block_elements`` is BLOCK_BYTES of the first tensor's dtype
        when None.
        """
        specs = [self.specs[tensor] for tensor in tensors]
        step = block_elements or BLOCK_BYTES // ITEMSIZE[specs[0].dtype]
        numel = prod(specs[0].shape)
        memory = [aligned_buffer(min(step, max(numel, 1)) * ITEMSIZE[spec.dtype]) for spec in specs]
        for start in range(0, numel, step):
            count = min(step, numel - start)
            views = []
            for tensor, spec, space in zip(tensors, specs, memory, strict=True):
                size = ITEMSIZE[spec.dtype]
                view = space[: count * size]
                self._filler.fill(tensor, start * size, view)
                views.append(view)
            yield start, views


def position(shape: tuple[int, ...], element: int) -> tuple[int, ...]:
    """Return the global index of an element given by its row-major number."""
    return tuple(int(i) for i in np.unravel_index(element, shape)) if shape else ()
