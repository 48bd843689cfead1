"""Which tensors of a checkpoint a rank of a team looks at."""

from __future__ import annotations

from math import prod

from nemo_optim_bridge.core.manifest import ITEMSIZE, Manifest
from nemo_optim_bridge.core.team import Team, shares


def own_share(manifest: Manifest, team: Team) -> Manifest:
    """Return the tensors that this rank of a team looks at: all of a parameter's, about as many bytes as any rank's."""
    if team.num_ranks == 1:
        return manifest
    nbytes: dict[str, int] = {}
    for spec in manifest.tensors:
        nbytes[spec.key.fqn] = nbytes.get(spec.key.fqn, 0) + prod(spec.shape) * ITEMSIZE[spec.dtype]
    fqns = list(nbytes)
    mine = {fqns[number] for number in shares(list(nbytes.values()), team.num_ranks)[team.rank]}
    return manifest.restrict({spec.key for spec in manifest.tensors if spec.key.fqn in mine})
