"""The weight shards: which exist, and what they say about how each parameter is cut."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from nemo_optim_bridge.core.manifest import Identity
from nemo_optim_bridge.core.team import Team, ignore
from nemo_optim_bridge.errors import BridgeError, ContradictionError, MissingSourceError, raise_all, unreadable
from nemo_optim_bridge.formats.documents import shown
from nemo_optim_bridge.formats.nanotron.config import ModelFacts
from nemo_optim_bridge.formats.nanotron.layout import (
    Experts,
    ParamLayout,
    Slices,
    expert_matrix,
    format_slices,
    parse_shape,
    parse_slices,
)  # fmt: skip
from nemo_optim_bridge.formats.nanotron.names import WeightName, format_weight_name, parse_weight_name
from nemo_optim_bridge.formats.safetensors_header import StoredArray, read_single_tensor
from nemo_optim_bridge.formats.topology import Topology

_BATCH = 64  # files read by one process at a time
#: Reading their headers takes about as long as copying this many bytes.
_BATCH_BYTES = 8 << 20
_DEEPEST = 32  # folders below model/; nanotron needs less than ten


class WeightShard(NamedTuple):
    """One weight file of the checkpoint's own topology."""

    path: str
    name: WeightName
    array: StoredArray
    identity: Identity

    @property
    def tp(self) -> int:
        """Tensor-parallel rank that wrote it."""
        return self.name.tp[0] if self.name.tp else 0

    @property
    def ep(self) -> int:
        """Expert-parallel rank that wrote it, as far as the name tells."""
        return self.name.ep[0] if self.name.ep else 0


@dataclass(frozen=True, slots=True)
class Weights:
    """All weight shards by parameter, and files that belong to another topology or to nobody."""

    shards: Mapping[str, tuple[WeightShard, ...]]
    leftovers: tuple[str, ...]
    layouts: Mapping[str, ParamLayout]
    lost: frozenset[str]  # expert weights that the ranks overwrote each other's files of


def read_weights(root: Path, topology: Topology, facts: ModelFacts, team: Team) -> Weights:
    """Read the headers of all weight shards below ``root/model``; raises with every problem found."""
    found: dict[str, list[WeightShard]] = {}
    leftovers: list[str] = []
    folder = root / "model"
    if not folder.is_dir():
        raise MissingSourceError("there is no model directory", path=folder, hint="is this a nanotron checkpoint?")
    problems: list[BridgeError] = []
    named: list[tuple[str, WeightName]] = []
    strip = len(str(folder)) + 1
    for path in team.lead(lambda: list_folder(folder, deep=True)):
        name = parse_weight_name(path[strip:])
        if name is None or not name.matches(topology):
            leftovers.append(path)
        else:
            named.append((path, name))
    batches = [named[start : start + _BATCH] for start in range(0, len(named), _BATCH)]
    for shards, errors in team.map(lambda _: _read_shards, batches, [_BATCH_BYTES] * len(batches), ignore):
        for shard in shards:
            found.setdefault(shard.name.fqn, []).append(shard)
        problems += errors
    raise_all(problems)
    layouts: dict[str, ParamLayout] = {}
    lost: set[str] = set()
    sound: dict[object, ParamLayout] = {}  # by all that the files of a parameter say: layers repeat each other
    for fqn, shards in found.items():
        said = expert_matrix(fqn), *((name.pp, name.tp, name.ep, array) for _, name, array, _ in shards)
        try:
            if said in sound:
                layouts[fqn] = replace(sound[said], fqn=fqn)
            else:
                layouts[fqn] = _layout(fqn, shards, topology, facts)
                wrong = list(_check(layouts[fqn], shards, topology))
                problems += wrong
                if not wrong:
                    sound[said] = layouts[fqn]
            if _is_lost(layouts[fqn], topology):
                lost.add(fqn)
        except BridgeError as error:
            problems.append(error)
    raise_all(problems)
    return Weights({fqn: tuple(shards) for fqn, shards in found.items()}, tuple(leftovers), layouts, frozenset(lost))


def _read_shards(named: Sequence[tuple[str, WeightName]]) -> tuple[list[WeightShard], list[BridgeError]]:
    """Read the headers of some weight files; return what is wrong with others."""
    shards: list[WeightShard] = []
    problems: list[BridgeError] = []
    for path, name in named:
        try:
            shards.append(WeightShard(path, name, *read_single_tensor(path, "data")))
        except BridgeError as error:
            problems.append(error)
    return shards, problems


