"""How many ranks share a model, and along which axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from nemo_optim_bridge.errors import TargetError


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where one rank sits on each axis."""

    tp: int
    pp: int
    dp: int
    ep: int

    def __str__(self) -> str:
        return f"pp {self.pp} dp {self.dp} tp {self.tp} ep {self.ep}"


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the tensor-, pipeline-, data- and expert-parallel groups; world = ep x pp x dp x tp, tp fastest."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            if getattr(self, axis.name) < 1:
                raise TargetError(f"{axis.name} must be at least 1, not {getattr(self, axis.name)}")

    def __str__(self) -> str:
        return f"tp {self.tp} pp {self.pp} dp {self.dp} ep {self.ep}"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp * self.ep

    def rank(self, at: Coordinates) -> int:
        """Return the global rank at the given coordinates."""
        return ((at.ep * self.pp + at.pp) * self.dp + at.dp) * self.tp + at.tp

    def coordinates(self, rank: int) -> Coordinates:
        """Return where a global rank sits."""
        rest, tp = divmod(rank, self.tp)
        rest, dp = divmod(rest, self.dp)
        ep, pp = divmod(rest, self.pp)
        return Coordinates(tp, pp, dp, ep)

    def __iter__(self) -> Iterator[Coordinates]:
        """Yield the coordinates of every rank, in rank order."""
        return map(self.coordinates, range(self.world_size))
