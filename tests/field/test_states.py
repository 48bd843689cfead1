"""States that are not the same for all parameters, parameters of odd shapes, and what a folder should not hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.compare import compare_checkpoints, differ
from tests.edits import edit_json, edit_pt, edit_shard
from tests.field.whole import ONE, WHOLE, edit_ranks, number_of, optimizer_files, read_truth, same, state_of
from tests.nanotron.pair_table import run_cli

TP2 = "nt04-llama_tied-z0-tp2-pp1-dp1-ep1"
TP1 = "nt04-llama_tied-z0-tp1-pp1-dp1-ep1"
ZERO = "nt04-llama_tied-z1-tp1-pp1-dp2-ep1"
HEAD = "head-llama_tied-z0-tp2-pp1-dp1-ep1"
PADDED, UNPADDED = (f"nt04-llama_vpad_untied-z0-tp{tp}-pp1-dp1-ep1" for tp in (4, 1))
EMBEDDING = "model.token_position_embeddings.pp_block.token_embedding.weight"
LM_HEAD = "model.lm_head.pp_block.weight"
NORM = "model.decoder.1.pp_block.input_layernorm.weight"
O_PROJ = "model.decoder.1.pp_block.attn.o_proj.weight"
TARGETS = [ONE, "--tp 4 --pp 2 --dp 3 --zero 1"]
MORE_RANKS_THAN_ELEMENTS = "--tp 1 --dp 34 --zero 1"  # of a norm

Real = Callable[[str], Path]
Reshard = Callable[..., dict[str, Any]]
Refuse = Callable[..., str]


def there_and_back(root: Path, options: str, reshard: Reshard, tmp_path: Path) -> dict[str, Any]:
    """Re-shard to a topology and on to one rank; return the one optimizer file."""
    reshard(root, options, out="there")
    same(root, tmp_path / "there")
    reshard(tmp_path / "there", f"{ONE} --no-receipt", out="back")
    content = torch.load(tmp_path / "back" / WHOLE, weights_only=True)
    assert isinstance(content, dict)
    return content


# --- padding --------------------------------------------------------------------------------------------------------


def poison(content: Any) -> None:
    """Fill the last two vocabulary rows of a rank's optimizer file with a value that must not leak."""
    for fqn in (EMBEDDING, LM_HEAD):
        for value in (*state_of(content, fqn).values(), content["gradient_accumulator"][fqn].detach()):
            if value.dim() == 2:
                value[-2:] = 4096.0


@pytest.fixture
def poisoned(copy_of: Real) -> Path:
    """A tp 4 checkpoint whose two padding rows hold large numbers: all of its last rank."""
    root = copy_of(PADDED)
    edit_ranks(root, poison, "tp-3-of-4")
    for fqn in (EMBEDDING, LM_HEAD):
        folder = root / "model" / Path(*fqn.split(".")[:-1])
        edit_shard(next(folder.glob("*tp-rank-3-of-4*")), lambda tensor: tensor[-2:].fill_(4096.0))
    return root


def test_padding_is_no_data(poisoned: Path, real: Real, reshard: Reshard, tmp_path: Path) -> None:
    reshard(poisoned, f"{ONE} --vocab-size 126")
    assert compare_checkpoints(real(UNPADDED), tmp_path / "out") == []
    reshard(poisoned, "--tp 2 --dp 12 --zero 1 --vocab-size 126", out="sliced")
    for path in optimizer_files(tmp_path / "sliced"):
        content = torch.load(path, weights_only=True)
        for entries in content["state"].values():
            assert not (entries["exp_avg"] == 4096.0).any() and not (entries["exp_avg_sq"] == 4096.0).any()
    reshard(tmp_path / "sliced", ONE, out="back")
    assert compare_checkpoints(real(UNPADDED), tmp_path / "back") == []


