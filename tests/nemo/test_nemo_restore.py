"""Reading and checking state dicts, without NeMo."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from nemo_optim_bridge.core.groups import Policy  # noqa: E402
from nemo_optim_bridge.errors import (  # noqa: E402
    BridgeError,
    CheckpointError,
    ColdOptimizerError,
    ContradictionError,
    MissingSourceError,
    ParamGroupError,
    UnknownFormatError,
)
from nemo_optim_bridge.plugins.nemo.refusing import refusing  # noqa: E402
from nemo_optim_bridge.plugins.nemo.restore import Facts, check_together, prepare, read_arrived  # noqa: E402

HYPER = {"lr": 5e-4, "betas": (0.8, 0.9), "eps": 1e-6, "bias_correction": True}


def parameter(*shape):
    return torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))


CURRENT = [
    {"params": [parameter(2, 3), parameter(4)], "lr": 1.0, "betas": (0.5, 0.5), "eps": 1e-3, "weight_decay": 0.3,
     "bias_correction": True, "is_expert": False},
    {"params": [parameter(3)], "lr": 1.0, "betas": (0.5, 0.5), "eps": 1e-3, "weight_decay": 0.0,
     "bias_correction": True, "is_expert": False},
]  # fmt: skip


def tensors(*shape):
    return {name: torch.full(shape, value) for name, value in (("param", 1.0), ("exp_avg", 2.0), ("exp_avg_sq", 3.0))}


def fused():
    """What arrives from a fused_adam checkpoint with expert parallelism: three saved groups, in another order."""
    return {
        "optimizer": {
            "param_groups": [
                {**HYPER, "weight_decay": 0.0, "is_expert": False, "step": 3, "initial_lr": 1e-3},
                {**HYPER, "weight_decay": 0.1, "is_expert": True, "step": 3, "initial_lr": 1e-3},
                {**HYPER, "weight_decay": 0.1, "is_expert": False, "step": torch.tensor([3]), "initial_lr": 1e-3},
            ]
        },
        "param_groups": [{"params": [0, 1]}, {"params": [2]}],
        "state": {0: tensors(2, 3), 1: tensors(4), 2: tensors(3)},
    }


def distributed():
    groups = [
        {**HYPER, "weight_decay": 0.0, "params": [0, 1]},
        {**HYPER, "weight_decay": 0.1, "params": [2]},
    ]
    state = {"step": 3, 0: tensors(2, 3), 1: tensors(4), 2: tensors(3)}
    return {"state": state, "param_groups": groups, "format": 2}


@pytest.mark.parametrize("arriving", [fused, distributed])
def test_the_state_for_apex_has_step_groups_and_tensors_where_apex_wants_them(arriving):
    state_dict = arriving()
    before = copy.deepcopy(state_dict)
    restore = prepare(state_dict, CURRENT, Policy())
    made = restore.state_dict
    assert made["format"] == 2
    assert made["state"]["step"] == 3
    assert [group["params"] for group in made["param_groups"]] == [[0, 1], [2]]
    assert [group["weight_decay"] for group in made["param_groups"]] == [0.1, 0.0]
    assert all("step" not in group and group["lr"] == 5e-4 for group in made["param_groups"])
    assert "optimizer" not in made
    assert torch.equal(made["state"][0]["exp_avg"], torch.full((2, 3), 2.0))
    assert [master.numel() for master in restore.masters] == [6, 4, 3]
    assert repr(state_dict) == repr(before)


def test_unknown_fields_survive_and_folded_groups_are_told():
    restore = prepare(fused(), CURRENT, Policy())
    assert all(group["initial_lr"] == 1e-3 for group in restore.groups)
    assert restore.matching.folded == {1}


def test_sources_are_told_apart():
    assert read_arrived(fused()).source == "fused_adam"
    assert read_arrived(distributed()).source == "distributed_fused_adam"
    plain = distributed()
    del plain["state"]["step"]
    for group in plain["param_groups"]:
        group["step"] = 4
    arrived = read_arrived(plain)
    assert (arrived.source, arrived.step) == ("fused_adam (without masters)", 4)


def test_megatron_core_groups_are_understood():
    state_dict = fused()
    for group in state_dict["optimizer"]["param_groups"]:
        group["wd_mult"] = 1.0 if group["weight_decay"] else 0.0
        group.update(weight_decay=0.1, lr_mult=1.0, is_expert_parallel=group.pop("is_expert"))
    restore = prepare(state_dict, CURRENT, Policy())
    assert restore.arrived.source == "mcore Float16Optimizer"
    assert [group["weight_decay"] for group in restore.groups] == [0.1, 0.0]
    assert [group["is_expert"] for group in restore.groups] == [False, False]


def test_steps_kept_per_parameter_are_found():
    state_dict = distributed()
    del state_dict["state"]["step"]
    for i in range(3):
        state_dict["state"][i]["step"] = torch.tensor(9.0)
    assert read_arrived(state_dict).step == 9


def test_moments_in_lower_precision_and_any_layout_are_accepted():
    state_dict = fused()
    state_dict["state"][0]["exp_avg"] = torch.full((3, 2), 2.0, dtype=torch.bfloat16).t()
    made = prepare(state_dict, CURRENT, Policy()).state_dict["state"][0]["exp_avg"]
    assert made.is_contiguous()
    assert made.dtype == torch.float32


@pytest.mark.parametrize(
    "state_dict",
    [
        {"state": {}, "param_groups": [], "format": 1},
        {"buckets": []},
        {"gathered_states": []},
        {"state": {}},
        {"optimizer": {"param_groups": []}, "fp32_from_fp16_params": []},
        {"state": {}, "param_groups": [{"lr": 1.0}]},
        {"state": {}, "param_groups": [3]},
    ],
)
def test_other_layouts_are_refused(state_dict):
    with pytest.raises(UnknownFormatError):
        read_arrived(state_dict)


def test_every_missing_tensor_is_named():
    state_dict = fused()
    del state_dict["state"][0]["exp_avg"]
    del state_dict["state"][2]
    with pytest.raises(MissingSourceError) as error:
        prepare(state_dict, CURRENT, Policy())
    assert "4 problems" in str(error.value)
    assert "group 1, parameter 2" in str(error.value)


def test_shapes_dtypes_and_membership_are_checked():
    state_dict = fused()
    state_dict["state"][1]["param"] = torch.zeros(5)
    with pytest.raises(ContradictionError, match="shape"):
        prepare(state_dict, CURRENT, Policy())
    state_dict = fused()
    state_dict["state"][1]["param"] = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(CheckpointError, match="int32"):
        prepare(state_dict, CURRENT, Policy())
    state_dict = fused()
    state_dict["param_groups"][0]["params"] = [0]
    with pytest.raises(ParamGroupError, match="parameters a group"):
        prepare(state_dict, CURRENT, Policy())


def facts(unmatched=(), moments=True, step=3):
    return Facts(2, frozenset(unmatched), moments, step)


def together(told, allow_cold=False):
    check_together(told, [HYPER, HYPER], [HYPER], allow_cold)


def test_a_saved_group_needs_a_partner_on_some_rank():
    together([facts([0]), facts([1])])
    with pytest.raises(ParamGroupError, match=r"saved groups \[1\]"):
        together([facts([0, 1]), facts([1])])


def test_cold_moments_are_an_error_unless_wanted():
    together([facts(moments=False), facts()])
    with pytest.raises(ColdOptimizerError):
        together([facts(moments=False), facts(moments=False)])
    together([facts(moments=False)], allow_cold=True)


def test_moments_without_a_step_are_an_error():
    together([facts(moments=False, step=None)])
    with pytest.raises(ContradictionError, match="no step"):
        together([facts(step=None)])
    with pytest.raises(ContradictionError, match="different steps"):
        together([facts(step=2), facts(step=3)])


def test_unforeseen_errors_become_the_projects_own():
    def fail(error):
        raise error

    original, known = KeyError("x"), BridgeError("known")
    with pytest.raises(CheckpointError) as raised:
        refusing(lambda: fail(original))()
    assert raised.value.__cause__ is original
    with pytest.raises(BridgeError) as raised:
        refusing(lambda: fail(known))()
    assert raised.value is known
