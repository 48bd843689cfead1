"""The in-training load, on stand-ins for nanotron's objects: what it refuses, and how ranks fail together.

That it loads right is shown in the real nanotron: ``tests/nanotron/test_live_load.py``.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed

from nemo_optim_bridge.errors import BridgeError, MissingDependencyError, TargetError
from nemo_optim_bridge.formats.nanotron.layout import zero_slice
from nemo_optim_bridge.formats.nanotron.reader import read_checkpoint
from nemo_optim_bridge.formats.topology import Topology
from nemo_optim_bridge.plugins import nanotron as plugin
from nemo_optim_bridge.plugins.nanotron.loader import _Load
from tests.plugins.world import run_world

SOURCE = "nt04-llama_tied-z1-tp2-pp2-dp2-ep1"
EMBEDDING = "model.token_position_embeddings.pp_block.token_embedding.weight"
O_PROJ = "model.decoder.3.pp_block.attn.o_proj.weight"


class Wrapper:
    """Wraps an optimizer as nanotron's classes do: ``optimizer`` inside, ``id_to_name`` and more attributes on it."""

    def __init__(self, optimizer: Any, id_to_name: dict[int, str], **attributes: Any) -> None:
        self.optimizer, self.id_to_name = optimizer, id_to_name
        self.__dict__.update(attributes)


def build(
    checkpoint: Path, axis: str = "tp", *, kind: Any = torch.optim.AdamW, group_per_parameter: bool = False,
    device: str = "cpu",
) -> tuple[Any, Any]:  # fmt: skip
    """Return an optimizer with fp32 masters and a parallel context in which all ranks lie along one axis.

    Along dp it is ZeRO-1.
    """
    zero = axis == "dp"
    rank, size = distributed.get_rank(), distributed.get_world_size()
    alone = [distributed.new_group([other]) for other in range(size)][rank]
    everyone = distributed.group.WORLD
    context = SimpleNamespace(
        world_pg=everyone,
        pp_pg=alone,
        **{f"{name}_pg": everyone if name == axis else alone for name in ("tp", "dp", "expert")},
    )
    topology = Topology(**{"ep" if axis == "expert" else axis: size})
    source = read_checkpoint(checkpoint)
    weights = {
        fqn: torch.nn.Parameter(torch.ones(layout.local_shape(topology), dtype=torch.bfloat16, device=device))
        for fqn, layout in source.layouts.items()
    }
    ranges = {fqn: {dp: zero_slice(w.numel(), size, dp) for dp in range(size)} for fqn, w in weights.items()}
    halves = {fqn: w.detach().view(-1)[slice(*ranges[fqn][rank])] if zero else w for fqn, w in weights.items()}
    masters = {fqn: torch.nn.Parameter(half.detach().float()) for fqn, half in halves.items()}
    names = {id(master): fqn for fqn, master in masters.items()}
    elements = {fqn: {"fp32": masters[fqn], "half": halves[fqn]} for fqn in weights}
    accumulator = SimpleNamespace(parameters=elements)
    split: list[list[str]] = [[fqn] for fqn in weights] if group_per_parameter else [list(weights)]
    base = kind([{"params": [masters[fqn] for fqn in fqns]} for fqns in split], lr=0.5)
    optimizer = Wrapper(Wrapper(base, names), names, gradient_accumulator=accumulator)
    if zero:
        groups = [{"named_params": [(fqn, weights[fqn]) for fqn in fqns]} for fqns in split]
        more = {"param_name_to_dp_rank_offsets": ranges, "zero_named_param_groups": groups, "dp_pg": everyone}
        optimizer = Wrapper(optimizer, names, **more)
    return optimizer, context


def masters_of(optimizer: Any) -> dict[str, torch.Tensor]:
    while not hasattr(optimizer, "gradient_accumulator"):
        optimizer = optimizer.optimizer
    return {fqn: element["fp32"].detach() for fqn, element in optimizer.gradient_accumulator.parameters.items()}


def base_of(optimizer: Any) -> torch.optim.Optimizer:
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def untouched(optimizer: Any) -> bool:
    base = base_of(optimizer)
    return (
        not base.state
        and base.param_groups[0]["lr"] == 0.5
        and all((m == 1).all() for m in masters_of(optimizer).values())
    )


