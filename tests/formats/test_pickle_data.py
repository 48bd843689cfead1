"""Pickles as data: round trips, opaque objects, and what hostile pickles may not do."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import pickle
import struct
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_optim_bridge.errors import CorruptFileError, TargetError, UnsafePickleError
from nemo_optim_bridge.formats import pickle_data
from nemo_optim_bridge.formats.pickle_data import Alike, Call, Global, Opaque, dumps

DATA = Path(__file__).parent.parent / "data" / "torch_zip"


def loads(data, allow=None, **options):
    return pickle_data.loads(data, path="x.pkl", allow=allow or {}, **options)


def real(data):
    return pickle.loads(data)  # noqa: S301 - written by this test


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
keys = st.none() | st.booleans() | st.integers(-(1 << 31), 1 << 31) | st.text() | st.binary()
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
        | st.sets(keys)
    ),
    max_leaves=30,
)


def alike(left, right):
    """Equal, of the same types and in the same order."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(alike(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(alike, left, right))
    return left == right


@settings(deadline=None)
@given(trees)
def test_round_trip(tree):
    written = dumps(tree)
    assert alike(loads(written), tree)
    assert alike(real(written), tree)
    assert dumps(loads(written)) == written


@settings(deadline=None)
@given(trees, st.sampled_from([2, 3, 4, 5]))
def test_reads_what_python_writes(tree, protocol):
    data = pickle.dumps(tree, protocol)
    if protocol >= 4 and b"\x8f" in data:
        return  # EMPTY_SET is not read
    assert alike(loads(data), tree)


@pytest.mark.parametrize("pickler", [pickle.Pickler, pickle._Pickler])
def test_reads_long_containers(pickler):
    tree = {"list": list(range(70_000)), "dict": {i: str(i) for i in range(70_000)}, "b": b"x" * 300, "s": "s" * 300}
    for protocol in (2, 4):
        assert loads(pickle.dumps(tree, protocol)) == tree
    assert loads(dumps(tree)) == tree == real(dumps(tree))


def test_equal_trees_give_equal_bytes():
    name = "".join(["exp", "_avg"])
    assert dumps({"exp_avg": (1, 2.5), "b": ("exp_avg", (1, 2.5))}) == dumps({name: (1, 2.5), "b": (name, (1, 2.5))})


def test_shared_containers_stay_shared():
    shared = [1]
    for again in (loads(dumps([shared, shared])), real(dumps([shared, shared]))):
        assert again[0] is again[1]


