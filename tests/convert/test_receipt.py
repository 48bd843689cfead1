"""The receipt of a conversion holds for source and output, whatever the target and the rule that told groups apart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nemo_optim_bridge.cli import run
from nemo_optim_bridge.core.receipt import FILE_NAME
from nemo_optim_bridge.core.store import FileStore
from nemo_optim_bridge.errors import ColdOptimizerError
from nemo_optim_bridge.formats.torch_dist import read_torch_dist
from nemo_optim_bridge.formats.torch_dist.common_file import CommonFile
from nemo_optim_bridge.formats.torch_dist.convert import Options, convert
from nemo_optim_bridge.formats.torch_dist.manifest import read_manifest
from nemo_optim_bridge.formats.torch_dist.saved import DISTOPT, DISTRIBUTED, FLOAT16, FUSED, KINDS, MEGATRON

#: Of NeMo's default rule, and of megatron-core's.
NEMO, MCORE = "fused_moe_ep2", "mcore_distopt_moe_ep2_fully_reshardable"
NORM = "model.decoder.layers.self_attention.linear_qkv.layer_norm_weight"
SCHEDULER = {"max_lr": 0.01, "num_steps": 24}


def holds(folder: Path, receipt: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Return the exit code of ``verify --receipt``, and the differences."""
    capsys.readouterr()
    code = run(["verify", str(folder), "--receipt", str(receipt), "--json"])
    return code, json.loads(capsys.readouterr().out).get("differences", [])


