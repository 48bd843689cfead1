"""Lightning's container and Megatron-LM's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_optim_bridge.errors import TargetError
from nemo_optim_bridge.formats.torch_dist import read_torch_dist
from nemo_optim_bridge.formats.torch_dist.convert import Options, convert
from nemo_optim_bridge.formats.torch_dist.retarget import matched_schedulers
from nemo_optim_bridge.formats.torch_dist.saved import DISTOPT, DISTRIBUTED, FLOAT16, LIGHTNING, MEGATRON
from tests.convert.same import verify

SCHEDULER = {
    "max_lr": 0.01, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 100, "lr_decay_style": "cosine",
    "start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant", "wd_incr_steps": 100, "num_steps": 24,
}  # fmt: skip


@pytest.fixture
def scheduler_file(tmp_path: Path) -> Path:
    file = tmp_path / "scheduler.json"
    file.write_text(json.dumps(SCHEDULER))
    return file


def test_to_megatron_and_back(megatron_fixtures: Path, tmp_path: Path, scheduler_file: Path) -> None:
    source = megatron_fixtures / "fused_moe_ep2" / "ckpt"
    options = Options(to=DISTOPT, container=MEGATRON, scheduler_state=scheduler_file)
    summary = convert(source, tmp_path / "iter", options)
    made = read_torch_dist(tmp_path / "iter")
    assert made.common["iteration"] == 3
    assert made.common["opt_param_scheduler"] == SCHEDULER
    assert made.common["content_metadata"] == {
        "distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }  # fmt: skip
    assert sorted(made.common["optimizer"]) == [0, 1]
    assert "optimizer_states" not in made.common
    assert not any(key.startswith("model.") or ".model." in key for key in (*made.tensors, *made.objects))
    assert any("iter_0000003" in remark for remark in summary["remarks"])
    assert verify(source, tmp_path / "iter").same

    convert(tmp_path / "iter", tmp_path / "back", Options(to=DISTRIBUTED, container=LIGHTNING, no_decay=("*bias",)))
    back = read_torch_dist(tmp_path / "back")
    assert set(back.common) >= {"epoch", "global_step", "lr_schedulers", "loops", "state_dict", "optimizer_states"}
    assert set(read_torch_dist(source).objects) == set(back.objects)
    assert verify(source, tmp_path / "back").same


def test_without_a_scheduler_megatron_cannot_resume(megatron_fixtures: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="--scheduler-state"):
        convert(megatron_fixtures / "fused_moe_ep1" / "ckpt", tmp_path / "out", Options(to=FLOAT16, container=MEGATRON))


def test_within_megatron(megatron_fixtures: Path, tmp_path: Path, scheduler_file: Path) -> None:
    source = megatron_fixtures / "mcore_distopt_moe_ep2_fully_reshardable" / "ckpt"
    convert(source, tmp_path / "a", Options(to=DISTOPT, container=MEGATRON, scheduler_state=scheduler_file))
    convert(tmp_path / "a", tmp_path / "b", Options(to=FLOAT16))
    content = read_torch_dist(tmp_path / "b").common["content_metadata"]
    assert content == {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    assert verify(source, tmp_path / "b").same


def test_what_lightning_needs_is_added(megatron_fixtures: Path, tmp_path: Path) -> None:
    source = megatron_fixtures / "mcore_float16_moe_ep1" / "ckpt"
    summary = convert(source, tmp_path / "out", Options(to=DISTRIBUTED))
    common = read_torch_dist(tmp_path / "out").common
    assert common["lr_schedulers"] == [{"last_epoch": 3, "_last_lr": [0.0096, 0.0096]}]
    assert any("lr_schedulers" in remark for remark in summary["remarks"])


@pytest.mark.parametrize(
    ("partner", "expected"), [((0, 2), [1.0, 3.0]), ((0, 0, 1, 2), [1.0, 1.0, 2.0, 3.0]), ((2, 1, 0), [3.0, 2.0, 1.0])]
)
def test_lists_of_schedulers_follow_the_groups(partner: tuple[int, ...], expected: list[float]) -> None:
    scheduler: dict[str, Any] = {"base_lrs": [1.0, 2.0, 3.0], "_last_lr": (1.0, 2.0, 3.0), "milestones": [5, 6, 7]}
    (made,) = matched_schedulers([scheduler], 3, partner)
    assert made == {"base_lrs": expected, "_last_lr": tuple(expected), "milestones": [5, 6, 7]}
    assert scheduler["base_lrs"] == [1.0, 2.0, 3.0]
