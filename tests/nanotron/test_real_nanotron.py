"""The real nanotron 0.4 loads what was written, at topologies that no fixture has.

Set NANOTRON_PYTHON to an interpreter with nanotron 0.4 (CONTRIBUTING.md says how to make one); skipped otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.nanotron.fixtures import SAMPLE, read_index
from tests.nanotron.pair_table import run_cli

DRIVER = Path(__file__).with_name("real_nanotron_driver.py")
PYTHON = os.environ.get("NANOTRON_PYTHON", "")
FIXTURES = read_index()

pytestmark = [
    pytest.mark.nanotron,
    pytest.mark.skipif(not PYTHON, reason="NANOTRON_PYTHON names no interpreter with nanotron 0.4"),
]

RESHARDS = [
    ("nt04-llama_tied-z0-tp2-pp1-dp1-ep1", "--tp 1 --pp 2 --dp 2 --zero 1"),
    ("nt04-llama_tied-z1-tp2-pp2-dp2-ep1", "--tp 4 --pp 1 --dp 1 --zero 0"),
    ("nt04-llama_tied-z0-tp4-pp1-dp1-ep1", "--tp 1 --pp 4 --dp 1 --zero 0"),
    ("nt04-llama_untied-z1-tp1-pp1-dp4-ep1", "--tp 2 --pp 2 --dp 1 --zero 0"),
    ("nt04-llama_untied-z0-tp2-pp1-dp2-ep1", "--tp 1 --pp 3 --dp 1 --zero 1"),
    ("nt04-llama_noacc-z0-tp1-pp1-dp1-ep1", "--tp 2 --pp 1 --dp 2 --zero 0"),
    ("nt04-llama_vpad_untied-z0-tp1-pp1-dp1-ep1", "--tp 4 --pp 1 --dp 1 --zero 0 --vocab-size 126"),
    ("head-llama_tied-z1-tp1-pp2-dp2-ep1", "--tp 2 --pp 1 --dp 3 --zero 1 --dialect 0.4"),
    ("head-llama_tied-z0-tp2-pp2-dp1-ep1", "--tp 1 --pp 1 --dp 1 --zero 0 --dialect 0.4"),
    ("head-llama_untied-z0-tp4-pp1-dp1-ep1", "--tp 1 --pp 3 --dp 1 --zero 0 --dialect 0.4"),
    ("v0.1-llama_untied-z1-tp2-pp1-dp2-ep1", "--tp 1 --pp 4 --dp 1 --zero 0 --dialect 0.4"),
    ("v0.1-llama_untied-z0-tp1-pp2-dp1-ep1", "--tp 2 --pp 1 --dp 2 --zero 1 --dialect 0.4"),
]


def ask_nanotron(checkpoint: Path, truth: Path, options: str) -> tuple[int, Any]:
    """Run the driver at the topology that ``options`` name; return its exit code and what it printed."""
    words = options.split()
    values = dict(zip(words[::2], words[1::2], strict=True))
    topology = [word for name in ("--tp", "--pp", "--dp", "--zero") for word in (name, values[name])]
    command = [PYTHON, str(DRIVER), str(checkpoint), str(truth), *topology]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("{"), done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize(("source", "options"), RESHARDS)
def test_nanotron_loads_it_exactly(source: str, options: str, nanotron_fixtures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, printed = run_cli("reshard", nanotron_fixtures / "checkpoints" / source, out, *options.split(), "--no-fsync")
    assert code == 0, printed
    truth = nanotron_fixtures / "truth" / f"{FIXTURES[source].model}.safetensors"
    code, answer = ask_nanotron(out, truth, options)
    assert code == 0, answer
    assert answer["step"] == [3]
    assert answer["epoch"] == [3]


def test_the_driver_sees_a_difference(nanotron_fixtures: Path) -> None:
    truth = nanotron_fixtures / "truth" / "llama_untied.safetensors"
    code, answer = ask_nanotron(SAMPLE, truth, "--tp 2 --pp 1 --dp 1 --zero 0")
    assert code == 1
    name = "model.token_position_embeddings.pp_block.token_embedding.weight"
    assert answer["wrong"]["0"] == [f"{name}|{state}" for state in ("weight", "exp_avg", "exp_avg_sq", "fp32")]


def test_the_driver_sees_that_nanotron_raised(nanotron_fixtures: Path) -> None:
    truth = nanotron_fixtures / "truth" / "llama_tied.safetensors"
    code, answer = ask_nanotron(SAMPLE, truth, "--tp 1 --pp 1 --dp 1 --zero 0")
    assert code == 2
    assert answer["errors"]["0"]["error"].startswith("KeyError")
