"""torch files without torch, held against what torch itself reads and writes."""

from __future__ import annotations

import argparse
import gc
import io
import os
import pickle
import struct
import subprocess
import sys
import textwrap
import zipfile
from collections import Counter, OrderedDict
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from nemo_optim_bridge.core.manifest import ITEMSIZE
from nemo_optim_bridge.errors import (
    CheckpointError,
    CorruptFileError,
    TargetError,
    UnknownFormatError,
    UnsafePickleError,
)
from nemo_optim_bridge.formats.pickle_data import Global, Opaque
from nemo_optim_bridge.formats.torch_zip import (
    NewTensor,
    StoredStorage,
    StoredTensor,
    check_crcs,
    lay_out,
    read_torch_bytes,
    read_torch_file,
)
from tests.formats.materialise import materialise

DATA = Path(__file__).parent.parent / "data" / "torch_zip"
#: A directory of real checkpoints: every .pt below it is compared with torch.load.
MORE = os.environ.get("BRIDGE_CHECKPOINTS")


def saved(tree, **options):
    file = io.BytesIO()
    torch.save(tree, file, **options)
    return file.getvalue()


def content(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def assert_same(ours, theirs, file):
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, StoredTensor)
        assert (ours.dtype, ours.shape) == (str(theirs.dtype).removeprefix("torch."), tuple(theirs.shape))
        assert ours.stride == theirs.stride() and ours.storage_offset == theirs.storage_offset()
        assert ours.requires_grad == theirs.requires_grad
        assert file.read(ours) == content(theirs)
    elif isinstance(theirs, torch.dtype):
        assert str(ours) == str(theirs)
    elif isinstance(theirs, dict):
        assert type(ours) is type(theirs) and list(ours) == list(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key], file)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs) and (type(ours) is type(theirs) or isinstance(theirs, torch.Size))
        for left, right in zip(ours, theirs, strict=True):
            assert_same(left, right, file)
    else:
        assert type(ours) is type(theirs) and ours == theirs


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [*DATA.glob("*.pt"), *(Path(MORE).rglob("*.pt") if MORE else ())], ids=lambda path: path.stem
)
def test_real_files_equal_what_torch_loads(path):
    try:
        expected = torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError:
        with pytest.raises(UnsafePickleError):
            read_torch_file(path)
        file = read_torch_file(path, opaque=True)
    else:
        file = read_torch_file(path)
        assert_same(file.root, expected, file)
    assert file.has_crcs and not list(check_crcs(file, bytearray(1000)))
    with path.open("rb") as raw:
        for record in file.records.values():
            raw.seek(record.offset)
            assert len(raw.read(record.nbytes)) == record.nbytes
    archive = zipfile.ZipFile(path)
    assert [(info.file_size, info.CRC) for info in archive.infolist()] == [
        (record.nbytes, record.crc) for record in file.records.values()
    ]


def test_every_kind_of_leaf():
    base = torch.arange(24.0)
    attributed = torch.nn.Parameter(torch.ones(2))
    attributed.tensor_model_parallel = True
    tree = {
        **{dtype: torch.zeros(3, dtype=getattr(torch, dtype)) for dtype in ITEMSIZE},
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(0, 3),
        "view": base[2:14].view(3, 4),
        "transposed": base.view(4, 6).t(),
        "expanded": torch.ones(1).expand(5),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "frozen": torch.nn.Parameter(torch.ones(2, 2), requires_grad=False),
        "attributed": attributed,
        "grad": torch.ones(2, requires_grad=True),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "ordered": OrderedDict(a=1),
        "numbers": [1, 1 << 40, -3, 2.5, True, None, "text", b"bytes", b"", {1, 2}],
        "nested": {"a": [({"b": torch.ones(1)},)]},
    }
    data = saved(tree)
    file = read_torch_bytes(data, path="memory")
    attributed_again = file.root.pop("attributed")
    del tree["attributed"]
    assert_same(file.root, tree, file)
    assert attributed_again.requires_grad and attributed_again.shape == (2,)
    assert file.root["view"].record == file.root["transposed"].record


