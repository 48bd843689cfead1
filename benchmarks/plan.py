"""Measure planning alone: time, size and peak memory per piece.

Run one case per process: ``python benchmarks/plan.py --case tp --pieces 1000000``. Peak memory is what the process
gained over the manifests, which are built before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.manifest import Manifest, TensorKey
from nemo_optim_bridge.core.plan import Plan, make_plan
from nemo_optim_bridge.core.region import Region, flat_range_boxes

Boxes = Callable[[int], list[Region]]  # tensor number -> box of each rank, in rank order


def manifest(num_tensors: int, shape: tuple[int, ...], boxes: Boxes) -> Manifest:
    """Return a manifest whose ranks are listed one after the other, with one buffer per rank."""
    builder = ManifestBuilder()
    ranks: dict[int, list[tuple[int, Region]]] = {}
    for number in range(num_tensors):
        tensor = builder.tensor(TensorKey(f"model.layers.{number}.weight", "exp_avg"), shape, "float32")
        for rank, region in enumerate(boxes(number)):
            ranks.setdefault(rank, []).append((tensor, region))
    for rank, shards in ranks.items():
        buffer = builder.buffer(f"rank{rank}", 0, sum(region.numel for _, region in shards) * 4, "float32")
        offset = 0
        for tensor, region in shards:
            builder.shard(tensor, region, rank, buffer, offset)
            offset += region.numel
    return builder.build()


def split(shape: tuple[int, ...], tp: int) -> Boxes:
    """Return a tensor parallel layout: even tensors split along dim 0, odd ones along dim 1."""
    return lambda number: list(Region.full(shape).split(number % 2, tp))


def zero(shape: tuple[int, ...], dp: int) -> Boxes:
    """Return ZeRO-1 flat ranges of uneven size."""
    numel = shape[0] * shape[1]
    cuts = [numel * rank // dp for rank in range(dp + 1)]
    return lambda _: [box for a, b in pairwise(cuts) for box in flat_range_boxes(shape, a, b)]


def grid(shape: tuple[int, ...], rows: int, columns: int) -> Boxes:
    """Return a two-dimensional grid."""
    boxes = [part for row in Region.full(shape).split(0, rows) for part in row.split(1, columns)]
    return lambda _: boxes


def experts(shape: tuple[int, ...], ep: int, tp: int) -> Boxes:
    """Return expert tensors split along dim 0 over ep and along dim 1 or 2 over tp."""
    return lambda number: [
        part for group in Region.full(shape).split(0, ep) for part in group.split(1 + number % 2, tp)
    ]


def replicated(shape: tuple[int, ...], tp: int, copies: int) -> Boxes:
    """Return a tensor parallel layout that ``copies`` ranks hold each."""
    return lambda number: list(Region.full(shape).split(number % 2, tp)) * copies


#: name -> (pieces per tensor, shape, source, target)
CASES: dict[str, tuple[int, tuple[int, ...], Boxes, Boxes]] = {
    "tp": (64, (4096, 4096), split((4096, 4096), 64), split((4096, 4096), 32)),
    "tp-up": (64, (4096, 4096), split((4096, 4096), 32), split((4096, 4096), 64)),
    "zero": (200, (1000, 1001), zero((1000, 1001), 64), zero((1000, 1001), 48)),
    "grid": (1024, (4096, 4096), grid((4096, 4096), 32, 16), grid((4096, 4096), 16, 32)),
    "one-grid": (1 << 20, (4096, 4096), grid((4096, 4096), 1024, 512), grid((4096, 4096), 512, 1024)),
    "experts": (128, (64, 1024, 1024), experts((64, 1024, 1024), 16, 4), experts((64, 1024, 1024), 8, 8)),
    "replicas": (64, (4096, 4096), replicated((4096, 4096), 64, 4), split((4096, 4096), 32)),
}


class PeakRss:
    """Sample this process's resident memory while the block runs; ``gained`` is in bytes."""

    def __enter__(self) -> PeakRss:
        self._start = self._peak = resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self._peak = max(self._peak, resident())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def gained(self) -> int:
        """Bytes above the start."""
        return max(self._peak, resident()) - self._start


def resident() -> int:
    """Return this process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def plan_bytes(plan: Plan) -> int:
    """Return the bytes that a plan's own columns hold."""
    columns = (plan.source_rows, plan.target_rows, plan.offsets, plan.shape, plan.replicas, plan.buffer_starts)
    return sum(column.nbytes for column in columns)


def main() -> None:
    """Print one case's numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, default="tp")
    parser.add_argument("--pieces", type=int, default=1_000_000, help="about how many (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    per_tensor, shape, source_boxes, target_boxes = CASES[options.case]
    num_tensors = max(1, round(options.pieces / per_tensor))
    source, target = manifest(num_tensors, shape, source_boxes), manifest(num_tensors, shape, target_boxes)
    with PeakRss() as peak:
        plan = make_plan(source, target)
    wall, cpu = [], []
    for _ in range(options.rounds):
        start, start_cpu = time.perf_counter(), time.process_time()
        make_plan(source, target)
        wall.append((time.perf_counter() - start) / plan.pieces * 1e6)
        cpu.append((time.process_time() - start_cpu) / plan.pieces * 1e6)
    result = {
        "case": options.case,
        "pieces": plan.pieces,
        "sources": len(source.shards),
        "targets": len(target.shards),
        "us_per_piece": round(median(wall), 3),
        "us_per_piece_min": round(min(wall), 3),
        "cpu_us_per_piece": round(median(cpu), 3),
        "plan_bytes_per_piece": round(plan_bytes(plan) / plan.pieces, 1),
        "peak_bytes_per_piece": round(peak.gained / plan.pieces, 1),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    text = json.dumps(result) if options.json else "  ".join(f"{name} {value}" for name, value in result.items())
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
