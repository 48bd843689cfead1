"""A nanotron checkpoint as its headers describe it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from nemo_optim_bridge.core.manifest import Manifest
from nemo_optim_bridge.formats.nanotron.config import Documents, ModelFacts
from nemo_optim_bridge.formats.nanotron.dialects import Dialect
from nemo_optim_bridge.formats.nanotron.layout import ParamLayout, zero_slice
from nemo_optim_bridge.formats.nanotron.names import EMBEDDING
from nemo_optim_bridge.formats.nanotron.optimizer import Scalar
from nemo_optim_bridge.formats.nanotron.scheduler import Scheduler
from nemo_optim_bridge.formats.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class NanotronCheckpoint:
    """A checkpoint as its headers describe it.

    ``layouts`` holds every parameter in canonical order (stage by stage, without the tied copy), ``stage_of`` the
    pipeline stage of each block. ``states`` lists what the optimizer keeps per parameter, in the file's order: the
    dtype of a tensor, or a scalar with its value; ``hyperparameters`` are those of the parameter's group.
    ``torch_files`` are those whose records carry CRCs.
    ``remarks`` are worth a line to the user, ``problems`` make ``inspect`` exit with 1.
    """

    path: Path
    dialect: Dialect
    topology: Topology
    zero_stage: int
    documents: Documents
    facts: ModelFacts
    layouts: Mapping[str, ParamLayout]
    stage_of: Mapping[str, int]
    tied: bool
    has_masters: bool
    states: Mapping[str, Mapping[str, str | Scalar]]
    hyperparameters: Mapping[str, Mapping[str, Any]]
    scheduler: Scheduler | None
    manifest: Manifest
    torch_files: tuple[Path, ...]
    rebuilt: tuple[str, ...]
    remarks: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def true_vocab_size(self) -> int:
        """Rows of the vocabulary without padding."""
        layout = self.layouts.get(EMBEDDING)
        return self.facts.vocab_size if layout is None else layout.shape[0]


def is_row_bias(layout: ParamLayout, layouts: Mapping[str, ParamLayout]) -> bool:
    """Tell whether a parameter is the bias of a row-parallel linear, which only tensor-parallel rank 0 has."""
    if layout.is_sharded or not layout.fqn.endswith(".bias"):
        return False
    weight = layouts.get(layout.fqn[: -len("bias")] + "weight")
    return weight is not None and weight.experts is None and weight.dim == 1


def zero_config_entry(layout: ParamLayout, topology: Topology) -> tuple[dict[str, list[str]], list[str]]:
    """Return a parameter's ZeRO-1 ranges and local shape as optimizer_config.json spells them."""
    shape = layout.local_shape(topology)
    ranges = {dp: zero_slice(prod(shape), topology.dp, dp) for dp in range(topology.dp)}
    return (
        {str(dp): [str(start), str(stop)] for dp, (start, stop) in ranges.items() if stop > start},
        [str(size) for size in shape],
    )
