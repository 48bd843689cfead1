"""Put the files of all ranks together into one checkpoint, and report every contradiction between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.manifest import Identity, ParamGroup
from nemo_optim_bridge.core.team import Team
from nemo_optim_bridge.errors import (
    BridgeError,
    ContradictionError,
    MissingSourceError,
    UnknownFormatError,
    raise_all,
)
from nemo_optim_bridge.formats.documents import shown
from nemo_optim_bridge.formats.nanotron.checkpoint import NanotronCheckpoint, is_row_bias, zero_config_entry
from nemo_optim_bridge.formats.nanotron.config import Documents, ModelFacts
from nemo_optim_bridge.formats.nanotron.dialects import Dialect
from nemo_optim_bridge.formats.nanotron.entries import Entries
from nemo_optim_bridge.formats.nanotron.layout import ParamLayout
from nemo_optim_bridge.formats.nanotron.names import EMBEDDING, LM_HEAD, WeightName, block_of, format_weight_name
from nemo_optim_bridge.formats.nanotron.optimizer import OptimizerShard, Scalar, exact, remembered
from nemo_optim_bridge.formats.nanotron.pipeline import blocks_of
from nemo_optim_bridge.formats.nanotron.scheduler import Scheduler, read_scheduler
from nemo_optim_bridge.formats.nanotron.weights import Weights
from nemo_optim_bridge.formats.topology import Coordinates, Topology


class Assembler:
    """Puts the files of all ranks together; every method reports into one list of problems."""

    def __init__(
        self, root: Path, dialect: Dialect, topology: Topology, zero_stage: int, documents: Documents,
        facts: ModelFacts, weights: Weights, shards: Mapping[Coordinates, OptimizerShard], team: Team,
    ) -> None:  # fmt: skip
        self.root, self.dialect, self.topology, self.zero_stage = root, dialect, topology, zero_stage
        self.documents, self.facts, self.weights, self.shards = documents, facts, weights, shards
        self.team = team
        self.problems: list[BridgeError] = []
        self.builder = ManifestBuilder()

    def checkpoint(
        self, vocab_size: int | None, leftovers: Sequence[Path], has_legacy_names: bool
    ) -> NanotronCheckpoint:
        """Return the assembled checkpoint; raises with every problem found."""
        self.has_masters = self._has_masters()
        stages = self._stages()
        self._check_presence(stages)
        raise_all(self.problems)
        self._check_shards()
        self._check_groups(stages)
        raise_all(self.problems)
        order = list(dict.fromkeys(fqn for stage in stages for fqn in stage))
        trained = set(order)
        frozen = [fqn for fqn in self.weights.layouts if fqn not in trained]
        tied = LM_HEAD not in self.weights.layouts
        layouts = self._layouts([*order, *frozen], vocab_size)
        self.problems.extend(facts_problems(self.facts, layouts, self.documents.model.path))
        raise_all(self.problems)
        stage_of = self._stage_of(stages, order)
        self._check_zero_config(layouts)
        if tied and self.documents.model.get("tie_word_embeddings") is False:
            self.problems.append(
                MissingSourceError(
                    "tie_word_embeddings is false, but there is no lm_head",
                    path=self.documents.model.path,
                    key=LM_HEAD,
                    hint="copy its files from the original run",
                )
            )  # fmt: skip
        if tied and EMBEDDING in trained and stage_of["lm_head"] < stage_of.get("final_layer_norm", 0):
            self.problems.append(
                MissingSourceError(
                    "the tied embedding's copy is missing from lm_head's stage: nanotron would not load the file",
                    path=self.shards[Coordinates(0, self.topology.pp - 1, 0, 0)].path,
                    key=EMBEDDING,
                    hint="copy the stage's files again from the original run",
                )
            )
        raise_all(self.problems)
        entries = self._add_tensors(layouts, stage_of)
        raise_all(self.problems)
        states, hyperparameters = entries.states, entries.hyperparameters
        groups = _param_groups(hyperparameters)
        steps = {fqn: step.value for fqn, kept in states.items() if isinstance(step := kept.get("step"), Scalar)}
        scheduler = self.team.lead(lambda: read_scheduler(self.root, self.dialect, self.topology, stages))
        schedulers = scheduler.files if scheduler else {}
        leftovers = [*leftovers, *(scheduler.leftovers if scheduler else ())]
        if scheduler is not None:
            raise_all(scheduler.problems(hyperparameters))
        manifest = self.builder.build(groups, steps, self._identities(schedulers))
        rebuilt = tuple(sorted(self.weights.lost))
        names = [path.relative_to(self.root).as_posix() for path in leftovers]
        remarks = list(self._remarks(states, vocab_size, has_legacy_names, rebuilt, frozen, scheduler))
        remarks += _differing_counts(steps, scheduler, self.documents)
        return NanotronCheckpoint(
            self.root, self.dialect, self.topology, self.zero_stage, self.documents, self.facts, layouts, stage_of,
            tied, self.has_masters, states, hyperparameters, scheduler, manifest,
            (*(shard.path for shard in self.shards.values()), *schedulers), rebuilt, tuple(remarks),
            tuple(f"{name} does not belong to this checkpoint's topology; it is ignored" for name in names),
        )  # fmt: skip

    def _identities(self, schedulers: Mapping[Path, Identity]) -> dict[str, Identity]:
        """Return what every file that counts was when it was read, so that no later version of one is mixed in."""
        identities = {str(path): identity for path, identity in schedulers.items()}
        for document in self.documents.all():
            identities[str(document.path)] = document.identity
        identities.update((str(shard.path), shard.identity) for shard in self.shards.values())
        identities.update((shard.path, shard.identity) for shards in self.weights.shards.values() for shard in shards)
        return identities

    def _has_masters(self) -> bool:
        with_masters = [shard for shard in self.shards.values() if shard.masters is not None]
        if with_masters and len(with_masters) != len(self.shards):
            without = next(shard for shard in self.shards.values() if shard.masters is None)
            self.problems.append(
                ContradictionError(f"has no gradient_accumulator, {with_masters[0].path.name} has", path=without.path)
            )
        return bool(with_masters)

    def _stages(self) -> list[tuple[str, ...]]:
        """Return each stage's parameters in order: dp rank 0 never has an empty slice."""
        return [self.shards[Coordinates(0, pp, 0, 0)].fqns for pp in range(self.topology.pp)]

    def _owns(self, fqn: str, at: Coordinates) -> bool:
        """Tell whether a rank of a parameter's stage keeps optimizer state of it."""
        layout = self.weights.layouts[fqn]
        if self._only_on_first_tp(layout) and at.tp:
            return False
        start, stop = layout.kept(self.topology, self.zero_stage, at.dp)
        return stop > start

    def _only_on_first_tp(self, layout: ParamLayout) -> bool:
        return is_row_bias(layout, self.weights.layouts)

    def _check_presence(self, stages: Sequence[Sequence[str]]) -> None:
        """Report parameters that a rank should have and lacks, or has and should not."""
        for fqn in {fqn for stage in stages for fqn in stage} - set(self.weights.layouts):
            shard = next(shard for shard in self.shards.values() if fqn in shard.fqns)
            folder = (self.root / "model" / format_weight_name(WeightName(fqn))).parent
            self.problems.append(
                MissingSourceError(
                    "optimizer state without a weight shard",
                    path=shard.path,
                    key=fqn,
                    hint=f"copy the parameter's files to {folder} from the original run, under their own names; if the "
                    "run has no such parameter, copy this optimizer file again",
                )
            )
        if self.problems:
            return
        for at, shard in self.shards.items():
            expected = {fqn for fqn in stages[at.pp] if self._owns(fqn, at)}
            present = set(shard.fqns)
            if [fqn for fqn in stages[at.pp] if fqn in present] != [*shard.fqns] and expected == present:
                self.problems.append(
                    ContradictionError("lists the parameters in another order than its stage", path=shard.path)
                )
            for fqn in sorted(expected - present):
                self.problems.append(
                    MissingSourceError("parameter is missing from this rank", path=shard.path, key=fqn, rank=str(at))
                )
            for fqn in sorted(present - expected):
                if fqn not in stages[at.pp]:
                    problem = "parameter is not on the first rank of this stage"
                elif 0 in self.weights.layouts[fqn].shape:
                    problem = "a parameter of no elements is not supported"
                else:
                    problem = "has state of a parameter that this rank has no part of"
                self.problems.append(ContradictionError(problem, path=shard.path, key=fqn, rank=str(at)))
            if shard.masters is not None:
                for fqn in sorted(present ^ set(shard.masters)):
                    self.problems.append(
                        MissingSourceError(
                            "has only one of optimizer state and fp32 master", path=shard.path, key=fqn, rank=str(at)
                        )
                    )

    def _check_groups(self, stages: Sequence[Sequence[str]]) -> None:
        """Report ranks with more or fewer param groups than their dialect has: one, or one a parameter.

        The group of an empty ZeRO-1 slice may be there or not.
        """
        for at, shard in self.shards.items():
            mine = [fqn for fqn in stages[at.pp] if not (at.tp and self._only_on_first_tp(self.weights.layouts[fqn]))]
            expected = {len(mine), len(shard.fqns)} if self.dialect.group_per_parameter else {1}
            if shard.num_groups not in expected:
                self.problems.append(
                    ContradictionError(
                        f"has {shard.num_groups} param groups instead of {max(expected)}", path=shard.path, rank=str(at)
                    )
                )

    def _check_shards(self) -> None:
        """Report weights that are no numbers to train, and sharding metadata of another revision."""
        for fqn, shards in self.weights.shards.items():
            if "float" not in self.weights.layouts[fqn].dtype:
                problem = f"weight has dtype {self.weights.layouts[fqn].dtype}"
                self.problems.append(ContradictionError(problem, path=shards[0].path, key=fqn))
            for shard in shards if self.weights.layouts[fqn].is_sharded else ():
                version = shard.array.metadata.get("version")
                if version != self.dialect.shard_version:
                    self.problems.append(
                        ContradictionError(
                            f"sharding metadata has version {shown(version)}, "
                            f"{self.documents.metadata.path.name} {self.dialect.version}", path=shard.path, key=fqn,
                        )
                    )  # fmt: skip

    def _layouts(self, order: Sequence[str], vocab_size: int | None) -> dict[str, ParamLayout]:
        """Return every parameter's layout, vocabulary matrices with the true vocabulary."""
        stored = self.facts.vocab_size
        if vocab_size is not None and not 1 <= vocab_size <= stored:
            raise ContradictionError(
                f"the vocabulary is stored with {stored} rows, fewer than the {vocab_size} given"
                if vocab_size > stored
                else f"a vocabulary of {vocab_size}",
                path=self.documents.model.path,
                hint=f"give a --vocab-size of 1 to {stored}",
            )
        multiple = self.documents.vocab_multiple
        if stored % (multiple * self.topology.tp):
            self.problems.append(
                ContradictionError(
                    f"make_vocab_size_divisible_by is {multiple}, but the vocabulary is stored with {stored} rows: "
                    f"nanotron pads it to a multiple of {multiple} * tp {self.topology.tp}",
                    path=self.documents.config.path,
                )
            )
        layouts = {fqn: self.weights.layouts[fqn] for fqn in order}
        for fqn in (EMBEDDING, LM_HEAD):
            layout = layouts.get(fqn)
            if layout is None:
                continue
            if layout.shape[0] != stored:
                self.problems.append(
                    ContradictionError(
                        f"has {layout.shape[0]} rows, but vocab_size is {stored}",
                        path=self.documents.model.path,
                        key=fqn,
                    )
                )
            elif vocab_size is not None and vocab_size < stored:
                true = ParamLayout(fqn, (vocab_size, *layout.shape[1:]), layout.dtype, layout.dim, layout.chunks)
                layouts[fqn] = true.pad(stored - vocab_size)
        return layouts

    def _stage_of(self, stages: Sequence[Sequence[str]], order: Sequence[str]) -> dict[str, int]:
        """Return each block's stage; a block on two stages is a contradiction, the tied copy apart."""
        stage_of: dict[str, int] = {}
        known = {*blocks_of(self.facts.num_layers)}
        for fqn in sorted(set(self.weights.layouts) - set(order)):
            if block_of(fqn) not in known:
                path = self.weights.shards[fqn][0].path
                self.problems.append(UnknownFormatError("weight belongs to no known block", path=path, key=fqn))
        for pp, fqns in enumerate(stages):
            for position, fqn in enumerate(fqns):
                block = block_of(fqn)
                shard = self.shards[Coordinates(0, pp, 0, 0)]
                if block is None or block not in known:
                    self.problems.append(
                        UnknownFormatError("parameter belongs to no known block", path=shard.path, key=fqn)
                    )
                    continue
                if fqn == EMBEDDING and pp and position == len(fqns) - 1 and stage_of.get(block) == 0:
                    stage_of["lm_head"] = pp
                elif stage_of.setdefault(block, pp) != pp:
                    self.problems.append(
                        ContradictionError(
                            f"block {block} is on pipeline stages {stage_of[block]} and {pp}", path=shard.path, key=fqn
                        )
                    )
        stage_of.setdefault("lm_head", stage_of.get("token_position_embeddings", 0))
        for fqn in order:
            for weight in self.weights.shards[fqn]:
                stage = weight.name.pp
                if stage is not None and stage_of.get(block_of(fqn) or "") != stage[0]:
                    self.problems.append(
                        ContradictionError(
                            f"weight is of pipeline stage {stage[0]}, its optimizer state of another",
                            path=weight.path,
                            key=fqn,
                        )
                    )
        return stage_of

    def _check_zero_config(self, layouts: Mapping[str, ParamLayout]) -> None:
        """Compare the ZeRO-1 ranges that optimizer_config.json lists with those that follow from the shapes."""
        if not self.zero_stage:
            return
        configs = self.documents.optimizer.section("configs")
        ranges, shapes = configs.section("param_name_to_dp_rank_offsets"), configs.section("orig_param_shapes")
        for fqn in sorted(set(ranges) | set(shapes)):
            if fqn not in layouts:
                self.problems.append(ContradictionError("lists an unknown parameter", path=configs.path, key=fqn))
                continue
            expected = zero_config_entry(layouts[fqn], self.topology)
            if (ranges.get(fqn, expected[0]), shapes.get(fqn, expected[1])) != expected:
                self.problems.append(
                    ContradictionError(
                        f"ZeRO-1 ranges {shown(ranges.get(fqn))} of shape {shown(shapes.get(fqn))} are "
                        "not those of "
                        f"{self.topology}: {expected[0]} of {expected[1]}",
                        path=configs.path, key=fqn,
                    )
                )  # fmt: skip

    def _add_tensors(self, layouts: Mapping[str, ParamLayout], stage_of: Mapping[str, int]) -> Entries:
        """Enter all weights, states and masters; return what is kept of each parameter."""
        entries = Entries(self.builder, self.topology, self.zero_stage, layouts, self.weights.lost)
        entries.add_weights(self.weights.shards, stage_of)
        for _, shard in sorted(self.shards.items(), key=lambda item: self.topology.rank(item[0])):
            entries.add(shard)
        self.problems.extend(entries.problems)
        for fqn in self.weights.lost & set(layouts):
            if not self.has_masters:
                self.problems.append(
                    MissingSourceError(
                        "the expert-parallel ranks overwrote each other's weight files and there is no fp32 master",
                        key=fqn, path=self.weights.shards[fqn][0].path,
                        hint="the weights of all experts but one are lost: nothing can be re-sharded",
                    )
                )  # fmt: skip
        return entries

    def _remarks(
        self, states: Mapping[str, Mapping[str, str | Scalar]], vocab_size: int | None, has_legacy_names: bool,
        rebuilt: Sequence[str], frozen: Sequence[str], scheduler: Scheduler | None,
    ) -> Iterator[str]:  # fmt: skip
        """Yield what a user should know about the source."""
        stored = self.facts.vocab_size
        if vocab_size is None:
            yield f"vocabulary: the stored size {stored} is taken as the true one (--vocab-size says otherwise)"
        elif vocab_size < stored:
            yield f"vocabulary: {stored - vocab_size} padding rows of {stored} are left out"
        if has_legacy_names and self.dialect.names_experts:
            yield "optimizer files have legacy names without _exp-: read as a hybrid"
        if any(shard.name.doubled for shards in self.weights.shards.values() for shard in shards):
            yield "weight files have the doubled names of spring 2024: written with proper names"
        for fqn in rebuilt:
            yield f"{fqn}: weights lost in the source (ranks overwrote one file); rebuilt from the masters by rounding"
        common = {key for entries in states.values() for key in entries}
        for fqn, entries in states.items():
            if lacking := sorted(common - set(entries)):
                yield f"{fqn}: has no {', '.join(lacking)}, which other parameters have"
        for fqn in frozen:
            yield f"{fqn}: has a weight but no optimizer state; it is carried as a frozen parameter"
        if scheduler is None:
            yield (
                "lr_scheduler: the source has none, none is written; nanotron 0.4 does not resume without one: copy "
                "its folder from the original run, then run again"
            )


