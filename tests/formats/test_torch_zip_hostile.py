"""torch files that are damaged or made to deceive: an error that names the file, and nothing else happens."""

from __future__ import annotations

import contextlib
import io
import struct
import time
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_optim_bridge.errors import CheckpointError, CorruptFileError, UnsafePickleError
from nemo_optim_bridge.formats.pickle_data import Call, Global, dumps
from nemo_optim_bridge.formats.torch_zip import NewTensor, check_crcs, lay_out, read_torch_bytes, read_torch_file
from tests.formats.materialise import materialise


def read(data):
    return read_torch_bytes(data, path="bad.pt")


def genuine():
    file = io.BytesIO()
    torch.save({"a": torch.arange(4.0), "b": torch.zeros(0), "c": torch.ones(2, dtype=torch.bfloat16)}, file)
    return file.getvalue()


GENUINE = genuine()


class Reference:
    """A storage, written as torch's persistent id."""

    def __init__(self, kind="FloatStorage", key="0", numel=4, device="cpu", pid=None):
        self.pid = pid or ("storage", Global("torch", kind), key, device, numel)


def tensor(storage=None, offset=0, size=(4,), stride=(1,), *rest, function="_rebuild_tensor_v2"):
    rest = rest or (False, Call(Global("collections", "OrderedDict")))
    return Call(Global("torch._utils", function), (storage or Reference(), offset, size, stride, *rest))


def archive(tree=None, *, pickled=None, members=None, extra=(), compression=zipfile.ZIP_STORED):
    """Return a zip archive with a pickle of ``tree`` and one storage of 16 bytes."""
    if pickled is None:
        pickled = dumps(tree, persistent_id=lambda value: value.pid if isinstance(value, Reference) else None)
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", compression) as writer:
        warnings.simplefilter("ignore")
        for name, data in members or [("a/data.pkl", pickled), ("a/data/0", bytes(16)), ("a/version", b"3\n"), *extra]:
            writer.writestr(name, data)
    return file.getvalue()


def test_the_helper_makes_files_that_are_read():
    file = read(archive([tensor()]))
    assert file.read(file.root[0]) == bytes(16)


# --- damage ----------------------------------------------------------------------------------------------------------


def test_every_truncation(tmp_path):
    path = tmp_path / "bad.pt"
    for stop in range(len(GENUINE)):
        with pytest.raises(CorruptFileError, match=r"bad\.pt"):
            read(GENUINE[:stop])
        if stop % 7 == 0:
            path.write_bytes(GENUINE[:stop])
            with pytest.raises(CorruptFileError, match=r"bad\.pt"):
                read_torch_file(path)


@pytest.mark.parametrize(
    "data", [b"", b"x", b"PK", b"PK\3\4", b"PK\5\6" + bytes(18), bytes(100), GENUINE + b"x", b"x" + GENUINE]
)
def test_what_is_no_archive(data):
    with pytest.raises(CorruptFileError, match=r"bad\.pt"):
        read(data)


def test_a_file_of_many_megabytes_loses_its_end(tmp_path):
    path = tmp_path / "bad.pt"
    materialise(lay_out([NewTensor("float32", (1 << 20,), 0)], "a"), path)
    read_torch_file(path)
    data = path.read_bytes()
    for cut in (1, 22, 42, 98, 99, 200, 1000, 1 << 20):
        path.write_bytes(data[:-cut])
        with pytest.raises(CorruptFileError, match=r"bad\.pt"):
            read_torch_file(path)


def test_a_file_that_shrinks_after_it_was_indexed(tmp_path):
    path = tmp_path / "bad.pt"
    path.write_bytes(GENUINE)
    file = read_torch_file(path)
    path.write_bytes(GENUINE[: file.root["a"].record.offset + 3])
    with pytest.raises(CorruptFileError, match="is truncated"):
        file.read(file.root["a"])
    with pytest.raises(CorruptFileError, match="ends within"):
        list(check_crcs(file, bytearray(100)))


