"""Write a laid-out file, as the executor will."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nemo_optim_bridge.core.output import Layout


def materialise(layout: Layout, path: Path, payloads: Sequence[bytes] | None = None) -> None:
    """Write a file; without ``payloads`` there are holes of zeros in their place, and checksums are not right."""
    crcs = np.array([zlib.crc32(data) for data in payloads or ()] or [0] * len(layout.sizes), np.uint32)
    text = layout.sealed(0, layout.text_bytes, crcs)
    at = 0
    with path.open("wb") as file:
        for number, (mark, size) in enumerate(zip(layout.marks.tolist(), layout.sizes.tolist(), strict=True)):
            file.write(text[at:mark])
            at = mark
            if payloads is None:
                file.seek(size, 1)
            else:
                assert len(payloads[number]) == size
                file.write(payloads[number])
        file.write(text[at:])
