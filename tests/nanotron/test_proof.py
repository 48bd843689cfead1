"""Fingerprints, receipts, diffs and deep inspection say exactly what is so."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file

from nemo_optim_bridge.core.fingerprint import TensorDigest
from nemo_optim_bridge.core.manifest import TensorKey, TensorSpec
from nemo_optim_bridge.core.receipt import FILE_NAME
from tests.compare import compare_checkpoints
from tests.edits import edit_json, edit_pt, edit_shard
from tests.nanotron.fixtures import read_index
from tests.nanotron.pair_table import run_cli

TP2 = "nt04-llama_tied-z0-tp2-pp1-dp1-ep1"
TP1 = "nt04-llama_tied-z0-tp1-pp1-dp1-ep1"
ZERO = "nt04-llama_tied-z1-tp2-pp2-dp2-ep1"
HEAD = "head-llama_tied-z0-tp2-pp1-dp1-ep1"
OPTIMIZER = "optimizer/optimizer_pp-0-of-1_tp-0-of-1_exp-0-of-1.pt"
QKV = "model.decoder.1.pp_block.attn.qkv_proj.weight"
NORM = "model.decoder.1.pp_block.input_layernorm.weight"
DIGESTS = ("tensors_digest", "hyperparameters_digest", "weights_digest")

Real = Callable[[str], Path]
Reshard = Callable[..., dict[str, Any]]
Refuse = Callable[..., str]


def ask(*argv: str | Path, expect: int = 0) -> dict[str, Any]:
    """Run a command with ``--json`` and return its answer."""
    code, printed = run_cli(*argv, "--json")
    assert code == expect, printed
    answer = json.loads(printed)
    assert isinstance(answer, dict)
    return answer


def state_of(content: dict[str, Any], fqn: str) -> dict[str, torch.Tensor]:
    """Return a parameter's entries in a loaded optimizer file."""
    (number,) = (number for number, name in content["names"].items() if name == fqn)
    entries = content["state"][number]
    assert isinstance(entries, dict)
    return entries


# --- fingerprint ----------------------------------------------------------------------------------------------------


def test_every_fixture_of_a_model_has_one_fingerprint(real: Real) -> None:
    found: dict[str, set[tuple[str, str]]] = {}
    hyperparameters: dict[str, set[str]] = {}
    for fixture in read_index().values():
        vocab = [] if fixture.vocab_size is None else ["--vocab-size", str(fixture.vocab_size)]
        digests = ask("fingerprint", real(fixture.name), *vocab)
        found.setdefault(fixture.model, set()).add((digests["tensors_digest"], digests["weights_digest"]))
        hyperparameters.setdefault(fixture.model, set()).add(digests["hyperparameters_digest"])
    assert {model: len(digests) for model, digests in found.items()} == dict.fromkeys(found, 1)
    assert {model: len(digests) for model, digests in hyperparameters.items()} == dict.fromkeys(found, 1)
    assert len({digests for model in found for digests in found[model]}) == len(found) == 9


def test_the_digest_is_the_one_that_is_documented(real: Real, nanotron_fixtures: Path) -> None:
    truth = load_file(nanotron_fixtures / "truth" / "llama_tied.safetensors")
    names = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32": "fp32_param", "weight": "weight"}
    digests = {}
    for name, tensor in truth.items():
        fqn, state = name.split("|")
        if state == "step":
            continue
        dtype = "bfloat16" if state == "weight" else "float32"
        data = tensor.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy().tobytes()
        head = json.dumps([fqn, names[state], dtype, list(tensor.shape)]).encode()
        digest = hashlib.sha256(head + b"\n" + xxhash.xxh3_128_digest(data)).hexdigest()
        digests[(fqn, names[state])] = digest

    def combined(states: set[str]) -> str:
        lines = [f"{fqn}|{state} {digest}" for (fqn, state), digest in sorted(digests.items()) if state in states]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    found = ask("fingerprint", real(ZERO))
    assert found["tensors"] == {f"{fqn}|{state}": digest for (fqn, state), digest in digests.items()}
    assert found["tensors_digest"] == combined({"exp_avg", "exp_avg_sq", "fp32_param"})
    assert found["weights_digest"] == combined({"weight"})
    lr, initial_lr = (float(value).hex() for value in (0.009657457896300792, 0.01))
    values = [3, lr, initial_lr, [(0.9).hex(), (0.95).hex()], (1e-8).hex(), (0.01).hex()]
    lines = [json.dumps([fqn, values]) for fqn in sorted({fqn for fqn, _ in digests})]
    assert found["hyperparameters_digest"] == hashlib.sha256("\n".join(lines).encode()).hexdigest()