def test_leaves_that_stay_names_or_opaque():
    tree = {"device": torch.device("cuda", 1), "count": Counter(a=2), "layout": torch.strided, "s": torch.ones(3)}
    tree["s"] = tree["s"].untyped_storage()
    root = read_torch_bytes(saved(tree), path="memory").root
    assert isinstance(root["device"], Opaque) and root["device"].args == ("cuda", 1)
    assert isinstance(root["count"], Opaque) and root["count"].args == ({"a": 2},)
    assert isinstance(root["s"], StoredStorage) and (root["s"].dtype, root["s"].numel) == ("uint8", 12)


def test_opaque_objects_go_through_unopened(tmp_path):
    tree = {"args": argparse.Namespace(lr=0.1), "a": torch.ones(2)}
    with pytest.raises(UnsafePickleError, match=r"argparse\.Namespace"):
        read_torch_bytes(saved(tree), path="common.pt")
    file = read_torch_bytes(saved(tree), path="common.pt", opaque=True)
    path = tmp_path / "common.pt"
    written({"args": file.root["args"], "a": NewTensor("float32", (2,), file.read(file.root["a"]))}, path)
    again = torch.load(path, weights_only=False)
    assert again["args"] == tree["args"] and again["a"].tolist() == [1, 1]


def test_devices_do_not_matter():
    data = saved({"a": torch.ones(3)}).replace(b"X\x03\x00\x00\x00cpu", b"X\x03\x00\x00\x00xpu")
    assert read_torch_bytes(data, path="memory").root["a"].shape == (3,)


@pytest.mark.parametrize("offset", [0, 1, 4097])
@pytest.mark.parametrize("numel", [3, 100_000])
def test_embedded_files(tmp_path, offset, numel):
    data = saved({"a": torch.arange(float(numel))})
    path = tmp_path / "items.distcp"
    path.write_bytes(b"x" * offset + data + b"y" * 99)
    descriptor = os.open(path, os.O_RDONLY)
    for fd in (None, descriptor):
        file = read_torch_file(path, offset=offset, nbytes=len(data), fd=fd)
        tensor = file.root["a"]
        assert file.read(tensor) == content(torch.arange(float(numel)))
        start = tensor.record.offset
        assert path.read_bytes()[start : start + tensor.nbytes] == file.read(tensor)
        assert not list(check_crcs(file, bytearray(64)))
    os.close(descriptor)
    with pytest.raises(CorruptFileError, match=r"items\.distcp"):
        read_torch_file(path, offset=offset, nbytes=len(data) + 1)
    with pytest.raises(CorruptFileError, match="expected at byte"):
        read_torch_file(path, offset=offset, nbytes=len(data) + 100)


@pytest.mark.parametrize("alignment", [1, 16, 64, 4096])
def test_other_alignments(alignment):
    from torch.utils.serialization import config

    with config.patch({"save.storage_alignment": alignment}):
        data = saved({"a": torch.ones(3), "b": torch.ones(5)})
    file = read_torch_bytes(data, path="memory")
    assert file.read(file.root["b"]) == content(torch.ones(5))


def test_crcs_that_are_wrong_and_crcs_that_are_absent(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(1000), "b": torch.zeros(0)}, path)
    file = read_torch_file(path)
    data = bytearray(path.read_bytes())
    data[file.root["a"].record.offset + 2000] ^= 1
    path.write_bytes(data)
    assert [record.name for record in check_crcs(read_torch_file(path), memoryview(bytearray(512)))] == ["data/0"]
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(1000)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    file = read_torch_file(path)
    assert not file.has_crcs and not list(check_crcs(file, bytearray(512)))
    assert file.read(file.root["a"]) == content(torch.ones(1000))


def test_formats_that_are_not_read(tmp_path):
    path = tmp_path / "old.pt"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UnknownFormatError, match=r"old\.pt.*torch\.save it again"):
        read_torch_file(path)
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)
    with pytest.raises(CheckpointError, match=r"TorchScript|compressed"):
        read_torch_file(path)
    data = saved({"a": torch.ones(3)}).replace(b"little", b"bigbig")
    with pytest.raises(UnknownFormatError, match="byte order"):
        read_torch_bytes(data, path="x")
    with pytest.raises(UnknownFormatError, match="dtype uint16"):
        read_torch_bytes(saved(torch.zeros(3, dtype=torch.uint16)), path="x")


# --- writing ---------------------------------------------------------------------------------------------------------


def written(tree, path, payloads=()):
    layout = lay_out(tree, "archive")
    materialise(layout, path, payloads)
    assert path.stat().st_size == layout.nbytes
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    return layout


