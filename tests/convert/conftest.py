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
    return unpack_megatron(tmp_path_factory.mktemp("megatron-fixtures"))


def unpack_megatron(folder: Path) -> Path:
    """Unpack all real Megatron checkpoints into a folder, as ``NAME/ckpt``; return it."""
    with tarfile.open(DATA / "megatron.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    for path in DATA.iterdir():
        if (path / "ckpt").is_dir():
            shutil.copytree(path / "ckpt", folder / path.name / "ckpt")
    return folder
