"""The comparison that judges the writer must itself see every kind of difference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compare import compare_checkpoints, differ
from tests.edits import edit_pt, edit_shard
from tests.nanotron.fixtures import read_index

SHARDED = "model/model/decoder/0/pp_block/attn/o_proj/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors"
OPTIMIZER = "optimizer/optimizer_pp-0-of-1_tp-1-of-2_exp-0-of-1.pt"


def reverse(mapping: dict[Any, Any]) -> None:
    items = list(mapping.items())[::-1]
    mapping.clear()
    mapping.update(items)


def flip_sign_of_zero(tensor: torch.Tensor) -> None:
    tensor.view(torch.int16)[0, 0] ^= 1


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda root: (root / SHARDED).unlink(),
    "unexpected": lambda root: shutil.copy(root / SHARDED, root / "model/extra.safetensors"),
    "1 of 512 elements; element 0": lambda root: edit_shard(root / SHARDED, flip_sign_of_zero),
    "metadata/version: '1.3'": lambda root: edit_shard(root / SHARDED, lambda _: None, version="1.3"),
    "metadata/unsharded_shape": lambda root: edit_shard(root / SHARDED, lambda _: None, unsharded_shape="(64, 32)"),
    "state/3/step: 1 of 1 elements": lambda root: edit_pt(root / OPTIMIZER, lambda d: d["state"][3]["step"].add_(1)),
    "state: keys in another order": lambda root: edit_pt(root / OPTIMIZER, lambda d: reverse(d["state"])),
    "param_groups[0]/betas: list": lambda root: edit_pt(
        root / OPTIMIZER, lambda d: d["param_groups"][0].update(betas=[0.9, 0.95])
    ),
    "gradient_accumulator": lambda root: edit_pt(root / OPTIMIZER, lambda d: d.pop("gradient_accumulator")),
    "last_epoch: 4 instead of 3": lambda root: edit_pt(
        root / "lr_scheduler/lr_scheduler.pt", lambda d: d.update(last_epoch=4)
    ),
    "parallelism/tp_size": lambda root: (root / "optimizer/optimizer_config.json").write_text(
        (root / "optimizer/optimizer_config.json").read_text().replace('"tp_size": "2"', '"tp_size": "1"')
    ),
}


@pytest.fixture
def checkpoint(nanotron_fixtures: Path) -> Path:
    return nanotron_fixtures / "checkpoints" / "nt04-llama_tied-z0-tp2-pp1-dp1-ep1"


@pytest.mark.parametrize("message", DAMAGES)
def test_each_damage_is_seen(message: str, checkpoint: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(checkpoint, tmp_path / "damaged"))
    DAMAGES[message](damaged)
    differences = compare_checkpoints(checkpoint, damaged)
    assert len(differences) == 1
    assert message in differences[0]


def test_every_fixture_equals_itself(nanotron_fixtures: Path) -> None:
    for fixture in read_index(nanotron_fixtures).values():
        if not fixture.has_old_names:
            root = nanotron_fixtures / "checkpoints" / fixture.name
            assert compare_checkpoints(root, root, vocab_size=fixture.vocab_size) == []


def test_old_spellings_equal_todays(checkpoint: Path, nanotron_fixtures: Path) -> None:
    renamed = checkpoint.with_name(f"{checkpoint.name}-renamed")
    assert compare_checkpoints(renamed, checkpoint, hybrid_names=True) == []
    assert compare_checkpoints(renamed, checkpoint) != []
    numpy2 = nanotron_fixtures / "checkpoints" / "nt04-llama_untied-z0-tp2-pp1-dp1-ep1-np2"
    assert compare_checkpoints(numpy2, numpy2.with_name(numpy2.name.removesuffix("-np2"))) == []


def test_padding_rows_may_be_zero_and_nothing_else(nanotron_fixtures: Path, tmp_path: Path) -> None:
    padded = nanotron_fixtures / "checkpoints" / "nt04-llama_vpad_untied-z0-tp4-pp1-dp1-ep1"
    zeroed = Path(shutil.copytree(padded, tmp_path / "zeroed"))
    last = "pp-rank-0-of-1_tp-rank-3-of-4.safetensors"
    head = zeroed / "model/model/lm_head/pp_block" / f"model_weight_{last}"
    embedding = zeroed / "model/model/token_position_embeddings/pp_block/token_embedding" / f"model_weight_{last}"
    for shard in (head, embedding):
        edit_shard(shard, lambda tensor: tensor[30:].zero_())

    def zero_padding(content: Any) -> None:
        for i, name in content["names"].items():
            if "lm_head" in name or "token_embedding" in name:
                for tensor in (*content["state"][i].values(), content["gradient_accumulator"][name]):
                    if tensor.dim():
                        tensor.detach()[30:] = 0

    edit_pt(zeroed / "optimizer/optimizer_pp-0-of-1_tp-3-of-4_exp-0-of-1.pt", zero_padding)
    assert len(compare_checkpoints(padded, zeroed)) == 8
    assert compare_checkpoints(padded, zeroed, vocab_size=126) == []
    edit_shard(head, lambda tensor: tensor[29:].zero_())
    assert len(compare_checkpoints(padded, zeroed, vocab_size=126)) == 1


def test_the_config_may_list_later_stages(nanotron_fixtures: Path, tmp_path: Path) -> None:
    staged = nanotron_fixtures / "checkpoints" / "nt04-llama_tied-z1-tp2-pp2-dp2-ep1"
    longer = Path(shutil.copytree(staged, tmp_path / "longer"))
    path = longer / "optimizer/optimizer_config.json"
    config = json.loads(path.read_text())
    config["configs"]["orig_param_shapes"]["model.final_layer_norm.pp_block.weight"] = ["32"]
    path.write_text(json.dumps(config))
    assert compare_checkpoints(staged, longer) == []
    assert len(compare_checkpoints(staged, longer, all_stages=False)) == 1


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ((1,), [1]),
        ([1], [1, 2]),
        ({1: 0}, {"1": 0}),
        ({1: 0, 2: 0}, {2: 0, 1: 0}),
        (None, {}),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)),
        (torch.zeros(()), -torch.zeros(())),
    ],
)
def test_differ_is_exact(expected: Any, got: Any) -> None:
    assert len(differ(expected, got)) == 1


def test_differ_takes_equal_bits_for_equal() -> None:
    nan = {"a": [(torch.tensor([float("nan")]), float("nan"), None)]}
    assert differ(nan, {"a": [(torch.tensor([float("nan")]), float("nan"), None)]}) == []
