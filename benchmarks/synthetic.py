"""Make a nanotron checkpoint of any size from random numbers, to measure on.

    python benchmarks/synthetic.py OUT --layers 48 --hidden 512 --intermediate 1536 --tp 4
    python benchmarks/synthetic.py OUT --layers 12 --experts 8 --ep 4

A dense one is a Llama as nanotron 0.4 saves it; one with experts is the mixture-of-experts example of 2025. Written by
one rank, then re-sharded by the package itself to the topology asked for.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from nemo_optim_bridge.formats.nanotron.dialects import DIALECTS, Dialect
from nemo_optim_bridge.formats.nanotron.layout import Experts, ParamLayout, shard_metadata
from nemo_optim_bridge.formats.nanotron.names import EMBEDDING, LM_HEAD, WeightName, format_weight_name
from nemo_optim_bridge.formats.nanotron.reshard import Options, plan_reshard
from nemo_optim_bridge.formats.nanotron.scheduler import scheduler_files
from nemo_optim_bridge.formats.topology import Topology

GROUP = {
    "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False,
    "foreach": None, "capturable": False, "differentiable": False, "fused": True, "initial_lr": 6e-4,
}  # fmt: skip


def layouts(layers: int, hidden: int, intermediate: int, vocab: int, experts: int) -> list[ParamLayout]:
    """Return a Llama model's parameters in nanotron's order; its MLPs are ``experts`` experts when that is not 0."""

    def sharded(fqn: str, shape: tuple[int, ...], dim: int, chunks: tuple[int, ...]) -> ParamLayout:
        return ParamLayout(fqn, shape, "bfloat16", dim, chunks)

    def mlp(at: str) -> list[ParamLayout]:
        if not experts:
            return [
                sharded(f"{at}mlp.gate_up_proj.weight", (2 * intermediate, hidden), 0, (intermediate,) * 2),
                sharded(f"{at}mlp.down_proj.weight", (hidden, intermediate), 1, (intermediate,)),
            ]
        at, rows = f"{at}block_sparse_moe.", experts * intermediate
        return [
            ParamLayout(f"{at}gate.layer.weight", (experts, hidden), "bfloat16"),
            *(
                ParamLayout(
                    f"{at}experts.mlp.{name}.module.weight", (rows, hidden), "bfloat16", 0, (rows,),
                    experts=Experts(experts, intermediate, name == "w1"),
                )
                for name in ("w1", "w2")
            ),
        ]  # fmt: skip

    result = [sharded(EMBEDDING, (vocab, hidden), 0, (vocab,))]
    for layer in range(layers):
        at = f"model.decoder.{layer}.pp_block."
        result += [
            ParamLayout(f"{at}input_layernorm.weight", (hidden,), "bfloat16"),
            sharded(f"{at}attn.qkv_proj.weight", (3 * hidden, hidden), 0, (hidden,) * 3),
            sharded(f"{at}attn.o_proj.weight", (hidden, hidden), 1, (hidden,)),
            ParamLayout(f"{at}post_attention_layernorm.weight", (hidden,), "bfloat16"),
            *mlp(at),
        ]
    result.append(ParamLayout("model.final_layer_norm.pp_block.weight", (hidden,), "bfloat16"))
    return [*result, sharded(LM_HEAD, (vocab, hidden), 0, (vocab,))]


def write_unsharded(root: Path, parameters: list[ParamLayout], config: dict[str, object], dialect: Dialect) -> None:
    """Write the checkpoint of one rank."""
    generator = torch.Generator().manual_seed(0)
    one = Topology()
    state, masters = {}, {}
    for number, layout in enumerate(parameters):
        shape = layout.local_shape(one)
        master = torch.randn(shape, generator=generator)
        masters[layout.fqn] = master
        state[number] = {
            "step": torch.tensor(1000.0),
            "exp_avg": torch.randn(shape, generator=generator),
            "exp_avg_sq": torch.rand(shape, generator=generator),
        }
        ranks = ((0, 1), (0, 1)) if layout.is_sharded else (None, None)
        path = root / "model" / format_weight_name(WeightName(layout.fqn, *ranks))
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = dict(shard_metadata(layout, one, 0, 0, dialect.shard_version))
        save_file({"data": master.bfloat16()}, path, metadata=metadata)
    names = {number: layout.fqn for number, layout in enumerate(parameters)}
    groups = [[number] for number in names] if dialect.group_per_parameter else [list(names)]
    (root / "optimizer").mkdir()
    torch.save(
        {
            "state": state,
            "param_groups": [{**GROUP, "params": numbers} for numbers in groups],
            "names": names,
            "gradient_accumulator": masters,
        },
        root / "optimizer" / "optimizer_pp-0-of-1_tp-0-of-1_exp-0-of-1.pt",
    )
    sizes = {"tp_size": "1", "dp_size": "1", "pp_size": "1", "expert_parallel_size": "1"}
    kind = {"type": "OptimizerFromGradientAccumulator", "parallelism": sizes, "configs": {}}
    (root / "optimizer" / "optimizer_config.json").write_text(json.dumps(kind))
    (root / "lr_scheduler").mkdir()
    scheduler = {
        "base_lrs": [6e-4] * len(groups),
        "last_epoch": 1000,
        "_step_count": 1001,
        "_last_lr": [3e-4] * len(groups),
        "lr_lambdas": [{} if dialect.group_per_parameter else None] * len(groups),
    }
    for file in scheduler_files(dialect, one).values():
        torch.save(scheduler, root / "lr_scheduler" / file)
    metas: dict[str, object] = {"last_train_step": 1000, "consumed_train_samples": 4000}
    if dialect.data_stages:
        stage = {"name": "Stable Training Stage", "start_training_step": 1, "consumed_train_samples": 4000}
        metas.update(last_stage_idx=0, data_stages=[stage])
    metadata_file = {"version": dialect.version, "tp": 1, "dp": 1, "metas": metas}
    (root / "checkpoint_metadata.json").write_text(json.dumps(metadata_file))
    (root / "model_config.json").write_text(json.dumps(config))
    parallelism = {"tp": 1, "pp": 1, "dp": 1, "expert_parallel_size": 1}
    (root / "config.yaml").write_text(
        yaml.safe_dump({"model": {"model_config": config}, "optimizer": {"zero_stage": 0}, "parallelism": parallelism})
    )


def model_config(
    layers: int, hidden: int, intermediate: int, vocab: int, heads: int, experts: int
) -> dict[str, object]:
    """Return what ``model_config.json`` says."""
    kind = {"is_llamoe_config": True, "moe_num_experts": experts} if experts else {"is_llama_config": True}
    return {
        **kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocab,
    }


def main() -> int:
    """Write the checkpoint; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    model = {"layers": 48, "hidden": 512, "intermediate": 1536, "vocab": 2048, "heads": 8, "experts": 0}
    topology = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "zero": 0}
    for name, default in {**model, **topology}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = vars(parser.parse_args())
    out, sizes = given["out"], {name: given[name] for name in model}
    wanted = {name: given[name] for name in topology}
    parameters = layouts(**{name: size for name, size in sizes.items() if name != "heads"})
    dialect = DIALECTS["moe" if sizes["experts"] else "0.4"]
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        whole = Path(scratch, "whole")
        whole.mkdir()
        write_unsharded(whole, parameters, model_config(**sizes), dialect)
        if wanted == topology:
            shutil.move(whole, out)
        else:
            zero_stage = wanted.pop("zero")
            plan_reshard(whole, out, Options(**wanted, zero_stage=zero_stage, fsync=False)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
