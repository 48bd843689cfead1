"""Fixtures of the NeMo tests."""

from __future__ import annotations

import pytest
from nemo_checks import have_nemo, read_fixture
from nemo_rig import Rig


@pytest.fixture(scope="session")
def rig():
    if not have_nemo():
        pytest.skip("NeMo or megatron-core is not installed")
    started = Rig()
    yield started
    started.close()


@pytest.fixture(scope="session")
def fixture():
    return read_fixture
