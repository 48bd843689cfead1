"""Measure re-sharding against cp, torch and nanotron's way: every variant in a fresh process, in interleaved rounds.

    python benchmarks/reshard.py --dir FOLDER                       # all cases but those that need --case
    python benchmarks/reshard.py --dir FOLDER --case tp4-2 --rounds 7 --json RESULT.json

Prints a Markdown table a case. Seconds are the work alone, without interpreter start and imports, and for DCP without
forming a process group; ``whole`` is from start to exit. ``x cp`` is the ratio to ``cp --reflink=never`` of the same
files in the same round, ``x ours`` that to the variant of ours that it names: median, with the least and the greatest.
The page cache is warm and nothing is synced. ``anonymous`` and ``file`` are the peaks of one process, sampled every
20 ms; ``extra`` is its peak over what it held after its imports and over the state that it loaded. ``read`` and
``written`` are what the system calls moved (mapped files do not count). Outputs are compared bit for bit in the first
round, outside the timer. ``others`` is how many processors other programs kept busy meanwhile: above ``QUIET`` the
result is marked as not to be published, and the exit code is 1. Slow variants run in the first ``SLOW_ROUNDS`` rounds
only; the table says in how many each ran.

What the variants are:

    ours-N[-nocrc|-crc|-all]   this package with N processes; it writes valid CRCs, checks no source CRCs and writes no
                               receipt. nocrc: the benchmark takes the CRC function away, to show what it costs.
                               crc: source CRCs are checked. all: and a receipt with digests is written.
    optimizer-N                the same, but only the optimizer's files are written, against cp of those: a few large
                               ones, so that the system's creation of a folder and a file for each weight does not count
    reshard, inspect           the whole command as a user types it, with --no-fsync
    dcp-2                      torch DCP load + save of the same tensors, 2 processes; against ours-2
    nanotron, ours-load        both target ranks' optimizer state loaded into CPU tensors, one after the other: as
                               nanotron's loader does, and as ours does without its checks. nanotron is compared with
                               ours-1 too, which also moves the weights and writes files
    torch-cat                  torch.load + torch.cat + torch.save of the optimizer files
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
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
QUIET = 0.2  # processors
TICK = os.sysconf("SC_CLK_TCK")
SMALL = ROOT / "tests/data/nanotron/nt04-llama_tied-z0-tp2-pp1-dp1-ep1"
SLOW_ROUNDS = 3
OURS: Mapping[str, Mapping[str, Any]] = {
    "ours-1-nocrc": {"workers": 1, "crc": False},
    "ours-2-nocrc": {"workers": 2, "crc": False},
    "ours-1": {"workers": 1},
    "ours-2": {"workers": 2},
    "ours-2-crc": {"workers": 2, "check": True},
    "ours-1-all": {"workers": 1, "check": True, "receipt": True},
    "ours-2-all": {"workers": 2, "check": True, "receipt": True},
}
OPTIMIZER: Mapping[str, Mapping[str, Any]] = {
    f"optimizer-{workers}": {"workers": workers, "optimizer_only": True} for workers in (1, 2)
}
COMMANDS = ("inspect", "reshard")
OTHERS = ("dcp-2", "torch-cat", "ours-load", "nanotron")
SLOW = ("dcp-2", "torch-cat", "nanotron")
OPTIMIZER_ONLY = (*OPTIMIZER, "torch-cat", "ours-load", "nanotron")  # compared with cp of the optimizer's files
COUNTERPARTS = {"dcp-2": ("ours-2",), "nanotron": ("ours-load", "ours-1")}


@dataclass(frozen=True)
class Case:
    """A checkpoint to make (options of ``synthetic.py``), the topology wanted, and what is measured."""

    make: Mapping[str, int]
    to: Mapping[str, int]
    variants: tuple[str, ...] = ("cp", "ours-1", "ours-2", "ours-2-all")
    on_demand: bool = False


TWO_GB = {"layers": 48, "hidden": 512, "intermediate": 1536}
CASES = {
    "tp4-2": Case({**TWO_GB, "tp": 4}, {"tp": 2}, ("cp", *OURS, "reshard", "cp-optimizer", *OPTIMIZER, *OTHERS)),
    "tp4-8": Case({**TWO_GB, "tp": 4}, {"tp": 8}),
    "zero4-2": Case({**TWO_GB, "dp": 4, "zero": 1}, {"dp": 2}, ("cp", "ours-2-nocrc", "ours-2", "ours-2-all")),
    "ep4-2": Case({**TWO_GB, "layers": 12, "experts": 8, "ep": 4}, {"ep": 2}, ("cp", "ours-2", "ours-2-all")),
    "mixed": Case(
        {**TWO_GB, "tp": 4, "pp": 2, "dp": 2, "zero": 1},
        {"tp": 2, "pp": 1, "dp": 4},
        ("cp", "ours-2", "ours-2-all"),
    ),
    "ranks64-32": Case(
        {**TWO_GB, "tp": 8, "pp": 2, "dp": 4, "zero": 1},
        {"tp": 4},
        ("cp", "ours-2", "ours-2-all"),
    ),
    "small-10000": Case(
        {"layers": 1666, "hidden": 16, "intermediate": 32, "vocab": 64, "tp": 4},
        {"tp": 2},
        ("cp", "ours-1", "ours-1-all"),
    ),
    "8gb": Case({**TWO_GB, "hidden": 1024, "intermediate": 3072, "tp": 4}, {"tp": 2}, on_demand=True),
    "start": Case({}, {"tp": 1}, ("cp", "inspect", "reshard")),
}


# --- one variant, in its own process --------------------------------------------------------------------------------


def prepare(variant: str, source: Path, out: Path, to: Mapping[str, int]) -> Callable[[], Any]:
    """Import what a variant needs and return its work."""
    if variant == "cp":
        return lambda: _copy(source, out)
    if variant == "cp-optimizer":
        return lambda: _copy(source / "optimizer", out)
    if variant in OURS or variant in OPTIMIZER:
        return _ours(source, out, to, **{**OURS, **OPTIMIZER}[variant])
    from benchmarks import others

    return others.VARIANTS[variant](source, out, to)


def _copy(source: Path, out: Path) -> None:
    subprocess.run(["cp", "-r", "--reflink=never", source, out], check=True)


def _ours(
    source: Path, out: Path, to: Mapping[str, int], *, workers: int, check: bool = False, receipt: bool = False,
    crc: bool = True, optimizer_only: bool = False,
) -> Callable[[], Any]:  # fmt: skip
    from nemo_optim_bridge.core.team import Workers
    from nemo_optim_bridge.formats.nanotron.reshard import Options, plan_reshard

    options = Options(**to, check_crcs=check, receipt=receipt, fsync=False)

    def work() -> None:
        reshard = plan_reshard(source, out, options, Workers(workers))
        if optimizer_only:
            pairs = zip(reshard.files, reshard.writers, strict=True)
            files, writers = zip(*(pair for pair in pairs if pair[0].path.startswith("optimizer/")), strict=True)
            reshard = replace(reshard, files=files, writers=writers)
        reshard.run()

    return work if crc else patch("nemo_optim_bridge.core.write.crc32", lambda data, crc=0: 0)(work)


def run_variant(variant: str, source: Path, out: Path, to: Mapping[str, int]) -> dict[str, Any]:
    """Do a variant's work in this process and return what it took; sizes are in bytes."""
    work = prepare(variant, source, out, to)
    floor, io, cpu, start = _resident(), _io(), _cpu(), time.perf_counter()
    finish = work()
    seconds = time.perf_counter() - start
    used, moved = _cpu() - cpu, [b - a for a, b in zip(io, _io(), strict=True)]
    if finish is not None:
        finish.run()
    held = finish.held if finish else 0
    return {"seconds": seconds, "cpu": used, "floor": floor, "held": held, "read": moved[0], "written": moved[1]}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _cpu() -> float:
    """Return the processor seconds of this process and its children, those that still run included."""
    words = [Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:15] for pid in family(os.getpid())]
    running = sum(sum(map(int, times)) for times in words[1:]) / TICK
    return sum(os.times()[:4]) + running


