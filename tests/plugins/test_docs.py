"""The examples of the documentation run as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def code_of(page: str) -> str:
    """Return the Python blocks of a page, one after the other."""
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL))


def test_dcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    exec(compile(code_of("dcp.md"), "dcp.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == ["tensor(3.) 8192", "(0.9, 0.95)", "104 577472"]
