"""What a rank of the in-training load keeps of a checkpoint's headers: what its own boxes need, and no more.

Objects are counted. tracemalloc is no choice here: with gloo's threads it crashes CPython 3.11 now and then.
"""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from nemo_optim_bridge.formats.nanotron.reader import read_checkpoint
from nemo_optim_bridge.formats.nanotron.reshard import Options, plan_reshard
from nemo_optim_bridge.plugins import nanotron as plugin
from nemo_optim_bridge.plugins.nanotron.loader import _Load
from tests.plugins.test_nanotron import SOURCE, build
from tests.plugins.world import run_world


def count_objects() -> Counter[str]:
    """Return how many objects there are of each class of the package."""
    kinds = (type(thing) for thing in gc.get_objects())
    return Counter(kind.__name__ for kind in kinds if str(kind.__module__).startswith("nemo_optim_bridge"))


def keep(rank: int, checkpoint: Path) -> dict[str, Any]:
    """Load at ZeRO-1 dp 2; return which objects there are more of after planning, and while headers are held."""
    optimizer, context = build(checkpoint, "dp")
    plugin.load_optimizer(optimizer, context, checkpoint)  # fills caches, which do not grow with the checkpoint
    found: dict[str, Any] = {}
    whole = _Load.check

    def look_and_check(load: _Load, *args: Any) -> None:
        found["kept"] = count_objects() - before
        found["buffers"] = sum(
            len(part.plan.source.buffers) + len(part.plan.target.buffers)
            for part in (load.states_load, load.masters_load)
        )
        whole(load, *args)

    gc.collect()
    before = count_objects()
    with mock.patch.object(_Load, "check", look_and_check):
        plugin.load_optimizer(optimizer, context, checkpoint)
    source = read_checkpoint(checkpoint)
    found["parameters"] = len(source.layouts)
    found["stored"] = len(source.manifest.buffers)
    return found


def test_the_headers_of_other_ranks_are_gone_before_anything_is_read(nanotron_fixtures: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    options = Options(tp=4, pp=1, dp=8, zero_stage=1, receipt=False, fsync=False)
    plan_reshard(nanotron_fixtures / "checkpoints" / SOURCE, wide, options).run()
    for found in run_world(2, keep, wide):
        kept = found["kept"]
        assert found["buffers"] < found["stored"]
        own = found["parameters"]
        assert set(kept) <= {
            "TensorSpec", "TensorKey", "RunningParameter", "RunningOptimizer", "Topology", "Coordinates", "Manifest",
            "ShardTable", "BufferTable", "Plan", "TensorLoad", "_Load",
        }  # fmt: skip
        assert max(kept["TensorSpec"], kept["TensorKey"]) <= 2 * 3 * own  # both sides of a plan, three states
        assert kept["RunningParameter"] <= own