def test_padding_that_nobody_named_is_kept_and_said_so(
    poisoned: Path, reshard: Reshard, nanotron_fixtures: Path, tmp_path: Path
) -> None:
    summary = reshard(poisoned, ONE)
    assert any("stored size 128 is taken as the true one" in remark for remark in summary["remarks"])
    content = torch.load(tmp_path / "out" / WHOLE, weights_only=True)
    truth = read_truth(nanotron_fixtures, "llama_vpad_untied")
    for fqn in (EMBEDDING, LM_HEAD):
        for state in ("exp_avg", "exp_avg_sq"):
            stored = state_of(content, fqn)[state]
            assert differ(truth[fqn][state], stored[:126]) == []
            assert stored.shape == (128, 32) and (stored[126:] == 4096.0).all()


# --- states ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [*TARGETS, MORE_RANKS_THAN_ELEMENTS])
def test_a_parameter_without_state_next_to_trained_ones(
    options: str, copy_of: Real, reshard: Reshard, nanotron_fixtures: Path, tmp_path: Path
) -> None:
    """It has a group and a master, but never had a gradient: nanotron lists no name for it."""
    root = copy_of(TP2)

    def forget(content: Any) -> None:
        number = number_of(content, O_PROJ)
        del content["state"][number], content["names"][number]

    edit_ranks(root, forget)
    content = there_and_back(root, options, reshard, tmp_path)
    truth = read_truth(nanotron_fixtures, "llama_tied")
    assert O_PROJ not in content["names"].values()
    assert len(content["state"]) == len(content["names"]) == 25
    assert len(content["param_groups"][0]["params"]) == len(content["gradient_accumulator"]) == 26
    assert differ(truth[O_PROJ]["fp32"], content["gradient_accumulator"][O_PROJ].detach()) == []
    for number, fqn in content["names"].items():
        assert differ(truth[fqn]["exp_avg"], content["state"][number]["exp_avg"]) == []


def test_a_parameter_without_state_on_one_rank_only(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TP2)

    def forget(content: Any) -> None:
        number = number_of(content, O_PROJ)
        del content["state"][number], content["names"][number]

    edit_ranks(root, forget, "tp-1-of-2")
    message = refuse(root, ONE, kind="ContradictionError")
    assert "has states" in message and O_PROJ in message


def test_a_parameter_without_state_and_without_a_name(copy_of: Real, refuse: Refuse) -> None:
    """Without masters nothing tells which parameter it is."""
    root = copy_of("nt04-llama_noacc-z0-tp2-pp1-dp1-ep1")

    def forget(content: Any) -> None:
        number = number_of(content, O_PROJ)
        del content["state"][number], content["names"][number]

    edit_ranks(root, forget)
    assert "1 parameters of the param groups have no state and no name" in refuse(root, ONE, kind="ContradictionError")


def freeze(root: Path, frozen: set[str]) -> None:
    """Take parameters out of the optimizer, as when they had requires_grad False; the weights stay."""

    def change(content: Any) -> None:
        kept = [number for number, fqn in content["names"].items() if fqn not in frozen]
        content["names"] = {new: content["names"][old] for new, old in enumerate(kept)}
        content["state"] = {new: content["state"][old] for new, old in enumerate(kept)}
        for fqn in frozen:
            del content["gradient_accumulator"][fqn]
        if len(content["param_groups"]) > 1:
            groups = [content["param_groups"][old] for old in kept]
            content["param_groups"] = [{**group, "params": [new]} for new, group in enumerate(groups)]
        else:
            content["param_groups"][0]["params"] = list(range(len(kept)))

    edit_ranks(root, change)
    for path in (root / "lr_scheduler").iterdir():

        def shorten(state: Any) -> None:
            for key in ("base_lrs", "_last_lr", "lr_lambdas"):
                if len(state[key]) > 1:
                    state[key] = state[key][len(frozen) :]

        edit_pt(path, shorten)
    edit_json(
        root / "optimizer" / "optimizer_config.json",
        lambda config: [table.pop(fqn, None) for table in config["configs"].values() for fqn in frozen],
    )


