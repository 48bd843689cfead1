"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

from tests.nanotron.fixtures import unpack

hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)  # no timing, no luck
hypothesis.settings.load_profile("steady")


@pytest.fixture(scope="session")
def nanotron_fixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of real nanotron checkpoints: ``checkpoints/NAME/``, ``truth/MODEL.safetensors``, ``INDEX.json``.

    Unpacked once a session, also under pytest-xdist. Read only: tests that damage a checkpoint copy it first.
    """
    base = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        base = base.parent
    return unpack(base / "nanotron-fixtures")
