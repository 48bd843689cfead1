"""Damaged, incomplete and foreign checkpoints: one clear error each, and nothing written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_optim_bridge.core.manifest import TensorKey
from nemo_optim_bridge.errors import (
    BridgeError,
    ContradictionError,
    CorruptFileError,
    MissingSourceError,
    OutputError,
    TargetError,
    UnknownFormatError,
    UnsafePickleError,
)
from nemo_optim_bridge.formats.torch_dist.common_file import CommonFile
from nemo_optim_bridge.formats.torch_dist.convert import Options, convert
from nemo_optim_bridge.formats.torch_dist.document import load_document
from nemo_optim_bridge.formats.torch_dist.manifest import read_manifest
from nemo_optim_bridge.formats.torch_dist.metadata import renamed_metadata
from nemo_optim_bridge.formats.torch_dist.saved import DISTRIBUTED, FUSED, MEGATRON

MASTER = "optimizer.state.fp32_param.model.decoder.final_layernorm.weight"


class Boom:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("executed",))


def metadata(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        file = root / ".metadata"
        file.write_bytes(change(file.read_bytes()))

    return apply


def common(change: Callable[[dict[Any, Any]], None]) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        file = CommonFile(root)
        change(file.tree)
        (root / "common.pt").write_bytes(file.dumps(file.tree))

    return apply


def rename(old: str, new: list[str]) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        data = renamed_metadata(load_document(root), lambda key: new if key == old else [key])
        (root / ".metadata").write_bytes(data)

    return apply


def config(**fields: Any) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        known = json.loads((root / "metadata.json").read_text())
        (root / "metadata.json").write_text(json.dumps({**known, **fields}))

    return apply


def truncate(root: Path) -> None:
    file = root / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:1000])


def flip(name: str, place: int) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        data = bytearray((root / name).read_bytes())
        data[place] ^= 1
        (root / name).write_bytes(data)

    return apply


def a_master(root: Path) -> None:
    """Flip a bit of a tensor's data."""
    manifest = read_manifest(root).manifest
    number = manifest.index()[TensorKey("model.decoder.final_layernorm.weight", "fp32_param")]
    buffer = manifest.buffers[next(shard.buffer for shard in manifest.restrict({manifest.tensors[number].key}).shards)]
    flip(Path(buffer.file).name, buffer.offset)(root)


def value_of(root: Path) -> None:
    """Flip the lowest bit of a hyperparameter's number in common.pt's pickle."""
    file = root / "common.pt"
    place = file.read_bytes().index(b"weight_decay") + len(b"weight_decay") + 10
    flip("common.pt", place)(root)


def pipe(name: str) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        (root / name).unlink()
        os.mkfifo(root / name)

    return apply


def sparse(name: str) -> Callable[[Path], None]:
    return lambda root: os.truncate(root / name, 1 << 40)


def two_optimizers(tree: dict[Any, Any]) -> None:
    tree["optimizer_states"] *= 2


