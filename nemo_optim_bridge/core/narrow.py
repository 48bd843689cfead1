"""Reduce a plan to what it needs, so that the manifest of the whole checkpoint can be freed before bytes are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nemo_optim_bridge.core.manifest import IntArray, Manifest
from nemo_optim_bridge.core.plan import Plan


def narrow(plan: Plan) -> Plan:
    """Return the same plan over a source that has only the shards which it reads, or compares as replicas.

    Tensors, buffers and files that no such shard needs are left out of the source as well, and its param groups and
    steps: the source of the result is to be read from, not to be planned with.
    """
    source, target = plan.source, plan.target
    rows, (read, replicas) = _renumber(plan.source_rows, plan.replicas)
    table = source.shards.take(rows)
    tensors, (tensor,) = _renumber(table.tensor)
    buffers, (buffer,) = _renumber(table.buffer)
    specs = tuple(source.tensors[number] for number in tensors.tolist())
    runs = source.buffers.take(buffers)
    identities = {file: source.identities[file] for file in runs.files if file in source.identities}
    kept = Manifest(
        specs, replace(table, tensors=specs, tensor=tensor, buffer=buffer), runs, identities=identities
    )  # fmt: skip
    row_type = plan.source_rows.dtype
    return replace(
        plan, source=kept, target=target, source_rows=read.astype(row_type), replicas=replicas.astype(row_type)
    )


def _renumber(*columns: np.ndarray) -> tuple[IntArray, Sequence[IntArray]]:
    """Return the numbers that occur, ascending, and the columns with each number replaced by its place among them."""
    used = np.unique(np.concatenate([column.reshape(-1) for column in columns]))
    return used, [np.searchsorted(used, column) for column in columns]