def test_ordered_dict_attributes():
    tree = OrderedDict(a=1)
    tree._metadata = {"": {"version": 1}}
    again = loads(dumps(tree))
    assert again == tree and again._metadata == tree._metadata == real(dumps(tree))._metadata
    with pytest.raises(CorruptFileError, match="attribute"):
        loads(b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsNsb.")


def test_names_become_what_allow_says():
    class Chunk:
        def __setstate__(self, state):
            self.sizes = state["sizes"]

    data = pickle.dumps(argparse.Namespace(sizes=(1, 2)), 4)
    assert loads(data, {("argparse", "Namespace"): Chunk}).sizes == (1, 2)
    data = dumps(Call(Global("torch", "Size"), ((1, 2),)))
    assert loads(data, {("torch", "Size"): lambda sizes: ("size", *sizes)}) == ("size", 1, 2)
    marker = object()
    assert loads(dumps([Global("torch", "bfloat16")]), {("torch", "bfloat16"): marker}) == [marker]


def test_an_allowed_class_as_a_value_stays_a_name():
    (again,) = loads(dumps([Global("collections", "OrderedDict")]))
    assert again == Global("collections", "OrderedDict") and hash(again) == hash(Global("collections", "OrderedDict"))
    assert real(dumps([again])) == [OrderedDict]


def test_persistent_ids():
    class Outside:
        pass

    outside = Outside()
    data = dumps({"a": outside, "b": outside}, persistent_id=lambda value: ("id", 7) if value is outside else None)
    assert loads(data, persistent_load=lambda pid: pid) == {"a": ("id", 7), "b": ("id", 7)}
    with pytest.raises(CorruptFileError, match="outside"):
        loads(data)


@pytest.mark.parametrize("code", [b"K" + bytes([code]) for code in range(5)] + [b"C\x01\x01", b"C\x01\x02"])
def test_a_persistent_id_cannot_pass_for_an_opcode(code):
    data = b"\x80\x04](K\x07K\x08t" + code + b"\x87Q."
    assert type(loads(data, persistent_load=lambda pid: pid)) is tuple
    with pytest.raises(CorruptFileError, match="outside"):
        loads(data)
    with pytest.raises(UnsafePickleError, match="BYTEARRAY8"):
        loads(data.replace(code, b"\x96" + (1).to_bytes(8, "little") + b"\x02"), persistent_load=lambda pid: pid)


class Node:
    """Like an OmegaConf container: state with a reference back to the parent."""

    def __init__(self, parent=None):
        self.parent = parent
        self.children = [] if parent else [Node(self), Node(self)]


class Values(list):
    pass


@pytest.mark.parametrize("protocol", [2, 4])
def test_opaque_objects_come_back_as_themselves(protocol):
    values = Values([1, 2])
    values.note = "note"
    tree = {
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.95), classes=[int, OrderedDict]),
        "default": collections.defaultdict(dict, {"a": {}}),
        "time": datetime.timedelta(seconds=3),
        "node": Node(),
        "values": values,
        "path": __import__("pathlib").PurePosixPath("/a/b"),
        "count": collections.Counter("aab"),
    }
    data = pickle.dumps(tree, protocol)
    with pytest.raises(UnsafePickleError, match=r"names argparse\.Namespace"):
        loads(data)
    seen = loads(data, opaque=True)
    assert isinstance(seen["args"], Opaque)
    assert (seen["args"].module, seen["args"].qualname) == ("argparse", "Namespace")
    assert seen["args"].state["lr"] == 0.1
    assert seen["default"].pairs == [("a", {})]
    assert seen["values"].items == [1, 2]
    assert seen["node"].state["children"][0].state["parent"] is seen["node"]
    again = real(dumps(seen))
    assert vars(again["args"]) == vars(tree["args"])
    for name in ("default", "time", "values", "path", "count"):
        assert again[name] == tree[name] and type(again[name]) is type(tree[name])
    assert again["values"].note == "note"
    assert again["node"].children[1].parent is again["node"]
    assert dumps(loads(dumps(seen), opaque=True)) == dumps(seen)


def test_tuple_in_a_cycle():
    node = Opaque(Global("argparse", "Namespace"))
    pair = (node, 1)
    node.state = {"pair": pair}
    again = real(dumps(pair))
    assert again[0].pair is again


def test_real_metadata():
    data = (DATA / "megatron.metadata").read_bytes()
    seen = loads(data, opaque=True)
    assert seen.qualname == "Metadata"
    assert real(dumps(seen)) == real(data)


def test_what_cannot_be_written():
    for value in (object(), {1 << 3000}, 1 << 3000, Global("a\nb", "c"), {frozenset()}, range(3)):
        with pytest.raises(TargetError):
            dumps(value)
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TargetError, match="nested"):
        dumps(deep)


# --- hostile ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cos\nsystem\n(S'echo'\ntR.",
        b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00echotR.",
        b"\x80\x02cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04echo\x85R.",
        b"\x80\x02c__builtin__\ngetattr\n.",
        b"\x80\x02ccollections\nOrderedDict.fromkeys\n.",
        b"\x80\x02(ios\nsystem\n.",
        b"\x80\x02(cos\nsystem\no.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02\x83\x01\x00.",
        b"\x80\x02\x84\x01\x00\x00\x00.",
        b"\x80\x02P1\n.",
        b"\x80\x04\x8f.",
        b"\x80\x02)2.",
        b"\x80\x02\x8b\x00\x00\x00\x7f.",
        b"\x80\x05\x96\x00\x00\x00\x00\x00\x00\x00\x7f.",
        b"\x80\x05\x97.",
    ],
)  # fmt: skip
def test_code_and_rare_opcodes_are_refused(data):
    with pytest.raises(UnsafePickleError, match=r"x\.pkl"):
        loads(data)


def test_an_unsafe_name_is_shown_without_control_characters():
    with pytest.raises(UnsafePickleError) as caught:
        loads(b"\x80\x02cos\x1b[2J\nsystem\n.")
    assert "\x1b" not in str(caught.value) and "system" in str(caught.value)


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value


