"""Plan without data what one of 1,024 ranks reads of a state of 100,000 tensors and 1 TB, and measure the planner.

    python benchmarks/scale.py            # the table of docs/scaling.md
    python benchmarks/scale.py --case tp  # one case

Each case runs in a process of its own. The source manifest is made as numpy columns; planning is the package's own
``make_plan``, for one target rank at a time, as each rank of a run would do it. ``all`` cases give it every shard of
the source, ``own`` cases those in the files that the rank must open: the two or so whose slices meet its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.plan import PeakRss, plan_bytes, resident
from nemo_optim_bridge.core.manifest import Buffer, BufferTable, Manifest, ShardTable, TensorKey, TensorSpec
from nemo_optim_bridge.core.plan import make_plan
from nemo_optim_bridge.core.region import flat_range_boxes
from nemo_optim_bridge.formats.nanotron.layout import zero_slice

NUM_TENSORS = 100_000
STATES = ("weight", "fp32_param", "exp_avg", "exp_avg_sq")
ROWS, COLUMNS = 1024, 2560  # 10 MiB of float32: 1.05 TB in all
UNEVEN = (1021, 2567)  # primes: no ZeRO-1 slice ends with a row

Ints = npt.NDArray[np.int64]


def specs(shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
    """Return the global tensors."""
    return tuple(
        TensorSpec(TensorKey(f"model.layers.{number // 4}.weight", STATES[number % 4]), shape, "float32")
        for number in range(NUM_TENSORS)
    )


def manifest(tensors: tuple[TensorSpec, ...], tensor: Ints, rank: Ints, offsets: Ints, shape: Ints) -> Manifest:
    """Return the manifest of boxes that each rank stores one after the other, in a file of its own."""
    order = np.argsort(rank, kind="stable")
    tensor, rank, offsets, shape = tensor[order], rank[order], offsets[order], shape[order]
    numel = shape.prod(axis=1)
    ranks, buffer, count = np.unique(rank, return_inverse=True, return_counts=True)
    starts = np.cumsum(numel) - numel
    first = np.repeat(starts[np.cumsum(count) - count], count)
    sizes = np.add.reduceat(numel, np.cumsum(count) - count)
    stride = np.stack([shape[:, 1], np.ones(len(shape), np.int64)], axis=1)
    table = ShardTable(tensors, tensor, rank, buffer, starts - first, offsets, shape, stride)
    files = zip(ranks.tolist(), sizes.tolist(), strict=True)
    return Manifest(tensors, table, BufferTable.of(Buffer(f"rank{r}", 0, n * 4, "float32") for r, n in files))


def row_parts(tensor: Ints, parts: Ints, num_parts: int, rank: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the boxes of equal parts along dimension 0."""
    height = ROWS // num_parts
    offsets = np.stack([parts * height, np.zeros_like(parts)], axis=1)
    shape = np.broadcast_to(np.array([height, COLUMNS]), offsets.shape).copy()
    return tensor, rank, offsets, shape


def pairs(tensors: Ints, parts: Ints) -> tuple[Ints, Ints]:
    """Return every tensor with every part."""
    return np.repeat(tensors, len(parts)), np.tile(parts, len(tensors))


@dataclass(frozen=True)
class Case:
    """A change of topology: what of the source a target rank is given, and what it wants."""

    title: str
    shape: tuple[int, ...]
    num_ranks: int
    source: Callable[[tuple[TensorSpec, ...], int], Manifest]
    target: Callable[[tuple[TensorSpec, ...], int], Manifest]
    same_source: bool  # for every rank


ALL = np.arange(NUM_TENSORS)


# ---- tp 64 pp 16 -> tp 32 pp 32: a tensor lies on one stage


