"""Let the bridge's name count as ``distributed_fused_adam`` where NeMo's nlp collection (1.23 to 2.4) compares it.

The collection takes the distributed path when ``cfg.optim.name`` equals the string ``distributed_fused_adam``. The
methods that compare run with the config spelled that way and find it spelled back when they are done, so that what
is saved keeps the bridge's name. Later NeMo versions compare no longer, and these hooks never fire.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from nemo_optim_bridge.errors import TargetError

BRIDGE_NAME = "distributed_fused_adam_bridge"
STOCK_NAME = "distributed_fused_adam"

_MARK = "_nemo_optim_bridge_alias"
_BASE_MODEL = "nemo.collections.nlp.models.language_modeling.megatron_base_model"
_PARTS = "nemo.collections.nlp.parts"


def names_bridge(optim: Any) -> bool:
    """Return whether an ``optim`` config asks for the bridge."""
    return optim is not None and hasattr(optim, "get") and optim.get("name") == BRIDGE_NAME


@contextmanager
def spelled_as_stock(optim: Any) -> Iterator[None]:
    """Spell the bridge's name as the stock one in this very config node while the block runs.

    The node's private value is set because the config may be read-only, and a copy would hide the changes that the
    method makes. Any other name is left alone.
    """
    if not names_bridge(optim):
        yield
        return
    node = optim._get_node("name")
    written = node._val  # an interpolation, perhaps
    node._val = STOCK_NAME
    try:
        yield
    finally:
        node._val = written


def check_alias() -> None:
    """Raise TargetError when the nlp collection is loaded without the hooks: it would train, on the wrong path."""
    model = getattr(sys.modules.get(_BASE_MODEL), "MegatronBaseModel", None)
    if model is not None and not hasattr(getattr(model, "_validate_and_override_config", None), _MARK):
        raise TargetError(
            f"NeMo's nlp collection does not know that {BRIDGE_NAME!r} is a distributed optimizer: it would wrap it in "
            "MainParamsOptimizerWrapper and choose the wrong precision plugin",
            hint="call nemo_optim_bridge.plugins.nemo.register() before the trainer is built",
        )


def _run_as_stock(
    owner: type | None, method: str, optim_of: Callable[[Any], Any], before: Callable[[Any], None]
) -> None:  # fmt: skip
    """Wrap a method, once; a class or method that this NeMo does not have is left out."""
    original = getattr(owner, method, None)
    if original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        optim = optim_of(self)
        if names_bridge(optim):
            before(self)
        with spelled_as_stock(optim):
            return original(self, *args, **kwargs)

    setattr(run, _MARK, True)
    setattr(owner, method, run)


def _check_before(owner: type | None, method: str, check: Callable[[Any], None]) -> None:
    original = getattr(owner, method, None)
    if original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if names_bridge(_optim_of_model(self)):
            check(self)
        return original(self, *args, **kwargs)

    setattr(run, _MARK, True)
    setattr(owner, method, run)


def _optim_of_model(model: Any) -> Any:
    return model.cfg.get("optim")


def _optim_of_builder(builder: Any) -> Any:
    return builder.cfg.model.get("optim")


def _nothing(_: Any) -> None:
    return None


def _take_distributed_path(model: Any) -> None:
    """Set what the constructor just decided from the name; nothing has read it yet."""
    model.with_distributed_adam = True


def _require_distributed_path(model: Any) -> None:
    """Raise TargetError when the trainer or the model came to be without the hooks."""
    plugin = getattr(getattr(model, "trainer", None), "precision_plugin", None)
    if any(cls.__name__ == "MegatronHalfPrecisionPlugin" for cls in type(plugin).__mro__):
        raise TargetError(
            f"the trainer was built before {BRIDGE_NAME!r} was registered, with the precision plugin of an optimizer "
            "that is not distributed",
            hint="call nemo_optim_bridge.plugins.nemo.register() before MegatronTrainerBuilder, or use hydra_runner",
        )
    if not model.with_distributed_adam:
        raise TargetError(
            f"{type(model).__name__} would train {BRIDGE_NAME!r} as an optimizer that is not distributed",
            hint="let its _validate_and_override_config call the base class's",
        )


def _hook_base_model(module: ModuleType) -> None:
    owner = getattr(module, "MegatronBaseModel", None)
    _run_as_stock(owner, "_validate_and_override_config", _optim_of_model, _take_distributed_path)
    _check_before(owner, "setup_optimization", _require_distributed_path)


def _hook_trainer_builder(module: ModuleType) -> None:
    for method in ("_training_strategy", "_plugins"):
        _run_as_stock(getattr(module, "MegatronTrainerBuilder", None), method, _optim_of_builder, _nothing)


def _hook_nlp_adapters(module: ModuleType) -> None:
    _run_as_stock(getattr(module, "NLPAdapterModelMixin", None), "add_adapter", _optim_of_model, _nothing)


def _hook_multimodal_adapters(module: ModuleType) -> None:
    _run_as_stock(getattr(module, "MultimodalAdapterModelMixin", None), "add_adapter", _optim_of_model, _nothing)


#: What to run after which module of the nlp collection was imported.
HOOKS: Mapping[str, Callable[[ModuleType], None]] = {
    _BASE_MODEL: _hook_base_model,
    f"{_PARTS}.megatron_trainer_builder": _hook_trainer_builder,
    f"{_PARTS}.mixins.nlp_adapter_mixins": _hook_nlp_adapters,
    f"{_PARTS}.mixins.multimodal_adapter_mixins": _hook_multimodal_adapters,
}
