"""Resuming real checkpoints under the real NeMo classes, over the stand-in for Apex."""

from __future__ import annotations

import pytest
from nemo_checks import assemble, differences

pytestmark = pytest.mark.nemo

HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "bias_correction")


def wrong_groups(results, info) -> list[str]:
    """Return every parameter whose group's values are not those it was saved with."""
    wanted = {}
    for group, keys in zip(info["rank0_groups"], info["rank0_group_param_keys"], strict=True):
        wanted.update(dict.fromkeys(keys, group))
    problems = []
    for result in results:
        for group, keys in result["groups"]:
            for key in keys:
                for name in HYPERPARAMETERS:
                    saved = wanted[key][name]
                    if group[name] != (tuple(saved) if name == "betas" else saved):
                        problems.append(f"{key}: {name} is {group[name]}, was {saved}")
            assert "step" not in group
            assert group["is_expert"] is False
    return problems


def check(results, fixture) -> None:
    assert "error" not in results[0], results[0]["error"]
    assert differences(assemble(results), fixture.truth) == []
    assert {result["step"] for result in results} == {fixture.info["step"]}
    assert wrong_groups(results, fixture.info) == []


LAYOUTS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)]


@pytest.mark.parametrize("name", ["fused_moe_ep1", "fused_dense"])
@pytest.mark.parametrize(("tp", "dp"), LAYOUTS)
def test_fused_adam_resumes_exactly(rig, fixture, name, tp, dp):
    source = fixture(name)
    check(rig.run("resume", tp * dp, path=source.path, tp=tp, moe=source.moe), source)


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 2), (2, 1)])
def test_three_groups_of_ep2_become_two(rig, fixture, tp, dp):
    source = fixture("fused_moe_ep2")
    results = rig.run("resume", tp * dp, path=source.path, tp=tp)
    check(results, source)
    assert len(results[0]["groups"]) == 2
    assert results[0]["report"]["folded_groups"] == (1,)
    assert [group["saved_group"] for group in results[0]["report"]["groups"]] == [0, 2]


@pytest.mark.parametrize("name", ["fused_moe_ep1", "fused_dense"])
@pytest.mark.parametrize("dp", [1, 2])
def test_whole_masters_resume_exactly(rig, fixture, name, dp):
    source = fixture(name)
    options = {"store_params": True, "store_param_remainders": False}
    check(rig.run("resume", dp, path=source.path, moe=source.moe, **options), source)


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("reverse", [False, True])
def test_checkpoints_of_stock_distributed_fused_adam_resume_exactly(rig, fixture, tp, dp, reverse):
    source = fixture("dist_moe_stock_keys")
    results = rig.run("resume", tp * dp, path=source.path, tp=tp, reverse=reverse)
    check(results, source)
    assert results[0]["report"]["key_style"] == "stock"
    assert results[0]["report"]["source"] == "distributed_fused_adam"


def test_the_order_of_groups_means_nothing(rig, fixture):
    source = fixture("fused_moe_ep2")
    check(rig.run("resume", 1, path=source.path, reverse=True), source)
    check(rig.run("resume", 1, path=source.path, harm="reverse saved"), source)


def test_a_summary_tells_what_was_done(rig, fixture):
    source = fixture("fused_moe_ep1")
    report = rig.run("resume", 2, path=source.path)[0]["report"]
    assert report["source"] == "fused_adam"
    assert report["checkpoint"] == source.path
    assert (report["step"], report["parameters"], report["elements"]) == (3, 34, 48192)
    assert (report["key_style"], report["masters"]) == ("uniform", "checkpoint")
    assert [group["weight_decay"] for group in report["groups"]] == [0.1, 0.0]
    assert report["ties_resynced"] == 1  # the one tie among 48192 elements


# ------------------------------------------------------------------------ the failures, on stock and on the bridge


@pytest.mark.parametrize("name", ["fused_moe_ep1", "fused_dense"])
def test_stock_does_not_find_the_masters_of_gated_mlps(rig, fixture, name):
    source = fixture(name)
    failed = rig.run("resume", 1, path=source.path, moe=source.moe, cls="stock")[0]
    assert failed["stage"] == "ask"
    assert "CheckpointException" in failed["error"]
    layer = "mlp.experts.experts.linear_fc1.weight" if source.moe else "mlp.linear_fc1."
    assert f"optimizer.state.param.model.decoder.layers.{layer}" in failed["error"]
    check(rig.run("resume", 1, path=source.path, moe=source.moe), source)


def test_stock_under_strict_handling_reports_missing_and_unexpected_keys(rig, fixture):
    source = fixture("fused_moe_ep1")
    failed = rig.run("resume", 1, path=source.path, cls="stock", load={"strict": "raise_all"})[0]
    assert "Missing keys" in failed["error"] or "Unexpected keys" in failed["error"]
    assert "optimizer.state.param." in failed["error"]
    assert "optimizer.state.fp32_param." in failed["error"]