def test_every_flipped_byte():
    for position in range(len(GENUINE)):
        for flip in (0x01, 0x80, 0xFF):
            data = bytearray(GENUINE)
            data[position] ^= flip
            with contextlib.suppress(CheckpointError):
                file = read(bytes(data))
                list(check_crcs(file, bytearray(64)))


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GENUINE) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_several_flipped_bytes(flips):
    data = bytearray(GENUINE)
    for position, value in flips:
        data[position] = value
    with contextlib.suppress(CheckpointError):
        read(bytes(data))


# --- the directory ---------------------------------------------------------------------------------------------------


def patched(data, signature, index, offset, fmt, *values):
    """Change fields ``offset`` bytes after the ``index``-th occurrence of a zip signature."""
    position = -1
    for _ in range(index + 1):
        position = data.index(signature, position + 1)
    changed = bytearray(data)
    struct.pack_into(fmt, changed, position + offset, *values)
    return bytes(changed)


LOCAL, CENTRAL, END, END64, LOCATOR = b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7"


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (archive([tensor()], compression=zipfile.ZIP_DEFLATED), "compressed"),
        (archive(members=[("a/data.pkl", bytes(10_000_000))], compression=zipfile.ZIP_DEFLATED), "compressed"),
        (patched(GENUINE, CENTRAL, 0, 8, "<H", 1), "encrypted"),
        (patched(GENUINE, CENTRAL, 0, 8, "<H", 0x2008), "encrypted"),
        (patched(GENUINE, LOCAL, 0, 8, "<H", 8), "contradicts"),
        (patched(GENUINE, LOCAL, 0, 6, "<H", 1), "contradicts"),
        (patched(GENUINE, CENTRAL, 4, 20, "<II", 1 << 30, 1 << 30), "reaches past"),
        (patched(GENUINE, CENTRAL, 4, 20, "<I", 15), "two sizes"),
        (patched(GENUINE, CENTRAL, 4, 24, "<I", 17), "two sizes"),
        (patched(GENUINE, CENTRAL, 4, 20, "<II", 200, 200), "overlap"),
        (patched(GENUINE, CENTRAL, 4, 20, "<II", 0xFFFFFFFF, 0xFFFFFFFF), "zip64"),
        (patched(GENUINE, CENTRAL, 4, 42, "<I", 0), "overlap|contradicts"),
        (patched(GENUINE, CENTRAL, 4, 42, "<I", 0xFFFFFFFE), "overlap"),
        (patched(GENUINE, CENTRAL, 4, 42, "<I", 3), "overlap|contradicts"),
        (patched(GENUINE, CENTRAL, 4, 28, "<H", 0xFFFF), "malformed directory"),
        (patched(GENUINE, CENTRAL, 4, 30, "<H", 0xFFFF), "malformed directory"),
        (patched(GENUINE, CENTRAL, 4, 32, "<H", 5), "malformed directory"),
        (patched(GENUINE, CENTRAL, 4, 38, "<I", 0x10), "folder"),
        (patched(GENUINE, LOCAL, 4, 26, "<H", 3), "reaches past|contradicts"),
        (patched(GENUINE, LOCAL, 4, 28, "<H", 0xFFFF), "reaches past"),
        (patched(GENUINE, LOCAL, 4, 28, "<H", 200), "overlap"),
        (patched(GENUINE, LOCAL, 4, 14, "<I", 12345), "contradicts"),
        (patched(GENUINE, LOCAL, 4, 18, "<II", 4, 4), "contradicts"),
        (patched(GENUINE, END, 0, 8, "<HH", 8, 8), "disagree"),
        (patched(GENUINE, END, 0, 20, "<H", 1), "does not end"),
        (patched(GENUINE, END64, 0, 24, "<QQ", 1 << 60, 1 << 60), "disagree"),
        (
            patched(patched(GENUINE, END, 0, 8, "<HH", 0xFFFF, 0xFFFF), END64, 0, 24, "<QQ", 1 << 60, 1 << 60),
            "directory",
        ),
        (patched(GENUINE, LOCATOR, 0, 8, "<Q", 0), "locator"),
        (patched(GENUINE, LOCATOR, 0, 8, "<Q", 1 << 63), "locator"),
        (patched(archive([tensor()]), END, 0, 8, "<HH", 2, 2), "more directory entries"),
        (patched(archive([tensor()]), END, 0, 8, "<HH", 4, 4), "malformed|fewer|directory"),
        (patched(archive([tensor()]), END, 0, 8, "<HH", 60000, 60000), "should"),
        (patched(archive([tensor()]), END, 0, 12, "<I", 1), "should"),
        (patched(archive([tensor()]), END, 0, 16, "<I", 1), "should"),
    ],
)  # fmt: skip
def test_directories_that_lie(data, match):
    with pytest.raises(CorruptFileError, match=match) as caught:
        read(data)
    assert "bad.pt" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["a/../data/1", "../data/1", "/data/1", "a//data/1", "a/./b", "a/data/", "a\\data", "C:/data/1", "a/\x01b",
     "b/data/1", "data/1", "a", "a/x\ny"],
)  # fmt: skip
def test_member_names_that_are_not_plain(name):
    with pytest.raises(CorruptFileError, match="member"):
        read(archive([tensor()], extra=[(name, b"")]))