def unlink(folder: Path) -> None:
    """Give a folder's files bytes of their own."""
    for path in folder.iterdir():
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("name", [NEMO, MCORE, "fused_dense", "dist_moe_stock_keys", "fused_moe_step0"])
def test_it_holds_for_every_target(
    megatron_fixtures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, to: str
) -> None:
    source, out = megatron_fixtures / name / "ckpt", tmp_path / "out"
    convert(source, out, Options(to=to))
    for folder in (out, source):
        assert holds(folder, out / FILE_NAME, capsys) == (0, [])


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("name", [NEMO, MCORE])
def test_it_finds_a_flipped_byte_and_an_edited_group(
    megatron_fixtures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, to: str
) -> None:
    out = tmp_path / "out"
    convert(megatron_fixtures / name / "ckpt", out, Options(to=to))
    shutil.copytree(out, tmp_path / "flipped")
    unlink(tmp_path / "flipped")
    found = read_manifest(out).manifest
    shard = found.shards[len(found.shards) // 2]
    buffer = found.buffers[shard.buffer]
    file = tmp_path / "flipped" / Path(buffer.file).name
    data = bytearray(file.read_bytes())
    data[buffer.offset] ^= 1
    file.write_bytes(data)
    code, lines = holds(tmp_path / "flipped", out / FILE_NAME, capsys)
    assert code == 1
    assert any(line.startswith(f"{shard.key}".removeprefix("model.")) and "digest" in line for line in lines)
    for field, value in (
        ("lr", 0.5),
        ("betas", (0.5, 0.5)),
        ("eps", 1e-3),
        ("max_lr", 0.7),
        ("bias_correction", False),
    ):
        unlink(out)
        file = CommonFile(out)
        kept = (out / "common.pt").read_bytes()
        for group in groups_of(file.tree):
            group[field] = value
        (out / "common.pt").write_bytes(file.dumps(file.tree))
        code, lines = holds(out, out / FILE_NAME, capsys)
        if field == "max_lr" and code == 0:  # not every run saved one
            assert not any("max_lr" in group for group in groups_of(CommonFile(megatron_fixtures / name / "ckpt").tree))
        else:
            assert (code, bool(lines)) == (1, True), field
        (out / "common.pt").write_bytes(kept)


def groups_of(tree: dict[Any, Any]) -> list[dict[str, Any]]:
    """Return all param groups, of chained optimizers as well."""
    state = tree["optimizer_states"][0]
    parts = [part for key, part in state.items() if isinstance(key, int)] or [state]
    return [group for part in parts for group in part.get("optimizer", part)["param_groups"]]


def test_it_remembers_the_rule_that_the_user_gave(
    megatron_fixtures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Patterns are of the source's names; in the other container nothing matches them."""
    source, out = megatron_fixtures / NEMO / "ckpt", tmp_path / "out"
    (tmp_path / "scheduler.json").write_text(json.dumps(SCHEDULER))
    patterns = ("*bias", "model.decoder.*layer_norm_weight")
    options = Options(
        to=DISTOPT, no_decay=patterns, container=MEGATRON, scheduler_state=tmp_path / "scheduler.json", target_ep=1
    )
    convert(source, out, options)
    receipt = json.loads((out / FILE_NAME).read_text())
    assert NORM.removeprefix("model.") in receipt["no_decay"]
    assert receipt["scalars"][NORM.removeprefix("model.")]["weight_decay"] == 0.0
    decays = {group["hyperparameters"]["weight_decay"] for group in receipt["param_groups"]}
    assert len(decays) > 1 and 0.0 in decays
    assert any("--no-decay" in remark for remark in receipt["remarks"])
    for folder in (out, source):
        assert holds(folder, out / FILE_NAME, capsys) == (0, [])
    receipt["no_decay"].remove(NORM.removeprefix("model."))
    (tmp_path / "other.json").write_text(json.dumps(receipt))
    assert holds(out, tmp_path / "other.json", capsys)[0] == 1


def test_it_says_what_was_read_and_written(megatron_fixtures: Path, tmp_path: Path) -> None:
    source, out = megatron_fixtures / NEMO / "ckpt", tmp_path / "out"
    summary = convert(source, out, Options(to=FLOAT16, target_ep=1))
    receipt = json.loads((out / FILE_NAME).read_text())
    assert receipt["source"] == {
        "path": str(source), "framework": "megatron", "layout": FUSED, "container": "lightning",
        "topology": {"expert_groups": True},
    }  # fmt: skip
    assert receipt["target"] == {
        "framework": "megatron", "layout": FLOAT16, "container": "lightning", "topology": {"expert_groups": False},
    }  # fmt: skip
    assert len(receipt["tensors"]) == 52
    assert all(entry["digest"] and entry["sources"] for entry in receipt["tensors"].values())
    moments = [entry for key, entry in receipt["tensors"].items() if "|exp_avg" in key]
    assert all(entry["sum_abs"] > 0 and entry["num_nonfinite"] == 0 for entry in moments)
    assert {name: summary[name] for name in ("tensors_digest", "weights_digest", "findings")} == {
        name: receipt[name] for name in ("tensors_digest", "weights_digest", "findings")
    }
    assert set(summary["remarks"]) <= set(receipt["remarks"])


def test_weights_that_were_rewritten_are_the_outputs(
    megatron_fixtures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = megatron_fixtures / "fused_moe_ep1" / "ckpt", tmp_path / "out"
    convert(source, out, Options(to=DISTRIBUTED, exact_remainders=True))
    assert holds(out, out / FILE_NAME, capsys) == (0, [])
    code, lines = holds(source, out / FILE_NAME, capsys)
    assert (code, len(lines)) == (1, 1)
    assert "|weight: the digest is" in lines[0]


def test_without_one_no_data_are_read(megatron_fixtures: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(FileStore, "read_into", None)
    source = megatron_fixtures / NEMO / "ckpt"
    assert run(["convert", str(source), str(tmp_path / "out"), "--to", DISTRIBUTED, "--no-receipt"]) == 0
    assert not (tmp_path / "out" / FILE_NAME).exists()


def test_one_that_the_source_has_is_not_carried_on(megatron_fixtures: Path, tmp_path: Path) -> None:
    convert(megatron_fixtures / "fused_moe_ep1" / "ckpt", tmp_path / "one", Options(to=DISTRIBUTED))
    convert(tmp_path / "one", tmp_path / "two", Options(to=FUSED, receipt=False))
    assert not (tmp_path / "two" / FILE_NAME).exists()
    convert(tmp_path / "one", tmp_path / "three", Options(to=FUSED))
    assert json.loads((tmp_path / "three" / FILE_NAME).read_text())["source"]["path"] == str(tmp_path / "one")
    for folder in ("two", "three"):
        assert run(["verify", str(tmp_path / folder), "--receipt", str(tmp_path / "one" / FILE_NAME)]) == 0


def test_a_cold_optimizer_is_refused(megatron_fixtures: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(megatron_fixtures / "fused_dense" / "ckpt", source)
    found = read_manifest(source).manifest
    for shard in found.shards:
        if shard.key.state in ("exp_avg", "exp_avg_sq"):
            buffer = found.buffers[shard.buffer]
            with Path(buffer.file).open("r+b") as file:
                file.seek(buffer.offset)
                file.write(bytes(buffer.nbytes))
    with pytest.raises(ColdOptimizerError, match="--allow-cold"):
        convert(source, tmp_path / "out", Options(to=DISTRIBUTED, check_crcs=False))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    summary = convert(source, tmp_path / "out", Options(to=DISTRIBUTED, check_crcs=False, allow_cold=True))
    assert [finding["kind"] for finding in summary["findings"]] == ["cold"]
    assert json.loads((tmp_path / "out" / FILE_NAME).read_text())["findings"] == summary["findings"]
    convert(source, tmp_path / "unread", Options(to=DISTRIBUTED, receipt=False))
    assert read_torch_dist(tmp_path / "unread").common["optimizer_states"][0]["state"]["step"] > 0
