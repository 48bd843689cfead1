"""Mutate real checkpoints at random, re-shard or convert them, and judge every outcome.

    python -m tests.fuzz.mutations [FIXTURES] --count 10000 --seed 1 --jobs 2 [--first N] [--only KIND] [--verbose]
    python -m tests.fuzz.mutations --megatron --count 10000 --seed 1 --jobs 2

An outcome is good when it is the exact result for what is stored, or a typed refusal (exit code 2) that leaves
nothing. Bad: another exception, other bytes, something written, a changed source, code that ran, no end, too much
memory. Prints a tally by kind and outcome, also as a line of JSON; exit code 1 when an outcome was bad. Case N of a
seed is always the same, so the tallies of ranges (``--first N --count M``) add up.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.compare import PARTS, compare_checkpoints
from tests.fuzz import megatron
from tests.fuzz.harness import (
    BAD,
    CARRIED,
    SAME,
    Outcome,
    bounded_cli,
    count,
    forbidden,
    judged,
    new_case,
    print_tally,
    snapshot,
    start_worker,
    typed_refusal,
)
from tests.fuzz.mutators import MUTATORS
from tests.nanotron.fixtures import Fixture, read_index, unpack
from tests.nanotron.pair_table import run_cli

FIXTURES = (
    "nt04-llama_tied-z0-tp2-pp1-dp1-ep1", "nt04-llama_tied-z1-tp2-pp2-dp2-ep1", "head-llama_tied-z1-tp1-pp2-dp2-ep1",
    "head-llama_tied-z0-tp2-pp2-dp1-ep1", "moe-moe_e8-z0-tp1-pp1-dp1-ep2", "moe-moe_e8-z1-tp1-pp1-dp2-ep2",
    "nt04-llama_noacc-z0-tp2-pp1-dp1-ep1", "v0.1-llama_untied-z1-tp2-pp1-dp2-ep1",
    "head-qwen_untied-z0-tp2-pp1-dp1-ep1",
    "nt04-llama_vpad_untied-z0-tp4-pp1-dp1-ep1", "nt04-llama_tied-z0-tp2-pp1-dp1-ep1-renamed",
)  # fmt: skip
#: What each is re-sharded to, besides its own topology.
TARGETS = {"same": (), "one": ("--tp", "1", "--pp", "1", "--dp", "1", "--ep", "1", "--zero", "0")}
#: What a re-shard may state anew in the documents.
_RESTATED = re.compile(
    r"tp|dp|pp|cp|ep|version|vocab_size|zero_stage|parallelism|expert_parallel_size|custom_metas|metas\."
    r"|model\.model_config\.vocab_size|metas|optimizer$|model\.model_config$|optimizer\.zero_stage"
)


def prepare(folder: Path, into: Path) -> None:
    """Re-shard every fixture unmutated, for comparison."""
    for name in FIXTURES:
        for target, options in TARGETS.items():
            out = into / f"{name}.{target}"
            code, printed = run_cli("reshard", folder / "checkpoints" / name, out, *options, "--no-fsync")
            if code:
                raise RuntimeError(printed)


def run_case(number: int, seed: int, only: str | None, folder: Path, good: Path, scratch: Path) -> Outcome:
    """Mutate, re-shard, judge."""
    rng = random.Random(f"{seed}/{number}")
    kinds = [kind for kind in MUTATORS if only is None or kind == only]
    kind = kinds[number % len(kinds)]
    fixture = read_index(folder)[rng.choice(FIXTURES)]
    target = rng.choice(sorted(TARGETS))
    original = folder / "checkpoints" / fixture.name
    with new_case(number, original, scratch) as case:
        what = f"{fixture.name} to {target}: {MUTATORS[kind](case / 'source', rng)}"
        verdict, detail = judged(partial(judge, case, fixture, target, original, good))
        return Outcome(number, kind, verdict, what, detail)


def judge(case: Path, fixture: Fixture, target: str, original: Path, good: Path) -> tuple[str, str]:
    """Re-shard the mutated checkpoint and say whether what came of it is right."""
    root, out = case / "source", case / "out"
    before = snapshot(root)
    code, printed, wrong = bounded_cli(case, "reshard", root, out, *TARGETS[target], "--no-fsync", "--json")
    left = sorted(path.name for path in case.iterdir())
    if wrong := forbidden(case, before, printed, wrong):
        return BAD, wrong
    if code == 2:
        return typed_refusal(left, printed)
    if code or left != ["out", "source"]:
        return BAD, f"exit code {code}, left {left}: {printed[-2000:]}"
    summary = json.loads(printed)
    return judge_result(case, fixture, target, original, good / f"{fixture.name}.{target}", before, summary)


def judge_result(
    case: Path, fixture: Fixture, target: str, original: Path, expected: Path, before: dict[str, Any], summary: Any
) -> tuple[str, str]:
    """Say whether a written checkpoint is exactly what the mutated source holds."""
    root, out = case / "source", case / "out"
    pristine = snapshot(original)
    changed = sorted(name for name in {*before, *pristine} if before.get(name) != pristine.get(name))
    strange = {
        name for name in changed if name not in pristine and before[name][0] != stat.S_IFDIR and _counts(name)
    }  # fmt: skip
    reported = {problem.split(" does not belong")[0] for problem in summary["problems"]}
    if strange - reported:
        return BAD, f"ignored without a word: {sorted(strange - reported)}"
    for name in changed:  # what is stored, for the comparison: without files that are rightly ignored
        if name in strange:
            (root / name).unlink()
    documents = document_changes(root, original)
    odd = list(document_problems(out, expected, documents))
    if odd:
        return BAD, f"documents: {odd[:5]}"
    differences = compare_checkpoints(expected, out, all_stages=False)
    stored = same_content(original, root, changed)
    if not differences and stored:
        return (CARRIED if documents else SAME), ""
    code, printed, wrong = bounded_cli(case, "fingerprint", out, "--json")
    if code or wrong:
        return BAD, f"the output cannot be read: {printed}{wrong}"
    digests = json.loads(printed)
    for name in ("tensors_digest", "hyperparameters_digest", "weights_digest"):
        if digests[name] != summary[name]:
            return BAD, f"{name} of the output is not the source's"
    back = out
    if target != "same":
        back = case / "back"
        code, printed, wrong = bounded_cli(case, "reshard", out, back, *_sizes(fixture), "--no-fsync", "--json")
        if code == 2 and not wrong:  # the source's topology does not take what it holds now: the digests must do
            return CARRIED, ""
        if code or wrong:
            return BAD, f"does not go back: {printed[-2000:]}{wrong}; {differences[:3]}"
    shutil.copy(out / "optimizer/optimizer_config.json", case)  # restated from the tensors: of no weight in itself
    (root / "optimizer/optimizer_config.json").unlink()
    (back / "optimizer/optimizer_config.json").unlink()
    try:
        lost = compare_checkpoints(root, back, hybrid_names=fixture.has_old_names, all_stages=False)
    except Exception as error:
        return BAD, f"accepted what torch cannot load, and the output differs: {error}; {differences[:5]}"
    if not _has_lambda(root):  # then None and {} are the same, and each dialect writes its own
        lost = [line for line in lost if not _ABSENT_LAMBDA.search(line)]
    return (
        (BAD, f"stored {stored}, not carried: {lost[:5]}; against the unmutated: {differences[:5]}")
        if lost
        else (CARRIED, "")
    )


_ABSENT_LAMBDA = re.compile(r": lr_lambdas\[\d+\]: (NoneType instead of dict|dict instead of NoneType)$")


def _has_lambda(root: Path) -> bool:
    """Tell whether a scheduler holds the state of a lambda that is an object."""
    from tests.compare import _load

    states = [_load(path) for path in (root / "lr_scheduler").glob("*.pt")]
    return any(value not in (None, {}) for state in states for value in state.get("lr_lambdas", ()))


def _counts(name: str) -> bool:
    """Whether a strange file lies where the reader looks: elsewhere in the folder anything may lie."""
    parts = name.split("/")
    return parts[0] == "model" or (parts[0] in ("optimizer", "lr_scheduler") and len(parts) == 2)


def _sizes(fixture: Fixture) -> list[str]:
    options = fixture.target_options()
    return options[: options.index("--dialect")]


def same_content(original: Path, root: Path, changed: list[str]) -> bool:
    """Tell whether the changed files still hold the same tensors and values, as torch reads them."""
    from tests.compare import _load, differ

    for name in changed:
        one, two = original / name, root / name
        if not name.startswith(PARTS) or name.endswith("optimizer_config.json") or two.is_dir():
            continue
        if not one.exists() or not two.exists():
            if one.exists() or two.exists():
                return False
            continue
        try:
            if differ(_load(one), _load(two)):
                return False
        except Exception:
            continue  # torch cannot read it: then the output must be as unmutated
    return True


def _flat(tree: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flat(value, f"{at}.{key}" if at else str(key))
        yield at + "{}", sorted(map(str, tree))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from _flat(value, f"{at}.{i}")
        yield at + "[]", len(tree)
    else:
        yield at, (type(tree).__name__, repr(tree))


DOCUMENTS = ("model_config.json", "config.yaml", "checkpoint_metadata.json")


def _document(path: Path) -> dict[str, Any]:
    text = path.read_text()
    return dict(_flat(yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)))


def document_changes(root: Path, original: Path) -> dict[str, dict[str, Any]]:
    """Return what a mutation says otherwise in the documents: new values by place, None where one is gone."""
    found = {}
    for name in DOCUMENTS:
        was, now = _document(original / name), _document(root / name)
        changes = {place: now.get(place) for place in {*was, *now} if was.get(place) != now.get(place)}
        if changes:
            found[name] = changes
    return found


def document_problems(out: Path, expected: Path, changes: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield where the written documents are not the expected ones with the changes of the mutation."""
    for name in DOCUMENTS:
        want, have = _document(expected / name), _document(out / name)
        want.update(changes.get(name, {}))
        for place in {*want, *have}:
            if want.get(place) != have.get(place):
                top = place.rstrip("{}[]")
                if name in changes and (not top or _RESTATED.match(top)):
                    continue
                yield f"{name}: {place} is {have.get(place)}, not {want.get(place)}"


