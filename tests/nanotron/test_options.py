"""Every option does what it says; what is written around the tensors is right for the target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open

from nemo_optim_bridge.core.receipt import FILE_NAME as RECEIPT_NAME
from tests.compare import compare_checkpoints, differ
from tests.edits import edit_json, edit_pt, edit_shard, fingerprint, flip_bit
from tests.nanotron.pair_table import run_cli
from tests.nanotron.test_truth import VOCABULARY, read_truth

TP2 = "nt04-llama_tied-z0-tp2-pp1-dp1-ep1"
TP2PP2 = "nt04-llama_tied-z0-tp2-pp2-dp1-ep1"
ZERO = "nt04-llama_tied-z1-tp2-pp2-dp2-ep1"
HEAD = "head-llama_tied-z0-tp2-pp1-dp1-ep1"
PADDED, UNPADDED = (f"nt04-llama_vpad_untied-z0-tp{tp}-pp1-dp1-ep1" for tp in (4, 1))
EMBEDDING = VOCABULARY[0]
NORM = "model.decoder.1.pp_block.input_layernorm.weight"

Real = Callable[[str], Path]
Reshard = Callable[..., dict[str, Any]]
Refuse = Callable[..., str]


def stages(folder: Path) -> list[list[str]]:
    """Return the parameters of tp rank 0 of every stage, by block, in order."""
    found = []
    files = [path for path in (folder / "optimizer").glob("*.pt") if "_tp-0-" in path.name]
    for path in sorted(files, key=lambda path: int(path.name.split("_pp-")[1].split("-")[0])):
        names = torch.load(path, weights_only=True)["names"].values()
        blocks = [name.removeprefix("model.").split(".pp_block")[0] for name in names]
        found.append(list(dict.fromkeys(blocks)))
    return found


# --- topology -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [TP2, ZERO, HEAD, "moe-moe_e8-z1-tp1-pp1-dp2-ep2"])
def test_omitted_options_mean_the_sources(name: str, real: Real, reshard: Reshard, tmp_path: Path) -> None:
    summary = reshard(real(name))
    assert summary["source_topology"] == summary["target_topology"]
    assert compare_checkpoints(real(name), tmp_path / "out") == []


def test_each_axis_can_be_given_alone(real: Real, reshard: Reshard) -> None:
    source = reshard(real(ZERO), out="same")["source_topology"]
    assert source == {"tp": 2, "pp": 2, "dp": 2, "ep": 1, "zero_stage": 1, "dialect": "0.4"}
    for option, field, value in (("--tp", "tp", 1), ("--pp", "pp", 1), ("--dp", "dp", 3), ("--zero", "zero_stage", 0)):
        summary = reshard(real(ZERO), f"{option} {value}", out=field)
        assert summary["target_topology"] == {**source, field: value}


def test_layers_per_stage_are_as_given(real: Real, reshard: Reshard, tmp_path: Path) -> None:
    embedding = "token_position_embeddings"
    reshard(real(TP2), "--pp 2", out="default")
    reshard(real(TP2), "--pp-split 1,3", out="given")
    reshard(real(TP2), "--pp-split 0,2,2,0 --tp 1", out="ends")
    layers = [f"decoder.{i}" for i in range(4)]
    assert stages(tmp_path / "default") == [[embedding, *layers[:3]], [layers[3], "final_layer_norm", embedding]]
    assert stages(tmp_path / "given") == [[embedding, layers[0]], [*layers[1:], "final_layer_norm", embedding]]
    assert stages(tmp_path / "ends") == [[embedding], layers[:2], layers[2:], ["final_layer_norm", embedding]]
    assert run_cli("verify", tmp_path / "given", real(TP2))[0] == 0


@pytest.mark.parametrize(
    ("options", "reason", "choice"),
    [
        ("--pp-split 3,2", "places 5 decoder layers", "The model has 4"),
        ("--pp-split 3", "places 3 decoder layers", "The model has 4"),
        ("--pp-split 2,0,2", "leaves stage 1 without parameters", "Give every stage a layer"),
        ("--pp-split 3,1 --pp 3", "lists 2 stages", "pp 3"),
        ("--pp-split 3;1", "is not a list of numbers", "--pp-split 3,1"),
        ("--pp-split -1,5", "is not a list of numbers", "--pp-split 3,1"),
        ("--pp-split ²,2", "is not a list of numbers", "--pp-split 3,1"),
        ("--pp-split 3,", "is not a list of numbers", "--pp-split 3,1"),
    ],
)
def test_a_wrong_split_is_refused(options: str, reason: str, choice: str, real: Real, refuse: Refuse) -> None:
    message = refuse(real(TP2), options, kind="TargetError")
    assert reason in message
    assert choice in message


def test_split_and_order_come_from_the_like_checkpoint(real: Real, reshard: Reshard, tmp_path: Path) -> None:
    reshard(real(TP2), "--pp-split 1,3 --tp 1", out="run")
    reshard(real(ZERO), f"--like {tmp_path / 'run'} --tp 1 --dp 1 --zero 0")
    assert compare_checkpoints(tmp_path / "run", tmp_path / "out", all_stages=False) == []
    assert stages(tmp_path / "out") != stages(real(TP2PP2))


def test_the_vocabulary_comes_from_the_like_checkpoint(real: Real, reshard: Reshard, tmp_path: Path) -> None:
    summary = reshard(real(PADDED), f"--like {real(UNPADDED)} --tp 1")
    assert "vocabulary: 2 padding rows of 128 are left out" in summary["remarks"]
    assert compare_checkpoints(real(UNPADDED), tmp_path / "out") == []


@pytest.mark.parametrize(
    ("like", "options", "reason"),
    [
        (TP2PP2, "--pp 1", "Add --pp 2"),
        ("nt04-llama_untied-z0-tp1-pp2-dp1-ep1", "--pp 2", "another model: model.lm_head.pp_block.weight"),
        (TP2PP2, "--pp 2 --pp-split 3,1", "Give one of them"),
    ],
)
def test_a_like_checkpoint_that_does_not_fit(like: str, options: str, reason: str, real: Real, refuse: Refuse) -> None:
    assert reason in refuse(real(TP2), f"--like {real(like)} {options}", kind="TargetError")


def test_the_like_checkpoint_is_not_written_over(real: Real, copy_of: Real) -> None:
    like = copy_of(TP2)
    before = fingerprint(like)
    code, printed = run_cli("reshard", real(TP2), like, "--like", like, "--overwrite")
    assert code == 2
    assert "output and source overlap" in printed
    assert fingerprint(like) == before


# --- vocabulary -----------------------------------------------------------------------------------------------------


def vocabulary_rows(folder: Path, tp: int) -> dict[str, torch.Tensor]:
    """Return the stored rows of the embedding and lm_head: weights, moments and masters."""
    parts: dict[str, list[torch.Tensor]] = {}
    for rank in range(tp):
        content = torch.load(folder / f"optimizer/optimizer_pp-0-of-1_tp-{rank}-of-{tp}_exp-0-of-1.pt")
        for number, fqn in content["names"].items():
            if fqn in VOCABULARY:
                states = {**content["state"][number], "fp32_param": content["gradient_accumulator"][fqn].detach()}
                for state in ("exp_avg", "exp_avg_sq", "fp32_param"):
                    parts.setdefault(f"{fqn}|{state}", []).append(states[state])
        for fqn in VOCABULARY:
            *folders, last = fqn.split(".")
            name = f"model_{last}_pp-rank-0-of-1_tp-rank-{rank}-of-{tp}.safetensors"
            with safe_open(folder.joinpath("model", *folders, name), "pt") as shard:
                parts.setdefault(f"{fqn}|weight", []).append(shard.get_tensor("data"))
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def test_padding_rows_are_cut_and_reported(
    real: Real, reshard: Reshard, nanotron_fixtures: Path, tmp_path: Path
) -> None:
    summary = reshard(real(PADDED), "--tp 1 --vocab-size 126")
    assert "vocabulary: 2 padding rows of 128 are left out" in summary["remarks"]
    assert not any("zero-filled" in remark for remark in summary["remarks"])
    rows = vocabulary_rows(tmp_path / "out", 1)
    truth = read_truth(nanotron_fixtures, "llama_vpad_untied")
    assert len(rows) == 8
    assert [p for key, t in truth.items() if key.fqn in VOCABULARY and key.state != "step"
            for p in differ(t, rows[str(key)])] == []  # fmt: skip
    assert stated_vocabulary(tmp_path / "out") == (126, 126)


@pytest.mark.parametrize("options", ["", "--vocab-size 126"])
def test_padding_rows_are_zero_filled_and_reported(
    options: str, real: Real, reshard: Reshard, nanotron_fixtures: Path, tmp_path: Path
) -> None:
    summary = reshard(real(UNPADDED), f"--tp 4 {options}")
    for fqn in VOCABULARY:
        assert f"{fqn}: 2 vocabulary rows from 126 on are zero-filled" in summary["remarks"]
    truth = read_truth(nanotron_fixtures, "llama_vpad_untied")
    rows = vocabulary_rows(tmp_path / "out", 4)
    assert len(rows) == 8
    for key, tensor in truth.items():
        if key.fqn in VOCABULARY and key.state != "step":
            padded = torch.cat([tensor, torch.zeros(2, 32, dtype=tensor.dtype)])
            assert differ(padded, rows[str(key)]) == []
    assert stated_vocabulary(tmp_path / "out") == (128, 128)


def stated_vocabulary(folder: Path) -> tuple[int, int]:
    """Return the vocabulary that model_config.json and config.yaml state."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    return (
        json.loads((folder / "model_config.json").read_text())["vocab_size"],
        config["model"]["model_config"]["vocab_size"],
    )


