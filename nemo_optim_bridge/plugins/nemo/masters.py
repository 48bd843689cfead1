"""How the fp32 masters are spelled in a checkpoint, and asking for them in the spelling that is there.

Stock NeMo renames the masters of plain ShardedTensors to ``optimizer.state.fp32_param.`` and forgets those of
ShardedTensorFactories (gated MLPs), which stay under ``optimizer.state.param.``. fused_adam, megatron-core and others
write ``fp32_param`` for all. The optimizer is not told which checkpoint is going to be read, so its requests carry a
note, and a wrapper around ``megatron.core.dist_checkpointing.load``, which knows the directory, spells them.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory

from nemo_optim_bridge.core.agree import together
from nemo_optim_bridge.errors import BridgeError, CheckpointError, MissingSourceError, TargetError, raise_all
from nemo_optim_bridge.formats.torch_dist import MASTER_PREFIXES, STOCK_FACTORY_PREFIX, UNIFORM_PREFIX, stored_tensors
from nemo_optim_bridge.plugins.nemo.refusing import refusing

KEY_STYLES = ("auto", "uniform", "stock")

_MARK = "_nemo_optim_bridge_request"

logger = logging.getLogger(__name__)


@dataclass
class Request:
    """One optimizer's wishes for a load, and what came of them."""

    masters_from_weights: bool
    key_style: str = "unknown"
    masters: str = "checkpoint"
    checkpoint: str | None = None


def check_key_style(style: str) -> str:
    """Return the style; raises TargetError for an unknown one."""
    if style not in KEY_STYLES:
        raise TargetError(f"fp32_key_style is {style!r}", hint=f"use one of {', '.join(KEY_STYLES)}")
    return style


def is_master(entry: Any) -> bool:
    """Return whether a sharded entry is an fp32 master of an optimizer state."""
    return isinstance(entry, ShardedTensor | ShardedTensorFactory) and entry.key.startswith(MASTER_PREFIXES)


def spell(state_dict: Any, style: str, request: Request | None) -> None:
    """Spell the masters of a sharded optimizer state in place, and attach the request to them when given.

    ``uniform``: ``fp32_param`` for all. ``stock`` and ``auto``: what NeMo's own class writes and reads.
    """
    for entry in filter(is_master, _leaves(state_dict)):
        key = _model_key(entry)
        factory = isinstance(entry, ShardedTensorFactory)
        entry.key = (STOCK_FACTORY_PREFIX if factory and style != "uniform" else UNIFORM_PREFIX) + key
        if request is not None:
            setattr(entry, _MARK, request)


def _model_key(entry: Any) -> str:
    key: str = entry.key
    return next(key[len(prefix) :] for prefix in MASTER_PREFIXES if key.startswith(prefix))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


# ---------------------------------------------------------------------------------------------- the load wrapper

_original: Callable[..., Any] | None = None


def install() -> None:
    """Wrap ``dist_checkpointing.load`` so that noted requests are spelled as the checkpoint has them; idempotent."""
    global _original
    if _original is not None:
        return
    _original = original = dist_checkpointing.load
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        asked = bound.arguments["sharded_state_dict"]
        if any(hasattr(entry, _MARK) for entry in _leaves(asked)):
            _respell(asked, bound, original)
        return original(*bound.args, **bound.kwargs)

    setattr(load, _MARK, original)
    dist_checkpointing.load = serialization.load = load


def remove() -> None:
    """Take the wrapper off again, unless somebody wrapped it in turn."""
    global _original
    if _original is not None and hasattr(dist_checkpointing.load, _MARK):
        dist_checkpointing.load = serialization.load = _original
        _original = None


def _respell(asked: Any, bound: inspect.BoundArguments, original: Callable[..., Any]) -> None:
    """Spell the noted entries of a request, on every rank or on none; called by all ranks that load."""
    path = os.fspath(bound.arguments["checkpoint_dir"])
    entries = [entry for entry in _leaves(asked) if hasattr(entry, _MARK)]
    request: Request = getattr(entries[0], _MARK)

    def find() -> tuple[dict[int, str], bool]:
        stored = stored_tensors(path)
        from_weights = not any(key.startswith(MASTER_PREFIXES) for key in stored)
        find_one = functools.partial(_weight_key, request) if from_weights else _master_key
        return _find_all(entries, stored, path, find_one), from_weights

    keys, from_weights = together(refusing(find))
    for entry in entries:
        entry.key = keys[id(entry)]
    request.checkpoint = path
    request.key_style = "stock" if any(key.startswith(STOCK_FACTORY_PREFIX) for key in keys.values()) else "uniform"
    request.masters = "weights" if from_weights else "checkpoint"
    if from_weights:
        request.key_style = "none"
        _load_from_weights(asked, entries, bound, original)


def _find_all(
    entries: list[Any], stored: Mapping[str, str], path: str, find: Callable[[str, Mapping[str, str]], str]
) -> dict[int, str]:
    """Return the stored key of each entry by ``id(entry)``; raises one error for all that cannot be had."""
    keys: dict[int, str] = {}
    problems: list[BridgeError] = []
    for entry in entries:
        try:
            keys[id(entry)] = find(_model_key(entry), stored)
        except BridgeError as error:
            error.path = path
            problems.append(error)
    raise_all(problems)
    return keys


def _master_key(key: str, stored: Mapping[str, str]) -> str:
    for prefix in MASTER_PREFIXES:
        # gated factories with singleton_local_shards write their halves under key_w and key_v
        if prefix + key in stored or f"{prefix}{key}_w" in stored:
            return prefix + key
    raise MissingSourceError(
        "the checkpoint has fp32 masters, but none for this parameter",
        key=key,
        hint="it was saved from another model, or without part of its optimizer",
    )


def _weight_key(request: Request, key: str, stored: Mapping[str, str]) -> str:
    found = next((name for name in (key, f"{key}_w") if name in stored), None)
    if found is None:
        raise MissingSourceError("the checkpoint has neither an fp32 master nor a weight for this parameter", key=key)
    if stored[found] != "float32" and not request.masters_from_weights:
        raise CheckpointError(
            f"the checkpoint has no fp32 masters, and its weights are {stored[found]}: lower bits are lost",
            key=key,
            hint="to go on from the rounded weights all the same, set optim.masters_from_weights: true",
        )
    return key


def _load_from_weights(
    asked: Any, entries: list[Any], bound: inspect.BoundArguments, original: Callable[..., Any]
) -> None:
    """Load the masters under the weights' own keys, and put them into the request as values.

    In a load of its own: within one request megatron-core takes two readers of one shard for a mistake.
    """
    arguments = {k: v for k, v in bound.arguments.items() if k not in ("sharded_state_dict", "strict")}
    loaded = original(sharded_state_dict={"masters": list(entries)}, **arguments)["masters"]
    values = {id(entry): value for entry, value in zip(entries, loaded, strict=True)}
    dict_list_map_inplace(lambda x: LocalNonpersistentObject(values[id(x)]) if id(x) in values else x, cast(Any, asked))
