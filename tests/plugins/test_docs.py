"""The examples of the documentation run as written: Python blocks in order, then shell blocks, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nemo_optim_bridge.plugins import nanotron as plugin

ROOT = Path(__file__).parents[2]


def blocks_of(page: str, language: str) -> list[str]:
    """Return the blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def run_python(page: str) -> dict[str, Any]:
    """Run the Python blocks of a page, one after the other; return their names."""
    scope: dict[str, Any] = {}
    exec(compile("\n".join(blocks_of(page, "python")), page, "exec"), scope)
    return scope


def run_shell(page: str, folder: Path) -> str:
    """Run the shell blocks of a page in a folder, with this interpreter's package; return what they print."""
    programs = folder / "programs"
    programs.mkdir()
    modules = {"nemo-optim-bridge": "nemo_optim_bridge", "torchrun": "torch.distributed.run", "python": ""}
    for name, module in modules.items():
        option = f"-m {module}" if module else ""
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {option} "$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-e", "-c", "\n".join(blocks_of(page, "sh"))],
        cwd=folder, env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, where the paths of the documentation exist."""
    for name in ("tests", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_dcp(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_python("dcp.md")
    assert capsys.readouterr().out.splitlines() == ["tensor(3.) 8192", "(0.9, 0.95)", "104 577472"]
    run_shell("dcp.md", folder)
    made = [folder / name for name in ("exported", "exported-by-workers", "exported-by-ranks")]
    for file in ("__0_0.distcp", ".metadata"):
        assert len({(path / file).read_bytes() for path in made}) == 1


def test_python(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scope = run_python("python.md")
    assert capsys.readouterr().out.splitlines() == ["torch.Size([64, 32]) torch.float32"]
    assert torch.equal(scope["mine"], scope["tensor"][32:])


def test_scaling(folder: Path) -> None:
    assert "| tp 64 pp 16 -> tp 32 pp 32, own | 12,500 | " in run_shell("scaling.md", folder)


def test_nanotron_plugin_is_installed_before_the_trainer_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """On stand-ins for nanotron's modules; the other example runs in the real one: ``tests/nanotron``."""

    def load_optimizer() -> None: ...

    def load_lr_scheduler() -> None: ...

    class DistributedTrainer:
        def __init__(self, config: str) -> None:
            self.config, self.loader = config, sys.modules["nanotron.trainer"].load_optimizer

    for name in ("nanotron", "nanotron.serialize", "nanotron.serialize.optimizer", "nanotron.trainer"):
        module = ModuleType(name)
        module.__dict__.update(load_optimizer=load_optimizer, load_lr_scheduler=load_lr_scheduler)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["nanotron.trainer"].__dict__["DistributedTrainer"] = DistributedTrainer
    scope: dict[str, Any] = {}
    try:
        exec(compile(blocks_of("nanotron-plugin.md", "python")[0], "nanotron-plugin.md", "exec"), scope)
        assert scope["trainer"].loader.func is plugin.load_optimizer
    finally:
        plugin.uninstall()
