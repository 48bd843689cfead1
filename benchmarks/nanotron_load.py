"""Measure what the in-training load costs a rank, in the real nanotron 0.4 on CPU: memory, bytes read, time.

    PYTHONPATH=. NANOTRON_PYTHON benchmarks/nanotron_load.py CHECKPOINT --tp 2 --zero 1 --dp 2

CHECKPOINT is one that ``benchmarks/synthetic.py`` made. Prints a line a rank. ``new`` is what the load must allocate:
the moments; the masters, which it fills in place, are there already. ``gain`` is the peak resident memory during the
load over that before it, so ``gain - new`` is the overhead: headers, plan and buffers.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "nanotron"))
import real_nanotron_driver as real


@dataclass(frozen=True)
class Job(real.Job):
    """A topology, and whether to load with nanotron's own loader instead."""

    own_loader: bool = False


def resident(field: str) -> int:
    """Return a field of this process's memory status in bytes: VmRSS, or VmHWM for the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def measure(job: Job) -> dict[str, Any]:
    """Load on this rank; return what it took."""
    import nanotron.serialize.optimizer as serialize
    from nanotron.parallel import ParallelContext
    from nanotron.serialize.weights import load_weights

    from nemo_optim_bridge.plugins import nanotron as plugin

    if not job.own_loader:
        plugin.install()
    context = ParallelContext(
        tensor_parallel_size=job.tp, pipeline_parallel_size=job.pp, data_parallel_size=job.dp, expert_parallel_size=1
    )
    model = real.build_model(job, context)
    shards = load_weights(model=model, parallel_context=context, root_folder=job.checkpoint)
    optimizer, _ = real.build_optimizer(job, model, context, has_masters=True)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    start = time.perf_counter()
    report = serialize.load_optimizer(
        optimizer=optimizer,
        parallel_context=context,
        root_folder=job.checkpoint,
        param_shard_metadata=shards,
        model=model,
    )
    seconds = time.perf_counter() - start
    moments = sum(v.nbytes for s in optimizer.get_base_optimizer().state.values() for v in s.values() if v.ndim)
    masters = sum(value.nbytes for value in optimizer.state_dict()["gradient_accumulator"].values())
    return {
        "state": moments + masters, "new": moments, "gain": resident("VmHWM") - before, "seconds": seconds,
        "read": report.num_bytes_read if report else 0, "rss_before": before,
    }  # fmt: skip


def main() -> int:
    """Print a line a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    for name, default in (("tp", 1), ("pp", 1), ("dp", 1), ("zero", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--own-loader", action="store_true", help="nanotron's own, for comparison")
    options = vars(parser.parse_args())
    job = Job(truth=Path(), **options)
    real.prepare_imports()
    import nemo_optim_bridge.plugins.nanotron  # noqa: F401  imported once, before the ranks are forked

    found = real.run_world(job, 500, measure)
    for rank, value in sorted(found.items()):
        if "error" in value:
            print(f"rank {rank}: {value['error']}")
            continue
        mib = {key: value[key] / 2**20 for key in ("state", "new", "gain", "read", "rss_before")}
        print(
            f"rank {rank}: state {mib['state']:.0f} MiB, new {mib['new']:.0f}, gain {mib['gain']:.0f}, "
            f"gain - new {mib['gain'] - mib['new']:.1f}, read {mib['read']:.0f}, {value['seconds']:.1f} s; "
            f"before {mib['rss_before']:.0f}"
        )
    print(f"driver peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
