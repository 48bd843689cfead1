"""What is read of nanotron's configuration files, and how they are rewritten for a target."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_optim_bridge.errors import BridgeError, ContradictionError, TargetError, UnknownFormatError
from nemo_optim_bridge.formats.documents import Document, read_json, read_yaml, shown
from nemo_optim_bridge.formats.nanotron.dialects import Dialect
from nemo_optim_bridge.formats.topology import Topology

#: Flag in model_config.json -> family; their decoder layers cost the same (see pipeline.split_by_cost).
_FAMILIES = {"is_llama_config": "llama", "is_qwen2_config": "qwen2", "is_llamoe_config": "llamoe"}


_LARGEST_TP = 1024


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a model that decide how it may be cut. ``vocab_size`` is the stored one, padding included."""

    family: str | None
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    num_experts: int | None

    @property
    def layer_cost(self) -> int:
        """Nanotron's compute cost of a decoder layer."""
        head_size = self.hidden_size // self.num_heads
        return 4 * self.num_heads * head_size * self.hidden_size + 3 * self.intermediate_size * self.hidden_size

    def problem_at(self, tp: int) -> BridgeError | None:
        """Return why the model cannot be cut into ``tp`` parts, or None."""
        sizes = {
            "attention heads": self.num_heads,
            "key/value heads": self.num_kv_heads,
            "rows of the MLP (intermediate size)": self.intermediate_size,
        }
        uneven = [f"{size} {what}" for what, size in sizes.items() if size % tp]
        if not uneven:
            return None
        most = min(self.num_heads, _LARGEST_TP)
        valid = [n for n in range(1, most + 1) if all(size % n == 0 for size in sizes.values())]
        return TargetError(
            f"tp {tp} does not divide the model's {', '.join(uneven)}",
            hint=f"choose tp from {', '.join(map(str, valid))}",
        )


@dataclass(frozen=True, slots=True)
class Documents:
    """The four configuration files of a checkpoint."""

    metadata: Document
    model: Document
    config: Document
    optimizer: Document

    @classmethod
    def read(cls, root: Path) -> Documents:
        """Read them all; raises MissingSourceError or CorruptFileError."""
        return cls(
            read_json(root / "checkpoint_metadata.json"),
            read_json(root / "model_config.json"),
            read_yaml(root / "config.yaml"),
            read_json(root / "optimizer" / "optimizer_config.json"),
        )

    def all(self) -> tuple[Document, ...]:
        """Return the four documents."""
        return self.metadata, self.model, self.config, self.optimizer

    def facts(self) -> ModelFacts:
        """Return the model's sizes."""
        model = self.model
        heads = model.integer("num_attention_heads")
        return ModelFacts(
            family=next((name for flag, name in _FAMILIES.items() if model.get(flag) is True), None),
            num_layers=model.integer("num_hidden_layers"),
            hidden_size=model.integer("hidden_size"),
            intermediate_size=model.integer("intermediate_size"),
            num_heads=heads,
            num_kv_heads=model.integer("num_key_value_heads", heads),
            vocab_size=model.integer("vocab_size"),
            num_experts=model.integer("moe_num_experts") if "moe_num_experts" in model else None,
        )

    def topology(self) -> Topology:
        """Return the topology that the optimizer was saved at; raises when the files contradict each other."""
        stated = self.optimizer.section("parallelism")
        topology = Topology(
            tp=stated.integer("tp_size"),
            pp=stated.integer("pp_size"),
            dp=stated.integer("dp_size"),
            ep=stated.integer("expert_parallel_size", 1),
        )
        parallelism = self.config.section("parallelism")
        for document, names in (
            (self.metadata, {"tp": "tp", "dp": "dp"}),
            (parallelism, {"tp": "tp", "pp": "pp", "dp": "dp", "ep": "expert_parallel_size"}),
        ):
            for axis, name in names.items():
                ours = getattr(topology, axis)
                if name in document and document.integer(name) != ours:
                    raise ContradictionError(
                        f"{name} is {document[name]} here and {ours} in {self.optimizer.path.name}",
                        path=document.path,
                        hint="restore the configuration files of the run that saved the optimizer",
                    )
        cp = max(self.metadata.integer("cp", 1), parallelism.integer("context_parallel_size", 1))
        if cp != 1:
            raise UnknownFormatError(
                f"saved with context parallel size {cp}",
                path=self.config.path,
                hint="context parallel is not supported: resume once with context_parallel_size 1 and save",
            )
        return topology

    def zero_stage(self) -> int:
        """Return 0 or 1; raises when the files contradict each other or name another stage."""
        stage = 1 if self.optimizer.get("type") == "ZeroDistributedOptimizer" else 0
        section = self.config.section("optimizer")
        stated = section.integer("zero_stage", stage, minimum=0)
        if stated != stage:
            raise ContradictionError(
                f"zero_stage is {stated} here, but the optimizer was saved as {shown(self.optimizer.get('type'))}",
                path=self.config.path,
                hint="restore the configuration files of the run that saved the optimizer",
            )
        return stage

    def check_samples(self) -> None:
        """Raise ContradictionError when the samples of the data stages do not add up: nanotron would not start."""
        metas = self.metadata.section("metas")
        stages = metas.get("data_stages")
        if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
            return
        parts = [stage.get("consumed_train_samples") for stage in stages]
        total = metas.get("consumed_train_samples")
        if all(isinstance(part, int) for part in (total, *parts)) and sum(parts) != total:
            raise ContradictionError(
                f"metas.consumed_train_samples is {total}, but its data stages add up to {sum(parts)}",
                path=self.metadata.path,
            )

    @property
    def vocab_multiple(self) -> int:
        """``make_vocab_size_divisible_by``: nanotron pads the vocabulary to a multiple of this times tp."""
        return self.config.section("model").integer("make_vocab_size_divisible_by", 1)