def load_both(rank: int, fixtures: Path) -> None:
    """Load at tp 2, and at ZeRO-1 dp 2, and look at a few tensors."""
    truth = load_file(fixtures / "truth" / "llama_tied.safetensors")
    for axis in ("tp", "dp"):
        zero = axis == "dp"
        optimizer, context = build(fixtures / "checkpoints" / SOURCE, axis)
        report = plugin.load_optimizer(optimizer, context, fixtures / "checkpoints" / SOURCE)
        base, masters = base_of(optimizer), masters_of(optimizer)
        by_name = dict(zip(masters, base.param_groups[0]["params"], strict=True))
        assert report.num_bytes == sum(3 * master.nbytes for master in masters.values())
        for fqn, dim in ((EMBEDDING, 0), (O_PROJ, 1)):
            for state in ("exp_avg", "exp_avg_sq", "fp32"):
                whole = truth[f"{fqn}|{state}"]
                expected = whole.reshape(-1).chunk(2)[rank] if zero else whole.chunk(2, dim)[rank]
                got = masters[fqn] if state == "fp32" else base.state[by_name[fqn]][state]
                torch.testing.assert_close(got, expected, rtol=0, atol=0)
            assert base.state[by_name[fqn]]["step"] == 3
        assert base.param_groups[0]["betas"] == (0.9, 0.95) and base.param_groups[0]["lr"] < 0.5


def test_states_masters_and_hyperparameters(nanotron_fixtures: Path) -> None:
    run_world(2, load_both, nanotron_fixtures)


def load_experts(rank: int, fixtures: Path) -> None:
    """Load at ep 2, tp 1, where the stacked first matrices are kept transposed, and one of two experts files."""
    truth = load_file(fixtures / "truth" / "moe_e8.safetensors")
    for name in ("moe-moe_e8-z0-tp2-pp1-dp1-ep1", "moe-moe_e8-z1-tp1-pp1-dp2-ep2"):
        optimizer, context = build(fixtures / "checkpoints" / name, "expert", group_per_parameter=True)
        plugin.load_optimizer(optimizer, context, fixtures / "checkpoints" / name)
        base, masters = base_of(optimizer), masters_of(optimizer)
        by_name = {fqn: group["params"][0] for fqn, group in zip(masters, base.param_groups, strict=True)}
        for fqn in (fqn for fqn in masters if ".experts." in fqn):
            expected = truth[f"{fqn}|exp_avg"].chunk(2)[rank]
            expected = expected.T if ".w1." in fqn else expected
            torch.testing.assert_close(base.state[by_name[fqn]]["exp_avg"], expected, rtol=0, atol=0)


def test_experts_are_matched_by_rank(nanotron_fixtures: Path) -> None:
    run_world(2, load_experts, nanotron_fixtures)


def load_scheduler(rank: int, fixtures: Path) -> None:
    """Load the lr scheduler of both kinds of checkpoint into runs of both kinds."""
    for name in (SOURCE, "head-llama_tied-z1-tp2-pp1-dp2-ep1"):
        source = fixtures / "checkpoints" / name
        for group_per_parameter in (False, True):
            optimizer, context = build(source, "dp", group_per_parameter=group_per_parameter)
            base = base_of(optimizer)
            scheduler = torch.optim.lr_scheduler.LambdaLR(base, [lambda step: 1.0] * len(base.param_groups))
            with pytest.raises(TargetError, match="oad the optimizer first"):
                plugin.load_lr_scheduler(scheduler, source)
            plugin.load_optimizer(optimizer, context, source)
            plugin.load_lr_scheduler(scheduler, source)
            assert scheduler.last_epoch == 3
            assert scheduler.base_lrs == [0.01] * len(base.param_groups)
            assert len(scheduler.get_last_lr()) == len(base.param_groups)


def test_lr_schedulers_of_every_kind(nanotron_fixtures: Path) -> None:
    run_world(2, load_scheduler, nanotron_fixtures)


def disagree(rank: int, checkpoint: Path) -> list[str]:
    """Load a checkpoint whose copies of one tensor differ."""
    messages = []
    for policy in ("error", "lowest-rank"):
        optimizer, context = build(checkpoint)
        try:
            plugin.load_optimizer(optimizer, context, checkpoint, replicas=policy)
            messages.append("loaded")
        except BridgeError as error:
            messages.append(f"{type(error).__name__}: {error}")
            assert untouched(optimizer)
    return messages