def _io() -> tuple[int, int]:
    """Return bytes read and written by this process and its children, those that still run included."""
    read = written = 0
    for pid in family(os.getpid()):
        fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        read, written = read + int(fields["rchar"]), written + int(fields["wchar"])
    return read, written


def family(pid: int) -> Iterator[int]:
    """Yield a process and those of its descendants that run."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from family(int(child))


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
            for pid in family(self._pid):
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
    if variant not in COMMANDS:
        found = json.loads(text)
        found["extra"] = max(0, peaks.total - found["floor"] - found["held"])
    return {
        **found, "whole": whole, "others": others,
        "rss": peaks.total, "anonymous": peaks.anonymous, "file": peaks.file,
    }  # fmt: skip


def _busy() -> float:
    """Return the processor seconds that this machine has spent on all programs."""
    user, nice, system = (int(word) for word in Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / TICK


def run_case(case: Case, folder: Path, rounds: int, variants: tuple[str, ...]) -> list[dict[str, Any]]:
    """Measure all variants of a case in interleaved rounds; return one record each."""
    source, reference = _source(case, folder), folder / "reference"
    measured: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    try:
        if set(variants) & {*OTHERS, *OPTIMIZER}:
            measure("ours-1-all", source, reference, case.to)
            _require_same(source, reference)
        if "dcp-2" in variants and not Path(f"{source}-dcp").exists():
            _run("benchmarks.others", "save-by-dcp", source)
        for number in range(rounds):
            for variant in variants:
                if variant in SLOW and number >= SLOW_ROUNDS:
                    continue
                with _output(folder) as out:
                    measured[variant].append(measure(variant, source, out, case.to))
                    if not number:
                        _check(variant, source, reference, out)
    finally:
        shutil.rmtree(reference, ignore_errors=True)
    return [_summary(variant, measured) for variant in variants]


@contextmanager
def _output(folder: Path) -> Iterator[Path]:
    """Yield where an output goes, and remove it."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    try:
        yield out
    finally:
        shutil.rmtree(out, ignore_errors=True)


