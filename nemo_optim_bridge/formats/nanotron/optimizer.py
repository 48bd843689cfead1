"""One rank's optimizer file: its states, masters and param groups by parameter name."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nemo_optim_bridge.core.checkpoint import LARGEST_STEP, MASTER, WEIGHT, has_long_int
from nemo_optim_bridge.core.manifest import ITEMSIZE, Identity, IntArray
from nemo_optim_bridge.core.store import identify
from nemo_optim_bridge.errors import BridgeError, ContradictionError, CorruptFileError, raise_all, unreadable
from nemo_optim_bridge.formats.nanotron.names import is_fqn, parse_rank_name
from nemo_optim_bridge.formats.topology import Coordinates
from nemo_optim_bridge.formats.torch_zip import StoredTensor, TorchFile, Window, read_torch_file


class Scalar(NamedTuple):
    """A state that is one number for the whole parameter, such as ``step``; ``dtype`` None is a Python number."""

    dtype: str | None
    shape: tuple[int, ...]
    data: bytes
    value: float


def remembered(function: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return ``function`` with a memory by identity, for values that many share and that are not freed meanwhile."""
    known: dict[int, object] = {}

    def once(value: Any) -> object:
        if id(value) not in known:
            known[id(value)] = function(value)
        return known[id(value)]

    return once


def exact(value: Any) -> object:
    """Return a hyperparameter so that equal means the same bits: types, the sign of zero and NaN count."""
    if isinstance(value, Mapping):
        return tuple((key, exact(item)) for key, item in sorted(value.items()))
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(map(exact, value))
    return type(value).__name__, value.hex() if isinstance(value, float) else value


