"""The zip directory: an archive's members, checked against the headers that precede them."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from nemo_optim_bridge.errors import UnknownFormatError
from nemo_optim_bridge.formats.torch_zip.structs import (
    CENTRAL,
    CENTRAL_SIGNATURE,
    END,
    END64,
    END64_SIGNATURE,
    END_SIGNATURE,
    FOLDER,
    HAS_DESCRIPTOR,
    LOCAL,
    LOCAL_SIGNATURE,
    LOCATOR,
    LOCATOR_SIGNATURE,
    UINT16,
    UINT32,
    UTF8,
    is_tricky,
)
from nemo_optim_bridge.formats.torch_zip.window import Window

RESAVE: Final = "load it with torch.load where it comes from, and torch.save it again with a current torch (2.1+)"

_LEGACY_MAGIC: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def _directory_bounds(window: Window) -> tuple[int, int, int]:
    """Return the absolute start and stop of the central directory and its number of entries."""
    head = window.read(window.start, len(_LEGACY_MAGIC))
    if head[:4] != b"PK\x03\x04":
        if head == _LEGACY_MAGIC:
            raise UnknownFormatError(
                "file is in torch's old format from before 1.6, not a zip archive", path=window.path, hint=RESAVE
            )
        raise window.corrupt("does not start like a zip archive")
    end = window.stop - END.size
    signature, disk, first_disk, here, count, size, offset, comment = END.unpack(window.read_exactly(end, END.size))
    if signature != END_SIGNATURE or disk or first_disk or here != count or comment:
        raise window.corrupt("does not end with a zip directory: it is truncated or has something appended")
    locator = window.read(end - LOCATOR.size, LOCATOR.size) if end - LOCATOR.size > window.start else b""
    if len(locator) == LOCATOR.size and int.from_bytes(locator[:4], "little") == LOCATOR_SIGNATURE:
        _, disk, offset64, disks = LOCATOR.unpack(locator)
        stop = end - LOCATOR.size - END64.size
        if disk or disks != 1 or window.start + offset64 != stop:
            raise window.corrupt("has a zip64 locator that points elsewhere")
        signature, length, _, _, disk, first_disk, here, count64, size64, start64 = END64.unpack(
            window.read_exactly(stop, END64.size)
        )
        if signature != END64_SIGNATURE or length != END64.size - 12 or disk or first_disk or here != count64:
            raise window.corrupt("has a malformed zip64 end record")
        pairs = ((count, count64, UINT16), (size, size64, UINT32), (offset, start64, UINT32))
        if any(short != long and short != limit for short, long, limit in pairs):
            raise window.corrupt("has two end records that disagree")
        count, size, offset = count64, size64, start64
        end = stop
    start = window.start + offset
    if start + size != end or count * CENTRAL.size > size:
        raise window.corrupt("has a zip directory that does not lie where it should")
    return start, end, count


class Record(NamedTuple):
    """One member of the archive: ``nbytes`` bytes at absolute byte ``offset`` of the file, and the CRC-32 it claims."""

    name: str
    offset: int
    nbytes: int
    crc: int


#: What the central directory says of a member: absolute offset of its local header, size, CRC, flags, name.
_Entry = tuple[int, int, int, int, bytes]


def _read_entries(window: Window, start: int, stop: int, count: int) -> list[_Entry]:
    """Return the members in the order of their places in the file."""
    directory = window.read_exactly(start, stop - start)
    unpack, width = CENTRAL.unpack_from, CENTRAL.size
    base, limit = window.start, len(directory)
    position = 0
    entries: list[_Entry] = []
    add = entries.append
    for _ in range(count):
        if position + width > limit:
            raise window.corrupt("has fewer directory entries than it says")
        (
            signature, _, _, flags, method, _, _, crc, packed, nbytes, name_length, extra_length, comment_length,
            disk, _, attributes, header,
        ) = unpack(directory, position)  # fmt: skip
        name_stop = position + width + name_length
        if signature != CENTRAL_SIGNATURE or name_stop + extra_length > limit or disk or comment_length:
            raise window.corrupt("has a malformed directory entry")
        name = directory[position + width : name_stop]
        if method or flags & ~(HAS_DESCRIPTOR | UTF8):
            raise window.corrupt(f"has a compressed or encrypted member {_quote(name)}; torch stores them plain")
        if attributes & FOLDER:
            raise window.corrupt(f"has a member {_quote(name)} marked as a folder, which torch would not read")
        if nbytes == UINT32 or packed == UINT32 or header == UINT32:
            nbytes, packed, header = _zip64_sizes(
                directory[name_stop : name_stop + extra_length], nbytes, packed, header, window
            )
        if packed != nbytes:
            raise window.corrupt(f"has two sizes for member {_quote(name)}")
        add((base + header, nbytes, crc, flags, name))
        position = name_stop + extra_length
    if position != limit:
        raise window.corrupt("has more directory entries than it says")
    entries.sort()
    return entries


def _zip64_sizes(extra: bytes, nbytes: int, packed: int, header: int, window: Window) -> tuple[int, int, int]:
    """Return size, stored size and header offset, taking those that are all ones from the zip64 extra field."""
    while len(extra) >= 4:
        tag, length = struct.unpack_from("<HH", extra)
        field, extra = extra[4 : 4 + length], extra[4 + length :]
        if tag == 1:
            values = list(struct.unpack_from(f"<{len(field) // 8}Q", field))
            wanted = [value == UINT32 for value in (nbytes, packed, header)]
            if len(values) != sum(wanted):
                break
            taken = iter(values)
            resolved = [
                next(taken) if long else value for long, value in zip(wanted, (nbytes, packed, header), strict=True)
            ]
            return resolved[0], resolved[1], resolved[2]
    raise window.corrupt("lacks the zip64 sizes of a large member")


def read_records(window: Window) -> tuple[str, dict[str, Record]]:
    """Return the archive's folder name and its records by their name below it, checked against local headers."""
    start, stop, count = _directory_bounds(window)
    entries = _read_entries(window, start, stop, count)
    folder, names = _member_names([name for *_, name in entries], window)
    records: dict[str, Record] = {}
    position = window.start
    read, unpack, width = window.read, LOCAL.unpack, LOCAL.size
    for short, (header, nbytes, crc, flags, name) in zip(names, entries, strict=True):
        data = header + width + len(name)
        if header < position or header + width > start:
            raise window.corrupt(f"has members that overlap at {_quote(name)}")
        local = read(header, width + len(name))
        if len(local) < width + len(name):
            raise window.corrupt("is truncated within a record header")
        signature, _, local_flags, method, _, _, local_crc, packed, size, name_length, extra_length = unpack(
            local[:width]
        )
        if signature != LOCAL_SIGNATURE or local_flags != flags or method or local[width:] != name:
            raise window.corrupt(f"has a header that contradicts the directory for {_quote(name)}")
        data += extra_length
        position = data + nbytes
        if name_length != len(name) or position > start:
            raise window.corrupt(f"has a member {_quote(name)} that reaches past its place")
        if (size not in (0, UINT32) and (size, packed) != (nbytes, nbytes)) or (local_crc and local_crc != crc):
            raise window.corrupt(f"has a header that contradicts the directory for {_quote(name)}")
        records[short] = Record(short, data, nbytes, crc)
    if len(records) != count:
        raise window.corrupt("has two members of the same name")
    return folder, records


def _member_names(names: list[bytes], window: Window) -> tuple[str, list[str]]:
    """Return the one folder that all members lie in, and their names in it; refuse any that is no plain path."""
    folder = names[0].partition(b"/")[0] if names else b""
    prefix = folder + b"/"
    for name in names:
        if not name.startswith(prefix):
            raise window.corrupt(f"has a member {_quote(name)} outside of its folder {_quote(folder)}")
    try:
        text = b"\n".join([folder, *(name[len(prefix) :] for name in names)]).decode("utf-8")
    except UnicodeDecodeError:
        raise window.corrupt("has member names that are not UTF-8") from None
    listed = text.split("\n")
    if len(listed) != 1 + len(names):
        raise window.corrupt("has a member name with a line break")
    if names and is_tricky(text):
        raise window.corrupt("has a member name that is not a plain relative path")
    return listed[0], listed[1:]


def _quote(name: bytes) -> str:
    return repr(name[:80].decode("utf-8", "replace"))