def source_path(case: Case, folder: Path) -> Path:
    """Return where a case's checkpoint lies; cases that want the same share it."""
    if not case.make:
        return SMALL
    return folder / ("source-" + "-".join(f"{option}{value}" for option, value in case.make.items()))


def _source(case: Case, folder: Path) -> Path:
    """Return a case's checkpoint, made if need be, and read once to warm the cache."""
    source = source_path(case, folder)
    if not source.exists():
        options = [word for option, value in case.make.items() for word in (f"--{option}", str(value))]
        _run("benchmarks.synthetic", source, *options)
    subprocess.run(f"find {source} -type f -exec cat {{}} + > /dev/null", shell=True, check=True)
    return source


def _check(variant: str, source: Path, reference: Path, out: Path) -> None:
    """Compare an output bit for bit with the source, or with the verified output of this package."""
    if variant in OURS or variant == "reshard":
        _require_same(source, out)
    elif variant == "cp":
        subprocess.run(["diff", "-r", source, out], check=True)
    elif variant in OPTIMIZER:
        subprocess.run(["diff", "-r", reference / "optimizer", out / "optimizer"], check=True)
    elif variant in OTHERS:
        _run("benchmarks.others", variant, reference, source, out)


def _require_same(source: Path, out: Path) -> None:
    _run("nemo_optim_bridge", "verify", source, out)


