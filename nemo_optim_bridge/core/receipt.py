"""A record of what was carried, written beside the output, that can be checked against a checkpoint later.

The schema is documented in docs/receipt.md; ``SCHEMA`` changes whenever a field changes its meaning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nemo_optim_bridge.core.checkpoint import Checkpoint, has_long_int
from nemo_optim_bridge.core.fingerprint import HYPERPARAMETERS, canonical
from nemo_optim_bridge.core.store import identify
from nemo_optim_bridge.core.survey import Survey
from nemo_optim_bridge.errors import CorruptFileError, MissingSourceError, unreadable
from nemo_optim_bridge.version import __version__

SCHEMA = 1
FILE_NAME = "nemo_optim_bridge.receipt.json"
#: Sums are added up in float32 within a block, in float64 across blocks; another numpy may order them differently.
SUM_TOLERANCE = 1e-5
_COPY = "copy the receipt again, or write a new one with a new run"
_SUMMED = {"exp_avg", "exp_avg_sq"}


def make_receipt(
    source: Checkpoint, surveyed: Survey, *, target: Mapping[str, Any], vocab_size: int | None, replicas: int | None,
    remarks: list[str],
) -> dict[str, Any]:  # fmt: skip
    """Return the receipt of a checkpoint that was carried whole.

    Args:
        target: framework, layout and topology of what is written.
        replicas: copies that were compared with the one that was read; None where the user chose not to.
        remarks: everything inferred, defaulted, dropped, cut, zero-filled or rebuilt.
    """
    if surveyed.fingerprint is None:
        raise ValueError("a receipt needs digests")
    prints = surveyed.fingerprint.to_json()
    files = _sources(source)
    tensors: dict[str, Any] = {}
    for spec in source.manifest.tensors:
        entry: dict[str, Any] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "digest": prints["tensors"][str(spec.key)],
            "elements_covered": int(np.prod(spec.shape, dtype=np.int64)),
            "sources": files[str(spec.key)],
        }
        scan = surveyed.scans.get(spec.key)
        if scan is not None:
            entry["num_nonfinite"] = scan.num_nonfinite
            if spec.key.state in _SUMMED:
                entry["sum_abs"] = scan.sum_abs
        tensors[str(spec.key)] = entry
    return {
        "schema": SCHEMA,
        "tool": f"nemo_optim_bridge {__version__}",
        "source": describe(source),
        "target": dict(target),
        "tensors_digest": prints["tensors_digest"],
        "hyperparameters_digest": prints["hyperparameters_digest"],
        "weights_digest": prints["weights_digest"],
        "sum_relative_tolerance": SUM_TOLERANCE,
        "vocab_size": vocab_size,
        "no_decay": None if source.no_decay is None else list(source.no_decay),
        "steps": sorted({values["step"] for values in source.scalars.values() if values.get("step") is not None}),
        "param_groups": _groups(source.scalars),
        "tensors": tensors,
        "scalars": {fqn: _plain(values) for fqn, values in source.scalars.items()},
        "replicas_compared": replicas,
        "findings": [finding.to_json() for finding in surveyed.findings],
        "remarks": remarks,
    }


def _groups(scalars: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parameters that share all hyperparameters, as groups in order of first appearance."""
    groups: dict[str, dict[str, Any]] = {}
    for fqn, values in scalars.items():
        shared = {key: value for key, value in _plain(values).items() if key != "step"}
        group = groups.setdefault(repr(sorted(shared.items())), {"hyperparameters": shared, "fqns": []})
        group["fqns"].append(fqn)
    return list(groups.values())


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint's format and topology."""
    return {
        "path": str(checkpoint.path),
        "framework": checkpoint.framework,
        "layout": checkpoint.layout,
        "topology": dict(checkpoint.topology),
    }


def _sources(source: Checkpoint) -> dict[str, list[str]]:
    """Return the files that hold each tensor, relative to the checkpoint where they lie in it."""
    table, buffers = source.manifest.shards, source.manifest.buffers
    names = [_relative(file, source.path) for file in buffers.files]
    found: dict[str, set[str]] = {str(spec.key): set() for spec in source.manifest.tensors}
    keys = list(found)
    for tensor, file in zip(table.tensor.tolist(), buffers.file[table.buffer].tolist(), strict=True):
        found[keys[tensor]].add(names[file])
    return {key: sorted(files) for key, files in found.items()}