class Form(NamedTuple):
    """How a tensor is stored; ``stride`` in elements."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerShard:
    """What one rank saved. ``fqns`` are its parameters in the order of nanotron's integer ids.

    Parameter ``i`` has the states ``kinds[kind[i]]`` (the dtype of a tensor, or a scalar with its value) and the
    hyperparameters ``groups[group[i]]``. Its tensors are entries of the columns ``form`` (which of ``forms``),
    ``offset`` (bytes, of the first element in the file) and ``nbytes`` (from there to the end of the record): states in
    the order of its kind, the fp32 master last. ``masters`` lists who has one; None when the file keeps none.
    """

    path: Path
    at: Coordinates
    fqns: tuple[str, ...]
    kinds: tuple[Mapping[str, str | Scalar], ...]
    kind: IntArray
    groups: tuple[Mapping[str, Any], ...]
    group: IntArray
    masters: tuple[str, ...] | None
    forms: tuple[Form, ...]
    form: IntArray
    offset: IntArray
    nbytes: IntArray
    num_groups: int
    largest_group: int
    identity: Identity


def read_optimizer_shard(path: Path, at: Coordinates) -> OptimizerShard:
    """Read the directory and the pickle of one optimizer file, no tensor data but scalars.

    Raises CorruptFileError or ContradictionError that names the file.
    """
    identity = identify(path)
    try:
        opened = path.open("rb", buffering=0)
    except OSError as error:
        raise unreadable(path, error) from error
    with opened:
        return _Reader(path, at, opened.fileno()).shard(identity)


class _Reader:
    """Reads one open optimizer file into columns; what repeats from parameter to parameter is kept once."""

    def __init__(self, path: Path, at: Coordinates, fd: int) -> None:
        self._path, self._at = path, at
        self._file = read_torch_file(path, fd=fd)
        self._window = Window.of(str(path), None, fd)
        self._kinds: dict[object, tuple[int, Mapping[str, str | Scalar]]] = {}
        self._scalars: dict[object, Scalar] = {}
        self._forms: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
        self._entries = array("q")  # form, offset, nbytes of each tensor

    def shard(self, identity: Identity) -> OptimizerShard:
        """Return what the file says."""
        path, root = self._path, self._file.root
        _check_folder(self._file, path, self._at)
        if not isinstance(root, dict) or not isinstance(root.get("state"), dict):
            raise CorruptFileError("holds no optimizer state", path=path, hint="is this a nanotron optimizer file?")
        unknown = sorted(str(key) for key in set(root) - {"state", "param_groups", "names", "gradient_accumulator"})
        if unknown:
            raise CorruptFileError(f"has unknown entries {', '.join(unknown)}", path=path)
        masters = _masters(root, path)
        names = _names(root, masters, path)
        for number, entries in root["state"].items():
            if not isinstance(entries, dict):
                raise ContradictionError(f"state {number!r} has no entries", path=path)
        groups = root["param_groups"]
        hyperparameters = _groups(groups, names, path)
        numbers = sorted(names)
        if list(names) != numbers:
            raise ContradictionError("parameter numbers are not in order", path=path)
        order = tuple(names.values())
        self._check_order(order, masters)
        kind = [self._read(names[number], root["state"].get(number, {}), masters or {}) for number in numbers]
        distinct: dict[object, tuple[int, Mapping[str, Any]]] = {}
        exact_once = remembered(exact)
        group = [distinct.setdefault(exact_once(hyperparameters[fqn]), (len(distinct), hyperparameters[fqn]))[0]
                 for fqn in order]  # fmt: skip
        form, offset, nbytes = np.array(self._entries, np.int64).reshape(-1, 3).T.copy()
        return OptimizerShard(
            path, self._at, order, tuple(found for _, found in self._kinds.values()), np.array(kind, np.int64),
            tuple(found for _, found in distinct.values()), np.array(group, np.int64),
            None if masters is None else order if order == tuple(masters) else tuple(masters),
            tuple(Form(*known) for known in self._forms), form, offset, nbytes, len(groups),
            max((len(group["params"]) for group in groups), default=0), identity,
        )  # fmt: skip

    def _check_order(self, order: tuple[str, ...], masters: Mapping[str, StoredTensor] | None) -> None:
        named = set(order)
        if masters is not None and [fqn for fqn in masters if fqn in named] != [fqn for fqn in order if fqn in masters]:
            raise ContradictionError(
                "names and gradient_accumulator list the parameters differently", path=self._path,
                hint="one of them was edited or mixed up: copy the file again from the original run",
            )  # fmt: skip

    def _read(self, fqn: str, entries: Mapping[Any, object], masters: Mapping[str, StoredTensor]) -> int:
        """Enter the tensors of one parameter; return the number of its kind."""
        kind: dict[str, str | Scalar] = {}
        known: list[object] = []
        for key, value in entries.items():
            if not isinstance(key, str) or key in (MASTER, WEIGHT):
                raise ContradictionError(f"{key!r} cannot be the name of an optimizer state", path=self._path, key=fqn)
            if key == "step" or not isinstance(value, StoredTensor):
                kind[key] = scalar = self._scalar(value, fqn, key)
                known += key, id(scalar)
            else:
                kind[key] = value.dtype
                known += key, value.dtype
                self._enter(value)
        if fqn in masters:
            self._enter(masters[fqn])
        return self._kinds.setdefault(tuple(known), (len(self._kinds), kind))[0]

    def _enter(self, stored: StoredTensor) -> None:
        start = stored.storage_offset * ITEMSIZE[stored.dtype]
        form = self._forms.setdefault((stored.dtype, stored.shape, stored.stride), len(self._forms))
        self._entries.extend((form, stored.record.offset + start, stored.record.nbytes - start))

    def _scalar(self, value: object, fqn: str, key: str) -> Scalar:
        """Return a state that is one number, the same object for those that are the same to the bit."""
        if isinstance(value, StoredTensor):
            if value.shape not in ((), (1,)) or value.dtype not in ("float32", "float64", "int64", "int32"):
                raise self._contradiction(f"{key} has dtype {value.dtype} and shape {value.shape}, not one number", fqn)
            itemsize = ITEMSIZE[value.dtype]
            data = self._window.read_exactly(value.record.offset + value.storage_offset * itemsize, itemsize)
            known: object = (key, value.dtype, value.shape, data)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            known = (key, repr(value))
        else:
            raise self._contradiction(f"{key} is a {type(value).__name__}, not a number", fqn)
        scalar = self._scalars.get(known)
        if scalar is None:
            if isinstance(value, StoredTensor):
                scalar = Scalar(value.dtype, value.shape, data, float(np.frombuffer(data, value.dtype)[0]))
            else:
                scalar = Scalar(None, (), b"", value)
            if has_long_int(scalar.value):
                raise self._contradiction(f"{key} is an int of more than 64 bits", fqn)
            if key == "step" and not (0 <= scalar.value <= LARGEST_STEP and float(scalar.value).is_integer()):
                raise self._contradiction(f"step is {scalar.value}, not a whole number from 0 to 2**53", fqn)
            self._scalars[known] = scalar
        return scalar

    def _contradiction(self, problem: str, fqn: str) -> ContradictionError:
        return ContradictionError(problem, path=self._path, key=fqn)


def _check_folder(file: TorchFile, path: Path, at: Coordinates) -> None:
    """Raise when the archive's own folder, which keeps the name it was saved under, belongs to another rank."""
    saved = parse_rank_name("optimizer", f"{file.folder}.pt")
    named = parse_rank_name("optimizer", path.name)
    if saved is None or named is None:
        return
    axes = [(saved.pp, named.pp), (saved.tp, named.tp), (saved.dp, named.dp), (saved.ep, named.ep)]
    if any(a is not None and b is not None and a != b for a, b in axes):
        raise ContradictionError(
            f"was saved as {file.folder}.pt: this is another rank's file", path=path, rank=str(at),
            hint="files were swapped or renamed: give each its own name back",
        )  # fmt: skip


