"""Read a nanotron checkpoint of any revision and topology into one topology-free description, from headers alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nemo_optim_bridge.core.team import Team, Workers, ignore
from nemo_optim_bridge.errors import (
    BridgeError,
    ContradictionError,
    MissingSourceError,
    UnknownFormatError,
    raise_all,
    unreadable,
)
from nemo_optim_bridge.formats.documents import shown
from nemo_optim_bridge.formats.nanotron.assemble import Assembler
from nemo_optim_bridge.formats.nanotron.checkpoint import NanotronCheckpoint
from nemo_optim_bridge.formats.nanotron.config import Documents
from nemo_optim_bridge.formats.nanotron.dialects import DIALECTS, Dialect
from nemo_optim_bridge.formats.nanotron.names import (
    RankName,
    format_rank_name,
    parse_rank_name,
)
from nemo_optim_bridge.formats.nanotron.optimizer import OptimizerShard, read_optimizer_shard
from nemo_optim_bridge.formats.nanotron.weights import list_folder, read_weights
from nemo_optim_bridge.formats.topology import Coordinates, Topology

#: Indexing a file takes about as long as copying this many bytes.
_INDEX_BYTES = 16 << 20
_MOST_SHOWN = 10  # missing files; what the documents claim may be absurd


def resolve(path: Path) -> Path:
    """Return the checkpoint directory itself: ``path``, or the step that ``path/latest.txt`` names."""
    with _readable(path):
        if not path.is_dir():
            raise MissingSourceError(
                "is not a directory" if path.exists() else "does not exist", path=path,
                hint="give the directory of one checkpoint step",
            )  # fmt: skip
        latest = path / "latest.txt"
        if (path / "model_config.json").exists() or not latest.is_file():
            return path
        with latest.open(errors="replace") as file:
            step = file.read(40).strip()
        if not step.isascii() or not step.isdigit() or not (path / step).is_dir():
            raise MissingSourceError(
                f"latest.txt names step {step!r}, which is not there", path=path, hint="give the directory of a step"
            )
        return path / step


@contextmanager
def _readable(root: Path) -> Iterator[None]:
    """Turn the system's refusals to list or open something below ``root`` into CorruptFileError."""
    try:
        yield
    except OSError as error:
        raise unreadable(str(error.filename or root)[:400], error) from error


def is_nanotron(path: Path) -> bool:
    """Tell whether a directory looks like a nanotron checkpoint."""
    return (path / "model_config.json").is_file() and (path / "model").is_dir()


def read_checkpoint(
    path: str | os.PathLike[str], vocab_size: int | None = None, team: Team | None = None
) -> NanotronCheckpoint:
    """Read a checkpoint from its headers alone; no tensor data is read except ``step``.

    Args:
        vocab_size: the true vocabulary; rows beyond it are padding. The stored size when None.
        team: the processes that share the files; all ranks call this. None is this process alone.

    Raises CheckpointError (one of its kinds), on all ranks, with every problem found.
    """
    team = team or Workers(1)
    root = team.lead(lambda: resolve(Path(path)))
    with _readable(root):
        return _read(root, vocab_size, team)


def _read(root: Path, vocab_size: int | None, team: Team) -> NanotronCheckpoint:
    documents, files, leftovers, has_legacy_names = team.lead(lambda: _survey_folder(root))
    facts, topology, zero_stage = documents.facts(), documents.topology(), documents.zero_stage()
    weights = read_weights(root, topology, facts, team)
    indexed = team.map(lambda _: _read_shard, list(files.items()), [_INDEX_BYTES] * len(files), ignore)
    shards = dict(zip(files, indexed, strict=True))
    dialect = _dialect(documents, shards)
    raise_all(_group_problems(dialect, shards))
    if not dialect.names_experts and not has_legacy_names:
        raise ContradictionError(
            "has no expert_parallel_size, but the names of the optimizer files tell expert-parallel ranks",
            path=documents.optimizer.path,
            hint="restore the configuration files of the run that saved the optimizer",
        )
    return Assembler(root, dialect, topology, zero_stage, documents, facts, weights, shards, team).checkpoint(
        vocab_size, [*leftovers, *map(Path, weights.leftovers)], has_legacy_names
    )


