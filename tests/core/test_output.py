"""The text of a layout, however it is kept."""

from __future__ import annotations

import random

import numpy as np
import pytest

from nemo_optim_bridge.core import output
from nemo_optim_bridge.core.output import Layout

BLOCK = 16


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_BLOCK_BYTES", BLOCK)


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 7])
@pytest.mark.parametrize("repeats", [False, True])
def test_any_part_of_the_text_is_what_was_laid_out(nbytes: int, repeats: bool) -> None:
    text = b"x" * nbytes if repeats else random.Random(nbytes).randbytes(nbytes)
    layout = Layout.of(text)
    assert layout.text == text and layout.text_bytes == layout.nbytes == nbytes
    for start in range(nbytes + 1):
        for stop in range(start, nbytes + 1):
            assert bytes(layout.sealed(start, stop, np.zeros(0, np.uint32))) == text[start:stop]


def test_checksums_go_into_every_part() -> None:
    text = bytearray(random.Random(0).randbytes(100))
    places = np.array([[3, 30, 62], [70, 80, 96]])
    layout = Layout.around(text, np.array([2, 29, 61]), np.array([8, 8, 8]), places)
    crcs = np.array([0x01020304, 0xFFFFFFFF, 0x80000000], np.uint32)
    expected = bytearray(text)
    for row in places:
        for place, crc in zip(row.tolist(), crcs.tolist(), strict=True):
            expected[place : place + 4] = crc.to_bytes(4, "little")
    cuts = [0, 2, 29, 61, 100]
    for start in cuts:
        for stop in (cut for cut in cuts if cut >= start):
            assert bytes(layout.sealed(start, stop, crcs)) == expected[start:stop]


def test_later_changes_of_the_text_do_not_count() -> None:
    text = bytearray(b"a" * 40)
    layout = Layout.around(text, np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 0), np.int64))
    text[:] = b"b" * 40
    assert layout.text == b"a" * 40