def test_the_stored_vocabulary_is_taken_as_true_and_said_so(real: Real, reshard: Reshard, tmp_path: Path) -> None:
    summary = reshard(real(PADDED), "--tp 1")
    assert (
        "vocabulary: the stored size 128 is taken as the true one (--vocab-size says otherwise)" in summary["remarks"]
    )
    assert stated_vocabulary(tmp_path / "out") == (128, 128)
    assert all(len(rows) == 128 for rows in vocabulary_rows(tmp_path / "out", 1).values())


@pytest.mark.parametrize("size", [127, 129, 1 << 40])
def test_a_vocabulary_larger_than_stored_is_refused(size: int, real: Real, refuse: Refuse) -> None:
    message = refuse(real(UNPADDED), f"--vocab-size {size}", kind="ContradictionError")
    assert f"stored with 126 rows, fewer than the {size} given" in message


# --- replicas -------------------------------------------------------------------------------------------------------


def shift(fqn: str, amount: float) -> Callable[[Any], None]:
    """Return an edit that adds ``amount`` to element 5 of a parameter's exp_avg, and a quarter of it to element 6."""

    def change(content: Any) -> None:
        number = next(number for number, name in content["names"].items() if name == fqn)
        flat = content["state"][number]["exp_avg"].view(-1)
        flat[5] = flat[5] + amount
        flat[6] = flat[6] + amount / 4

    return change


