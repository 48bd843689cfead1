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
#: Member names that could mean another place to some unpacker; one name a line.
TRICK: Final = re.compile(r"^/|(?:^|/)\.{0,2}(?:/|$)|[\\:\x00-\x09\x0b-\x1f\x7f]|/$", re.MULTILINE)
