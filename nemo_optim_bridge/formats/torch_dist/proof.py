"""What a conversion proves: the digests of all that it carries, and that its output says the same."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_optim_bridge.core.checkpoint import WEIGHT, Checkpoint
from nemo_optim_bridge.core.fingerprint import combine
from nemo_optim_bridge.core.manifest import TensorKey
from nemo_optim_bridge.core.store import FileStore
from nemo_optim_bridge.core.survey import Survey, survey
from nemo_optim_bridge.core.team import Progress, Team
from nemo_optim_bridge.core.whole import whole_bytes
from nemo_optim_bridge.errors import OutputError, ParamGroupError
from nemo_optim_bridge.formats.torch_dist.membership import Rule
from nemo_optim_bridge.formats.torch_dist.view import open_torch_dist


@dataclass(frozen=True, slots=True)
class Proof:
    """A source, every element of which was read once, and the rule that told its groups apart."""

    source: Checkpoint
    rule: Rule
    surveyed: Survey

    @classmethod
    def of(cls, root: Path, rule: Rule, team: Team, progress: Callable[[str, int], Progress]) -> Proof:
        """Read all data of a checkpoint; raises CheckpointError kinds, ParamGroupError for groups without members."""
        try:
            source, _ = open_torch_dist(root, rule)
        except ParamGroupError as error:
            raise ParamGroupError(
                error.problem, path=root, key=error.key,
                hint="no receipt can say which parameter has which hyperparameters: --no-receipt converts without one",
            ) from error  # fmt: skip
        surveyed = survey(source, team, progress=progress("hashing", whole_bytes(source.manifest)))
        FileStore.of(source.manifest).check_unchanged()
        return cls(source, rule, surveyed)

    def carried_to(self, out: Path, rewritten: Collection[str], team: Team) -> Proof:
        """Read the written headers back, and the weights that were written anew; return the proof of what was written.

        Args:
            rewritten: parameters whose weights have other bytes than in the source.

        Raises OutputError when the output does not say of every parameter what the source says.
        """
        target, _ = open_torch_dist(out, Rule.listed(self.source.no_decay or (), "as in the source"))
        if {*target.manifest.tensors} != {*self.source.manifest.tensors} or target.scalars != self.source.scalars:
            raise OutputError(
                "the converted headers do not say what the source's say", path=self.source.path,
                hint="nothing was written; please report it",
            )  # fmt: skip
        if not rewritten or self.surveyed.fingerprint is None:
            return self
        weights = target.manifest.restrict({TensorKey(fqn, WEIGHT) for fqn in rewritten})
        anew = survey(replace(target, manifest=weights), team, scan=False).fingerprint
        digests = {**self.surveyed.fingerprint.tensors, **(anew.tensors if anew else {})}
        return replace(self, surveyed=replace(self.surveyed, fingerprint=combine(digests, self.source.scalars)))

    def found(self) -> dict[str, Any]:
        """Return digests and findings under the field names of ``--json``."""
        digests = self.surveyed.fingerprint.to_json() if self.surveyed.fingerprint else {}
        return {
            "findings": [finding.to_json() for finding in self.surveyed.findings],
            **{name: digest for name, digest in digests.items() if name != "tensors"},
        }
