"""How others re-shard a nanotron optimizer state: the variants that ``reshard.py`` compares with.

Each takes tensor parallel checkpoints of one pipeline stage without ZeRO, and works on the optimizer files alone.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nemo_optim_bridge.formats.nanotron.layout import ParamLayout
from nemo_optim_bridge.formats.nanotron.reader import read_checkpoint
from nemo_optim_bridge.formats.topology import Topology

#: Does the work; what it returns, if anything, is done when the clock has stopped.
Work = Callable[[], Callable[[], None] | None]
State = dict[str, Any]


def file_name(tp: int, size: int) -> str:
    """Return the name of a rank's optimizer file."""
    return f"optimizer_pp-0-of-1_tp-{tp}-of-{size}_exp-0-of-1.pt"


def tensors(state: State) -> Iterator[tuple[str, dict[Any, Any], Any]]:
    """Yield (parameter, mapping, key) of every tensor that is sharded as its parameter is."""
    for number, entries in state["state"].items():
        for key in entries:
            if key != "step":
                yield state["names"][number], entries, key
    for fqn in state["gradient_accumulator"]:
        yield fqn, state["gradient_accumulator"], fqn


def index(slices: tuple[Any, ...]) -> tuple[slice, ...]:
    """Return a torch index for one side of a slice pair."""
    return tuple(slice(None) if part is None else slice(*part) for part in slices)


