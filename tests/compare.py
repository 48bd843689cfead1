"""Compare a written nanotron checkpoint with the one that nanotron itself saved, file by file and bit by bit.

Knows nothing of the package under test: it reads with torch and safetensors, as nanotron does.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

PARTS = ("model", "optimizer", "lr_scheduler")
VOCABULARY = re.compile(r"(?:^|[./])(?:token_embedding|lm_head[./]pp_block)[./](?:weight|model_weight)")
STAGE_TABLES = ("param_name_to_dp_rank_offsets", "orig_param_shapes")


def compare_checkpoints(
    expected_dir: Path,
    got_dir: Path,
    *,
    hybrid_names: bool = False,
    vocab_size: int | None = None,
    all_stages: bool = True,
) -> list[str]:
    """List every difference of ``model/``, ``optimizer/`` and ``lr_scheduler/``; an empty list means equal.

    Compared: file names, keys in order, types, dtypes, shapes, shard metadata as mappings, tensors bit for bit, scalars
    exactly.

    Args:
        expected_dir: the checkpoint that nanotron saved.
        got_dir: the checkpoint to judge.
        hybrid_names: upgrade the expected file names to the spelling that is written today.
        vocab_size: the true vocabulary, in rows; rows beyond it may be zero where the expected ones are not.
        all_stages: let ``optimizer_config.json`` list the parameters of every pipeline stage; nanotron lists the
            first's.
    """
    differences: list[str] = []
    for part in PARTS:
        expected = _files(expected_dir, part, upgrade=hybrid_names)
        got = _files(got_dir, part, upgrade=False)
        differences += [f"{name}: missing" for name in expected if name not in got]
        differences += [f"{name}: unexpected" for name in got if name not in expected]
        for name in expected.keys() & got.keys():
            want, have = _load(expected[name]), _load(got[name])
            if vocab_size is not None:
                _forgive_padding(name, want, have, vocab_size)
            if name.endswith("optimizer_config.json") and all_stages:
                _forgive_later_stages(want, have)
            differences += [f"{name}: {problem}" for problem in differ(want, have)]
    return sorted(differences)


def upgrade_name(name: str) -> str:
    """Return a relative file name in today's spelling: ``_exp-`` in optimizer files, ``model_`` not doubled.

    >>> upgrade_name("optimizer/optimizer_pp-0-of-1_tp-0-of-2.pt")
    'optimizer/optimizer_pp-0-of-1_tp-0-of-2_exp-0-of-1.pt'
    >>> upgrade_name("model/a/model_model_weight.safetensors_pp-rank-0-of-1_tp-rank-0-of-1.safetensors")
    'model/a/model_weight_pp-rank-0-of-1_tp-rank-0-of-1.safetensors'
    """
    name = re.sub(r"(/optimizer_pp-[^/]*_tp-\d+-of-\d+)\.pt$", r"\1_exp-0-of-1.pt", name)
    return re.sub(r"/model_(model_[^/]+?)\.safetensors(_pp-rank-[^/]+\.safetensors)$", r"/\1\2", name)


def differ(expected: Any, got: Any, where: str = "") -> list[str]:
    """List the differences of two nested values; exact in type, order and bits."""
    if type(expected) is not type(got):
        return [f"{where or 'value'}: {type(got).__name__} instead of {type(expected).__name__}"]
    if isinstance(expected, dict):
        return _differ_in_keys(expected, got, where) + [
            problem
            for key in expected
            if key in got
            for problem in differ(expected[key], got[key], f"{where}/{key}" if where else str(key))
        ]
    if isinstance(expected, list | tuple):
        if len(expected) != len(got):
            return [f"{where}: {len(got)} entries instead of {len(expected)}"]
        pairs = enumerate(zip(expected, got, strict=True))
        return [problem for i, (a, b) in pairs for problem in differ(a, b, f"{where}[{i}]")]
    if isinstance(expected, torch.Tensor):
        return _differ_in_tensor(expected, got, where)
    same = repr(expected) == repr(got) if isinstance(expected, float) else expected == got
    return [] if same else [f"{where}: {got!r} instead of {expected!r}"]


def _differ_in_keys(expected: dict[Any, Any], got: dict[Any, Any], where: str) -> list[str]:
    want = [(type(key).__name__, key) for key in expected]
    have = [(type(key).__name__, key) for key in got]
    if want == have:
        return []
    missing = [key for key in want if key not in have]
    extra = [key for key in have if key not in want]
    if not missing and not extra:
        return [f"{where or 'top level'}: keys in another order: {[k for _, k in have]} not {[k for _, k in want]}"]
    return [f"{where or 'top level'}: missing keys {missing}, unexpected keys {extra}"]


def _differ_in_tensor(expected: torch.Tensor, got: torch.Tensor, where: str) -> list[str]:
    if expected.dtype != got.dtype or expected.shape != got.shape:
        return [f"{where}: {got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"]
    unequal = (_bytes(expected) != _bytes(got)).any(dim=1)
    if not unequal.any():
        return []
    first = int(unequal.nonzero()[0])
    a, b = expected.reshape(-1)[first].item(), got.reshape(-1)[first].item()
    return [f"{where}: {int(unequal.sum())} of {unequal.numel()} elements; element {first} is {b!r} instead of {a!r}"]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1).contiguous()
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _files(root: Path, part: str, *, upgrade: bool) -> dict[str, Path]:
    paths = {path.relative_to(root).as_posix(): path for path in sorted((root / part).rglob("*")) if path.is_file()}
    return {upgrade_name(name) if upgrade else name: path for name, path in paths.items()}


def _load(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.suffix == ".pt":
        return torch.load(path, map_location="cpu", weights_only=True)
    with safe_open(path, framework="pt") as shard:
        metadata = dict(sorted((shard.metadata() or {}).items()))
        if "unsharded_shape" in metadata:  # numpy 2 spells it (np.int64(64), 32)
            metadata["unsharded_shape"] = re.sub(r"np\.int64\((\d+)\)", r"\1", metadata["unsharded_shape"])
        return {"metadata": metadata, "tensors": {key: shard.get_tensor(key) for key in list(shard.keys())}}


def _forgive_padding(name: str, expected: Any, got: Any, vocab_size: int) -> None:
    """Where vocabulary rows beyond ``vocab_size`` are all zero in ``got``, expect zeros there."""
    rank = re.search(r"_tp-(?:rank-)?(\d+)-of-", name)
    if rank is None or not isinstance(expected, dict) or not isinstance(got, dict):
        return
    for want, have in _vocabulary_tensors(name, expected, got):
        if want.shape == have.shape and want.dim() == 2:
            first = max(0, vocab_size - int(rank[1]) * want.shape[0])
            if not have[first:].count_nonzero():
                want.detach()[first:] = 0


def _vocabulary_tensors(name: str, expected: Any, got: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if "tensors" in expected:
        pairs = [(expected["tensors"], got["tensors"])] if VOCABULARY.search(name) else []
    elif "names" in expected:
        ints = [i for i, fqn in expected["names"].items() if VOCABULARY.search(fqn)]
        pairs = [(expected["state"].get(i, {}), got.get("state", {}).get(i, {})) for i in ints]
        masters, have = expected.get("gradient_accumulator", {}), got.get("gradient_accumulator", {})
        pairs.append(({fqn: value for fqn, value in masters.items() if VOCABULARY.search(fqn)}, have))
    else:
        pairs = []
    return [
        (want[key], have[key])
        for want, have in pairs
        for key in want
        if isinstance(want[key], torch.Tensor) and isinstance(have.get(key), torch.Tensor)
    ]


def _forgive_later_stages(expected: Any, got: Any) -> None:
    """Drop from ``got`` the parameters of stages that nanotron's world rank 0 does not know."""
    if expected.get("parallelism", {}).get("pp_size") == "1":
        return
    for table in STAGE_TABLES:
        want, have = expected.get("configs", {}).get(table), got.get("configs", {}).get(table)
        if isinstance(want, dict) and isinstance(have, dict):
            got["configs"][table] = {name: value for name, value in have.items() if name in want}
