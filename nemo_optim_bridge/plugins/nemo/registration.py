"""Make the optimizer's name known to NeMo, without importing NeMo."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nemo_optim_bridge.errors import MissingDependencyError
from nemo_optim_bridge.plugins.nemo import alias

#: What to write under ``optim.name``.
OPTIMIZER_NAME = alias.BRIDGE_NAME

#: Set to 1, true, yes or on to keep an installed package from registering by itself.
OPT_OUT_VARIABLE = "NEMO_OPTIM_BRIDGE_DISABLE"

logger = logging.getLogger(__name__)

_hooked: set[str] = set()


def register() -> None:
    """Register the optimizer with NeMo now or as soon as NeMo is imported; calling it again changes nothing.

    Raises MissingDependencyError when wrapt, a dependency of NeMo, is not installed.
    """
    try:
        from wrapt import register_post_import_hook
    except ImportError as error:
        raise MissingDependencyError(
            "wrapt is not installed", hint="pip install 'nemo-optim-bridge[nemo]', or install NeMo, which needs it"
        ) from error
    hooks: dict[str, Callable[[ModuleType], None]] = {"nemo.core.optim.optimizers": _add_to_registry, **alias.HOOKS}
    for module, hook in hooks.items():
        if module not in _hooked:
            _hooked.add(module)
            register_post_import_hook(hook, module)


def register_if_wanted() -> None:
    """Register unless the user opted out; what plugin mechanisms call, so it never raises."""
    if os.environ.get(OPT_OUT_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on"):
        logger.debug("not registering %s: %s is set", OPTIMIZER_NAME, OPT_OUT_VARIABLE)
        return
    try:
        register()
    except MissingDependencyError as error:
        logger.debug("not registering %s: %s", OPTIMIZER_NAME, error)


def _add_to_registry(optimizers: ModuleType) -> None:
    """Post-import hook: file the class, or what says why it cannot be had, in NeMo's registry."""
    if OPTIMIZER_NAME in optimizers.AVAILABLE_OPTIMIZERS:
        return
    if "distributed_fused_adam" not in optimizers.AVAILABLE_OPTIMIZERS:
        optimizers.AVAILABLE_OPTIMIZERS[OPTIMIZER_NAME] = unavailable
        return
    try:
        from nemo_optim_bridge.plugins.nemo.optimizer import DistributedFusedAdamBridge
        from nemo_optim_bridge.plugins.nemo.params import DistributedFusedAdamBridgeParams
    except ImportError as error:  # NeMo must not fail to import because of this
        logger.warning("%s cannot be had here: %s", OPTIMIZER_NAME, error)
        optimizers.AVAILABLE_OPTIMIZERS[OPTIMIZER_NAME] = unavailable
        return
    optimizers.register_optimizer(OPTIMIZER_NAME, DistributedFusedAdamBridge, DistributedFusedAdamBridgeParams)


def unavailable(*_: Any, **__: Any) -> None:
    """Stand in NeMo's registry for the class that cannot be had here; raises MissingDependencyError when asked for."""
    from nemo_optim_bridge.plugins.nemo.requirements import require

    require()
    raise MissingDependencyError(
        "NeMo left distributed_fused_adam out of its registry although its parts are here now",
        hint="import Apex and NeMo in a new process",
    )