def _differing_counts(
    steps: Mapping[str, float], scheduler: Scheduler | None, documents: Documents
) -> Iterator[str]:  # fmt: skip
    """Yield a remark when the files count the run's steps differently: a loader may be one off, a mix-up is more."""
    counts = {
        "the optimizer's step": max(steps.values(), default=None),
        "the lr_scheduler's last_epoch": scheduler.template.get("last_epoch") if scheduler else None,
        "last_train_step": documents.metadata.section("metas").get("last_train_step"),
    }
    if len({value for value in counts.values() if isinstance(value, int | float)}) > 1:
        told = ", ".join(f"{name} is {shown(value)}" for name, value in counts.items() if value is not None)
        yield f"the run's steps are counted differently: {told}; each is carried as it is"


def facts_problems(facts: ModelFacts, layouts: Mapping[str, ParamLayout], path: Path) -> Iterator[BridgeError]:
    """Yield where the sizes in model_config.json, which decide how a model may be cut, are not those of its tensors."""
    blocks = {block_of(fqn) for fqn in layouts}
    layers = {int(block.split(".")[1]) for block in blocks if block and block.startswith("decoder.")}
    if len(layers) != facts.num_layers or max(layers, default=-1) != facts.num_layers - 1:
        yield ContradictionError(
            f"num_hidden_layers is {facts.num_layers}, but there are weights of {len(layers)} decoder layers", path=path
        )
    for fqn, layout in layouts.items():
        if fqn == EMBEDDING and layout.shape[-1] != facts.hidden_size:
            yield ContradictionError(
                f"hidden_size is {facts.hidden_size}, but the embedding's rows have {layout.shape[-1]}",
                path=path,
                key=fqn,
            )
        elif fqn.endswith(".attn.qkv_proj.weight") and len(layout.chunks) == 3:
            query, key, value = layout.chunks
            if query % facts.num_heads or (query // facts.num_heads * facts.num_kv_heads,) * 2 != (key, value):
                yield ContradictionError(
                    f"num_attention_heads {facts.num_heads} and num_key_value_heads {facts.num_kv_heads} do not share "
                    f"{query}, {key} and {value} rows of q, k and v", path=path, key=fqn,
                )  # fmt: skip
        elif fqn.endswith(".pp_block.mlp.gate_up_proj.weight") and set(layout.chunks) != {facts.intermediate_size}:
            yield ContradictionError(
                f"intermediate_size is {facts.intermediate_size}, but gate and up have {layout.chunks} rows",
                path=path, key=fqn,
            )  # fmt: skip


def _param_groups(hyperparameters: Mapping[str, Mapping[str, Any]]) -> list[ParamGroup]:
    """Return parameters with equal hyperparameters as one group each, in order of first appearance."""
    groups: dict[object, tuple[Mapping[str, Any], list[str]]] = {}
    exact_once = remembered(exact)
    for fqn, values in hyperparameters.items():
        groups.setdefault(exact_once(values), (values, []))[1].append(fqn)
    return [ParamGroup(tuple(fqns), values) for values, fqns in groups.values()]
