"""Put this plugin's loaders in the place of nanotron's own, and take them out again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from nemo_optim_bridge.errors import MissingDependencyError
from nemo_optim_bridge.plugins.nanotron.loader import load_optimizer
from nemo_optim_bridge.plugins.nanotron.scheduler import load_lr_scheduler

_HOME = "nanotron.serialize.optimizer"
_ORIGINAL: dict[str, Callable[..., Any]] = {}
_OURS: dict[str, Callable[..., Any]] = {}


def install(**options: Any) -> None:
    """Replace nanotron's ``load_optimizer`` and ``load_lr_scheduler``, wherever nanotron has imported them.

    Called by every rank, before or after ``nanotron.trainer`` is imported. Calling it again only changes the options.

    Args:
        options: ``vocab_size``, ``check_crcs`` and ``replicas`` of ``load_optimizer``.

    Raises MissingDependencyError without nanotron.
    """
    uninstall()
    try:
        home = import_module(_HOME)
    except ImportError as error:
        raise MissingDependencyError(
            f"nanotron cannot be imported ({error})",
            hint="run pip install nanotron==0.4, or put your revision on the path",
        ) from error
    ours: dict[str, Callable[..., Any]] = {
        "load_optimizer": partial(load_optimizer, **options),
        "load_lr_scheduler": load_lr_scheduler,
    }
    for name, function in ours.items():
        _ORIGINAL[name], _OURS[name] = getattr(home, name), function
        _replace(name, _ORIGINAL[name], function)


def uninstall() -> None:
    """Put nanotron's own functions back; nothing happens when they are in place."""
    for name, function in _OURS.items():
        _replace(name, function, _ORIGINAL[name])
    _ORIGINAL.clear()
    _OURS.clear()


def _replace(name: str, old: object, new: object) -> None:
    for module in _nanotron_modules():
        if vars(module).get(name) is old:
            setattr(module, name, new)


def _nanotron_modules() -> Iterator[ModuleType]:
    """Yield every module of nanotron that has been imported."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] == "nanotron":
            yield module