def _survey_folder(root: Path) -> tuple[Documents, dict[Coordinates, Path], list[Path], bool]:
    """Read the documents, and list the optimizer files: one rank does it, so that all see the same."""
    if not is_nanotron(root):
        raise UnknownFormatError(
            "is not a nanotron checkpoint: model_config.json or model/ is missing", path=root,
            hint="give the directory of one step, or its parent with latest.txt",
        )  # fmt: skip
    documents = Documents.read(root)
    documents.check_samples()
    documents.facts()
    return documents, *_optimizer_files(root, documents.topology(), documents.zero_stage())


def _read_shard(item: tuple[Coordinates, Path]) -> OptimizerShard:
    return read_optimizer_shard(item[1], item[0])


def _optimizer_files(
    root: Path, topology: Topology, zero_stage: int
) -> tuple[dict[Coordinates, Path], list[Path], bool]:
    """Return the file of every rank that writes one, files of other topologies, and whether names are legacy ones."""
    folder = root / "optimizer"
    found: dict[Coordinates, Path] = {}
    leftovers: list[Path] = []
    styles: dict[bool, Path] = {}
    for path in map(Path, list_folder(folder)):
        if path.name == "optimizer_config.json":
            continue
        name = parse_rank_name("optimizer", path.name)
        if name is None or not name.matches(topology) or (name.dp is not None) != (zero_stage == 1):
            leftovers.append(path)
            continue
        twin = found.setdefault(name.coordinates, path)
        if twin is not path:
            raise ContradictionError(
                f"two files claim {name.coordinates}; the other is {twin.name}", path=path,
                hint="remove the one that does not belong to this checkpoint",
            )  # fmt: skip
        styles.setdefault(name.ep is None, path)
    if len(styles) > 1:
        raise ContradictionError(
            f"names of two styles are mixed; {styles[False].name} has the other", path=styles[True],
            hint="remove the files that do not belong to this checkpoint",
        )  # fmt: skip
    legacy = True in styles
    problems: list[BridgeError] = []
    num_missing = topology.world_size // (1 if zero_stage else topology.dp) - len(found)
    for at in topology if num_missing else ():
        if len(problems) == min(num_missing, _MOST_SHOWN):
            break
        if at not in found and (zero_stage == 1 or at.dp == 0):
            expected = RankName(
                (at.pp, topology.pp), (at.tp, topology.tp), (at.dp, topology.dp) if zero_stage else None,
                None if legacy else (at.ep, topology.ep),
            )  # fmt: skip
            problems.append(
                MissingSourceError(
                    "optimizer file is missing",
                    path=folder / format_rank_name("optimizer", expected),
                    rank=str(at),
                    hint="copy it from the original run: nothing can stand in for it",
                )
            )
    if num_missing > len(problems):
        problems.append(MissingSourceError(f"{num_missing - len(problems)} more optimizer files are missing"))
    raise_all(problems)
    return found, leftovers, legacy


def _dialect(documents: Documents, shards: Mapping[Coordinates, OptimizerShard]) -> Dialect:
    """Return which revision wrote a checkpoint, from its versions and habits."""
    version = documents.metadata.get("version")
    known = [dialect for dialect in DIALECTS.values() if dialect.version == version]
    if not known:
        raise UnknownFormatError(
            f"checkpoint version {shown(version)} is not one of {sorted({d.version for d in DIALECTS.values()})}",
            path=documents.metadata.path,
            hint="this revision of nanotron is not supported: please report it",
        )
    if len(known) == 1:
        return known[0]
    if "expert_parallel_size" not in documents.optimizer.section("parallelism"):
        return DIALECTS["v0.1"]
    if all(shard.num_groups <= 1 for shard in shards.values()):
        return DIALECTS["0.4"]
    return DIALECTS["moe24"]


def _group_problems(dialect: Dialect, shards: Mapping[Coordinates, OptimizerShard]) -> Iterator[BridgeError]:
    """Yield files whose param groups are neither one for all parameters nor one for each, as the dialect has it."""
    for shard in shards.values():
        if dialect.group_per_parameter and shard.largest_group > 1:
            yield UnknownFormatError(
                f"has {shard.num_groups} param groups for {len(shard.fqns)} parameters",
                path=shard.path,
                hint="nanotron writes one group, or one for each parameter: convert the run's own groups back first",
            )
