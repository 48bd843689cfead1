"""Where masters come from, and numbers that an optimizer keeps as tensors."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from nemo_optim_bridge.core.manifest import TensorKey
from nemo_optim_bridge.errors import MissingSourceError
from nemo_optim_bridge.formats.torch_dist import read_torch_dist
from nemo_optim_bridge.formats.torch_dist.convert import Options, convert
from nemo_optim_bridge.formats.torch_dist.document import load_document
from nemo_optim_bridge.formats.torch_dist.manifest import read_manifest
from nemo_optim_bridge.formats.torch_dist.metadata import renamed_metadata
from nemo_optim_bridge.formats.torch_dist.saved import DISTRIBUTED, FUSED, KINDS
from nemo_optim_bridge.formats.torch_zip import NewTensor
from tests.convert.same import verify
from tests.convert.test_convert import edited

MASTER = "optimizer.state.fp32_param."


def as_plain_fused_adam(tree: dict[Any, Any]) -> None:
    groups = tree["optimizer_states"][0]["optimizer"]["param_groups"]
    tree["optimizer_states"] = [{"state": {}, "param_groups": groups}]


def without_masters(source: Path, target: Path, *, float32: bool) -> Path:
    """A checkpoint of a fused_adam that keeps no masters; with ``float32`` its weights are what the masters were."""
    edited(source, target, as_plain_fused_adam)

    def rename(key: str) -> list[str]:
        if key.startswith(MASTER):
            return [key.removeprefix(MASTER)] if float32 else []
        is_weight = key.startswith("model.") and "_extra_state" not in key
        return [] if float32 and is_weight else [key]

    (target / ".metadata").write_bytes(renamed_metadata(load_document(target), rename))
    return target


@pytest.mark.parametrize("to", KINDS)
def test_a_float32_weight_is_its_master(megatron_fixtures: Path, tmp_path: Path, to: str) -> None:
    original = megatron_fixtures / "fused_moe_ep1" / "ckpt"
    source = without_masters(original, tmp_path / "in", float32=True)
    summary = convert(source, tmp_path / "out", Options(to=to))
    assert any("13 float32 parameters" in remark for remark in summary["remarks"])
    found = verify(original, tmp_path / "out")
    assert {key.state for key, _, _ in found.mismatched} == {"weight"}
    assert not found.tensors
    assert not found.scalars
    manifest = read_manifest(tmp_path / "out").manifest
    name = "model.decoder.final_layernorm.weight"
    places = [
        {(s.buffer, s.storage_offset) for s in manifest.shards if s.key == TensorKey(name, state)}
        for state in ("fp32_param", "weight")
    ]
    assert places[0] == places[1] != set()


def test_a_rounded_weight_is_not(megatron_fixtures: Path, tmp_path: Path) -> None:
    source = without_masters(megatron_fixtures / "fused_moe_ep1" / "ckpt", tmp_path / "in", float32=False)
    with pytest.raises(MissingSourceError, match="weight of bfloat16, whose lower bits are lost"):
        convert(source, tmp_path / "out", Options(to=DISTRIBUTED))
    assert not (tmp_path / "out").exists()


def test_steps_and_rates_as_tensors(megatron_fixtures: Path, tmp_path: Path) -> None:
    def capturable(tree: dict[Any, Any]) -> None:
        for group in tree["optimizer_states"][0]["optimizer"]["param_groups"]:
            group["step"] = NewTensor("int32", (1,), struct.pack("<i", 3))
            group["lr"] = NewTensor("float32", (), struct.pack("<f", 0.5))

    source = edited(megatron_fixtures / "fused_moe_ep1" / "ckpt", tmp_path / "in", capturable)
    convert(source, tmp_path / "out", Options(to=DISTRIBUTED))
    state = read_torch_dist(tmp_path / "out").common["optimizer_states"][0]
    assert state["state"]["step"] == 3
    assert [group["lr"] for group in state["param_groups"]] == [0.5, 0.5]


def test_two_spellings_of_one_master_must_be_the_same_bytes(megatron_fixtures: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(megatron_fixtures / "fused_moe_ep1" / "ckpt", source)
    moment = "optimizer.state.exp_avg.model.decoder.final_layernorm.weight"
    other = moment.replace("exp_avg", "param")
    data = renamed_metadata(load_document(source), lambda key: [key, other] if key == moment else [key])
    (source / ".metadata").write_bytes(data)
    with pytest.raises(Exception, match="not as the same bytes"):
        convert(source, tmp_path / "out", Options(to=FUSED))