def test_two_members_of_one_name():
    with pytest.raises(CorruptFileError, match="same name"):
        read(archive([tensor()], extra=[("a/data/0", bytes(16))]))


def test_two_names_for_the_same_bytes():
    data = archive([tensor()], extra=[("a/data/1", bytes(16))])
    first = data.index(LOCAL, data.index(LOCAL) + 1)
    shared = patched(data, CENTRAL, 3, 42, "<I", first)
    with pytest.raises(CorruptFileError, match="overlap"):
        read(shared)


def test_many_empty_members_cost_what_they_weigh():
    pickled = dumps({})
    data = archive(members=[("a/data.pkl", pickled), *((f"a/{i}", b"") for i in range(50_000))])
    start = time.process_time()
    tracemalloc.start()
    read(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - start < 10 and peak < 20 * len(data)


# --- the tree --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        Call(Global("os", "system"), ("echo",)),
        Call(Global("builtins", "eval"), ("1",)),
        Call(Global("builtins", "exec"), ("1",)),
        Call(Global("torch", "load"), ("x",)),
        Call(Global("torch.hub", "load"), ("x",)),
        Call(Global("torch._utils", "_import_dotted_name"), ("os",)),
        Call(Global("torch", "Size.__new__"), ()),
        Call(Global("nemo_optim_bridge.formats.pickle_data", "loads"), ()),
    ],
)
def test_functions_are_refused_by_name(call):
    with pytest.raises(UnsafePickleError, match=str(call.function)) as caught:
        read(archive([call]))
    assert "bad.pt" in str(caught.value)