OD = b"ccollections\nOrderedDict\n"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"N", b"N0.", b"NN.N", b"(.", b"t.", b"\x85.", b"K", b"X\xff\xff\xff\xffa.", b"X\x05\x00\x00\x00abc.",
        b"\x8d" + b"\xff" * 8 + b".", b"\x8a\xff\x01.", b"B\xff\xff\xff\x7f.", b"h\x07.", b"j\xff\xff\xff\xff.",
        b"Nr\xff\xff\xff\xff.", b"Nr\xff\xff\xff\x7f.", b"N\xff.", b"\x95" + b"\xff" * 8 + b"N.",
        b"NR.", b")R.", b"N)R.", b"K\x01)R.", b"}(K\x01K\x02tR.", OD + b"NR.", OD + b"(K\x01tR.",
        b"NNb.", b"]}b.", b"}}b.", OD + b"}b.", OD + b")RK\x01b.", OD + b")R}K\x01K\x02sb.",
        OD + b"}" + text(b"__code__") + b"Nsb.", OD + b")R}" + text(b"__class__") + b"Nsb.",
        OD + b")RN}" + text(b"__class__") + b"Ns\x86b.",
        b"Na.", b"}Na.", OD + b"Na.", b"(K\x01e.", b"}(e(K\x01e.", b"](K\x01u.", b"]K\x00Ns.", b"}(Nu.", b"}]Ns.",
        b"}}Ns.", b"})\x85\x85\x85\x85Ns.", b"}\x8a\x10" + b"\x01" * 16 + b"Ns.", b"NQ.", b"cno newline",
        b"c\n\n.", b"c" + b"a" * 300 + b"\nb\n.", b"\x80\x09N.", b"K\x00\x87Q.", b"NNK\x00\x87Q.", b"NNK\x63\x87Q.",
        b"X\x01\x00\x00\x00\xff.", b"\x8c\x01\xff.", b"NN\x93.", b"]\x94h\x00a.", b"}\x94(K\x01h\x00u.",
        b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00zip\x86R.", b"c_codecs\nencode\nNN\x86R.",
        b"cbuiltins\nset\n]]a\x85R.", b"cbuiltins\nset\nN\x85R.", b"cbuiltins\nbytes\nK\x05\x85R.",
    ],
)  # fmt: skip
def test_malformed_pickles(body):
    with pytest.raises(CorruptFileError, match=r"x\.pkl"):
        loads(b"\x80\x04" + body)


def test_every_truncation_is_corrupt():
    data = dumps({"a": [1, 2.5, "text", (None, True, b"bytes")], "b": OrderedDict(c=1 << 70), "d": {1, 2}})
    for stop in range(len(data)):
        with pytest.raises(CorruptFileError):
            loads(data[:stop])


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=60))
def test_noise(noise):
    for data in (noise, b"\x80\x02" + noise + b"."):
        for opaque in (False, True):
            with contextlib.suppress(CorruptFileError):
                loads(data, opaque=opaque, persistent_load=lambda pid: pid)


OPCODES = [bytes([code]) for code in b"(01N)]}t\x88\x89\x85\x86\x87\x94\x93Rbsu\x81Qae"] + [
    b"K\x00", b"K\x01", b"h\x00", b"h\x01", b"q\x00", b"q\x01", OD, b"ca\nb\n", b"cok\nok\n", text(b"a"), b"\x8c\x01b",
]  # fmt: skip


@settings(max_examples=2000, deadline=None)
@given(st.lists(st.sampled_from(OPCODES), max_size=25), st.booleans())
def test_any_sequence_of_allowed_opcodes(sequence, opaque):
    data = b"\x80\x04" + b"".join(sequence) + b"."
    before = dict(vars(OrderedDict))
    with contextlib.suppress(CorruptFileError):
        loads(data, {("ok", "ok"): lambda *args: args}, opaque=opaque, persistent_load=lambda pid: pid)
    assert dict(vars(OrderedDict)) == before


@settings(max_examples=300, deadline=None)
@given(trees, st.data())
def test_flipped_bytes(tree, data):
    written = bytearray(dumps(tree))
    position = data.draw(st.integers(0, len(written) - 1))
    written[position] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptFileError):
        loads(bytes(written), opaque=True)


