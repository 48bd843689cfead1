"""Carry an optimizer's state across optimizer types and parallel topologies, bit for bit.

Public names are imported when they are first used: ``import nemo_optim_bridge`` loads neither torch nor any framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nemo_optim_bridge.version import __version__

if TYPE_CHECKING:
    from nemo_optim_bridge.core.live import load_tensors, merge_tensors
    from nemo_optim_bridge.core.manifest import Manifest, TensorKey
    from nemo_optim_bridge.core.plan import make_plan
    from nemo_optim_bridge.core.region import Region
    from nemo_optim_bridge.errors import BridgeError
    from nemo_optim_bridge.formats.nanotron.reader import read_checkpoint

_HOMES = {
    "BridgeError": "errors",
    "Manifest": "core.manifest",
    "Region": "core.region",
    "TensorKey": "core.manifest",
    "load_tensors": "core.live",
    "make_plan": "core.plan",
    "merge_tensors": "core.live",
    "read_checkpoint": "formats.nanotron.reader",
}

__all__ = [
    "BridgeError",
    "Manifest",
    "Region",
    "TensorKey",
    "__version__",
    "load_tensors",
    "make_plan",
    "merge_tensors",
    "read_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
