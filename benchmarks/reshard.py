"""Measure re-sharding against cp, torch and nanotron's way: every variant in a fresh process, in interleaved rounds.

    python benchmarks/reshard.py --dir FOLDER                       # all cases but those that need --case
    python benchmarks/reshard.py --dir FOLDER --case tp4-2 --rounds 7 --json RESULT.json

Prints a Markdown table a case. Seconds are the work alone, without interpreter start and imports; ``whole`` is from
start to exit. Ratios are to ``cp --reflink=never`` of the same files in the same round: median, with the least and the
greatest. The page cache is warm and nothing is synced. ``anonymous`` and ``file`` are the peaks of one process,
sampled every 20 ms; ``read`` and ``written`` are what the system calls moved (mapped files do not count). Outputs are
compared bit for bit in the first round, outside the timer. ``others`` is how many processors other programs kept busy
meanwhile: above ``QUIET`` the result is marked as not to be published, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUIET = 0.2  # processors
TICK = os.sysconf("SC_CLK_TCK")
SMALL = ROOT / "tests/data/nanotron/nt04-llama_tied-z0-tp2-pp1-dp1-ep1"
OURS = {
    "ours-1": {"workers": 1, "crc_check": False, "receipt": False},
    "ours-2": {"workers": 2, "crc_check": False, "receipt": False},
    "ours-1-crc": {"workers": 1, "crc_check": True, "receipt": False},
    "ours-2-crc": {"workers": 2, "crc_check": True, "receipt": False},
    "ours-1-all": {"workers": 1, "crc_check": True, "receipt": True},
    "ours-2-all": {"workers": 2, "crc_check": True, "receipt": True},
}
SLOW = ("torch-cat", "nanotron", "dcp-2")


@dataclass(frozen=True)
class Case:
    """A checkpoint to make (options of ``synthetic.py``), the topology wanted, and what is measured."""

    make: Mapping[str, int]
    to: Mapping[str, int]
    variants: tuple[str, ...] = ("cp", *OURS)
    on_demand: bool = False


TWO_GB = {"layers": 48, "hidden": 512, "intermediate": 1536}
CASES = {
    "tp4-2": Case({**TWO_GB, "tp": 4}, {"tp": 2}, ("cp", *OURS, "cp-optimizer", *SLOW)),
    "tp4-8": Case({**TWO_GB, "tp": 4}, {"tp": 8}),
    "zero4-2": Case({**TWO_GB, "tp": 1, "dp": 4, "zero": 1}, {"dp": 2}),
    "mixed": Case({**TWO_GB, "tp": 4, "pp": 2, "dp": 2, "zero": 1}, {"tp": 2, "pp": 1, "dp": 4}),
    "small-10000": Case({"layers": 1666, "hidden": 16, "intermediate": 32, "vocab": 64, "tp": 4}, {"tp": 2}),
    "ranks64-32": Case({**TWO_GB, "tp": 8, "pp": 2, "dp": 4, "zero": 1}, {"tp": 4}),
    "8gb": Case({"layers": 48, "hidden": 1024, "intermediate": 3072, "tp": 4}, {"tp": 2}, on_demand=True),
    "start": Case({}, {"tp": 1}, ("cp", "inspect", "reshard")),
}


# --- one variant, in its own process --------------------------------------------------------------------------------


def prepare(variant: str, source: Path, out: Path, to: Mapping[str, int]) -> Callable[[], Any]:
    """Import what a variant needs and return its work."""
    if variant == "cp":
        return lambda: _copy(source, out)
    if variant == "cp-optimizer":
        return lambda: _copy(source / "optimizer", out)
    if variant in OURS:
        return _ours(OURS[variant], source, out, to)
    from benchmarks import others

    return others.VARIANTS[variant](source, out, to)


def _copy(source: Path, out: Path) -> None:
    subprocess.run(["cp", "-r", "--reflink=never", source, out], check=True)


def _ours(how: Mapping[str, Any], source: Path, out: Path, to: Mapping[str, int]) -> Callable[[], Any]:
    from nemo_optim_bridge.core.team import Workers
    from nemo_optim_bridge.formats.nanotron.reshard import Options, plan_reshard

    options = Options(**to, check_crcs=how["crc_check"], receipt=how["receipt"], fsync=False)

    def work() -> None:
        plan_reshard(source, out, options, Workers(how["workers"])).run()

    return work


def run_variant(variant: str, source: Path, out: Path, to: Mapping[str, int]) -> dict[str, Any]:
    """Do a variant's work in this process and return what it took; sizes are in bytes."""
    work = prepare(variant, source, out, to)
    floor, io, cpu, start = _resident(), _io(), os.times(), time.perf_counter()
    finish = work()
    seconds, end = time.perf_counter() - start, os.times()
    moved = [b - a for a, b in zip(io, _io(), strict=True)]
    used = sum(end[:4]) - sum(cpu[:4])
    if finish is not None:
        finish()
    return {"seconds": seconds, "cpu": used, "floor": floor, "read": moved[0], "written": moved[1]}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _io() -> tuple[int, int]:
    """Return bytes read and written by this process and those of its children that it has waited for."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"]), int(fields["wchar"])


# --- the rounds -----------------------------------------------------------------------------------------------------


class Peaks(threading.Thread):
    """Watches a process and its descendants; ``anonymous``, ``file`` and ``total`` are the largest of one process."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._done = pid, threading.Event()
        self.anonymous = self.file = self.total = 0
        self.start()

    def run(self) -> None:
        """Look every 20 ms until ``finish``."""
        while not self._done.wait(0.02):
            for pid in self._family(self._pid):
                try:
                    status = Path(f"/proc/{pid}/status").read_text()
                except OSError:
                    continue
                fields = dict(line.split(":", 1) for line in status.splitlines())
                if "VmRSS" in fields:
                    sizes = [int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "VmHWM")]
                    self.anonymous = max(self.anonymous, sizes[0])
                    self.file = max(self.file, sizes[1])
                    self.total = max(self.total, sizes[2])

    def _family(self, pid: int) -> Iterator[int]:
        yield pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return
        for child in children:
            yield from self._family(int(child))

    def finish(self) -> None:
        """Stop watching."""
        self._done.set()
        self.join()


