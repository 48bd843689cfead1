"""Plans executed into live tensors: whole tensors and boxes, contiguous or not, CPU or CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import nemo_optim_bridge as nob
from nemo_optim_bridge.errors import MissingSourceError, TargetError
from tests.devices import DEVICES, require
from tests.nanotron.fixtures import SAMPLE

TRUTH_NAMES = {"fp32": "fp32_param"}
QKV = "model.decoder.1.pp_block.attn.qkv_proj.weight"
DOWN = "model.decoder.2.pp_block.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def truth(nanotron_fixtures: Path) -> dict[nob.TensorKey, torch.Tensor]:
    tensors = {}
    for name, tensor in load_file(nanotron_fixtures / "truth" / "llama_tied.safetensors").items():
        fqn, state = name.split("|")
        if state != "step":
            tensors[nob.TensorKey(fqn, TRUTH_NAMES.get(state, state))] = tensor
    return tensors


def expect_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.cpu(), expected.to(got.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_whole_tensors_equal_truth(truth: dict[nob.TensorKey, torch.Tensor], device: str) -> None:
    require(device)
    merged = nob.merge_tensors(nob.read_checkpoint(SAMPLE).manifest, device=device)
    assert set(merged) == set(truth)
    assert merged[nob.TensorKey(QKV, "weight")].dtype == torch.bfloat16
    for key, tensor in merged.items():
        assert tensor.device.type == device
        expect_equal(tensor, truth[key])


def test_boxes_into_strided_tensors_touch_nothing_else(truth: dict[nob.TensorKey, torch.Tensor]) -> None:
    manifest = nob.read_checkpoint(SAMPLE).manifest
    memory = torch.full((40, 96), -7.0)
    qkv = memory[3:13, 5:21].t()  # 16 x 10, transposed and with gaps
    down = memory[20:36:2, 40:80]
    qkv_key, down_key = nob.TensorKey(QKV, "exp_avg"), nob.TensorKey(DOWN, "exp_avg_sq")
    nob.load_tensors(
        manifest,
        [(qkv_key, nob.Region((24, 11), (16, 10)), qkv), (down_key, nob.Region((8, 13), (8, 40)), down)],
    )
    expect_equal(qkv, truth[qkv_key][24:40, 11:21])
    expect_equal(down, truth[down_key][8:16, 13:53])
    qkv.fill_(-7.0)
    down.fill_(-7.0)
    assert (memory == -7.0).all()


def test_what_is_not_there_is_refused_before_anything_is_written() -> None:
    manifest = nob.read_checkpoint(SAMPLE).manifest
    out, unknown = torch.full((64, 32), 5.0), torch.full((4,), 5.0)
    key, nowhere = nob.TensorKey(QKV, "exp_avg"), nob.TensorKey("model.nowhere", "exp_avg")
    boxes = [(key, nob.Region((0, 0), (64, 32)), out), (nowhere, nob.Region((0,), (4,)), unknown)]
    with pytest.raises(MissingSourceError, match=r"no such tensor.*model\.nowhere\|exp_avg.*rank 3"):
        nob.load_tensors(manifest, boxes, rank=3)
    with pytest.raises(TargetError, match=r"float32.*bfloat16"):
        nob.load_tensors(manifest, [(key, nob.Region((0, 0), (64, 32)), out.bfloat16())])
    with pytest.raises(TargetError, match=r"shape \(64, 32\)"):
        nob.load_tensors(manifest, [(key, nob.Region((0, 0), (64, 16)), out)])
    with pytest.raises(TargetError, match="no such tensor"):
        nob.merge_tensors(manifest, [nowhere])
    assert (out == 5.0).all() and (unknown == 5.0).all()