@pytest.fixture
def two_opinions(copy_of: Real) -> Path:
    """A tp 2 checkpoint whose second rank holds another exp_avg of one layer norm than the first."""
    root = copy_of(TP2)
    edit_pt(root / "optimizer/optimizer_pp-0-of-1_tp-1-of-2_exp-0-of-1.pt", shift(NORM, 512.0))
    return root


def test_differing_replicas_are_an_error_that_says_where(two_opinions: Path, refuse: Refuse) -> None:
    message = refuse(two_opinions, "--tp 1", kind="ReplicaMismatchError")
    assert "copies differ in 2 elements, by up to 512 at [5]" in message
    assert f"tensor {NORM}|exp_avg" in message
    assert "optimizer_pp-0-of-1_tp-0-of-2_exp-0-of-1.pt" in message
    assert "optimizer_pp-0-of-1_tp-1-of-2_exp-0-of-1.pt" in message
    assert "rank 1" in message
    assert "--replicas lowest-rank" in message


def test_the_lowest_rank_can_be_taken(two_opinions: Path, real: Real, reshard: Reshard, tmp_path: Path) -> None:
    reshard(two_opinions, "--tp 1 --replicas lowest-rank")
    assert compare_checkpoints(real("nt04-llama_tied-z0-tp1-pp1-dp1-ep1"), tmp_path / "out") == []


