"""NeMo plugin: ``optim.name: distributed_fused_adam_bridge``.

Importing this package imports neither NeMo nor torch. ``register()`` makes the name known to NeMo; installing the
package does the same through Lightning's and Hydra's plugin mechanisms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemo_optim_bridge.plugins.nemo.registration import OPT_OUT_VARIABLE, OPTIMIZER_NAME, register

if TYPE_CHECKING:
    from nemo_optim_bridge.plugins.nemo.optimizer import DistributedFusedAdamBridge
    from nemo_optim_bridge.plugins.nemo.report import RestoreReport

__all__ = ["OPTIMIZER_NAME", "OPT_OUT_VARIABLE", "DistributedFusedAdamBridge", "RestoreReport", "register"]


def __getattr__(name: str) -> Any:
    """Import the class, and with it NeMo, on first use; raises MissingDependencyError saying what is missing."""
    if name == "DistributedFusedAdamBridge":
        from nemo_optim_bridge.plugins.nemo.requirements import require

        require()
        from nemo_optim_bridge.plugins.nemo.optimizer import DistributedFusedAdamBridge

        return DistributedFusedAdamBridge
    if name == "RestoreReport":
        from nemo_optim_bridge.plugins.nemo.report import RestoreReport

        return RestoreReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
