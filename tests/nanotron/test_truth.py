"""Every tensor that the package merges from every real checkpoint equals the ground truth, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_optim_bridge.core.compare import require_equal_replicas
from nemo_optim_bridge.core.manifest import TensorKey
from nemo_optim_bridge.core.plan import make_plan
from nemo_optim_bridge.core.team import Workers
from nemo_optim_bridge.formats.nanotron.reader import read_checkpoint
from tests.compare import differ
from tests.nanotron.fixtures import Fixture, read_index
from tests.nanotron.merge import load_optimizer, merge, whole_tensors
from tests.nanotron.pair_table import run_cli

FIXTURES = read_index()
LOST = "moe-moe_e4-z0-tp1-pp1-dp1-ep4"
W1, W2 = (f"block_sparse_moe.experts.mlp.{name}.module.weight" for name in ("w1", "w2"))
VOCABULARY = ("model.token_position_embeddings.pp_block.token_embedding.weight", "model.lm_head.pp_block.weight")


def read_truth(folder: Path, model: str) -> dict[TensorKey, torch.Tensor]:
    """Return the ground truth under the package's names: the master is ``fp32_param``."""
    tensors = load_file(folder / "truth" / f"{model}.safetensors")
    named = ((*name.split("|"), tensor) for name, tensor in tensors.items())
    return {TensorKey(fqn, "fp32_param" if state == "fp32" else state): tensor for fqn, state, tensor in named}


@pytest.mark.parametrize("fixture", FIXTURES.values(), ids=FIXTURES)
def test_every_merged_tensor_is_the_truth(fixture: Fixture, nanotron_fixtures: Path) -> None:
    truth = read_truth(nanotron_fixtures, fixture.model)
    checkpoint = read_checkpoint(nanotron_fixtures / "checkpoints" / fixture.name, fixture.vocab_size)
    merged = merge(checkpoint)
    steps = {TensorKey(fqn, "step"): torch.tensor(step) for fqn, step in checkpoint.manifest.steps.items()}
    assert merged.keys() | steps.keys() == truth.keys()
    assert {key: problems for key, t in {**merged, **steps}.items() if (problems := differ(truth[key], t))} == {}


@pytest.mark.parametrize("fixture", FIXTURES.values(), ids=FIXTURES)
def test_all_replicas_are_equal(fixture: Fixture, nanotron_fixtures: Path) -> None:
    checkpoint = read_checkpoint(nanotron_fixtures / "checkpoints" / fixture.name)
    plan = make_plan(checkpoint.manifest, whole_tensors(checkpoint.manifest))
    count = require_equal_replicas(plan, Workers(1))
    assert count == len(plan.replicas)
    assert (count > 0) == (fixture.tp > 1 or fixture.ep > 1 or (fixture.is_tied and fixture.pp > 1))


def test_padding_rows_are_left_out_or_kept(nanotron_fixtures: Path) -> None:
    truth = read_truth(nanotron_fixtures, "llama_vpad_untied")
    path = nanotron_fixtures / "checkpoints" / "nt04-llama_vpad_untied-z0-tp4-pp1-dp1-ep1"
    cut, stored = merge(read_checkpoint(path, 126)), merge(read_checkpoint(path))
    for fqn in VOCABULARY:
        for state in ("weight", "exp_avg", "exp_avg_sq", "fp32_param"):
            key = TensorKey(fqn, state)
            assert cut[key].shape == (126, 32)
            assert stored[key].shape == (128, 32)
            assert differ(truth[key], stored[key][:126]) == []
            assert stored[key][126:].count_nonzero() > 0


def test_lost_weights_are_the_rounded_masters(nanotron_fixtures: Path) -> None:
    checkpoint = read_checkpoint(nanotron_fixtures / "checkpoints" / LOST)
    merged = merge(checkpoint)
    truth = read_truth(nanotron_fixtures, "moe_e4")
    experts = [fqn for fqn in checkpoint.layouts if fqn.endswith((W1, W2))]
    assert sorted(experts) == sorted(checkpoint.rebuilt)
    assert len(experts) == 2 * checkpoint.facts.num_layers
    for fqn in experts:
        rounded = merged[TensorKey(fqn, "fp32_param")].to(torch.bfloat16)
        assert differ(rounded, merged[TensorKey(fqn, "weight")]) == []
        assert differ(truth[TensorKey(fqn, "weight")], rounded) == []


def test_one_expert_per_rank_stores_w2_transposed(nanotron_fixtures: Path) -> None:
    """What is on disk, read with torch alone: expert k of the truth is rank k's w1 as it is and w2 turned."""
    folder = nanotron_fixtures / "checkpoints" / LOST
    truth = read_truth(nanotron_fixtures, "moe_e4")
    rows = read_checkpoint(folder).facts.intermediate_size
    turned = 0
    for expert in range(4):
        content = torch.load(
            folder / "optimizer" / f"optimizer_pp-0-of-1_tp-0-of-1_exp-{expert}-of-4.pt", weights_only=True
        )
        for fqn, stored in content["gradient_accumulator"].items():
            if fqn.endswith((W1, W2)):
                expected = truth[TensorKey(fqn, "fp32_param")][expert * rows : (expert + 1) * rows]
                assert differ(expected.T if fqn.endswith(W2) else expected, stored.detach()) == []
                turned += fqn.endswith(W2)
    assert turned >= 4


@pytest.mark.parametrize(
    "name",
    [
        "nt04-llama_tied-z1-tp2-pp2-dp2-ep1",
        "head-llama_untied-z1-tp1-pp1-dp3-ep1",
        "head-qwenmoe-z0-tp2-pp1-dp1-ep1",
        "nt04-llama_noacc-z0-tp2-pp1-dp1-ep1",
    ],
)
def test_a_file_of_one_rank_holds_the_truth(name: str, nanotron_fixtures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    one = [word for axis in ("tp", "pp", "dp", "ep") for word in (f"--{axis}", "1")]
    code, printed = run_cli("reshard", nanotron_fixtures / "checkpoints" / name, out, *one, "--zero", "0", "--no-fsync")
    assert code == 0, printed
    got = {
        (fqn, state): value.reshape(()) if state == "step" else value
        for fqn, entries in load_optimizer(out).items()
        for state, value in entries.items()
    }
    truth = {
        (fqn, "fp32" if state == "fp32_param" else state): tensor
        for (fqn, state), tensor in read_truth(nanotron_fixtures, FIXTURES[name].model).items()
        if state != "weight"
    }
    assert got.keys() == truth.keys()
    assert {key: problems for key in truth if (problems := differ(truth[key], got[key]))} == {}