def command_of(variant: str, source: Path, out: Path, to: Mapping[str, int]) -> list[str]:
    """Return the command of a fresh process: the package's own, or this file for one variant."""
    cli = [sys.executable, "-m", "nemo_optim_bridge"]
    if variant == "inspect":
        return [*cli, "inspect", str(source)]
    if variant == "reshard":
        sizes = [word for axis, size in to.items() for word in (f"--{axis}", str(size))]
        return [*cli, "reshard", str(source), str(out), "--no-fsync", *sizes]
    return [sys.executable, __file__, "--run", variant, str(source), str(out), json.dumps(to)]


def measure(variant: str, source: Path, out: Path, to: Mapping[str, int]) -> dict[str, Any]:
    """Run a variant in a fresh process; return what it says and what was seen from outside."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    before, start = _busy(), time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command_of(variant, source, out, to), stdout=said, env=environment)
        peaks = Peaks(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        whole = time.perf_counter() - start
        peaks.finish()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{variant} ended with exit code {process.returncode}")
        said.seek(0)
        text = said.read()
    cpu = usage.ru_utime + usage.ru_stime
    others = max(0.0, (_busy() - before - cpu) / whole)
    found: dict[str, Any] = {"seconds": whole, "cpu": cpu}
    if variant not in ("inspect", "reshard"):
        found = json.loads(text)
    return {
        **found, "whole": whole, "others": others,
        "rss": peaks.total, "anonymous": peaks.anonymous, "file": peaks.file,
    }  # fmt: skip


def _busy() -> float:
    """Return the processor seconds that this machine has spent on all programs."""
    user, nice, system = (int(word) for word in Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / TICK


def run_case(name: str, folder: Path, rounds: int, variants: tuple[str, ...]) -> list[dict[str, Any]]:
    """Measure all variants of a case in interleaved rounds; return one record each."""
    case = CASES[name]
    source, reference = _source(case, folder), folder / "reference"
    measured: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    try:
        if set(variants) & {*OURS, *SLOW}:
            measure("ours-1-all", source, reference, case.to)
            _require_same(source, reference)
        for number in range(rounds):
            for variant in variants:
                with _output(folder) as out:
                    measured[variant].append(measure(variant, source, out, case.to))
                    if not number:
                        _check(variant, source, reference, out)
    finally:
        shutil.rmtree(reference, ignore_errors=True)
    return [{"case": name, **_summary(variant, measured)} for variant in variants]


@contextmanager
def _output(folder: Path) -> Iterator[Path]:
    """Yield where an output goes, and remove it."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    try:
        yield out
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _source(case: Case, folder: Path) -> Path:
    """Return the case's checkpoint, made once for all cases that want the same, and read once to warm the cache."""
    if not case.make:
        return SMALL
    words = [f"{option}{value}" for option, value in case.make.items()]
    source = folder / ("source-" + "-".join(words))
    if not source.exists():
        options = [word for option, value in case.make.items() for word in (f"--{option}", str(value))]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        script = Path(__file__).with_name("synthetic.py")
        subprocess.run([sys.executable, str(script), str(source), *options], check=True, env=environment)
    subprocess.run(f"find {source} -type f -exec cat {{}} + > /dev/null", shell=True, check=True)
    return source