def _relative(file: str, root: Path) -> str:
    path = Path(file)
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else file


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not key.startswith("lr_scheduler.")}


def _integer(text: str) -> int:
    value = int(text)
    if has_long_int(value):
        raise ValueError(f"{text[:40]} is no size, count or step")
    return value


def encode(receipt: Mapping[str, Any]) -> bytes:
    """Return a receipt as it is written to a file."""
    return json.dumps(receipt, indent=1).encode() + b"\n"


def read_receipt(path: Path) -> dict[str, Any]:
    """Read a receipt; raises MissingSourceError or CorruptFileError."""
    try:
        identify(path)
        receipt = json.loads(path.read_text(encoding="utf-8"), parse_int=_integer)
    except MissingSourceError as error:
        raise MissingSourceError(
            "there is no such receipt", path=path, hint=f"give the path of a {FILE_NAME}"
        ) from error  # fmt: skip
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"cannot be read as a receipt: {error}", path=path, hint=_COPY) from error
    if not isinstance(receipt, dict) or receipt.get("schema") != SCHEMA:
        schema = receipt.get("schema") if isinstance(receipt, dict) else None
        raise CorruptFileError(
            f"is a receipt of schema {schema!r}, not {SCHEMA}", path=path, hint="use the version that wrote it"
        )
    fields: dict[str, type | tuple[type, ...]] = {
        "tensors": dict,
        "scalars": dict,
        "tensors_digest": str,
        "vocab_size": (int, type(None)),
        "no_decay": (list, type(None)),
    }
    for name, kind in fields.items():
        if not isinstance(receipt.get(name), kind):
            raise CorruptFileError(f"field {name} of the receipt is missing or malformed", path=path, hint=_COPY)
    if not all(isinstance(fqn, str) for fqn in receipt["no_decay"] or ()):
        raise CorruptFileError("no_decay of the receipt is malformed", path=path, hint=_COPY)
    if not all(isinstance(entry, dict) for table in ("tensors", "scalars") for entry in receipt[table].values()):
        raise CorruptFileError("a tensor or scalar entry of the receipt is malformed", path=path, hint=_COPY)
    steps = [entry.get("step") for entry in receipt["scalars"].values()]
    if not all(step is None or (isinstance(step, int | float) and math.isfinite(step)) for step in steps):
        raise CorruptFileError("a step of the receipt is no number", path=path, hint=_COPY)
    return receipt


def check_receipt(receipt: Mapping[str, Any], checkpoint: Checkpoint, surveyed: Survey) -> Iterator[str]:
    """Yield in words how a surveyed checkpoint differs from what a receipt says."""
    if surveyed.fingerprint is None:
        raise ValueError("checking a receipt needs digests")
    digests = {str(key): digest for key, digest in surveyed.fingerprint.tensors.items()}
    for key in sorted({*digests, *receipt["tensors"]}):
        entry = receipt["tensors"].get(key)
        if entry is None or key not in digests:
            yield f"{key}: only in the {'checkpoint' if entry is None else 'receipt'}"
        elif entry.get("digest") != digests[key]:
            yield f"{key}: the digest is {digests[key]}, the receipt says {entry.get('digest')}"
    for spec_key, scan in surveyed.scans.items():
        said = receipt["tensors"].get(str(spec_key), {}).get("sum_abs")
        if isinstance(said, int | float) and abs(said - scan.sum_abs) > SUM_TOLERANCE * max(abs(said), scan.sum_abs):
            yield f"{spec_key}: the sum of magnitudes is {scan.sum_abs!r}, the receipt says {said!r}"
    for fqn in sorted({*checkpoint.scalars, *receipt["scalars"]}):
        ours, said = (table.get(fqn, {}) for table in (checkpoint.scalars, receipt["scalars"]))
        if canonical(ours) != canonical(said):
            yield f"{fqn}: step and hyperparameters are {canonical(ours)}, the receipt says {canonical(said)}"
        for name in sorted({*ours, *said} - {"step", *HYPERPARAMETERS}):  # an option that only one dialect writes
            if name in ours and name in said and json.dumps(ours[name]) != json.dumps(said[name]):
                yield f"{fqn}: {name} is {ours[name]!r}, the receipt says {said[name]!r}"