def test_renaming_alone_fails_after_the_groups_were_replaced(rig, fixture):
    source = fixture("fused_moe_ep1")
    failed = rig.run("resume", 1, path=source.path, cls="rename")[0]
    assert failed["stage"] == "load"
    assert failed["error"] == "KeyError: 'step'"
    assert all("lr" in group for group in failed["before"]["groups"])
    assert not any("lr" in group for group in failed["after"]["groups"])


def test_renaming_alone_cannot_read_what_stock_wrote(rig, fixture):
    source = fixture("dist_moe_stock_keys")
    assert "fp32_param" in rig.run("resume", 1, path=source.path, cls="rename")[0]["error"]


def test_groups_by_index_are_silently_wrong(rig, fixture):
    source = fixture("fused_moe_ep2")
    results = rig.run("resume", 1, path=source.path, cls="by index", store_params=True, store_param_remainders=False)
    assert "error" not in results[0]
    assert differences(assemble(results), source.truth) == []  # all tensors are right
    bias_group = next(group for group, keys in results[0]["groups"] if any(key.endswith("bias") for key in keys))
    assert (bias_group["weight_decay"], bias_group["is_expert"]) == (0.1, True)
    check(rig.run("resume", 1, path=source.path), source)


def test_stock_gets_a_rounding_tie_wrong_in_remainder_mode(rig, fixture):
    source = fixture("dist_moe_stock_keys")
    wrong = differences(assemble(rig.run("resume", 1, path=source.path, cls="stock")), source.truth)
    assert len(wrong) == 1
    assert "1 of" in wrong[0]
    check(rig.run("resume", 1, path=source.path), source)


# ------------------------------------------------------------------------------------------------- before training


def test_a_checkpoint_from_before_the_first_step_has_step_zero(rig, tmp_path):
    path = str(tmp_path / "step0")
    (saved,) = rig.run("fused", 1, steps=0, save_to=make(path))
    (resumed,) = rig.run("resume", 1, path=path)
    assert resumed["step"] == 0
    assert differences(assemble([resumed]), assemble([saved])) == []


def make(path: str) -> str:
    from pathlib import Path

    Path(path).mkdir(parents=True)
    return path


# ------------------------------------------------------------------------------------------------------ training on


@pytest.mark.parametrize("moe", [True, False])
@pytest.mark.parametrize("stored", [False, True])
def test_training_on_equals_an_uninterrupted_run(rig, tmp_path, moe, stored):
    path = make(str(tmp_path / "ckpt"))
    rig.run("fused", 1, moe=moe, steps=3, save_to=path)
    uninterrupted = rig.run("fused", 1, moe=moe, steps=6)
    options = {"store_params": stored, "store_param_remainders": not stored}
    resumed = rig.run("resume", 2, path=path, moe=moe, steps=3, **options)
    assert "error" not in resumed[0], resumed[0]["error"]
    assert {result["step"] for result in resumed} == {6}
    assert differences(assemble(resumed), assemble(uninterrupted)) == []


def test_pipeline_parallel_checkpoints_resume_on_other_layouts(rig, tmp_path):
    path = make(str(tmp_path / "pp2"))
    truth = assemble(rig.run("fused", 2, pp=2, steps=3, save_to=path))
    for pp, tp, dp in ((2, 1, 1), (2, 1, 2), (2, 2, 1)):
        results = rig.run("resume", pp * tp * dp, path=path, pp=pp, tp=tp)
        assert "error" not in results[0], results[0]["error"]
        assert differences(assemble(results), truth) == []
        assert all(result["step"] == 3 for result in results)
        for result in results:
            for group, keys in result["groups"]:
                assert group["weight_decay"] == (0.0 if all(key.endswith("bias") for key in keys) else 0.1)
                assert (group["lr"], group["betas"], group["eps"]) == (1e-2 * 0.94, (0.9, 0.98), 1e-8)


def test_every_master_on_a_tie_is_restored(rig, tmp_path):
    path = make(str(tmp_path / "tie"))
    truth = assemble(rig.run("fused", 1, steps=1, save_to=path, tie=True))
    by_stock = assemble(rig.run("resume", 1, path=path, cls="by index"))
    assert len(differences(by_stock, truth)) == 13  # every parameter's masters
    results = rig.run("resume", 2, path=path)
    assert differences(assemble(results), truth) == []
    assert results[0]["report"]["ties_resynced"] == 48192


# -------------------------------------------------------------------------------------------------- what is refused


def refused(results, error: str, *words: str) -> None:
    for result in results:
        assert result.get("error", "no error").startswith(error), result.get("error", "no error")
        assert all(word in result["error"] for word in words), result["error"]
        if "before" in result:
            assert_same(result["before"], result["after"])


def assert_same(before, after) -> None:
    assert before["groups"] == after["groups"]
    assert before["step"] == after["step"]
    assert before["tensors"].keys() == after["tensors"].keys()
    assert all((before["tensors"][k].view("i4") == after["tensors"][k].view("i4")).all() for k in before["tensors"])
    assert all((a == b).all() for a, b in zip(before["weights"], after["weights"], strict=True))


