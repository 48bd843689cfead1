"""Entry point of ``lightning.pytorch.callbacks_factory``: called whenever a Trainer is built."""

from __future__ import annotations

from typing import Any


def callbacks() -> list[Any]:
    """Register the optimizer with NeMo and contribute no callback."""
    from nemo_optim_bridge.plugins.nemo.registration import register_if_wanted

    register_if_wanted()
    return []