def joined(layout: ParamLayout, parts: list[torch.Tensor], size: int) -> torch.Tensor:
    """Join neighbouring tensor-parallel ranks' parts of a parameter; ``size`` is the tensor parallel size."""
    if layout.dim is None:
        return parts[0]
    widths = [chunk // size for chunk in layout.chunks]
    pieces = [part.split(widths, layout.dim) for part in parts]
    return torch.cat([piece[i] for i in range(len(widths)) for piece in pieces], layout.dim)


def torch_cat(source: Path, out: Path, to: Mapping[str, int]) -> Work:
    """Halve the tensor parallel size as one would by hand: load what a target rank needs, torch.cat, torch.save."""
    layouts, size = dict(read_checkpoint(source).layouts), read_checkpoint(source).topology.tp
    factor = size // to["tp"]

    def work() -> None:
        out.mkdir()
        for target in range(to["tp"]):
            ranks = range(target * factor, (target + 1) * factor)
            shards = [torch.load(source / "optimizer" / file_name(rank, size)) for rank in ranks]
            for entries in zip(*(tensors(shard) for shard in shards), strict=True):
                fqn, mapping, key = entries[0]
                mapping[key] = joined(layouts[fqn], [place[name] for _, place, name in entries], size)
            torch.save(shards[0], out / file_name(target, to["tp"]))

    return work


def nanotron(source: Path, out: Path, to: Mapping[str, int]) -> Work:
    """Load as nanotron's ``load_optimizer`` does: every target rank reads every file, fills an unsharded buffer from
    all shards and takes its slices. Saving is no part of it: the result is written for the check when it has ended.
    """
    checkpoint = read_checkpoint(source)
    old, new = checkpoint.topology, Topology(tp=to["tp"])

    def merged(layout: ParamLayout, shards: list[torch.Tensor], rank: int) -> torch.Tensor:
        if layout.dim is None:
            return shards[0]
        whole = torch.empty(layout.unsharded_shape(new))
        mine = torch.zeros(layout.local_shape(new))
        for tp, shard in enumerate(shards):
            for local, everywhere in layout.slices(old, tp, 0):
                whole[index(everywhere)] = shard[index(local)]
        for local, everywhere in layout.slices(new, rank, 0):
            mine[index(local)] = whole[index(everywhere)]
        return mine

    def work() -> Callable[[], None]:
        loaded: list[State] = []
        for rank in range(new.tp):
            files = [source / "optimizer" / file_name(tp, old.tp) for tp in range(old.tp)]
            shards = [torch.load(file, map_location="cpu") for file in files]
            result: State = {"state": {}, "gradient_accumulator": {}}
            for entries in zip(*(tensors(shard) for shard in shards), strict=True):
                fqn, _, key = entries[0]
                values = [mapping[key] for _, mapping, key in entries]
                place = result["gradient_accumulator"] if key == fqn else result["state"].setdefault(fqn, {})
                place[key] = merged(checkpoint.layouts[fqn], values, rank)
            del shards
            loaded.append(result)
        return lambda: save(loaded)

    def save(loaded: list[State]) -> None:
        out.mkdir()
        for rank, state in enumerate(loaded):
            torch.save(state, out / file_name(rank, new.tp))

    return work


def dcp(source: Path, out: Path, to: Mapping[str, int]) -> Work:
    """Load a torch DCP checkpoint of the same tensors at the new size and save it again, a process a target rank."""

    saved = source.parent / f"{source.name}-dcp"
    if not saved.exists():
        _ranks(read_checkpoint(source).topology.tp, _save_dcp, source, saved)

    def work() -> None:
        _ranks(to["tp"], _move_dcp, source, saved, out)

    return work


def _sharded(source: Path, size: int, rank: int) -> Iterator[tuple[str, Any, ParamLayout]]:
    """Yield name, an empty DTensor, and the layout of every tensor, cut evenly along the parameter's dimension."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh, zeros

    mesh = init_device_mesh("cpu", (size,))
    for fqn, layout in read_checkpoint(source).layouts.items():
        placement = Replicate() if layout.dim is None else Shard(layout.dim)
        for state in ("exp_avg", "exp_avg_sq", "master"):
            yield f"{state}.{fqn}", zeros(layout.shape, device_mesh=mesh, placements=[placement]), layout


def _save_dcp(rank: int, size: int, source: Path, out: Path) -> None:
    shard = torch.load(source / "optimizer" / file_name(rank, size))
    numbers = {fqn: number for number, fqn in shard["names"].items()}
    state = {}
    for name, tensor, layout in _sharded(source, size, rank):
        kind = name.partition(".")[0]
        masters = shard["gradient_accumulator"]
        value = masters[layout.fqn] if kind == "master" else shard["state"][numbers[layout.fqn]][kind]
        tensor.to_local().copy_(value)
        state[name] = tensor
    torch.distributed.checkpoint.save(state, checkpoint_id=out)


def _move_dcp(rank: int, size: int, source: Path, saved: Path, out: Path) -> None:
    from torch.distributed.checkpoint import FileSystemWriter, load, save

    state = {name: tensor for name, tensor, _ in _sharded(source, size, rank)}
    load(state, checkpoint_id=saved)
    save(state, storage_writer=FileSystemWriter(out, sync_files=False))


def _ranks(size: int, function: Callable[..., None], *arguments: object) -> None:
    """Run a function in forked processes that form a gloo group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def rank_main(rank: int) -> None:
        address = f"tcp://127.0.0.1:{port}"
        torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
        function(rank, size, *arguments)
        torch.distributed.destroy_process_group()

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank_main, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("a rank failed")


VARIANTS: dict[str, Callable[[Path, Path, Mapping[str, int]], Work]] = {
    "torch-cat": torch_cat,
    "nanotron": nanotron,
    "dcp-2": dcp,
}


# --- are the results right? -----------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Tell whether two trees hold the same bits."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def check(variant: str, reference: Path, source: Path, out: Path) -> bool:
    """Tell whether a variant's output holds what this package wrote, or for DCP what was saved."""
    if variant == "dcp-2":
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        trees = []
        for folder in (source.parent / f"{source.name}-dcp", out):
            whole = out / "whole.pt"
            dcp_to_torch_save(folder, whole)
            trees.append(torch.load(whole, weights_only=False))
        return same(*trees)
    for file in (reference / "optimizer").glob("*.pt"):
        wanted, found = torch.load(file, mmap=True), torch.load(out / file.name, mmap=True)
        if variant == "nanotron":  # it names states by parameter, and has no steps and groups
            states: State = {}
            for fqn, mapping, key in tensors(wanted):
                if key != fqn:
                    states.setdefault(fqn, {})[key] = mapping[key]
            wanted = {"state": states, "gradient_accumulator": wanted["gradient_accumulator"]}
        if not same(wanted, found):
            return False
    return True


def main() -> int:
    """Check the output of a variant; return 0 when it is right."""
    variant, *paths = sys.argv[1:]
    return 0 if check(variant, *(Path(path) for path in paths)) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
