"""Mutations of Megatron's ``torch_dist`` checkpoints: convert, fingerprint and inspect them, and judge every outcome.

Run by ``python -m tests.fuzz.mutations --megatron``. What was written is read by torch's own reader and compared with
what torch's own reader finds in the mutated source.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from nemo_optim_bridge.formats.torch_dist.common_file import CommonFile
from nemo_optim_bridge.formats.torch_dist.keys import MASTER, MASTER_SPELLINGS, MODEL_PREFIXES, parse_state_key
from tests.convert.conftest import unpack_megatron
from tests.fuzz import mutators
from tests.fuzz.harness import (
    BAD,
    CARRIED,
    SAME,
    Outcome,
    bounded_cli,
    forbidden,
    judged,
    new_case,
    snapshot,
    typed_refusal,
)
from tests.fuzz.mutators import Mutator, edit_bytes, edit_tree, files, pickles, rewrite, short
from tests.nanotron.pair_table import run_cli

FIXTURES = (
    "fused_moe_ep1", "fused_moe_ep2", "fused_moe_tp2", "fused_dense", "fused_moe_step0", "dist_moe_stock_keys",
    "dist_moe_bridge_dp2", "mcore_float16_moe_ep1", "mcore_distopt_moe_ep2_fully_reshardable",
)  # fmt: skip
KINDS = ("fused_adam", "distributed_fused_adam", "mcore_float16", "mcore_distributed")
COMMANDS: dict[str, tuple[str, ...]] = {
    **{kind: ("convert", "--to", kind, "--no-fsync", "--workers", "1") for kind in KINDS},
    "unread": ("convert", "--to", "distributed_fused_adam", "--no-fsync", "--workers", "1", "--no-receipt"),
    "exact": ("convert", "--to", "distributed_fused_adam", "--no-fsync", "--workers", "1", "--exact-remainders"),
    "fingerprint": ("fingerprint", "--workers", "1"),
    "inspect": ("inspect", "--deep"),
    "preflight": ("inspect", "--for", "distributed_fused_adam"),
}
#: Mutations of whole files and documents serve any format; those of torch archives find common.pt.
MUTATORS: dict[str, Mutator] = {
    name: mutators.MUTATORS[name]
    for name in (
        "truncated", "extended", "bits_flipped", "bits_flipped_at_the_ends", "overwritten", "swapped", "renamed",
        "duplicated", "deleted", "not_a_file", "sparse_and_huge", "strange_files", "json_edited", "hostile_pickles",
        "pickles_edited", "archives_edited", "directories_edited",
    )
}  # fmt: skip


def mutator(function: Mutator) -> Mutator:
    """Enter a function into MUTATORS under its name."""
    MUTATORS[function.__name__] = function
    return function


def _metadata(root: Path) -> Any:
    return pickle.loads((root / ".metadata").read_bytes())  # noqa: S301 - a fixture, not yet mutated


@mutator
def common_edited(root: Path, rng: random.Random) -> str:
    """Change values and names in the tree of common.pt: param groups, steps, schedulers, containers."""
    file = CommonFile(root)
    tree: Any = file.tree
    where = ""
    if rng.random() < 0.7:
        states = tree.get("optimizer_states")
        tree, where = (states[0], "optimizer: ") if states else (tree["optimizer"], "optimizer: ")
    done = [edit_tree(tree, rng) for _ in range(rng.choice([1, 1, 2]))]
    try:
        rewrite(root / "common.pt", file.dumps(file.tree))
    except Exception as error:
        return f"common.pt left as it was: {type(error).__name__}"
    return f"common.pt: {where}{done}"


@mutator
def metadata_edited(root: Path, rng: random.Random) -> str:
    """Change names, shapes, dtypes, boxes, offsets, lengths and file names in .metadata."""
    path = root / ".metadata"
    content = _metadata(root)
    entries, places = content.state_dict_metadata, content.storage_data
    key = rng.choice(sorted(key for key, entry in entries.items() if hasattr(entry, "chunks")))
    entry = entries[key]
    index = rng.choice([index for index in places if index.fqn == key])
    place = places[index]
    action = rng.choice(
        ["name", "name", "dtype", "shape", "box size", "box offset", "file", "file", "offset", "length", "drop place",
         "drop entry", "drop box", "twice", "swap places", "swap boxes", "odd place", "odd dtype", "odd key"]
    )  # fmt: skip
    if action == "name":
        parsed = parse_state_key(key)
        prefix = key.removesuffix(parsed.fqn) if parsed else ""
        new = rng.choice(
            [prefix + rng.choice(mutators.ODD_NAMES), key + "x", key.replace("exp_avg", "momentum"),
             key.replace("decoder", "encoder"), "chained_0." + key, "chained_99999." + key, key.replace("model.", "")]
        )  # fmt: skip
        entries[new] = entries.pop(key)
        for known in [known for known in places if known.fqn == key]:
            places[type(known)(new, known.offset, known.index)] = places.pop(known)
    elif action == "dtype":
        entry.properties.dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
    elif action == "shape":
        entry.size = torch.Size(
            rng.choice([[], [0], [2**40, 2**40], [*entry.size, 1], list(entry.size)[::-1], [1, *entry.size], [1]])
        )
    elif action in ("box size", "box offset"):
        number = rng.randrange(len(entry.chunks))
        chunk = entry.chunks[number]
        field = "sizes" if action == "box size" else "offsets"
        value = list(getattr(chunk, field))
        if value:
            at = rng.randrange(len(value))
            value[at] = rng.choice([value[at] + 1, 0, -1, 2**62, value[at] // 2])
        changed = {"sizes": chunk.sizes, "offsets": chunk.offsets, field: torch.Size(value)}
        entry.chunks[number] = type(chunk)(**changed)
    elif action == "file":
        others = [path.name for path in files(root)]
        place.relative_path = rng.choice(
            ["../x.distcp", "/etc/passwd", "", ".", "\0", "a\nb.distcp", "x" * 300, "__9_0.distcp", *others]
        )
    elif action == "offset":
        place.offset = rng.choice([0, -1, place.offset + 1, place.offset - 8, 2**62, 2**70, 10**6])
    elif action == "length":
        place.length = rng.choice([0, -1, place.length + 1, place.length // 2, 2**62, 2**70])
    elif action == "drop place":
        del places[index]
    elif action == "drop entry":
        del entries[key]
    elif action == "drop box":
        entry.chunks.pop()
    elif action == "twice":
        entry.chunks.append(entry.chunks[0])
    elif action == "swap places":
        other = rng.choice(list(places))
        places[index], places[other] = places[other], places[index]
    elif action == "swap boxes":
        other = rng.choice(sorted(name for name, known in entries.items() if hasattr(known, "chunks")))
        entries[key], entries[other] = entries[other], entries[key]
    elif action == "odd place":
        places[index] = rng.choice([None, 7, "x", [place], {}])
    elif action == "odd dtype":
        entry.properties.dtype = rng.choice([None, "float32", 3])
    else:
        places[rng.choice([None, 3, "x", ("a",)])] = place
    rewrite(path, pickle.dumps(content, rng.choice([2, 4, 5])))
    return f".metadata: {action} of {key}"


@mutator
def metadata_bytes_edited(root: Path, rng: random.Random) -> str:
    path = root / ".metadata"
    data = bytearray(path.read_bytes())
    edit_bytes(data, rng)
    rewrite(path, bytes(data))
    return ".metadata: bytes of the pickle"


@mutator
def hostile_metadata(root: Path, rng: random.Random) -> str:
    hostile = pickles(rng)
    kind = rng.choice(sorted(hostile))
    rewrite(root / ".metadata", hostile[kind])
    return f".metadata: pickle {kind}"


@mutator
def items_edited(root: Path, rng: random.Random) -> str:
    """Change bytes of one stored item: its headers and pickle at its ends, or its data, which a CRC-32 covers."""
    content = _metadata(root)
    place = rng.choice(sorted(content.storage_data.values(), key=lambda place: (place.relative_path, place.offset)))
    path = root / place.relative_path
    data = bytearray(path.read_bytes())
    reach = min(place.length, 900)
    where = rng.choice([rng.randrange(reach), place.length - 1 - rng.randrange(reach), rng.randrange(place.length)])
    data[place.offset + where] = rng.choice([0, 255, data[place.offset + where] ^ (1 << rng.randrange(8))])
    rewrite(path, bytes(data))
    return f"{short(path, root)}: byte {where} of {place.length} of an item"


@mutator
def hostile_items(root: Path, rng: random.Random) -> str:
    """Put a hostile archive in place of one item."""
    path = root / ".metadata"
    content = _metadata(root)
    place = rng.choice(sorted(content.storage_data.values(), key=lambda place: (place.relative_path, place.offset)))
    hostile = pickles(rng)
    kind = rng.choice([*sorted(hostile), "another tensor", "an object"])
    buffer = io.BytesIO()
    if kind in hostile:
        torch.save(torch.zeros(4), buffer)
        inner = Path(root, "item.pt")
        inner.write_bytes(buffer.getvalue())
        members = [(n, hostile[kind] if n.endswith("/data.pkl") else d) for n, d in mutators._members(inner)]
        mutators._pack(inner, members)
        item = inner.read_bytes()
        inner.unlink()
    else:
        torch.save(torch.ones(3, 5) if kind == "another tensor" else {"a": 1}, buffer)
        item = buffer.getvalue()
    target = root / place.relative_path
    data = target.read_bytes()
    place.offset, place.length = len(data), len(item)
    rewrite(target, data + item)
    rewrite(path, pickle.dumps(content, 2))
    return f"an item of {place.relative_path}: {kind}"


def unpack(folder: Path) -> Path:
    """Unpack the fixtures into a new folder."""
    folder.mkdir()
    return unpack_megatron(folder)


def prepare(folder: Path, into: Path) -> None:
    """Convert every fixture unmutated, for comparison."""
    for name in FIXTURES:
        for target, command in COMMANDS.items():
            if command[0] == "convert":
                out = into / f"{name}.{target}"
                code, printed = run_cli(command[0], folder / name / "ckpt", out, *command[1:])
                if code:
                    raise RuntimeError(printed)


def run_case(number: int, seed: int, only: str | None, folder: Path, good: Path, scratch: Path) -> Outcome:
    """Mutate, run one command, judge."""
    rng = random.Random(f"megatron/{seed}/{number}")
    kinds = [kind for kind in MUTATORS if only is None or kind == only]
    kind = kinds[number % len(kinds)]
    name, target = rng.choice(FIXTURES), rng.choice([*COMMANDS, *KINDS])
    original = folder / name / "ckpt"
    with new_case(number, original, scratch) as case:
        what = f"{name}, {target}: {MUTATORS[kind](case / 'source', rng)}"
        verdict, detail = judged(partial(judge, case, target, original, good / f"{name}.{target}"))
        return Outcome(number, kind, verdict, what, detail)


def judge(case: Path, target: str, original: Path, expected: Path) -> tuple[str, str]:
    """Run the command and say whether what came of it is right."""
    root, out = case / "source", case / "out"
    command, *options = COMMANDS[target]
    writes = [out] if command == "convert" else []
    before = snapshot(root)
    code, printed, wrong = bounded_cli(case, command, root, *writes, *options, "--json")
    left = sorted(path.name for path in case.iterdir())
    if wrong := forbidden(case, before, printed, wrong):
        return BAD, wrong
    if code == 2:
        return typed_refusal(left, printed)
    if left != sorted(["source", *(path.name for path in writes)]) or code not in ((0,) if writes else (0, 1)):
        return BAD, f"exit code {code}, left {left}: {printed[-2000:]}"
    if not writes:
        return "read", ""
    return judge_output(case, original, expected, target)


def judge_output(case: Path, original: Path, expected: Path, target: str) -> tuple[str, str]:
    """Say whether a converted checkpoint holds exactly what its mutated source holds."""
    root, out = case / "source", case / "out"
    written = stored(out)
    source = stored(root)
    if written is None and source is None and target == "unread":
        return UNREAD, ""
    if written is None:
        return BAD, f"torch cannot read the output, the source {source is not None}"
    pristine = stored(expected)
    unchanged = source is None or source == stored(original)
    against = pristine if unchanged else source
    if against is None:
        return BAD, "torch cannot read the expected output"
    differing = sorted(key for key in {*against, *written} if against.get(key) != written.get(key))
    if target == "exact":  # weights are rounded anew
        differing = [key for key in differing if key[0] != "weight"]
    if differing:
        return (
            BAD,
            f"{len(differing)} tensors are not what the source holds (read: {source is not None}): {differing[:4]}",
        )
    code, printed, wrong = bounded_cli(case, "verify", root, out, "--json")
    if (
        target == "unread" and code == 2 and not wrong
    ):  # it reads what the conversion did not, and is stricter than torch
        return UNREAD, ""
    if target != "exact" and (code or wrong):
        return BAD, f"verify: {printed[-2000:]}{wrong}"
    if (out / RECEIPT).exists():
        code, printed, wrong = bounded_cli(case, "verify", out, "--receipt", out / RECEIPT, "--json")
        if code or wrong:
            return BAD, f"the receipt does not hold: {printed[-2000:]}{wrong}"
    if unchanged and (root / "common.pt").read_bytes() == (original / "common.pt").read_bytes():
        code, printed, wrong = bounded_cli(case, "verify", original, out, "--json")
        return (BAD, f"not as unmutated: {printed[-2000:]}") if target != "exact" and code else (SAME, "")
    return CARRIED, ""


#: Data files are linked, and without a receipt nobody looks into them.
UNREAD = "right: links what it did not read"
RECEIPT = "nemo_optim_bridge.receipt.json"
Stored = dict[tuple[str, str], tuple[str, tuple[int, ...], bytes]]


def stored(root: Path) -> Stored | None:
    """Return every optimizer tensor and its weight as torch's reader finds them, None where it finds no checkpoint."""
    unreadable = contextlib.suppress(Exception, CheckpointException)  # the latter is no Exception
    with unreadable, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = dcp.FileSystemReader(root)
        tensors: dict[str, Any] = {}
        for key, entry in reader.read_metadata().state_dict_metadata.items():
            if hasattr(entry, "chunks"):
                tensors[key] = torch.zeros(entry.size, dtype=entry.properties.dtype)
        dcp.load(tensors, storage_reader=reader, no_dist=True)
        return named(tensors)
    return None


def named(tensors: dict[str, Any]) -> Stored:
    """Return tensors by (state, parameter), whatever container and optimizer their keys are spelled for."""
    found: Stored = {}
    parsed = {key: parse_state_key(key) for key in tensors}
    states = {key.fqn for key in parsed.values() if key}
    for key, tensor in tensors.items():
        at = parsed[key]
        if at is None and key not in states:
            continue
        state = "weight" if at is None else MASTER if at.state in MASTER_SPELLINGS else at.state
        fqn = key if at is None else at.fqn
        for prefix in MODEL_PREFIXES:
            fqn = fqn.removeprefix(prefix)
        value = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        found[state, fqn] = (str(tensor.dtype), tuple(tensor.shape), value)
    return found
