"""Mutate real checkpoints at random, re-shard them, and judge every outcome.

    python -m tests.fuzz.mutations [FIXTURES] --count 10000 --seed 1 --jobs 2 [--first N] [--only KIND] [--verbose]

An outcome is good when it is the exact result for what is stored, or a typed refusal (exit code 2) that leaves
nothing. Bad: another exception, other bytes, something written, a changed source, code that ran, no end, too much
memory. Prints a tally by kind and outcome; exit code 1 when an outcome was bad. Case N of a seed is always the same.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import hashlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.compare import PARTS, compare_checkpoints
from tests.fuzz.mutators import CANARY, MUTATORS
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
CPU_SECONDS, WALL_SECONDS, MEMORY_BYTES = 30, 300, 3 << 30
SAME, CARRIED, BAD = "right: as unmutated", "right: carries the change", "BAD"
#: What a re-shard may state anew in the documents.
_RESTATED = re.compile(
    r"tp|dp|pp|cp|ep|version|vocab_size|zero_stage|parallelism|expert_parallel_size|custom_metas|metas\."
    r"|model\.model_config\.vocab_size|metas|optimizer$|model\.model_config$|optimizer\.zero_stage"
)


@dataclass(frozen=True)
class Outcome:
    """What became of one case; ``detail`` is empty when it is good."""

    number: int
    kind: str
    verdict: str
    what: str
    detail: str = ""


class _NoEnd(BaseException):
    pass


class _Watch:
    """Notes forbidden acts: commands, connections, writing outside of the case's folder."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.acts: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "socket.connect"):
            self.acts.append(event)
        elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path, _, flags = arguments
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self._write(os.fsdecode(path))
        elif event in ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.truncate", "os.remove", "os.rmdir"):
            for path in arguments[:2]:
                if isinstance(path, str | bytes | os.PathLike):
                    self._write(os.fsdecode(path))

    def _write(self, path: str) -> None:
        whole = os.path.abspath(path)  # noqa: PTH100 - a hook must not open anything
        inside = whole.startswith(f"{self.folder}/") and not whole.startswith(f"{self.folder}/source")
        if not inside and not whole.endswith("__pycache__") and ".pyc" not in whole:
            self.acts.append(f"write to {path}")


_watch: _Watch | None = None


def start_worker() -> None:
    """Bound this process's memory, and watch what it does."""
    global _watch
    torch.set_num_threads(1)
    run_cli("--version")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    for kind in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(kind, _stop)
    _watch = _Watch()


def _stop(*_: object) -> None:
    raise _NoEnd


