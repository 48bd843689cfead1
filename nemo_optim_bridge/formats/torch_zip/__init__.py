"""torch's ``.pt`` container without torch: index a file from its directory and pickle, lay one out for writing.

A ``.pt`` file is a zip archive of stored members under one folder: ``data.pkl``, the tree; ``data/0``, ``data/1``, ...
the storages, little-endian, aligned to 64 bytes; ``byteorder`` and a few small marks. What torch 2.13 writes is what
``lay_out`` writes, to the byte position of every record, because torch may compute positions instead of reading them.
"""

from __future__ import annotations

from nemo_optim_bridge.formats.torch_zip.directory import Record
from nemo_optim_bridge.formats.torch_zip.file import TorchFile, check_crcs, read_torch_bytes, read_torch_file
from nemo_optim_bridge.formats.torch_zip.layout import NewTensor, lay_out
from nemo_optim_bridge.formats.torch_zip.tree import StoredStorage, StoredTensor
from nemo_optim_bridge.formats.torch_zip.window import Window

__all__ = [
    "NewTensor",
    "Record",
    "StoredStorage",
    "StoredTensor",
    "TorchFile",
    "Window",
    "check_crcs",
    "lay_out",
    "read_torch_bytes",
    "read_torch_file",
]
