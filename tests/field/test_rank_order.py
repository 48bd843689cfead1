"""Ranks are numbers: neither 10 nor 100 of them, nor an odd listing of the folder, changes what belongs where."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compare import compare_checkpoints, differ
from tests.edits import edit_pt, fingerprint
from tests.field.whole import ONE, edit_ranks, optimizer_files, rank, read_truth, same, slices, state_of

ZERO = "nt04-llama_tied-z1-tp1-pp1-dp2-ep1"
ONE_RANK = "nt04-llama_tied-z0-tp1-pp1-dp1-ep1"
HEAD_ZERO = "head-llama_tied-z1-tp1-pp2-dp2-ep1"
NORM = "model.decoder.1.pp_block.input_layernorm.weight"
NORM_SIZE = 32

Real = Callable[[str], Path]
Reshard = Callable[..., dict[str, Any]]
Refuse = Callable[..., str]


@pytest.mark.parametrize("dp", [12, 101])
def test_slices_are_joined_in_the_order_of_numbers(
    dp: int, real: Real, reshard: Reshard, nanotron_fixtures: Path, tmp_path: Path
) -> None:
    reshard(real(ZERO), f"--dp {dp}", out="wide")
    truth = read_truth(nanotron_fixtures, "llama_tied")
    expected = {(fqn, state): tensor for fqn in truth for state, tensor in truth[fqn].items()}
    joined = slices(tmp_path / "wide", lambda path: rank(path, "dp"))
    assert {(fqn, state) for fqn, state in expected if state not in ("step", "weight")} == joined.keys()
    assert [key for key in joined if differ(expected[key].reshape(-1), joined[key])] == []
    lexical = slices(tmp_path / "wide", lambda path: path.name)
    assert any(differ(joined[key], lexical[key]) for key in joined)  # the order does matter
    reshard(tmp_path / "wide", ONE, out="back")
    assert compare_checkpoints(real(ONE_RANK), tmp_path / "back") == []


@pytest.mark.parametrize("options", ["--tp 4 --pp 4 --dp 11 --zero 1", "--tp 2 --pp 3 --dp 12 --zero 1"])
def test_there_and_back_on_all_axes(options: str, real: Real, reshard: Reshard, tmp_path: Path) -> None:
    reshard(real(ONE_RANK), options, out="wide")
    same(real(ONE_RANK), tmp_path / "wide")
    reshard(tmp_path / "wide", ONE, out="back")
    assert compare_checkpoints(real(ONE_RANK), tmp_path / "back") == []


def test_the_listing_of_a_folder_does_not_matter(
    real: Real, reshard: Reshard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reshard(real(ZERO), "--dp 12 --tp 2", out="wide")
    reshard(tmp_path / "wide", "--tp 4 --dp 5 --no-receipt", out="listed")
    listed, in_order = fingerprint(tmp_path / "listed"), Path.iterdir
    for seed in range(2):
        shuffler = random.Random(seed)

        def shuffled(folder: Path, shuffler: random.Random = shuffler) -> Iterator[Path]:
            inside = sorted(in_order(folder))
            shuffler.shuffle(inside)
            return iter(inside)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "iterdir", shuffled)
            reshard(tmp_path / "wide", "--tp 4 --dp 5 --no-receipt", out=f"shuffled{seed}")
        assert fingerprint(tmp_path / f"shuffled{seed}") == listed


@pytest.mark.parametrize("source", [ZERO, HEAD_ZERO])
def test_parameters_smaller_than_the_dp_size(source: str, real: Real, reshard: Reshard, tmp_path: Path) -> None:
    """A rank beyond the last element has no state of a norm; the dialect keeps its empty group, or has none."""
    reshard(real(source), f"--pp 1 --dp {NORM_SIZE + 8}", out="wide")
    for path in optimizer_files(tmp_path / "wide"):
        content = torch.load(path, weights_only=True)
        has_slice = rank(path, "dp") < NORM_SIZE
        assert (NORM in content["names"].values()) == has_slice
        assert (NORM in content["gradient_accumulator"]) == has_slice
        if has_slice:
            assert state_of(content, NORM)["exp_avg"].shape == (1,)
        if source == HEAD_ZERO:
            empty = [group for group in content["param_groups"] if not group["params"]]
            assert bool(empty) != has_slice
    same(real(source), tmp_path / "wide")
    reshard(tmp_path / "wide", "--pp 2 --dp 3", out="back")
    same(real(source), tmp_path / "back")


def test_empty_slices_do_not_count_as_other_steps(real: Real, reshard: Reshard, tmp_path: Path) -> None:
    reshard(real(HEAD_ZERO), f"--pp 1 --dp {NORM_SIZE + 1}", out="wide")

    def fewer_steps(content: Any) -> None:
        if NORM in content["names"].values():
            state_of(content, NORM)["step"].fill_(2)

    edit_ranks(tmp_path / "wide", fewer_steps)
    reshard(tmp_path / "wide", ONE, out="back")
    (path,) = optimizer_files(tmp_path / "back")
    content = torch.load(path, weights_only=True)
    steps = {fqn: content["state"][number]["step"].item() for number, fqn in content["names"].items()}
    assert steps == {fqn: 2.0 if fqn == NORM else 3.0 for fqn in steps}
    assert len(steps) == 26


def test_steps_that_differ_between_ranks_with_a_slice(
    real: Real, reshard: Reshard, refuse: Refuse, tmp_path: Path
) -> None:
    reshard(real(ZERO), "--dp 12", out="wide")
    path = next(path for path in optimizer_files(tmp_path / "wide") if rank(path, "dp") == 10)
    edit_pt(path, lambda content: state_of(content, NORM)["step"].fill_(2))
    message = refuse(tmp_path / "wide", ONE, kind="ContradictionError")
    assert "step 2" in message and "other ranks step 3" in message
    assert path.name in message and NORM in message


def test_a_state_of_no_elements_where_there_is_no_slice(
    real: Real, reshard: Reshard, refuse: Refuse, tmp_path: Path
) -> None:
    """Such a rank's step would be another's; nanotron writes no state there."""
    reshard(real(ZERO), f"--dp {NORM_SIZE + 1}", out="wide")
    path = next(path for path in optimizer_files(tmp_path / "wide") if rank(path, "dp") == NORM_SIZE)

    def add(content: Any) -> None:
        number = len(content["names"])
        content["names"][number] = NORM
        content["state"][number] = {key: torch.zeros(0) for key in ("exp_avg", "exp_avg_sq")}
        content["state"][number]["step"] = torch.tensor(0.0)
        content["param_groups"][0]["params"].append(number)
        content["gradient_accumulator"][NORM] = torch.zeros(0)

    edit_pt(path, add)
    message = refuse(tmp_path / "wide", ONE, kind="ContradictionError")
    assert "this rank has no part of" in message and NORM in message and path.name in message


def test_a_lost_rank_in_the_middle_is_named(real: Real, reshard: Reshard, refuse: Refuse, tmp_path: Path) -> None:
    reshard(real(ZERO), "--dp 101", out="wide")
    path = next(path for path in optimizer_files(tmp_path / "wide") if rank(path, "dp") == 10)
    path.unlink()
    message = refuse(tmp_path / "wide", ONE, kind="MissingSourceError")
    assert "optimizer file is missing" in message and path.name in message