def test_what_the_lowest_rank_says_counts(copy_of: Real, real: Real, reshard: Reshard, tmp_path: Path) -> None:
    root = copy_of(TP2)
    edit_pt(root / "optimizer/optimizer_pp-0-of-1_tp-0-of-2_exp-0-of-1.pt", shift(NORM, 512.0))
    reshard(root, "--tp 1 --replicas lowest-rank")
    (difference,) = compare_checkpoints(real("nt04-llama_tied-z0-tp1-pp1-dp1-ep1"), tmp_path / "out")
    assert "exp_avg: 2 of 32 elements" in difference


def test_the_tied_copies_are_replicas_too(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TP2PP2)
    edit_pt(root / "optimizer/optimizer_pp-1-of-2_tp-1-of-2_exp-0-of-1.pt", shift(EMBEDDING, 512.0))
    message = refuse(root, "", kind="ReplicaMismatchError")
    assert "by up to 512 at [64, 5]" in message
    assert "optimizer_pp-1-of-2_tp-1-of-2_exp-0-of-1.pt" in message


def test_bytes_that_rotted_are_found_by_their_crc(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TP2)
    path = root / "optimizer/optimizer_pp-0-of-1_tp-1-of-2_exp-0-of-1.pt"
    content = torch.load(path, weights_only=True)
    number = next(number for number, name in content["names"].items() if name == NORM)
    keys = [(n, key) for n in content["state"] for key in content["state"][n]]
    flip_bit(path, f"data/{keys.index((number, 'exp_avg'))}")
    message = refuse(root, "--tp 1", kind="CorruptFileError")
    assert "do not match their CRC-32" in message
    assert str(path) in message
    assert f"{NORM}|exp_avg" in refuse(root, "--tp 1 --no-crc-check", kind="ReplicaMismatchError")


def test_an_unknown_policy_is_refused(real: Real, refuse: Refuse) -> None:
    message = refuse(real(TP2), "--replicas highest", kind="TargetError")
    assert "error or lowest-rank" in message


# --- output ---------------------------------------------------------------------------------------------------------


def test_nothing_is_written_over_unless_asked(real: Real, reshard: Reshard, tmp_path: Path) -> None:
    reshard(real(TP2), "--tp 1")
    (tmp_path / "out" / "note.txt").write_text("mine")
    before = fingerprint(tmp_path / "out")
    code, printed = run_cli("reshard", real(TP2), tmp_path / "out", "--tp", "4")
    assert code == 2
    assert "already exists" in printed
    assert "--overwrite" in printed
    assert fingerprint(tmp_path / "out") == before
    reshard(real(TP2), "--tp 4 --overwrite")
    assert compare_checkpoints(real("nt04-llama_tied-z0-tp4-pp1-dp1-ep1"), tmp_path / "out") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert not (tmp_path / "out" / "note.txt").exists()


def test_a_failed_overwrite_leaves_what_was_there(two_opinions: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "note.txt").write_text("mine")
    assert run_cli("reshard", two_opinions, out, "--overwrite")[0] == 2
    assert [path.name for path in out.iterdir()] == ["note.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_only_directories_are_overwritten(real: Real, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link", "dangling"):
        code, printed = run_cli("reshard", real(TP2), tmp_path / name, "--overwrite")
        assert code == 2
        assert "is not a directory" in printed
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "folder", "link"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (TP2, "--tp 1 --pp 2 --dp 2 --zero 1"),
        (ZERO, "--tp 4 --pp 1 --zero 0 --dp 1"),
        (PADDED, "--tp 1 --vocab-size 126"),
        ("moe-moe_e8-z1-tp1-pp1-dp2-ep2", "--ep 1 --tp 2 --dp 3"),
        ("moe-moe_e4-z0-tp1-pp1-dp1-ep4", "--ep 2"),
        (TP2, "--tp 1 --replicas lowest-rank"),
    ],
)
def test_a_dry_run_says_what_is_then_done(
    name: str, options: str, real: Real, reshard: Reshard, tmp_path: Path
) -> None:
    planned = reshard(real(name), f"{options} --dry-run")
    assert list(tmp_path.iterdir()) == []
    done = reshard(real(name), options)
    assert (planned.pop("written"), done.pop("written")) == (False, True)
    assert planned == {name: done[name] for name in planned}
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file() and path.name != RECEIPT_NAME]
    assert done["files_to_write"] == len(written)
    assert done["bytes_to_write"] == sum(path.stat().st_size for path in written)