def list_folder(folder: Path, *, deep: bool = False) -> list[str]:
    """Return what is in a folder, or all files below it, links followed, in order of their names.

    Raises CorruptFileError for a folder that cannot be listed, so that nothing in it is overlooked.
    """
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    pending = [(str(folder), 0)]
    while pending:
        current, depth = pending.pop()
        try:
            status = Path(current).stat()
            with os.scandir(current) as inside:
                entries = [(entry.path, deep and _is_folder(entry)) for entry in inside]
        except FileNotFoundError:
            raise MissingSourceError("folder is missing", path=current, hint="copy it from the original run") from None
        except OSError as error:
            raise unreadable(current[:400], error) from error
        if (status.st_dev, status.st_ino) in seen or depth > _DEEPEST:
            continue
        seen.add((status.st_dev, status.st_ino))
        for path, is_folder in entries:
            if is_folder:
                pending.append((path, depth + 1))
            else:
                found.append(path)
    return sorted(found, key=lambda path: path.split("/"))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Tell whether an entry is a folder, or a link to one; a link to nowhere is none."""
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and Path(entry.path).is_dir())


def _is_lost(layout: ParamLayout, topology: Topology) -> bool:
    return layout.experts is not None and layout.experts.per_rank(topology) == 1 and topology.ep > 1


def _layout(fqn: str, shards: Sequence[WeightShard], topology: Topology, facts: ModelFacts) -> ParamLayout:
    """Return the layout of a parameter as its shards' metadata tells it."""
    first = shards[0]
    if first.name.tp is None:
        if "local_global_slices_pairs" in first.array.metadata:
            raise ContradictionError(
                "the file's name says that it is whole, its metadata that it is a shard", path=first.path, key=fqn,
                hint="give the file its own name back",
            )  # fmt: skip
        return ParamLayout(fqn, first.array.shape, first.array.dtype)
    is_w1 = expert_matrix(fqn)
    if is_w1 is not None:
        return _expert_layout(fqn, is_w1, first, topology, facts)
    unsharded, _ = _metadata(first)
    by_tp: dict[int, Slices] = {shard.tp: _metadata(shard)[1] for shard in shards}
    dims = {d for slices in by_tp.values() for _, whole in slices for d, s in enumerate(whole) if s is not None}
    if len(dims) != 1:
        raise ContradictionError(
            f"slices cut {len(dims)} dimensions instead of one", path=first.path, key=fqn,
            hint="this sharding is not one that nanotron writes",
        )  # fmt: skip
    dim = dims.pop()
    num_chunks = len(by_tp[first.tp])
    sizes = [0] * num_chunks
    for slices in by_tp.values():
        for chunk, (_, whole) in enumerate(slices[:num_chunks]):
            span = whole[dim]
            sizes[chunk] += span[1] - span[0] if span else 0
    if len(by_tp) < topology.tp:  # the missing ones are reported later; all are as large as any
        sizes = [size // len(by_tp) * topology.tp for size in sizes]
    if sum(sizes) != unsharded[dim] and len(by_tp) == topology.tp:
        raise ContradictionError(
            f"slices cover {sum(sizes)} of {unsharded[dim]} along dimension {dim}", path=first.path, key=fqn
        )
    return ParamLayout(fqn, unsharded, first.array.dtype, dim, tuple(sizes))


def _expert_layout(
    fqn: str, is_w1: bool, first: WeightShard, topology: Topology, facts: ModelFacts
) -> ParamLayout:  # fmt: skip
    if facts.num_experts is None:
        raise ContradictionError(
            "expert weights, but model_config.json has no moe_num_experts", path=first.path, key=fqn
        )
    if facts.num_experts % topology.ep:
        raise ContradictionError(
            f"{facts.num_experts} experts cannot be spread over {topology.ep} ranks", path=first.path, key=fqn
        )
    rows = facts.num_experts * facts.intermediate_size
    experts = Experts(facts.num_experts, facts.intermediate_size, is_w1)
    return ParamLayout(fqn, (rows, facts.hidden_size), first.array.dtype, 0, (rows,), experts=experts)


def _metadata(shard: WeightShard) -> tuple[tuple[int, ...], Slices]:
    """Return a shard's unsharded shape and slices; raises ContradictionError when they are missing or malformed."""
    unknown = sorted(set(shard.array.metadata) - {"version", "unsharded_shape", "local_global_slices_pairs"})
    if unknown:
        raise ContradictionError(
            f"sharding metadata has unknown entries {shown(unknown)}", path=shard.path, key=shard.name.fqn
        )
    try:
        shape = parse_shape(shard.array.metadata["unsharded_shape"])
        slices = parse_slices(shard.array.metadata["local_global_slices_pairs"])
    except (KeyError, ValueError, TypeError) as error:
        raise ContradictionError(
            f"sharding metadata is missing or malformed ({error})", path=shard.path, key=shard.name.fqn
        ) from error
    ndim = len(shape)
    sides = [side for pair in slices for side in pair]
    spans = [span for side in sides for span in side if span is not None]
    if any(n < 0 for n in shape) or any(len(side) != ndim for side in sides) or any(a < 0 or b < a for a, b in spans):
        raise ContradictionError("sharding metadata disagrees with itself", path=shard.path, key=shard.name.fqn)
    return shape, slices


def _check(layout: ParamLayout, shards: Sequence[WeightShard], topology: Topology) -> Iterator[BridgeError]:
    """Yield how a parameter's shards differ from what its layout says they are: missing, twice, or contradictory."""
    fqn = layout.fqn
    if not layout.is_sharded:
        if len(shards) > 1:
            paths = ", ".join(Path(shard.path).name for shard in shards)
            yield ContradictionError(f"stored both sharded and whole ({paths})", path=shards[0].path, key=fqn)
        return
    num_parts = topology.tp * (topology.ep if layout.experts else 1)
    uneven = [size for size in layout.chunks if size % num_parts]
    if uneven:
        yield ContradictionError(f"{num_parts} ranks do not divide {uneven[0]}", path=shards[0].path, key=fqn)
        return
    by_rank: dict[tuple[int, int], WeightShard] = {}
    for shard in shards:
        twin = by_rank.setdefault((shard.tp, shard.ep), shard)
        if twin is not shard:
            yield ContradictionError(
                f"two files claim the same shard; the other is {twin.path}", path=shard.path, key=fqn,
                hint="remove the one that does not belong to this checkpoint",
            )  # fmt: skip
    pp = shards[0].name.pp
    lost = _is_lost(layout, topology)
    named_ep = layout.experts is not None and topology.ep > 1 and not lost
    for ep in range(topology.ep if named_ep else 1):
        for tp in range(topology.tp):
            expected = WeightName(fqn, pp, (tp, topology.tp), (ep, topology.ep) if named_ep else None)
            known = by_rank.get((tp, ep))
            if known is None or (known.name.ep is None) != (expected.ep is None):
                folder = Path(shards[0].path).parent
                yield MissingSourceError(
                    "weight shard is missing", path=folder / format_weight_name(expected).rsplit("/", 1)[1], key=fqn,
                    rank=f"tp {tp} ep {ep}", hint="copy it from the original run",
                )  # fmt: skip
                continue
            if known.name.pp != pp:
                yield ContradictionError(
                    f"shards come from two pipeline stages, {pp} and {known.name.pp}", path=known.path, key=fqn
                )
            yield from _check_shard(layout, known, topology, tp, 0 if lost else ep)


def _check_shard(
    layout: ParamLayout, shard: WeightShard, topology: Topology, tp: int, ep: int
) -> Iterator[BridgeError]:  # fmt: skip
    unsharded, slices = _metadata(shard)
    expected = layout.unsharded_shape(topology), layout.slices(topology, tp, ep)
    if (unsharded, slices) != expected:
        yield ContradictionError(
            f"sharding metadata says {unsharded} {format_slices(slices)}, the other shards imply {expected[0]} "
            f"{format_slices(expected[1])}",
            path=shard.path, key=layout.fqn, rank=f"tp {tp} ep {ep}",
        )  # fmt: skip
    if shard.array.shape != layout.local_shape(topology):
        yield ContradictionError(
            f"shape is {shard.array.shape} instead of {layout.local_shape(topology)}",
            path=shard.path, key=layout.fqn, rank=f"tp {tp} ep {ep}",
        )  # fmt: skip
    if shard.array.dtype != layout.dtype:
        yield ContradictionError(
            f"dtype is {shard.array.dtype} here and {layout.dtype} in other shards", path=shard.path, key=layout.fqn
        )
