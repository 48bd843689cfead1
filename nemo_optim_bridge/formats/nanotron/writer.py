"""Lay out a nanotron checkpoint for a target topology: which files, with which parts, and what goes into them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.checkpoint import MASTER, WEIGHT
from nemo_optim_bridge.core.manifest import DTYPES, ITEMSIZE, Manifest, TensorKey
from nemo_optim_bridge.core.output import Layout, OutputFile
from nemo_optim_bridge.errors import TargetError, raise_all
from nemo_optim_bridge.formats.nanotron.checkpoint import (
    NanotronCheckpoint,
    is_row_bias,
    zero_config_entry,
)
from nemo_optim_bridge.formats.nanotron.config import target_documents
from nemo_optim_bridge.formats.nanotron.layout import (
    ParamLayout,
    View,
    number_alike,
    padded_vocab_size,
    shard_metadata,
)
from nemo_optim_bridge.formats.nanotron.names import (
    EMBEDDING,
    LM_HEAD,
    RankName,
    WeightName,
    block_of,
    format_rank_name,
    format_weight_name,
)
from nemo_optim_bridge.formats.nanotron.optimizer import Scalar
from nemo_optim_bridge.formats.nanotron.pipeline import blocks_of, split_as_given, split_by_cost
from nemo_optim_bridge.formats.nanotron.scheduler import scheduler_files
from nemo_optim_bridge.formats.nanotron.target_spec import TargetSpec, problems_of
from nemo_optim_bridge.formats.safetensors_header import format_header
from nemo_optim_bridge.formats.topology import Coordinates
from nemo_optim_bridge.formats.torch_zip import NewTensor, lay_out


class Outline(NamedTuple):
    """A file to write: about how many bytes it has, and what lays it out, given ``args``."""

    nbytes: int
    lay_out: Callable[..., OutputFile]
    args: tuple[Any, ...]


class Target:
    """An outlined checkpoint: ``outlines`` of its files, and remarks for the user. ``lay_out`` does some of the files.

    Raises TargetError or ParamGroupError with every reason why it cannot be built.
    """

    def __init__(self, source: NanotronCheckpoint, spec: TargetSpec) -> None:
        raise_all(problems_of(source, spec))
        self.spec = spec
        self._layouter = _Layouter(source, spec)
        self.outlines = tuple(self._layouter.outlines())
        self.remarks = tuple(self._layouter.remarks)

    def lay_out(self, numbers: Iterable[int]) -> tuple[tuple[OutputFile, ...], Manifest]:
        """Return the files of the given outlines, and the manifest of their payloads; to be called once."""
        outlines = (self.outlines[number] for number in numbers)
        files = tuple(outline.lay_out(*outline.args) for outline in outlines)
        return files, self._layouter.manifest()


class _Weights(NamedTuple):
    """Weights of one rank that are laid out alike: ``tensors`` and ``buffers`` number those entered so far."""

    layout: Layout
    views: tuple[View, ...]
    rank: int
    tensors: list[int]
    buffers: list[int]


class _Layouter:
    def __init__(self, source: NanotronCheckpoint, spec: TargetSpec) -> None:
        self.source, self.spec = source, spec
        self.dialect, self.topology, self.zero_stage = spec.dialect, spec.topology, spec.zero_stage
        self.builder = ManifestBuilder()
        self.remarks: list[str] = []
        self.layouts = self._layouts()
        self.stage_of = self._stages()
        self.stages = self._stage_parameters()
        self._pattern = number_alike(self.layouts)
        self._weights_alike: dict[tuple[int, int, int, int], _Weights] = {}  # by pattern, stage, tp, ep

    def outlines(self) -> Iterator[Outline]:
        """Yield all files, in the order in which they are written."""
        yield from self._weights()
        yield from self._optimizer()
        for file in (*self._schedulers(), *self._documents()):
            yield Outline(file.nbytes, _same, (file,))
        self.remarks.append("random states are not written: no nanotron trainer loads them")

    def _layouts(self) -> dict[str, ParamLayout]:
        """Return every parameter's layout, vocabulary matrices padded for the target, in the target's order."""
        source, like = self.source, self.spec.like
        layouts = dict(source.layouts)
        if like is not None:
            if set(like.layouts) != set(layouts):
                odd = sorted(set(like.layouts) ^ set(layouts))
                raise TargetError(
                    f"the --like checkpoint holds another model: {odd[0]} is in only one of the two", path=like.path
                )
            layouts = {fqn: layouts[fqn] for fqn in like.layouts}
        if EMBEDDING not in layouts:
            self.vocab_size = source.facts.vocab_size
            return layouts
        true = layouts[EMBEDDING].shape[0]
        self.vocab_size = padded_vocab_size(true, self.topology.tp, source.documents.vocab_multiple)
        if like is not None and like.topology.tp == self.topology.tp:
            self.vocab_size = max(true, like.facts.vocab_size)
        rows = self.vocab_size - true
        for fqn in (EMBEDDING, LM_HEAD):
            if fqn in layouts:
                layouts[fqn] = layouts[fqn].pad(rows)
                if rows:
                    self.remarks.append(f"{fqn}: {rows} vocabulary rows from {true} on are zero-filled")
        return layouts

    def _stages(self) -> Mapping[str, int]:
        """Return the stage of every block: as given, as in the --like checkpoint, or as nanotron computes it."""
        facts, pp = self.source.facts, self.topology.pp
        if self.spec.like is not None:
            if self.spec.like.topology.pp != pp:
                raise TargetError(
                    f"the --like checkpoint has pp {self.spec.like.topology.pp}, the target {pp}",
                    path=self.spec.like.path,
                    hint=f"add --pp {self.spec.like.topology.pp}",
                )
            untold = sorted(set(blocks_of(facts.num_layers)) - set(self.spec.like.stage_of))
            if untold:
                raise TargetError(
                    f"the --like checkpoint does not tell the stage of {untold[0]}: it trains nothing there",
                    path=self.spec.like.path,
                    hint="give the split with --pp-split",
                )
            return self.spec.like.stage_of
        if self.spec.layers_per_stage is not None:
            if len(self.spec.layers_per_stage) != pp:
                raise TargetError(f"--pp-split lists {len(self.spec.layers_per_stage)} stages, the target has pp {pp}")
            return split_as_given(facts.num_layers, self.spec.layers_per_stage)
        if facts.family is None and pp > 1:
            raise TargetError(
                "how nanotron splits this kind of model over stages is not known",
                path=self.source.documents.model.path,
                hint="give the decoder layers of each stage with --pp-split",
            )
        return split_by_cost(facts.num_layers, facts.layer_cost, self.vocab_size * facts.hidden_size, pp)

    def _stage_parameters(self) -> list[list[str]]:
        """Return the trained parameters of each stage in order; the tied copy is the last of lm_head's stage."""
        stages: list[list[str]] = [[] for _ in range(self.topology.pp)]
        for fqn in self.layouts:
            if fqn in self.source.hyperparameters:
                stages[self._stage(fqn)].append(fqn)
        is_trained = EMBEDDING in self.source.hyperparameters
        if self.source.tied and is_trained and self.stage_of["lm_head"] != self.stage_of["token_position_embeddings"]:
            stages[self.stage_of["lm_head"]].append(EMBEDDING)
        return stages

    def _stage(self, fqn: str) -> int:
        return self.stage_of[block_of(fqn) or ""]

    def _weights(self) -> Iterator[Outline]:
        lay_out = self._weight
        for fqn, layout in self.layouts.items():
            nbytes = prod(layout.local_shape(self.topology)) * ITEMSIZE[layout.dtype]
            for ep in range(self.topology.ep if layout.experts else 1):
                for tp in range(self.topology.tp if layout.is_sharded else 1):
                    yield Outline(nbytes, lay_out, (fqn, tp, ep))

    def _weight(self, fqn: str, tp: int, ep: int) -> OutputFile:
        layout, topology = self.layouts[fqn], self.topology
        name = WeightName(fqn)
        if layout.is_sharded:
            num_ep = topology.ep if layout.experts else 1
            at_ep = (ep, num_ep) if num_ep > 1 else None
            name = WeightName(fqn, (self._stage(fqn), topology.pp), (tp, topology.tp), at_ep)
        path = f"model/{format_weight_name(name)}"
        weights = self._alike(fqn, tp, ep)
        file = weights.layout
        weights.tensors.append(self.builder.tensor(TensorKey(fqn, WEIGHT), layout.shape, layout.dtype))
        buffer = self.builder.buffer(path, file.text_bytes, file.nbytes - file.text_bytes, layout.dtype)
        weights.buffers.append(buffer)
        return OutputFile(path, file, buffer)

    def _alike(self, fqn: str, tp: int, ep: int) -> _Weights:
        """Return where to enter a weight of one rank: with those that are laid out like it."""
        key = self._pattern[fqn], self._stage(fqn), tp, ep
        if key not in self._weights_alike:
            layout, topology = self.layouts[fqn], self.topology
            shape = layout.local_shape(topology)
            metadata = shard_metadata(layout, topology, tp, ep, self.dialect.shard_version)
            header = format_header("data", layout.dtype, shape, metadata)
            rank = topology.rank(Coordinates(tp, self._stage(fqn), 0, ep))
            file = Layout.of(header, prod(shape) * ITEMSIZE[layout.dtype])
            self._weights_alike[key] = _Weights(file, layout.views(topology, tp, ep), rank, [], [])
        return self._weights_alike[key]

    def manifest(self) -> Manifest:
        """Return the manifest of the payloads of all files that were laid out, and let go of what it is made from."""
        for weights in self._weights_alike.values():
            tensors, buffers = np.array(weights.tensors, np.int64), np.array(weights.buffers, np.int64)
            for view in weights.views:
                self.builder.shards(tensors, view.region, weights.rank, buffers, *view[1:])
        self._weights_alike.clear()
        builder, self.builder = self.builder, ManifestBuilder()
        return builder.build(self.source.manifest.param_groups, self.source.manifest.steps)

    def _optimizer(self) -> Iterator[Outline]:
        topology = self.topology
        parts = topology.dp if self.zero_stage else 1
        stages = [sum(map(self._state_bytes, stage)) // parts for stage in self.stages]
        for at in topology if self.zero_stage else replace(topology, dp=1):
            yield Outline(stages[at.pp], self._optimizer_file, (at,))
        config = Layout.of(json.dumps(self._optimizer_config()).encode())
        yield Outline(config.nbytes, _same, (OutputFile("optimizer/optimizer_config.json", config),))

    def _state_bytes(self, fqn: str) -> int:
        """Return the bytes that the ranks of one data-parallel group keep of a parameter's states."""
        dtypes = [dtype for dtype in self.source.states[fqn].values() if isinstance(dtype, str)]
        itemsize = sum(ITEMSIZE[dtype] for dtype in dtypes) + 4 * self.source.has_masters
        return prod(self.layouts[fqn].local_shape(self.topology)) * itemsize

    def _optimizer_file(self, at: Coordinates) -> OutputFile:
        name = RankName(
            (at.pp, self.topology.pp), (at.tp, self.topology.tp),
            (at.dp, self.topology.dp) if self.zero_stage else None,
            (at.ep, self.topology.ep) if self.dialect.names_experts else None,
        )  # fmt: skip
        path = f"optimizer/{format_rank_name('optimizer', name)}"
        stem = path.removesuffix(".pt").rpartition("/")[2]
        state, first_buffer = self._state_dict(path, at)
        return OutputFile(path, lay_out(state, stem), first_buffer)

    def _state_dict(self, path: str, at: Coordinates) -> tuple[dict[str, Any], int]:
        """Return what a rank saves, and the buffer of its first payload.

        An empty ZeRO-1 slice has no id, but its own group stays where there is one.
        """
        names: dict[int, str] = {}
        groups: list[dict[str, Any]] = []
        for fqn in self.stages[at.pp]:
            layout = self.layouts[fqn]
            if at.tp and is_row_bias(layout, self.layouts):
                continue
            start, stop = layout.kept(self.topology, self.zero_stage, at.dp)
            ids = [len(names)] if stop > start else []
            names.update(dict.fromkeys(ids, fqn))
            if self.dialect.group_per_parameter or not groups:
                groups.append(self._group(fqn, ids))
            else:
                groups[0]["params"].extend(ids)
        entries = [
            (fqn, key, entry)
            for fqn in names.values()
            for key, entry in self.source.states[fqn].items()
            if isinstance(entry, str)
        ]
        if self.source.has_masters:
            entries += [(fqn, MASTER, "float32") for fqn in names.values()]
        tensors, first_buffer = self._tensors(path, at, entries)
        state = {
            number: {
                key: _scalar(entry) if isinstance(entry, Scalar) else tensors[fqn, key]
                for key, entry in self.source.states[fqn].items()
            }
            for number, fqn in names.items()
            if self.source.states[fqn]
        }
        result: dict[str, Any] = {
            "state": state, "param_groups": groups, "names": {n: fqn for n, fqn in names.items() if n in state},
        }  # fmt: skip
        if self.source.has_masters:
            result["gradient_accumulator"] = {fqn: tensors[fqn, MASTER] for fqn in names.values()}
        return result, first_buffer

    def _group(self, fqn: str, ids: list[int]) -> dict[str, Any]:
        values = self.source.hyperparameters[fqn]
        ordered = [key for key in self.dialect.group_keys if key in values]
        ordered += [key for key in values if key not in ordered]
        return {**{key: values[key] for key in ordered}, "params": ids}

    def _tensors(
        self, path: str, at: Coordinates, entries: Sequence[tuple[str, str, str]]
    ) -> tuple[dict[tuple[str, str], NewTensor], int]:
        """Declare (fqn, state, dtype) entries of a rank, in the file's order; those of one layout together.

        Returns the tensors by (fqn, state), and the buffer of the first.
        """
        shapes: dict[int, tuple[int, ...]] = {}
        flats: dict[int, tuple[int, int]] = {}
        alike: dict[int, list[int]] = {}
        tensor = np.empty(len(entries), np.int64)
        nbytes = np.empty(len(entries), np.int64)
        for number, (fqn, state, dtype) in enumerate(entries):
            layout, pattern = self.layouts[fqn], self._pattern[fqn]
            if pattern not in alike:
                start, stop = flats[pattern] = layout.kept(self.topology, self.zero_stage, at.dp)
                shapes[pattern] = (stop - start,) if self.zero_stage else layout.local_shape(self.topology)
            alike.setdefault(pattern, []).append(number)
            tensor[number] = self.builder.tensor(TensorKey(fqn, state), layout.shape, dtype)
            nbytes[number] = (flats[pattern][1] - flats[pattern][0]) * ITEMSIZE[dtype]
        dtypes = np.array([DTYPES.index(dtype) for _, _, dtype in entries], np.int64)
        buffer = self.builder.buffers(path, np.zeros_like(nbytes), nbytes, dtypes)
        rank = self.topology.rank(at)
        for pattern, numbers in alike.items():
            layout = self.layouts[entries[numbers[0]][0]]
            for view in layout.views(self.topology, at.tp, at.ep, flats[pattern]):
                self.builder.shards(tensor[numbers], view.region, rank, buffer[numbers], *view[1:])
        tensors = {
            (fqn, state): NewTensor(dtype, shapes[self._pattern[fqn]], number)
            for number, (fqn, state, dtype) in enumerate(entries)
        }
        return tensors, int(buffer[0]) if entries else 0

    def _optimizer_config(self) -> dict[str, Any]:
        topology = self.topology
        parallelism = {"tp_size": str(topology.tp), "dp_size": str(topology.dp), "pp_size": str(topology.pp)}
        if self.dialect.names_experts:
            parallelism["expert_parallel_size"] = str(topology.ep)
        configs: dict[str, dict[str, Any]] = {}
        if self.zero_stage:
            entries = {fqn: zero_config_entry(self.layouts[fqn], topology) for stage in self.stages for fqn in stage}
            configs = {
                "param_name_to_dp_rank_offsets": {fqn: ranges for fqn, (ranges, _) in entries.items()},
                "orig_param_shapes": {fqn: shape for fqn, (_, shape) in entries.items()},
            }
        plain = "OptimizerFromGradientAccumulator" if self.source.has_masters else "NamedOptimizer"
        kind = "ZeroDistributedOptimizer" if self.zero_stage else plain
        return {"type": kind, "parallelism": parallelism, "configs": configs}

    def _schedulers(self) -> Iterator[OutputFile]:
        scheduler = self.source.scheduler
        if scheduler is None:
            return
        for (pp, _, _), name in scheduler_files(self.dialect, self.topology).items():
            fqns: Sequence[str] = self.stages[pp]
            if not self.dialect.group_per_parameter:
                fqns = [fqn for stage in self.stages for fqn in stage]
            state = scheduler.state_dict(self.dialect, fqns)
            yield OutputFile(f"lr_scheduler/{name}", lay_out(state, name.removesuffix(".pt")))

    def _documents(self) -> Iterator[OutputFile]:
        contents, remarks = target_documents(
            self.source.documents, self.dialect, self.topology, self.zero_stage, self.vocab_size
        )
        self.remarks.extend(remarks)
        for path, data in contents.items():
            yield OutputFile(path, Layout.of(data))


def _same(file: OutputFile) -> OutputFile:
    return file


def _scalar(scalar: Scalar) -> NewTensor | float:
    """Return a scalar state as it was stored: a tensor of its own, or a Python number."""
    return scalar.value if scalar.dtype is None else NewTensor(scalar.dtype, scalar.shape, scalar.data)
