"""Weights that make a resume with masters as 16-bit remainders exact, for optimizers that do not see to it themselves.

distributed_fused_adam in remainder mode keeps the lower half of a master and takes the upper half from the bf16
weight, corrected by one where the lower half's sign bit is set: it expects weights rounded half up, and fused_adam
rounds to even. They differ at ties, about one element in 2**17, and so does the restored master. Boxes of weights in
which any element is not the master rounded half up are written anew, to a file of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.gather import Gatherer, aligned_buffer, bounded_boxes
from nemo_optim_bridge.core.manifest import Manifest, Shard, TensorKey
from nemo_optim_bridge.core.plan import Plan, make_plan
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.core.store import FileStore
from nemo_optim_bridge.core.team import Progress, Team, ignore
from nemo_optim_bridge.errors import OutputError
from nemo_optim_bridge.formats.torch_dist.keys import MASTER
from nemo_optim_bridge.formats.torch_dist.manifest import index_chunks
from nemo_optim_bridge.formats.torch_dist.reader import TorchDist
from nemo_optim_bridge.formats.torch_dist.states import States
from nemo_optim_bridge.formats.torch_zip import NewTensor, lay_out

_BLOCK_ELEMENTS: Final = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class Rounding:
    """Boxes of weights to write anew: ``rows`` are shards of the plan's target, ``elements`` how many are wrong.

    ``file`` is the name of the new file: no rank of a run writes one like it, and the source has none.
    """

    plan: Plan
    rows: tuple[int, ...]
    elements: int
    file: str

    def remark(self) -> str:
        """Return what was found in words."""
        if not self.rows:
            return "every bf16 weight is its master rounded half up: nothing had to be written for exact remainders"
        return (
            f"bf16 weights that are not their master rounded half up: {self.elements}; boxes with them, written to "
            f"{self.file}: {len(self.rows)}"
        )

    def write(
        self, folder: Path, fsync: bool
    ) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]:  # fmt: skip
        """Write the new file; return (file, offset, nbytes) by (weight's key, offsets of the box)."""
        moved: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
        if not self.rows:
            return moved
        by_row = _pieces_by_row(self.plan)
        try:
            with (folder / self.file).open("xb") as file, FileStore(self.plan.source.buffers) as store:
                gatherer = Gatherer(store)
                for row in self.rows:
                    shard = self.plan.target.shards[row]
                    box = np.empty(shard.region.shape, np.uint16)
                    for piece in by_row[row]:
                        for where, bits in _masters(self.plan, piece, gatherer):
                            box[_slices(where, shard.region)] = half_up(bits)
                    data = lay_out(NewTensor("bfloat16", shard.region.shape, box.tobytes()), "archive").text
                    moved[shard.key.fqn, shard.region.offsets] = (self.file, file.tell(), len(data))
                    file.write(data)
                file.flush()
                if fsync:
                    os.fsync(file.fileno())
        except OSError as error:
            raise OutputError(f"cannot be written: {error.strerror}", path=folder / self.file) from error
        return moved


def half_up(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """Return the upper halves that, beside the lower ones, give back float32 values given as bits."""
    return ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)


def find_ties(
    checkpoint: TorchDist,
    states: States,
    team: Team,
    progress: Callable[[str, int], Progress] = lambda stage, total: ignore,
) -> Rounding:
    """Read all masters and all bf16 weights, and return the boxes of weights that are not rounded half up.

    Args:
        team: the processes that share the reading.
        progress: called with the stage's name and its bytes; what it returns is called with bytes done.
    """
    fqns = [
        fqn for fqn in states.tensors if checkpoint.tensors.get(fqn) and checkpoint.tensors[fqn].dtype == "bfloat16"
    ]
    masters = index_chunks(
        checkpoint.path, ((TensorKey(fqn, MASTER), states.tensors[fqn][MASTER]) for fqn in fqns)
    )  # fmt: skip
    weights = index_chunks(checkpoint.path, ((TensorKey(fqn, MASTER), checkpoint.tensors[fqn]) for fqn in fqns))
    plan = make_plan(masters, _as_masters(weights))

    def make(report: Progress) -> Callable[[int], tuple[int, int]]:
        """Return what counts the wrong weights in one piece of the plan."""
        stores = FileStore(plan.source.buffers), FileStore(plan.target.buffers)
        opened.extend(stores)
        master, weight = map(Gatherer, stores)

        def count_wrong(piece: int) -> tuple[int, int]:
            row = int(plan.target_rows[piece])
            shard = plan.target.shards[row]
            found = 0
            for where, bits in _masters(plan, piece, master):
                found += int((_stored_weight(shard, where, weight) != half_up(bits)).sum())
                report(bits.nbytes)
            return row, found

        return count_wrong

    meter = progress("reading masters", plan.num_bytes_read)
    opened: list[FileStore] = []  # by this process; those of forked workers end with them
    try:
        counted = team.map(make, range(len(plan)), plan.shape.prod(axis=1).tolist(), meter)
    finally:
        for store in opened:
            store.close()
    wrong: dict[int, int] = {}
    for row, found in counted:
        if found:
            wrong[row] = wrong.get(row, 0) + found
    names = (f"__bridge_{number}.distcp" for number in count())
    name = next(name for name in names if not (Path(checkpoint.path) / name).exists())
    return Rounding(plan, tuple(sorted(wrong)), sum(wrong.values()), name)


def _as_masters(weights: Manifest) -> Manifest:
    """Return the weights' boxes as places for masters: a float32 tensor, kept in bf16 buffers."""
    builder = ManifestBuilder()
    for buffer in weights.buffers:
        builder.buffer(buffer.file, buffer.offset, buffer.nbytes, buffer.dtype)
    rows = {spec.key: builder.tensor(spec.key, spec.shape, "float32") for spec in weights.tensors}
    for shard in weights.shards:
        builder.shard(rows[shard.key], shard.region, shard.rank, shard.buffer, shard.storage_offset, shard.stride)
    return builder.build()


def _pieces_by_row(plan: Plan) -> Mapping[int, list[int]]:
    found: dict[int, list[int]] = {}
    for piece, row in enumerate(plan.target_rows.tolist()):
        found.setdefault(row, []).append(piece)
    return found


def _masters(plan: Plan, piece: int, gatherer: Gatherer) -> Iterator[tuple[Region, npt.NDArray[np.uint32]]]:
    """Yield (box, bits) of one piece's masters, a block at a time; the array is reused."""
    copy = plan[piece]
    block = aligned_buffer(4 * min(_BLOCK_ELEMENTS, max(copy.region.numel, 1)))
    for offsets, shape in bounded_boxes(copy.region.shape, _BLOCK_ELEMENTS):
        where = Region(tuple(o + i for o, i in zip(copy.region.offsets, offsets, strict=True)), shape)
        bits: npt.NDArray[np.uint32] = np.ndarray(shape, np.uint32, block[: 4 * prod(shape)].data)
        gatherer.gather(bits, "float32", copy.source.buffer, "float32", _start(copy.source, where), copy.source.stride)
        yield where, bits


def _stored_weight(shard: Shard, where: Region, gatherer: Gatherer) -> npt.NDArray[np.uint16]:
    out: npt.NDArray[np.uint16] = np.empty(where.shape, np.uint16)
    gatherer.gather(out, "bfloat16", shard.buffer, "bfloat16", _start(shard, where), shard.stride)
    return out


def _start(shard: Shard, where: Region) -> int:
    """Return where a box begins in a shard's buffer, in elements."""
    steps = zip(where.offsets, shard.region.offsets, shard.stride, strict=True)
    return shard.storage_offset + sum((o - origin) * stride for o, origin, stride in steps)


def _slices(where: Region, inside: Region) -> tuple[Any, ...]:
    return tuple(
        slice(o - origin, o - origin + n)
        for o, origin, n in zip(where.offsets, inside.offsets, where.shape, strict=True)
    )
