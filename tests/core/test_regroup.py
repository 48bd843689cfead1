"""Param groups cut anew for another optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_optim_bridge.core.regroup import Members, effective_weight_decay, has_expert_groups, regroup
from nemo_optim_bridge.errors import ParamGroupError

BASE: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "bias_correction": True}
ALL = Members(decay=True, no_decay=True, expert_decay=True, expert_no_decay=True)
NO_EXPERT_BIAS = Members(decay=True, no_decay=True, expert_decay=True, expert_no_decay=False)


def group(weight_decay: float, expert: bool = False, **more: Any) -> dict[str, Any]:
    return {**BASE, "weight_decay": weight_decay, "is_expert": expert, **more}


def shown(groups: Any) -> list[tuple[float, bool]]:
    return [(g["weight_decay"], g["is_expert"]) for g in groups]


NEMO = [group(0.1), group(0.1, True), group(0.0)]


def test_nemo_order() -> None:
    found = regroup([NEMO[2], NEMO[1], NEMO[0]], ALL, split_experts=True, nemo_order=True)
    assert shown(found.groups) == [(0.1, False), (0.1, True), (0.0, False)]
    assert found.partner == (2, 1, 0)
    assert found.decays == (True, True, False)


def test_megatron_splits_the_last_group_of_nemo() -> None:
    found = regroup(NEMO, ALL, split_experts=True, nemo_order=False)
    assert shown(found.groups) == [(0.1, False), (0.0, False), (0.1, True), (0.0, True)]
    assert found.partner == (0, 2, 1, 2)


def test_and_nemo_joins_it_again() -> None:
    split = [group(0.1), group(0.0), group(0.1, True), group(0.0, True)]
    found = regroup(split, ALL, split_experts=True, nemo_order=True)
    assert shown(found.groups) == [(0.1, False), (0.1, True), (0.0, False)]


def test_experts_fold_into_ordinary_groups() -> None:
    found = regroup(NEMO, NO_EXPERT_BIAS, split_experts=False, nemo_order=True)
    assert shown(found.groups) == [(0.1, False), (0.0, False)]
    assert found.partner == (0, 2)


def test_no_group_is_made_for_parameters_that_do_not_exist() -> None:
    only = Members(decay=True, no_decay=False, expert_decay=True, expert_no_decay=False)
    found = regroup([group(0.1)], only, split_experts=True, nemo_order=True)
    assert shown(found.groups) == [(0.1, False), (0.1, True)]


def test_values_survive() -> None:
    found = regroup([group(0.1, initial_lr=2e-3, min_lr=1e-5), group(0.0)], ALL, split_experts=False, nemo_order=True)
    assert found.groups[0] == group(0.1, initial_lr=2e-3, min_lr=1e-5)


@pytest.mark.parametrize("nemo_order", [True, False])
def test_a_run_without_any_weight_decay(nemo_order: bool) -> None:
    found = regroup([group(0.0), group(0.0)], ALL, split_experts=False, nemo_order=nemo_order)
    assert shown(found.groups) == [(0.0, False), (0.0, False)]
    assert found.decays == (True, False)


@pytest.mark.parametrize("change", [{"lr": 5e-4}, {"eps": 1e-6}, {"betas": (0.8, 0.9)}, {"weight_decay": 0.2}])
def test_experts_with_other_values_do_not_fold(change: dict[str, Any]) -> None:
    with pytest.raises(ParamGroupError, match="different values"):
        regroup([group(0.1), {**group(0.1, True), **change}, group(0.0)], ALL, split_experts=False, nemo_order=True)


def test_a_group_that_was_saved_and_has_no_place() -> None:
    only = Members(decay=True, no_decay=False, expert_decay=False, expert_no_decay=False)
    with pytest.raises(ParamGroupError, match="no place"):
        regroup([group(0.1), group(0.0)], only, split_experts=False, nemo_order=True)


def test_a_group_that_is_needed_and_was_not_saved() -> None:
    with pytest.raises(ParamGroupError, match="no partner"):
        regroup([group(0.1)], ALL, split_experts=False, nemo_order=True)


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ([{"weight_decay": 0.1}], 0.1),
        ([{"weight_decay": 0.1, "wd_mult": 1.0}], 0.1),
        ([{"weight_decay": 0.1, "wd_mult": 0.0}], 0.0),
        ([{"weight_decay": 0.1, "pre_wd_mult": 0.0}], 0.0),
        ([{"weight_decay": 0.0, "wd_mult": 1.0}], 0.0),
        ([{"weight_decay": 0.1, "wd_mult": 0.5}, {"weight_decay": 0.1, "wd_mult": 1.0}], 0.05),
        ([{"weight_decay": 0.05, "wd_mult": 0.5}, {"weight_decay": 0.1, "wd_mult": 1.0}], 0.05),
    ],
)
def test_effective_weight_decay(saved: list[dict[str, Any]], expected: float) -> None:
    assert effective_weight_decay(saved[0], saved) == expected


def test_a_weight_decay_that_cannot_be_told() -> None:
    with pytest.raises(ParamGroupError, match="cannot be told"):
        effective_weight_decay({"weight_decay": 0.1, "wd_mult": 0.5}, [])


def test_has_expert_groups() -> None:
    assert has_expert_groups(NEMO)
    assert has_expert_groups([{"is_expert_parallel": True}])
    assert not has_expert_groups([group(0.1), group(0.0)])