def offsets_torch_computes(path):
    """The positions that torch derives from its own layout rules, without reading local headers."""
    with FakeTensorMode():
        tree = torch.load(path, weights_only=True)
    return [tensor.untyped_storage()._checkpoint_offset for tensor in tree.values()]


def test_what_torch_reads_from_our_file(tmp_path):
    path = tmp_path / "out.pt"
    tree = OrderedDict(
        step=NewTensor("float32", (), struct.pack("<f", 3.0)),
        exp_avg=NewTensor("bfloat16", (2, 3), 0),
        empty=NewTensor("float32", (0, 4), 1),
        nothing=NewTensor("float32", (3, 0), b""),
        param=NewTensor("float32", (2,), b"\0" * 8, requires_grad=True),
        small=NewTensor("float8_e4m3fn", (4,), 1),
        flag=NewTensor("bool", (2,), b"\1\0"),
    )
    tree["group"] = {"betas": (0.9, 0.95), "dtype": Global("torch", "bfloat16"), "bytes": b"\0\xff", "params": [0, 1]}
    layout = written(tree, path, [bytes(range(12)), b"abcd"])
    assert layout.sizes.tolist() == [12, 4]
    file = read_torch_file(path)
    assert all(record.offset % 64 == 0 for record in file.records.values())
    assert not list(check_crcs(file, bytearray(64)))
    for mmap in (False, True):
        seen = torch.load(path, weights_only=True, mmap=mmap)
        assert_same(file.root, seen, file)
        assert seen["step"].item() == 3.0 and content(seen["exp_avg"]) == bytes(range(12))
        assert seen["empty"].shape == (0, 4) and seen["nothing"].shape == (3, 0)
        assert seen["param"].requires_grad and not seen["step"].requires_grad
        assert seen["group"]["betas"] == (0.9, 0.95) and seen["group"]["dtype"] is torch.bfloat16
        assert seen["flag"].tolist() == [True, False]
    assert lay_out(tree, "archive").text == layout.text


def test_byte_for_byte_torchs_layout(tmp_path):
    tensors = {f"t{i}": torch.arange(float(i * i % 50)) for i in range(40)}
    ours = tmp_path / "ours.pt"
    numbers = count()
    new = {n: NewTensor("float32", tuple(t.shape), next(numbers) if len(t) else 0) for n, t in tensors.items()}
    written(new, ours, [content(t) for t in tensors.values() if len(t)])
    theirs = saved(tensors)
    left, right = zipfile.ZipFile(ours), zipfile.ZipFile(io.BytesIO(theirs))
    assert [(i.filename, i.file_size, i.flag_bits) for i in left.infolist() if "data.pkl" not in i.filename] == [
        (i.filename, i.file_size, i.flag_bits) for i in right.infolist() if "data.pkl" not in i.filename
    ]
    records = read_torch_file(ours).records
    assert offsets_torch_computes(ours) == [records[f"data/{i}"].offset for i in range(40)]
    shift = records["data/0"].offset - read_torch_bytes(theirs, path="x").records["data/0"].offset
    assert shift % 64 == 0
    for record in read_torch_bytes(theirs, path="x").records.values():
        if record.name.startswith("data/"):
            assert records[record.name].offset == record.offset + shift


def test_torch_computes_the_offsets_we_use_beyond_four_gibibytes(tmp_path):
    path, theirs = tmp_path / "big.pt", tmp_path / "theirs.pt"
    sizes = [(1 << 30) + 7, 3, (1 << 30) - 1, 0, 5]
    tree = {str(i): NewTensor("float32", (size,), min(i, 3)) for i, size in enumerate(sizes)}
    materialise(lay_out(tree, "theirs"), path)
    file = read_torch_file(path)
    offsets = [tensor.record.offset for tensor in file.root.values()]
    assert offsets_torch_computes(path) == offsets
    assert [tensor.record.nbytes for tensor in file.root.values()] == [4 * size for size in sizes]
    seen = torch.load(path, weights_only=True, mmap=True)
    assert [len(tensor) for tensor in seen.values()] == sizes
    assert [info.file_size for info in zipfile.ZipFile(path).infolist()][4:9] == [4 * size for size in sizes]
    with torch.serialization.skip_data():
        torch.save({str(i): torch.empty(size) for i, size in enumerate(sizes)}, theirs)
    expected = read_torch_file(theirs)
    shift = expected.records["data/0"].offset - offsets[0]
    assert [expected.records[f"data/{i}"].offset - shift for i in range(5)] == offsets
    left, right = zipfile.ZipFile(path).infolist(), zipfile.ZipFile(theirs).infolist()
    assert [info.extra[:4] for info in left[4:9]] == [info.extra[:4] for info in right[4:9]]


