"""Measure planning alone: time and memory a piece, each the median of fresh processes.

    python benchmarks/plan.py                                # tp 64 -> 32, a million pieces
    python benchmarks/plan.py --case grid --case zero --processes 9

Prints a Markdown table. ``us`` is the wall time and ``CPU us`` the processor time of a process's second plan, the first
of which touched fresh memory; ``peak bytes`` is what the process gained while it made the first one over the
manifests, which are built before the clock starts, and ``held bytes`` what the plan itself keeps.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

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


def measure(case: str, pieces: int) -> dict[str, Any]:
    """Plan a case twice in this process; times are in microseconds a piece, sizes in bytes a piece."""
    per_tensor, shape, source_boxes, target_boxes = CASES[case]
    num_tensors = max(1, round(pieces / per_tensor))
    source, target = manifest(num_tensors, shape, source_boxes), manifest(num_tensors, shape, target_boxes)
    with PeakRss() as peak:
        plan = make_plan(source, target)
    start, start_cpu = time.perf_counter(), time.process_time()
    make_plan(source, target)
    wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    return {
        "pieces": plan.pieces,
        "sources": len(source.shards),
        "targets": len(target.shards),
        "us": wall / plan.pieces * 1e6,
        "cpu_us": cpu / plan.pieces * 1e6,
        "peak_bytes": peak.gained / plan.pieces,
        "held_bytes": plan_bytes(plan) / plan.pieces,
    }


def main() -> None:
    """Measure the cases asked for, and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: tp")
    parser.add_argument("--pieces", type=int, default=1_000_000, help="about how many (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=5, help="fresh ones for each case (default: %(default)s)")
    parser.add_argument("--run", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(measure(options.run, options.pieces)))
        return
    print("| case | pieces | shards, source | target | us a piece | CPU us | peak bytes | held bytes |")
    print("|---" * 8 + "|")
    for case in options.case or ["tp"]:
        command = [sys.executable, __file__, "--run", case, "--pieces", str(options.pieces)]
        runs = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for _ in range(options.processes)
        ]
        counts = " | ".join(f"{runs[0][name]:,}" for name in ("pieces", "sources", "targets"))
        times = " | ".join(_median(runs, name, 3) for name in ("us", "cpu_us"))
        sizes = " | ".join(_median(runs, name, 0) for name in ("peak_bytes", "held_bytes"))
        print(f"| {case} | {counts} | {times} | {sizes} |", flush=True)


def _median(runs: list[dict[str, Any]], name: str, digits: int) -> str:
    values = [run[name] for run in runs]
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    main()
