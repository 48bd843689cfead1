"""What the tests of this folder share: copies of real checkpoints to damage, and the command line on them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.nanotron.pair_table import run_cli


@pytest.fixture
def real(nanotron_fixtures: Path) -> Callable[[str], Path]:
    """Return the folder of a real checkpoint; read only."""
    return lambda name: nanotron_fixtures / "checkpoints" / name


@pytest.fixture
def copy_of(real: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return a copy of a real checkpoint that a test may damage."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(real(name), tmp_path / "source" / name))

    return copy


@pytest.fixture
def reshard(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Re-shard to ``out`` below ``tmp_path`` and return what ``--json`` says; fails unless the exit code is 0."""

    def run(source: Path, options: str = "", out: str = "out") -> dict[str, Any]:
        code, printed = run_cli("reshard", source, tmp_path / out, *options.split(), "--no-fsync", "--json")
        assert code == 0, printed
        summary = json.loads(printed)
        assert isinstance(summary, dict)
        return summary

    return run


@pytest.fixture
def refuse(tmp_path: Path) -> Callable[..., str]:
    """Re-shard and return the one error; fails unless it is refused with exit code 2 and nothing is left behind."""

    def run(source: Path, options: str = "", kind: str | None = None) -> str:
        out = tmp_path / "refused" / "out"
        out.parent.mkdir(exist_ok=True)
        code, printed = run_cli("reshard", source, out, *options.split(), "--no-fsync")
        assert code == 2, printed
        assert printed.startswith("error: ")
        assert "Traceback" not in printed
        assert list(out.parent.iterdir()) == []
        if kind is not None:
            code, printed_json = run_cli("reshard", source, out, *options.split(), "--no-fsync", "--json")
            answer = json.loads(printed_json[printed_json.index("\n{") :])
            assert (code, answer["error"]) == (2, kind), printed_json
            assert printed == f"error: {answer['message']}\n"
        return printed.removeprefix("error: ")

    return run