@pytest.mark.parametrize(
    ("harm", "error", "word"),
    [
        ("drop moment", "MissingSourceError", "exp_avg"),
        ("break on last rank", "MissingSourceError", "param"),
        ("reshape", "ContradictionError", "shape"),
        ("zero moments", "ColdOptimizerError", "allow_cold_optimizer"),
        ("drop steps", "ContradictionError", "step"),
        ("disagreeing steps", "ContradictionError", "disagree"),
        ("ambiguous", "ParamGroupError", "this optimizer"),
    ],
)
def test_a_refused_load_is_refused_on_all_ranks_and_changes_nothing(rig, fixture, harm, error, word):
    results = rig.run("resume", 2, path=fixture("fused_moe_ep1").path, harm=harm)
    assert len(results) == 2
    refused(results, error, word)


def test_the_other_ranks_name_the_rank_that_refused(rig, fixture):
    results = rig.run("resume", 2, path=fixture("fused_moe_ep1").path, harm="drop moment")
    assert "rank 1" in results[0]["error"]


def test_cold_moments_can_be_wanted(rig, fixture):
    path = fixture("fused_moe_ep1").path
    (result,) = rig.run("resume", 1, path=path, harm="zero moments", allow_cold_optimizer=True)
    assert result["step"] == 3


def test_expert_parallel_targets_are_refused(rig, fixture):
    results = rig.run("resume", 2, path=fixture("fused_moe_ep1").path, ep=2)
    refused(results, "TargetError", "expert_model_parallel_size")
    assert results[0]["stage"] == "construct"


def test_an_optimizer_that_cannot_hold_the_masters_is_refused(rig, fixture):
    path = fixture("fused_moe_ep1").path
    refused(rig.run("resume", 1, path=path, store_param_remainders=False), "TargetError", "allow_lossy_state")
    (result,) = rig.run("resume", 1, path=path, store_param_remainders=False, allow_lossy_state=True)
    assert result["step"] == 3


def test_keys_are_not_looked_up_when_the_style_is_given(rig, fixture):
    stock, fused = fixture("dist_moe_stock_keys"), fixture("fused_moe_ep1")
    check(rig.run("resume", 1, path=stock.path, fp32_key_style="stock"), stock)
    check(rig.run("resume", 1, path=fused.path, fp32_key_style="uniform"), fused)
    assert rig.run("resume", 1, path=fused.path, fp32_key_style="stock")[0]["stage"] == "ask"


# ----------------------------------------------------------------------------------------------- saving and policies


@pytest.mark.parametrize("style", ["auto", "stock", "uniform"])
def test_saved_checkpoints_load_again(rig, fixture, tmp_path, style):
    source = fixture("fused_moe_ep1")
    path = make(str(tmp_path / style))
    saved = rig.run("resume", 2, path=source.path, fp32_key_style="uniform" if style == "uniform" else "auto",
                    save_to=path)  # fmt: skip
    assert "error" not in saved[0]
    results = rig.run("resume", 1, path=path)
    check(results, source)
    assert results[0]["report"]["key_style"] == ("uniform" if style == "uniform" else "stock")
    assert results[0]["report"]["ties_resynced"] == 0  # saved with the rounding that the masters need
    by_stock = rig.run("resume", 1, path=path, cls="stock")
    if style == "uniform":
        assert by_stock[0]["stage"] == "ask"
    else:
        check(by_stock, source)


def test_hyperparameters_of_this_run(rig, fixture):
    path = fixture("fused_moe_ep2").path
    (result,) = rig.run("resume", 1, path=path, hyperparameters="current")
    assert [group["weight_decay"] for group, _ in result["groups"]] == [0.3, 0.0]
    assert all(group["lr"] == 7e-7 and group["betas"] == (0.5, 0.6) for group, _ in result["groups"])
    assert result["step"] == 3


def test_hyperparameters_field_by_field(rig, fixture):
    path = fixture("fused_moe_ep2").path
    wanted = {"lr": "current", "betas": [0.8, 0.9], "weight_decay": 0.2}
    (result,) = rig.run("resume", 1, path=path, hyperparameters=wanted)
    assert [group["weight_decay"] for group, _ in result["groups"]] == [0.2, 0.0]
    assert all(group["lr"] == 7e-7 and group["betas"] == (0.8, 0.9) for group, _ in result["groups"])
    assert all(group["eps"] == 1e-8 for group, _ in result["groups"])


def test_a_capturable_optimizer_keeps_step_and_rate_as_tensors(rig, fixture):
    path = fixture("fused_moe_ep1").path
    options = {"capturable": True, "store_params": True, "store_param_remainders": False}
    (result,) = rig.run("resume", 1, path=path, steps=1, **options)
    assert result["step"] == 4


def test_base_classes_that_take_one_argument_work_as_well(rig, fixture):
    source = fixture("dist_moe_stock_keys")
    check(rig.run("resume_with_one_argument", 1, path=source.path), source)
