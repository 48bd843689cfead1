"""Measure loading a nanotron checkpoint's optimizer state into tensors of a GPU, by this package and by torch.

    python -m benchmarks.gpu --dir FOLDER                        # on a machine with a GPU; about two minutes
    python -m benchmarks.gpu --dir FOLDER --device cpu --tiny    # proves that the script runs; measures nothing

Every variant runs in a fresh process, in interleaved rounds, as in ``reshard.py``. The state (fp32 masters and both
moments of all parameters) lies in the files of tensor parallel ranks, warm in the page cache, and ends up as whole
tensors on the device: the clock stops when the device has them all.

``ours``          headers, plan, boxes through two pinned buffers
``torch-cpu``     torch.load(map_location="cpu") of every file, torch.cat on the CPU, then .to(device)
``torch-device``  torch.load(map_location=device) of every file, torch.cat on the device
``floor``         the state's bytes from one pinned buffer to the device, without reading them from anywhere

Prints a Markdown table: median, least and greatest. ``host`` is the peak resident memory over that before the load,
``device`` the peak of ``torch.cuda.max_memory_allocated``. In the first round the results are compared bit for bit.
Exit code 2 when there is no such device, or when a result is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.others import file_name, joined, tensors
from nemo_optim_bridge.core.live import merge_tensors
from nemo_optim_bridge.core.manifest import TensorKey
from nemo_optim_bridge.formats.nanotron.reader import read_checkpoint

ROOT = Path(__file__).resolve().parents[1]
STATES = ("exp_avg", "exp_avg_sq", "fp32_param")
SIZES = {
    False: {"layers": 32, "hidden": 512, "intermediate": 1536, "tp": 4},
    True: {"layers": 2, "hidden": 32, "intermediate": 64, "vocab": 64, "tp": 4},
}
COPIED_BYTES = 64 << 20  # at a time, for the floor

Tensors = dict[str, torch.Tensor]
Work = Callable[[], Tensors]


def ours(source: Path, device: str) -> Work:
    """Load with this package."""

    def work() -> Tensors:
        manifest = read_checkpoint(source).manifest
        keys = [spec.key for spec in manifest.tensors if spec.key.state in STATES]
        return {str(key): tensor for key, tensor in merge_tensors(manifest, keys, device=device).items()}

    return work


def by_torch(source: Path, device: str, *, where: str) -> Work:
    """Load every file whole to ``where``, join there, and move what is not on the device yet."""
    checkpoint = read_checkpoint(source)
    size = checkpoint.topology.tp

    def work() -> Tensors:
        files = [source / "optimizer" / file_name(rank, size) for rank in range(size)]
        shards = [torch.load(file, map_location=where, weights_only=True) for file in files]
        found: Tensors = {}
        for entries in zip(*(tensors(shard) for shard in shards), strict=True):
            fqn, _, key = entries[0]
            parts = [mapping[name] for _, mapping, name in entries]
            state = "fp32_param" if key == fqn else key
            found[str(TensorKey(fqn, state))] = joined(checkpoint.layouts[fqn], parts, size).to(device)
        return found

    return work


def floor(source: Path, device: str) -> Work:
    """Copy as many bytes as the state has from one pinned buffer."""
    left = num_bytes(source)
    is_cuda = device == "cuda"
    block = torch.ones(COPIED_BYTES, dtype=torch.uint8, pin_memory=is_cuda)
    target = torch.zeros(left, dtype=torch.uint8, device=device)

    def work() -> Tensors:
        for start in range(0, left, COPIED_BYTES):
            part = target[start : start + COPIED_BYTES]
            part.copy_(block[: len(part)], non_blocking=is_cuda)
        return {}

    return work


VARIANTS: dict[str, Callable[[Path, str], Work]] = {
    "floor": floor,
    "ours": ours,
    "torch-device": lambda source, device: by_torch(source, device, where=device),
    "torch-cpu": lambda source, device: by_torch(source, device, where="cpu"),
}


def num_bytes(source: Path) -> int:
    """Return the bytes of the state, as whole tensors."""
    specs = read_checkpoint(source).manifest.tensors
    return sum(4 * torch.Size(spec.shape).numel() for spec in specs if spec.key.state in STATES)


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def resident(field: str) -> int:
    """Return a field of this process's memory status in bytes: VmRSS, or VmHWM for the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) * 1024


