"""The structures of a zip archive, little-endian, with zip64."""

from __future__ import annotations

import re
import struct
from typing import Final

LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
CENTRAL: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
DESCRIPTOR: Final = struct.Struct("<IIII")
DESCRIPTOR64: Final = struct.Struct("<IIQQ")
END: Final = struct.Struct("<IHHHHIIH")
END64: Final = struct.Struct("<IQHHIIQQQQ")
LOCATOR: Final = struct.Struct("<IIQI")
LOCAL_SIGNATURE, CENTRAL_SIGNATURE, END_SIGNATURE = 0x04034B50, 0x02014B50, 0x06054B50
END64_SIGNATURE, LOCATOR_SIGNATURE, DESCRIPTOR_SIGNATURE = 0x06064B50, 0x07064B50, 0x08074B50
UINT16, UINT32 = 0xFFFF, 0xFFFFFFFF
HAS_DESCRIPTOR, UTF8 = 0x8, 0x800
FOLDER = 0x10  # among the external attributes
_CONTROL: Final = re.compile(r"[\\:\x00-\x09\x0b-\x1f\x7f]")


def is_tricky(names: str) -> bool:
    """Tell whether any of some member names, one a line, could mean another place to some unpacker."""
    parts = f"/{names}/".replace("\n", "/")
    return any(trick in parts for trick in ("//", "/./", "/../")) or _CONTROL.search(names) is not None
