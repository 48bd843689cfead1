"""Headers of one-tensor safetensors files: written as the library reads them, read as it wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from nemo_optim_bridge.core.store import identify
from nemo_optim_bridge.errors import CorruptFileError, MissingSourceError
from nemo_optim_bridge.formats.safetensors_header import format_header, read_single_tensor

DTYPES = [
    "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint8", "bool",
]  # fmt: skip


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (2, 3, 4), (0, 4)])
def test_what_the_library_wrote(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.ones(shape).to(getattr(torch, dtype))
    path = tmp_path / "x.safetensors"
    save_file({"data": tensor}, path, metadata={"version": "1.2"})
    found, identity = read_single_tensor(path, "data")
    assert identity == identify(path)
    assert (found.dtype, found.shape, found.metadata) == (dtype, shape, {"version": "1.2"})
    assert found.nbytes == tensor.numel() * tensor.element_size()
    assert path.read_bytes()[found.offset :] == bytes(tensor.view(torch.uint8).flatten().tolist() if shape else
                                                     tensor.reshape(1).view(torch.uint8).tolist())  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_library_reads_what_is_written(dtype: str, tmp_path: Path) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))
    path = tmp_path / "x.safetensors"
    header = format_header("data", dtype, (2, 3), {"a": "b"})
    path.write_bytes(header + bytes(tensor.view(torch.uint8).flatten().tolist()))
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("data").view(torch.uint8), tensor.view(torch.uint8))
        assert file.metadata() == {"a": "b"}
    assert len(header) % 8 == 0


@given(st.dictionaries(st.text(), st.text(), max_size=4))
def test_any_metadata_is_padded_json(metadata: dict[str, str]) -> None:
    header = format_header("data", "uint8", (1,), metadata)
    assert len(header) % 8 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert json.loads(header[8:])["__metadata__"] == metadata


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\0" * 7, raw(b""), raw(b"{"), raw([]), raw({}), (1 << 62).to_bytes(8, "little"),
        raw({"other": ENTRY}, bytes(8)), raw({"data": ENTRY}), raw({"data": ENTRY}, bytes(7)),
        raw({"data": ENTRY}, bytes(9)), raw({"data": {**ENTRY, "shape": [3]}}, bytes(8)),
        raw({"data": {**ENTRY, "shape": [-2]}}, bytes(8)), raw({"data": {**ENTRY, "shape": [1 << 63, 2]}}, bytes(8)),
        raw({"data": {**ENTRY, "dtype": "F31"}}, bytes(8)), raw({"data": {**ENTRY, "data_offsets": [8, 0]}}, bytes(8)),
        raw({"data": {**ENTRY, "data_offsets": [8, 16]}}, bytes(16)), raw({"data": 7}),
        raw({"data": ENTRY, "more": {**ENTRY, "data_offsets": [8, 16]}}, bytes(16)),
        raw({"data": ENTRY, "__metadata__": {"a": 1}}, bytes(8)),
        raw({"data": {"dtype": "U16", "shape": [1], "data_offsets": [0, 2]}}, bytes(2)),
    ],
)  # fmt: skip
def test_hostile_headers(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError) as caught:
        read_single_tensor(path, "data")
    assert caught.value.path == str(path)


def test_missing_and_unreadable(tmp_path: Path) -> None:
    with pytest.raises(MissingSourceError, match="weight shard is missing"):
        read_single_tensor(tmp_path / "absent", "data")
    with pytest.raises(CorruptFileError):
        read_single_tensor(tmp_path, "data")
