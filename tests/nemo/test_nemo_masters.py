"""Masters: how they are spelled, and what happens where there are none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from nemo_checks import DATA, assemble, differences, have_nemo

from nemo_optim_bridge.errors import MissingSourceError, TargetError

if not have_nemo():
    pytest.skip("NeMo or megatron-core is not installed", allow_module_level=True)

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from nemo_optim_bridge.plugins.nemo import masters

pytestmark = pytest.mark.nemo

FC1 = "model.decoder.layers.mlp.experts.experts.linear_fc1.weight"
FC2 = "model.decoder.layers.mlp.experts.experts.linear_fc2.weight"
UNIFORM, STOCK = "optimizer.state.fp32_param.", "optimizer.state.param."


def state():
    """What stock NeMo asks for: a factory under one spelling, plain tensors under the other, and moments."""
    data = torch.zeros(2, 2)
    factory = ShardedTensorFactory(STOCK + FC1, data, lambda *_: {}, lambda x: x)
    plain = ShardedTensor.from_rank_offsets(UNIFORM + FC2, data)
    moment = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg." + FC2, data)
    # a parameter whose own name begins like a prefix
    odd = ShardedTensor.from_rank_offsets(UNIFORM + "optimizer.state.param.x", data)
    return {"state": {0: {"param": factory}, 1: {"param": plain, "exp_avg": moment}, 2: {"param": odd}, "step": 3}}


def keys(asked):
    return [entry.key for entry in masters._leaves(asked) if hasattr(entry, "key")]


@pytest.mark.parametrize("style", ["auto", "stock", "uniform"])
def test_masters_are_spelled_as_asked_and_moments_never_touched(style):
    asked = state()
    masters.spell(asked, style, None)
    factory = (UNIFORM if style == "uniform" else STOCK) + FC1
    wanted = [factory, UNIFORM + FC2, "optimizer.state.exp_avg." + FC2, UNIFORM + "optimizer.state.param.x"]
    assert keys(asked) == wanted


def test_unknown_styles_are_refused():
    with pytest.raises(TargetError, match="uniform"):
        masters.check_key_style("both")


# ------------------------------------------------------------------------------------------------------ the wrapper


@pytest.fixture
def load(monkeypatch):
    """The wrapper around a load that records what it is asked for."""
    seen = []

    def recorder(sharded_state_dict, checkpoint_dir, strict=None):
        seen.append(sharded_state_dict)
        return sharded_state_dict

    monkeypatch.setattr(dist_checkpointing, "load", recorder)
    monkeypatch.setattr(serialization, "load", recorder)
    monkeypatch.setattr(masters, "_original", None)
    masters.install()
    yield seen
    masters.remove()
    assert dist_checkpointing.load is recorder
    assert serialization.load is recorder


def noted():
    request = masters.Request(masters_from_weights=False)
    asked = state()
    del asked["state"][2]
    masters.spell(asked, "auto", request)
    return asked, request


@pytest.mark.parametrize(("name", "prefix", "style"), [("fused_moe_ep1", UNIFORM, "uniform"),
                                                       ("dist_moe_stock_keys", STOCK, "stock")])  # fmt: skip
@pytest.mark.parametrize("as_path", [str, Path])
def test_the_spelling_that_exists_wins(load, name, prefix, style, as_path):
    asked, request = noted()
    dist_checkpointing.load(asked, checkpoint_dir=as_path(DATA / name / "ckpt"))
    assert keys(load[0])[:2] == [prefix + FC1, UNIFORM + FC2]
    assert (request.key_style, request.masters, request.checkpoint) == (style, "checkpoint", str(DATA / name / "ckpt"))


def test_requests_of_others_pass_as_they_are(load):
    asked = state()
    assert dist_checkpointing.load(asked, "nowhere") is asked
    assert keys(asked) == keys(state())


def test_a_missing_master_is_named(load):
    asked, _ = noted()
    asked["state"][1]["param"].key = UNIFORM + "model.other"
    with pytest.raises(MissingSourceError, match=r"model\.other"):
        dist_checkpointing.load(asked, str(DATA / "fused_moe_ep1" / "ckpt"))
    assert load == []
    assert asked["state"][0]["param"].key == STOCK + FC1  # nothing was changed


def test_installing_twice_wraps_once_and_stays_off_others_wrappers(load, monkeypatch):
    once = dist_checkpointing.load
    masters.install()
    assert dist_checkpointing.load is once
    with monkeypatch.context() as patched:
        patched.setattr(dist_checkpointing, "load", lambda *a, **k: None)
        masters.remove()
    assert dist_checkpointing.load is once


# --------------------------------------------------------------------------------------------------- without masters


def without_masters(target: Path) -> str:
    """Copy a fixture and take its masters out of the metadata."""
    import pickle

    shutil.copytree(DATA / "fused_moe_ep1" / "ckpt", target)
    file = target / ".metadata"
    metadata = pickle.loads(file.read_bytes())  # noqa: S301  our own fixture
    for key in [key for key in metadata.state_dict_metadata if key.startswith(UNIFORM)]:
        del metadata.state_dict_metadata[key]
    file.write_bytes(pickle.dumps(metadata))
    return str(target)


def test_fp32_weights_are_the_masters(rig, tmp_path):
    path = tmp_path / "plain"
    path.mkdir()
    truth = assemble(rig.run("plain", 1, save_to=str(path)))
    results = rig.run("resume", 2, path=str(path))
    assert "error" not in results[0], results[0]["error"]
    assert differences(assemble(results), truth) == []
    assert {result["step"] for result in results} == {3}
    report = results[0]["report"]
    assert (report["masters"], report["key_style"]) == ("weights", "none")
    assert report["source"] == "fused_adam (without masters)"
    assert [group["weight_decay"] for group, _ in results[0]["groups"]] == [0.1, 0.0]


def test_rounded_weights_are_no_masters_unless_wanted(rig, fixture, tmp_path):
    path = without_masters(tmp_path / "ckpt")
    results = rig.run("resume", 2, path=path)
    assert all(result["error"].startswith("CheckpointError") for result in results)
    assert all("masters_from_weights" in result["error"] for result in results)
    results = rig.run("resume", 2, path=path, masters_from_weights=True)
    found, truth = assemble(results), fixture("fused_moe_ep1").truth
    assert results[0]["report"]["masters"] == "weights"
    for key, values in truth.items():
        if key.startswith("fp32_param"):
            weight = torch.from_numpy(values).bfloat16().float().numpy()
            assert (found[key] == weight).all()
        else:
            assert (found[key] == values).all()
