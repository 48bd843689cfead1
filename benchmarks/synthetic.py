"""Make a nanotron 0.4 checkpoint of any size from random numbers, to measure on.

    python benchmarks/synthetic.py OUT --layers 48 --hidden 512 --intermediate 1536 --tp 4

Written at tp 1, then re-sharded by the package itself to the topology asked for.
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

from nemo_optim_bridge.formats.nanotron.layout import ParamLayout, shard_metadata
from nemo_optim_bridge.formats.nanotron.names import EMBEDDING, LM_HEAD, WeightName, format_weight_name
from nemo_optim_bridge.formats.nanotron.reshard import Options, plan_reshard
from nemo_optim_bridge.formats.topology import Topology

GROUP = {
    "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False,
    "foreach": None, "capturable": False, "differentiable": False, "fused": True, "initial_lr": 6e-4,
}  # fmt: skip


def layouts(layers: int, hidden: int, intermediate: int, vocab: int) -> list[ParamLayout]:
    """Return a Llama model's parameters in nanotron's order."""

    def sharded(fqn: str, shape: tuple[int, ...], dim: int, chunks: tuple[int, ...]) -> ParamLayout:
        return ParamLayout(fqn, shape, "bfloat16", dim, chunks)

    result = [sharded(EMBEDDING, (vocab, hidden), 0, (vocab,))]
    for layer in range(layers):
        at = f"model.decoder.{layer}.pp_block."
        result += [
            ParamLayout(f"{at}input_layernorm.weight", (hidden,), "bfloat16"),
            sharded(f"{at}attn.qkv_proj.weight", (3 * hidden, hidden), 0, (hidden,) * 3),
            sharded(f"{at}attn.o_proj.weight", (hidden, hidden), 1, (hidden,)),
            ParamLayout(f"{at}post_attention_layernorm.weight", (hidden,), "bfloat16"),
            sharded(f"{at}mlp.gate_up_proj.weight", (2 * intermediate, hidden), 0, (intermediate,) * 2),
            sharded(f"{at}mlp.down_proj.weight", (hidden, intermediate), 1, (intermediate,)),
        ]
    result.append(ParamLayout("model.final_layer_norm.pp_block.weight", (hidden,), "bfloat16"))
    return [*result, sharded(LM_HEAD, (vocab, hidden), 0, (vocab,))]


def write_unsharded(root: Path, parameters: list[ParamLayout], config: dict[str, object]) -> None:
    """Write the checkpoint of one rank."""
    generator = torch.Generator().manual_seed(0)
    one = Topology()
    state, masters = {}, {}
    for number, layout in enumerate(parameters):
        master = torch.randn(layout.shape, generator=generator)
        masters[layout.fqn] = master
        state[number] = {
            "step": torch.tensor(1000.0),
            "exp_avg": torch.randn(layout.shape, generator=generator),
            "exp_avg_sq": torch.rand(layout.shape, generator=generator),
        }
        ranks = ((0, 1), (0, 1)) if layout.is_sharded else (None, None)
        path = root / "model" / format_weight_name(WeightName(layout.fqn, *ranks))
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"data": master.bfloat16()}, path, metadata=dict(shard_metadata(layout, one, 0, 0, "1.2")))
    names = {number: layout.fqn for number, layout in enumerate(parameters)}
    (root / "optimizer").mkdir()
    torch.save(
        {
            "state": state,
            "param_groups": [{**GROUP, "params": list(names)}],
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
        "base_lrs": [6e-4],
        "last_epoch": 1000,
        "_step_count": 1001,
        "_last_lr": [3e-4],
        "lr_lambdas": [None],
    }
    torch.save(scheduler, root / "lr_scheduler" / "lr_scheduler.pt")
    metas = {"last_train_step": 1000, "consumed_train_samples": 4000}
    (root / "checkpoint_metadata.json").write_text(json.dumps({"version": "1.2", "tp": 1, "dp": 1, "metas": metas}))
    (root / "model_config.json").write_text(json.dumps(config))
    parallelism = {"tp": 1, "pp": 1, "dp": 1, "expert_parallel_size": 1}
    (root / "config.yaml").write_text(
        yaml.safe_dump({"model": {"model_config": config}, "optimizer": {"zero_stage": 0}, "parallelism": parallelism})
    )


def main() -> int:
    """Write the checkpoint; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    defaults = {
        "layers": 48,
        "hidden": 512,
        "intermediate": 1536,
        "vocab": 2048,
        "heads": 8,
        "tp": 4,
        "pp": 1,
        "dp": 1,
        "zero": 0,
    }
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    parameters = layouts(options.layers, options.hidden, options.intermediate, options.vocab)
    config = {
        "is_llama_config": True,
        "num_hidden_layers": options.layers,
        "hidden_size": options.hidden,
        "intermediate_size": options.intermediate,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.heads,
        "vocab_size": options.vocab,
    }
    with tempfile.TemporaryDirectory(dir=options.out.parent) as scratch:
        whole = Path(scratch, "whole")
        whole.mkdir()
        write_unsharded(whole, parameters, config)
        if (options.tp, options.pp, options.dp, options.zero) == (1, 1, 1, 0):
            shutil.move(whole, options.out)
        else:
            wanted = Options(tp=options.tp, pp=options.pp, dp=options.dp, zero_stage=options.zero, fsync=False)
            plan_reshard(whole, options.out, wanted).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
