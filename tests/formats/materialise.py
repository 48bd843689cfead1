"""Write laid-out parts to a file, as the executor will."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from nemo_optim_bridge.core.output import Literal, Part, Payload


def materialise(parts: Iterable[Part], path: Path, buffers: Mapping[int, bytes] | None = None) -> None:
    """Write ``parts`` to ``path``; payloads come from ``buffers``, and are a hole of zeros where it has none."""
    crcs: list[int] = []
    with path.open("wb") as file:
        for part in parts:
            if isinstance(part, Literal):
                file.write(part.data)
            elif isinstance(part, Payload):
                data = (buffers or {}).get(part.buffer)
                if data is None:
                    file.seek(part.nbytes, 1)
                    crcs.append(0)
                else:
                    assert len(data) == part.nbytes
                    file.write(data)
                    crcs.append(zlib.crc32(data))
            else:
                sealed = part.seal(crcs)
                assert len(sealed) == part.nbytes
                file.write(sealed)