@pytest.mark.parametrize(
    ("name", "options"), [*((TP2, options) for options in TARGETS), (HEAD, TARGETS[1]), (ZERO, TARGETS[1])]
)
def test_frozen_parameters_keep_their_weights(
    name: str, options: str, copy_of: Real, reshard: Reshard, nanotron_fixtures: Path, tmp_path: Path
) -> None:
    root = copy_of(name)
    freeze(root, {O_PROJ, NORM})
    content = there_and_back(root, options, reshard, tmp_path)
    assert len(content["names"]) == 24
    assert not {O_PROJ, NORM} & {*content["names"].values(), *content["gradient_accumulator"]}
    truth = read_truth(nanotron_fixtures, "llama_tied")
    for fqn in (O_PROJ, NORM):
        folder = tmp_path / "back" / "model" / Path(*fqn.split(".")[:-1])
        (path,) = folder.glob("*.safetensors")
        assert differ(truth[fqn]["weight"], load_file(path)["data"]) == []
    for number, fqn in content["names"].items():
        assert differ(truth[fqn]["exp_avg_sq"], content["state"][number]["exp_avg_sq"]) == []


@pytest.mark.parametrize("options", TARGETS)
def test_a_state_that_only_some_parameters_have(
    options: str, copy_of: Real, reshard: Reshard, nanotron_fixtures: Path, tmp_path: Path
) -> None:
    root = copy_of(TP2)

    def add(content: Any) -> None:
        entries = state_of(content, O_PROJ)
        entries["max_exp_avg_sq"] = entries["exp_avg_sq"] * 2

    edit_ranks(root, add)
    content = there_and_back(root, options, reshard, tmp_path)
    truth = read_truth(nanotron_fixtures, "llama_tied")
    having = {fqn for number, fqn in content["names"].items() if "max_exp_avg_sq" in content["state"][number]}
    assert having == {O_PROJ}
    assert list(state_of(content, O_PROJ)) == ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert differ(truth[O_PROJ]["exp_avg_sq"] * 2, state_of(content, O_PROJ)["max_exp_avg_sq"]) == []
    code, printed = run_cli("inspect", root, "--json")
    assert f"{NORM}: has no max_exp_avg_sq, which other parameters have" in json.loads(printed)["remarks"]
    assert code == 0


def test_a_state_that_only_some_ranks_have(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TP2)

    def add(content: Any) -> None:
        state_of(content, O_PROJ)["max_exp_avg_sq"] = state_of(content, O_PROJ)["exp_avg_sq"]

    edit_ranks(root, add, "tp-1-of-2")
    message = refuse(root, ONE, kind="ContradictionError")
    assert "has states" in message and "max_exp_avg_sq" in message and O_PROJ in message and "tp-1-of-2" in message


@pytest.mark.parametrize(("options", "steps"), [*((options, True) for options in TARGETS), (TARGETS[1], False)])
def test_one_moment(
    options: str, steps: bool, copy_of: Real, reshard: Reshard, nanotron_fixtures: Path, tmp_path: Path
) -> None:
    """A Lion-like optimizer keeps exp_avg, and need not count steps."""
    root = copy_of(TP2)

    def simplify(content: Any) -> None:
        for entries in content["state"].values():
            del entries["exp_avg_sq"]
            if not steps:
                del entries["step"]

    edit_ranks(root, simplify)
    content = there_and_back(root, options, reshard, tmp_path)
    truth = read_truth(nanotron_fixtures, "llama_tied")
    assert len(content["names"]) == 26
    for number, fqn in content["names"].items():
        assert list(content["state"][number]) == (["step", "exp_avg"] if steps else ["exp_avg"])
        assert differ(truth[fqn]["exp_avg"], content["state"][number]["exp_avg"]) == []


# --- shapes ---------------------------------------------------------------------------------------------------------

SCALE = "model.decoder.1.pp_block.attn.scale"


