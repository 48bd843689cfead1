"""What is a replica and what is not, and names that collide when they are taken for local ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compare import compare_checkpoints, differ
from tests.edits import edit_pt
from tests.field.whole import ONE, WHOLE, edit_ranks, optimizer_files, read_truth, same, state_of

EXPERTS = "moe-moe_e8-z0-tp1-pp1-dp1-ep2"
ONE_RANK = "moe-moe_e8-z0-tp1-pp1-dp1-ep1"
SECOND = "optimizer/optimizer_pp-0-of-1_tp-0-of-1_exp-1-of-2.pt"
W1, W2 = (f"model.decoder.1.pp_block.block_sparse_moe.experts.mlp.{w}.module.weight" for w in ("w1", "w2"))
ROUTER = "model.decoder.1.pp_block.block_sparse_moe.gate.layer.weight"
NORM = "model.decoder.1.pp_block.input_layernorm.weight"
HEAD = "head-llama_tied-z0-tp2-pp2-dp1-ep1"
STAGES = "nt04-llama_tied-z0-tp2-pp2-dp1-ep1"

Real = Callable[[str], Path]
Reshard = Callable[..., dict[str, Any]]
Refuse = Callable[..., str]


# --- experts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [EXPERTS, "moe-moe_e8-z1-tp1-pp1-dp2-ep2", "moe-moe_e8-z0-tp2-pp1-dp1-ep2"])
def test_every_expert_is_kept(name: str, real: Real, reshard: Reshard, nanotron_fixtures: Path, tmp_path: Path) -> None:
    """Rank 1's experts 0 to 3 are the model's 4 to 7."""
    reshard(real(name), "--tp 2 --ep 4 --zero 1 --dp 3", out="spread")
    reshard(tmp_path / "spread", ONE, out="back")
    assert compare_checkpoints(real(ONE_RANK), tmp_path / "back") == []
    truth = read_truth(nanotron_fixtures, "moe_e8")
    content = torch.load(tmp_path / "back" / WHOLE, weights_only=True)
    for fqn in (W1, W2):
        moments = state_of(content, fqn)["exp_avg"]
        experts = truth[fqn]["exp_avg"].chunk(8)
        assert len({expert.numpy().tobytes() for expert in experts}) == 8
        # stacked w1 is stored transposed at tp 1, in a tensor of the logical shape's reverse
        stored = moments.T if moments.shape != truth[fqn]["exp_avg"].shape else moments
        assert differ(torch.cat(experts), stored.contiguous()) == []


def test_experts_of_two_ranks_are_not_compared(copy_of: Real, reshard: Reshard, tmp_path: Path) -> None:
    root = copy_of(EXPERTS)
    edit_pt(root / SECOND, lambda content: state_of(content, W2)["exp_avg"][5, 7].fill_(512.0))
    reshard(root, ONE)
    content = torch.load(tmp_path / "out" / WHOLE, weights_only=True)
    moments = state_of(content, W2)["exp_avg"]
    assert (moments == 512.0).nonzero().tolist() == [[4 * 32 + 5, 7]]


@pytest.mark.parametrize("fqn", [ROUTER, NORM])
@pytest.mark.parametrize("options", [ONE, "--ep 4"])
def test_replicas_of_two_expert_ranks_are_compared(fqn: str, options: str, copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(EXPERTS)
    edit_pt(root / SECOND, lambda content: state_of(content, fqn)["exp_avg"].view(-1)[3].fill_(512.0))
    message = refuse(root, options, kind="ReplicaMismatchError")
    assert "copies differ in 1 element" in message and fqn in message and Path(SECOND).name in message


def test_one_ranks_experts_under_anothers_name(copy_of: Real, refuse: Refuse) -> None:
    """Both weight files say that they hold the first experts, as if their indices were the model's."""
    root = copy_of(EXPERTS)
    folder = root / "model" / Path(*W1.split(".")[:-1])
    first, second = (next(folder.glob(f"*_exp-rank-{ep}-of-2.safetensors")) for ep in (0, 1))
    shutil.copy(first, second)
    message = refuse(root, ONE, kind="ContradictionError")
    assert "sharding metadata says" in message and W1 in message and second.name in message


