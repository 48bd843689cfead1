"""Fixtures of the conversion tests."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest

DATA = Path(__file__).parent.parent / "data" / "nemo"


@pytest.fixture(scope="session")
def megatron_fixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of real Megatron checkpoints, ``NAME/ckpt``; tests that damage one copy it first."""
    folder = tmp_path_factory.mktemp("megatron-fixtures")
    with tarfile.open(DATA / "megatron.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    for path in DATA.iterdir():
        if (path / "ckpt").is_dir():
            shutil.copytree(path / "ckpt", folder / path.name / "ckpt")
    return folder
