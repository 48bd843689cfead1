"""Ways to damage a checkpoint. Each takes the folder and a random generator, and says in words what it did."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

Mutator = Callable[[Path, random.Random], str]
MUTATORS: dict[str, Mutator] = {}
CANARY = "canary-was-here"

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 64, 127, 10**9, 2**53 + 1, 10**18, 10**30, 1.5, -0.0, float("nan"),
    float("inf"), "", "x", "2", "-1", "1e9", "../../x", "\0", "é", [], [1], ["a"], {}, {"a": 1}, [[[[]]]], "9" * 400,
)  # fmt: skip
ODD_NAMES = (
    "../../../tmp/x", "/etc/passwd", "model/../../x", "", ".", "..", "a\nb", "a\0b", "a" * 300, "modèle.x.weight",
    "model.decoder.0", "model.decoder.99.pp_block.input_layernorm.weight", "model.lm_head.pp_block.weight", "C:\\x",
    "model.decoder.00.pp_block.input_layernorm.weight", "con.weight", "model..weight", "-rf.weight",
)  # fmt: skip


def mutator(function: Mutator) -> Mutator:
    """Enter a function into MUTATORS under its name."""
    MUTATORS[function.__name__] = function
    return function


def files(root: Path, suffix: str = "") -> list[Path]:
    """Return the regular files below a folder, in a fixed order."""
    return sorted(path for path in root.rglob("*") if path.is_file() and path.name.endswith(suffix))


def short(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def rewrite(path: Path, data: bytes) -> None:
    """Replace a file by a new one: the old one may be a hard link to the fixture."""
    path.unlink()
    path.write_bytes(data)


# --- whole files ----------------------------------------------------------------------------------------------------


@mutator
def truncated(root: Path, rng: random.Random) -> str:
    path = rng.choice(files(root))
    data = path.read_bytes()
    keep = rng.choice([0, 1, 8, max(0, len(data) - 1), rng.randrange(len(data) + 1)])
    rewrite(path, data[:keep])
    return f"{short(path, root)} cut to {keep} of {len(data)} bytes"


@mutator
def extended(root: Path, rng: random.Random) -> str:
    path = rng.choice(files(root))
    data = path.read_bytes()
    tail = rng.choice([b"\0", b"\n", b" " * 64, rng.randbytes(rng.randrange(1, 200)), data[: rng.randrange(1, 4000)]])
    rewrite(path, data + tail)
    return f"{short(path, root)} with {len(tail)} more bytes"


@mutator
def bits_flipped(root: Path, rng: random.Random) -> str:
    path = rng.choice(files(root))
    data = bytearray(path.read_bytes())
    places = [rng.randrange(len(data)) for _ in range(rng.choice([1, 1, 1, 2, 8]))]
    for place in places:
        data[place] ^= 1 << rng.randrange(8)
    rewrite(path, bytes(data))
    return f"{short(path, root)} with bits flipped at {places}"


@mutator
def bits_flipped_at_the_ends(root: Path, rng: random.Random) -> str:
    """Headers, directories and pickles lie at the ends."""
    path = rng.choice(files(root))
    data = bytearray(path.read_bytes())
    reach = min(len(data), 4000)
    place = rng.randrange(reach) if rng.random() < 0.5 else len(data) - 1 - rng.randrange(reach)
    data[place] ^= 1 << rng.randrange(8)
    rewrite(path, bytes(data))
    return f"{short(path, root)} with a bit flipped at {place}"


@mutator
def overwritten(root: Path, rng: random.Random) -> str:
    path = rng.choice(files(root))
    data = bytearray(path.read_bytes())
    start, length = rng.randrange(len(data)), rng.choice([1, 4, 16, 512, 4096])
    length = min(length, len(data) - start)
    data[start : start + length] = rng.choice([bytes(length), b"\xff" * length, rng.randbytes(length)])
    rewrite(path, bytes(data))
    return f"{short(path, root)} with {length} bytes overwritten at {start}"


@mutator
def swapped(root: Path, rng: random.Random) -> str:
    one = rng.choice(files(root))
    alike = [path for path in files(root) if path.suffix == one.suffix and path != one]
    if not alike or rng.random() < 0.1:
        alike = [path for path in files(root) if path != one]
    other = rng.choice(alike)
    a, b = one.read_bytes(), other.read_bytes()
    rewrite(one, b)
    rewrite(other, a)
    return f"{short(one, root)} and {short(other, root)} swapped"


@mutator
def renamed(root: Path, rng: random.Random) -> str:
    path = rng.choice(files(root))
    digits = [i for i, char in enumerate(path.name) if char.isdigit()]
    name = path.name
    if digits and rng.random() < 0.7:
        i = rng.choice(digits)
        name = name[:i] + rng.choice("0123456789") + rng.choice(["", "", "0"]) + name[i + 1 :]
    else:
        name = rng.choice([name.upper(), name + ".bak", "." + name, name.replace("_", "-"), name[1:], "x" + name, "é"])
    target = path.with_name(name) if rng.random() < 0.8 else rng.choice(files(root)).parent / name
    path.rename(target)
    return f"{short(path, root)} renamed to {short(target, root)}"


@mutator
def duplicated(root: Path, rng: random.Random) -> str:
    path = rng.choice(files(root))
    name = path.name
    digits = [i for i, char in enumerate(name) if char.isdigit()]
    for i in digits if rng.random() < 0.7 else []:
        if rng.random() < 0.4:
            name = name[:i] + rng.choice("0123456789") + name[i + 1 :]
    if name == path.name:
        name = rng.choice(
            ["copy of " + name, name + "~", "0" + name, name.replace("_exp-0-of-1", ""), name.replace("model_", "", 1)]
        )
    if name == path.name:
        name += ".1"
    target = path.with_name(name)
    data = path.read_bytes()
    target.unlink(missing_ok=True)
    target.write_bytes(data)
    return f"{short(path, root)} also as {name}"


@mutator
def deleted(root: Path, rng: random.Random) -> str:
    folders = sorted(path for path in root.rglob("*") if path.is_dir())
    if folders and rng.random() < 0.15:
        folder = rng.choice(folders)
        shutil.rmtree(folder)
        return f"{short(folder, root)}/ deleted"
    path = rng.choice(files(root))
    path.unlink()
    return f"{short(path, root)} deleted"


@mutator
def not_a_file(root: Path, rng: random.Random) -> str:
    path = rng.choice(files(root))
    path.unlink()
    kind = rng.choice(["folder", "pipe", "loop", "dangling", "zeros", "random", "null", "folder link"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        link = {
            "loop": path.name, "dangling": "../nowhere", "zeros": "/dev/zero", "random": "/dev/urandom",
            "null": "/dev/null", "folder link": "..",
        }  # fmt: skip
        path.symlink_to(link[kind])
    return f"{short(path, root)} is a {kind}"


@mutator
def sparse_and_huge(root: Path, rng: random.Random) -> str:
    path = rng.choice(files(root))
    data = path.read_bytes()
    size = rng.choice([1 << 27, 1 << 33, 1 << 40])
    rewrite(path, data)
    os.truncate(path, size)
    if rng.random() < 0.5:
        with path.open("r+b") as file:
            file.seek(size - min(len(data), 2000))
            file.write(data[-2000:])
    return f"{short(path, root)} of {size} bytes"


@mutator
def strange_files(root: Path, rng: random.Random) -> str:
    """Only ignored files: the result must not change."""
    folder = rng.choice(sorted({path.parent for path in files(root)}))
    name = rng.choice(["notes.txt", "optimizer.pt.tmp", ".nfs0001", "model_weight.safetensors.index", "x" * 200, "a b"])
    path = folder / name
    if rng.random() < 0.2:
        os.mkfifo(path)
    else:
        path.write_bytes(rng.randbytes(50))
    return f"{short(path, root)} added"


# --- documents ------------------------------------------------------------------------------------------------------


def _paths(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found += _paths(value, (*at, key))
    return found


def edit_tree(tree: Any, rng: random.Random) -> str:
    """Change one place of nested dicts and lists."""
    places = _paths(tree)
    if not places:
        return "left as it was"
    place = rng.choice(places)
    parent = tree
    for key in place[:-1]:
        parent = parent[key]
    action = rng.choice(["odd", "odd", "odd", "near", "delete", "insert", "swap", "nest"])
    value = parent[place[-1]]
    where = ".".join(map(str, place))[:120]
    if action == "near" and isinstance(value, int | float) and not isinstance(value, bool):
        parent[place[-1]] = rng.choice([value + 1, value - 1, value * 2, -value, float(value), str(value)])
    elif action == "delete":
        del parent[place[-1]]
    elif action == "insert" and isinstance(parent, dict):
        parent[rng.choice(["x", "cp", "zero_stage", "expert_parallel_size", *ODD_NAMES])] = rng.choice(ODD_VALUES)
    elif action == "insert":
        parent.insert(place[-1], rng.choice([*ODD_VALUES, value]))
    elif action == "swap" and len(parent) > 1:
        other = rng.choice([key for key in (parent if isinstance(parent, dict) else range(len(parent)))])
        parent[place[-1]], parent[other] = parent[other], value
    elif action == "nest":
        parent[place[-1]] = rng.choice([[value], {"x": value}, [value, value]])
    else:
        parent[place[-1]] = rng.choice(ODD_VALUES)
    return f"{where} {action}"


@mutator
def json_edited(root: Path, rng: random.Random) -> str:
    path = rng.choice(files(root, ".json"))
    tree = json.loads(path.read_bytes())
    done = [edit_tree(tree, rng) for _ in range(rng.choice([1, 1, 2]))]
    rewrite(path, json.dumps(tree).encode())
    return f"{short(path, root)}: {done}"


@mutator
def yaml_edited(root: Path, rng: random.Random) -> str:
    path = root / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    if rng.random() < 0.6:
        section = rng.choice(
            [key for key in ("parallelism", "optimizer", "model", "tokens", "data_stages") if key in tree]
        )
        inner = tree[section]
        done = edit_tree(inner, rng) if isinstance(inner, dict | list) else "left as it was"
    else:
        done = edit_tree(tree, rng)
    rewrite(path, yaml.safe_dump(tree).encode())
    return f"config.yaml: {done}"


@mutator
def hostile_documents(root: Path, rng: random.Random) -> str:
    path = rng.choice([*files(root, ".json"), root / "config.yaml"])
    text = path.read_text()
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{name}: &{name} [{','.join(f'*{before}' for _ in range(9))}]\n"
        for before, name in zip("abcdefghijkl", "bcdefghijklm", strict=True)
    )
    content = {
        "a YAML bomb": text + "\n" + bomb,
        "a YAML tag": text + f"\nz: !!python/object/apply:os.system ['touch {CANARY}']\n",
        "a YAML tag of eval": text + f"\nz: !!python/object/apply:eval [\"open('{CANARY}', 'w')\"]\n",
        "a deep list": text + "\nz: " + "[" * 30_000 + "]" * 30_000,
        "deep JSON": "[" * 100_000,
        "twice the same keys": text.rstrip()[:-1] + "," + text.lstrip()[1:],
        "a BOM": "\ufeff" + text,
        "a huge number": text.replace("2", "2" * 5000, 1),
        "an unending merge": text + "\nz: &z\n  <<: *z\n",
        "nothing": "",
        "null": "null",
        "a list": "[]",
        "a date": text.replace(": 2", ": 2001-01-01", 1),
        "merge keys": text.replace("parallelism:", "y: &y {tp: 7}\nparallelism:\n  <<: *y", 1),
        "anchors": text + "\nz: &q 1\ny: *q\n",
        "binary": text + "\nz: !!binary aGVsbG8=\n",
        "a set": text + "\nz: !!set {a, b}\n",
        "a control character": text + "\x07",
    }
    kind = rng.choice(sorted(content))
    rewrite(path, content[kind].encode())
    return f"{short(path, root)} with {kind}"


# --- weight shards --------------------------------------------------------------------------------------------------


def _split_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _join_shard(path: Path, header: Any, payload: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rewrite(path, struct.pack("<Q", len(text) if length is None else length) + text + payload)


@mutator
def shard_headers_edited(root: Path, rng: random.Random) -> str:
    path = rng.choice(files(root, ".safetensors"))
    header, payload = _split_shard(path)
    length = None
    entry = header["data"]
    kind = rng.choice(["offsets", "shape", "dtype", "name", "length", "twice", "tree", "two tensors", "transposed"])
    if kind == "offsets":
        entry["data_offsets"] = rng.choice(
            [[0, 10**15], [8, len(payload)], [0, len(payload) - 2], [len(payload), 0], [0], [-8, len(payload)], None]
        )
    elif kind == "shape":
        entry["shape"] = rng.choice(
            [[2**40, 2**40], [*entry["shape"], 1], [0], [], [-1], entry["shape"][1:], [1, *entry["shape"]], ["2"]]
        )
    elif kind == "dtype":
        entry["dtype"] = rng.choice(["F16", "I16", "U16", "F32", "BF17", "bf16", "", None, "F8_E4M3", "BOOL"])
    elif kind == "name":
        header[rng.choice([*ODD_NAMES, "weight"])] = header.pop("data")
    elif kind == "length":
        length = rng.choice([0, 1, 2**63, 2**64 - 1, 10**8, 10**12, len(payload)])
    elif kind == "two tensors":
        header["more"] = {"dtype": "U8", "shape": [8], "data_offsets": [len(payload), len(payload) + 8]}
        payload += bytes(8)
    elif kind == "transposed":
        entry["shape"] = entry["shape"][::-1]
    elif kind == "twice":
        text = json.dumps(header)
        _join_shard(path, (text[:-1] + "," + text[1:]).encode(), payload)
        return f"{short(path, root)}: keys twice"
    else:
        kind = edit_tree(header, rng)
    _join_shard(path, header, payload, length)
    return f"{short(path, root)}: {kind}"


@mutator
def slices_edited(root: Path, rng: random.Random) -> str:
    sharded = [path for path in files(root, ".safetensors") if "_tp-rank-" in path.name]
    path = rng.choice(sharded)
    header, payload = _split_shard(path)
    metadata = header.get("__metadata__", {})
    key = rng.choice(["unsharded_shape", "local_global_slices_pairs", "local_global_slices_pairs", "version"])
    text = metadata.get(key, "")
    numbers = [i for i, char in enumerate(text) if char.isdigit()]
    action = rng.choice(["digit", "digit", "sign", "drop", "twice", "cut", "odd", "spaces", "step"])
    if action == "digit" and numbers:
        i = rng.choice(numbers)
        text = text[:i] + rng.choice("0123456789") + rng.choice(["", "", "0", "0" * 30]) + text[i + 1 :]
    elif action == "sign" and numbers:
        i = rng.choice(numbers)
        text = text[:i] + "-" + text[i:]
    elif action == "twice":
        text = text + ";" + text
    elif action == "cut":
        text = text[: rng.randrange(len(text) + 1)]
    elif action == "spaces" and key == "local_global_slices_pairs":
        text = text.replace(",", ", ")
    elif action == "step":
        text = text.replace(",None", ",2", 1)
    elif action == "odd":
        text = rng.choice(
            ["", "None", "()", "(1)", "(True,)", "a|b#c|d", "#", ";", "0,1,None#0,1,None", "٣", "(1_0, 3)"]
        )
    if action == "drop":
        metadata.pop(key, None)
    else:
        metadata[key] = text
    _join_shard(path, {**header, "__metadata__": metadata}, payload)
    return f"{short(path, root)}: {key} {action}"


@mutator
def weight_bits_flipped(root: Path, rng: random.Random) -> str:
    """No checksum covers a weight: the output must carry exactly what is stored."""
    path = rng.choice(files(root, ".safetensors"))
    header, payload = _split_shard(path)
    data = bytearray(payload)
    place = rng.randrange(len(data))
    data[place] ^= 1 << rng.randrange(8)
    _join_shard(path, header, bytes(data))
    return f"{short(path, root)}: a bit of byte {place} of the data"


# --- torch files: the tree ------------------------------------------------------------------------------------------


def _tensors(content: Any) -> list[tuple[dict[Any, Any], Any]]:
    places = [(entries, key) for entries in content["state"].values() for key in entries]
    masters = content.get("gradient_accumulator", {})
    return [*places, *((masters, fqn) for fqn in masters)]


def _reshape(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    tensor = tensor.detach()
    change = rng.choice(
        ["flat", "one less", "turned", "strided", "expanded", "dtype", "empty", "more dims", "padded", "scaled"]
    )
    if change == "flat":
        return tensor.reshape(-1)
    if change == "one less":
        return tensor[:-1].clone() if tensor.dim() else tensor[None]
    if change == "turned":
        return tensor.t().contiguous() if tensor.dim() == 2 else tensor.flip(0) if tensor.dim() else tensor
    if change == "strided":  # the same values, stored in another order
        return tensor.t().contiguous().t() if tensor.dim() == 2 else torch.stack([tensor, tensor], -1)[..., 0]
    if change == "expanded":
        return tensor.reshape(-1)[0].expand(tensor.shape) if tensor.numel() else tensor
    if change == "dtype":
        return tensor.to(
            rng.choice([torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64, torch.bool])
        )
    if change == "empty":
        return tensor.reshape(-1)[:0]
    if change == "more dims":
        return tensor[None]
    if change == "padded":
        return torch.cat([tensor, torch.zeros_like(tensor[:1])]) if tensor.dim() else tensor
    return tensor * 1.5 if tensor.is_floating_point() else tensor + 1


@mutator
def optimizer_trees_edited(root: Path, rng: random.Random) -> str:
    path = rng.choice(files(root / "optimizer", ".pt"))
    content = torch.load(path, weights_only=True)
    names = content["names"]
    kind = rng.choice(
        ["names swapped", "name odd", "name added", "tensor", "tensor", "tensor dropped", "key added", "key renamed",
         "step", "step", "state dropped", "group value", "group", "ids shuffled", "top", "master odd", "not a tensor",
         "states swapped", "shared storage", "name and state dropped"]
    )  # fmt: skip
    number = rng.choice(list(names)) if names else 0
    if kind == "names swapped" and len(names) > 1:
        other = rng.choice(list(names))
        names[number], names[other] = names[other], names[number]
    elif kind == "name odd":
        names[number] = rng.choice([*ODD_NAMES, 7, None, ("a",), rng.choice(list(names.values()))])
    elif kind == "name added":
        names[rng.choice([len(names), 99, -1, "0", 10**30])] = rng.choice(ODD_NAMES)
    elif kind in ("tensor", "tensor dropped", "not a tensor"):
        holder, key = rng.choice(_tensors(content))
        if kind == "tensor":
            holder[key] = _reshape(holder[key], rng)
        elif kind == "tensor dropped":
            del holder[key]
        else:
            holder[key] = rng.choice([*ODD_VALUES, torch.Size([2]), b"x", {1, 2}, range(3) if False else 1j])
        kind += f" {key}"
    elif kind in ("key added", "key renamed", "step", "state dropped") and content["state"]:
        entries = content["state"][rng.choice(list(content["state"]))]
        if kind == "key added":
            entries[rng.choice(["max_exp_avg_sq", "momentum", "weight", "fp32_param", "../x", "step2", ""])] = (
                rng.choice([torch.zeros(()), torch.zeros(4), entries["exp_avg"].clone(), 1.0, None])
            )
        elif kind == "key renamed":
            entries[rng.choice(["momentum", "weight", "fp32_param", "exp_avg_sq", ""])] = entries.pop("exp_avg")
        elif kind == "state dropped":
            entries.clear()
        else:
            entries["step"] = rng.choice(
                [entries["step"] + 1, entries["step"] - 100, torch.tensor(float("nan")), torch.tensor(1e30), 3, 3.0, -1,
                 torch.tensor([3.0]), torch.tensor(3), torch.tensor([[3.0]]), "3", None,
                 torch.tensor(3.0, dtype=torch.float64), torch.tensor([]), True]
            )  # fmt: skip
    elif kind == "group value" and content["param_groups"]:
        group = rng.choice(content["param_groups"])
        group[rng.choice(list(group))] = rng.choice([*ODD_VALUES, 1e-3, (0.9, 0.95), torch.zeros(()), 1j])
    elif kind == "group" and content["param_groups"]:
        groups = content["param_groups"]
        rng.choice(
            [lambda: groups.pop(), lambda: groups.append(dict(groups[0])), lambda: groups.reverse(),
             lambda: groups.append({"params": []}), lambda: groups.append(7), lambda: groups.clear()]
        )()  # fmt: skip
    elif kind == "ids shuffled" and content["param_groups"]:
        ids = content["param_groups"][0]["params"]
        ids.insert(rng.randrange(len(ids) + 1), rng.choice([0, 1, -1, 10**20, 2.0, "0", True]))
    elif kind == "top":
        content[rng.choice(["state", "names", "param_groups", "gradient_accumulator", "x"])] = rng.choice(ODD_VALUES)
    elif kind == "master odd" and content.get("gradient_accumulator"):
        masters = content["gradient_accumulator"]
        masters[rng.choice(ODD_NAMES)] = masters.pop(rng.choice(list(masters)))
    elif kind == "states swapped" and len(content["state"]) > 1:
        one, other = rng.sample(sorted(content["state"]), 2)
        content["state"][one], content["state"][other] = content["state"][other], content["state"][one]
    elif kind == "shared storage":
        (holder, key), (other, name) = rng.choice(_tensors(content)), rng.choice(_tensors(content))
        other[name] = holder[key]
    elif kind == "name and state dropped" and names:
        content["state"].pop(number, None)
        names.pop(number)
    path.unlink()
    torch.save(content, path)
    return f"{short(path, root)}: {kind}"


@mutator
def all_ranks_edited(root: Path, rng: random.Random) -> str:
    """The same change in every file: other data, not a contradiction."""
    kind = rng.choice(["lr", "step", "negated", "nan", "lower dtype", "key renamed", "key dropped", "weight_decay"])
    for path in files(root / "optimizer", ".pt"):
        content = torch.load(path, weights_only=True)
        for group in content["param_groups"]:
            if kind in ("lr", "weight_decay"):
                group[kind] = 0.123
        for entries in content["state"].values():
            if kind == "step":
                entries["step"] = entries["step"] * 0 + 2.0**24
            elif kind in ("negated", "nan"):
                entries["exp_avg"] = entries["exp_avg"] * (-1 if kind == "negated" else float("nan"))
            elif kind == "lower dtype":
                entries["exp_avg"] = entries["exp_avg"].to(torch.bfloat16)
            elif kind == "key renamed":
                entries["momentum"] = entries.pop("exp_avg")
            elif kind == "key dropped":
                entries.pop("exp_avg_sq")
        path.unlink()
        torch.save(content, path)
    return f"every optimizer file: {kind}"


@mutator
def schedulers_edited(root: Path, rng: random.Random) -> str:
    paths = files(root / "lr_scheduler", ".pt")
    if not paths:
        return "no scheduler"
    chosen = paths if rng.random() < 0.3 else [rng.choice(paths)]
    seed = rng.getrandbits(32)
    done = ""
    for path in chosen:
        content = torch.load(path, weights_only=True)
        done = edit_tree(content, random.Random(seed))
        path.unlink()
        torch.save(content, path)
    return f"{len(chosen)} of {len(paths)} schedulers: {done}"


# --- torch files: the container -------------------------------------------------------------------------------------


class _Call:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def _torch_files(root: Path) -> list[Path]:
    return [*files(root / "optimizer", ".pt"), *files(root / "lr_scheduler", ".pt"), *root.glob("common.pt")]


def _members(path: Path) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def _pack(path: Path, members: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, compression)
    rewrite(path, buffer.getvalue())


def pickles(rng: random.Random) -> dict[str, bytes]:
    touch = f"touch {CANARY}"
    laugh = b"\x80\x02]q\x00" + b"".join(
        b"(" + b"h" + bytes([i]) * 1 + (b"h" + bytes([i])) * 9 + b"lq" + bytes([i + 1]) for i in range(40)
    )
    return {
        "os.system": pickle.dumps(_Call(os.system, touch), 2),
        "eval": pickle.dumps(_Call(eval, f"open('{CANARY}', 'w')"), 2),
        "os.system by stack": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c"
        + bytes([len(touch)])
        + touch.encode()
        + b"\x85R.",
        "old INST": b"\x80\x02(S'" + touch.encode() + b"'\niposix\nsystem\n.",
        "getattr": b"\x80\x02cbuiltins\ngetattr\ncos\npath\nX\x07\0\0\0dirname\x86R.",
        "torch hub": b"\x80\x02ctorch.hub\nload\n)R.",
        "deep": b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".",
        "deep lists": b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
        "laughs": laugh + b".",
        "long": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"\xff.",
        "big unicode": b"\x80\x02X" + struct.pack("<I", 2**32 - 1) + b"x.",
        "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
        "memo": b"\x80\x02Nr" + struct.pack("<I", 2**32 - 1) + b".",
        "cycle": b"\x80\x02]q\0h\0a.",
        "dict cycle": b"\x80\x02}q\0X\x05\0\0\0stateh\0s.",
        "extension": b"\x80\x02\x82\x01.",
        "empty": b"",
        "stop": b"\x80\x02.",
        "many numbers": b"\x80\x02" + b"2".join([b"M\x01\x01"] * 50_000) + b".",
        "random": b"\x80\x02" + rng.randbytes(300) + b".",
        "proto 9": b"\x80\x09N.",
        "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**60) + b".",
        "out of band": b"\x80\x05\x97.",
        "subclass": pickle.dumps(_Call(type, "X", (), {}), 2),
        "array": b"\x80\x02cnumpy\nzeros\nM\xff\xff\x85R.",
        "bytes of absurd size": b"\x80\x02cbuiltins\nbytearray\n\x8a\x08\0\0\0\0\0\0\0\x10\x85R.",
    }


@mutator
def hostile_pickles(root: Path, rng: random.Random) -> str:
    path = rng.choice(_torch_files(root))
    hostile = pickles(rng)
    kind = rng.choice(sorted(hostile))
    members = [(name, hostile[kind] if name.endswith("/data.pkl") else data) for name, data in _members(path)]
    _pack(path, members)
    return f"{short(path, root)}: pickle {kind}"


def edit_bytes(data: bytearray, rng: random.Random) -> None:
    """Change a few bytes, and perhaps the length."""
    for _ in range(rng.choice([1, 1, 2, 5])):
        place = rng.randrange(len(data))
        action = rng.choice(["flip", "set", "insert", "delete", "copy"])
        if action == "flip":
            data[place] ^= 1 << rng.randrange(8)
        elif action == "set":
            data[place] = rng.randrange(256)
        elif action == "insert":
            data[place:place] = rng.randbytes(rng.randrange(1, 5))
        elif action == "delete":
            del data[place : place + rng.randrange(1, 5)]
        else:
            source = rng.randrange(len(data))
            length = rng.randrange(1, 60)
            data[place : place + length] = data[source : source + length]


@mutator
def pickles_edited(root: Path, rng: random.Random) -> str:
    """Bytes of the pickle change and the CRC with them."""
    path = rng.choice(_torch_files(root))
    members = _members(path)
    at = next(i for i, (name, _) in enumerate(members) if name.endswith("/data.pkl"))
    data = bytearray(members[at][1])
    edit_bytes(data, rng)
    members[at] = members[at][0], bytes(data)
    _pack(path, members)
    return f"{short(path, root)}: bytes of the pickle"


@mutator
def archives_edited(root: Path, rng: random.Random) -> str:
    path = rng.choice(_torch_files(root))
    members = _members(path)
    folder = members[0][0].split("/")[0]
    kind = rng.choice(
        ["bomb", "compressed", "missing", "twice", "traversal", "order", "big-endian", "cut record", "swapped records",
         "longer record", "torchscript", "no crc", "absurd size", "absurd offset", "comment", "nested", "empty",
         "shifted"]
    )  # fmt: skip
    compression = zipfile.ZIP_STORED
    at = rng.randrange(len(members))
    name, data = members[at]
    if kind == "bomb":
        members[at] = name, bytes(1 << 26)
        compression = zipfile.ZIP_DEFLATED
    elif kind == "compressed":
        compression = zipfile.ZIP_DEFLATED
    elif kind == "missing":
        members.pop(at)
    elif kind == "twice":
        members.append((name, data[::-1]))
    elif kind == "traversal":
        members[at] = (
            rng.choice(["../../x", "/etc/x", f"{folder}/../x", "other/data.pkl", f"{folder}//x", f"{folder}/."]),
            data,
        )
    elif kind == "order":
        rng.shuffle(members)
    elif kind == "big-endian":
        members = [(n, b"big" if n.endswith("byteorder") else d) for n, d in members]
    elif kind == "cut record":
        members[at] = name, data[: len(data) // 2]
    elif kind == "swapped records":
        other = rng.randrange(len(members))
        members[at], members[other] = (name, members[other][1]), (members[other][0], data)
    elif kind == "longer record":
        members[at] = name, data + bytes(64)
    elif kind == "torchscript":
        members.append((f"{folder}/constants.pkl", b"\x80\x02)."))
    elif kind == "nested":
        members = [(f"x/{n}", d) for n, d in members]
    elif kind == "empty":
        members = []
    _pack(path, members, compression)
    if kind in ("no crc", "absurd size", "absurd offset", "comment", "shifted"):
        raw = bytearray(path.read_bytes())
        directory = struct.unpack_from("<I", raw, len(raw) - 6)[0]
        if kind == "no crc":
            struct.pack_into("<I", raw, directory + 16, 0)
        elif kind == "absurd size":
            struct.pack_into("<II", raw, directory + 20, 2**31, 2**31)
        elif kind == "absurd offset":
            struct.pack_into("<I", raw, directory + 42, rng.choice([2**32 - 1, 2**31, 1]))
        elif kind == "comment":
            raw += b"x" * 9
            struct.pack_into("<H", raw, len(raw) - 11, 9)
        else:
            raw[:0] = b"\0" * 7
        rewrite(path, bytes(raw))
    return f"{short(path, root)}: {kind} {name}"


@mutator
def directories_edited(root: Path, rng: random.Random) -> str:
    """Random bytes of the zip directory and of record headers."""
    path = rng.choice(_torch_files(root))
    raw = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir
        headers = [info.header_offset for info in archive.infolist()]
    in_directory = rng.random() < 0.6
    place = rng.randrange(start, len(raw)) if in_directory else rng.choice(headers) + rng.randrange(60)
    raw[place] = rng.choice([0, 255, raw[place] ^ (1 << rng.randrange(8)), rng.randrange(256)])
    rewrite(path, bytes(raw))
    return f"{short(path, root)}: byte {place} of {len(raw)}, directory at {start}"
