"""Damaged, contradictory and malicious checkpoints: one clear typed error, no output, the source untouched."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_optim_bridge.core.write import Segment, SegmentWriter
from nemo_optim_bridge.errors import SourceChangedError
from nemo_optim_bridge.formats.nanotron.reshard import Options, plan_reshard
from tests.compare import compare_checkpoints
from tests.edits import (
    cut_short,
    edit_json,
    edit_pt,
    edit_shard,
    fingerprint,
    replace_shard,
    replace_text,
)
from tests.nanotron.pair_table import run_cli

TP2 = "nt04-llama_tied-z0-tp2-pp1-dp1-ep1"
ZERO = "nt04-llama_tied-z1-tp2-pp2-dp2-ep1"
HEAD = "head-llama_tied-z0-tp2-pp2-dp1-ep1"
MOE = "moe-moe_e8-z0-tp1-pp1-dp1-ep2"
LOST = "moe-moe_e4-z0-tp1-pp1-dp1-ep4"

OPTIMIZER = "optimizer/optimizer_pp-0-of-1_tp-1-of-2_exp-0-of-1.pt"
OPTIMIZER_0 = OPTIMIZER.replace("tp-1", "tp-0")
ZERO_OPTIMIZER = "optimizer/optimizer_pp-1-of-2_dp-1-of-2_tp-0-of-2_exp-0-of-1.pt"
HEAD_OPTIMIZER = "optimizer/optimizer_pp-1-of-2_tp-1-of-2_exp-0-of-1.pt"
SCHEDULER = "lr_scheduler/lr_scheduler.pt"
HEAD_SCHEDULER = "lr_scheduler/lr_scheduler_pp-1-of-2_tp-1-of-2_exp-0-of-1.pt"
CONFIG = "optimizer/optimizer_config.json"
O_PROJ = "model.decoder.0.pp_block.attn.o_proj.weight"
QKV = "model.decoder.0.pp_block.attn.qkv_proj.weight"
NORM = "model.decoder.0.pp_block.input_layernorm.weight"
EMBEDDING = "model.token_position_embeddings.pp_block.token_embedding.weight"


def shard(fqn: str, tp: int, *, tps: int = 2, pp: str = "0-of-1") -> str:
    """Return the path of a sharded parameter's weight file."""
    *folders, last = fqn.split(".")
    return "/".join(["model", *folders, f"model_{last}_pp-rank-{pp}_tp-rank-{tp}-of-{tps}.safetensors"])


WHOLE = "model/model/decoder/0/pp_block/input_layernorm/model_weight.safetensors"
Edit = Callable[[Path], object]
Real = Callable[[str], Path]
Refuse = Callable[..., str]


def remove(path: str) -> Edit:
    return lambda root: (root / path).unlink()


def cut(path: str, num_bytes: int = 1) -> Edit:
    return lambda root: cut_short(root / path, num_bytes)


def write(path: str, content: bytes) -> Edit:
    return lambda root: (root / path).write_bytes(content)


def in_pt(path: str, change: Callable[[Any], object]) -> Edit:
    return lambda root: edit_pt(root / path, change)


def in_json(path: str, change: Callable[[Any], object]) -> Edit:
    return lambda root: edit_json(root / path, change)


def in_text(path: str, old: str, new: str) -> Edit:
    return lambda root: replace_text(root / path, old, new)


def metadata(path: str, **values: str) -> Edit:
    return lambda root: edit_shard(root / path, **values)


