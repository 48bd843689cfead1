"""The lr scheduler's lists follow the param groups wherever they go."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_optim_bridge.errors import ContradictionError, MissingSourceError, TargetError
from nemo_optim_bridge.formats.nanotron.dialects import DIALECTS
from nemo_optim_bridge.formats.nanotron.scheduler import Scheduler, read_scheduler, scheduler_files
from nemo_optim_bridge.formats.topology import Topology

KEYS = ["base_lrs", "last_epoch", "_step_count", "_is_initial", "_get_lr_called_within_step", "_last_lr", "lr_lambdas"]


def state(lrs: list[float], empty: Any, **more: Any) -> dict[str, Any]:
    values = [[2 * lr for lr in lrs], 3, 4, False, False, lrs, [empty] * len(lrs)]
    return {**dict(zip(KEYS, values, strict=True)), **more}


def save(root: Path, name: str, content: object) -> None:
    (root / "lr_scheduler").mkdir(exist_ok=True)
    torch.save(content, root / "lr_scheduler" / name)


def test_file_names() -> None:
    topology = Topology(tp=2, pp=2, dp=3)
    for name in ("v0.1", "0.4", "moe24"):
        assert scheduler_files(DIALECTS[name], topology) == {(0, 0, 0): "lr_scheduler.pt"}
    assert list(scheduler_files(DIALECTS["head"], topology).values()) == [
        f"lr_scheduler_pp-{pp}-of-2_tp-{tp}-of-2_exp-0-of-1.pt" for pp in (0, 1) for tp in (0, 1)
    ]
    assert scheduler_files(DIALECTS["moe"], Topology(ep=2))[0, 0, 1] == "lr_scheduler_pp-0-of-1_tp-0-of-1_exp-1-of-2.pt"


def test_one_entry_serves_all(tmp_path: Path) -> None:
    save(tmp_path, "lr_scheduler.pt", state([0.25], None))
    scheduler = read_scheduler(tmp_path, DIALECTS["0.4"], Topology(), [["a", "b"]])
    assert scheduler is not None
    assert scheduler.state_dict(DIALECTS["0.4"], ["a", "b"]) == state([0.25], None)
    assert scheduler.state_dict(DIALECTS["head"], ["a", "b", "c"]) == state([0.25] * 3, {})
    assert list(scheduler.state_dict(DIALECTS["head"], ["a"])) == KEYS


def per_stage(tmp_path: Path, stages: list[list[float]]) -> Scheduler | None:
    """Write one file a stage, and read them; parameters are called p0, p1, ... through the stages."""
    fqns: list[list[str]] = []
    for pp, lrs in enumerate(stages):
        start = sum(map(len, fqns))
        fqns.append([f"p{start + i}" for i in range(len(lrs))])
        save(tmp_path, f"lr_scheduler_pp-{pp}-of-{len(stages)}_tp-0-of-1_exp-0-of-1.pt", state(lrs, {}))
    return read_scheduler(tmp_path, DIALECTS["head"], Topology(pp=len(stages)), fqns)


def test_each_parameter_keeps_its_entry(tmp_path: Path) -> None:
    scheduler = per_stage(tmp_path, [[0.5, 0.25], [0.125]])
    assert scheduler is not None
    assert scheduler.state_dict(DIALECTS["moe"], ["p2", "p0"]) == state([0.125, 0.5], {})
    with pytest.raises(TargetError, match=r"dialect 0\.4 has one param group, but the lr_scheduler's entries differ"):
        scheduler.state_dict(DIALECTS["0.4"], ["p0", "p1", "p2"])
    assert scheduler.state_dict(DIALECTS["0.4"], ["p1"]) == state([0.25], None)
    with pytest.raises(TargetError, match=r"no entry for this parameter.*tensor stranger"):
        scheduler.state_dict(DIALECTS["head"], ["stranger"])


def test_equal_entries_are_merged(tmp_path: Path) -> None:
    scheduler = per_stage(tmp_path, [[0.5, 0.5], [0.5]])
    assert scheduler is not None
    assert scheduler.state_dict(DIALECTS["v0.1"], ["p0", "p1", "p2"]) == state([0.5], None)
    assert scheduler.state_dict(DIALECTS["head"], ["stranger"]) == state([0.5], {})


def test_none_is_none(tmp_path: Path) -> None:
    assert read_scheduler(tmp_path, DIALECTS["0.4"], Topology(), [["a"]]) is None


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    head, topology = DIALECTS["head"], Topology(tp=2)
    names = list(scheduler_files(head, topology).values())
    for content, error, reason in (
        (None, MissingSourceError, "lr_scheduler file is missing"),
        (state([0.5], {}), ContradictionError, r"lists have \[1\] entries for 2 param groups"),
        (state([0.5, 0.25], {}, base_lrs=[1.0]), ContradictionError, r"lists have \[1, 2\] entries"),
        (state([0.5, 0.5], {}), ContradictionError, r"entry differs from another rank's.*tensor b"),
        (state([0.5, 0.25], {}, last_epoch=9), ContradictionError, "differs from the lr_scheduler of another rank"),
        (state([0.5, 0.25], {}, _last_lr=0.5), ContradictionError, "_last_lr is a float"),
        (state([0.5, 0.25], {}, last_epoch=torch.ones(2)), ContradictionError, "last_epoch is a StoredTensor"),
        ([1], ContradictionError, "is not an lr_scheduler state"),
        ({1: 2}, ContradictionError, "is not an lr_scheduler state"),
    ):
        shutil.rmtree(tmp_path / "lr_scheduler", ignore_errors=True)
        save(tmp_path, names[0], state([0.5, 0.25], {}))
        if content is not None:
            save(tmp_path, names[1], content)
        with pytest.raises(error, match=reason) as caught:
            read_scheduler(tmp_path, head, topology, [["a", "b"]])
        assert names[1] in str(caught.value)