def bombs():
    depth = 200_000
    doubling = b")q\x00" + b"".join(b"h\x00h\x00\x86q\x00" for _ in range(100))
    listed = b"]q\x00(NNe" + b"".join(b"0](h\x00h\x00eq\x00" for _ in range(100))
    nested_opaque = b"ca\nb\nq\x01)R" + b"q\x00h\x01)Rh\x00b" * depth
    return {
        "tuple as key, doubling": b"}" + doubling + b"Ns",
        "tuple as key, deep": b"})" + b"\x85" * depth + b"Ns",
        "tuple in a set": b"cbuiltins\nset\n](" + doubling + b"e\x85R",
        "billion laughs, tuples": doubling,
        "billion laughs, lists": listed,
        "deep tuples": b")" + b"\x85" * depth,
        "deep lists": b"]" * depth + b"a" * (depth - 1),
        "deep dicts": b"}K\x00" * depth + b"N" + b"s" * depth,
        "marks": b"(" * depth,
        "copies of a long string": b"c_codecs\nencode\nq\x00X\xa0\x86\x01\x00" + b"a" * 100_000 + b"q\x01"
        + b"X\x06\x00\x00\x00latin1q\x02" + b"0h\x00h\x01h\x02\x86R" * 50_000,
        "copies of a set": b"cbuiltins\nset\nq\x00](" + b"K\x01" * 50_000 + b"eq\x01" + b"0h\x00h\x01\x85R" * 50_000,
        "attributes": OD + b")Rq\x00}(" + b"".join(text(b"%06d" % i) + b"N" for i in range(20_000)) + b"uq\x01"
        + b"0h\x00h\x01b" * 20_000,
        "many arguments": b"cok\nok\nq\x00(" + b"N" * 50_000 + b"tq\x01" + b"0h\x00h\x01R" * 50_000,
        "memo": b"N" + b"".join(b"r" + struct.pack("<I", 1 << bit) for bit in range(32)),
        "colliding keys": b"}(" + b"".join(
            b"\x8a\x0c" + (i * (2**61 - 1)).to_bytes(12, "little") + b"N" for i in range(1, 50_000)) + b"u",
        "opaque chain": nested_opaque,
    }  # fmt: skip


@pytest.mark.parametrize("name", bombs())
@pytest.mark.parametrize("opaque", [False, True])
def test_bombs(name, opaque):
    data = b"\x80\x04" + bombs()[name] + b"."
    start = time.process_time()
    tracemalloc.start()
    try:
        loads(data, {("ok", "ok"): lambda *args: None}, opaque=opaque)
    except CorruptFileError:
        pass
    else:
        assert opaque and name == "opaque chain"
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100e6 and time.process_time() - start < 10


def test_nothing_is_imported(tmp_path):
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    script = textwrap.dedent("""
        import sys
        from nemo_optim_bridge.errors import UnsafePickleError
        from nemo_optim_bridge.formats import pickle_data, torch_zip
        assert "torch" not in sys.modules
        data = pickle_data.dumps([pickle_data.Call(pickle_data.Global("trap", "x"), ())])
        pickle_data.loads(data, path="x", allow={}, opaque=True)
        try:
            pickle_data.loads(data, path="x", allow={})
        except UnsafePickleError as error:
            assert "trap.x" in str(error)
        assert "trap" not in sys.modules
    """)
    root = str(Path(pickle_data.__file__).parents[3])
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": f"{root}:{tmp_path}"})


def test_what_is_alike_is_written_as_if_each_were_spelled_out():
    class Leaf:
        def __init__(self, form, key):
            self.form, self.key = form, key

    def small(key):
        return Call(Global("m", "f"), ("long name", key, 7, (1, 2)))

    def large(key):
        return Call(Global("m", "g"), (key, Call(Global("m", "f"), ("long name",))))

    keys = [str(number) for number in (*range(300), *range(9_990, 10_020))]
    leaves = [Leaf(form, key) for key in keys for form in (small, large)]
    tree = {"leaves": leaves, "again": leaves[:5], "10001": "long name", "names": keys}
    alike = dumps(tree, replace=lambda leaf: Alike(leaf.form, leaf.key))
    assert alike == dumps(tree, replace=lambda leaf: leaf.form(leaf.key))
