"""Documents are read as data, and every wrong field is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from nemo_optim_bridge.errors import ContradictionError, CorruptFileError, MissingSourceError
from nemo_optim_bridge.formats import documents
from nemo_optim_bridge.formats.documents import Document, read_json, read_yaml


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"[1]", "is not a mapping of names"),
        (b"null", "is not a mapping of names"),
        (b"\xff{}", "cannot be read as JSON"),
        (b'{"a":' * 100_000, "cannot be read as JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
    ],
)
def test_bad_json(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=reason) as caught:
        read_json(path)
    assert caught.value.path == str(path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "content",
    ["a: [", "- 1", "1: 2", "a: !!python/object/apply:os.system ['true']", "a: !!python/name:os.system ''", "{}: [",
     "a: *b", "a: " + "[" * 50_000, "? [a]\n: 1"],
)  # fmt: skip
def test_bad_yaml(content: str, tmp_path: Path) -> None:
    path = tmp_path / "document.yaml"
    path.write_text(content)
    with pytest.raises(CorruptFileError, match="YAML"):
        read_yaml(path)


def test_missing_and_unreadable(tmp_path: Path) -> None:
    with pytest.raises(MissingSourceError, match=r"absent.json is missing.*Copy it from the original run"):
        read_json(tmp_path / "absent.json")
    with pytest.raises(CorruptFileError, match="is not a regular file"):
        read_json(tmp_path)


def test_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "document.json"
    path.write_text("{}")
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 2)
    assert dict(read_json(path)) == {}
    os.truncate(path, 3)
    with pytest.raises(CorruptFileError, match="larger than"):
        read_json(path)


@pytest.mark.parametrize(("value", "expected"), [(3, 3), ("3", 3), ("0012", 12), (1 << 59, 1 << 59), (1, 1)])
def test_integers(value: Any, expected: int) -> None:
    assert Document(Path("x"), {"n": value}, (0, 0, 0)).integer("n") == expected


@pytest.mark.parametrize("value", [None, 0, -1, True, 1.0, "1.0", "-1", "", "\u0661", "9" * 20, 1 << 60, [1], {}])
def test_no_integers(value: Any) -> None:
    document = Document(Path("x.json"), {"outer": {"n": value}}, (0, 0, 0)).section("outer")
    with pytest.raises(ContradictionError, match=r"outer\.n is .* not an integer from 1 up.*x\.json"):
        document.integer("n")


def test_defaults_and_sections() -> None:
    document = Document(Path("x.json"), {"zero": 0, "none": None, "list": [1], "odd": {1: 2}}, (0, 0, 0))
    assert document.integer("absent", 7) == 7
    assert document.integer("zero", minimum=0) == 0
    assert dict(document.section("none")) == dict(document.section("absent")) == {}
    for key in ("list", "odd", "zero"):
        with pytest.raises(ContradictionError, match=f"{key} is not a mapping of names"):
            document.section(key)
