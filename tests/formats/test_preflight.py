"""What a resume will meet, said from headers alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nemo_optim_bridge.errors import TargetError, UnknownFormatError
from nemo_optim_bridge.formats.torch_dist.preflight import preflight

torch = pytest.importorskip("torch")  # to write damaged common.pt files; the reader needs none

DATA = Path(__file__).parent.parent / "data" / "nemo"


@pytest.mark.parametrize("name", ["fused_moe_ep1", "fused_moe_ep2", "fused_dense"])
def test_fused_adam_resumes_under_the_bridge_and_not_under_stock(name):
    report = preflight(DATA / name / "ckpt")
    assert (report.resumes, report.stock_resumes, report.source) == (True, False, "fused_adam")
    assert (report.step, report.key_style, report.problems) == (3, "uniform", ())
    assert any("distributed_fused_adam_bridge" in line for line in report.advice)
    assert json.loads(json.dumps(report.to_json()))["groups"][0]["betas"] == [0.9, 0.98]


def test_groups_are_shown_with_their_values():
    groups = preflight(DATA / "fused_moe_ep2" / "ckpt").groups
    assert [(g["decays"], g["expert"], g["weight_decay"], g["lr"]) for g in groups] == [
        (True, False, 0.1, 0.0096),
        (True, True, 0.1, 0.0096),
        (False, False, 0.0, 0.0096),
    ]


def test_expert_parallel_sources_get_told_the_target_size():
    advice = preflight(DATA / "fused_moe_ep2" / "ckpt").advice
    assert any("expert_model_parallel_size: 1" in line for line in advice)


def test_stock_checkpoints_resume_under_both():
    report = preflight(DATA / "dist_moe_stock_keys" / "ckpt", "distributed_fused_adam_bridge")
    assert (report.resumes, report.stock_resumes, report.key_style) == (True, True, "stock")
    assert any("ties" in line for line in report.advice)
    assert (report.parameters, report.elements) == (13, 48192)


def test_other_optimizers_and_other_directories_are_errors(tmp_path):
    with pytest.raises(TargetError):
        preflight(DATA / "fused_dense" / "ckpt", "adamw")
    with pytest.raises(UnknownFormatError):
        preflight(tmp_path)


# ------------------------------------------------------------------------------------------- what would be refused


@pytest.fixture
def changed(tmp_path):
    def change(edit=None, name="fused_moe_ep2", files=None):
        target = tmp_path / "ckpt"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(DATA / name / "ckpt", target)
        if edit:
            common = torch.load(target / "common.pt", weights_only=True)
            edit(common)
            torch.save(common, target / "common.pt")
        if files:
            files(target)
        report = preflight(target)
        assert report.resumes == (not report.problems)
        return report

    return change


def groups(common):
    return common["optimizer_states"][0]["optimizer"]["param_groups"]


def test_steps_that_disagree(changed):
    report = changed(lambda c: groups(c)[1].update(step=4))
    assert report.step is None
    assert "disagree" in report.problems[0]


def test_no_step_is_before_the_first(changed):
    report = changed(lambda c: [group.pop("step") for group in groups(c)])
    assert (report.resumes, report.step) == (True, None)


def test_steps_as_tensors(changed):
    report = changed(lambda c: [group.update(step=torch.tensor([3])) for group in groups(c)])
    assert (report.resumes, report.step) == (True, 3)


def test_experts_with_other_values(changed):
    report = changed(lambda c: groups(c)[1].update(lr=1e-5))
    assert "different values" in report.problems[0]


def test_values_that_no_adam_can_use(changed):
    report = changed(lambda c: groups(c)[0].update(eps=float("nan"), lr=-1.0))
    assert len(report.problems) == 2


def test_no_optimizer(changed):
    assert "without its optimizer" in changed(lambda c: c.update(optimizer_states=None)).problems[0]
    assert "without its optimizer" in changed(lambda c: c.pop("optimizer_states")).problems[0]


def test_containers_that_nemo_cannot_open(changed):
    def to_megatron(common):
        common["optimizer"] = common.pop("optimizer_states")[0]

    assert "Megatron-LM" in changed(to_megatron).problems[0]
    assert "lr_schedulers" in changed(lambda c: c.pop("lr_schedulers")).problems[0]
    assert "2 optimizers" in changed(lambda c: c["optimizer_states"].append({})).problems[0]


def test_other_optimizers_states(changed):
    def reshardable(common):
        common["optimizer_states"][0] = {0: {"param_state_sharding_type": "dp_reshardable"}}

    report = changed(reshardable)
    assert "dp_reshardable" in report.problems[0]
    assert report.source == "mcore DistributedOptimizer"
    assert "format 1" in changed(lambda c: c["optimizer_states"][0].update(format=1), "dist_moe_stock_keys").problems[0]
    assert "no optimizer is known" in changed(lambda c: c.update(optimizer_states=[{"x": 1}])).problems[0]


def test_megatron_groups_are_understood(changed):
    def to_mcore(common):
        for group in groups(common):
            group["wd_mult"] = 1.0 if group["weight_decay"] else 0.0
            group.update(weight_decay=0.1, lr_mult=1.0, is_expert_parallel=group.pop("is_expert"))

    report = changed(to_mcore)
    assert (report.resumes, report.source) == (True, "mcore Float16Optimizer")
    assert [(g["decays"], g["expert"]) for g in report.groups] == [(True, False), (True, True), (False, False)]
    assert any("norm weights" in line for line in report.advice)
    changed_mult = changed(lambda c: [to_mcore(c), groups(c)[0].update(wd_mult=0.5), groups(c)[1].update(wd_mult=0.5)])
    assert any("wd_mult" in line for line in changed_mult.advice)


def test_missing_and_short_files(changed):
    report = changed(files=lambda target: (target / "__1_0.distcp").unlink())
    assert report.problems == ("__1_0.distcp is missing",)

    def truncate(target):
        file = target / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:1000])

    assert "1000 bytes" in changed(files=truncate).problems[0]


def rewritten(target, edit):
    """Change .metadata with torch's own classes."""
    import pickle

    file = target / ".metadata"
    metadata = pickle.loads(file.read_bytes())  # noqa: S301  our own fixture
    edit(metadata.state_dict_metadata)
    file.write_bytes(pickle.dumps(metadata))