def reshaped(path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return lambda root: replace_shard(root / path, change)


def number_of(content: Any, fqn: str) -> int:
    return next(number for number, name in content["names"].items() if name == fqn)


def without(fqn: str) -> Callable[[Any], None]:
    """Return an edit that takes a parameter out of an optimizer file altogether."""

    def change(content: Any) -> None:
        number = number_of(content, fqn)
        del content["state"][number], content["names"][number], content["gradient_accumulator"][fqn]
        for group in content["param_groups"]:
            group["params"] = [n for n in group["params"] if n != number]

    return change


def state(fqn: str, key: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return an edit that replaces one state of a parameter."""

    def apply(content: Any) -> None:
        entries = content["state"][number_of(content, fqn)]
        entries[key] = change(entries[key])

    return apply


def master(fqn: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def apply(content: Any) -> None:
        masters = content["gradient_accumulator"]
        masters[fqn] = change(masters[fqn].detach())

    return apply


def group(**values: Any) -> Callable[[Any], None]:
    return lambda content: content["param_groups"][0].update(values)


def rename(old: str, new: str) -> Callable[[Any], None]:
    """Return an edit that renames a parameter in an optimizer file."""

    def apply(content: Any) -> None:
        content["names"] = {number: new if name == old else name for number, name in content["names"].items()}
        content["gradient_accumulator"] = {
            new if name == old else name: value for name, value in content["gradient_accumulator"].items()
        }

    return apply


def ranges(change: Callable[[dict[str, Any]], object]) -> Edit:
    return in_json(CONFIG, lambda config: change(config["configs"]))


def claim_ranks(**sizes: int) -> Edit:
    """Return an edit that states absurd sizes in every document, without contradiction."""

    def change(root: Path) -> None:
        edit_json(root / CONFIG, lambda c: c["parallelism"].update({f"{axis}_size": n for axis, n in sizes.items()}))
        edit_json(root / "checkpoint_metadata.json", lambda m: m.update({a: n for a, n in sizes.items() if a in m}))
        for axis, size in sizes.items():
            old = 2 if axis == "tp" else 1
            replace_text(root / "config.yaml", f"  {axis}: {old}\n", f"  {axis}: {size}\n")

    return change


#: 10**12 elements when written out, by aliases.
BOMB = "[&b0 [x], " + ", ".join(f"&b{i} [" + ", ".join([f"*b{i - 1}"] * 10) + "]" for i in range(1, 12)) + "]"

MISSING, CORRUPT, CONTRADICTION, UNKNOWN = (
    "MissingSourceError", "CorruptFileError", "ContradictionError", "UnknownFormatError",
)  # fmt: skip

#: What is damaged, how, the error's type, and what its message must name.
DAMAGES: dict[str, tuple[str, Edit, str, tuple[str, ...]]] = {
    # missing
    "optimizer file missing": (TP2, remove(OPTIMIZER), MISSING, (OPTIMIZER, "tp 1", "optimizer file is missing")),
    "ZeRO-1 file missing": (ZERO, remove(ZERO_OPTIMIZER), MISSING, (ZERO_OPTIMIZER, "pp 1 dp 1 tp 0")),
    "sharded weight missing": (TP2, remove(shard(QKV, 1)), MISSING, (shard(QKV, 1), QKV, "tp 1")),
    "first weight missing": (TP2, remove(shard(QKV, 0)), MISSING, (shard(QKV, 0), QKV, "tp 0")),
    "both weights missing": (
        TP2,
        lambda root: [(root / shard(QKV, tp)).unlink() for tp in (0, 1)],
        MISSING,
        (QKV, "without a weight shard"),
    ),
    "whole weight missing": (TP2, remove(WHOLE), MISSING, (NORM, "without a weight shard")),
    "expert weight missing": (
        MOE,
        lambda root: next((root / "model").rglob("*exp-rank-1-of-2.safetensors")).unlink(),
        MISSING,
        ("exp-rank-1-of-2", "ep 1", "weight shard is missing"),
    ),
    "scheduler missing": (TP2, remove(SCHEDULER), MISSING, (SCHEDULER,)),
    "scheduler of one rank missing": (HEAD, remove(HEAD_SCHEDULER), MISSING, (HEAD_SCHEDULER,)),
    "no optimizer files": (
        TP2,
        lambda root: [(root / path).unlink() for path in (OPTIMIZER, OPTIMIZER_0)],
        MISSING,
        (OPTIMIZER, OPTIMIZER_0, "2 problems"),
    ),
    "no optimizer folder": (TP2, lambda root: shutil.rmtree(root / "optimizer"), MISSING, (CONFIG,)),
    "no optimizer config": (TP2, remove(CONFIG), MISSING, (CONFIG,)),
    "no config": (TP2, remove("config.yaml"), MISSING, ("config.yaml",)),
    "no metadata": (TP2, remove("checkpoint_metadata.json"), MISSING, ("checkpoint_metadata.json",)),
    "no model config": (TP2, remove("model_config.json"), UNKNOWN, ("is not a nanotron checkpoint",)),
    "no model folder": (TP2, lambda root: shutil.rmtree(root / "model"), UNKNOWN, ("is not a nanotron checkpoint",)),
    "parameter missing from one rank": (TP2, in_pt(OPTIMIZER, without(QKV)), MISSING, (OPTIMIZER, QKV, "tp 1")),
    "parameter missing from the first rank": (TP2, in_pt(OPTIMIZER_0, without(QKV)), CONTRADICTION, (OPTIMIZER, QKV)),
    "parameter missing from one dp rank": (
        ZERO,
        in_pt(ZERO_OPTIMIZER, without("model.final_layer_norm.pp_block.weight")),
        MISSING,
        (ZERO_OPTIMIZER, "model.final_layer_norm.pp_block.weight", "dp 1"),
    ),
    "master missing": (
        TP2,
        in_pt(OPTIMIZER, lambda c: c["gradient_accumulator"].pop(QKV)),
        MISSING,
        (OPTIMIZER, QKV, "fp32 master"),
    ),
    "masters missing from one rank": (
        TP2,
        in_pt(OPTIMIZER, lambda c: c.pop("gradient_accumulator")),
        CONTRADICTION,
        (OPTIMIZER, OPTIMIZER_0[10:]),
    ),
    "moment missing from one rank": (
        TP2,
        in_pt(OPTIMIZER, lambda c: c["state"][number_of(c, QKV)].pop("exp_avg_sq")),
        CONTRADICTION,
        (OPTIMIZER, QKV, "exp_avg_sq"),
    ),
    "names missing": (TP2, in_pt(OPTIMIZER, lambda c: c.pop("names")), CORRUPT, (OPTIMIZER, "no parameter names")),
    # cut short
    "optimizer file short": (TP2, cut(OPTIMIZER), CORRUPT, (OPTIMIZER,)),
    "ZeRO-1 file short": (ZERO, cut(ZERO_OPTIMIZER), CORRUPT, (ZERO_OPTIMIZER,)),
    "optimizer file halved": (TP2, cut(OPTIMIZER, 100_000), CORRUPT, (OPTIMIZER,)),
    "sharded weight short": (TP2, cut(shard(QKV, 1)), CORRUPT, (shard(QKV, 1),)),
    "whole weight short": (TP2, cut(WHOLE), CORRUPT, (WHOLE,)),
    "scheduler short": (TP2, cut(SCHEDULER), CORRUPT, (SCHEDULER,)),
    "scheduler of one rank short": (HEAD, cut(HEAD_SCHEDULER), CORRUPT, (HEAD_SCHEDULER,)),
    "optimizer config short": (TP2, cut(CONFIG), CORRUPT, (CONFIG,)),
    "model config short": (TP2, cut("model_config.json"), CORRUPT, ("model_config.json",)),
    "metadata short": (TP2, cut("checkpoint_metadata.json"), CORRUPT, ("checkpoint_metadata.json",)),
    "empty optimizer file": (TP2, write(OPTIMIZER, b""), CORRUPT, (OPTIMIZER,)),
    "empty weight file": (TP2, write(WHOLE, b""), CORRUPT, (WHOLE,)),
    "weight file with a tail": (
        TP2,
        lambda root: (root / WHOLE).write_bytes((root / WHOLE).read_bytes() + b"\0"),
        CORRUPT,
        (WHOLE,),
    ),
    # contradictions
    "tp of the config": (
        TP2,
        in_text("config.yaml", "  tp: 2\n", "  tp: 4\n"),
        CONTRADICTION,
        ("config.yaml", "tp is 4"),
    ),
    "tp of the metadata": (
        TP2,
        in_json("checkpoint_metadata.json", lambda m: m.update(tp=1)),
        CONTRADICTION,
        ("checkpoint_metadata.json", "tp is 1", "2 in optimizer_config.json"),
    ),
    "tp of the optimizer config": (
        TP2,
        in_json(CONFIG, lambda c: c["parallelism"].update(tp_size="4")),
        CONTRADICTION,
        ("tp is 2", "4 in"),
    ),
    "dp of the optimizer config": (
        TP2,
        in_json(CONFIG, lambda c: c["parallelism"].update(dp_size="2")),
        CONTRADICTION,
        ("dp is 1", "2 in"),
    ),
    "tp is not a number": (
        TP2,
        in_json(CONFIG, lambda c: c["parallelism"].update(tp_size="two")),
        CONTRADICTION,
        (CONFIG, "tp_size"),
    ),
    "tp is negative": (
        TP2,
        in_json(CONFIG, lambda c: c["parallelism"].update(tp_size=-2)),
        CONTRADICTION,
        (CONFIG, "tp_size"),
    ),
    "ZeRO stage of the config": (
        TP2,
        in_text("config.yaml", "zero_stage: 0", "zero_stage: 1"),
        CONTRADICTION,
        ("config.yaml", "zero_stage is 1"),
    ),
    "slices of another rank": (
        TP2,
        lambda root: shutil.copy(root / shard(O_PROJ, 0), root / shard(O_PROJ, 1)),
        CONTRADICTION,
        (O_PROJ,),
    ),
    "slices that overlap": (
        TP2,
        metadata(shard(O_PROJ, 1), local_global_slices_pairs="None,None,None|None,None,None#None,None,None|0,16,None"),
        CONTRADICTION,
        (shard(O_PROJ, 1), O_PROJ),
    ),
    "slices of no meaning": (
        TP2,
        metadata(shard(O_PROJ, 1), local_global_slices_pairs="all"),
        CONTRADICTION,
        (shard(O_PROJ, 1), O_PROJ),
    ),
    "slices past the tensor": (
        TP2,
        metadata(shard(O_PROJ, 1), local_global_slices_pairs="None,None,None|None,None,None#None,None,None|32,48,None"),
        CONTRADICTION,
        (O_PROJ,),
    ),
    "slices with a step": (
        TP2,
        metadata(shard(O_PROJ, 1), local_global_slices_pairs="None,None,None|None,None,None#None,None,None|16,32,2"),
        CONTRADICTION,
        (shard(O_PROJ, 1), "step"),
    ),
    "unsharded shape": (
        TP2,
        metadata(shard(O_PROJ, 1), unsharded_shape="(32, 64)"),
        CONTRADICTION,
        (shard(O_PROJ, 1), O_PROJ, "(32, 64)"),
    ),
    "unsharded shape of no meaning": (
        TP2,
        metadata(shard(O_PROJ, 0), unsharded_shape="big"),
        CONTRADICTION,
        (shard(O_PROJ, 0), O_PROJ),
    ),
    "absurd unsharded shape": (
        TP2,
        metadata(shard(O_PROJ, 1), unsharded_shape=f"({10**30}, {10**30})"),
        CONTRADICTION,
        (shard(O_PROJ, 1),),
    ),
    "weight shape": (
        TP2,
        reshaped(shard(O_PROJ, 1), lambda t: t[:, :15]),
        CONTRADICTION,
        (shard(O_PROJ, 1), O_PROJ, "(32, 15)"),
    ),
    "weight dtype": (
        TP2,
        reshaped(shard(O_PROJ, 1), lambda t: t.float()),
        CONTRADICTION,
        (shard(O_PROJ, 1), "float32"),
    ),
    "whole weight shape": (TP2, reshaped(WHOLE, lambda t: t[:31]), CONTRADICTION, (NORM, "(31,)")),
    "stored sharded and whole": (
        TP2,
        lambda root: shutil.copy(
            root / shard(O_PROJ, 0), (root / shard(O_PROJ, 0)).parent / "model_weight.safetensors"
        ),
        CONTRADICTION,
        (O_PROJ,),
    ),
    "two files claim one shard": (
        TP2,
        lambda root: shutil.copy(root / OPTIMIZER, root / OPTIMIZER.replace("_exp-0-of-1", "")),
        CONTRADICTION,
        ("two files claim", "tp 1", OPTIMIZER[10:]),
    ),
    "two weight files claim one shard": (
        TP2,
        lambda root: edit_shard(
            Path(
                shutil.copy(
                    root / shard(O_PROJ, 1),
                    root / shard(O_PROJ, 1).replace("model_weight_pp", "model_model_weight.safetensors_pp"),
                )
            ),
            lambda t: t.add_(1),
        ),
        CONTRADICTION,
        ("two files claim the same shard", O_PROJ),
    ),
    "moment shape": (
        TP2,
        in_pt(OPTIMIZER, state(QKV, "exp_avg", lambda t: t[:-1])),
        CONTRADICTION,
        (OPTIMIZER, QKV, "exp_avg"),
    ),
    "moment transposed": (
        TP2,
        in_pt(OPTIMIZER, state(O_PROJ, "exp_avg", lambda t: t.T.contiguous())),
        CONTRADICTION,
        (O_PROJ, "exp_avg"),
    ),
    "moment dtype": (
        TP2,
        in_pt(OPTIMIZER, state(QKV, "exp_avg_sq", lambda t: t.bfloat16())),
        CONTRADICTION,
        (QKV, "exp_avg_sq"),
    ),
    "master shape": (TP2, in_pt(OPTIMIZER, master(QKV, lambda t: t.reshape(-1))), CONTRADICTION, (QKV, "fp32_param")),
    "master dtype": (TP2, in_pt(OPTIMIZER, master(QKV, lambda t: t.double())), CONTRADICTION, (QKV, "float64")),
    "ZeRO-1 slice too short": (
        ZERO,
        in_pt(ZERO_OPTIMIZER, state(EMBEDDING, "exp_avg", lambda t: t[1:])),
        CONTRADICTION,
        (ZERO_OPTIMIZER, EMBEDDING, "dp 1"),
    ),
    "ZeRO-1 ranges": (
        ZERO,
        ranges(lambda c: c["param_name_to_dp_rank_offsets"][O_PROJ].update({"0": ["0", "255"]})),
        CONTRADICTION,
        (CONFIG, O_PROJ),
    ),
    "ZeRO-1 shapes": (
        ZERO,
        ranges(lambda c: c["orig_param_shapes"].update({O_PROJ: ["16", "32"]})),
        CONTRADICTION,
        (CONFIG, O_PROJ),
    ),
    "ZeRO-1 ranges of a stranger": (
        ZERO,
        ranges(lambda c: c["orig_param_shapes"].update({"model.stranger": ["16"]})),
        CONTRADICTION,
        (CONFIG, "model.stranger"),
    ),
    "ZeRO-1 ranges of no meaning": (
        ZERO,
        ranges(lambda c: c["param_name_to_dp_rank_offsets"].update({O_PROJ: 7})),
        CONTRADICTION,
        (CONFIG, O_PROJ),
    ),
    "steps differ between ranks": (
        TP2,
        in_pt(OPTIMIZER, state(QKV, "step", lambda t: t + 1)),
        CONTRADICTION,
        (OPTIMIZER, QKV, "step 4", "step 3"),
    ),
    "step is half": (
        TP2,
        in_pt(OPTIMIZER, state(QKV, "step", lambda t: t + 0.5)),
        CONTRADICTION,
        (OPTIMIZER, QKV, "3.5"),
    ),
    "step is not a number": (
        TP2,
        in_pt(OPTIMIZER, state(QKV, "step", lambda t: t * float("nan"))),
        CONTRADICTION,
        (OPTIMIZER, QKV, "nan"),
    ),
    "step is infinite": (
        TP2,
        in_pt(OPTIMIZER, state(QKV, "step", lambda t: t * float("inf"))),
        CONTRADICTION,
        (OPTIMIZER, QKV, "inf"),
    ),
    "step is endless": (
        TP2,
        in_pt(OPTIMIZER, state(QKV, "step", lambda _: 10**400)),
        CONTRADICTION,
        (OPTIMIZER, QKV, "step is an int of more than 64 bits"),
    ),
    "step is beyond counting": (
        TP2,
        in_pt(OPTIMIZER, state(QKV, "step", lambda _: 2**53 + 2)),
        CONTRADICTION,
        (OPTIMIZER, QKV, "step is 9007199254740994"),
    ),
    "hyperparameter is endless": (
        TP2,
        in_pt(OPTIMIZER, group(weight_decay=10**400)),
        CONTRADICTION,
        (OPTIMIZER, "'weight_decay' has an int of more than 64 bits"),
    ),
    "hyperparameter of one dialect is too long": (
        TP2,
        in_pt(OPTIMIZER, group(theirs=[0.5, (1, 2**63)])),
        CONTRADICTION,
        (OPTIMIZER, "'theirs' has an int of more than 64 bits"),
    ),
    "hyperparameters differ between ranks": (
        TP2,
        in_pt(OPTIMIZER, group(lr=0.5)),
        CONTRADICTION,
        (OPTIMIZER, "other hyperparameters"),
    ),
    "hyperparameter is a tensor": (
        TP2,
        in_pt(OPTIMIZER, group(lr=torch.tensor(0.5))),
        CONTRADICTION,
        (OPTIMIZER, "'lr'"),
    ),
    "parameter named twice": (TP2, in_pt(OPTIMIZER, rename(O_PROJ, QKV)), CONTRADICTION, (OPTIMIZER, "twice")),
    "parameter of no block": (
        TP2,
        in_pt(OPTIMIZER, rename(O_PROJ, "lost.weight")),
        MISSING,
        (OPTIMIZER, "lost.weight"),
    ),
    "parameter in no group": (
        TP2,
        in_pt(OPTIMIZER, lambda c: c["param_groups"][0]["params"].pop()),
        CONTRADICTION,
        (OPTIMIZER, "no param group"),
    ),
    "parameter in two groups": (
        TP2,
        in_pt(OPTIMIZER, lambda c: c["param_groups"][0]["params"].append(0)),
        CONTRADICTION,
        (OPTIMIZER, "two param groups"),
    ),
    "group of a stranger": (
        TP2,
        in_pt(OPTIMIZER, lambda c: c["param_groups"][0]["params"].append(99)),
        CONTRADICTION,
        (OPTIMIZER,),
    ),
    "state of a stranger": (
        TP2,
        in_pt(OPTIMIZER, lambda c: c["state"].update({99: {}})),
        CONTRADICTION,
        (OPTIMIZER, "state 99"),
    ),
    "states without names": (
        TP2,
        in_pt(OPTIMIZER, lambda c: c["names"].clear()),
        CONTRADICTION,
        (OPTIMIZER, "state 0 has no name"),
    ),
    "scheduler lists": (
        HEAD,
        in_pt(HEAD_SCHEDULER, lambda s: s["base_lrs"].pop()),
        CONTRADICTION,
        (HEAD_SCHEDULER, "param groups"),
    ),
    "scheduler epochs differ": (
        HEAD,
        in_pt(HEAD_SCHEDULER, lambda s: s.update(last_epoch=9)),
        CONTRADICTION,
        (HEAD_SCHEDULER,),
    ),
    "scheduler rates differ": (
        HEAD,
        in_pt(HEAD_SCHEDULER, lambda s: s["_last_lr"].__setitem__(0, 9.0)),
        CONTRADICTION,
        (HEAD_SCHEDULER,),
    ),
    "scheduler is a list": (
        TP2,
        lambda root: torch.save([1], root / SCHEDULER),
        CONTRADICTION,
        (SCHEDULER,),
    ),
    "vocabulary": (
        TP2,
        in_json("model_config.json", lambda m: m.update(vocab_size=127)),
        CONTRADICTION,
        ("model_config.json", EMBEDDING, "128 rows", "127"),
    ),
    "layers": (
        TP2,
        in_json("model_config.json", lambda m: m.update(num_hidden_layers=3)),
        CONTRADICTION,
        ("model_config.json", "num_hidden_layers"),
    ),
    "more layers": (
        TP2,
        in_json("model_config.json", lambda m: m.update(num_hidden_layers=5)),
        CONTRADICTION,
        ("model_config.json", "num_hidden_layers"),
    ),
    "absurdly many layers": (
        TP2,
        in_json("model_config.json", lambda m: m.update(num_hidden_layers=10**15)),
        CONTRADICTION,
        ("model_config.json", "num_hidden_layers"),
    ),
    "hidden size": (
        TP2,
        in_json("model_config.json", lambda m: m.update(hidden_size=64)),
        CONTRADICTION,
        ("model_config.json", "hidden_size is 64", "32"),
    ),
    "intermediate size": (
        TP2,
        in_json("model_config.json", lambda m: m.update(intermediate_size=96)),
        CONTRADICTION,
        ("model_config.json", "intermediate_size is 96", "64"),
    ),
    "key/value heads": (
        TP2,
        in_json("model_config.json", lambda m: m.update(num_key_value_heads=8)),
        CONTRADICTION,
        ("model_config.json", "num_key_value_heads 8", "32, 16 and 16 rows"),
    ),
    "no layers": (
        TP2,
        in_json("model_config.json", lambda m: m.pop("num_hidden_layers")),
        CONTRADICTION,
        ("model_config.json", "num_hidden_layers"),
    ),
    "heads": (
        TP2,
        in_json("model_config.json", lambda m: m.update(num_attention_heads=10**15)),
        CONTRADICTION,
        ("model_config.json", "num_attention_heads"),
    ),
    "experts": (
        MOE,
        in_json("model_config.json", lambda m: m.update(moe_num_experts=10)),
        CONTRADICTION,
        ("experts",),
    ),
    "experts that the ranks do not divide": (
        MOE,
        in_json("model_config.json", lambda m: m.update(moe_num_experts=7)),
        CONTRADICTION,
        ("7 experts",),
    ),
    "no experts": (
        MOE,
        in_json("model_config.json", lambda m: m.pop("moe_num_experts")),
        CONTRADICTION,
        ("moe_num_experts",),
    ),
    "lost weights without masters": (
        LOST,
        lambda root: [edit_pt(path, lambda c: c.pop("gradient_accumulator")) for path in root.glob("optimizer/*.pt")],
        MISSING,
        ("overwrote each other's weight files",),
    ),
    # what is not a checkpoint, or not one we know
    "unknown version": (
        TP2,
        in_json("checkpoint_metadata.json", lambda m: m.update(version="2.0")),
        UNKNOWN,
        ("checkpoint_metadata.json", "'2.0'", "'1.2', '1.4', '1.5'"),
    ),
    "version is a list": (
        TP2,
        in_json("checkpoint_metadata.json", lambda m: m.update(version=["1.2"])),
        UNKNOWN,
        ("checkpoint_metadata.json",),
    ),
    "no version": (
        TP2,
        in_json("checkpoint_metadata.json", lambda m: m.pop("version")),
        UNKNOWN,
        ("checkpoint_metadata.json",),
    ),
    "context parallel": (
        TP2,
        in_json("checkpoint_metadata.json", lambda m: m.update(cp=2)),
        UNKNOWN,
        ("context parallel size 2",),
    ),
    "optimizer file is a list": (TP2, lambda root: torch.save([], root / OPTIMIZER), CORRUPT, (OPTIMIZER,)),
    "optimizer file of another kind": (
        TP2,
        in_pt(OPTIMIZER, lambda c: c.update(scaler=1)),
        CORRUPT,
        (OPTIMIZER, "scaler"),
    ),
    "optimizer file is text": (TP2, write(OPTIMIZER, b"hello" * 100), CORRUPT, (OPTIMIZER,)),
    "weight file is text": (TP2, write(WHOLE, b"hello" * 100), CORRUPT, (WHOLE,)),
    # malice
    "huge JSON": (
        TP2,
        lambda root: os.truncate(root / CONFIG, (64 << 20) + 1),
        CORRUPT,
        (CONFIG, "larger than 64 MiB"),
    ),
    "JSON is a list": (TP2, write(CONFIG, b"[1]"), CORRUPT, (CONFIG, "not a mapping")),
    "JSON is deep": (TP2, write(CONFIG, b'{"a":' * 200_000), CORRUPT, (CONFIG,)),
    "JSON of huge numbers": (TP2, write(CONFIG, b'{"a": ' + b"9" * 5000 + b"}"), CORRUPT, (CONFIG,)),
    "JSON is not text": (TP2, write(CONFIG, b"\xff\xfe{}"), CORRUPT, (CONFIG,)),
    "JSON of absurd sizes": (
        TP2,
        in_json(CONFIG, lambda c: c["parallelism"].update(tp_size=10**400)),
        CONTRADICTION,
        (CONFIG, "tp_size"),
    ),
    "JSON sections of another kind": (
        TP2,
        in_json(CONFIG, lambda c: c.update(parallelism=[2])),
        CONTRADICTION,
        (CONFIG, "parallelism"),
    ),
    "YAML names Python objects": (
        TP2,
        write("config.yaml", b"a: !!python/object/apply:os.system ['touch pwned']\n"),
        CORRUPT,
        ("config.yaml",),
    ),
    "YAML is deep": (TP2, write("config.yaml", b"a: " + b"[" * 100_000), CORRUPT, ("config.yaml",)),
    "YAML bomb where a number belongs": (
        TP2,
        in_text("config.yaml", "  zero_stage: 0", f"  zero_stage: {BOMB}"),
        CORRUPT,
        ("config.yaml", "nested deeper"),
    ),
    "YAML bomb where a section belongs": (
        TP2,
        in_text("config.yaml", "parallelism:\n", f"parallelism: {BOMB}\nwas:\n"),
        CORRUPT,
        ("config.yaml", "nested deeper"),
    ),
    "more ranks than could ever be": (TP2, claim_ranks(pp=10**17), MISSING, ("optimizer files are missing",)),
    "more ranks of tp than could ever be": (TP2, claim_ranks(tp=10**17), MISSING, ("optimizer files are missing",)),
    "pickle names a function": (
        TP2,
        lambda root: hostile_pickle(root / OPTIMIZER),
        "UnsafePickleError",
        (OPTIMIZER, "posix.system"),
    ),
    "scheduler pickle names a function": (
        TP2,
        lambda root: hostile_pickle(root / SCHEDULER),
        "UnsafePickleError",
        (SCHEDULER, "posix.system"),
    ),
    "parameter name leaves its folder": (
        TP2,
        in_pt(OPTIMIZER, rename(O_PROJ, "model.../../../etc/passwd")),
        CONTRADICTION,
        (OPTIMIZER, "parameter name"),
    ),
    "parameter name is absolute": (
        TP2,
        in_pt(OPTIMIZER, rename(O_PROJ, "/etc/passwd")),
        CONTRADICTION,
        (OPTIMIZER, "parameter name"),
    ),
    "parameter name has a line break": (
        TP2,
        in_pt(OPTIMIZER, rename(O_PROJ, "model.a\nb")),
        CONTRADICTION,
        (OPTIMIZER, "parameter name"),
    ),
    "weight file is a loop": (
        TP2,
        lambda root: ((root / WHOLE).unlink(), (root / WHOLE).symlink_to(root / WHOLE)),
        CORRUPT,
        (WHOLE,),
    ),
    "optimizer file is a loop": (
        TP2,
        lambda root: ((root / OPTIMIZER).unlink(), (root / OPTIMIZER).symlink_to(root / OPTIMIZER)),
        CORRUPT,
        (OPTIMIZER,),
    ),
    "document is a loop": (
        TP2,
        lambda root: ((root / CONFIG).unlink(), (root / CONFIG).symlink_to(root / CONFIG)),
        CORRUPT,
        (CONFIG,),
    ),
    "optimizer file is a folder": (
        TP2,
        lambda root: ((root / OPTIMIZER).unlink(), (root / OPTIMIZER).mkdir()),
        CORRUPT,
        (OPTIMIZER,),
    ),
    "optimizer folder is a file": (
        TP2,
        lambda root: (shutil.rmtree(root / "optimizer"), (root / "optimizer").write_text("x")),
        MISSING,
        ("optimizer",),
    ),
}


class _Call:
    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


def hostile_pickle(path: Path) -> None:
    """Replace a torch file's pickle by one that runs a command."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_Call(), protocol=2))
        archive.writestr("archive/version", "3\n")


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_clear_error_and_nothing_written(
    damage: str, copy_of: Real, refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, edit, kind, named = DAMAGES[damage]
    root = copy_of(name)
    edit(root)
    monkeypatch.chdir(tmp_path)
    before = fingerprint(tmp_path / "source")
    message = refuse(root, "--tp 1", kind=kind)
    for word in named:
        assert word in message
    assert fingerprint(tmp_path / "source") == before
    assert not (tmp_path / "pwned").exists()
    assert len(message) < 20_000


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("damage", ["optimizer file missing", "sharded weight short", "slices that overlap", "layers"])
def test_other_commands_refuse_too(damage: str, command: str, copy_of: Real, real: Real) -> None:
    name, edit, kind, _ = DAMAGES[damage]
    root = copy_of(name)
    edit(root)
    arguments = [root] if command == "inspect" else [real(name), root]
    code, printed = run_cli(command, *arguments, "--json")
    assert code == 2
    assert json.loads(printed[printed.index("\n{") :])["error"] == kind


def test_a_foreign_directory(tmp_path: Path, refuse: Refuse) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "pytorch").mkdir(parents=True)
    (foreign / "pytorch" / "model.bin").write_bytes(b"\0" * 100)
    assert "is not a nanotron checkpoint" in refuse(foreign, kind=UNKNOWN)
    assert "does not exist" in refuse(foreign / "absent", kind=MISSING)
    assert "is not a directory" in refuse(foreign / "pytorch" / "model.bin", kind=MISSING)
    (tmp_path / "empty").mkdir()
    assert "is not a nanotron checkpoint" in refuse(tmp_path / "empty", kind=UNKNOWN)


def test_leftovers_of_another_topology_are_reported_and_never_mixed_in(
    copy_of: Real, real: Real, reshard: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    root = copy_of(TP2)
    for other in (
        "nt04-llama_tied-z0-tp4-pp1-dp1-ep1",
        "nt04-llama_tied-z1-tp2-pp2-dp2-ep1",
        "nt04-llama_tied-z1-tp1-pp1-dp2-ep1",
    ):
        for part in ("model", "optimizer"):
            for path in (real(other) / part).rglob("*"):
                target = root / path.relative_to(real(other))
                if path.is_file() and not target.exists():
                    shutil.copy(path, target)
    (root / "optimizer" / "optimizer.pt.tmp").write_bytes(b"x")
    (root / "optimizer" / "optimizer_pp-00-of-1_tp-1-of-2_exp-0-of-1.pt").write_bytes(b"x")
    (root / "model" / "model" / "notes.txt").write_text("x")
    strangers = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()} - {
        path.relative_to(real(TP2)).as_posix() for path in real(TP2).rglob("*")
    }
    problems = reshard(root, "--tp 1")["problems"]
    assert {problem.split(" does not belong")[0] for problem in problems} == strangers
    assert len(strangers) > 50
    assert compare_checkpoints(real("nt04-llama_tied-z0-tp1-pp1-dp1-ep1"), tmp_path / "out") == []
    code, printed = run_cli("inspect", root, "--json")
    assert code == 1
    assert json.loads(printed)["problems"] == problems


def test_output_and_source_may_not_overlap(copy_of: Real, tmp_path: Path) -> None:
    root = copy_of(TP2)
    parent = root.parent
    (tmp_path / "link").symlink_to(root)
    before = fingerprint(tmp_path)
    for source, out in (
        (root, root),
        (root, root / "out"),
        (root, parent),
        (root, root / ".." / root.name),
        (root, root / "model" / "x"),
        (tmp_path / "link", root / "out"),
        (root, tmp_path / "link" / "out"),
        (root, tmp_path),
    ):
        for more in ([], ["--overwrite"], ["--dry-run"]):
            code, printed = run_cli("reshard", source, out, *more)
            assert code == 2
            assert "overlap" in printed
    assert fingerprint(tmp_path) == before


def test_the_output_may_not_lie_in_the_parent_of_steps_under_the_same_name(copy_of: Real, tmp_path: Path) -> None:
    root = copy_of(TP2)
    step = root.rename(root.parent / "3")
    (step.parent / "latest.txt").write_text("3")
    before = fingerprint(tmp_path)
    for out in (step, step.parent, step / "x"):
        code, printed = run_cli("reshard", step.parent, out, "--overwrite")
        assert code == 2
        assert "overlap" in printed
    assert fingerprint(tmp_path) == before


def test_an_output_without_a_parent(real: Real, tmp_path: Path) -> None:
    code, printed = run_cli("reshard", real(TP2), tmp_path / "a" / "b")
    assert code == 2
    assert "the parent directory does not exist" in printed
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_changes_while_it_is_read(copy_of: Real, refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    root = copy_of(TP2)
    write = SegmentWriter.write

    def write_and_touch(self: SegmentWriter, bundle: list[Segment]) -> Any:
        os.utime(root / OPTIMIZER, (1, 1))
        return write(self, bundle)

    monkeypatch.setattr(SegmentWriter, "write", write_and_touch)
    message = refuse(root, "--tp 1")
    assert "changed while it was read" in message
    assert OPTIMIZER in message


@pytest.mark.parametrize("name", ["model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors", "tp-1-of-2_exp-0-of-1.pt"])
def test_a_source_that_is_replaced_after_planning(name: str, copy_of: Real, tmp_path: Path) -> None:
    root = copy_of(TP2)
    planned = plan_reshard(root, tmp_path / "out", Options(tp=1, replicas="lowest-rank"))
    path = next(path for path in sorted(root.rglob("*")) if path.name.endswith(name))
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.rename(path)
    with pytest.raises(SourceChangedError, match="changed while it was read") as caught:
        planned.run()
    assert caught.value.path == str(path)
    assert not (tmp_path / "out").exists()


def test_the_same_fault_on_two_ranks_is_told_of_both(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TP2)
    files = sorted((root / "optimizer").glob("*.pt"))
    for path in files:
        edit_pt(path, lambda c: c["state"][1].update(exp_avg=c["state"][1]["exp_avg"][:-1].clone()))
    message = refuse(root, "--tp 1", kind="ContradictionError")
    assert message.count("exp_avg has dtype") == 2
    assert all(path.name in message for path in files)


def test_an_interrupt_leaves_nothing(real: Real, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = SegmentWriter.write
    written: list[Segment] = []

    def interrupted(self: SegmentWriter, bundle: list[Segment]) -> Any:
        if len(written) >= 5:
            raise KeyboardInterrupt
        written.extend(bundle)
        return write(self, bundle)

    monkeypatch.setattr(SegmentWriter, "write", interrupted)
    code, printed = run_cli("reshard", real(TP2), tmp_path / "out")
    assert code == 2
    assert "interrupted" in printed
    assert len(written) >= 5
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(real: Real, refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def full(descriptor: int, data: Any, position: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("nemo_optim_bridge.core.write.os.pwrite", full)
    assert "No space left on device" in refuse(real(TP2), "--tp 1")