def target_documents(
    source: Documents, dialect: Dialect, topology: Topology, zero_stage: int, vocab_size: int
) -> tuple[Mapping[str, bytes], list[str]]:
    """Return the contents of the configuration files for a target, by relative path, and remarks for the user.

    The schema of ``config.yaml`` and ``model_config.json`` stays the source's.
    """
    remarks: list[str] = []
    model = {**source.model.data, "vocab_size": vocab_size}
    config = copy.deepcopy(dict(source.config.data))
    parallelism = config["parallelism"] = dict(source.config.section("parallelism"))
    parallelism.update(tp=topology.tp, pp=topology.pp, dp=topology.dp)
    if dialect.names_experts:
        parallelism["expert_parallel_size"] = topology.ep
    else:
        parallelism.pop("expert_parallel_size", None)
    config["optimizer"] = {**source.config.section("optimizer"), "zero_stage": zero_stage}
    inner = source.config.section("model").get("model_config")
    if isinstance(inner, dict):
        config["model"] = {**source.config.section("model"), "model_config": {**inner, "vocab_size": vocab_size}}
    metadata = _metadata(source, dialect, topology, remarks)
    return {
        "checkpoint_metadata.json": json.dumps(metadata, indent=2, sort_keys=True).encode(),
        "model_config.json": json.dumps(model).encode(),
        "config.yaml": yaml.safe_dump(config).encode(),
    }, remarks


def _metadata(source: Documents, dialect: Dialect, topology: Topology, remarks: list[str]) -> dict[str, Any]:
    """Return checkpoint_metadata.json for the target's dialect; consumed samples and steps stay."""
    metas = copy.deepcopy(dict(source.metadata.section("metas").data))
    stages = metas.get("data_stages", [])
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise ContradictionError("metas.data_stages is not a list of stages", path=source.metadata.path)
    metadata = {
        **source.metadata.data,
        "tp": topology.tp,
        "dp": topology.dp,
        "version": dialect.version,
        "metas": metas,
    }
    if dialect.data_stages and "data_stages" not in metas:
        samples = source.metadata.section("metas").integer("consumed_train_samples", 0, minimum=0)
        stage: dict[str, Any] = {
            "name": _stage_name(source),
            "start_training_step": 1,
            "consumed_train_samples": samples,
        }
        remarks.append(
            f"checkpoint_metadata.json: {dialect.name} keeps samples per data stage; all {samples} were filed "
            f"under one, {stage['name']!r}"
        )
        metas.update(last_stage_idx=0, data_stages=[stage])
    if not dialect.data_stages:
        for name in ("data_stages", "last_stage_idx", "consumed_tokens_total"):
            if metas.pop(name, None) is not None:
                remarks.append(f"checkpoint_metadata.json: {dialect.name} has no {name}; dropped")
    if dialect.name == "head":
        length = source.config.section("tokens").integer("sequence_length", 1)
        for stage in metas["data_stages"]:
            stage.setdefault("sequence_length", length)
            stage.setdefault("consumed_tokens_per_dataset_folder", {})
        if "consumed_tokens_total" not in metas:
            samples = source.metadata.section("metas").integer("consumed_train_samples", 0, minimum=0)
            metas["consumed_tokens_total"] = samples * length
        metadata["cp"] = 1
        metadata.setdefault("custom_metas", None)
    elif dialect.name == "moe":
        for stage in metas["data_stages"]:
            stage.pop("sequence_length", None)
            stage.pop("consumed_tokens_per_dataset_folder", None)
        metas.pop("consumed_tokens_total", None)
        metadata.pop("cp", None)
        metadata.setdefault("custom_metas", None)
    else:
        metadata.pop("cp", None)
        metadata.pop("custom_metas", None)
    return metadata


def _stage_name(source: Documents) -> str:
    """Return the only data stage's name from the run's configuration, or nanotron's default."""
    stages = source.config.get("data_stages")
    if isinstance(stages, list) and len(stages) == 1 and isinstance(stages[0], dict):
        return str(stages[0].get("name", "Stable Training Stage"))
    return "Stable Training Stage"
