"""Megatron's torch_dist headers are read without Megatron, and damaged ones are refused."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_optim_bridge.errors import (
    BridgeError,
    ContradictionError,
    CorruptFileError,
    MissingSourceError,
    UnknownFormatError,
    UnsafePickleError,
)
from nemo_optim_bridge.formats.torch_dist import is_torch_dist, read_torch_dist, stored_tensors

DATA = Path(__file__).parent.parent / "data" / "nemo"


@pytest.fixture
def copied(tmp_path):
    target = tmp_path / "ckpt"
    shutil.copytree(DATA / "fused_moe_ep2" / "ckpt", target)
    return target


def test_tensors_chunks_and_groups_are_known_from_headers():
    checkpoint = read_torch_dist(DATA / "fused_moe_ep2" / "ckpt")
    key = "optimizer.state.fp32_param.model.decoder.layers.mlp.experts.experts.linear_fc1.weight"
    tensor = checkpoint.tensors[key]
    assert (tensor.shape, tensor.dtype) == ((2, 4, 96, 32), "float32")
    assert sum(chunk.region.numel for chunk in tensor.chunks) == 2 * 4 * 96 * 32
    assert {chunk.file for chunk in tensor.chunks} <= {"__0_0.distcp", "__1_0.distcp"}
    assert checkpoint.tensors["model.embedding.word_embeddings.weight"].dtype == "bfloat16"
    assert all(name.split("/")[0].endswith("_extra_state") for name in checkpoint.objects)
    groups = checkpoint.common["optimizer_states"][0]["optimizer"]["param_groups"]
    assert [group["is_expert"] for group in groups] == [False, True, False]


def test_keys_and_dtypes_are_those_that_torch_reports():
    reader = pytest.importorskip("torch.distributed.checkpoint").FileSystemReader
    for folder in sorted(DATA.glob("*/ckpt")):
        known = reader(folder).read_metadata().state_dict_metadata
        wanted = {key: str(m.properties.dtype) for key, m in known.items() if hasattr(m, "properties")}
        assert {key: f"torch.{dtype}" for key, dtype in stored_tensors(folder).items()} == wanted


def test_chunks_hold_the_values(tmp_path):
    torch = pytest.importorskip("torch")
    import io

    from safetensors.torch import load_file

    truth = load_file(DATA / "moe.safetensors")
    folder = DATA / "fused_moe_ep2" / "ckpt"
    for key, tensor in read_torch_dist(folder).tensors.items():
        name = key.removeprefix("optimizer.state.")
        if name not in truth:
            continue
        for chunk in tensor.chunks:
            data = (folder / chunk.file).read_bytes()[chunk.offset : chunk.offset + chunk.nbytes]
            values = torch.load(io.BytesIO(data), weights_only=True)
            where = tuple(slice(a, b) for a, b in zip(chunk.region.offsets, chunk.region.stops, strict=True))
            assert torch.equal(values.reshape(chunk.region.shape), truth[name][where])


def test_no_framework_and_no_torch_is_imported():
    code = (
        "import sys; from nemo_optim_bridge.formats.torch_dist.preflight import preflight; preflight(sys.argv[1]);"
        "bad = {'torch', 'nemo', 'megatron', 'apex'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code, str(DATA / "fused_dense" / "ckpt")], check=True)


def test_other_directories_are_no_torch_dist_checkpoints(tmp_path):
    assert is_torch_dist(DATA / "fused_dense" / "ckpt")
    assert not is_torch_dist(tmp_path)
    assert not is_torch_dist(tmp_path / "nothing")
    with pytest.raises(UnknownFormatError, match=r"metadata\.json"):
        read_torch_dist(tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert not is_torch_dist(tmp_path)
    with pytest.raises(UnknownFormatError, match="zarr"):
        read_torch_dist(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sharded_backend": 3}', "\xff"])
def test_malformed_configurations_are_refused(tmp_path, text):
    (tmp_path / "metadata.json").write_text(text, encoding="latin1")
    assert not is_torch_dist(tmp_path)
    with pytest.raises(CorruptFileError):
        read_torch_dist(tmp_path)


def test_keys_of_zarr_checkpoints_are_their_folders(tmp_path):
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    for key, dtype in (("optimizer.state.fp32_param.a", "<f4"), ("a", "bfloat16")):
        (tmp_path / key).mkdir()
        (tmp_path / key / ".zarray").write_text(json.dumps({"dtype": dtype}))
    assert stored_tensors(tmp_path) == {"optimizer.state.fp32_param.a": "float32", "a": "bfloat16"}


def test_missing_files_are_named(copied):
    (copied / "common.pt").unlink()
    with pytest.raises(MissingSourceError, match=r"common\.pt"):
        read_torch_dist(copied)
    (copied / ".metadata").unlink()
    with pytest.raises(MissingSourceError, match=r"\.metadata"):
        read_torch_dist(copied)


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize("payload", [Evil(), {"a": Evil()}], ids=["root", "inside"])
def test_metadata_that_would_run_something_is_refused(copied, payload, capfd):
    (copied / ".metadata").write_bytes(pickle.dumps(payload))
    with pytest.raises(UnsafePickleError):
        read_torch_dist(copied)
    assert "executed" not in capfd.readouterr().out


def test_common_objects_of_other_classes_stay_opaque(copied, capfd):
    torch = pytest.importorskip("torch")
    import argparse

    common = {
        "args": argparse.Namespace(lr=1),
        "evil": Evil(),
        "step": torch.tensor([7]),
        "half": torch.tensor(0.5).bfloat16(),
    }
    torch.save(common, copied / "common.pt")
    read = read_torch_dist(copied).common
    assert (read["step"], read["half"]) == (7, 0.5)
    assert read["args"].qualname == "Namespace"
    assert "executed" not in capfd.readouterr().out


def test_truncated_and_foreign_metadata_are_refused(copied):
    data = (copied / ".metadata").read_bytes()
    for damaged in (b"", data[:1], data[: len(data) // 2], data[:-1], data + b"x", pickle.dumps([1, 2])):
        (copied / ".metadata").write_bytes(damaged)
        with pytest.raises(CorruptFileError):
            read_torch_dist(copied)


def test_flipped_bytes_never_raise_anything_else(copied):
    data = (copied / ".metadata").read_bytes()
    for position in range(0, len(data), len(data) // 150):
        (copied / ".metadata").write_bytes(data[:position] + bytes([data[position] ^ 0x5A]) + data[position + 1 :])
        with contextlib.suppress(BridgeError):
            read_torch_dist(copied)


def _metadata(mutate):
    """Return .metadata of one tensor, after mutating torch's own objects."""
    metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
    filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
    import torch

    chunk = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    tensor = metadata.TensorStorageMetadata(metadata.TensorProperties(torch.float32), torch.Size([4]), [chunk])
    info = filesystem._StorageInfo("__0_0.distcp", 0, 16)
    made = metadata.Metadata({"a": tensor}, None, {metadata.MetadataIndex("a", torch.Size([0])): info})
    mutate(made, chunk, tensor, info)
    return pickle.dumps(made)


@pytest.mark.parametrize(
    ("mutate", "error"),
    [
        (lambda m, c, t, i: setattr(i, "relative_path", "../outside"), CorruptFileError),
        (lambda m, c, t, i: setattr(i, "relative_path", "/etc/passwd"), CorruptFileError),
        (lambda m, c, t, i: setattr(i, "offset", -1), CorruptFileError),
        (lambda m, c, t, i: setattr(c, "sizes", (5,)), ContradictionError),
        (lambda m, c, t, i: setattr(c, "sizes", (4, 1)), CorruptFileError),
        (lambda m, c, t, i: setattr(t, "chunks", None), CorruptFileError),
        (lambda m, c, t, i: setattr(t, "size", "4"), CorruptFileError),
        (lambda m, c, t, i: m.storage_data.clear(), MissingSourceError),
        (lambda m, c, t, i: setattr(m, "storage_data", None), CorruptFileError),
        (lambda m, c, t, i: m.state_dict_metadata.update({3: t}), CorruptFileError),
    ],
)
def test_metadata_that_does_not_add_up_is_refused(copied, mutate, error):
    (copied / ".metadata").write_bytes(_metadata(mutate))
    with pytest.raises(error):
        read_torch_dist(copied)
