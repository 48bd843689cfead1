"""Conversions of real checkpoints keep every tensor's bytes and every parameter's step and hyperparameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_optim_bridge.cli import run
from nemo_optim_bridge.core.manifest import TensorKey
from nemo_optim_bridge.errors import OutputError, ParamGroupError, TargetError
from nemo_optim_bridge.formats.torch_dist import read_torch_dist
from nemo_optim_bridge.formats.torch_dist.convert import Options, convert
from nemo_optim_bridge.formats.torch_dist.keys import format_state_key, parse_state_key
from nemo_optim_bridge.formats.torch_dist.manifest import read_manifest
from nemo_optim_bridge.formats.torch_dist.membership import Rule
from nemo_optim_bridge.formats.torch_dist.saved import KINDS, read_saved
from tests.convert.same import verify

MODEL_SPACE = (
    "fused_moe_ep1", "fused_moe_ep2", "fused_moe_tp2", "fused_dense", "fused_moe_step0", "dist_moe_stock_keys",
    "dist_moe_bridge_dp2", "mcore_float16_moe_ep1", "mcore_distopt_moe_ep2_fully_reshardable",
)  # fmt: skip
FUSED, DISTRIBUTED, FLOAT16, DISTOPT = KINDS
FC1 = "model.decoder.layers.mlp.experts.experts.linear_fc1.weight"


def saved_of(path: Path):
    checkpoint = read_torch_dist(path)
    return read_saved(checkpoint.common, (*checkpoint.tensors, *checkpoint.objects), str(path))


def ep_of(saved) -> int:
    return 2 if any(g.get("is_expert") or g.get("is_expert_parallel") for g in saved.groups) else 1


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("name", MODEL_SPACE)
def test_there_and_back(megatron_fixtures: Path, tmp_path: Path, name: str, to: str) -> None:
    source = megatron_fixtures / name / "ckpt"
    before = saved_of(source)
    convert(source, tmp_path / "there", Options(to=to))
    found = verify(source, tmp_path / "there")
    assert found.same, list(found.lines())
    assert found.num_tensors == 4 * 13 if "moe" in name else found.num_tensors
    rule = read_manifest(source).rule
    assert saved_of(tmp_path / "there").kind == to

    back = Options(to=before.kind, target_ep=None if before.kind == DISTRIBUTED else ep_of(before))
    given = Options(**{**{f: getattr(back, f) for f in back.__slots__}, "no_decay": tuple(rule_patterns(source, rule))})
    convert(tmp_path / "there", tmp_path / "back", given)
    assert verify(source, tmp_path / "back").same
    after = saved_of(tmp_path / "back")
    assert (after.kind, after.step, after.chain) == (before.kind, before.step, before.chain)
    assert [identity(group, before) for group in before.groups] == [identity(group, after) for group in after.groups]


def rule_patterns(path: Path, rule: Rule):
    """The names of the parameters that have no weight decay, so that both frameworks agree on them."""
    shapes = read_manifest(path).states.shapes
    return [fqn for fqn, shape in shapes.items() if not rule.decays(fqn, shape)]


def identity(group, saved):
    effective = 0.0 if group.get("wd_mult") == 0.0 else group["weight_decay"]
    expert = bool(group.get("is_expert", group.get("is_expert_parallel")))
    return effective, expert, group["lr"], group["betas"], group["eps"], group.get("max_lr"), group.get("wd_mult")


def test_groups_are_in_the_order_in_which_nemo_restores_them(megatron_fixtures: Path, tmp_path: Path) -> None:
    source = megatron_fixtures / "mcore_distopt_moe_ep2_fully_reshardable" / "ckpt"
    convert(source, tmp_path / "fused", Options(to=FUSED))
    shown = [(g["weight_decay"], g["is_expert"]) for g in saved_of(tmp_path / "fused").groups]
    assert shown == [(0.1, False), (0.1, True), (0.0, False)]


@pytest.mark.parametrize(("ep", "expected"), [(1, [False, False]), (2, [False, True, False]), (None, [False, False])])
def test_expert_groups_are_split_as_the_target_needs(megatron_fixtures: Path, tmp_path: Path, ep, expected) -> None:
    convert(megatron_fixtures / "fused_moe_ep1" / "ckpt", tmp_path / "out", Options(to=FUSED, target_ep=ep))
    assert [g["is_expert"] for g in saved_of(tmp_path / "out").groups] == expected
    (scheduler,) = read_torch_dist(tmp_path / "out").common["lr_schedulers"]
    assert len(scheduler["_last_lr"]) == len(expected)


def test_a_dense_model_has_no_expert_groups(megatron_fixtures: Path, tmp_path: Path) -> None:
    summary = convert(megatron_fixtures / "fused_dense" / "ckpt", tmp_path / "out", Options(to=DISTOPT, target_ep=8))
    assert [group["expert"] for group in summary["param_groups"]] == [False, False]
    assert not saved_of(tmp_path / "out").chained


def test_expert_groups_with_values_of_their_own_do_not_become_ordinary(megatron_fixtures: Path, tmp_path: Path) -> None:
    source = edited(megatron_fixtures / "fused_moe_ep2" / "ckpt", tmp_path / "in", change_expert_rate)
    with pytest.raises(ParamGroupError, match="different values"):
        convert(source, tmp_path / "out", Options(to=DISTRIBUTED))
    assert not (tmp_path / "out").exists()


def test_distributed_fused_adam_knows_no_expert_parallelism(megatron_fixtures: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="expert parallel size"):
        convert(megatron_fixtures / "fused_moe_ep2" / "ckpt", tmp_path / "out", Options(to=DISTRIBUTED, target_ep=2))


def test_groups_that_only_megatron_knows(megatron_fixtures: Path, tmp_path: Path) -> None:
    def decouple(common) -> None:
        groups = common["optimizer_states"][0]["optimizer"]["param_groups"]
        groups.append({**groups[0], "is_decoupled_lr": True, "lr": 0.5, "max_lr": 0.5, "default_config": False})

    source = edited(megatron_fixtures / "mcore_float16_moe_ep1" / "ckpt", tmp_path / "in", decouple)
    with pytest.raises(ParamGroupError, match="--no-receipt converts without one"):
        convert(source, tmp_path / "same", Options(to=DISTOPT))
    convert(source, tmp_path / "same", Options(to=DISTOPT, receipt=False))
    assert saved_of(tmp_path / "same").groups == saved_of(source).groups
    convert(source, tmp_path / "split", Options(to=DISTOPT, target_ep=2, receipt=False))
    shown = [(g["is_expert_parallel"], g["is_decoupled_lr"], g["lr"]) for g in saved_of(tmp_path / "split").groups]
    assert (False, True, 0.5) in shown
    with pytest.raises(ParamGroupError, match="is_decoupled_lr"):
        convert(source, tmp_path / "fused", Options(to=FUSED))


def test_other_fields_of_the_state_are_kept_or_reported(megatron_fixtures: Path, tmp_path: Path) -> None:
    def scale(common) -> None:
        common["optimizer_states"][0]["grad_scaler"] = {"scale": 65536.0}

    source = edited(megatron_fixtures / "mcore_float16_moe_ep1" / "ckpt", tmp_path / "in", scale)
    convert(source, tmp_path / "split", Options(to=DISTOPT, target_ep=2))
    parts = read_torch_dist(tmp_path / "split").common["optimizer_states"][0]
    assert [part["grad_scaler"] for part in parts.values()] == [{"scale": 65536.0}] * 2
    assert any("grad_scaler" in remark for remark in convert(source, tmp_path / "x", Options(to=FUSED))["remarks"])


def change_expert_rate(common) -> None:
    common["optimizer_states"][0]["optimizer"]["param_groups"][1]["lr"] = 0.5


def edited(source: Path, target: Path, change) -> Path:
    """A copy of a checkpoint with a changed ``common.pt``."""
    import shutil

    from nemo_optim_bridge.formats.torch_dist.common_file import CommonFile

    shutil.copytree(source, target)
    file = CommonFile(target)
    change(file.tree)
    data = file.dumps(file.tree)
    (target / "common.pt").write_bytes(data)
    return target


@pytest.mark.parametrize(
    ("style", "states"), [("uniform", {"fp32_param"}), ("stock", {"param"}), ("both", {"fp32_param", "param"})]
)
def test_key_styles(megatron_fixtures: Path, tmp_path: Path, style: str, states: set[str]) -> None:
    source = megatron_fixtures / "fused_moe_ep1" / "ckpt"
    convert(source, tmp_path / "out", Options(to=DISTRIBUTED, key_style=style))
    keys = [key for key in map(parse_state_key, read_torch_dist(tmp_path / "out").tensors) if key]
    assert {key.state for key in keys if key.fqn == FC1} - {"exp_avg", "exp_avg_sq"} == states
    router = {key.state for key in keys if key.fqn.endswith("router.weight")}
    assert router >= {"fp32_param", "exp_avg", "exp_avg_sq"}
    assert verify(source, tmp_path / "out").same


def test_the_stock_style_is_what_nemo_itself_writes(megatron_fixtures: Path, tmp_path: Path) -> None:
    convert(megatron_fixtures / "fused_moe_ep1" / "ckpt", tmp_path / "out", Options(to=DISTRIBUTED, key_style="stock"))
    theirs = read_torch_dist(megatron_fixtures / "dist_moe_stock_keys" / "ckpt")
    assert sorted(read_torch_dist(tmp_path / "out").tensors) == sorted(theirs.tensors)


@pytest.mark.parametrize(("prefix", "chains"), [("no", {None}), ("yes", {0, 1}), ("both", {None, 0, 1})])
def test_chained_prefixes(megatron_fixtures: Path, tmp_path: Path, prefix: str, chains: set[int | None]) -> None:
    source = megatron_fixtures / "fused_moe_ep2" / "ckpt"
    convert(source, tmp_path / "out", Options(to=DISTOPT, chained_prefix=prefix))
    keys = [key for key in map(parse_state_key, read_torch_dist(tmp_path / "out").tensors) if key]
    assert {key.chain for key in keys} == chains
    assert all(key.chain in (None, int(".experts." in key.fqn)) for key in keys)
    assert verify(source, tmp_path / "out").same


def test_step_0_is_no_step(megatron_fixtures: Path, tmp_path: Path) -> None:
    source = megatron_fixtures / "fused_moe_step0" / "ckpt"
    convert(source, tmp_path / "distributed", Options(to=DISTRIBUTED))
    common = read_torch_dist(tmp_path / "distributed").common
    assert common["optimizer_states"][0]["state"] == {"step": 0}
    convert(tmp_path / "distributed", tmp_path / "fused", Options(to=FUSED))
    groups = read_torch_dist(tmp_path / "fused").common["optimizer_states"][0]["optimizer"]["param_groups"]
    assert all("step" not in group for group in groups)


def test_torch_adam_finds_its_step(megatron_fixtures: Path, tmp_path: Path) -> None:
    source = megatron_fixtures / "fused_moe_ep1" / "ckpt"
    convert(source, tmp_path / "out", Options(to=FLOAT16, torch_adam=True))
    inner = read_torch_dist(tmp_path / "out").common["optimizer_states"][0]["optimizer"]
    assert inner["state"] == {"common_step": 3}
    assert verify(source, tmp_path / "out").same


def test_parameters_that_another_framework_would_not_decay_are_named(megatron_fixtures: Path, tmp_path: Path) -> None:
    source = megatron_fixtures / "fused_moe_ep1" / "ckpt"
    summary = convert(source, tmp_path / "out", Options(to=DISTOPT))
    assert "NeMo's default" in summary["weight_decay_rule"]
    assert any("3 parameters" in r and "megatron-core's default" in r for r in summary["remarks"])
    assert convert(source, tmp_path / "same", Options(to=DISTRIBUTED))["remarks"][:-1] == []


def test_a_rule_that_contradicts_the_groups_is_refused(megatron_fixtures: Path, tmp_path: Path) -> None:
    source = megatron_fixtures / "fused_moe_ep1" / "ckpt"
    with pytest.raises(ParamGroupError, match="--no-decay"):
        convert(source, tmp_path / "out", Options(to=DISTOPT, no_decay=("nothing",)))


def test_exact_remainders(megatron_fixtures: Path, tmp_path: Path) -> None:
    source = megatron_fixtures / "fused_moe_ep1" / "ckpt"
    summary = convert(source, tmp_path / "out", Options(to=DISTRIBUTED, exact_remainders=True))
    assert any("rounded half up: 1;" in remark for remark in summary["remarks"])
    found = verify(source, tmp_path / "out")
    assert [difference.key.state for difference in found.tensors] == ["weight"]
    assert not found.scalars
    again = convert(tmp_path / "out", tmp_path / "again", Options(to=DISTRIBUTED, exact_remainders=True))
    assert any("nothing had to be written" in remark for remark in again["remarks"])
    with pytest.raises(TargetError):
        convert(source, tmp_path / "fused", Options(to=FUSED, exact_remainders=True))


def test_exact_remainders_beside_earlier_ones(megatron_fixtures: Path, tmp_path: Path) -> None:
    source = edited(megatron_fixtures / "fused_moe_ep1" / "ckpt", tmp_path / "in", lambda tree: None)
    (source / "__bridge_0.distcp").write_bytes(b"an earlier one")
    convert(source, tmp_path / "out", Options(to=DISTRIBUTED, exact_remainders=True))
    assert (tmp_path / "out" / "__bridge_0.distcp").read_bytes() == b"an earlier one"
    assert (tmp_path / "out" / "__bridge_1.distcp").stat().st_size > 1000


@pytest.mark.parametrize("link", ["auto", "hard", "copy"])
def test_data_files_are_linked_and_never_written(megatron_fixtures: Path, tmp_path: Path, link: str) -> None:
    source = edited(megatron_fixtures / "fused_moe_ep2" / "ckpt", tmp_path / "in", lambda tree: None)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in source.iterdir()}
    summary = convert(source, tmp_path / "out", Options(to=DISTRIBUTED, link=link, exact_remainders=True))
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in source.iterdir()} == before
    same = (tmp_path / "out" / "__0_0.distcp").samefile(source / "__0_0.distcp")
    assert same == any("hard-linked:" in remark for remark in summary["remarks"])
    assert not same if link == "copy" else True
    assert not (tmp_path / "out" / ".metadata").samefile(source / ".metadata")


def test_what_cannot_be_linked_as_asked(megatron_fixtures: Path, tmp_path: Path, monkeypatch) -> None:
    from nemo_optim_bridge.formats.torch_dist import link

    def refuse(source: Path, target: Path) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setitem(link._WAYS, "reflink", refuse)
    source = megatron_fixtures / "fused_dense" / "ckpt"
    with pytest.raises(OutputError, match="reflink: Operation not supported"):
        convert(source, tmp_path / "out", Options(to=DISTRIBUTED, link="reflink"))
    assert list(tmp_path.iterdir()) == []


def test_read_manifest(megatron_fixtures: Path) -> None:
    found = read_manifest(megatron_fixtures / "fused_moe_ep2" / "ckpt")
    assert {spec.key.state for spec in found.manifest.tensors} == {"exp_avg", "exp_avg_sq", "fp32_param", "weight"}
    spec = found.manifest.tensors[found.manifest.index()[TensorKey(FC1, "weight")]]
    assert (spec.shape, spec.dtype) == ((2, 4, 96, 32), "bfloat16")
    assert found.hyperparameters[FC1]["weight_decay"] == 0.1
    assert found.hyperparameters["model.decoder.final_layernorm.bias"]["weight_decay"] == 0.0
    assert set(found.manifest.steps.values()) == {3.0}


@pytest.mark.parametrize(
    "key",
    ["optimizer.state.exp_avg.model.a", "chained_1.optimizer.state.param.decoder.b", "optimizer.state.fp32_param.x.y"],
)
def test_keys_round_trip(key: str) -> None:
    parsed = parse_state_key(key)
    assert parsed is not None
    assert format_state_key(parsed) == key


@pytest.mark.parametrize("key", ["model.a", "optimizer.distributed.a", "chained_x.optimizer.state.a.b"])
def test_other_keys_are_not_taken_for_states(key: str) -> None:
    assert parse_state_key(key) is None


def test_command_line(megatron_fixtures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = str(megatron_fixtures / "fused_moe_ep2" / "ckpt"), str(tmp_path / "out")
    assert run(["convert", source, out, "--to", DISTRIBUTED, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] is False
    assert run(["convert", source, out, "--to", DISTRIBUTED, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["target_optimizer"] == DISTRIBUTED
    assert summary["step"] == 3
    assert run(["convert", source, out, "--to", DISTRIBUTED]) == 2
    assert "already exists" in capsys.readouterr().err
    assert run(["verify", source, out]) == 0
    assert "the same" in capsys.readouterr().out
    assert run(["fingerprint", source, "--json"]) == 0
    digests = json.loads(capsys.readouterr().out)
    assert run(["fingerprint", out, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {n: d for n, d in digests.items() if n != "remarks"} == {n: d for n, d in again.items() if n != "remarks"}
    assert run(["inspect", out, "--deep"]) == 0
    capsys.readouterr()
    assert run(["inspect", out, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["optimizer"], shown["key_style"], shown["num_parameters"]) == (DISTRIBUTED, "both", 13)
    assert run(["convert", source, str(tmp_path / "x"), "--to", "sgd"]) == 2
