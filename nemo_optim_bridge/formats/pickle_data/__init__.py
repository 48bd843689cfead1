"""Read and write pickles as data; nothing that a pickle names is ever imported or called.

How reading stays both safe and fast: one pass over the bytes (``admit``) lets through only the opcodes that picklers
emit for data, rewritten so that the C unpickler (``reader``) can push constants, tuples, empty containers and memo
entries, and call ``Global`` objects, the only callable thing there is in it; all the rest is decided in Python.
"""

from __future__ import annotations

from nemo_optim_bridge.formats.pickle_data.names import Alike, Call, Global, Opaque
from nemo_optim_bridge.formats.pickle_data.reader import loads
from nemo_optim_bridge.formats.pickle_data.shape import MAX_DEPTH
from nemo_optim_bridge.formats.pickle_data.writer import dumps

__all__ = ["MAX_DEPTH", "Alike", "Call", "Global", "Opaque", "dumps", "loads"]
