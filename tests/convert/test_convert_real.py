"""The real NeMo and megatron-core optimizers load conversions by their own requests, at several topologies.

Whole masters and moments are compared bit by bit, and step and hyperparameters parameter by parameter, after the load.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_optim_bridge.core.live import merge_tensors
from nemo_optim_bridge.formats.torch_dist.convert import Options, convert
from nemo_optim_bridge.formats.torch_dist.manifest import TorchDistState, read_manifest
from nemo_optim_bridge.formats.torch_dist.saved import DISTOPT, DISTRIBUTED, FLOAT16, FUSED, LIGHTNING, MEGATRON
from tests.convert.test_containers import SCHEDULER

pytestmark = pytest.mark.nemo

NEMO_TESTS = Path(__file__).parent.parent / "nemo"
#: What the real optimizers are asked for; the scheduler's max_lr and min_lr are in their groups as well.
NAMES = ("lr", "betas", "eps", "weight_decay")
FULLY = {"distrib_optim_sharding_type": "fully_reshardable"}
STORED = {"store_params": True, "store_param_remainders": False}

#: (world, tp, ep) at which each target loads.
TOPOLOGIES = {
    FUSED: [(1, 1, 1), (2, 1, 2)],
    DISTRIBUTED: [(1, 1, 1), (2, 1, 1)],
    FLOAT16: [(1, 1, 1), (2, 1, 2)],
    DISTOPT: [(2, 1, 1), (2, 1, 2)],
}
SOURCES = (
    "fused_moe_ep1", "fused_moe_ep2", "fused_moe_tp2", "fused_moe_step0", "dist_moe_stock_keys", "dist_moe_bridge_dp2",
    "mcore_float16_moe_ep1", "mcore_distopt_moe_ep2_fully_reshardable",
)  # fmt: skip


@pytest.fixture(scope="module")
def real() -> Iterator[Any]:
    sys.path[:0] = [str(NEMO_TESTS), str(Path(__file__).parent)]  # for the processes that are spawned as well
    from nemo_checks import have_nemo
    from nemo_rig import Rig

    if not have_nemo():
        pytest.skip("NeMo or megatron-core is not installed")
    started = Rig("convert_jobs")
    yield started
    started.close()


def check(source: TorchDistState, results: list[dict[str, Any]]) -> None:
    from nemo_checks import assemble

    found = assemble(results)
    wanted = {f"{key.state}.{key.fqn}": t for key, t in merge_tensors(source.manifest).items() if key.state != "weight"}
    assert wanted.keys() <= found.keys()
    for name, tensor in wanted.items():
        assert np.array_equal(found[name].view(np.int32), tensor.numpy().view(np.int32)), name
    seen = {key: values for result in results for values, keys in result["groups"] for key in keys}
    expected = {
        fqn: {**{name: values[name] for name in NAMES}, "step": source.saved.step}
        for fqn, values in source.hyperparameters.items()
    }
    assert seen == expected


def load(rig: Any, path: Path, to: str, world: int, tp: int, ep: int, **options: Any) -> list[dict[str, Any]]:
    where = {"path": str(path), "tp": tp, "ep": ep, **options}
    if to == FUSED:
        return rig.run("fused", world, **where)
    if to == DISTRIBUTED:
        return rig.run("distributed", world, **where, **STORED)
    if to == DISTOPT:
        where.setdefault("metadata", FULLY)
    return rig.run("megatron", world, kind=to, **where)


@pytest.mark.parametrize("to", TOPOLOGIES)
@pytest.mark.parametrize("name", SOURCES)
def test_the_target_loads_it(real: Any, megatron_fixtures: Path, tmp_path: Path, name: str, to: str) -> None:
    source = read_manifest(megatron_fixtures / name / "ckpt")
    for number, (world, tp, ep) in enumerate(TOPOLOGIES[to]):
        out = tmp_path / str(number)
        convert(Path(source.checkpoint.path), out, Options(to=to, target_ep=ep))
        check(source, load(real, out, to, world, tp, ep, bias_only=not source.saved.is_megatron))


@pytest.mark.parametrize("to", TOPOLOGIES)
def test_tensor_parallel(real: Any, megatron_fixtures: Path, tmp_path: Path, to: str) -> None:
    source = read_manifest(megatron_fixtures / "fused_moe_ep2" / "ckpt")
    convert(Path(source.checkpoint.path), tmp_path / "out", Options(to=to, target_ep=1))
    check(source, load(real, tmp_path / "out", to, 2, 2, 1, bias_only=True))


@pytest.mark.parametrize("to", TOPOLOGIES)
def test_dense(real: Any, megatron_fixtures: Path, tmp_path: Path, to: str) -> None:
    source = read_manifest(megatron_fixtures / "fused_dense" / "ckpt")
    convert(Path(source.checkpoint.path), tmp_path / "out", Options(to=to))
    check(source, load(real, tmp_path / "out", to, 2, 2, 1, bias_only=True, moe=False))


@pytest.mark.parametrize("prefix", ["no", "yes"])
@pytest.mark.parametrize("to", [FLOAT16, DISTOPT])
def test_chained_prefixes(real: Any, megatron_fixtures: Path, tmp_path: Path, to: str, prefix: str) -> None:
    source = read_manifest(megatron_fixtures / "fused_moe_ep1" / "ckpt")
    convert(Path(source.checkpoint.path), tmp_path / "out", Options(to=to, target_ep=2, chained_prefix=prefix))
    metadata = {**(FULLY if to == DISTOPT else {}), "chained_optim_avoid_prefix": prefix == "no"}
    check(source, load(real, tmp_path / "out", to, 2, 1, 2, bias_only=True, metadata=metadata))


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("to", [FLOAT16, DISTOPT])
def test_megatron_container(real: Any, megatron_fixtures: Path, tmp_path: Path, to: str, ep: int) -> None:
    import json

    (tmp_path / "scheduler.json").write_text(json.dumps(SCHEDULER))
    source = read_manifest(megatron_fixtures / "fused_moe_ep1" / "ckpt")
    options = Options(to=to, target_ep=ep, container=MEGATRON, scheduler_state=tmp_path / "scheduler.json")
    convert(Path(source.checkpoint.path), tmp_path / "out", options)
    check(source, load(real, tmp_path / "out", to, 2, 1, ep, bias_only=True, container="megatron"))
    back = Options(to=FUSED, target_ep=2, container=LIGHTNING, no_decay=("*bias",))
    convert(tmp_path / "out", tmp_path / "back", back)
    check(source, load(real, tmp_path / "back", FUSED, 2, 1, 2, bias_only=True))


@pytest.mark.parametrize("style", ["stock", "both"])
def test_exact_remainders(real: Any, megatron_fixtures: Path, tmp_path: Path, style: str) -> None:
    source = read_manifest(megatron_fixtures / "fused_moe_ep2" / "ckpt")
    options = Options(to=DISTRIBUTED, key_style=style, exact_remainders=True)
    convert(Path(source.checkpoint.path), tmp_path / "out", options)
    check(source, real.run("distributed", 2, path=str(tmp_path / "out")))
    convert(Path(source.checkpoint.path), tmp_path / "plain", Options(to=DISTRIBUTED, key_style=style))
    with pytest.raises(AssertionError):  # a tie of rounding
        check(source, real.run("distributed", 2, path=str(tmp_path / "plain")))
