"""Change one thing in a copy of a checkpoint, and tell whether a folder stayed as it was."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def edit_pt(path: Path, change: Callable[[Any], object]) -> None:
    """Apply ``change`` to what a ``.pt`` file holds, and save it again."""
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def edit_shard(path: Path, change: Callable[[torch.Tensor], object] = lambda _: None, **metadata: str) -> None:
    """Apply ``change`` to a weight shard's tensor in place, and replace entries of its metadata."""
    with safe_open(path, framework="pt") as shard:
        tensor, stored = shard.get_tensor("data"), shard.metadata()
    change(tensor)
    save_file({"data": tensor}, path, metadata={**(stored or {}), **metadata})


def replace_shard(path: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace a weight shard's tensor; its metadata stays."""
    with safe_open(path, framework="pt") as shard:
        tensor, stored = shard.get_tensor("data"), shard.metadata()
    save_file({"data": change(tensor).contiguous()}, path, metadata=stored)


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    """Apply ``change`` to a JSON document."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def replace_text(path: Path, old: str, new: str) -> None:
    """Replace a piece of text that must be there."""
    text = path.read_text()
    assert old in text, f"{old!r} is not in {path}"
    path.write_text(text.replace(old, new))


def flip_bit(path: Path, record: str) -> None:
    """Flip the lowest bit of a zip record's first byte; its CRC-32 stays as it was."""
    with zipfile.ZipFile(path) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith(record))
    with path.open("r+b") as file:
        file.seek(info.header_offset + 26)
        name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
        position = info.header_offset + 30 + name + extra
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def cut_short(path: Path, num_bytes: int = 1) -> None:
    """Cut the last bytes of a file off."""
    os.truncate(path, path.stat().st_size - num_bytes)


def fingerprint(folder: Path) -> str:
    """Return a hash of every name, link and byte below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        if path.is_symlink():
            digest.update(b"link " + os.fsencode(path.readlink()))
        elif path.is_file():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
