"""How others re-shard a nanotron checkpoint, and how we load one: the variants that ``reshard.py`` compares with.

Each takes a tensor parallel checkpoint of one pipeline stage without ZeRO and without experts. ``dcp-2`` moves what
``reshard`` moves, the weights included; the others work on the optimizer files alone.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from nemo_optim_bridge.core.checkpoint import MASTER
from nemo_optim_bridge.core.live import load_tensors
from nemo_optim_bridge.core.manifest import TensorKey
from nemo_optim_bridge.formats.nanotron.layout import ParamLayout
from nemo_optim_bridge.formats.nanotron.names import WeightName, format_weight_name
from nemo_optim_bridge.formats.nanotron.reader import read_checkpoint
from nemo_optim_bridge.formats.topology import Topology

State = dict[str, Any]
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Finish:
    """What is left to do when the clock has stopped, and how many bytes of loaded state it holds."""

    run: Callable[[], None]
    held: int = 0


#: Does what is measured.
Work = Callable[[], Finish | None]


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


# --- loading: every target rank in turn, into CPU tensors -----------------------------------------------------------


def nanotron(source: Path, out: Path, to: Mapping[str, int]) -> Work:
    """Load as nanotron's ``load_optimizer`` does: every target rank reads every file, fills an unsharded buffer from
    all shards and takes its slices.
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

    def load(rank: int) -> State:
        files = [source / "optimizer" / file_name(tp, old.tp) for tp in range(old.tp)]
        shards = [torch.load(file, map_location="cpu") for file in files]
        result: State = {"state": {}, "gradient_accumulator": {}}
        for entries in zip(*(tensors(shard) for shard in shards), strict=True):
            fqn, _, key = entries[0]
            values = [mapping[key] for _, mapping, key in entries]
            place = result["gradient_accumulator"] if key == fqn else result["state"].setdefault(fqn, {})
            place[key] = merged(checkpoint.layouts[fqn], values, rank)
        return result

    return lambda: _to_save([load(rank) for rank in range(new.tp)], out)


def ours_load(source: Path, out: Path, to: Mapping[str, int]) -> Work:
    """Load as this package does in training, but for its checks: every target rank reads the headers and its boxes."""
    topology = Topology(tp=to["tp"])

    def load(rank: int) -> State:
        checkpoint = read_checkpoint(source)
        result: State = {"state": {}, "gradient_accumulator": {}}
        boxes = []
        for fqn, layout in checkpoint.layouts.items():
            result["state"][fqn] = {}
            for state in (*MOMENTS, MASTER):
                tensor = torch.empty(layout.local_shape(topology))
                place, key = (result["gradient_accumulator"], fqn) if state == MASTER else (result["state"][fqn], state)
                place[key] = tensor
                for view in layout.views(topology, rank, 0):
                    box = tensor.as_strided(view.region.shape, view.stride, view.storage_offset)
                    boxes.append((TensorKey(fqn, state), view.region, box))
        load_tensors(checkpoint.manifest, boxes, rank=rank)
        return result

    return lambda: _to_save([load(rank) for rank in range(topology.tp)], out)


def _to_save(loaded: list[State], out: Path) -> Finish:
    """Return how loaded states are written for the check."""
    held = sum(mapping[key].nbytes for state in loaded for mapping, key in _loaded_tensors(state))

    def save() -> None:
        out.mkdir()
        for rank, state in enumerate(loaded):
            torch.save(state, out / file_name(rank, len(loaded)))

    return Finish(save, held)


def _loaded_tensors(state: State) -> Iterator[tuple[Mapping[str, torch.Tensor], str]]:
    for mapping in (*state["state"].values(), state["gradient_accumulator"]):
        for key in mapping:
            yield mapping, key


# --- torch.distributed.checkpoint -----------------------------------------------------------------------------------


def dcp(source: Path, out: Path, to: Mapping[str, int]) -> Work:
    """Load a torch DCP checkpoint of the same tensors at the new size and save it again, a process a target rank.

    The processes have started, and formed their group and mesh, before the clock starts.
    """
    from torch.distributed.checkpoint import FileSystemWriter, load, save

    layouts = read_checkpoint(source).layouts

    def move(rank: int, mesh: Any) -> Callable[[], None]:
        def work() -> None:
            state = {name: tensor for name, tensor, _ in _sharded(layouts, mesh)}
            load(state, checkpoint_id=saved_by_dcp(source))
            save(state, storage_writer=FileSystemWriter(out, sync_files=False))

        return work

    ranks = Ranks(to["tp"], move)

    def work() -> Finish:
        ranks.run()
        return Finish(ranks.end)

    return work


def saved_by_dcp(source: Path) -> Path:
    """Return where a checkpoint lies as DCP saved it."""
    return source.parent / f"{source.name}-dcp"