def test_more_records_than_sixteen_bits_count(tmp_path):
    path = tmp_path / "many.pt"
    num_tensors = 66_000
    tree = [NewTensor("uint8", (1,), bytes((i % 256,))) for i in range(num_tensors)]
    assert not len(written(tree, path).sizes)
    file = read_torch_file(path)
    assert len(file.records) == num_tensors + 6 and file.read(file.root[65_999]) == bytes((65_999 % 256,))
    seen = torch.load(path, weights_only=True)
    assert len(seen) == num_tensors and seen[65_999].item() == 65_999 % 256


def test_one_tensor_in_two_places_is_one_storage(tmp_path):
    path = tmp_path / "shared.pt"
    tensor = NewTensor("float32", (2,), b"\0" * 8)
    written([tensor, tensor, NewTensor("float32", (2,), b"\0" * 8)], path)
    seen = torch.load(path, weights_only=True)
    assert seen[0].data_ptr() == seen[1].data_ptr() != seen[2].data_ptr()


def test_what_cannot_be_laid_out():
    for tree in (
        NewTensor("float32", (2,), b"\0" * 7),
        NewTensor("complex64", (2,), 0),
        NewTensor("float32", (-1,), 0),
        [object()],
        {1.5: range(3)},
        [NewTensor("int8", (1,), 1)],
        [NewTensor("int8", (1,), 0), NewTensor("int8", (1,), 0)],
    ):
        with pytest.raises(TargetError):
            lay_out(tree, "archive")
    for name in ("", "a/b", "..", "/", "a\nb", "a\\b"):
        with pytest.raises(TargetError):
            lay_out({}, name)


dtypes = st.sampled_from(sorted(ITEMSIZE))
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(dtypes, shapes, st.booleans())), st.text(st.characters(categories=["L", "N"]), min_size=1))
def test_round_trip(tmp_path_factory, specs, archive):
    path = tmp_path_factory.mktemp("round") / "a.pt"
    tree, contents, payloads = [], [], []
    for dtype, shape, literal in specs:
        nbytes = ITEMSIZE[dtype] * torch.Size(shape).numel()
        data = bytes(i % 2 for i in range(nbytes))
        contents.append(data)
        tree.append(NewTensor(dtype, shape, data if literal else len(payloads)))
        if data and not literal:
            payloads.append(data)
    materialise(lay_out({"all": tree}, archive), path, payloads)
    file = read_torch_file(path)
    assert not list(check_crcs(file, bytearray(16)))
    assert zipfile.ZipFile(path).testzip() is None
    seen = torch.load(path, weights_only=True, mmap=True)
    for number, (ours, theirs) in enumerate(zip(file.root["all"], seen["all"], strict=True)):
        assert file.read(ours) == content(theirs) == contents[number]
        assert ours.shape == tuple(theirs.shape)


def test_works_without_torch():
    script = textwrap.dedent(f"""
        import sys
        from nemo_optim_bridge.formats.torch_zip import read_torch_file
        assert read_torch_file({str(DATA / "nanotron_optimizer.pt")!r}).root
        assert "torch" not in sys.modules
    """)
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": root})


def test_nothing_that_was_read_is_left_to_the_cycle_collector():
    data = saved({"a": [torch.ones(2), torch.nn.Parameter(torch.ones(3))], "b": OrderedDict(c={1})})
    read_torch_bytes(data, path="x")
    gc.collect()
    gc.disable()
    try:
        read_torch_bytes(data, path="x")
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_nothing_that_was_laid_out_is_left_to_the_cycle_collector():
    tensor = NewTensor("float32", (2,), 0)
    tree = {"a": [tensor, 1, "text", OrderedDict(c={1})], "b": NewTensor("float32", (), b"1234")}
    lay_out(tree, "archive")
    gc.collect()
    gc.disable()
    try:
        lay_out(tree, "archive")
        assert gc.collect() == 0
    finally:
        gc.enable()