def test_masters_and_moments_that_are_missing(changed):
    prefix = "optimizer.state.fp32_param."

    def drop(start, few=False):
        def edit(entries):
            keys = [key for key in entries if key.startswith(start)]
            for key in keys[:1] if few else keys:
                del entries[key]

        return lambda target: rewritten(target, edit)

    report = changed(files=drop(prefix, few=True))
    assert "1 of 13 parameters have no fp32 master" in report.problems[0]
    assert "exp_avg_sq" in changed(files=drop("optimizer.state.exp_avg_sq.", few=True)).problems[0]
    report = changed(files=drop(prefix))
    assert (report.resumes, report.key_style) == (False, "none")
    assert "bfloat16" in report.problems[0]
    assert any("masters_from_weights" in line for line in report.advice)
    assert "no optimizer tensors" in changed(files=drop("optimizer.")).problems[0]


def test_both_spellings(changed):
    prefix, other = "optimizer.state.fp32_param.", "optimizer.state.param."

    def alias(target):
        import pickle

        file = target / ".metadata"
        metadata = pickle.loads(file.read_bytes())  # noqa: S301  our own fixture
        index = type(next(iter(metadata.storage_data)))
        for key in [key for key in metadata.state_dict_metadata if key.startswith(prefix)]:
            metadata.state_dict_metadata[key.replace(prefix, other)] = metadata.state_dict_metadata[key]
        for place, info in list(metadata.storage_data.items()):
            if place.fqn.startswith(prefix):
                metadata.storage_data[index(place.fqn.replace(prefix, other), place.offset)] = info
        file.write_bytes(pickle.dumps(metadata))

    report = changed(files=alias)
    assert (report.resumes, report.key_style, report.parameters) == (True, "both", 13)