def test_a_dry_run_counts_the_bytes_of_every_pass(real: Real, reshard: Reshard) -> None:
    root = real(ZERO)
    shards, files = list(root.rglob("*.safetensors")), list(root.glob("optimizer/*.pt"))
    copied = compared = 0
    for path in files:
        content = torch.load(path, weights_only=True)
        for number, fqn in content["names"].items():
            states = content["state"][number]
            num_bytes = 4 * sum(
                t.numel() for t in (states["exp_avg"], states["exp_avg_sq"], content["gradient_accumulator"][fqn])
            )
            copied += num_bytes
            is_replica = "norm" in fqn and "_tp-1-" in path.name
            is_replica |= fqn == EMBEDDING and "_pp-1-" in path.name
            compared += 2 * num_bytes * is_replica
    for path in shards:
        with safe_open(path, "pt") as shard:
            copied += 2 * shard.get_tensor("data").numel()
    checked = sum(path.stat().st_size for path in (*files, *root.glob("lr_scheduler/*.pt")))
    for options, expected in (
        ("", checked + compared + copied + 41_248 * (3 * 4 + 2)),  # and every element once for the receipt
        ("--no-receipt", checked + compared + copied),
        ("--no-receipt --no-crc-check", compared + copied),
        ("--no-receipt --replicas lowest-rank --no-crc-check", copied),
    ):
        planned = reshard(root, f"--dry-run {options}")
        assert planned["files_to_read"] == len(shards) + len(files)
        assert planned["bytes_to_read"] == expected


def test_a_dry_run_reports_leftovers_with_exit_code_1(copy_of: Real, tmp_path: Path) -> None:
    root = copy_of(TP2)
    shutil.copy(
        root / "optimizer/optimizer_pp-0-of-1_tp-0-of-2_exp-0-of-1.pt",
        root / "optimizer/optimizer_pp-0-of-1_tp-0-of-4_exp-0-of-1.pt",
    )
    code, printed = run_cli("reshard", root, tmp_path / "out", "--dry-run", "--json")
    assert code == 1
    (problem,) = json.loads(printed)["problems"]
    assert "optimizer/optimizer_pp-0-of-1_tp-0-of-4_exp-0-of-1.pt" in problem
    assert not (tmp_path / "out").exists()


def test_a_parent_with_latest_txt_is_a_checkpoint(real: Real, reshard: Reshard, tmp_path: Path) -> None:
    parent = tmp_path / "checkpoints"
    shutil.copytree(real(TP2), parent / "300")
    shutil.copytree(real(HEAD), parent / "20")
    (parent / "latest.txt").write_text("300\n")
    summary = reshard(parent, "--tp 1")
    assert summary["source"] == str(parent / "300")
    assert summary["source_topology"]["dialect"] == "0.4"
    assert run_cli("verify", parent, tmp_path / "out")[0] == 0


@pytest.mark.parametrize("content", ["", "3", "../300", "300/..", "three", "\0"])
def test_a_latest_txt_that_names_no_step(content: str, real: Real, refuse: Refuse, tmp_path: Path) -> None:
    parent = tmp_path / "checkpoints"
    shutil.copytree(real(TP2), parent / "300")
    (parent / "latest.txt").write_text(content)
    assert "latest.txt names step" in refuse(parent, kind="MissingSourceError")


