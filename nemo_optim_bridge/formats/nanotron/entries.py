"""Enter the tensors of all weight and optimizer files into a manifest, a column of equal boxes at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.checkpoint import MASTER, WEIGHT
from nemo_optim_bridge.core.manifest import DTYPES, BoolArray, IntArray, TensorKey
from nemo_optim_bridge.errors import BridgeError, ContradictionError
from nemo_optim_bridge.formats.nanotron.layout import ParamLayout, View, format_shape, number_alike
from nemo_optim_bridge.formats.nanotron.names import block_of
from nemo_optim_bridge.formats.nanotron.optimizer import Form, OptimizerShard, Scalar, exact
from nemo_optim_bridge.formats.nanotron.weights import WeightShard
from nemo_optim_bridge.formats.topology import Coordinates, Topology

States = Mapping[str, str | Scalar]


class Entries:
    """Collects what every rank saved; ``states`` and ``hyperparameters`` are by parameter, the same on all ranks.

    Parameters of equal layouts, as those of all decoder layers, are cut alike: what follows from a layout is worked
    out once a file. ``lost`` are weights that the masters stand in for.
    """

    def __init__(
        self, builder: ManifestBuilder, topology: Topology, zero_stage: int, layouts: Mapping[str, ParamLayout],
        lost: frozenset[str],
    ) -> None:  # fmt: skip
        self._builder, self._topology, self._zero_stage = builder, topology, zero_stage
        self._layouts, self._lost = layouts, lost
        self.states: dict[str, States] = {}
        self.hyperparameters: dict[str, Mapping[str, Any]] = {}
        self.problems: list[BridgeError] = []
        self._interned: dict[object, Any] = {}
        self._pattern = number_alike(layouts)
        self._tensors: dict[tuple[str, int], tuple[int, ...]] = {}

    def add_weights(self, shards: Mapping[str, Sequence[WeightShard]], stage_of: Mapping[str, int]) -> None:
        """Enter the weight files of all parameters but the lost ones, those that are cut alike together."""
        alike: dict[tuple[int, int, int, int], tuple[ParamLayout, list[int], list[int]]] = {}
        for fqn, layout in self._layouts.items():
            tensor = self._builder.tensor(TensorKey(fqn, WEIGHT), layout.shape, layout.dtype)
            stage = stage_of.get(block_of(fqn) or "", 0)
            for shard in shards[fqn] if fqn not in self._lost else ():
                array = shard.array
                key = self._pattern[fqn], stage, shard.tp, shard.ep
                _, tensors, buffers = alike.setdefault(key, (layout, [], []))
                tensors.append(tensor)
                buffers.append(self._builder.buffer(shard.path, array.offset, array.nbytes, array.dtype))
        for (_, stage, tp, ep), (layout, tensors, buffers) in alike.items():
            rank = self._topology.rank(Coordinates(tp, stage, 0, ep))
            for view in layout.views(self._topology, tp, ep):
                self._builder.shards(np.array(tensors), view.region, rank, np.array(buffers), *view[1:])

    def add(self, shard: OptimizerShard) -> None:
        """Enter one rank's file, ranks in order; what contradicts the ranks before goes to ``problems``."""
        kinds = [self._intern(kind) for kind in shard.kinds]
        groups = [self._intern(group) for group in shard.groups]
        masters = frozenset(shard.masters or ())
        known_problems = len(self.problems)
        tensors: list[tuple[int, ...]] = []
        for fqn, kind, group in zip(shard.fqns, shard.kind.tolist(), shard.group.tolist(), strict=True):
            mine, here = kinds[kind], groups[group]
            if (known := self.states.setdefault(fqn, mine)) is not mine and exact(known) != exact(mine):
                self._report(f"has states {_shown(mine)}, other ranks {_shown(known)}", shard, fqn)
            if (values := self.hyperparameters.setdefault(fqn, here)) is not here and exact(values) != exact(here):
                self._report("has other hyperparameters than on other ranks", shard, fqn)
            rows = self._tensors.get((fqn, id(mine)))
            if rows is None:
                rows = self._tensors[fqn, id(mine)] = self._declare(fqn, mine, fqn in masters)
            tensors.append(rows)
        if len(self.problems) == known_problems:
            self._enter(shard, tensors, np.array([fqn in masters for fqn in shard.fqns], np.bool_))

    def _intern(self, value: Mapping[str, Any]) -> Any:
        """Return the one object that stands for all equal ones, to the bit and to the order of their keys."""
        return self._interned.setdefault((exact(value), tuple(value)), value)

    def _declare(self, fqn: str, states: States, has_master: bool) -> tuple[int, ...]:
        """Return the builder's numbers of a parameter's tensors, in the order of its entries."""
        shape = self._layouts[fqn].shape
        entries = [(state, dtype) for state, dtype in states.items() if isinstance(dtype, str)]
        if has_master:
            entries.append((MASTER, "float32"))
        return tuple(self._builder.tensor(TensorKey(fqn, state), shape, dtype) for state, dtype in entries)

    def _enter(self, shard: OptimizerShard, tensors: list[tuple[int, ...]], has_master: BoolArray) -> None:
        """Enter all tensors of a file, those of one layout and form together."""
        counts = np.array([len(rows) for rows in tensors], np.int64)
        owner = np.repeat(np.arange(len(counts)), counts)
        tensor = np.fromiter(chain.from_iterable(tensors), np.int64, len(owner))
        is_master = np.zeros(len(owner), np.bool_)
        is_master[(np.cumsum(counts) - 1)[has_master]] = True
        pattern = np.array([self._pattern[fqn] for fqn in shard.fqns], np.int64)[owner]
        dtypes = np.array([DTYPES.index(form.dtype) for form in shard.forms], np.int64)
        buffer = self._builder.buffers(str(shard.path), shard.offset, shard.nbytes, dtypes[shard.form])
        alike = (pattern * len(shard.forms) + shard.form) * 2 + is_master
        order = np.argsort(alike, kind="stable")
        for entries in np.split(order, np.flatnonzero(np.diff(alike[order])) + 1) if len(order) else ():
            first = int(entries[0])
            layout, form = self._layouts[shard.fqns[owner[first]]], shard.forms[int(shard.form[first])]
            flat = layout.kept(self._topology, self._zero_stage, shard.at.dp)
            problem = self._problem(layout, form, flat, bool(is_master[first]))
            if problem:
                for entry in entries.tolist():
                    self._report(f"{self._state(shard, owner, entry)} {problem}", shard, shard.fqns[owner[entry]])
                continue
            for view in layout.views(
                self._topology, shard.at.tp, shard.at.ep, flat, None if self._zero_stage else form.stride
            ):
                rank = self._topology.rank(shard.at)
                self._builder.shards(tensor[entries], view.region, rank, buffer[entries], *view[1:])
                if is_master[first]:
                    self._stand_in(shard, owner, entries, buffer, view)

    def _stand_in(
        self, shard: OptimizerShard, owner: IntArray, entries: IntArray, buffer: IntArray, view: View
    ) -> None:
        """Enter masters a second time, as the weights that are lost."""
        for entry in entries.tolist() if self._lost else ():
            layout = self._layouts[shard.fqns[owner[entry]]]
            if layout.fqn in self._lost:
                tensor = self._builder.tensor(TensorKey(layout.fqn, WEIGHT), layout.shape, layout.dtype)
                self._builder.shard(tensor, view.region, self._topology.rank(shard.at), int(buffer[entry]), *view[1:])

    def _problem(self, layout: ParamLayout, form: Form, flat: tuple[int, int], is_master: bool) -> str | None:
        """Return why tensors of a form are not what a rank keeps of parameters of a layout, if so."""
        if self._zero_stage and form.stride != (1,):
            return "is a strided view of its storage, not a slice"
        expected = (flat[1] - flat[0],) if self._zero_stage else layout.local_shape(self._topology)
        dtype = "float32" if is_master else form.dtype
        if (form.dtype, form.shape) != (dtype, expected):
            return f"has dtype {form.dtype} and shape {format_shape(form.shape)}, not {dtype} {format_shape(expected)}"
        return None

    def _state(self, shard: OptimizerShard, owner: IntArray, entry: int) -> str:
        """Return the name of an entry's state."""
        number = int(owner[entry])
        kind = shard.kinds[int(shard.kind[number])]
        return [*(key for key, value in kind.items() if isinstance(value, str)), MASTER][
            entry - int(np.searchsorted(owner, number))
        ]

    def _report(self, problem: str, shard: OptimizerShard, fqn: str) -> None:
        hint = "copy the file again from the original run"
        self.problems.append(ContradictionError(problem, path=shard.path, key=fqn, rank=str(shard.at), hint=hint))


def _shown(states: States) -> str:
    return ", ".join(
        f"{key} {value.value:g}" if isinstance(value, Scalar) else f"{key} {value}" for key, value in states.items()
    )
