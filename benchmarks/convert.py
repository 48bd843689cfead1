"""Measure a conversion without a receipt: it must not grow with the data, and how it grows with the number of keys.

    python benchmarks/convert.py FOLDER --keys 100000 --bytes 1000000000000

Makes a checkpoint whose metadata are as megatron-core writes them and whose data files are sparse, and converts it in
a process of its own. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

STATES = ("optimizer.state.fp32_param.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.", "")
FILES = 8


def make(root: Path, keys: int, nbytes: int) -> None:
    """Write a fused_adam checkpoint of ``keys`` tensors, four a parameter, in ``nbytes`` bytes of sparse files."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    root.mkdir(parents=True)
    item = nbytes // keys
    rows = max(1, (item - 1024) // 4 // 64)
    size = torch.Size([rows, 64])
    entries, places = {}, {}
    for number in range(keys):
        name = f"model.decoder.layers.{number // 4 // 8}.mlp.experts.local_experts.{number // 4 % 8}.linear_fc2.weight"
        key = STATES[number % 4] + name
        dtype = torch.float32 if number % 4 < 3 else torch.bfloat16
        chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
        entries[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])
        place = _StorageInfo(f"__{number % FILES}_0.distcp", number // FILES * item, item)
        places[MetadataIndex(key, torch.Size([0, 0]))] = place
    with (root / ".metadata").open("wb") as file:
        pickle.dump(Metadata(entries, storage_data=places), file)
    for number in range(FILES):
        with (root / f"__{number}_0.distcp").open("wb") as file:
            file.truncate((keys // FILES + 1) * item)
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "bias_correction": True, "is_expert": False, "step": 7}
    groups = [{**group, "weight_decay": 0.1}]
    common = {
        "epoch": 0, "global_step": 7, "pytorch-lightning_version": "2.4.0", "state_dict": {}, "loops": {},
        "lr_schedulers": [{"last_epoch": 7, "_last_lr": [1e-3]}],
        "optimizer_states": [{"optimizer": {"param_groups": groups}}],
    }  # fmt: skip
    torch.save(common, root / "common.pt")
    (root / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


def measure(source: Path, out: Path, to: str) -> dict[str, float]:
    """Convert and return seconds and the peak of resident memory in bytes."""
    from nemo_optim_bridge.formats.torch_dist.convert import Options, plan_convert

    start, cpu = time.perf_counter(), time.process_time()
    planned = plan_convert(source, out, Options(to=to, receipt=False))
    between = time.perf_counter()
    planned.run()
    stop = time.perf_counter()
    cpu = time.process_time() - cpu
    status = Path("/proc/self/status").read_text()  # ru_maxrss would count the process that started this one
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return {
        "seconds": stop - start,
        "cpu_seconds": cpu,
        "plan": between - start,
        "write": stop - between,
        "peak_bytes": peak,
    }


def main() -> None:
    """Make a checkpoint and measure its conversion in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--bytes", type=int, default=1_000_000_000_000)
    parser.add_argument("--to", default="distributed_fused_adam")
    parser.add_argument("--measure", action="store_true", help="only convert what is there")
    given = parser.parse_args()
    source, out = given.folder / "in", given.folder / "out"
    if given.measure:
        print(json.dumps(measure(source, out, given.to)))
        return
    for folder in (source, out):
        shutil.rmtree(folder, ignore_errors=True)
    make(source, given.keys, given.bytes)
    command = [sys.executable, __file__, str(given.folder), "--measure", "--to", given.to]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    size = (source / ".metadata").stat().st_size
    print(json.dumps({"keys": given.keys, "bytes": given.bytes, "metadata_bytes": size, **json.loads(done.stdout)}))


if __name__ == "__main__":
    main()
