"""Configuration files are believed only where they agree, and rewritten only where the target differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_optim_bridge.errors import ContradictionError, TargetError, UnknownFormatError
from nemo_optim_bridge.formats.nanotron.config import Documents, ModelFacts, target_documents
from nemo_optim_bridge.formats.nanotron.dialects import DIALECTS, find_dialect
from nemo_optim_bridge.formats.nanotron.reader import read_checkpoint
from nemo_optim_bridge.formats.topology import Topology
from tests.nanotron.fixtures import SAMPLE, Fixture, read_index

FIXTURES = read_index()
LLAMA = ModelFacts("llama", 4, 32, 64, 8, 4, 128, None)


@pytest.mark.parametrize("fixture", FIXTURES.values(), ids=FIXTURES)
def test_what_real_checkpoints_are(fixture: Fixture, nanotron_fixtures: Path) -> None:
    root = nanotron_fixtures / "checkpoints" / fixture.name
    documents = Documents.read(root)
    assert documents.topology() == Topology(fixture.tp, fixture.pp, fixture.dp, fixture.ep)
    assert documents.zero_stage() == fixture.zero
    facts = documents.facts()
    family = "qwen2" if "qwen" in fixture.model else "llamoe" if "moe" in fixture.model else "llama"
    assert (facts.family, facts.num_experts or 0) == (family, fixture.num_experts)
    assert (facts.hidden_size, facts.num_heads, facts.num_kv_heads) == (32, 8, 4)
    checkpoint = read_checkpoint(root)
    assert checkpoint.dialect.name == fixture.dialect
    assert checkpoint.tied == fixture.is_tied
    assert checkpoint.has_masters == ("noacc" not in fixture.model)


def test_layer_cost() -> None:
    assert LLAMA.layer_cost == 4 * 8 * 4 * 32 + 3 * 64 * 32


@pytest.mark.parametrize(("tp", "is_valid"), [(1, True), (2, True), (4, True), (3, False), (8, False), (16, False)])
def test_tensor_parallel_sizes(tp: int, is_valid: bool) -> None:
    problem = LLAMA.problem_at(tp)
    assert (problem is None) == is_valid
    if problem is not None:
        assert isinstance(problem, TargetError)
        assert str(problem).endswith("Choose tp from 1, 2, 4")


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_the_same_documents_for_the_same_target(dialect: object, nanotron_fixtures: Path) -> None:
    """A checkpoint of each dialect keeps its documents when nothing changes."""
    fixture = next(f for f in FIXTURES.values() if f.dialect == dialect.name)  # type: ignore[attr-defined]
    root = nanotron_fixtures / "checkpoints" / fixture.name
    source = read_checkpoint(root)
    contents, remarks = target_documents(
        source.documents, source.dialect, source.topology, source.zero_stage, source.facts.vocab_size
    )
    for name in ("checkpoint_metadata.json", "model_config.json"):
        assert json.loads(contents[name]) == json.loads((root / name).read_text())
    assert yaml.safe_load(contents["config.yaml"]) == yaml.safe_load((root / "config.yaml").read_text())
    assert remarks == []


def sample_with(tmp_path: Path, **changes: Callable[[dict[str, Any]], object]) -> Documents:
    """Return the sample's documents with changes: to ``metadata``, ``config`` or ``optimizer``."""
    (tmp_path / "optimizer").mkdir()
    for key, name in (
        ("metadata", "checkpoint_metadata.json"), ("model", "model_config.json"), ("config", "config.yaml"),
        ("optimizer", "optimizer/optimizer_config.json"),
    ):  # fmt: skip
        content = yaml.safe_load((SAMPLE / name).read_text())
        changes.get(key, lambda _: None)(content)
        (tmp_path / name).write_text(json.dumps(content))
    return Documents.read(tmp_path)


@pytest.mark.parametrize(
    ("document", "change", "error", "reason"),
    [
        ("metadata", lambda d: d.update(tp=4), ContradictionError, "tp is 4 here and 2 in"),
        ("metadata", lambda d: d.update(dp=2), ContradictionError, "dp is 2 here and 1 in"),
        ("config", lambda d: d["parallelism"].update(pp=2), ContradictionError, "pp is 2 here and 1 in"),
        ("config", lambda d: d["parallelism"].update(expert_parallel_size=2), ContradictionError, "is 2 here and 1 in"),
        ("config", lambda d: d["parallelism"].update(tp=True), ContradictionError, "parallelism.tp is True"),
        ("config", lambda d: d["parallelism"].update(context_parallel_size=2), UnknownFormatError, "parallel size 2"),
        ("optimizer", lambda d: d.pop("parallelism"), ContradictionError, "parallelism.tp_size is None"),
    ],
)
def test_contradictions(
    document: str, change: Callable[[Any], object], error: type[Exception], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason):
        sample_with(tmp_path, **{document: change}).topology()


def test_documents_that_say_less_are_believed(tmp_path: Path) -> None:
    documents = sample_with(
        tmp_path,
        config=lambda d: (d.pop("parallelism"), d["optimizer"].pop("zero_stage")),
        metadata=lambda d: d.pop("dp"),
    )
    assert documents.topology() == Topology(tp=2)
    assert documents.zero_stage() == 0
    contents, _ = target_documents(documents, DIALECTS["0.4"], Topology(tp=4, dp=2), 1, 128)
    config = yaml.safe_load(contents["config.yaml"])
    assert config["parallelism"] == {"tp": 4, "pp": 1, "dp": 2, "expert_parallel_size": 1}
    assert config["optimizer"]["zero_stage"] == 1


def test_samples_of_several_stages_are_kept(tmp_path: Path, nanotron_fixtures: Path) -> None:
    root = nanotron_fixtures / "checkpoints" / "head-llama_tied-z0-tp2-pp1-dp1-ep1"
    source = read_checkpoint(root).documents
    stages = source.metadata["metas"]["data_stages"]
    for name in ("head", "moe"):
        contents, _ = target_documents(source, DIALECTS[name], Topology(), 0, 128)
        metadata = json.loads(contents["checkpoint_metadata.json"])
        assert metadata["version"] == DIALECTS[name].version
        assert [s["consumed_train_samples"] for s in metadata["metas"]["data_stages"]] == [
            s["consumed_train_samples"] for s in stages
        ]
        assert ("sequence_length" in metadata["metas"]["data_stages"][0]) == (name == "head")
        assert ("cp" in metadata) == (name == "head")
    assert "sequence_length" in stages[0]  # the source's own documents stay as they are


def test_dialects_are_found_by_name() -> None:
    assert list(DIALECTS) == ["v0.1", "0.4", "moe24", "moe", "head"]
    assert all(find_dialect(name).name == name for name in DIALECTS)
    for name in ("", "0.5", "HEAD", "nt04"):
        with pytest.raises(TargetError, match=r"unknown dialect .* Choose one of v0.1, 0.4, moe24, moe, head"):
            find_dialect(name)
