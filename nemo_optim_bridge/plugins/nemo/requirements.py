"""What the plugin needs besides this package, and what to say when it is not there."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util

from nemo_optim_bridge.errors import BridgeError, MissingDependencyError, raise_all

APEX_HINT = (
    "Apex is not on PyPI: take NVIDIA's container, or build github.com/NVIDIA/apex with its distributed Adam "
    "extension (--distributed_adam, --cuda_ext, --cpp_ext)"
)
TE_HINT = (
    "NeMo asks for the version of the distribution 'transformer-engine' before it offers distributed_fused_adam: "
    "pip install transformer-engine[pytorch]"
)


def missing() -> list[BridgeError]:
    """Return one error for everything that NeMo's distributed_fused_adam lacks here, with where to get it."""
    problems: list[BridgeError] = []
    for module, distribution in (("nemo.core", "nemo-toolkit[core]"), ("megatron.core", "megatron-core")):
        if not _importable(module):
            problems.append(
                MissingDependencyError(
                    f"{module} cannot be imported",
                    hint=f"pip install 'nemo-optim-bridge[nemo]', which brings {distribution}",
                )
            )
    try:
        importlib.import_module("apex.contrib.optimizers.distributed_fused_adam")
    except ImportError as error:
        problems.append(MissingDependencyError(f"Apex's DistributedFusedAdam is missing ({error})", hint=APEX_HINT))
    try:
        importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        problems.append(MissingDependencyError("Transformer Engine's package metadata is missing", hint=TE_HINT))
    return problems


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def require() -> None:
    """Import NeMo's own optimizer; raises MissingDependencyError that lists what is missing."""
    try:
        importlib.import_module("nemo.core.optim.distributed_adam")
    except ImportError as error:
        raise_all(missing())
        raise MissingDependencyError(
            f"NeMo's distributed_fused_adam cannot be imported ({error})", hint="import it alone to see why"
        ) from error
