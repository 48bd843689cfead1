"""Nanotron's file-name grammars: a ``format_`` and a ``parse_`` function each, side by side."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from nemo_optim_bridge.formats.topology import Coordinates, Topology

EMBEDDING = "model.token_position_embeddings.pp_block.token_embedding.weight"
LM_HEAD = "model.lm_head.pp_block.weight"


@dataclass(frozen=True, slots=True)
class RankName:
    """What the name of a per-rank ``.pt`` file says; ``dp`` and ``ep`` are None where the name lacks them."""

    pp: tuple[int, int]  # (rank, size), likewise below
    tp: tuple[int, int]
    dp: tuple[int, int] | None = None
    ep: tuple[int, int] | None = None

    def matches(self, topology: Topology) -> bool:
        """Tell whether this file belongs to a checkpoint of that topology."""
        return (
            self.pp[1] == topology.pp
            and self.tp[1] == topology.tp
            and (self.dp is None or self.dp[1] == topology.dp)
            and (topology.ep == 1 if self.ep is None else self.ep[1] == topology.ep)
        )

    @property
    def coordinates(self) -> Coordinates:
        """Where the writing rank sits."""
        return Coordinates(self.tp[0], self.pp[0], self.dp[0] if self.dp else 0, self.ep[0] if self.ep else 0)


_RANK_NAME = re.compile(
    r"_pp-(?P<pp>\d+)-of-(?P<pps>\d+)"
    r"(?:_dp-(?P<dp>\d+)-of-(?P<dps>\d+))?"
    r"_tp-(?P<tp>\d+)-of-(?P<tps>\d+)"
    r"(?:_exp-(?P<ep>\d+)-of-(?P<eps>\d+))?\.pt"
)


def format_rank_name(prefix: str, name: RankName) -> str:
    """Return the file name of a per-rank file, ``prefix`` being ``optimizer`` or ``lr_scheduler``."""
    axes = (("pp", name.pp), ("dp", name.dp), ("tp", name.tp), ("exp", name.ep))
    return prefix + "".join(f"_{axis}-{at[0]}-of-{at[1]}" for axis, at in axes if at is not None) + ".pt"


def parse_rank_name(prefix: str, text: str) -> RankName | None:
    """Return what a file name says, or None when it is not of this grammar or a rank is not below its size."""
    if not text.startswith(prefix):
        return None
    match = _RANK_NAME.fullmatch(text, len(prefix))
    if match is None:
        return None

    def axis(name: str) -> tuple[int, int] | None:
        return None if match[name] is None else (int(match[name]), int(match[name + "s"]))

    pp, tp, dp, ep = axis("pp"), axis("tp"), axis("dp"), axis("ep")
    if pp is None or tp is None or any(at is not None and at[0] >= at[1] for at in (pp, tp, dp, ep)):
        return None
    name = RankName(pp, tp, dp, ep)
    return name if format_rank_name(prefix, name) == text else None


Axis = tuple[int, int] | None  # (rank, size)


class WeightName(NamedTuple):
    """What the path of a weight shard says. ``pp`` and ``tp`` are None for a parameter that is not sharded."""

    fqn: str
    pp: Axis = None
    tp: Axis = None
    ep: Axis = None
    doubled: bool = False  # nanotron of spring 2024 wrote the file name into itself

    def matches(self, topology: Topology) -> bool:
        """Tell whether this file belongs to a checkpoint of that topology."""
        if self.pp is None or self.tp is None:
            return True
        return (
            self.pp[1] == topology.pp and self.tp[1] == topology.tp and (self.ep is None or self.ep[1] == topology.ep)
        )


_WEIGHT_NAME = re.compile(r"model_([A-Za-z0-9_]+?)(_pp-rank-[^.]*)?\.safetensors")
_AXES = re.compile(r"_pp-rank-(\d+)-of-(\d+)_tp-rank-(\d+)-of-(\d+)(?:_exp-rank-(\d+)-of-(\d+))?")
_DOUBLED = re.compile(r"model_(model_[A-Za-z0-9_]+?)\.safetensors(_pp-rank-.*\.safetensors)")
_FQN = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+")


def is_fqn(text: str) -> bool:
    """Tell whether a parameter name is made of plain identifiers only, so that it cannot leave its directory."""
    return _FQN.fullmatch(text) is not None


def format_weight_name(name: WeightName) -> str:
    """Return the path of a weight shard below the checkpoint's ``model`` directory; never the doubled spelling."""
    *folders, last = name.fqn.split(".")
    return "/".join([*folders, f"model_{last}{_format_axes((name.pp, name.tp, name.ep))}.safetensors"])


def parse_weight_name(text: str) -> WeightName | None:
    """Return what the path of a weight shard below ``model`` says, or None when it is not of this grammar."""
    *folders, file = text.split("/")
    doubled = _DOUBLED.fullmatch(file)
    match = _WEIGHT_NAME.fullmatch(doubled[1] + doubled[2] if doubled else file)
    axes = _parse_axes(match[2] or "") if match else None
    if match is None or axes is None:
        return None
    fqn = ".".join([*folders, match[1]])
    return None if "." in text[: -len(file)] or not is_fqn(fqn) else WeightName(fqn, *axes, doubled is not None)


def _format_axes(axes: tuple[Axis, Axis, Axis]) -> str:
    named = zip(("pp", "tp", "exp"), axes, strict=True)
    return "".join(f"_{axis}-rank-{at[0]}-of-{at[1]}" for axis, at in named if at is not None)


@lru_cache(maxsize=1 << 12)  # all parameters of a stage share them
def _parse_axes(text: str) -> tuple[Axis, Axis, Axis] | None:
    """Return where the writing rank sits on (pp, tp, ep), or None when it is not of this grammar or out of range."""
    if not text:
        return None, None, None
    match = _AXES.fullmatch(text)
    if match is None:
        return None
    pp, tp = (int(match[1]), int(match[2])), (int(match[3]), int(match[4]))
    ep = None if match[5] is None else (int(match[5]), int(match[6]))
    if any(at is not None and at[0] >= at[1] for at in (pp, tp, ep)) or _format_axes((pp, tp, ep)) != text:
        return None
    return pp, tp, ep


_BLOCK = re.compile(r"model\.(decoder\.\d+|[a-z_]+)\.")


def block_of(fqn: str) -> str | None:
    """Return the pipeline block that a parameter belongs to, such as ``decoder.3`` or ``lm_head``."""
    match = _BLOCK.match(fqn)
    return match[1] if match else None
