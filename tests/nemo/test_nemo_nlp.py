"""The whole nlp collection of NeMo 2.4.1, imported for real, in an environment of its own (NEMO_NLP_PYTHON)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("NEMO_NLP_PYTHON", "")
pytestmark = [
    pytest.mark.nemo,
    pytest.mark.skipif(not PYTHON, reason="NEMO_NLP_PYTHON names no interpreter with NeMo 2.4.1's nlp collection"),
]

DISTRIBUTED = {"plugin": "PipelineMixedPrecisionPlugin", "distributed": True, "remainders": True, "initialized": True}


def drive(when, name):
    driver = Path(__file__).parent / "nlp_driver.py"
    done = subprocess.run([PYTHON, str(driver), when, name], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("distributed_fused_adam_bridge", "DistributedFusedAdamBridge"),
        ("distributed_fused_adam", "MegatronDistributedFusedAdam"),
    ],
)
def test_both_names_take_the_distributed_path(name, optimizer):
    assert drive("early", name) == {**DISTRIBUTED, "optimizer": optimizer, "name": name, "saved name": name}


def test_other_optimizers_do_not():
    found = drive("early", "adamw")
    assert (found["plugin"], found["distributed"]) == ("MegatronHalfPrecisionPlugin", False)


def test_a_trainer_built_before_is_refused():
    found = drive("late", "distributed_fused_adam_bridge")
    assert found["error"].startswith("TargetError: the trainer was built before")
