"""Kill re-shards at random moments, and look at what is left.

    python -m tests.faults.kill_table [--kills 200] [--after-first-byte 150] [--seed 1] [--folder DIR]

After every kill: the source is as it was; the output is absent, or complete; the next run succeeds without clearing up
by hand and leaves nothing else. Prints the tally; exit code 1 when anything was otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.edits import fingerprint
from tests.faults.launcher import Launcher
from tests.nanotron.fixtures import unpack

NAME = "nt04-llama_tied-z1-tp2-pp2-dp2-ep1"
BEFORE, WRITING, COMPLETE = "before the first byte", "after the first byte", "after the rename"


def main(argv: list[str] | None = None) -> int:
    """Print the tally; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--after-first-byte", type=int, metavar="N", help="at least; default: three quarters of --kills"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to work; on a disk the writing takes longest")
    options = parser.parse_args(argv)
    wanted = options.kills * 3 // 4 if options.after_first_byte is None else options.after_first_byte
    with tempfile.TemporaryDirectory(prefix="kills-", dir=options.folder) as folder:
        tally, problems = kill_runs(Path(folder), options.kills, wanted, options.seed)
    for problem in problems:
        print(problem)
    for moment in (BEFORE, WRITING, COMPLETE):
        print(f"{tally[moment]:6} killed {moment}")
    print(f"{tally['scratch']:6} of them left a scratch folder, {tally['next']} next runs succeeded and left nothing")
    print(f"{sum(tally[moment] for moment in (BEFORE, WRITING, COMPLETE)):6} kills, {len(problems)} bad outcomes")
    return 1 if problems else 0


def kill_runs(folder: Path, kills: int, after_first_byte: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Kill ``kills`` runs, ``after_first_byte`` of them or more once output was written; return tally and problems."""
    rng = random.Random(seed)
    work = folder / "work"
    work.mkdir()
    shutil.copytree(unpack(folder / "fixtures") / "checkpoints" / NAME, work / "source")
    (folder / "logs").mkdir()
    source, out = work / "source", work / "out"
    before = fingerprint(source)
    command = ("reshard", source, out, "--tp", "1", "--pp", "1")
    tally: Counter[str] = Counter()
    problems: list[str] = []
    with Launcher(folder / "logs") as launcher:
        start = time.monotonic()
        ended = launcher.run(*command)
        took = time.monotonic() - start
        if ended.code:
            return tally, [ended.printed]
        good = fingerprint(out)
        shutil.rmtree(out)
        num_files = sum(path.is_file() for path in source.rglob("*")) // 2
        while (done := tally[BEFORE] + tally[WRITING] + tally[COMPLETE]) < kills:
            must_write = kills - done <= after_first_byte - tally[WRITING] - tally[COMPLETE]
            run = launcher.start(*command)
            if must_write or rng.random() < 0.85:
                _wait_for_output(work, rng.randrange(num_files))
                time.sleep(rng.random() * took * 0.05)
            else:
                time.sleep(rng.random() * took)
            with contextlib.suppress(ProcessLookupError):
                os.kill(run[0], signal.SIGKILL)
            if launcher.wait(run).code == -signal.SIGKILL:
                tally[COMPLETE if out.exists() else WRITING if _num_written(work) else BEFORE] += 1
            if out.exists() and fingerprint(out) != good:
                problems.append("an output that is not complete")
            if out.exists():
                shutil.rmtree(out)
            tally["scratch"] += any(path.name.startswith(".out.partial-") for path in work.iterdir())
            ended = launcher.run(*command)
            left = sorted(path.name for path in work.iterdir())
            if ended.code or left != ["out", "source"] or fingerprint(out) != good:
                problems.append(f"the next run: exit code {ended.code}, left {left}: {ended.printed}")
            else:
                tally["next"] += 1
            if fingerprint(source) != before:
                problems.append("the source changed")
                break
            shutil.rmtree(out, ignore_errors=True)
    return tally, problems


def _num_written(work: Path) -> int:
    """Count files with bytes below the scratch folder."""
    count = 0
    for scratch in work.glob(".out.partial-*"):
        for folder, _, names in os.walk(scratch):
            for name in names:
                try:
                    count += Path(folder, name).stat().st_size > 0
                except FileNotFoundError:
                    continue
    return count


def _wait_for_output(work: Path, num_files: int) -> None:
    """Wait until the run has written more than ``num_files`` files, or has ended."""
    deadline = time.monotonic() + 60
    while _num_written(work) <= num_files and not (work / "out").exists() and time.monotonic() < deadline:
        time.sleep(0.0005)


if __name__ == "__main__":
    sys.exit(main())