def run_variant(variant: str, source: Path, device: str, *, check: bool) -> dict[str, Any]:
    """Do a variant's work in this process and return what it took; sizes are in bytes."""
    torch.zeros(1, device=device)  # the device's context is no part of a load
    work = VARIANTS[variant](source, device)
    synchronize(device)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    start = time.perf_counter()
    loaded = work()
    synchronize(device)
    seconds = time.perf_counter() - start
    found: dict[str, Any] = {"seconds": seconds, "bytes": num_bytes(source), "host": resident("VmHWM") - before}
    if device == "cuda":
        found["device"] = torch.cuda.max_memory_allocated()
    if check and loaded:
        digest = hashlib.sha256()
        for name, tensor in sorted(loaded.items()):
            digest.update(f"{name} {tensor.device.type} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().view(-1).numpy().data)
        found["digest"] = digest.hexdigest()
    return found


def measure(variant: str, source: Path, device: str, *, check: bool) -> dict[str, Any]:
    """Run a variant in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--run", variant, str(source), device, str(int(check))]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def make_source(folder: Path, *, tiny: bool) -> Path:
    """Make the checkpoint, and read it once to warm the page cache."""
    source = folder / "source"
    options = [word for name, value in SIZES[tiny].items() for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, "-m", "benchmarks.synthetic", str(source), *options], check=True, cwd=ROOT)
    for file in source.rglob("*"):
        if file.is_file():
            file.read_bytes()
    return source


def print_table(device: str, measured: dict[str, list[dict[str, Any]]]) -> None:
    """Print a row a variant."""
    first = measured["ours"][0]
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU: not a measurement"
    print(f"\n### {first['bytes'] / 1e9:.2f} GB of state, {len(measured['ours'])} rounds, {name}\n")
    print("| variant | GB/s (least - greatest) | seconds | host MB | device MB |\n|---|---|---|---|---|")
    for variant, runs in measured.items():
        rates = [run["bytes"] / run["seconds"] / 1e9 for run in runs]
        memory = [
            f"{max(run[what] for run in runs) / 1e6:,.0f}" if what in runs[0] else "" for what in ("host", "device")
        ]
        seconds = median(run["seconds"] for run in runs)
        print(
            f"| {variant} | {median(rates):.2f} ({min(rates):.2f} - {max(rates):.2f}) | {seconds:.3f} "
            f"| {memory[0]} | {memory[1]} |"
        )


def main() -> int:
    """Measure all variants; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where the checkpoint is made, and removed again")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a checkpoint of a few kB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="append one line a variant")
    parser.add_argument("--run", nargs=4, metavar=("VARIANT", "SOURCE", "DEVICE", "CHECK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        variant, source, device, check = options.run
        print(json.dumps(run_variant(variant, Path(source), device, check=bool(int(check)))))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here: nothing was measured", file=sys.stderr)
        return 2
    if options.dir is None:
        parser.error("--dir is needed")
    options.dir.mkdir(parents=True, exist_ok=True)
    measured: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory(dir=options.dir.resolve()) as folder:
        source = make_source(Path(folder), tiny=options.tiny)
        for number in range(options.rounds):
            for variant in VARIANTS:
                measured[variant].append(measure(variant, source, options.device, check=not number))
    digests = {variant: runs[0]["digest"] for variant, runs in measured.items() if "digest" in runs[0]}
    if len(set(digests.values())) != 1:
        print(f"the variants loaded different bits: {digests}", file=sys.stderr)
        return 2
    print_table(options.device, measured)
    if options.json:
        records = [{"variant": variant, "device": options.device, "runs": runs} for variant, runs in measured.items()]
        with options.json.open("a") as file:
            file.writelines(json.dumps(record) + os.linesep for record in records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