def test_copies_that_differ_are_refused_unless_the_user_says_otherwise(nanotron_fixtures: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(nanotron_fixtures / "checkpoints" / SOURCE, damaged)
    file = damaged / "optimizer" / "optimizer_pp-1-of-2_dp-0-of-2_tp-1-of-2_exp-0-of-1.pt"
    content = torch.load(file, weights_only=True)
    norm = next(number for number, name in content["names"].items() if "final_layer_norm" in name)
    content["state"][norm]["exp_avg"][3] += 1
    torch.save(content, file)
    for refused, loaded in run_world(2, disagree, damaged):
        assert refused.startswith("ReplicaMismatchError: ") and "copies differ in 1 elements" in refused
        assert loaded == "loaded"


def refuse(rank: int, fixtures: Path) -> list[str]:
    """Try loads that must be refused; return their errors."""
    good, untied = (fixtures / "checkpoints" / name for name in (SOURCE, "nt04-llama_untied-z1-tp2-pp1-dp2-ep1"))
    noacc = fixtures / "checkpoints" / "nt04-llama_noacc-z0-tp2-pp1-dp1-ep1"
    attempts: list[tuple[Path, Path, Any, dict[str, Any]]] = [
        (good, untied, torch.optim.AdamW, {}),
        (untied, good, torch.optim.AdamW, {}),
        (good, noacc, torch.optim.AdamW, {}),
        (good, good, torch.optim.SGD, {}),
        (good, good, torch.optim.AdamW, {"replicas": "any"}),
        (good, good if rank else fixtures, torch.optim.AdamW, {}),
    ]
    errors = []
    for model, source, kind, options in attempts:
        optimizer, context = build(model, kind=kind)
        try:
            plugin.load_optimizer(optimizer, context, source, **options)
        except BridgeError as error:
            errors.append(f"{type(error).__name__}: {error}")
        assert untouched(optimizer)
    optimizer, context = build(good)
    try:
        plugin.load_optimizer(base_of(optimizer), context, good)
    except BridgeError as error:
        errors.append(f"{type(error).__name__}: {error}")
    return errors


def test_what_is_refused_on_all_ranks(nanotron_fixtures: Path) -> None:
    expected = [
        ("TargetError", "has optimizer state that the run has no use for"),
        ("MissingSourceError", "has no optimizer state of what the run trains"),
        ("TargetError", "the run has fp32 masters and the checkpoint has none"),
        ("ParamGroupError", "the checkpoint's optimizer has betas, eps, the run's"),
        ("TargetError", "unknown replica policy 'any'"),
        ("UnknownFormatError", "is not a nanotron checkpoint"),
        ("TargetError", "a bare torch optimizer does not know its parameters' names"),
    ]
    first, second = run_world(2, refuse, nanotron_fixtures)
    for (kind, words), *errors in zip(expected, first, second, strict=True):
        assert all(error.startswith(f"{kind}: ") and words in error for error in errors), errors
    assert first[5] == second[5]  # one rank looks for all


def lose_a_rank(rank: int, fixtures: Path) -> str:
    """Load while rank 1 is killed in the middle of its masters."""
    source = fixtures / "checkpoints" / SOURCE
    optimizer, context = build(source)
    if rank == 1:
        whole = _Load.read_masters
        _Load.read_masters = lambda load: (whole(load), os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[assignment]
    try:
        plugin.load_optimizer(optimizer, context, source)
    except Exception as error:
        assert untouched(optimizer)
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_a_killed_rank_ends_the_others_and_leaves_their_optimizers(nanotron_fixtures: Path) -> None:
    survivor, _ = run_world(2, lose_a_rank, nanotron_fixtures, killed=(1,))
    assert survivor != "loaded"


def test_install_replaces_every_imported_name_and_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_optimizer() -> None: ...

    def load_lr_scheduler() -> None: ...

    names = ("nanotron", "nanotron.serialize", "nanotron.serialize.optimizer", "nanotron.trainer", "nanotron.other")
    modules = {name: ModuleType(name) for name in names}
    for name in names[1:4]:
        modules[name].load_optimizer = load_optimizer  # type: ignore[attr-defined]
        modules[name].load_lr_scheduler = load_lr_scheduler  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    plugin.install()
    plugin.install(check_crcs=False)
    for name in names[1:4]:
        assert modules[name].load_optimizer.func is plugin.load_optimizer
        assert modules[name].load_optimizer.keywords == {"check_crcs": False}
        assert modules[name].load_lr_scheduler is plugin.load_lr_scheduler
    assert not hasattr(modules["nanotron.other"], "load_optimizer")
    plugin.uninstall()
    plugin.uninstall()
    for name in names[1:4]:
        assert modules[name].load_optimizer is load_optimizer
        assert modules[name].load_lr_scheduler is load_lr_scheduler


def test_install_without_nanotron_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nanotron", None)
    with pytest.raises(MissingDependencyError, match="pip install nanotron"):
        plugin.install()