def tp_source(tensors: tuple[TensorSpec, ...], rank: int) -> Manifest:
    tensor, part = pairs(ALL, np.arange(64))
    return manifest(tensors, *row_parts(tensor, part, 64, tensor * 16 // NUM_TENSORS * 64 + part))


def tp_own_source(tensors: tuple[TensorSpec, ...], rank: int) -> Manifest:
    stage, part = rank // 32, rank % 32
    mine = ALL[stage // 2 == ALL * 16 // NUM_TENSORS]
    tensor, part64 = pairs(mine, np.array([2 * part, 2 * part + 1]))
    return manifest(tensors, *row_parts(tensor, part64, 64, stage // 2 * 64 + part64))


def tp_target(tensors: tuple[TensorSpec, ...], rank: int) -> Manifest:
    mine = ALL[rank // 32 == ALL * 32 // NUM_TENSORS]
    return manifest(tensors, *row_parts(mine, np.full(len(mine), rank % 32), 32, np.full(len(mine), rank)))


# ---- ZeRO-1: dp 1,024 -> 512


def flat(tensors: tuple[TensorSpec, ...], num_ranks: int, ranks: list[int]) -> Manifest:
    """Return the ZeRO-1 slices of some ranks, of every tensor."""
    offsets, shapes, owners = [], [], []
    for rank in ranks:
        for box in flat_range_boxes(UNEVEN, *zero_slice(prod(UNEVEN), num_ranks, rank)):
            offsets.append(box.offsets)
            shapes.append(box.shape)
            owners.append(rank)
    tensor, box_number = pairs(ALL, np.arange(len(offsets)))
    return manifest(
        tensors, tensor, np.array(owners)[box_number], np.array(offsets)[box_number], np.array(shapes)[box_number]
    )


def zero_own_source(tensors: tuple[TensorSpec, ...], rank: int) -> Manifest:
    start, stop = zero_slice(prod(UNEVEN), 512, rank)
    slices = [zero_slice(prod(UNEVEN), 1024, other) for other in range(1024)]
    return flat(tensors, 1024, [other for other, (a, b) in enumerate(slices) if a < stop and start < b])


def zero_target(tensors: tuple[TensorSpec, ...], rank: int) -> Manifest:
    return flat(tensors, 512, [rank])


# ---- ep 128 tp 8 -> ep 64 tp 16, each expert's matrices being tensors of their own


def ep_source(tensors: tuple[TensorSpec, ...], rank: int) -> Manifest:
    tensor, part = pairs(ALL, np.arange(8))
    return manifest(tensors, *row_parts(tensor, part, 8, tensor % 128 * 8 + part))


def ep_target(tensors: tuple[TensorSpec, ...], rank: int) -> Manifest:
    mine = ALL[rank // 16 == ALL % 128 // 2]
    return manifest(tensors, *row_parts(mine, np.full(len(mine), rank % 16), 16, np.full(len(mine), rank)))


# ---- ep 128 -> 64 at tp 8, all experts of a layer being one stacked tensor that is cut over (ep, tp)


def stacked_own_source(tensors: tuple[TensorSpec, ...], rank: int) -> Manifest:
    tensor, part = pairs(ALL, np.array([2 * rank, 2 * rank + 1]))
    return manifest(tensors, *row_parts(tensor, part, 1024, part))


def stacked_target(tensors: tuple[TensorSpec, ...], rank: int) -> Manifest:
    return manifest(tensors, *row_parts(ALL, np.full(len(ALL), rank), 512, np.full(len(ALL), rank)))


EVEN = (ROWS, COLUMNS)
CASES = {
    "tp": Case("tp 64 pp 16 -> tp 32 pp 32, all", EVEN, 1024, tp_source, tp_target, True),
    "tp-own": Case("tp 64 pp 16 -> tp 32 pp 32, own", EVEN, 1024, tp_own_source, tp_target, False),
    "zero-own": Case("ZeRO-1 dp 1024 -> 512, own", UNEVEN, 512, zero_own_source, zero_target, False),
    "ep": Case("ep 128 tp 8 -> ep 64 tp 16, all", EVEN, 1024, ep_source, ep_target, True),
    "ep-stacked-own": Case(
        "ep 128 tp 8 -> ep 64 tp 8, stacked, own", EVEN, 512, stacked_own_source, stacked_target, False
    ),
}


def measure(name: str) -> dict[str, Any]:
    """Plan for four of the target's ranks; times are of the slowest."""
    case = CASES[name]
    tensors = specs(case.shape)
    before = resident()
    source = case.source(tensors, 0)
    held = resident() - before
    seconds, peaks, plans = [], [], []
    for rank in (0, 1, case.num_ranks // 2 + 1, case.num_ranks - 1):
        if not case.same_source:
            source = case.source(tensors, rank)
        wanted = case.target(tensors, rank)
        used = tuple(tensors[row] for row in np.unique(wanted.shards.tensor).tolist())
        target = _only(wanted, used)
        with PeakRss() as peak:
            start = time.perf_counter()
            plan = make_plan(source, target)
            seconds.append(time.perf_counter() - start)
        peaks.append(peak.gained)
        plans.append(plan)
        if plan.num_bytes_read != plan.num_bytes or plan.num_bytes != sum(run.nbytes for run in target.buffers):
            raise SystemExit(f"{name}: rank {rank} reads {plan.num_bytes_read} bytes for {plan.num_bytes}")
    return {
        "case": case.title,
        "shards": max(len(plan.source.shards) for plan in plans),
        "manifest_mb": round(held / 1e6),
        "files": max(len(np.unique(plan.source.shards.buffer[plan.source_rows])) for plan in plans),
        "pieces": max(plan.pieces for plan in plans),
        "plan_mb": round(max(plan_bytes(plan) for plan in plans) / 1e6, 1),
        "seconds": round(max(seconds), 2),
        "planning_mb": round(max(peaks) / 1e6),
        "rank_reads_gb": round(max(plan.num_bytes_read for plan in plans) / 1e9, 3),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def _only(wanted: Manifest, used: tuple[TensorSpec, ...]) -> Manifest:
    """Return a target with the tensors that it wants and no others, as a rank that builds its own would."""
    table = wanted.shards
    number = np.unique(table.tensor, return_inverse=True)[1].reshape(-1)
    columns = table.rank, table.buffer, table.storage_offset, table.offsets, table.shape, table.stride
    return Manifest(used, ShardTable(used, number, *columns), wanted.buffers)


def main() -> None:
    """Print a table, or a JSON object a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    columns: list[str] = []
    for name in options.case or CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(measure, (name,))
        if options.json:
            sys.stdout.write(json.dumps(found) + "\n")
            continue
        if not columns:
            columns = list(found)
            sys.stdout.write(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n")
        sys.stdout.write(
            "| "
            + " | ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in found.values())
            + " |\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