def test_a_tensor_of_several_blocks_may_arrive_in_parts() -> None:
    data = np.random.default_rng(0).integers(0, 256, (5 << 19) + 12, np.uint8)
    spec = TensorSpec(TensorKey("w", "exp_avg"), (len(data) // 4,), "float32")
    blocks = [data[start : start + (1 << 20)] for start in range(0, len(data), 1 << 20)]
    expected = hashlib.sha256(
        json.dumps(["w", "exp_avg", "float32", [len(data) // 4]]).encode()
        + b"\n"
        + b"".join(xxhash.xxh3_128_digest(block.data) for block in blocks)
    ).hexdigest()
    for part in (1 << 20, 1 << 19, 1 << 18):
        digest = TensorDigest(spec)
        for start in range(0, len(data), part):
            digest.add(data[start : start + part].data)
        assert digest.hexdigest() == expected


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (lambda content: state_of(content, QKV)["exp_avg"][5, 6].neg_(), {"tensors_digest"}),
        (lambda content: content["gradient_accumulator"][NORM].data[3].add_(1e-7), {"tensors_digest"}),
        (lambda content: content["param_groups"][0].update(eps=1e-7), {"hyperparameters_digest"}),
        (lambda content: content["param_groups"][0].update(betas=(0.9, 0.96)), {"hyperparameters_digest"}),
        (lambda content: state_of(content, QKV)["step"].add_(1), {"hyperparameters_digest"}),
        (lambda content: content["param_groups"][0].update(foreach=True), set()),
    ],
)
def test_each_kind_of_change_changes_its_digest(
    change: Callable[[Any], object], changed: set[str], copy_of: Real, real: Real
) -> None:
    root = copy_of(TP1)
    edit_pt(root / OPTIMIZER, change)
    before, after = ask("fingerprint", real(TP1)), ask("fingerprint", root)
    assert {name for name in DIGESTS if before[name] != after[name]} == changed


# --- receipt --------------------------------------------------------------------------------------------------------


def test_a_receipt_holds_for_source_and_output(real: Real, reshard: Reshard, tmp_path: Path) -> None:
    summary = reshard(real(ZERO), "--tp 4 --pp 1 --zero 0 --dp 1 --dialect head")
    path = tmp_path / "out" / FILE_NAME
    receipt = json.loads(path.read_text())
    assert receipt["schema"] == 1
    assert receipt["source"]["topology"] == {"tp": 2, "pp": 2, "dp": 2, "ep": 1, "zero_stage": 1}
    assert (receipt["source"]["framework"], receipt["source"]["layout"]) == ("nanotron", "0.4")
    assert receipt["target"] == {
        "framework": "nanotron",
        "layout": "head",
        "topology": {"tp": 4, "pp": 1, "dp": 1, "ep": 1, "zero_stage": 0},
    }
    assert receipt["replicas_compared"] == summary["replicas"] > 0
    assert receipt["remarks"] == summary["remarks"]
    assert receipt["findings"] == []
    assert {name: receipt[name] for name in DIGESTS} == {name: summary[name] for name in DIGESTS}
    assert receipt["scalars"][QKV]["step"] == 3.0
    assert receipt["scalars"][QKV]["betas"] == [0.9, 0.95]
    assert receipt["steps"] == [3.0]
    (group,) = receipt["param_groups"]
    assert group["fqns"] == list(receipt["scalars"]) and group["hyperparameters"]["betas"] == [0.9, 0.95]
    entry = receipt["tensors"][f"{QKV}|exp_avg"]
    assert (entry["dtype"], entry["shape"], entry["elements_covered"]) == ("float32", [64, 32], 2048)
    assert entry["sources"] == [
        f"optimizer/optimizer_pp-0-of-2_dp-{dp}-of-2_tp-{tp}-of-2_exp-0-of-1.pt" for dp in (0, 1) for tp in (0, 1)
    ]
    for folder in (real(ZERO), tmp_path / "out"):
        answer = ask("verify", folder, "--receipt", path)
        assert answer["same"] and answer["differences"] == [] and answer["num_tensors"] == 104


def test_sums_in_a_receipt_are_those_of_the_truth(
    real: Real, reshard: Reshard, nanotron_fixtures: Path, tmp_path: Path
) -> None:
    reshard(real(ZERO))
    receipt = json.loads((tmp_path / "out" / FILE_NAME).read_text())
    for name, tensor in load_file(nanotron_fixtures / "truth" / "llama_tied.safetensors").items():
        if name.endswith(("|exp_avg", "|exp_avg_sq")):
            said = receipt["tensors"][name]
            expected = tensor.double().abs().sum().item()
            assert said["sum_abs"] == pytest.approx(expected, rel=receipt["sum_relative_tolerance"])
            assert said["num_nonfinite"] == 0


def test_a_receipt_names_the_tensor_that_changed(real: Real, reshard: Reshard, tmp_path: Path) -> None:
    reshard(real(TP2), "--tp 1")
    out = tmp_path / "out"
    edit_pt(
        out / OPTIMIZER, lambda content: state_of(content, QKV)["exp_avg_sq"].view(torch.int32)[7, 7].bitwise_xor_(1)
    )
    answer = ask("verify", out, "--receipt", out / FILE_NAME, expect=1)
    (difference,) = answer["differences"]
    assert difference.startswith(f"{QKV}|exp_avg_sq: the digest is ")
    edit_pt(out / OPTIMIZER, lambda content: content["param_groups"][0].update(eps=0.5, amsgrad=True))
    answer = ask("verify", out, "--receipt", out / FILE_NAME, expect=1)
    assert len(answer["differences"]) == 1 + 2 * 26
    assert sum("amsgrad is True, the receipt says False" in line for line in answer["differences"]) == 26


def test_no_receipt_is_written_when_none_is_wanted(real: Real, reshard: Reshard, tmp_path: Path) -> None:
    summary = reshard(real(TP2), "--no-receipt")
    assert not (tmp_path / "out" / FILE_NAME).exists()
    assert "tensors_digest" not in summary


EMPTY = '{"schema": 1, "scalars": {}, "no_decay": null, "tensors": {}, "tensors_digest": "", "vocab_size": null}'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no such receipt"),
        ("{", "cannot be read as a receipt"),
        ("[1]", "schema None, not 1"),
        ('{"schema": 2}', "schema 2, not 1"),
        ('{"schema": 1, "tensors": []}', "field tensors of the receipt is missing or malformed"),
        (EMPTY.replace("{}", '{"a": {"step": "x"}}', 1), "a step of the receipt is no number"),
        (EMPTY.replace("{}", '{"a": {"step": Infinity}}', 1), "a step of the receipt is no number"),
        (EMPTY.replace("{}", '{"a": {"step": 1%s}}' % ("0" * 400), 1), "is no size, count or step"),
        (EMPTY.replace("null", "[3]", 1), "no_decay of the receipt is malformed"),
        (EMPTY.replace("null", "7", 1), "field no_decay of the receipt is missing or malformed"),
    ],
)
def test_a_bad_receipt_is_one_clear_error(content: str | None, words: str, real: Real, tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    if content is not None:
        path.write_text(content)
    code, printed = run_cli("verify", real(TP2), "--receipt", path)
    assert code == 2
    assert words in printed and str(path) in printed


def test_verify_wants_one_thing_to_compare_with(real: Real) -> None:
    code, printed = run_cli("verify", real(TP2))
    assert code == 2
    assert "either a second checkpoint or --receipt" in printed


# --- diff -----------------------------------------------------------------------------------------------------------


def test_diff_finds_the_largest_difference_and_its_place(copy_of: Real, real: Real) -> None:
    root = copy_of(TP1)

    def change(content: dict[str, Any]) -> None:
        moments = state_of(content, QKV)["exp_avg"]
        moments[40, 3] += 0.25
        moments[41, 9] -= 2.0
        state_of(content, NORM)["step"].fill_(9)

    moments = state_of(torch.load(root / OPTIMIZER, weights_only=True), QKV)["exp_avg"]
    small, before = moments[40, 3].item(), moments[41, 9].item()
    edit_pt(root / OPTIMIZER, change)
    answer = ask("diff", root, real(ZERO), expect=1)
    (found,) = answer["tensors"]
    after = np.float32(before) - np.float32(2.0)
    assert found["key"] == f"{QKV}|exp_avg"
    assert (found["num_elements"], found["position"]) == (2, [41, 9])
    assert found["max_abs"] == abs(float(after) - before)
    larger = float(np.float32(small) + np.float32(0.25))
    assert found["max_rel"] == (larger - small) / larger  # of the other element: 0.25 more than next to nothing
    assert answer["scalars"] == [{"fqn": NORM, "name": "step", "left": 9.0, "right": 3.0}]
    assert (answer["only_left"], answer["only_right"], answer["mismatched"]) == ([], [], [])
    assert not answer["same"]
    code, printed = run_cli("diff", root, real(ZERO))
    assert code == 1
    assert "2 elements differ, by up to 2 at [41, 9]" in printed
    assert f"{NORM}: step is 9.0 and 3.0" in printed


def test_numbers_are_compared_to_the_bit(copy_of: Real, real: Real, tmp_path: Path) -> None:
    """NaN is what NaN was, and the sign of zero counts."""
    root, other = copy_of(TP2), real(TP2)
    for path in (root / "optimizer").glob("optimizer_*.pt"):
        edit_pt(path, lambda content: content["param_groups"][0].update(weight_decay=0.0, eps=float("nan")))
    assert ask("diff", root, root)["same"]
    names = {row["name"] for row in ask("diff", root, other, expect=1)["scalars"]}
    assert names == {"weight_decay", "eps"}
    negative = Path(shutil.copytree(root, tmp_path / "negative"))
    for path in (negative / "optimizer").glob("optimizer_*.pt"):
        edit_pt(path, lambda content: content["param_groups"][0].update(weight_decay=-0.0, eps=float("nan")))
    (name,) = {row["name"] for row in ask("diff", root, negative, expect=1)["scalars"]}
    assert name == "weight_decay"


def test_diff_lists_what_only_one_has(real: Real) -> None:
    untied = "nt04-llama_untied-z0-tp2-pp1-dp1-ep1"
    answer = ask("diff", real(TP2), real(untied), expect=1)
    head = "model.lm_head.pp_block.weight"
    assert answer["only_right"] == [f"{head}|{state}" for state in ("exp_avg", "exp_avg_sq", "fp32_param", "weight")]
    assert answer["only_left"] == []
    answer = ask("diff", real("nt04-llama_noacc-z0-tp2-pp1-dp1-ep1"), real(untied), expect=1)
    assert {row["key"].split("|")[1] for row in answer["mismatched"]} == {"exp_avg", "exp_avg_sq"}
    assert answer["mismatched"][0]["left"].startswith("bfloat16") and answer["mismatched"][0]["right"].startswith(
        "float32"
    )
    assert all(key.endswith("|fp32_param") for key in answer["only_right"])


def test_nothing_differs_across_dialects_and_topologies(real: Real) -> None:
    answer = ask("diff", real(ZERO), real("head-llama_tied-z0-tp1-pp4-dp1-ep1"))
    assert answer["same"] and answer["num_tensors"] == 104 and answer["num_elements"] == 41_248 * 4


# --- cold and damaged state -----------------------------------------------------------------------------------------


def make_cold(content: dict[str, Any]) -> None:
    for entries in content["state"].values():
        entries["exp_avg"].zero_()
        entries["exp_avg_sq"].mul_(-0.0)


def test_a_cold_optimizer_is_refused_unless_it_is_wanted(
    copy_of: Real, refuse: Refuse, reshard: Reshard, tmp_path: Path
) -> None:
    root = copy_of(TP2)
    for path in (root / "optimizer").glob("*.pt"):
        edit_pt(path, make_cold)
    for options in ("--tp 1", "--tp 1 --no-receipt"):
        message = refuse(root, options, kind="ColdOptimizerError")
        assert "all moments are zero at step 3" in message and "--allow-cold" in message
        export = ("convert", root, tmp_path / "dcp", "--to", "dcp", *options.split()[2:])
        code, printed = run_cli(*export)
        assert code == 2 and "all moments are zero at step 3" in printed and not (tmp_path / "dcp").exists()
    assert ask("inspect", root, "--deep", expect=1)["findings"][0]["kind"] == "cold"
    assert ask(*export, "--allow-cold")["written"]
    reshard(root, "--tp 1 --allow-cold")
    assert ask("verify", root, tmp_path / "out")["same"]


def test_one_warm_element_is_enough(copy_of: Real, reshard: Reshard) -> None:
    root = copy_of(TP2)
    for path in (root / "optimizer").glob("*.pt"):
        edit_pt(path, make_cold)
        if "_tp-1-" in path.name:
            edit_pt(path, lambda content: state_of(content, QKV)["exp_avg_sq"][31, 31].fill_(1e-30))
    reshard(root, "--tp 1 --no-receipt")
    assert ask("inspect", root, "--deep")["findings"] == []


def damage(content: dict[str, Any]) -> None:
    moments = state_of(content, QKV)
    moments["exp_avg"][2, 3], moments["exp_avg"][9, 1] = float("nan"), float("-inf")
    moments["exp_avg_sq"][4, 5] = -1e-12
    content["gradient_accumulator"][QKV].data[6, 7] += 1.0
    state_of(content, NORM)["step"].fill_(2)


def test_damage_is_found_with_counts_and_places_and_carried_as_it_is(
    copy_of: Real, reshard: Reshard, tmp_path: Path
) -> None:
    root = copy_of(TP1)
    edit_pt(root / OPTIMIZER, damage)
    answer = ask("inspect", root, "--deep", expect=1)
    found = {row["kind"]: row for row in answer["findings"]}
    assert found["nonfinite"] == {
        "kind": "nonfinite", "message": "2 elements are NaN or infinite", "key": f"{QKV}|exp_avg", "count": 2,
        "position": [2, 3],
    }  # fmt: skip
    assert (found["negative"]["key"], found["negative"]["count"]) == (f"{QKV}|exp_avg_sq", 1)
    assert found["negative"]["position"] == [4, 5]
    assert (found["unrounded"]["key"], found["unrounded"]["count"]) == (QKV, 1)
    assert found["unrounded"]["position"] == [6, 7]
    assert "2 for " in found["steps"]["message"] and "3 for " in found["steps"]["message"]
    assert len(answer["findings"]) == 4
    summary = reshard(root, "--tp 2")
    assert {row["kind"] for row in summary["findings"]} == set(found)
    assert sum("carried as it is" in remark for remark in summary["remarks"]) == 4
    assert ask("verify", root, tmp_path / "out")["same"]
    content = torch.load(tmp_path / "out/optimizer/optimizer_pp-0-of-1_tp-0-of-2_exp-0-of-1.pt", weights_only=True)
    assert torch.isnan(state_of(content, QKV)["exp_avg"][2, 3])


@pytest.mark.parametrize(
    ("low", "weight_is_upper_half"), [(0x8000, True), (0x8000, False), (0x7FFF, True), (0x8001, False)]
)
def test_either_rounding_of_a_master_is_sound(low: int, weight_is_upper_half: bool, copy_of: Real) -> None:
    root = copy_of(TP1)
    high = 0x3D1C  # even, so a tie goes down to even and up by half

    def set_master(content: dict[str, Any]) -> None:
        content["gradient_accumulator"][QKV].data.view(torch.int32)[1, 1] = (high << 16) | low

    def set_weight(tensor: torch.Tensor) -> None:
        tensor.view(torch.int16)[1, 1] = high if weight_is_upper_half else high + 1

    shard = (
        "model/"
        + QKV.replace(".weight", "").replace(".", "/")
        + "/model_weight_pp-rank-0-of-1_tp-rank-0-of-1.safetensors"
    )
    edit_pt(root / OPTIMIZER, set_master)
    edit_shard(root / shard, set_weight)
    assert ask("inspect", root, "--deep")["findings"] == []
    edit_shard(root / shard, lambda tensor: tensor.view(torch.int16)[1, 1].add_(2))
    (found,) = ask("inspect", root, "--deep", expect=1)["findings"]
    assert (found["kind"], found["count"], found["position"]) == ("unrounded", 1, [1, 1])


def test_a_receipt_next_to_a_checkpoint_does_not_disturb_the_next_reshard(
    real: Real, reshard: Reshard, tmp_path: Path
) -> None:
    reshard(real(TP2), "--tp 1", out="one")
    reshard(tmp_path / "one", "--tp 2", out="two")
    assert compare_checkpoints(real(TP2), tmp_path / "two") == []
    receipt = tmp_path / "two" / FILE_NAME
    edit_json(receipt, lambda content: content.update(weights_digest="0"))
    assert ask("verify", tmp_path / "two", "--receipt", receipt)["same"]  # tensors decide, not the summary of them
