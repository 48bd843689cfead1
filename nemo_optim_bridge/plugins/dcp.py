"""Let ``torch.distributed.checkpoint`` load checkpoints of the formats that this package reads, without conversion.

from torch.distributed import checkpoint as dcp
from nemo_optim_bridge.plugins.dcp import StorageReader

dcp.load(state_dict, storage_reader=StorageReader("checkpoints/1000"))
"""

from __future__ import annotations

import difflib
import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.futures import Future

from nemo_optim_bridge.core.agree import together
from nemo_optim_bridge.core.checkpoint import WEIGHT, Checkpoint
from nemo_optim_bridge.core.live import plan_tensors
from nemo_optim_bridge.core.manifest import Manifest, TensorKey
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.errors import BridgeError, MissingSourceError, TargetError, raise_all
from nemo_optim_bridge.formats.checkpoints import open_checkpoint
from nemo_optim_bridge.formats.torch_dcp import Catalogue, ExportReport, Rename, export_dcp, first_failure

__all__ = ["ExportReport", "StorageReader", "export_dcp", "load"]


class StorageReader(storage.StorageReader):
    """Reads any known checkpoint for ``dcp.load``: plain tensors and DTensors of any mesh and placement.

    Each rank reads all headers, and of the tensors the byte ranges that its own part of the state dict needs.
    Keys are ``model.<fqn>``, ``optim.state.<fqn>.<state>`` and ``optim.param_groups.<fqn>.<name>``: see ``Catalogue``.
    Copies of one box are not compared: the lowest rank's is read.

    Args:
        source: a checkpoint directory, one that was opened, or a manifest.
        rename, model_state: see ``Catalogue.of``.
        vocab_size: the true vocabulary; rows beyond it are left out.

    ``num_bytes_read`` counts the tensor bytes that this rank has read. Headers are read by ``dcp.load``, on every rank.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Checkpoint | Manifest,
        *,
        rename: Rename | None = None,
        model_state: str = WEIGHT,
        vocab_size: int | None = None,
    ) -> None:
        self.num_bytes_read = 0
        self._source = source
        self._rename = rename
        self._model_state = model_state
        self._vocab_size = vocab_size
        self._manifest: Manifest | None = None
        self._catalogue: Catalogue | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, from another directory where one is given."""
        if checkpoint_id is not None:
            self._source = checkpoint_id
        self._manifest = self._catalogue = None

    def read_metadata(self) -> Metadata:
        """Return what the headers say: every tensor as one chunk, so that requests are cut by the target alone."""
        _, catalogue = self.open()
        entries: dict[str, Any] = {key: BytesStorageMetadata() for key in catalogue.values}
        for key in catalogue.steps:
            entries[key] = _whole((), "float32")
        for key, spec in catalogue.tensors.items():
            entries[key] = _whole(spec.shape, spec.dtype)
        return Metadata(entries, planner_data=dict(catalogue.paths))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Accept the metadata, which this reader made itself."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are: ranks need no negotiation."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what this rank asked for; raises a BridgeError before the first tensor is touched when it cannot."""
        manifest, catalogue = self.open()
        resolved: list[tuple[ReadItem, torch.Tensor]] = []
        boxes: list[tuple[TensorKey, Region, torch.Tensor]] = []
        steps: list[tuple[torch.Tensor, float]] = []
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _saved(catalogue.values[key]))
                continue
            tensor = planner.resolve_tensor(item).detach()
            resolved.append((item, tensor))
            if key in catalogue.steps:
                steps.append((tensor, catalogue.steps[key]))
            else:
                region = Region(tuple(item.storage_offsets), tuple(item.lengths))
                boxes.append((catalogue.tensors[key].key, region, tensor))
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        self.num_bytes_read += plan_tensors(manifest, boxes, rank=rank).run()
        for tensor, step in steps:
            tensor.fill_(step)
        for item, tensor in resolved:
            planner.commit_tensor(item, tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this may be a checkpoint for this reader."""
        return Path(checkpoint_id).is_dir()

    def open(self) -> tuple[Manifest, Catalogue]:
        """Read the headers, unless they are read already; raises CheckpointError."""
        if self._manifest is None or self._catalogue is None:
            source = self._source
            if isinstance(source, str | os.PathLike):
                source = open_checkpoint(Path(source), self._vocab_size)
            self._manifest = source if isinstance(source, Manifest) else source.manifest
            self._catalogue = Catalogue.of(self._manifest, self._rename, model_state=self._model_state)
        return self._manifest, self._catalogue


def load(
    state_dict: dict[str, Any],
    source: str | os.PathLike[str] | Checkpoint | Manifest | StorageReader,
    *,
    rename: Rename | None = None,
    model_state: str = WEIGHT,
    vocab_size: int | None = None,
    process_group: Any = None,
) -> StorageReader:
    """Fill a state dict as ``dcp.load`` does, with this package's errors.

    Called by every rank of ``process_group`` (None: the default one), with its own part of the state dict; by one
    process when torch.distributed is not initialised. Returns the reader.

    Raises one BridgeError on all ranks, with every key that is missing or of another shape or dtype, before any tensor
    is touched.
    """
    if isinstance(source, StorageReader):
        reader = source
    else:
        reader = StorageReader(source, rename=rename, model_state=model_state, vocab_size=vocab_size)
    together(reader.open, process_group)
    try:
        load_state_dict(
            state_dict,
            storage_reader=reader,
            planner=_CheckingPlanner(),
            process_group=process_group,
            no_dist=not distributed.is_initialized(),
        )
    except CheckpointException as error:
        raise first_failure(error) from None
    return reader


class _CheckingPlanner(DefaultLoadPlanner):
    """Finds everything that does not fit before anything is read."""

    def create_local_plan(self) -> LoadPlan:
        """Plan as usual; raises MissingSourceError or TargetError with every problem found."""
        if self.metadata is None:
            raise BridgeError("the planner was not set up")
        known = self.metadata.state_dict_metadata
        problems: list[BridgeError] = []
        for key, value in self.state_dict.items():
            entry = known.get(key)
            if entry is None:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]}?" if near else "keys are model.<fqn> and optim.state.<fqn>.<state>"
                problems.append(MissingSourceError("the checkpoint has no such entry", key=key, hint=hint))
            elif isinstance(entry, TensorStorageMetadata):
                problems += _mismatch(key, entry, value)
        raise_all(problems)
        return super().create_local_plan()


def _mismatch(key: str, entry: TensorStorageMetadata, value: Any) -> list[BridgeError]:
    if not isinstance(value, torch.Tensor):
        return [TargetError(f"is a tensor in the checkpoint and {type(value).__name__} in the state dict", key=key)]
    wanted, stored = (tuple(value.shape), value.dtype), (tuple(entry.size), entry.properties.dtype)
    if wanted == stored:
        return []
    return [
        TargetError(
            f"the checkpoint has {stored[1]} {stored[0]} and the state dict wants {wanted[1]} {wanted[0]}", key=key,
            hint="make the tensor as the checkpoint has it, then convert",
        )
    ]  # fmt: skip


def _whole(shape: tuple[int, ...], dtype: str) -> TensorStorageMetadata:
    """Return the metadata of a tensor that is one chunk."""
    size = torch.Size(shape)
    chunk = ChunkStorageMetadata(torch.Size((0,) * len(shape)), size)
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, dtype)), size, [chunk])


def _saved(value: Any) -> io.BytesIO:
    """Return a plain value as torch's planners expect it."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
