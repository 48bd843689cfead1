"""By name, by installing: a real pip install, Lightning's and Hydra's plugin mechanisms, the real ModelPT."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from nemo_checks import have_nemo

pytestmark = [pytest.mark.nemo, pytest.mark.skipif(not have_nemo(), reason="NeMo or megatron-core is not installed")]

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

STAND_IN = "import nemo_rig; nemo_rig.prepare_process()\n"
NO_NEMO = "bad = [m for m in sys.modules if m == 'nemo' or m.startswith('nemo.')]; assert not bad, bad\n"
MODEL = """
import torch, torch.distributed as dist, tempfile
from nemo.core.classes import ModelPT
from omegaconf import OmegaConf

class Model(ModelPT):
    def __init__(self, name, trainer, **more):
        optim = {'name': name, 'lr': 1e-3, 'betas': [0.9, 0.95], 'weight_decay': 0.1, **more}
        super().__init__(OmegaConf.create({'optim': optim}), trainer=trainer)
        self.layer = torch.nn.Linear(4, 4)
    def setup_training_data(self, cfg): pass
    def setup_validation_data(self, cfg): pass
    @classmethod
    def list_available_models(cls): return []

def optimizer(name, trainer=None, **more):
    if not dist.is_initialized():
        dist.init_process_group('gloo', init_method=f'file://{tempfile.mktemp()}', rank=0, world_size=1)
    model = Model(name, trainer, **more)
    model.setup_optimization()
    return model._optimizer, model
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package, installed by pip as a user does, into a folder of its own."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("nemo_optim_bridge", "hydra_plugins"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return target


@pytest.fixture
def python(installed, tmp_path):
    """Run code in a new process that sees the installed package and not this repository."""

    def run(code: str, *arguments: str, **environment: str) -> str:
        script = tmp_path / "script.py"
        script.write_text("import sys\n" + textwrap.dedent(code))
        paths = os.pathsep.join((str(installed), str(HERE)))
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "NEMO_OPTIM_BRIDGE_DISABLE")}
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            env={**kept, "PYTHONPATH": paths, **environment}, cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


def test_the_installed_package_is_the_one_that_is_tried(python, installed):
    assert str(installed) in python("import nemo_optim_bridge; print(nemo_optim_bridge.__file__)")


def test_nothing_imports_nemo_by_itself(python):
    python("import torch, lightning.pytorch, hydra, nemo_optim_bridge, nemo_optim_bridge.plugins.nemo\n" + NO_NEMO)
    python("import nemo_optim_bridge.plugins.nemo; bad = {'torch', 'wrapt'} & set(sys.modules); assert not bad, bad")


def test_a_lightning_trainer_is_enough(python):
    trainer = "pl.Trainer(accelerator='cpu', logger=False, enable_checkpointing=False, enable_progress_bar=False)"
    out = python(
        STAND_IN
        + f"import lightning.pytorch as pl\ntrainer = {trainer}\n"
        + NO_NEMO
        + MODEL
        + textwrap.dedent("""
            made, model = optimizer('distributed_fused_adam_bridge', trainer, fp32_key_style='uniform',
                                    hyperparameters={'lr': 'current'})
            print(type(made).__module__, type(made).__name__)
            assert made.fp32_key_style == 'uniform'
            assert model.cfg.optim.name == 'distributed_fused_adam_bridge'
            stock, _ = optimizer('distributed_fused_adam', trainer)
            print(type(stock).__module__, type(stock).__name__)
            from nemo.core.optim.optimizers import AVAILABLE_OPTIMIZERS
            from nemo_optim_bridge.plugins.nemo import DistributedFusedAdamBridge, register
            register(); register()
            assert AVAILABLE_OPTIMIZERS['distributed_fused_adam_bridge'] is DistributedFusedAdamBridge
            """)
    )
    assert "nemo_optim_bridge.plugins.nemo.optimizer DistributedFusedAdamBridge" in out
    assert "nemo.core.optim.distributed_adam MegatronDistributedFusedAdam" in out


def test_hydra_runner_is_enough(python, tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("optim:\n  name: distributed_fused_adam_bridge\n")
    out = python(
        STAND_IN
        + textwrap.dedent(f"""
            from nemo.core.config import hydra_runner
            from nemo.core.optim.optimizers import AVAILABLE_OPTIMIZERS
            assert 'distributed_fused_adam_bridge' not in AVAILABLE_OPTIMIZERS

            @hydra_runner(config_path={str(tmp_path / "conf")!r}, config_name='config')
            def main(cfg):
                from nemo.core.optim.optimizers import get_optimizer
                print(get_optimizer(cfg.optim.name).func.__name__)

            main()
            """)
    )
    assert out.strip().split("\n")[-1] == "DistributedFusedAdamBridge"


def test_hydra_alone_does_not_import_nemo(python):
    code = (
        "import hydra\n@hydra.main(version_base=None)\ndef main(cfg):\n    " + NO_NEMO.replace("\n", "") + "\nmain()\n"
    )
    python(code + "assert 'hydra_plugins.nemo_optim_bridge_plugin' in sys.modules")


def test_opting_out_and_registering_by_hand(python):
    code = STAND_IN + textwrap.dedent("""
        import lightning.pytorch as pl
        pl.Trainer(accelerator='cpu', logger=False, enable_checkpointing=False)
        from nemo.core.optim.optimizers import AVAILABLE_OPTIMIZERS
        assert 'distributed_fused_adam_bridge' not in AVAILABLE_OPTIMIZERS
        import nemo_optim_bridge.plugins.nemo as plugin
        plugin.register()
        assert 'distributed_fused_adam_bridge' in AVAILABLE_OPTIMIZERS
        # and the parameters for args: {name: auto} are the class's own
        from nemo.core.optim.optimizers import parse_optimizer_args
        name = AVAILABLE_OPTIMIZERS['distributed_fused_adam_bridge'].__name__
        known = parse_optimizer_args(name, {'name': 'auto', 'params': {'lr': 1e-3, 'fp32_key_style': 'stock'}})
        assert known['fp32_key_style'] == 'stock' and known['hyperparameters'] == 'checkpoint', known
        assert 'amsgrad' not in known
        """)
    python(code, NEMO_OPTIM_BRIDGE_DISABLE="1")


def test_what_is_missing_is_said(python):
    out = python("""
        import lightning.pytorch as pl
        pl.Trainer(accelerator='cpu', logger=False, enable_checkpointing=False)
        from nemo.core.optim.optimizers import AVAILABLE_OPTIMIZERS, get_optimizer
        if 'distributed_fused_adam' in AVAILABLE_OPTIMIZERS:
            print('MissingDependencyError Apex Transformer Engine: both are here')
        else:
            try:
                get_optimizer('distributed_fused_adam_bridge')([], lr=1e-3)
            except Exception as error:
                print(type(error).__name__, error)
            import nemo_optim_bridge.plugins.nemo as plugin
            try:
                plugin.DistributedFusedAdamBridge
            except Exception as error:
                print(type(error).__name__, error)
        """)
    assert "MissingDependencyError" in out
    assert "Apex" in out
    assert "Transformer Engine" in out
