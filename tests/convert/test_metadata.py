"""``.metadata`` that is written anew is, for torch itself, the same with other keys."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from nemo_optim_bridge.errors import UnknownFormatError
from nemo_optim_bridge.formats.torch_dist.document import load_document
from nemo_optim_bridge.formats.torch_dist.metadata import renamed_metadata

torch = pytest.importorskip("torch")

NAMES = ("fused_moe_ep2", "fused_moe_tp2", "mcore_distopt_moe_ep2_fully_reshardable")


def read(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301 (what torch does)


@pytest.mark.parametrize("name", NAMES)
def test_under_the_same_keys_it_is_the_same(megatron_fixtures: Path, name: str) -> None:
    root = megatron_fixtures / name / "ckpt"
    theirs = read((root / ".metadata").read_bytes())
    ours = read(renamed_metadata(load_document(root), lambda key: [key]))
    assert type(ours) is type(theirs)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    assert ours.storage_data == theirs.storage_data
    assert [index.index for index in ours.storage_data] == [index.index for index in theirs.storage_data]
    assert (ours.storage_meta, ours.version) == (theirs.storage_meta, theirs.version)
    assert ours.planner_data is None
    entry = next(iter(ours.state_dict_metadata.values()))
    assert type(getattr(entry, "size", torch.Size())) is torch.Size
    assert {type(index.offset) for index in ours.storage_data} <= {torch.Size, type(None)}


def test_renamed_aliased_and_left_out(megatron_fixtures: Path) -> None:
    root = megatron_fixtures / "fused_moe_ep1" / "ckpt"
    theirs = read((root / ".metadata").read_bytes())
    first, second, third, *rest = theirs.state_dict_metadata
    new = {first: ["a", "b"], second: [], third: ["c" * 300]}
    ours = read(renamed_metadata(load_document(root), lambda key: new.get(key, [key])))
    assert list(ours.state_dict_metadata) == ["a", "b", "c" * 300, *rest]
    places = {key: set() for key in (first, "a", "b")}
    for found in (theirs, ours):
        for index, place in found.storage_data.items():
            if index.fqn in places:
                places[index.fqn].add((index.offset, place.relative_path, place.offset, place.length))
    assert places["a"] == places["b"] == places[first] != set()
    assert not any(index.fqn == second for index in ours.storage_data)


def test_moved(megatron_fixtures: Path) -> None:
    root = megatron_fixtures / "fused_moe_ep1" / "ckpt"
    key = "optimizer.state.exp_avg.model.embedding.word_embeddings.weight"
    moved = {(key, (0, 0)): ("__new_0.distcp", 1 << 40, 77)}
    ours = read(renamed_metadata(load_document(root), lambda key: [key], moved))
    (place,) = [place for index, place in ours.storage_data.items() if index.fqn == key]
    assert (place.relative_path, place.offset, place.length) == ("__new_0.distcp", 1 << 40, 77)


def test_more_keys_than_one_batch(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    size = torch.Size([300, 70000])
    entries, places = {}, {}
    for number in range(2500):
        properties = TensorProperties(dtype=torch.bfloat16, requires_grad=bool(number % 2))
        entries[f"ä{number}"] = TensorStorageMetadata(
            properties, size, [ChunkStorageMetadata(torch.Size([0, 0]), size)]
        )
        info = _StorageInfo("__0_0.distcp", number << 33, 5, transform_descriptors=["zstd"])
        places[MetadataIndex(f"ä{number}", torch.Size([0, 0]))] = info
    metadata = Metadata(entries, storage_data=places)
    metadata.mcore_data = {"ä1": {"nd_reformulated_orig_global_shape": (300, 70000)}}  # type: ignore[attr-defined]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    ours = read(renamed_metadata(load_document(tmp_path), lambda key: [key + "x"]))
    assert ours.state_dict_metadata == {f"{key}x": entry for key, entry in entries.items()}
    assert list(ours.storage_data.values()) == list(places.values())
    assert ours.mcore_data == {"ä1x": {"nd_reformulated_orig_global_shape": (300, 70000)}}


def test_fields_of_the_future_are_refused(megatron_fixtures: Path) -> None:
    document = load_document(megatron_fixtures / "fused_dense" / "ckpt")
    next(iter(document.fields["storage_data"])).fields["shelf"] = 3
    with pytest.raises(UnknownFormatError, match="Index that cannot be written"):
        renamed_metadata(document, lambda key: [key])