Case = Callable[[int, int, "str | None", Path, Path, Path], Outcome]


def run_all(
    folder: Path, scratch: Path, *, seed: int, count: int = 0, first: int = 0, numbers: Sequence[int] = (),
    jobs: int = 1, only: str | None = None, prepare: Callable[[Path, Path], None] = prepare, case: Case = run_case,
) -> Iterator[Outcome]:  # fmt: skip
    """Yield the outcome of cases ``first`` to ``first + count - 1``, or of ``numbers``, in order."""
    good = scratch / "good"
    good.mkdir()
    prepare(folder, good)
    one = partial(case, seed=seed, only=only, folder=folder, good=good, scratch=scratch)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=start_worker) as pool:
        yield from pool.map(one, numbers or range(first, first + count), chunksize=4)


def main(argv: list[str] | None = None) -> int:
    """Print bad outcomes and the tally; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixtures", type=Path, nargs="?", help="folder with INDEX.json and checkpoints/")
    parser.add_argument("--megatron", action="store_true", help="Megatron checkpoints: convert, fingerprint, inspect")
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", choices=sorted({*MUTATORS, *megatron.MUTATORS}))
    parser.add_argument("--verbose", action="store_true", help="a line for every case")
    parser.add_argument("--scratch", type=Path, help="folder for the cases; a tmpfs is fastest")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=options.scratch) as scratch:
        folder = Path(scratch, "unpacked")  # on one file system with the cases: files are hard links
        if options.megatron:
            megatron.unpack(folder)
        elif options.fixtures:
            shutil.copytree(options.fixtures, folder)
        else:
            unpack(folder)
        what = {"prepare": megatron.prepare, "case": megatron.run_case} if options.megatron else {}
        outcomes = run_all(
            folder, Path(scratch), count=options.count, seed=options.seed, first=options.first, jobs=options.jobs,
            only=options.only, **what,
        )  # fmt: skip
        return print_tally(count(outcomes, verbose=options.verbose))


if __name__ == "__main__":
    sys.exit(main())