def test_a_copied_optimizer_file_is_another_ranks(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(EXPERTS)
    shutil.copy(root / SECOND.replace("exp-1", "exp-0"), root / SECOND)
    assert "this is another rank's file" in refuse(root, ONE, kind="ContradictionError")


# --- layers ---------------------------------------------------------------------------------------------------------


def rename(old: str, new: str) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for table in ("names", "gradient_accumulator"):
            pairs = content[table].items()
            if table == "names":
                content[table] = {number: fqn.replace(old, new) for number, fqn in pairs}
            else:
                content[table] = {fqn.replace(old, new): value for fqn, value in pairs}

    return change


@pytest.mark.parametrize("name", [HEAD, STAGES])
def test_layers_of_a_later_stage_counted_from_zero(name: str, copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(name)
    edit_ranks(root, rename(".decoder.3.", ".decoder.0."), only="pp-1-of-2")
    message = refuse(root, ONE, kind="ContradictionError")
    assert "block decoder.0 is on pipeline stages 0 and 1" in message


def test_weights_of_a_later_stage_counted_from_zero(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(STAGES)
    edit_ranks(root, rename(".decoder.3.", ".decoder.0."), only="pp-1-of-2")
    later, first = (root / "model" / "model" / "decoder" / layer for layer in ("3", "0"))
    for path in later.rglob("*.safetensors"):
        shutil.move(path, first / path.relative_to(later))
    message = refuse(root, ONE)
    assert "decoder.0" in message and "two files claim the same shard" in message


# --- groups ---------------------------------------------------------------------------------------------------------


def reverse_stage(root: Path, only: str) -> None:
    """List a stage's parameters backwards, the tied copy apart: names, states, groups, masters and rates."""

    def order(count: int) -> list[int]:
        return [*reversed(range(count - 1)), count - 1]

    def change(content: Any) -> None:
        turned = order(len(content["names"]))
        content["names"] = {new: content["names"][old] for new, old in enumerate(turned)}
        content["state"] = {new: content["state"][old] for new, old in enumerate(turned)}
        masters = content["gradient_accumulator"]
        content["gradient_accumulator"] = {fqn: masters[fqn] for fqn in content["names"].values()}
        groups = [content["param_groups"][old] for old in turned]
        content["param_groups"] = [{**group, "params": [new]} for new, group in enumerate(groups)]

    edit_ranks(root, change, only)
    for path in (root / "lr_scheduler").glob(f"*{only}*"):

        def turn(state: Any) -> None:
            for key in ("base_lrs", "_last_lr", "lr_lambdas"):
                state[key] = [state[key][old] for old in order(len(state[key]))]

        edit_pt(path, turn)


def give_own_rates(root: Path) -> dict[str, tuple[float, float]]:
    """Give every parameter a learning rate and weight decay of its own, on all ranks and in the schedulers."""
    fqns = {fqn for path in optimizer_files(root) for fqn in torch.load(path, weights_only=True)["names"].values()}
    own = {fqn: (0.001 * (i + 1), 0.1 / (i + 1)) for i, fqn in enumerate(sorted(fqns))}
    for path in optimizer_files(root):
        content = torch.load(path, weights_only=True)
        for group in content["param_groups"]:
            lr, decay = own[content["names"][group["params"][0]]]
            group.update(lr=lr, initial_lr=2 * lr, weight_decay=decay)
        torch.save(content, path)
        lrs = [own[fqn][0] for fqn in content["names"].values()]
        scheduler = root / "lr_scheduler" / path.name.replace("optimizer", "lr_scheduler")
        state = torch.load(scheduler, weights_only=True)
        torch.save({**state, "_last_lr": lrs, "base_lrs": [2 * lr for lr in lrs]}, scheduler)
    return own


def rates(folder: Path) -> dict[str, set[tuple[float, float]]]:
    """Return what every group says of each parameter."""
    found: dict[str, set[tuple[float, float]]] = {}
    for path in optimizer_files(folder):
        content = torch.load(path, weights_only=True)
        lrs = []
        for group in content["param_groups"]:
            (number,) = group["params"]
            found.setdefault(content["names"][number], set()).add((group["lr"], group["weight_decay"]))
            lrs.append(group["lr"])
        scheduler = folder / "lr_scheduler" / path.name.replace("optimizer", "lr_scheduler")
        assert torch.load(scheduler, weights_only=True)["_last_lr"] == lrs
    return found


@pytest.mark.parametrize("stage", ["pp-0-of-2", "pp-1-of-2"])
def test_groups_in_another_order_on_another_stage(stage: str, copy_of: Real, reshard: Reshard, tmp_path: Path) -> None:
    """Groups belong to names, not to places: 2 stages to 1 to 4, each parameter with its own rates."""
    root = copy_of(HEAD)
    own = {fqn: {numbers} for fqn, numbers in give_own_rates(root).items()}
    in_order = shutil.copytree(root, tmp_path / "in_order")
    reverse_stage(root, stage)
    assert rates(root) == own
    reshard(root, "--pp 1", out="one")
    reshard(tmp_path / "one", "--pp 4 --tp 1", out="four")
    reshard(tmp_path / "four", "--pp 2 --dp 3 --zero 1 --tp 1", out="sliced")
    for name in ("one", "four"):
        assert rates(tmp_path / name) == own
        same(in_order, tmp_path / name)
    same(in_order, tmp_path / "sliced")


def test_ranks_of_one_stage_in_two_orders(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(HEAD)
    reverse_stage(root, "pp-1-of-2_tp-1-of-2")
    assert "in another order than its stage" in refuse(root, "--pp 1", kind="ContradictionError")


def test_rates_that_are_in_another_order_than_the_groups(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(HEAD)
    give_own_rates(root)
    for path in (root / "lr_scheduler").glob("*pp-1-of-2*"):
        edit_pt(path, lambda state: state.update(_last_lr=state["_last_lr"][::-1]))
    message = refuse(root, "--pp 1", kind="ContradictionError")  # the tied copy's is known from the first stage
    assert "entry differs from another rank's" in message and "token_embedding" in message


@pytest.mark.parametrize("turns_schedulers", [True, False])
def test_groups_in_another_order_than_their_numbers(turns_schedulers: bool, copy_of: Real, refuse: Refuse) -> None:
    """The scheduler's lists go by the groups' places: whose rates are whose cannot be told."""
    root = copy_of(HEAD)
    give_own_rates(root)
    edit_ranks(root, lambda content: content["param_groups"].reverse(), "pp-1-of-2")
    for path in (root / "lr_scheduler").glob("*pp-1-of-2*") if turns_schedulers else ():
        edit_pt(path, lambda state: [state[key].reverse() for key in ("base_lrs", "_last_lr", "lr_lambdas")])
    message = refuse(root, "--pp 1", kind="ContradictionError")
    assert "list the parameters in another order than their numbers" in message and "pp-1-of-2" in message