ORDERED = Call(Global("collections", "OrderedDict"))


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        (tensor(Reference(numel=5)), "too few"),
        (tensor(Reference(numel=1 << 62)), "too few"),
        (tensor(Reference("DoubleStorage")), "too few"),
        (tensor(Reference(numel=-1)), "malformed storage"),
        (tensor(Reference(numel=True)), "malformed storage"),
        (tensor(Reference(numel=4.0)), "malformed storage"),
        (tensor(Reference(key="1")), "lacks the record"),
        (tensor(Reference(key="../data.pkl")), "lacks the record"),
        (tensor(Reference(key=0)), "malformed storage"),
        (tensor(Reference("bfloat16")), "malformed storage"),
        (tensor(Reference("NoStorage")), "not on the allow-list"),
        (tensor(Reference(pid=("module", 1, 2, 3, 4))), "not a storage"),
        (tensor(Reference(pid=("storage",))), "not a storage"),
        (tensor(Reference(pid=7)), "not a storage"),
        (tensor(Reference(pid=[1])), "not a storage"),
        ([tensor(), tensor(Reference("IntStorage"))], "two ways"),
        ([tensor(), tensor(Reference(numel=3))], "two ways"),
        (tensor(None, 1), "reaches past"),
        (tensor(None, 1 << 70), "reaches past"),
        (tensor(None, -1), "malformed offset"),
        (tensor(None, 0, (5,)), "reaches past"),
        (tensor(None, 0, (2, 2), (3, 1)), "reaches past"),
        (tensor(None, 0, (2, 2), (1 << 62, 1)), "reaches past"),
        (tensor(None, 0, (2,), (-1,)), "malformed sizes"),
        (tensor(None, 0, (-2,), (1,)), "malformed sizes"),
        (tensor(None, 0, (2, 2), (1,)), "malformed sizes"),
        (tensor(None, 0, (2.0,), (1,)), "malformed sizes"),
        (tensor(None, 0, (True,), (1,)), "malformed sizes"),
        (tensor(None, 0, [2], [1]), "malformed sizes"),
        (tensor(None, 0, (1,) * 65, (1,) * 65), "malformed sizes"),
        (tensor(None, 0, (4,), (1,), False, ORDERED, {"conj": True}), "conjugate"),
        (tensor(None, 0, (4,), (1,), 1, ORDERED), "storage"),
        (tensor("storage"), "without a storage"),
        (Call(Global("torch._utils", "_rebuild_tensor_v2"), ()), r"bad\.pt"),
        (Call(Global("torch._utils", "_rebuild_tensor_v2"), (None,) * 65), "65 arguments"),
        (Call(Global("torch._utils", "_rebuild_parameter"), ({}, True, ORDERED)), "not a tensor"),
        (Call(Global("torch", "Size"), (((1, 2), 3),)), r"bad\.pt"),
        (Call(Global("torch", "Size"), ((1,) * 65,)), r"bad\.pt"),
        (Call(Global("torch", "Size"), ("12",)), r"bad\.pt"),
        (
            tensor(None, 0, (2,), (1,), False, ORDERED, Global("torch", "float64"), function="_rebuild_tensor_v3"),
            None,
        ),
        (
            tensor(None, 0, (3,), (1,), False, ORDERED, Global("torch", "float64"), function="_rebuild_tensor_v3"),
            "reaches past",
        ),
        (
            tensor(None, 0, (3,), (1,), False, ORDERED, Global("torch", "device"), function="_rebuild_tensor_v3"),
            "dtype device",
        ),
        (
            Call(
                Global("torch._tensor", "_rebuild_from_type_v2"),
                (ORDERED.function, Global("torch", "Tensor"), (), {}),
            ),
            "subclass",
        ),
        (Call(Global("torch._tensor", "_rebuild_from_type_v2"), (Global("torch", "Size"), None, (), {})), "subclass"),
    ],
)  # fmt: skip
def test_tensors_that_lie(tree, match):
    if match is None:
        read(archive(tree))
        return
    with pytest.raises(CheckpointError, match=match) as caught:
        read(archive(tree))
    assert "bad.pt" in str(caught.value)


def test_long_shapes_are_not_copied_over_and_over():
    long = b"(" + b"K\x01" * 100_000 + b"t"
    pickled = b"\x80\x02ctorch\nSize\nq\x00" + long + b"q\x01" + b"0h\x00h\x01\x85R" * 10_000 + b"."
    with pytest.raises(CorruptFileError, match=r"bad\.pt"):
        read(archive(pickled=pickled))


def test_a_file_without_a_pickle():
    with pytest.raises(CorruptFileError, match=r"no data\.pkl"):
        read(archive(members=[("a/data/0", b"")]))
    with pytest.raises(CorruptFileError, match=r"bad\.pt"):
        read(archive(pickled=b""))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40))
def test_noise_as_the_pickle(noise):
    for pickled in (noise, b"\x80\x02" + noise + b"."):
        with contextlib.suppress(CorruptFileError):
            read(archive(pickled=pickled))


def test_nothing_is_written_or_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsafePickleError):
        read(archive([Call(Global("os", "system"), ("touch trap",))]))
    assert not list(Path().iterdir())
