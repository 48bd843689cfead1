"""The real nanotron checkpoints of ``tests/data/nanotron``: what they are, and where they lie once unpacked."""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

PACKED = Path(__file__).parents[1] / "data" / "nanotron"
SAMPLE = PACKED / "nt04-llama_tied-z0-tp2-pp1-dp1-ep1"
DIALECTS = {"v0.1": "v0.1", "nt04": "0.4", "moe24": "moe24", "moe": "moe", "head": "head"}


@dataclass(frozen=True)
class Fixture:
    """One checkpoint of the index: the revision that saved it, the logical model, and the topology."""

    name: str
    nanotron: str
    model: str
    zero: int
    tp: int
    pp: int
    dp: int
    ep: int
    variant: str

    @property
    def dialect(self) -> str:
        """The name that ``--dialect`` knows it by."""
        return DIALECTS[self.nanotron]

    @property
    def has_old_names(self) -> bool:
        """Whether its file names are of the kinds that are read but never written."""
        return self.variant == "renamed" or self.nanotron == "moe24"

    @property
    def vocab_size(self) -> int | None:
        """The true vocabulary, where the checkpoint cannot tell it from a padded one."""
        return 126 if "vpad" in self.model else None

    @property
    def num_experts(self) -> int:
        """Experts of the mixture-of-experts example; 0 for the other models."""
        return int(self.model.removeprefix("moe_e")) if self.model.startswith("moe_e") else 0

    @property
    def is_tied(self) -> bool:
        """Whether the embedding and lm_head are one parameter."""
        return self.model.endswith("_tied")

    def target_options(self) -> list[str]:
        """Return the ``reshard`` options that ask for this checkpoint's topology, dialect and vocabulary."""
        sizes = [part for name in ("tp", "pp", "dp", "ep", "zero") for part in (f"--{name}", str(getattr(self, name)))]
        vocab = [] if self.vocab_size is None else ["--vocab-size", str(self.vocab_size)]
        return [*sizes, "--dialect", self.dialect, *vocab]


def read_index(folder: Path = PACKED) -> dict[str, Fixture]:
    """Return the fixtures of a folder by name, in the order of its index."""
    known = [field.name for field in fields(Fixture)]
    rows = json.loads((folder / "INDEX.json").read_text())
    return {row["name"]: Fixture(**{name: row[name] for name in known}) for row in rows}


def unpack(into: Path) -> Path:
    """Unpack every archive to ``into`` (``checkpoints/``, ``truth/``, ``INDEX.json``) unless it is there; return it.

    Safe to call from several processes at once: the folder appears complete or not at all.
    """
    if into.exists():
        return into
    scratch = Path(tempfile.mkdtemp(prefix=f"{into.name}-", dir=into.parent))
    for archive in sorted(PACKED.glob("*.tar.xz")):
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
    shutil.copy(PACKED / "INDEX.json", scratch)
    try:
        scratch.rename(into)
    except OSError:
        shutil.rmtree(scratch)
        if not into.exists():
            raise
    return into