def save_by_dcp(source: Path) -> None:
    """Write a checkpoint's tensors as DCP does, a process a tensor parallel rank, for ``dcp`` to load."""
    checkpoint = read_checkpoint(source)
    layouts, out = checkpoint.layouts, saved_by_dcp(source)
    ranks = Ranks(checkpoint.topology.tp, lambda rank, mesh: lambda: _save_dcp(source, layouts, rank, mesh, out))
    ranks.run()
    ranks.end()


def _sharded(layouts: Mapping[str, ParamLayout], mesh: Any) -> Iterator[tuple[str, Any, ParamLayout]]:
    """Yield name, an empty DTensor, and the layout of every tensor, cut evenly along the parameter's dimension."""
    from torch.distributed.tensor import Replicate, Shard, zeros

    for fqn, layout in layouts.items():
        placement = Replicate() if layout.dim is None else Shard(layout.dim)
        for state in (*MOMENTS, "master", "weight"):
            dtype = torch.bfloat16 if state == "weight" else torch.float32
            yield (
                f"{state}.{fqn}",
                zeros(layout.shape, dtype=dtype, device_mesh=mesh, placements=[placement]),
                layout,
            )


def _save_dcp(source: Path, layouts: Mapping[str, ParamLayout], rank: int, mesh: Any, out: Path) -> None:
    from safetensors.torch import load_file
    from torch.distributed.checkpoint import save

    size = mesh.size()
    shard = torch.load(source / "optimizer" / file_name(rank, size))
    numbers = {fqn: number for number, fqn in shard["names"].items()}
    state = {}
    for name, tensor, layout in _sharded(layouts, mesh):
        kind = name.partition(".")[0]
        if kind == "weight":
            ranks = ((0, 1), (rank, size)) if layout.is_sharded else (None, None)
            value = load_file(source / "model" / format_weight_name(WeightName(layout.fqn, *ranks)))["data"]
        elif kind == "master":
            value = shard["gradient_accumulator"][layout.fqn]
        else:
            value = shard["state"][numbers[layout.fqn]][kind]
        tensor.to_local().copy_(value)
        state[name] = tensor
    save(state, checkpoint_id=out)


class Ranks:
    """Forked processes that form a gloo group and a mesh, and then wait for ``run``."""

    def __init__(self, size: int, prepare: Callable[[int, Any], Callable[[], None]]) -> None:
        """Start them; ``prepare`` is called in each with its rank and the mesh, and returns what ``run`` calls."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        context = multiprocessing.get_context("fork")
        self._connections = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_rank_main, args=(rank, size, address, prepare, there), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)
        self._hear()

    def run(self) -> None:
        """Let all do their work at once, and wait for them."""
        self._tell()
        self._hear()

    def end(self) -> None:
        """Let them leave their group and end."""
        self._tell()
        for process in self._processes:
            process.join()
            if process.exitcode:
                raise RuntimeError(f"a rank ended with exit code {process.exitcode}")

    def _tell(self) -> None:
        for connection in self._connections:
            connection.send(None)

    def _hear(self) -> None:
        for connection in self._connections:
            connection.recv()  # raises EOFError when the rank has failed


def _rank_main(rank: int, size: int, address: str, prepare: Any, parent: Connection) -> None:
    from torch.distributed.tensor import init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    work = prepare(rank, init_device_mesh("cpu", (size,)))
    parent.send(None)
    parent.recv()
    work()
    parent.send(None)
    parent.recv()
    torch.distributed.destroy_process_group()


VARIANTS: dict[str, Callable[[Path, Path, Mapping[str, int]], Work]] = {
    "torch-cat": torch_cat,
    "ours-load": ours_load,
    "nanotron": nanotron,
    "dcp-2": dcp,
}

LOADS = ("ours-load", "nanotron")


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
        for folder in (saved_by_dcp(source), out):
            whole = out / "whole.pt"
            dcp_to_torch_save(folder, whole)
            trees.append(torch.load(whole, weights_only=False))
        return same(*trees)
    for file in (reference / "optimizer").glob("*.pt"):
        wanted, found = torch.load(file, mmap=True), torch.load(out / file.name, mmap=True)
        if variant in LOADS:  # states by parameter, without steps and groups
            states: State = {}
            for fqn, mapping, key in tensors(wanted):
                if key != fqn:
                    states.setdefault(fqn, {})[key] = mapping[key]
            wanted = {"state": states, "gradient_accumulator": wanted["gradient_accumulator"]}
        if not same(wanted, found):
            return False
    return True


def main() -> int:
    """Check the output of a variant, or make what ``dcp-2`` loads; return 0 when all is right."""
    what, *paths = sys.argv[1:]
    if what == "save-by-dcp":
        save_by_dcp(Path(*paths))
        return 0
    return 0 if check(what, *(Path(path) for path in paths)) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