def groups(tree: dict[Any, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tree["optimizer_states"][0]["optimizer"]["param_groups"]
    return found


def first_group(tree: dict[Any, Any]) -> dict[str, Any]:
    return groups(tree)[0]


HARM: dict[str, tuple[Callable[[Path], Any], type[BridgeError], str]] = {
    "metadata runs code": (metadata(lambda _: pickle.dumps(Boom(), 2)), UnsafePickleError, "not on the allow-list"),
    "metadata truncated": (metadata(lambda data: data[: len(data) // 2]), CorruptFileError, "pickle"),
    "metadata empty": (metadata(lambda _: b""), CorruptFileError, "pickle"),
    "metadata is no metadata": (metadata(lambda _: pickle.dumps({}, 2)), CorruptFileError, "Metadata"),
    "metadata missing": (lambda root: (root / ".metadata").unlink(), MissingSourceError, "is missing"),
    "metadata huge": (sparse(".metadata"), CorruptFileError, "larger than 1024 MiB"),
    "metadata.json huge": (sparse("metadata.json"), CorruptFileError, "too large"),
    "metadata is a pipe": (pipe(".metadata"), CorruptFileError, "not a regular file"),
    "metadata.json is a pipe": (pipe("metadata.json"), CorruptFileError, "not a regular file"),
    "common is a pipe": (pipe("common.pt"), MissingSourceError, "common.pt"),
    "a bit of data": (a_master, CorruptFileError, "do not match their CRC-32"),
    "a bit of a hyperparameter": (value_of, CorruptFileError, "common.pt"),
    "distcp missing": (lambda root: (root / "__0_0.distcp").unlink(), MissingSourceError, "is missing"),
    "distcp truncated": (truncate, CorruptFileError, "has 1000 bytes, at least"),
    "common missing": (lambda root: (root / "common.pt").unlink(), MissingSourceError, r"no common\.pt"),
    "common is no file of torch": (lambda root: (root / "common.pt").write_bytes(b"x"), CorruptFileError, "zip"),
    "no optimizer": (common(lambda tree: tree.pop("optimizer_states")), MissingSourceError, "no optimizer state"),
    "empty optimizer states": (
        common(lambda tree: tree.update(optimizer_states=[])), MissingSourceError, "no optimizer state"
    ),
    "two optimizers": (common(two_optimizers), UnknownFormatError, "2 optimizers"),
    "two containers": (common(lambda tree: tree.update(optimizer={})), ContradictionError, "two containers"),
    "unknown state": (
        common(lambda tree: tree.update(optimizer_states=[{"shampoo": 1}])), UnknownFormatError, "shampoo"
    ),
    "no hyperparameters": (
        common(lambda tree: first_group(tree).pop("lr")), MissingSourceError, "group 0 has no hyperparameters"
    ),
    "steps disagree": (common(lambda tree: first_group(tree).update(step=9)), ContradictionError, "steps disagree"),
    "rate is no number": (
        common(lambda tree: first_group(tree).update(lr="fast")), BridgeError, "lr is 'fast'"
    ),
    "rate is endless": (
        common(lambda tree: first_group(tree).update(lr=10**400)), ContradictionError, "lr is 1000"
    ),
    "step is beyond counting": (
        common(lambda tree: [group.update(step=2**60) for group in groups(tree)]), ContradictionError, "step is 11529"
    ),
    "multiplier is a list": (
        common(lambda tree: first_group(tree).update(pre_wd_mult=[1.0])), ContradictionError, "group 0: pre_wd_mult of"
    ),
    "flag is a list": (
        common(lambda tree: first_group(tree).update(is_decoupled_lr=[True])), ContradictionError, "is_decoupled_lr of"
    ),
    "no weight decay": (
        common(lambda tree: first_group(tree).pop("weight_decay")), ContradictionError, "group 0: has no weight_decay"
    ),
    "sharding is a mapping": (
        common(lambda tree: tree["optimizer_states"][0].update(param_state_sharding_type={"a": 1})),
        UnknownFormatError,
        "saved it as {'a': 1}, which is not known",
    ),
    "a number is too long": (
        common(lambda tree: first_group(tree).update(min_lr=2**63)), ContradictionError, "min_lr has an int"
    ),
    "master missing": (rename(MASTER, []), MissingSourceError, "no fp32 master"),
    "moment missing": (rename(MASTER.replace("fp32_param", "exp_avg"), []), MissingSourceError, "no exp_avg"),
    "state is not Adam's": (
        rename(MASTER, [MASTER, MASTER.replace("fp32_param", "momentum")]), UnknownFormatError, "momentum"
    ),
    "zarr": (config(sharded_backend="zarr"), UnknownFormatError, "zarr"),
    "version of the future": (config(sharded_backend_version=7), UnknownFormatError, "version"),
    "no metadata.json": (lambda root: (root / "metadata.json").unlink(), UnknownFormatError, r"no metadata\.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARM)
def test_harm(megatron_fixtures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    harm, kind, text = HARM[name]
    source = tmp_path / "in" / "ckpt"
    shutil.copytree(megatron_fixtures / "fused_moe_ep2" / "ckpt", source)
    harm(source)
    with pytest.raises(kind, match=text):
        convert(source, tmp_path / "out", Options(to=DISTRIBUTED))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert "executed" not in capsys.readouterr().out


def test_damaged_data_are_carried_when_asked(megatron_fixtures: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(megatron_fixtures / "fused_moe_ep2" / "ckpt", source)
    a_master(source)
    convert(source, tmp_path / "out", Options(to=DISTRIBUTED, check_crcs=False))
    for name in ("__0_0.distcp", "__1_0.distcp"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    value_of(source)
    with pytest.raises(CorruptFileError, match=r"data\.pkl"):
        convert(source, tmp_path / "no", Options(to=DISTRIBUTED, check_crcs=False, receipt=False))


def test_buckets_are_refused_with_the_way_out(megatron_fixtures: Path, tmp_path: Path) -> None:
    source = megatron_fixtures / "mcore_distopt_moe_ep2_dp_reshardable" / "ckpt"
    with pytest.raises(UnknownFormatError, match="--dist-ckpt-optim-fully-reshardable"):
        convert(source, tmp_path / "out", Options(to=FUSED))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["dp_zero_gather_scatter", "fully_sharded_model_space", "fsdp_dtensor", "of tomorrow"])
def test_other_sharding_types_are_refused(megatron_fixtures: Path, tmp_path: Path, kind: str) -> None:
    source = tmp_path / "in"
    shutil.copytree(megatron_fixtures / "mcore_distopt_moe_ep2_fully_reshardable" / "ckpt", source)
    common(lambda tree: tree["optimizer_states"][0][1].update(param_state_sharding_type=kind))(source)
    with pytest.raises(UnknownFormatError, match=kind):
        convert(source, tmp_path / "out", Options(to=FUSED))


def test_a_failure_while_writing_leaves_nothing(megatron_fixtures: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nemo_optim_bridge.formats.torch_dist.convert.renamed_metadata", fail)
    with pytest.raises(OSError, match="No space"):
        convert(megatron_fixtures / "fused_dense" / "ckpt", tmp_path / "out", Options(to=DISTRIBUTED))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"to": "adam"},
        {"to": FUSED, "key_style": "mixed"},
        {"to": FUSED, "container": "zip"},
        {"to": FUSED, "container": MEGATRON},
        {"to": FUSED, "link": "soft"},
        {"to": FUSED, "chained_prefix": "maybe"},
        {"to": "mcore_float16", "container": MEGATRON},
    ],
)
def test_impossible_options(megatron_fixtures: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(TargetError):
        convert(megatron_fixtures / "fused_moe_ep1" / "ckpt", tmp_path / "out", Options(**options))
    assert list(tmp_path.iterdir()) == []


def test_output_within_the_source(megatron_fixtures: Path, tmp_path: Path) -> None:
    source = megatron_fixtures / "fused_dense" / "ckpt"
    with pytest.raises(OutputError, match="overlap"):
        convert(source, source / "out", Options(to=DISTRIBUTED))