def add_parameter(root: Path, shape: tuple[int, ...]) -> None:
    """Add a parameter that every rank holds whole."""
    generator = torch.Generator().manual_seed(7)
    values = {state: torch.rand(shape, generator=generator) for state in ("exp_avg", "exp_avg_sq", "fp32")}

    def add(content: Any) -> None:
        number = len(content["names"])
        content["names"][number] = SCALE
        content["state"][number] = {
            "step": torch.tensor(3.0), "exp_avg": values["exp_avg"], "exp_avg_sq": values["exp_avg_sq"],
        }  # fmt: skip
        content["param_groups"][0]["params"].append(number)
        content["gradient_accumulator"][SCALE] = values["fp32"]

    edit_ranks(root, add)
    folder = root / "model" / "model" / "decoder" / "1" / "pp_block" / "attn"
    save_file({"data": values["fp32"].to(torch.bfloat16)}, folder / "model_scale.safetensors")


@pytest.mark.parametrize(
    ("shape", "options"),
    [*((shape, options) for shape in ((1,), (), (3,)) for options in TARGETS), ((), MORE_RANKS_THAN_ELEMENTS)],
)
def test_parameters_of_one_or_few_elements(
    shape: tuple[int, ...], options: str, copy_of: Real, reshard: Reshard, tmp_path: Path
) -> None:
    root = copy_of(TP2)
    add_parameter(root, shape)
    before = torch.load(optimizer_files(root)[0], weights_only=True)
    content = there_and_back(root, options, reshard, tmp_path)
    assert state_of(content, SCALE).keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert state_of(content, SCALE)["exp_avg"].shape == shape
    assert differ(state_of(before, SCALE), state_of(content, SCALE)) == []
    one, two = (folder["gradient_accumulator"][SCALE].detach() for folder in (before, content))
    assert differ(one, two) == []
    one, two = (
        load_file(folder / "model/model/decoder/1/pp_block/attn/model_scale.safetensors")["data"]
        for folder in (root, tmp_path / "back")
    )
    assert differ(one, two) == []


@pytest.mark.parametrize("shape", [(0,), (0, 32)])
def test_parameters_of_no_elements_are_refused(shape: tuple[int, ...], copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TP2)
    add_parameter(root, shape)
    message = refuse(root, ONE)
    assert SCALE in message and "no elements" in message


# --- leftovers ------------------------------------------------------------------------------------------------------


def test_leftovers_of_more_ranks_next_to_fewer(copy_of: Real, real: Real, reshard: Reshard, tmp_path: Path) -> None:
    """``dp-1-of-12`` is not ``dp-1-of-2``: what another run left is named and not read, not even when it is broken."""
    root = copy_of(ZERO)
    reshard(real(ZERO), "--dp 12 --tp 2 --pp 2", out="wide")
    left = set()
    for path in (tmp_path / "wide").rglob("*"):
        target = root / path.relative_to(tmp_path / "wide")
        if path.is_file() and not target.exists() and target.parent.name != "wide" and "receipt" not in path.name:
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".pt":
                target.write_bytes(b"broken")
            else:
                shutil.copy(path, target)
            left.add(target.relative_to(root).as_posix())
    assert sum("optimizer" in name for name in left) == 48
    summary = reshard(root, ONE)
    assert {problem.split(" does not belong")[0] for problem in summary["problems"]} == left
    assert compare_checkpoints(real(TP1), tmp_path / "out") == []


def test_leftovers_cannot_stand_in_for_a_missing_rank(
    copy_of: Real, real: Real, reshard: Reshard, refuse: Refuse, tmp_path: Path
) -> None:
    root = copy_of(ZERO)
    reshard(real(ZERO), "--dp 12", out="wide")
    for path in optimizer_files(tmp_path / "wide"):
        shutil.copy(path, root / "optimizer")
    missing = next(path for path in optimizer_files(root) if path.name.startswith("optimizer_pp-0-of-1_dp-1-of-2_"))
    missing.unlink()
    message = refuse(root, ONE, kind="MissingSourceError")
    assert "optimizer file is missing" in message and missing.name in message
