"""Param groups are matched by what they are, steps are found wherever they are kept."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_optim_bridge.core.groups import (
    Policy,
    common_step,
    find_steps,
    identify,
    is_full_group,
    match_groups,
    merge_group,
)
from nemo_optim_bridge.errors import ContradictionError, ParamGroupError


class Scalar:
    """A one-element tensor, as far as groups know tensors."""

    def __init__(self, value, numel=1):
        self.value, self._numel = value, numel

    def numel(self):
        return self._numel

    def item(self):
        return self.value


def group(decay=0.1, expert=False, lr=1e-3, **more):
    return {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay, "is_expert": expert, **more}


DECAY, EXPERT, BIAS = group(), group(expert=True), group(decay=0.0)


def partners(saved, current):
    return match_groups(saved, current).partner


# ---------------------------------------------------------------------------------------------------------- identity


def test_identity_is_decay_expert_multiplier_and_markers():
    identity = identify(group(decay=0.0, expert=True, lr_mult=0.5, name="head", is_decoupled_lr=False))
    assert (identity.decays, identity.expert, identity.lr_mult) == (False, True, 0.5)
    assert identity.markers == (("name", "head"),)
    assert str(identity) == "no decay, expert, lr_mult 0.5, name 'head'"


def test_a_weight_decay_multiplier_decides_before_the_stored_value():
    assert not identify(group(decay=0.1, wd_mult=0.0)).decays
    assert identify(group(decay=0.1, wd_mult=1.0)).decays


def test_scheduler_fields_are_no_markers():
    assert identify(group(initial_lr=1.0, max_lr=2.0, step=3, foreach=True)).markers == ()


# ---------------------------------------------------------------------------------------------------------- matching


@given(st.permutations([DECAY, BIAS]), st.permutations([0, 1]))
def test_order_does_not_matter(saved, order):
    current = [[DECAY, BIAS][i] for i in order]
    for mine, j in zip(current, partners(saved, current), strict=True):
        assert saved[j]["weight_decay"] == mine["weight_decay"]


@given(st.permutations([DECAY, EXPERT, BIAS]))
def test_three_groups_fold_into_two(saved):
    current = [group(decay=0.3), group(decay=0.0)]
    matching = match_groups(saved, current)
    assert [saved[j] for j in matching.partner] == [DECAY, BIAS]
    assert [saved[j] for j in matching.folded] == [EXPERT]
    assert matching.unmatched == frozenset()


def test_one_group_splits_into_expert_and_ordinary():
    assert partners([BIAS, DECAY], [DECAY, EXPERT, BIAS]) == (1, 1, 0)


def test_expert_groups_keep_apart_when_both_sides_have_them():
    saved = [group(lr=2e-3, expert=True), group(lr=1e-3)]
    assert partners(saved, [DECAY, EXPERT]) == (1, 0)


def test_experts_with_other_values_cannot_be_folded():
    with pytest.raises(ParamGroupError, match="different values") as error:
        match_groups([DECAY, group(expert=True, lr=5e-4), BIAS], [DECAY, BIAS])
    assert "checkpoint:" in str(error.value)
    assert "this optimizer:" in str(error.value)


def test_a_group_without_a_partner_is_an_error_that_lists_both_sides():
    with pytest.raises(ParamGroupError, match="no partner") as error:
        match_groups([DECAY], [DECAY, BIAS])
    assert "1: (no decay, not expert)" in str(error.value)


def test_a_saved_group_that_nobody_wants_is_told():
    assert match_groups([DECAY, BIAS], [DECAY]).unmatched == {1}


def test_multipliers_tell_groups_apart():
    saved = [group(lr_mult=0.1), group(lr_mult=1.0)]
    assert partners(saved, [group(lr_mult=1.0), group(lr_mult=0.1)]) == (1, 0)


def test_markers_count_when_both_sides_use_them():
    assert partners([group(name="a"), group(name="b")], [group(name="b"), group(name="a")]) == (1, 0)
    assert partners([group(name="a")], [group()]) == (0,)


def test_alike_groups_are_told_apart_by_a_value_that_both_sides_agree_on():
    saved = [group(lr=1e-4, initial_lr=1e-3), group(lr=5e-5, initial_lr=5e-4)]
    current = [group(lr=5e-4, initial_lr=5e-4), group(lr=1e-3, initial_lr=1e-3)]
    assert partners(saved, current) == (1, 0)


def test_alike_groups_that_no_value_tells_apart_are_ambiguous():
    with pytest.raises(ParamGroupError, match="look alike"):
        match_groups([group(lr=1e-4), group(lr=2e-4)], [group(lr=1e-3), group(lr=2e-3)])


def test_equal_groups_are_not_ambiguous():
    assert partners([group(), group()], [group(), group()]) == (0, 1)
    assert partners([group(), group()], [group()]) == (0,)


def test_groups_that_split_differently_are_an_error():
    with pytest.raises(ParamGroupError, match="one group"):
        match_groups([group()], [group(lr=1e-3), group(lr=2e-3)])


def test_all_problems_are_told_at_once():
    with pytest.raises(ParamGroupError) as error:
        match_groups([group(lr_mult=0.5)], [DECAY, BIAS])
    assert "group 0" in str(error.value)
    assert "group 1" in str(error.value)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0.1, 1.0, 2.0])), min_size=1, max_size=6, unique=True),
       st.randoms(use_true_random=False))  # fmt: skip
def test_distinct_identities_always_find_their_own(kinds, rng: random.Random):
    saved = [group(decay=0.1 if decays else 0.0, lr_mult=mult, tag=i) for i, (decays, mult) in enumerate(kinds)]
    current = [{k: v for k, v in g.items() if k != "tag"} | {"lr": 9.0} for g in saved]
    rng.shuffle(current)
    for mine, j in zip(current, partners(saved, current), strict=True):
        assert (identify(saved[j]).decays, saved[j]["lr_mult"]) == (identify(mine).decays, mine["lr_mult"])


# -------------------------------------------------------------------------------------------------------- policies


def test_values_come_from_the_checkpoint_and_membership_stays():
    saved = {**group(lr=5e-4, expert=True), "step": 7, "initial_lr": 1e-3, "betas": [0.8, 0.9]}
    current = {**group(decay=0.3, lr=9.0), "params": ["p"]}
    merged = merge_group(saved, current, Policy())
    assert merged["lr"] == 5e-4
    assert merged["betas"] == (0.8, 0.9)
    assert merged["weight_decay"] == 0.1
    assert merged["initial_lr"] == 1e-3
    assert merged["params"] == ["p"]
    assert merged["is_expert"] is False
    assert "step" not in merged
    assert saved["step"] == 7
    assert current["weight_decay"] == 0.3


def test_current_values_stay_on_request_and_unknown_fields_survive():
    saved = group(lr=5e-4, initial_lr=1e-3, swap=1)
    merged = merge_group(saved, group(lr=9.0, initial_lr=10.0), Policy.parse("current"))
    assert (merged["lr"], merged["initial_lr"], merged["swap"]) == (9.0, 10.0, 1)


def test_a_mapping_chooses_field_by_field():
    policy = Policy.parse({"lr": "current", "weight_decay": 0.2, "betas": [0.7, 0.8]})
    merged = merge_group(group(lr=5e-4), group(lr=9.0), policy)
    assert (merged["lr"], merged["weight_decay"], merged["betas"], merged["eps"]) == (9.0, 0.2, (0.7, 0.8), 1e-8)
    assert merge_group(BIAS, BIAS, policy)["weight_decay"] == 0.0


def test_a_rate_given_as_a_value_is_multiplied():
    policy = Policy.parse({"lr": 1e-3})
    assert merge_group(group(lr_mult=0.1), group(lr_mult=0.1), policy)["lr"] == pytest.approx(1e-4)


def test_policy_needs_the_checkpoint_only_when_it_takes_something_from_it():
    assert Policy.parse("checkpoint").needs_checkpoint
    assert not Policy.parse("current").needs_checkpoint
    assert Policy.parse({"default": "current", "eps": "checkpoint"}).needs_checkpoint
    assert not Policy.parse({"default": "current", "eps": 1e-6}).needs_checkpoint


def test_a_stored_base_decay_does_not_reach_a_group_without_decay():
    assert merge_group(group(decay=0.1, wd_mult=0.0), group(decay=0.0), Policy())["weight_decay"] == 0.0


@pytest.mark.parametrize(
    "value", ["saved", 3, {"momentum": 0.9}, {"default": "latest"}, {"betas": [0.9]}, {"lr": -1.0}, {"eps": True}]
)
def test_policies_that_make_no_sense_are_refused(value):
    with pytest.raises(ParamGroupError):
        Policy.parse(value)


@pytest.mark.parametrize(
    "field",
    [
        {"lr": float("nan")}, {"lr": 10**400}, {"bias_correction": 2}, {"betas": (0.9, 1.0)}, {"eps": "x"},
        {"weight_decay": -0.1},
    ],
)  # fmt: skip
def test_saved_values_that_no_adam_can_use_are_refused(field):
    with pytest.raises(ParamGroupError, match=next(iter(field))):
        merge_group({**group(), **field}, group(), Policy())


@pytest.mark.parametrize("name", ["wd_mult", "pre_wd_mult", "lr_mult", "pre_mult_lr"])
@pytest.mark.parametrize("value", ["1", [1.0], {}, float("nan"), -1.0, 10**400, True])
def test_multipliers_that_are_no_numbers_are_refused(name, value):
    with pytest.raises(ParamGroupError, match=f"{name} of a param group is"):
        identify({**group(), name: value})


@pytest.mark.parametrize("value", ["no", [False], 2, 0.0, float("nan")])
def test_an_expert_flag_that_is_no_flag_is_refused(value):
    with pytest.raises(ParamGroupError, match="is_expert of a param group is"):
        identify({**group(), "is_expert": value})


def test_a_learning_rate_of_nothing_is_not_the_whole():
    assert identify({**group(), "lr_mult": 0.0}).lr_mult == 0.0
    assert identify({**group(), "lr_mult": None, "pre_lr_mult": Scalar(0.5)}).lr_mult == 0.5
    assert identify({**group(), "lr_mult": None}).lr_mult == 1.0
    assert not identify({**group(), "wd_mult": 0.0, "weight_decay": 0.1}).decays


# ------------------------------------------------------------------------------------------------------------ steps


def test_steps_are_found_wherever_they_are_kept():
    found = find_steps(
        [{"step": 3}, {"step": Scalar(3.0)}, {}], [("state", {"step": Scalar(3)}), ("x", {"step": None})]
    )
    assert found == {"param_groups[0].step": 3, "param_groups[1].step": 3, "state.step": 3}
    assert common_step(found) == 3
    assert common_step(find_steps([], [("state", {"common_step": 5})])) == 5


def test_no_step_anywhere_means_before_the_first():
    assert common_step(find_steps([group(), group()])) is None


def test_steps_that_disagree_are_an_error():
    with pytest.raises(ContradictionError, match=r"param_groups\[1\].step = 4"):
        common_step(find_steps([{"step": 3}, {"step": 4}]))


@pytest.mark.parametrize(
    "step", [-1, 1.5, True, "3", 2**53 + 1, 1e300, 10**400, Scalar(float("nan")), Scalar([1, 2], numel=2)]
)
def test_steps_that_are_no_whole_numbers_are_an_error(step):
    with pytest.raises(ContradictionError, match="step"):
        find_steps([{"step": step}])


def test_a_list_of_parameters_is_no_full_group():
    assert is_full_group(group())
    assert not is_full_group({"params": [1, 2]})
