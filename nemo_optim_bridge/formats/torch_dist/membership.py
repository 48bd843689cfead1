"""Which parameters have no weight decay: no checkpoint says, so a rule does, and it is stated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nemo_optim_bridge.core.groups import identify
from nemo_optim_bridge.core.regroup import Members
from nemo_optim_bridge.errors import ParamGroupError
from nemo_optim_bridge.formats.torch_dist.keys import MODEL_PREFIXES, is_expert, matches_any, num_own_dims
from nemo_optim_bridge.formats.torch_dist.saved import MEGATRON_KINDS

#: What NeMo leaves without decay. Norms of Apex's classes would be, too; megatron-core's are not.
NEMO_NO_DECAY: Final = ("*bias",)


@dataclass(frozen=True, slots=True)
class Rule:
    """Parameters without weight decay: those that match a pattern, and all one-dimensional ones if so said.

    ``names`` are more of them, without what containers put before all names.
    """

    patterns: tuple[str, ...]
    one_dimensional: bool
    origin: str
    names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, kind: str, patterns: tuple[str, ...]) -> Rule:
        """Return the rule that the user gave, or the default of the optimizer that has the parameters."""
        if patterns:
            return cls(patterns, False, "--no-decay")
        if kind in MEGATRON_KINDS:
            return cls(("*bias",), True, "megatron-core's default")
        return cls(NEMO_NO_DECAY, False, "NeMo's default")

    @classmethod
    def listed(cls, names: Iterable[str], origin: str) -> Rule:
        """Return the rule that these parameters have no weight decay, and no others; see ``names``."""
        return cls((), False, origin, frozenset(names))

    def __str__(self) -> str:
        if self.names or not self.patterns:
            return f"no weight decay for {len(self.names)} parameters ({self.origin})"
        named = f"no weight decay for {', '.join(self.patterns)}"
        return f"{named}{' and all one-dimensional parameters' if self.one_dimensional else ''} ({self.origin})"

    def decays(self, fqn: str, shape: tuple[int, ...]) -> bool:
        """Return whether a parameter is in a group with weight decay."""
        if matches_any(fqn, self.patterns) or self._names(fqn):
            return False
        return not (self.one_dimensional and num_own_dims(fqn, shape) == 1)

    def _names(self, fqn: str) -> bool:
        return any(fqn.removeprefix(prefix) in self.names for prefix in ("", *MODEL_PREFIXES)) if self.names else False

    def members(self, shapes: Mapping[str, tuple[int, ...]]) -> Members:
        """Return which kinds of parameters there are."""
        kinds = {(self.decays(fqn, shape), is_expert(fqn)) for fqn, shape in shapes.items()}
        return Members(
            decay=(True, False) in kinds,
            no_decay=(False, False) in kinds,
            expert_decay=(True, True) in kinds,
            expert_no_decay=(False, True) in kinds,
        )


def groups_of_parameters(
    groups: tuple[dict[str, Any], ...], shapes: Mapping[str, tuple[int, ...]], rule: Rule
) -> dict[str, int]:
    """Return the number of the group that each parameter is in by the rule.

    Raises ParamGroupError when the rule does not tell which of two groups with different values it is.
    """
    places: dict[tuple[bool, bool], list[int]] = {}
    for number, group in enumerate(groups):
        identity = identify(group)
        places.setdefault((identity.decays, identity.expert), []).append(number)
    found: dict[str, int] = {}
    for fqn, shape in shapes.items():
        decays, expert = rule.decays(fqn, shape), is_expert(fqn)
        for place in ((decays, expert), (decays, False), (decays, True), (not decays, expert), (not decays, False)):
            if place in places:
                found[fqn] = _only(groups, places[place])
                break
        else:
            raise ParamGroupError("no param group can hold this parameter", key=fqn)
    return found


def _only(groups: tuple[dict[str, Any], ...], numbers: list[int]) -> int:
    first = groups[numbers[0]]
    for number in numbers[1:]:
        if groups[number] != first:
            raise ParamGroupError(
                f"param groups {numbers} cannot be told apart by their members' names",
                hint="convert between optimizers of the same framework, which keeps all groups as they are",
            )
    return numbers[0]
