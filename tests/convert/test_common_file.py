"""``common.pt`` comes back as it was, classes that this package does not know included."""

from __future__ import annotations

import argparse
import datetime
import enum
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from nemo_optim_bridge.formats.torch_dist.common_file import CommonFile, opaque_classes

torch = pytest.importorskip("torch")


class Colour(enum.Enum):
    RED = 1


def rewritten(tree: dict[str, Any], folder: Path, **changes: Any) -> tuple[CommonFile, Any]:
    torch.save(tree, folder / "common.pt")
    file = CommonFile(folder)
    (folder / "new.pt").write_bytes(file.dumps({**file.tree, **changes}))
    return file, torch.load(folder / "new.pt", weights_only=False)


def test_plain_data_and_tensors(tmp_path: Path) -> None:
    shared = [1, 2.5, None, True, "text", b"bytes", (1, (2,)), {3, 4}]
    tree = {
        "a": shared, "again": shared, 1: OrderedDict(x=torch.arange(6).reshape(2, 3).t()), "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16, "half": torch.tensor(1.5, dtype=torch.bfloat16), "device": torch.device("cpu"),
        "empty": torch.zeros(0),
    }  # fmt: skip
    _, found = rewritten(tree, tmp_path)
    assert found.keys() == tree.keys()
    assert found["a"] == shared
    assert found["again"] is found["a"]
    assert torch.equal(found[1]["x"], tree[1]["x"])  # type: ignore[index]
    assert found["dtype"] is torch.bfloat16
    assert tuple(found["size"]) == (2, 3)
    assert found["half"].dtype is torch.bfloat16
    assert found["half"].item() == 1.5
    assert found["device"] == torch.device("cpu")
    assert found["empty"].shape == (0,)


def test_namespace_enum_and_dates_come_out_as_their_own_classes(tmp_path: Path) -> None:
    args = argparse.Namespace(lr=1e-3, params_dtype=torch.bfloat16, colour=Colour.RED, path=[Path("/a")])
    when = datetime.datetime(2026, 1, 2, 3, 4)
    file, found = rewritten({"args": args, "when": when, "other": 1}, tmp_path, other=2)
    assert found == {"args": args, "when": when, "other": 2}
    assert "argparse.Namespace" in opaque_classes(file.tree)


def test_tensors_within_unknown_objects(tmp_path: Path) -> None:
    _, found = rewritten({"args": argparse.Namespace(scale=torch.tensor([1.0, 2.0]))}, tmp_path)
    assert found["args"].scale.tolist() == [1.0, 2.0]


def test_omegaconf_containers(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"optim": {"name": "fused_adam", "betas": [0.9, 0.98]}, "lr": "${optim.name}"})
    _, found = rewritten({"hyper_parameters": config, "x": 1}, tmp_path, x=2)
    assert type(found["hyper_parameters"]) is type(config)
    assert found["hyper_parameters"] == config
    assert found["hyper_parameters"].lr == "fused_adam"
    assert found["hyper_parameters"].optim._get_parent() is found["hyper_parameters"]
