"""Run the command line on a damaged checkpoint under limits and watched, and count what came of it."""

from __future__ import annotations

import collections
import faulthandler
import hashlib
import json
import os
import resource
import shutil
import signal
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.mutators import CANARY
from tests.nanotron.pair_table import run_cli

CPU_SECONDS, WALL_SECONDS, MEMORY_BYTES = 30, 300, 3 << 30
Tally = dict[str, "collections.Counter[str]"]
SAME, CARRIED, BAD = "right: as unmutated", "right: carries the change", "BAD"


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
            makes_link = event in ("os.link", "os.symlink")  # reads the one, writes the other
            for path in arguments[makes_link:2]:
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


@contextmanager
def new_case(number: int, original: Path, scratch: Path) -> Iterator[Path]:
    """Yield a folder of its own, the current one, with a copy of a checkpoint (hard links) as ``source``."""
    case = Path(tempfile.mkdtemp(prefix=f"case-{number}-", dir=scratch))
    os.chdir(case)
    try:
        shutil.copytree(original, case / "source", copy_function=os.link)
        yield case
    finally:
        os.chdir(scratch)
        shutil.rmtree(case, ignore_errors=True)


def judged(judge: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Return a verdict and its reason; a judge that fails is a bad outcome, too."""
    try:
        return judge()
    except Exception:
        return BAD, "the judge failed: " + traceback.format_exc()


def typed_refusal(left: list[str], printed: str) -> tuple[str, str]:
    """Judge a run with exit code 2: one clear error of the project's own kinds, and nothing left behind."""
    if left != ["source"]:
        return BAD, f"refused, and left {left}"
    answer = json.loads(printed[printed.index("\n{") :])
    if not printed.startswith("error: ") or len(printed) > 100_000:
        return BAD, f"an unclear error: {printed[:500]}"
    return f"refused: {answer['error']}", ""


def forbidden(case: Path, before: dict[str, Any], printed: str, wrong: str) -> str:
    """Return what no run may do, in words; empty when it did nothing of the kind."""
    if snapshot(case / "source") != before:
        wrong += "the source changed"
    if (case / CANARY).exists():
        wrong += "code ran"
    if "Traceback" in printed or printed.startswith("error: unexpected"):
        wrong += printed
    return wrong


def count(outcomes: Iterable[Outcome], *, verbose: bool = False, every: int = 500) -> Tally:
    """Print bad outcomes as they come, and the running tally to stderr; return it."""
    tally: Tally = collections.defaultdict(collections.Counter)
    for number, outcome in enumerate(outcomes, 1):
        tally[outcome.kind][outcome.verdict] += 1
        if outcome.verdict == BAD or verbose:
            print(f"{outcome.number}: {outcome.kind}: {outcome.verdict}: {outcome.what}", flush=True)
        if outcome.detail:
            print("    " + outcome.detail[-3000:].replace("\n", "\n    "), flush=True)
        if number % every == 0:
            bad = sum(outcomes[BAD] for outcomes in tally.values())
            print(f"{number} cases, up to {outcome.number}: {bad} bad outcomes", file=sys.stderr, flush=True)
    return tally


def print_tally(tally: Tally) -> int:
    """Print the outcomes of every kind of mutation, all together, and as JSON; return 1 when one was bad."""
    total: collections.Counter[str] = collections.Counter()
    for kind, outcomes in sorted(tally.items()):
        total.update(outcomes)
        print(f"{kind:26} {outcomes.total():6}  " + ", ".join(f"{n} {what}" for what, n in outcomes.most_common()))
    print(f"{'all':26} {total.total():6}  " + ", ".join(f"{n} {what}" for what, n in total.most_common()))
    print(
        json.dumps(
            {"cases": total.total(), "bad": total[BAD], "outcomes": {k: dict(n) for k, n in sorted(tally.items())}}
        )
    )
    print(f"{total[BAD]} bad outcomes")
    return 1 if total[BAD] else 0
