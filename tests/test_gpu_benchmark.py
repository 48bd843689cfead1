"""The GPU benchmark runs from start to end, on a CPU, where its numbers mean nothing; it is unrun on a GPU so far."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def run(*options: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options],
        capture_output=True, text=True, timeout=240, check=False, cwd=ROOT,
    )  # fmt: skip


def test_all_variants_load_the_same_bits(tmp_path: Path) -> None:
    ran = run("--dir", tmp_path, "--device", "cpu", "--tiny", "--rounds", "1", "--json", tmp_path / "result")
    assert ran.returncode == 0, ran.stderr
    records = [json.loads(line) for line in (tmp_path / "result").read_text().splitlines()]
    assert [record["variant"] for record in records] == ["floor", "ours", "torch-device", "torch-cpu"]
    assert len({record["runs"][0]["digest"] for record in records[1:]}) == 1
    assert "not a measurement" in ran.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["result"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so() -> None:
    ran = run("--dir", "nowhere")
    assert ran.returncode == 2
    assert "no CUDA device" in ran.stderr
    assert ran.stdout == ""