def snapshot(root: Path) -> dict[str, tuple[Any, ...]]:
    """Return what every path below a folder is and holds; reads no pipes and no huge files."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content: object = None
        if path.is_symlink():
            content = str(path.readlink())
        elif stat.S_ISREG(status.st_mode) and status.st_size < 1 << 24:
            content = hashlib.blake2b(path.read_bytes()).digest()
        found[path.relative_to(root).as_posix()] = (stat.S_IFMT(status.st_mode), status.st_size, content)
    return found


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
    case = Path(tempfile.mkdtemp(prefix=f"case-{number}-", dir=scratch))
    os.chdir(case)
    try:
        root = case / "source"
        original = folder / "checkpoints" / fixture.name
        shutil.copytree(original, root, copy_function=os.link)
        what = f"{fixture.name} to {target}: {MUTATORS[kind](root, rng)}"
        try:
            verdict, detail = judge(case, fixture, target, original, good)
        except Exception:
            verdict, detail = BAD, "the judge failed: " + traceback.format_exc()
        return Outcome(number, kind, verdict, what, detail)
    finally:
        os.chdir(scratch)
        shutil.rmtree(case, ignore_errors=True)


def bounded_cli(case: Path, *argv: str | Path) -> tuple[int, str, str]:
    """Run the command line under the limits; return exit code, output, and what was wrong with the run itself."""
    watch = _watch
    if watch is None:
        raise RuntimeError("call start_worker first")
    watch.folder, watch.acts = str(case), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    faulthandler.dump_traceback_later(2 * WALL_SECONDS, exit=True)
    wrong, code, printed = "", -1, ""
    try:
        code, printed = run_cli(*argv)
    except _NoEnd:
        wrong = "no end: " + traceback.format_exc(limit=-6)
    except BaseException:
        wrong = traceback.format_exc(limit=-6)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        watch.folder = None
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if grown > 300_000:
        wrong += f"memory grew by {grown >> 10} MiB"
    if watch.acts:
        wrong += f"forbidden: {watch.acts[:3]}"
    return code, printed, wrong


def judge(case: Path, fixture: Fixture, target: str, original: Path, good: Path) -> tuple[str, str]:
    """Re-shard the mutated checkpoint and say whether what came of it is right."""
    root, out = case / "source", case / "out"
    before = snapshot(root)
    code, printed, wrong = bounded_cli(case, "reshard", root, out, *TARGETS[target], "--no-fsync", "--json")
    left = sorted(path.name for path in case.iterdir())
    if snapshot(root) != before:
        wrong += "the source changed"
    if CANARY in left:
        wrong += "code ran"
    if wrong or "Traceback" in printed or printed.startswith("error: unexpected"):
        return BAD, wrong or printed
    if code == 2:
        if left != ["source"]:
            return BAD, f"refused, and left {left}"
        answer = json.loads(printed[printed.index("\n{") :])
        if not printed.startswith("error: ") or len(printed) > 100_000:
            return BAD, f"an unclear error: {printed[:500]}"
        return f"refused: {answer['error']}", ""
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
    return (
        (BAD, f"stored {stored}, not carried: {lost[:5]}; against the unmutated: {differences[:5]}")
        if lost
        else (CARRIED, "")
    )


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


def run_all(
    folder: Path, scratch: Path, *, seed: int, count: int = 0, first: int = 0, numbers: Sequence[int] = (),
    jobs: int = 1, only: str | None = None,
) -> Iterator[Outcome]:  # fmt: skip
    """Yield the outcome of cases ``first`` to ``first + count - 1``, or of ``numbers``, in order."""
    good = scratch / "good"
    good.mkdir()
    prepare(folder, good)
    case = partial(run_case, seed=seed, only=only, folder=folder, good=good, scratch=scratch)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=start_worker) as pool:
        yield from pool.map(case, numbers or range(first, first + count), chunksize=4)


def main(argv: list[str] | None = None) -> int:
    """Print bad outcomes and the tally; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixtures", type=Path, nargs="?", help="folder with INDEX.json and checkpoints/")
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", choices=sorted(MUTATORS))
    parser.add_argument("--verbose", action="store_true", help="a line for every case")
    parser.add_argument("--scratch", type=Path, help="folder for the cases; a tmpfs is fastest")
    options = parser.parse_args(argv)
    tally: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=options.scratch) as scratch:
        folder = unpack(Path(scratch, "unpacked"))  # on one file system with the cases: files are hard links
        if options.fixtures:
            shutil.rmtree(folder)
            shutil.copytree(options.fixtures, folder)
        for outcome in run_all(
            folder, Path(scratch), count=options.count, seed=options.seed, first=options.first, jobs=options.jobs,
            only=options.only,
        ):  # fmt: skip
            tally[outcome.kind][outcome.verdict] += 1
            if outcome.verdict == BAD or options.verbose:
                print(f"{outcome.number}: {outcome.kind}: {outcome.verdict}: {outcome.what}", flush=True)
            if outcome.detail:
                print("    " + outcome.detail[-3000:].replace("\n", "\n    "), flush=True)
    return print_tally(tally)


def print_tally(tally: dict[str, collections.Counter[str]]) -> int:
    """Print the outcomes of every kind of mutation, and all together; return 1 when one was bad."""
    total: collections.Counter[str] = collections.Counter()
    for kind, outcomes in sorted(tally.items()):
        total.update(outcomes)
        print(f"{kind:26} {outcomes.total():6}  " + ", ".join(f"{n} {what}" for what, n in outcomes.most_common()))
    print(f"{'all':26} {total.total():6}  " + ", ".join(f"{n} {what}" for what, n in total.most_common()))
    print(f"{total[BAD]} bad outcomes")
    return 1 if total[BAD] else 0


if __name__ == "__main__":
    sys.exit(main())
