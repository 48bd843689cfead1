"""What a user asks for, and why it may not be possible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nemo_optim_bridge.errors import BridgeError, ParamGroupError, TargetError
from nemo_optim_bridge.formats.nanotron.checkpoint import NanotronCheckpoint
from nemo_optim_bridge.formats.nanotron.dialects import DIALECTS, Dialect
from nemo_optim_bridge.formats.nanotron.names import EMBEDDING, LM_HEAD
from nemo_optim_bridge.formats.topology import Topology

_MOST_FILES = 1 << 20


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """What the user asked for. ``like`` is a checkpoint of the target run: its split, order and vocabulary count."""

    topology: Topology
    zero_stage: int
    dialect: Dialect
    layers_per_stage: tuple[int, ...] | None = None
    like: NanotronCheckpoint | None = None


def problems_of(source: NanotronCheckpoint, spec: TargetSpec) -> Iterator[BridgeError]:
    """Yield every reason why the source's model cannot be built as asked, before anything is laid out."""
    yield from _model_problems(source, spec)
    yield from _group_problems(source, spec.dialect)


def _model_problems(source: NanotronCheckpoint, spec: TargetSpec) -> Iterator[BridgeError]:
    dialect, topology, facts = spec.dialect, spec.topology, source.facts
    num_files = topology.pp * topology.tp * topology.ep * (topology.dp if spec.zero_stage else 1)
    if num_files > _MOST_FILES:
        yield TargetError(f"{topology} would write {num_files} optimizer files", hint="check the sizes")
        return
    uncut = facts.problem_at(topology.tp) or _uneven_chunk(source, topology.tp)
    if uncut is not None:
        yield uncut
    if facts.family not in dialect.families and dialect is not source.dialect:
        yield TargetError(
            f"dialect {dialect.name} cannot build this model ({facts.family or 'of unknown family'})",
            hint=f"it builds {', '.join(dialect.families)}: keep the source's dialect {source.dialect.name}",
        )
    if source.tied and not dialect.ties:
        able = [name for name, other in DIALECTS.items() if other.ties and facts.family in other.families]
        yield TargetError(
            f"dialect {dialect.name} cannot tie the embedding and lm_head",
            hint=f"choose from {', '.join(able or [source.dialect.name])}",
        )
    if topology.ep > 1 and not dialect.expert_parallel:
        yield TargetError(f"dialect {dialect.name} cannot build expert parallel size {topology.ep}", hint="use --ep 1")
    elif topology.ep > 1 and facts.num_experts is None:
        yield TargetError(f"expert parallel size {topology.ep} for a model without experts", hint="use --ep 1")
    elif facts.num_experts is not None:
        yield from _expert_problems(facts.num_experts, facts.intermediate_size, topology)
    if dialect.name == "head" and spec.zero_stage and len({layout.dtype for layout in source.layouts.values()}) > 1:
        yield TargetError(
            "this revision of nanotron cannot train ZeRO-1 with weights of several dtypes (an fp32 router)",
            hint="use --zero 0",
        )


def _uneven_chunk(source: NanotronCheckpoint, tp: int) -> BridgeError | None:
    for layout in source.layouts.values():
        size = next((size for size in layout.chunks if size % tp), None)
        if size is not None and layout.experts is None and layout.fqn not in (EMBEDDING, LM_HEAD):
            return TargetError(f"tp {tp} does not divide {size} rows or columns", key=layout.fqn)
    return None


def _expert_problems(num_experts: int, intermediate_size: int, topology: Topology) -> Iterator[BridgeError]:
    valid = [ep for ep in range(1, num_experts) if num_experts % ep == 0] or [1]
    hint = f"choose ep from {', '.join(map(str, valid))}"
    if num_experts % topology.ep:
        yield TargetError(f"ep {topology.ep} does not divide {num_experts} experts", hint=hint)
    elif topology.ep > 1 and num_experts == topology.ep:
        yield TargetError(
            f"ep {topology.ep} leaves one expert to a rank: nanotron's ranks then overwrite each other's weight files",
            hint=hint,
        )
    elif (num_experts // topology.ep * intermediate_size) % topology.tp:
        rows = num_experts // topology.ep * intermediate_size
        valid = [tp for tp in range(1, topology.tp) if rows % tp == 0]
        yield TargetError(
            f"tp {topology.tp} does not divide the {rows} expert rows of a rank",
            hint=f"choose tp from {', '.join(map(str, valid))}, or another ep",
        )


def _group_problems(source: NanotronCheckpoint, dialect: Dialect) -> Iterator[BridgeError]:
    """Yield an error when groups must be merged whose hyperparameters differ."""
    if dialect.group_per_parameter or len(source.manifest.param_groups) <= 1:
        return
    first, other = source.manifest.param_groups[:2]
    differing = sorted(
        key
        for key in {*first.hyperparameters, *other.hyperparameters}
        if first.hyperparameters.get(key) != other.hyperparameters.get(key)
    )
    yield ParamGroupError(
        f"dialect {dialect.name} has one param group, but {len(source.manifest.param_groups)} sets of hyperparameters "
        f"are in use: {first.fqns[0]} and {other.fqns[0]} differ in {', '.join(differing)}",
        hint="choose a dialect with a group per parameter",
    )