def _run(module: str, *arguments: object) -> None:
    """Run a module of this repository; ends this program when it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def _summary(variant: str, measured: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the medians of a variant, and its ratios to cp and to its counterpart round by round."""
    runs = measured[variant]
    names = ("seconds", "cpu", "whole", "rss", "anonymous", "file", "floor", "extra", "read", "written")
    found: dict[str, Any] = {
        name: median([run[name] for run in runs]) for name in names if all(name in run for run in runs)
    }
    copies = "cp-optimizer" if variant in OPTIMIZER_ONLY else "cp"
    for name in ("seconds", "cpu"):
        for column, bases in ((f"{name}_x_cp", (copies,)), (f"{name}_x_ours", COUNTERPARTS.get(variant, ()))):
            ratios = {base: _ratio(runs, measured[base], name) for base in bases if base in measured}
            if ratios:
                found[column] = ratios
    return {
        "variant": variant, "rounds": len(runs), **found,
        "others": [round(run["others"], 2) for run in runs],
    }  # fmt: skip


def _ratio(runs: list[dict[str, Any]], bases: list[dict[str, Any]], name: str) -> list[float]:
    """Return the median, the least and the greatest of the ratios of the rounds that both ran in."""
    ratios = [run[name] / max(base[name], 1 / TICK) for run, base in zip(runs, bases, strict=False)]
    return [median(ratios), min(ratios), max(ratios)]


# --- the table ------------------------------------------------------------------------------------------------------

COLUMNS = {
    "variant": "variant", "rounds": "rounds", "seconds_x_cp": "x cp", "cpu_x_cp": "CPU x cp",
    "seconds_x_ours": "x ours", "cpu_x_ours": "CPU x ours", "seconds": "s", "cpu": "CPU s", "whole": "whole s",
    "rss": "RSS MB", "anonymous": "anonymous", "file": "file", "floor": "after imports", "extra": "extra",
    "read": "read MB", "written": "written MB", "others": "others",
}  # fmt: skip
RATIOS = [name for name in COLUMNS if "_x_" in name]
SECONDS = ("seconds", "cpu", "whole")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in RATIOS:
        cells = [
            f"{'' if base.startswith('cp') else base + ' '}{middle:.2f} ({least:.2f}-{greatest:.2f})"
            for base, (middle, least, greatest) in value.items()
        ]
        return ", ".join(cells)
    if name == "others":
        return f"{max(value):.2f}"
    if name in SECONDS:
        return f"{value:.2f}"
    return str(value) if name in ("variant", "rounds") else f"{value / 1e6:,.1f}"


def print_table(name: str, records: list[dict[str, Any]]) -> None:
    """Print one case, without the columns that no variant fills."""
    columns = {key: title for key, title in COLUMNS.items() if any(key in record for record in records)}
    print(f"\n### {name}\n")
    print(f"| {' | '.join(columns.values())} |\n|{'---|' * len(columns)}")
    for record in records:
        print(f"| {' | '.join(_cell(key, record.get(key)) for key in columns)} |", flush=True)


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
    before, start = _busy(), time.perf_counter()
    time.sleep(1)
    busiest = _busy() - before
    print(f"load average {os.getloadavg()[0]:.2f}, {busiest:.2f} processors busy at the start")
    names = options.case or [name for name, case in CASES.items() if not case.on_demand]
    for number, name in enumerate(names):
        case = CASES[name]
        chosen = tuple(
            variant
            for variant in case.variants
            if not options.variant or variant in options.variant or variant.startswith("cp")
        )
        records = run_case(case, options.dir, options.rounds, chosen)
        print_table(name, records)
        busiest = max(busiest, *(max(record["others"]) for record in records))
        if options.json:
            with options.json.open("a") as file:
                file.writelines(json.dumps({"case": name, **record}) + "\n" for record in records)
        source = source_path(case, options.dir)
        needed = [source_path(CASES[later], options.dir) for later in names[number + 1 :]]
        if not options.keep and source != SMALL and source not in needed:
            for folder in (source, Path(f"{source}-dcp")):
                shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{(time.perf_counter() - start) / 60:.0f} minutes")
    if busiest > QUIET:
        print(f"NOT TO BE PUBLISHED: other programs kept {busiest:.2f} processors busy; wait for a quiet machine")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
