"""NeMo 2.4.1's own MegatronTrainerBuilder and MegatronBaseModel on a CPU: which path does an optimizer's name take?

    python nlp_driver.py early|late NAME

``early`` registers the bridge before the trainer is built, ``late`` leaves it to Lightning's entry point. Prints one
JSON object. Runs in an environment of its own, see CONTRIBUTING.md; the stand-in for Apex is this folder's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import types
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent.parent)]
os.environ["NVIDIA_PYTORCH_VERSION"] = "25.06"  # MegatronBaseModel compares it

import nemo_rig  # noqa: E402

CONFIG = {
    "trainer": {
        "devices": 1, "num_nodes": 1, "accelerator": "cpu", "precision": "bf16", "logger": False, "max_steps": 2,
        "enable_checkpointing": False, "enable_progress_bar": False, "use_distributed_sampler": False,
    },
    "exp_manager": {"log_tflops_per_sec_per_gpu": False},
    "model": {
        "mcore_gpt": True, "micro_batch_size": 1, "global_batch_size": 1, "megatron_amp_O2": True, "precision": "bf16",
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "gradient_as_bucket_view": False,
        "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "seed": 1,
        "encoder_seq_length": 16, "max_position_embeddings": 16, "use_cpu_initialization": True,
        "gradient_accumulation_fusion": True, "optim": {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.98]},
    },
}  # fmt: skip


def bare_packages() -> None:
    """Put modules in place whose own ``__init__`` would import every model of the nlp collection."""
    import nemo

    for name in ("", ".models", ".models.language_modeling", ".data"):
        name = "nemo.collections.nlp" + name
        module = types.ModuleType(name)
        module.__path__ = [str(Path(nemo.__path__[0], *name.split(".")[1:]))]
        module.__spec__ = importlib.util.spec_from_loader(name, None, is_package=True)
        sys.modules[name] = module


def main(when: str, name: str) -> dict[str, object]:
    nemo_rig.prepare_process()
    if when == "early":
        from nemo_optim_bridge.plugins.nemo import register

        register()
    bare_packages()
    import torch
    from megatron.core import parallel_state
    from nemo.collections.nlp.parts import nlp_overrides

    nlp_overrides.HAVE_APEX = True  # the stand-in has no apex.transformer
    from nemo.collections.nlp.models.language_modeling.megatron_base_model import MegatronBaseModel
    from nemo.collections.nlp.parts.megatron_trainer_builder import MegatronTrainerBuilder
    from omegaconf import OmegaConf

    class Model(MegatronBaseModel):
        def __init__(self, cfg, trainer):
            super().__init__(cfg, trainer)
            self.megatron_amp_O2 = True
            self.layer = torch.nn.Linear(4, 4).bfloat16()

        def setup_optimizer_param_groups(self):
            decay, bias = {"params": [self.layer.weight]}, {"params": [self.layer.bias], "weight_decay": 0.0}
            self._optimizer_param_groups = [decay, bias]

        def get_model_module_list(self):
            return [self.layer]

        def _nothing(self, *args):
            return None

        _build_tokenizer = _build_vocab = setup_training_data = setup_validation_data = _nothing
        list_available_models = classmethod(_nothing)

    cfg = OmegaConf.create(CONFIG)
    cfg.model.optim.name = name
    trainer = MegatronTrainerBuilder(cfg).create_trainer()
    store = f"file://{tempfile.mkdtemp()}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    if when == "late":
        from nemo_optim_bridge.plugins.nemo import register

        register()  # what Lightning's entry point has done where the package is installed
    model = Model(cfg.model, trainer)
    seen = {
        "plugin": type(trainer.precision_plugin).__name__,
        "distributed": model.with_distributed_adam,
        "name": model.cfg.optim.name,
    }
    try:
        model.configure_optimizers()
    except Exception as error:
        return {**seen, "error": f"{type(error).__name__}: {error}"}
    optimizer = model._optimizer
    return {
        **seen,
        "optimizer": type(optimizer).__name__,
        "remainders": optimizer.store_param_remainders,
        "initialized": all("fragments" in optimizer.state[p] for p in model.parameters()),
        "saved name": model.hparams["cfg"]["optim"]["name"],
    }


if __name__ == "__main__":
    found = main(*sys.argv[1:])
    sys.stdout.write("\n" + json.dumps(found) + "\n")