def test_json_has_its_documented_fields(real: Real, reshard: Reshard) -> None:
    summary = reshard(real(TP2), "--tp 1")
    assert list(summary) == [
        "source", "output", "source_topology", "target_topology", "files_to_read", "files_to_write", "bytes_to_read",
        "bytes_to_write", "pieces", "replicas", "peak_memory_bytes", "remarks", "problems", "findings",
        "tensors_digest", "hyperparameters_digest", "weights_digest", "written",
    ]  # fmt: skip
    code, printed = run_cli("inspect", real(TP2), "--json")
    found = json.loads(printed)
    assert code == 0
    expected = {
        "framework": "nanotron",
        "dialect": "0.4",
        "topology": {"tp": 2, "pp": 1, "dp": 1, "ep": 1},
        "zero_stage": 0,
        "num_parameters": 26,
        "num_elements": 41248,
        "states": {"weight": ["bfloat16"], "exp_avg": ["float32"], "exp_avg_sq": ["float32"],
                   "fp32_param": ["float32"]},
        "step": 3,
        "ties": [["model.token_position_embeddings", "model.lm_head"]],
        "num_experts": None,
        "problems": [],
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    (group,) = found["param_groups"]
    assert (group["num_parameters"], group["weight_decay"], group["betas"]) == (26, 0.01, [0.9, 0.95])
    code, printed = run_cli("verify", real(TP2), real(HEAD), "--json")
    answer = json.loads(printed)
    assert list(answer) == ["same", "num_tensors", "num_elements", "differences", "remarks"]
    assert answer["num_elements"] == 4 * 41248
    assert answer["num_tensors"] == 4 * 26


def test_exit_codes(real: Real, two_opinions: Path, tmp_path: Path) -> None:
    one = real("nt04-llama_tied-z0-tp1-pp1-dp1-ep1")
    assert run_cli("verify", real(TP2), one)[0] == 0
    assert run_cli("verify", one, two_opinions)[0] == 1
    assert run_cli("verify", two_opinions, one)[0] == 1
    assert run_cli("verify", one, tmp_path)[0] == 2
    assert run_cli("inspect", one)[0] == 0
    assert run_cli("inspect", tmp_path / "absent")[0] == 2
    assert run_cli("reshard", one, tmp_path / "out", "--no-fsync")[0] == 0
    assert run_cli("reshard", one, tmp_path / "out")[0] == 2
    for wrong in ("--tp zero", "--tp 0", "--dp -1", "--zero 2", "--nonsense", "--vocab-size 0", "--like"):
        assert run_cli("reshard", one, tmp_path / "wrong", *wrong.split())[0] == 2
    assert run_cli("reshard", one)[0] == 2
    assert run_cli("frobnicate")[0] == 2
    assert run_cli("--version")[0] == 0
    assert not (tmp_path / "wrong").exists()


def test_results_go_to_stdout_and_errors_to_stderr(
    real: Real, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from nemo_optim_bridge.cli import run

    assert run(["reshard", str(real(TP2)), str(tmp_path / "out"), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["written"] is True
    assert captured.err == ""
    assert run(["reshard", str(real(TP2)), str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: already exists")


# --- what is written around the tensors -----------------------------------------------------------------------------


def documents(folder: Path) -> tuple[Any, Any, Any]:
    """Return checkpoint_metadata.json, config.yaml and model_config.json."""
    return (
        json.loads((folder / "checkpoint_metadata.json").read_text()),
        yaml.safe_load((folder / "config.yaml").read_text()),
        json.loads((folder / "model_config.json").read_text()),
    )


def test_documents_are_the_sources_but_for_the_target(real: Real, reshard: Reshard, tmp_path: Path) -> None:
    reshard(real(TP2), "--tp 1 --pp 2 --dp 2 --zero 1")
    metadata, config, model = documents(real(TP2))
    metadata.update(tp=1, dp=2)
    config["parallelism"].update(tp=1, pp=2, dp=2)
    config["optimizer"]["zero_stage"] = 1
    assert documents(tmp_path / "out") == (metadata, config, model)
    stated = json.loads((tmp_path / "out/optimizer/optimizer_config.json").read_text())
    assert stated["type"] == "ZeroDistributedOptimizer"
    assert stated["parallelism"] == {"tp_size": "1", "dp_size": "2", "pp_size": "2", "expert_parallel_size": "1"}


def test_consumed_samples_stay(copy_of: Real, reshard: Reshard, tmp_path: Path) -> None:
    root = copy_of(TP2)
    edit_json(root / "checkpoint_metadata.json", lambda m: m["metas"].update(consumed_train_samples=12345))
    reshard(root, "--dp 4 --zero 1")
    metas = documents(tmp_path / "out")[0]["metas"]
    assert metas == {"consumed_train_samples": 12345, "last_train_step": 3}


def test_metadata_follows_the_dialect(real: Real, reshard: Reshard, tmp_path: Path) -> None:
    head = documents(real(HEAD))[0]
    summary = reshard(real(TP2), "--dialect head", out="head")
    metadata = documents(tmp_path / "head")[0]
    assert metadata.keys() == head.keys()
    assert metadata["metas"].keys() == head["metas"].keys()
    assert (metadata["version"], metadata["tp"], metadata["cp"]) == ("1.5", 2, 1)
    (stage,) = metadata["metas"]["data_stages"]
    assert stage["consumed_train_samples"] == metadata["metas"]["consumed_train_samples"] == 6
    assert stage.keys() == head["metas"]["data_stages"][0].keys()
    assert any("all 6 were filed under one" in remark for remark in summary["remarks"])
    summary = reshard(real(HEAD), "--dialect 0.4", out="0.4")
    assert documents(tmp_path / "0.4")[0] == documents(real(TP2))[0]
    dropped = [remark for remark in summary["remarks"] if "dropped" in remark]
    assert len(dropped) == 3
    for name in ("data_stages", "last_stage_idx", "consumed_tokens_total"):
        assert any(name in remark for remark in dropped)


def test_expert_parallel_size_is_stated(real: Real, reshard: Reshard, tmp_path: Path) -> None:
    reshard(real("moe-moe_e8-z0-tp1-pp1-dp1-ep2"), "--ep 4 --tp 2")
    config = documents(tmp_path / "out")[1]
    assert {name: config["parallelism"][name] for name in ("tp", "pp", "dp", "expert_parallel_size")} == {
        "tp": 2, "pp": 1, "dp": 1, "expert_parallel_size": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "remarks"),
    [
        (TP2, "", ["random states are not written: no nanotron trainer loads them", "the stored size 128 is taken"]),
        ("moe-moe_e4-z0-tp1-pp1-dp1-ep4", "--ep 1", ["weights lost in the source", "rebuilt from the masters"]),
        (f"{TP2}-renamed", "", ["legacy names without _exp-"]),
        ("moe24-moe_e8-z0-tp1-pp1-dp1-ep2", "", ["doubled names of spring 2024"]),
    ],
)
def test_remarks_say_what_was_done(name: str, options: str, remarks: list[str], real: Real, reshard: Reshard) -> None:
    said = "\n".join(reshard(real(name), options)["remarks"])
    for remark in remarks:
        assert remark in said


def test_only_what_nanotron_loads_is_written(copy_of: Real, reshard: Reshard, tmp_path: Path) -> None:
    root = copy_of(TP2)
    (root / "random").mkdir()
    (root / "random" / "tp-0-of-2_dp-0-of-1_pp-0-of-1.pt").write_bytes(b"never read")
    reshard(root, "--no-receipt")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "checkpoint_metadata.json", "config.yaml", "lr_scheduler", "model", "model_config.json", "optimizer",
    ]  # fmt: skip


# --- each parameter's own numbers -----------------------------------------------------------------------------------


def own_numbers(fqns: list[str]) -> dict[str, tuple[float, float, float]]:
    """Return a learning rate, weight decay and step of its own for every parameter."""
    return {fqn: (0.001 * (i + 1), 0.1 / (i + 1), float(i + 1)) for i, fqn in enumerate(sorted(fqns))}


def give_own_numbers(root: Path, *, rates: bool = True, steps: bool = True) -> dict[str, tuple[float, float, float]]:
    """Give every parameter of a head checkpoint its own numbers, on all ranks and in the lr scheduler."""
    own: dict[str, tuple[float, float, float]] = {}
    for path in sorted((root / "optimizer").glob("*.pt")):
        content = torch.load(path, weights_only=True)
        own = own or own_numbers(list(content["names"].values()))
        for group in content["param_groups"]:
            (number,) = group["params"]
            lr, weight_decay, step = own[content["names"][number]]
            if rates:
                group.update(lr=lr, weight_decay=weight_decay, initial_lr=2 * lr)
            if steps:
                content["state"][number]["step"].fill_(step)
        torch.save(content, path)
        scheduler = root / "lr_scheduler" / path.name.replace("optimizer", "lr_scheduler")
        if rates:
            lrs = [own[fqn][0] for fqn in content["names"].values()]
            edit_pt(scheduler, lambda state, lrs=lrs: state.update(_last_lr=lrs, base_lrs=[2 * lr for lr in lrs]))
    return own


@pytest.fixture
def individual(copy_of: Real) -> tuple[Path, dict[str, tuple[float, float, float]]]:
    """A head checkpoint whose parameters all have their own lr, weight decay and step."""
    root = copy_of(HEAD)
    return root, give_own_numbers(root)


@pytest.mark.parametrize(
    "options", ["", "--tp 1 --pp 4", "--tp 4 --dp 3 --zero 1 --pp 2", "--tp 1 --dp 33 --zero 1", "--dialect moe --tp 1"]
)
def test_each_parameter_keeps_its_own_numbers(
    options: str, individual: tuple[Path, dict[str, Any]], reshard: Reshard, tmp_path: Path
) -> None:
    root, own = individual
    reshard(root, options)
    seen = set()
    for path in (tmp_path / "out" / "optimizer").glob("*.pt"):
        content = torch.load(path, weights_only=True)
        first = "_dp-" not in path.name or "_dp-0-" in path.name
        stage = list(content["names"].values())
        for group in content["param_groups"]:
            for number in group["params"]:
                fqn = content["names"][number]
                lr, weight_decay, step = own[fqn]
                assert (group["lr"], group["weight_decay"], group["initial_lr"]) == (lr, weight_decay, 2 * lr)
                assert content["state"][number]["step"].item() == step
                seen.add(fqn)
        if first:
            name = path.name.replace("optimizer", "lr_scheduler")
            name = name.replace(name[name.index("_dp-") : name.index("_tp-")], "") if "_dp-" in name else name
            state = torch.load(tmp_path / "out" / "lr_scheduler" / name, weights_only=True)
            assert state["_last_lr"] == [own[fqn][0] for fqn in stage]
            assert state["base_lrs"] == [2 * own[fqn][0] for fqn in stage]
            assert state["lr_lambdas"] == [{}] * len(stage)
    assert seen == own.keys()
    assert run_cli("verify", root, tmp_path / "out")[0] == 0


def test_groups_that_differ_are_not_merged(individual: tuple[Path, dict[str, Any]], refuse: Refuse) -> None:
    message = refuse(individual[0], "--dialect 0.4", kind="ParamGroupError")
    assert "26 sets of hyperparameters" in message
    assert "differ in initial_lr, lr, weight_decay" in message
    assert "Choose a dialect with a group per parameter" in message


def test_steps_that_differ_fit_one_group(copy_of: Real, reshard: Reshard, tmp_path: Path) -> None:
    root = copy_of(HEAD)
    own = give_own_numbers(root, rates=False)
    reshard(root, "--dialect 0.4 --tp 1")
    (path,) = (tmp_path / "out" / "optimizer").glob("*.pt")
    content = torch.load(path, weights_only=True)
    assert len(content["param_groups"]) == 1
    steps = {fqn: content["state"][number]["step"].item() for number, fqn in content["names"].items()}
    assert steps == {fqn: step for fqn, (_, _, step) in own.items()}


def test_entries_of_the_scheduler_that_differ_are_not_merged(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(HEAD)
    for path in (root / "lr_scheduler").iterdir():
        edit_pt(path, lambda state: state["lr_lambdas"].__setitem__(3, {"warmup": 5}))
    message = refuse(root, "--dialect 0.4", kind="TargetError")
    assert "entries differ" in message


def test_verify_sees_each_number(individual: tuple[Path, dict[str, Any]], real: Real) -> None:
    code, printed = run_cli("verify", individual[0], real(HEAD), "--json")
    differences = json.loads(printed)["differences"]
    assert code == 1
    for name in ("lr", "weight_decay", "step", "lr_scheduler._last_lr", "lr_scheduler.base_lrs"):
        assert any(f": {name} is " in difference for difference in differences)


def test_verify_sees_one_bit(copy_of: Real, real: Real) -> None:
    root = copy_of(TP2)
    shard = root / "model/model/decoder/0/pp_block/attn/o_proj/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors"

    def flip(tensor: torch.Tensor) -> None:
        tensor.view(torch.int16)[3, 4] ^= 1

    edit_shard(shard, flip)
    code, printed = run_cli("verify", root, real("nt04-llama_tied-z0-tp1-pp1-dp1-ep1"), "--json")
    (difference,) = json.loads(printed)["differences"]
    assert code == 1
    assert "decoder.0.pp_block.attn.o_proj.weight|weight: 1 elements differ, by up to" in difference
    assert "at [3, 20]" in difference