def _check(variant: str, source: Path, reference: Path, out: Path) -> None:
    """Compare an output bit for bit with the source, or with the verified output of this package."""
    if variant in OURS or variant == "reshard":
        _require_same(source, out)
    elif variant == "cp":
        subprocess.run(["diff", "-r", source, out], check=True)
    elif variant in SLOW:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "benchmarks.others", variant, str(reference), str(source), str(out)]
        subprocess.run(command, check=True, env=environment)


def _require_same(source: Path, out: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "nemo_optim_bridge", "verify", str(source), str(out)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def _summary(variant: str, measured: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the medians of a variant, and its ratio to cp round by round."""
    runs = measured[variant]
    names = ("seconds", "cpu", "whole", "rss", "anonymous", "file", "floor", "read", "written")
    found: dict[str, Any] = {
        name: median([run[name] for run in runs]) for name in names if all(name in run for run in runs)
    }
    copies = measured.get("cp-optimizer" if variant in SLOW else "cp", [])
    for what in ("seconds", "cpu"):
        ratios = [run[what] / copy[what] for run, copy in zip(runs, copies, strict=False) if copy[what]]
        if ratios:
            found[f"{what}_ratio"] = [median(ratios), min(ratios), max(ratios)]
    return {
        "variant": variant, "rounds": len(runs), **found,
        "others": [round(run["others"], 2) for run in runs],
    }  # fmt: skip


# --- the table ------------------------------------------------------------------------------------------------------

COLUMNS = {
    "variant": "variant", "seconds_ratio": "x cp", "cpu_ratio": "CPU x cp", "seconds": "s", "cpu": "CPU s",
    "whole": "whole s", "rss": "RSS MB", "anonymous": "anonymous", "file": "file", "floor": "after imports",
    "read": "read MB", "written": "written MB", "others": "others",
}  # fmt: skip


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.endswith("_ratio"):
        return f"{value[0]:.2f} ({value[1]:.2f}-{value[2]:.2f})"
    if name == "others":
        return f"{max(value):.2f}"
    return value if isinstance(value, str) else f"{value:.2f}" if value < 1000 else f"{value / 1e6:,.1f}"


def print_table(records: list[dict[str, Any]]) -> None:
    """Print one case."""
    print(f"\n### {records[0]['case']}, {records[0]['rounds']} rounds\n")
    print(f"| {' | '.join(COLUMNS.values())} |\n|{'---|' * len(COLUMNS)}")
    for record in records:
        print(f"| {' | '.join(_cell(name, record.get(name)) for name in COLUMNS)} |", flush=True)


def main() -> int:
    """Measure the cases asked for; return 1 when the machine was too busy for the result to mean much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="on a real file system, with room for three checkpoints a case")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--variant", action="append", help="only these; cp is always measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="append one line a variant")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints for the next time")
    parser.add_argument("--run", nargs=4, metavar=("VARIANT", "SOURCE", "OUT", "TO"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        variant, source, out, to = options.run
        print(json.dumps(run_variant(variant, Path(source), Path(out), json.loads(to))))
        return 0
    if options.dir is None:
        parser.error("--dir is needed")
    options.dir.mkdir(parents=True, exist_ok=True)
    before = _busy()
    time.sleep(1)
    noise = _busy() - before
    print(
        f"load average {' '.join(f'{load:.2f}' for load in os.getloadavg())}, {noise:.2f} processors busy at the start"
    )
    busiest = noise
    for name in options.case or [name for name, case in CASES.items() if not case.on_demand]:
        chosen = tuple(
            variant
            for variant in CASES[name].variants
            if not options.variant or variant in options.variant or variant.startswith("cp")
        )
        records = run_case(name, options.dir, options.rounds, chosen)
        print_table(records)
        busiest = max(busiest, *(max(record["others"]) for record in records))
        if options.json:
            with options.json.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
    if not options.keep:
        for source in options.dir.glob("source-*"):
            shutil.rmtree(source)
    if busiest > QUIET:
        print(f"\nNOT TO BE PUBLISHED: other programs kept {busiest:.2f} processors busy; wait for a quiet machine")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
