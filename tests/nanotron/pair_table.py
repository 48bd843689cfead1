"""Re-shard every fixture to the topology and dialect of every other of its model, and compare with the real one.

    python -m tests.nanotron.pair_table [FIXTURES_DIR] [--only SUBSTRING] [--jobs N]

Prints a line a pair and a tally. Exit code 0: every pair is equal, or refused where it must be; 1 otherwise.
Without a folder it unpacks and uses the fixtures of ``tests/data``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import itertools
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.compare import compare_checkpoints
from tests.nanotron.fixtures import Fixture, read_index, unpack

EQUAL, REFUSED, DIFFERENT, ERROR = "equal", "refused as expected", "DIFFERENT", "ERROR"
SINGLE_GROUP_DIALECTS = ("v0.1", "0.4")


@dataclass(frozen=True)
class Outcome:
    """What became of one pair; ``detail`` is empty when it is as it should be."""

    source: str
    target: str
    verdict: str
    detail: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the pair is as it should be."""
        return self.verdict in (EQUAL, REFUSED)


def run_cli(*argv: str | Path) -> tuple[int, str]:
    """Run the command line in this process; return its exit code and all that it printed."""
    from nemo_optim_bridge.__main__ import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code: Any = main([str(word) for word in argv])
        except SystemExit as stop:
            code = stop.code
    return (0 if code is None else code if isinstance(code, int) else 1), printed.getvalue()


def ordered_pairs(fixtures: dict[str, Fixture]) -> Iterator[tuple[Fixture, Fixture]]:
    """Yield every ordered pair of one logical model, a fixture with itself included."""
    for source, target in itertools.product(fixtures.values(), repeat=2):
        if source.model == target.model:
            yield source, target


def refusal(folder: Path, source: Fixture, target: Fixture) -> str | None:
    """Say why ``target`` cannot be written from ``source``, or return None when it can."""
    if target.num_experts and target.num_experts == target.ep:
        return "one expert per rank: the weight files of the ranks would overwrite each other"
    if target.dialect == "head" and target.ep > 1:
        return "this revision cannot build expert parallelism"
    if target.dialect == "v0.1" and target.is_tied:
        return "this revision does not tie embeddings"
    if target.dialect in SINGLE_GROUP_DIALECTS and source.dialect not in SINGLE_GROUP_DIALECTS:
        return None if _has_one_set_of_hyperparameters(folder / "checkpoints" / source.name) else "groups differ"
    return None


def _has_one_set_of_hyperparameters(checkpoint: Path) -> bool:
    files = (checkpoint / "optimizer").glob("*.pt")
    groups = [group for file in files for group in torch.load(file, weights_only=True)["param_groups"]]
    return len({repr({k: v for k, v in group.items() if k != "params"}) for group in groups}) <= 1


def check_pair(pair: tuple[Fixture, Fixture], folder: Path) -> Outcome:
    """Re-shard the first of the pair to the second's topology in a folder of its own, and judge the output."""
    source, target = pair
    outcome = partial(Outcome, source.name, target.name)
    expected_refusal = refusal(folder, source, target)
    with tempfile.TemporaryDirectory(prefix="pair-") as scratch:
        out = Path(scratch, "out")
        try:
            code, printed = run_cli(
                "reshard", folder / "checkpoints" / source.name, out, *target.target_options(), "--no-fsync"
            )
        except Exception:
            return outcome(ERROR, traceback.format_exc(limit=-4))
        left = sorted(path.name for path in Path(scratch).iterdir())
        if expected_refusal is not None:
            if code == 2 and not left:
                return outcome(REFUSED)
            return outcome(ERROR, f"must be refused ({expected_refusal}); exit code {code}, left behind: {left}")
        if code != 0 or left != ["out"]:
            return outcome(ERROR, f"exit code {code}, left behind: {left}\n{printed[-2000:]}")
        differences = compare_checkpoints(
            folder / "checkpoints" / target.name,
            out,
            hybrid_names=target.has_old_names,
            vocab_size=target.vocab_size,
        )
        return outcome(DIFFERENT, "\n".join(differences)) if differences else outcome(EQUAL)


def main(argv: list[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixtures", type=Path, nargs="?", help="folder with INDEX.json and checkpoints/")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only pairs whose 'A -> B' contains it")
    parser.add_argument("--jobs", type=int, default=1, metavar="N")
    parser.add_argument("--lines", type=int, default=8, metavar="N", help="lines of detail for a bad pair")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="nanotron-fixtures-") as scratch:
        folder = options.fixtures or unpack(Path(scratch, "unpacked"))
        pairs = [p for p in ordered_pairs(read_index(folder)) if options.only in f"{p[0].name} -> {p[1].name}"]
        with multiprocessing.get_context("spawn").Pool(
            options.jobs, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            return report(pool.imap(partial(check_pair, folder=folder), pairs), lines=options.lines)


def report(outcomes: Iterator[Outcome], *, lines: int) -> int:
    """Print every outcome and the tally; return 0 when there are some and all are good."""
    tally: collections.Counter[str] = collections.Counter()
    for outcome in outcomes:
        tally[outcome.verdict] += 1
        print(f"{outcome.verdict:20} {outcome.source} -> {outcome.target}", flush=True)
        detail = outcome.detail.splitlines()
        shown = detail if len(detail) <= lines else [*detail[:lines], f"... {len(detail) - lines} more lines"]
        for line in shown:
            print(f"{'':21}{line}", flush=True)
    print(f"{tally.total()} pairs: " + (", ".join(f"{n} {verdict}" for verdict, n in tally.items()) or "none"))
    return 0 if tally and not tally[DIFFERENT] and not tally[ERROR] else 1


if __name__ == "__main__":
    sys.exit(main())