def _masters(root: Mapping[str, Any], path: Path) -> dict[str, StoredTensor] | None:
    """Return the fp32 master weights: nanotron files them as ``gradient_accumulator``."""
    masters = root.get("gradient_accumulator")
    if masters is None:
        return None
    if not isinstance(masters, dict) or not all(
        isinstance(fqn, str) and isinstance(value, StoredTensor) for fqn, value in masters.items()
    ):
        raise ContradictionError("gradient_accumulator is not a mapping of names to tensors", path=path)
    return masters


def _names(root: Mapping[str, Any], masters: Mapping[str, object] | None, path: Path) -> dict[int, str]:
    """Return the parameter of every integer id.

    Ids are local to the file. ``names`` lists only parameters that have state: none before the first step, when the
    masters, which are in the same order, name them.
    """
    names = root.get("names")
    if not isinstance(names, dict):
        raise CorruptFileError("has no parameter names", path=path, hint="nanotron before v0.1 is not supported")
    nameless = [number for number in root["state"] if number not in names]
    if nameless:
        raise ContradictionError(
            f"state {nameless[0]!r} has no name ({len(nameless)} have none)", path=path,
            hint="names was edited or cut: copy the file again from the original run",
        )  # fmt: skip
    groups = root.get("param_groups")
    ids = sorted(_group_ids(groups, path))
    if masters is not None and set(ids) - set(names) and len(masters) == len(ids):
        inferred = dict(zip(ids, masters, strict=True))
        if any(inferred.get(number) != fqn for number, fqn in names.items()):
            raise ContradictionError("names and gradient_accumulator list the parameters differently", path=path)
        names = inferred
    problems: list[BridgeError] = []
    for number, fqn in names.items():
        if not isinstance(number, int) or isinstance(number, bool) or not isinstance(fqn, str) or not is_fqn(fqn):
            problems.append(ContradictionError(f"{fqn!r} is not a parameter name", path=path))
    raise_all(problems)
    if len(set(names.values())) != len(names):
        raise ContradictionError("a parameter is named twice", path=path)
    unnamed = [number for number in ids if number not in names]
    if unnamed:
        raise ContradictionError(
            f"{len(unnamed)} parameters of the param groups have no state and no name",
            path=path,
            hint="a checkpoint saved before the first optimizer step has nothing to re-shard: start from its weights",
        )
    return names


def _group_ids(groups: object, path: Path) -> Iterator[int]:
    if not isinstance(groups, list):
        raise CorruptFileError("has no param_groups", path=path)
    for group in groups:
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, list) or not all(type(number) is int for number in params):
            raise CorruptFileError("a param group lists no parameters", path=path)
        yield from params


def _groups(groups: Any, names: Mapping[int, str], path: Path) -> dict[str, Mapping[str, Any]]:
    """Return each parameter's hyperparameters, in the group's own key order."""
    by_fqn: dict[str, Mapping[str, Any]] = {}
    for group in groups:
        hyperparameters = {key: value for key, value in group.items() if key != "params"}
        for key, value in hyperparameters.items():
            if not isinstance(key, str) or not _is_plain(value):
                raise ContradictionError(
                    f"hyperparameter {key!r} is a {type(value).__name__}, not a plain number", path=path,
                    hint="checkpoints of optimizers with tensor hyperparameters are not supported",
                )  # fmt: skip
            if has_long_int(value):
                raise ContradictionError(f"hyperparameter {key!r} has an int of more than 64 bits", path=path)
        for number in group["params"]:
            fqn = names[number]
            if fqn in by_fqn:
                raise ContradictionError("parameter is in two param groups", path=path, key=fqn)
            by_fqn[fqn] = hyperparameters
    for fqn in names.values():
        if fqn not in by_fqn:
            raise ContradictionError("parameter is in no param group", path=path, key=fqn)
    listed = list(_group_ids(groups, path))
    if listed != sorted(listed):  # torch and the lr scheduler's lists go by place, names and states by number
        raise ContradictionError(
            "the param groups list the parameters in another order than their numbers", path=path,
            hint="torch numbers them in the order of the groups: copy the file again from the original run",
        )  # fmt: skip
    return by_fqn


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
