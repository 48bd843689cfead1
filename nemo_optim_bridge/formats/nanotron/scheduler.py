"""The lr scheduler's state, carried parameter by parameter because its lists follow the param groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_optim_bridge.core.manifest import Identity
from nemo_optim_bridge.core.store import identify
from nemo_optim_bridge.errors import BridgeError, ContradictionError, MissingSourceError, TargetError, raise_all
from nemo_optim_bridge.formats.nanotron.dialects import Dialect
from nemo_optim_bridge.formats.nanotron.names import RankName, format_rank_name
from nemo_optim_bridge.formats.nanotron.optimizer import exact
from nemo_optim_bridge.formats.nanotron.weights import list_folder
from nemo_optim_bridge.formats.topology import Topology
from nemo_optim_bridge.formats.torch_zip import StoredTensor, read_torch_file

_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")
#: Lists of an lr scheduler, and what they are called in the param groups.
_RATES = {"base_lrs": "initial_lr", "_last_lr": "lr"}
Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scheduler:
    """``template`` holds every key in order, lists that follow the param groups being None.

    ``entries`` holds their values per parameter; ``common`` the value of all parameters where there is but one;
    ``files`` what was read, as it was then; ``places`` the first file with a parameter's entry; ``leftovers`` other
    files beside them.
    """

    template: Mapping[str, Any]
    entries: Mapping[str, Entry]
    common: Entry | None
    files: Mapping[Path, Identity] = dataclasses.field(default_factory=dict)
    places: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    leftovers: tuple[Path, ...] = ()

    def state_dict(self, dialect: Dialect, fqns: Sequence[str]) -> dict[str, Any]:
        """Return the scheduler state of a rank whose param groups hold these parameters.

        Raises TargetError when one group must hold parameters whose learning rates differ, or an entry is unknown.
        """
        rows = [self._entry(fqn) for fqn in fqns]
        if not dialect.group_per_parameter:
            if any(exact(row) != exact(rows[0]) for row in rows):
                raise TargetError(
                    f"dialect {dialect.name} has one param group, but the lr_scheduler's entries differ",
                    hint="keep the source's dialect",
                )
            rows = rows[:1]
        empty: Mapping[str, Any] | None = {} if dialect.group_per_parameter else None

        def value(key: str, row: Entry) -> Any:
            return empty if key == "lr_lambdas" and row[key] in ({}, None) else row[key]

        return {
            key: [value(key, row) for row in rows] if key in _PER_GROUP else kept for key, kept in self.template.items()
        }

    def problems(self, hyperparameters: Mapping[str, Mapping[str, Any]]) -> Iterator[BridgeError]:
        """Yield entries whose rates are not those of the parameter's group: the scheduler set both in one step.

        Nanotron of spring 2024 saves only the entries of the first pipeline stage; the others' are inferred from them.
        """
        only = next(iter(self.files), None)
        found: dict[object, tuple[str, Path | None, list[str]]] = {}  # parameters of one entry or value are told once
        for fqn, values in hyperparameters.items():
            entry = self.entries.get(fqn, self.common)
            is_inferred = bool(self.entries) and fqn not in self.entries
            for name, own in _RATES.items():
                if entry is None or name not in entry or (own not in values and not is_inferred):
                    continue
                said, known, path = entry[name], values.get(own), self.places.get(fqn, only)
                if exact(said) != exact(known):
                    whose = "has no entry for this parameter; the others'" if is_inferred else "the entry's"
                    problem = f"{whose} {name} is {said}, but its param group's {own} is {known}"
                    found.setdefault((problem, path), (problem, path, []))[2].append(fqn)
        for problem, path, fqns in found.values():
            more = f" (so are {len(fqns) - 1} more parameters')" if len(fqns) > 1 else ""
            yield ContradictionError(problem + more, path=path, key=fqns[0])

    def _entry(self, fqn: str) -> Entry:
        entry = self.entries.get(fqn, self.common)
        if entry is None:
            raise TargetError(
                "the source's lr_scheduler has no entry for this parameter, and those it has differ", key=fqn
            )
        return entry


def scheduler_files(dialect: Dialect, topology: Topology) -> dict[tuple[int, int, int], str]:
    """Return the file names that a checkpoint must have, by (pp, tp, ep); (0, 0, 0) alone where there is but one."""
    if not dialect.scheduler_per_rank:
        return {(0, 0, 0): "lr_scheduler.pt"}
    return {
        (pp, tp, ep): format_rank_name(
            "lr_scheduler", RankName((pp, topology.pp), (tp, topology.tp), None, (ep, topology.ep))
        )
        for pp in range(topology.pp)
        for tp in range(topology.tp)
        for ep in range(topology.ep)
    }


def read_scheduler(
    root: Path, dialect: Dialect, topology: Topology, stages: Sequence[Sequence[str]]
) -> Scheduler | None:  # fmt: skip
    """Read all scheduler files; None when the checkpoint has no lr_scheduler directory.

    Args:
        stages: the parameters of each pipeline stage, in nanotron's order, a tied copy included.

    Raises MissingSourceError, ContradictionError or CorruptFileError.
    """
    if not (root / "lr_scheduler").exists():
        return None
    template: dict[str, Any] | None = None
    entries: dict[str, Entry] = {}
    common: list[Entry] = []
    files: dict[Path, Identity] = {}
    places: dict[str, Path] = {}
    problems: list[BridgeError] = []
    for (pp, _, _), name in scheduler_files(dialect, topology).items():
        path = root / "lr_scheduler" / name
        try:
            state, files[path] = _read_state(path)
        except BridgeError as error:
            problems.append(error)
            continue
        lists = {key: value for key, value in state.items() if key in _PER_GROUP}
        lengths = {len(value) for value in lists.values()}
        expected = len(stages[pp]) if dialect.group_per_parameter else 1
        if lengths - {expected}:
            problems.append(
                ContradictionError(f"lists have {sorted(lengths)} entries for {expected} param groups", path=path)
            )
            continue
        scalars = {key: None if key in _PER_GROUP else value for key, value in state.items()}
        if template is None:
            template = scalars
        elif exact(template) != exact(scalars):
            problems.append(ContradictionError("differs from the lr_scheduler of another rank", path=path))
        rows = [{key: value[row] for key, value in lists.items()} for row in range(expected)]
        for row in rows:
            if not any(exact(row) == exact(known) for known in common):
                common.append(row)
        if dialect.group_per_parameter:
            for fqn, row in zip(stages[pp], rows, strict=True):
                places.setdefault(fqn, path)
                if exact(entries.setdefault(fqn, row)) != exact(row):
                    problems.append(ContradictionError("entry differs from another rank's", path=path, key=fqn))
    raise_all(problems)
    leftovers = tuple(path for path in map(Path, list_folder(root / "lr_scheduler")) if path not in files)
    return Scheduler(template or {}, entries, common[0] if len(common) == 1 else None, files, places, leftovers)


def _read_state(path: Path) -> tuple[dict[str, Any], Identity]:
    if not path.exists():
        raise MissingSourceError("lr_scheduler file is missing", path=path, hint="copy it from the original run")
    identity = identify(path)
    state = read_torch_file(path).root
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise ContradictionError("is not an lr_scheduler state", path=path)
    for key, value in state.items():
        if isinstance(value, StoredTensor) or (key in _PER_GROUP) != isinstance(value, list):
            raise ContradictionError(
                f"{key} is a {type(value).__name__}: not an lr_scheduler that nanotron writes", path=path
            )
    return state, identity
