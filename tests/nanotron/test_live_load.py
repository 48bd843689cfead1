"""Checkpoints of any topology, loaded by the plugin into running optimizers of the real nanotron 0.4.

Set NANOTRON_PYTHON to an interpreter with nanotron 0.4 (CONTRIBUTING.md says how to make one); skipped otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.nanotron.fixtures import read_index

DRIVER = Path(__file__).with_name("live_load_driver.py")
ROOT = DRIVER.parents[2]
PYTHON = os.environ.get("NANOTRON_PYTHON", "")
FIXTURES = read_index()

pytestmark = [
    pytest.mark.nanotron,
    pytest.mark.skipif(not PYTHON, reason="NANOTRON_PYTHON names no interpreter with nanotron 0.4"),
]

# (tp, pp, dp, ZeRO stage) of the run, and what it resumes from
RUNS = [
    (
        (2, 2, 1, 0),
        [
            "nt04-llama_tied-z0-tp1-pp1-dp1-ep1",
            "nt04-llama_tied-z0-tp4-pp1-dp1-ep1",
            "nt04-llama_tied-z1-tp1-pp1-dp2-ep1",
            "nt04-llama_tied-z0-tp2-pp1-dp1-ep1-renamed",
            "head-llama_tied-z1-tp1-pp2-dp2-ep1",
            "head-llama_tied-z0-tp1-pp4-dp1-ep1",
        ],
    ),
    (
        (1, 2, 2, 1),
        [
            "nt04-llama_tied-z1-tp2-pp2-dp2-ep1",
            "nt04-llama_tied-z0-tp2-pp1-dp1-ep1",
            "head-llama_tied-z1-tp2-pp1-dp2-ep1",
        ],
    ),
    (
        (2, 1, 2, 1),
        [
            "nt04-llama_untied-z1-tp1-pp1-dp4-ep1",
            "nt04-llama_untied-z0-tp1-pp2-dp1-ep1",
            "nt04-llama_untied-z0-tp2-pp1-dp1-ep1-np2",
            "head-llama_untied-z1-tp1-pp1-dp3-ep1",
            "v0.1-llama_untied-z0-tp1-pp2-dp1-ep1",
            "v0.1-llama_untied-z1-tp2-pp1-dp2-ep1",
        ],
    ),
    ((1, 1, 2, 0), ["nt04-llama_untied-z1-tp2-pp1-dp2-ep1", "v0.1-llama_untied-z0-tp2-pp1-dp1-ep1"]),
    ((2, 1, 1, 0), ["nt04-llama_noacc-z0-tp1-pp1-dp1-ep1"]),
    ((1, 1, 2, 1), ["nt04-llama_noacc-z0-tp2-pp1-dp1-ep1"]),
]


def run_cases(topology: tuple[int, int, int, int], cases: list[dict[str, Any]], config: Path) -> list[list[Any]]:
    """Return, for each case, what every rank found; the uninterrupted run must have gone through the truth."""
    job = {**dict(zip(("tp", "pp", "dp", "zero"), topology, strict=True)), "cases": cases, "config": str(config)}
    done = subprocess.run(
        [PYTHON, str(DRIVER), json.dumps(job)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.stdout.startswith("{"), done.stderr[-3000:]
    ranks = json.loads(done.stdout).values()
    assert not [value for value in ranks if "error" in value], done.stdout[-3000:]
    assert all(value["uninterrupted"] == [] for value in ranks)
    return [[value["cases"][number] for value in ranks] for number in range(len(cases))]


def case(fixtures: Path, name: str, **more: Any) -> dict[str, Any]:
    truth = fixtures / "truth" / f"{FIXTURES[name].model}.safetensors"
    return {"source": str(fixtures / "checkpoints" / name), "truth": str(truth), **more}


@pytest.mark.parametrize(("topology", "sources"), RUNS)
def test_training_goes_on_as_if_never_interrupted(
    topology: tuple[int, int, int, int], sources: list[str], nanotron_fixtures: Path
) -> None:
    cases = [case(nanotron_fixtures, name) for name in sources]
    cases[0]["as_documented"] = True
    for name, ranks in zip(sources, run_cases(topology, cases, Path(cases[0]["source"])), strict=True):
        for found in ranks:
            assert found["wrong"] == [], name
            assert found["next_step"] == [], name
            assert found["tally"]["exp_avg"] > 5


def test_vocabulary_padding_of_another_topology(nanotron_fixtures: Path) -> None:
    padded, true = (f"nt04-llama_vpad_untied-z0-tp{tp}-pp1-dp1-ep1" for tp in (4, 1))
    for topology, model, source in (((1, 1, 1, 0), true, padded), ((4, 1, 1, 0), padded, true)):
        config = nanotron_fixtures / "checkpoints" / model
        [ranks] = run_cases(topology, [case(nanotron_fixtures, source, no_step=True)], config)
        assert all(found["wrong"] == [] for found in ranks)


def test_a_refused_load_changes_nothing_on_any_rank(nanotron_fixtures: Path, tmp_path: Path) -> None:
    name = "nt04-llama_tied-z0-tp1-pp1-dp1-ep1"
    good = case(nanotron_fixtures, name)
    damaged = tmp_path / "damaged"
    shutil.copytree(good["source"], damaged)
    [file] = (damaged / "optimizer").glob("*.pt")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    untied = str(nanotron_fixtures / "checkpoints" / "nt04-llama_untied-z0-tp2-pp1-dp1-ep1")
    noacc = str(nanotron_fixtures / "checkpoints" / "nt04-llama_noacc-z0-tp2-pp1-dp1-ep1")
    cases = [
        {**good, "fault": "read_states"},
        {**good, "fault": "read_masters"},
        {**good, "fault": "read_masters", "trained": True},
        {**good, "fault": "none", "source": str(damaged)},
        {**good, "fault": "none", "source": untied},
        {**good, "fault": "none", "source": noacc},
        {**good, "fault": "none", "source": str(tmp_path)},
    ]
    expected = [
        ("OSError: the disk is gone", "BridgeError: rank 1 failed: OSError: the disk is gone"),
        ("OSError: the disk is gone", "BridgeError: rank 1 failed: OSError: the disk is gone"),
        ("OSError: the disk is gone", "BridgeError: rank 1 failed: OSError: the disk is gone"),
        ("CorruptFileError: ", "CRC-32"),
        ("TargetError: ", "has optimizer state that the run has no use for [file"),
        ("TargetError: ", "accumulate_grad_in_fp32"),
        ("UnknownFormatError: ", "is not a nanotron checkpoint"),
    ]
    found = run_cases((1, 2, 1, 0), cases, Path(good["source"]))
    for ranks, (last, first) in zip(found, expected, strict=True):
        assert [rank["changed"] for rank in ranks] == [[], []]
        errors = [rank["error"] for rank in ranks]
        assert any(error.startswith(last) for error in errors), errors
        assert all(first in error or error.startswith(last) for error in errors), errors
