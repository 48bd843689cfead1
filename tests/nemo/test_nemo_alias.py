"""The bridge's name counts as distributed_fused_adam where NeMo 2.4.1's nlp collection compares it."""

from __future__ import annotations

import logging
import sys
import types
from contextlib import contextmanager, nullcontext

import pytest
from nemo_wheel import assignment, methods, unpack_wheel

omegaconf = pytest.importorskip("omegaconf")

from nemo_optim_bridge.errors import TargetError  # noqa: E402
from nemo_optim_bridge.plugins.nemo import alias  # noqa: E402

pytestmark = pytest.mark.nemo

NLP = "collections/nlp"


@pytest.fixture(scope="module")
def nemo(tmp_path_factory):
    return unpack_wheel(tmp_path_factory.mktemp("wheel")) / "nemo"


def recorder(name):
    return type(name, (), {"__init__": lambda self, **kwargs: self.__dict__.update(kwargs)})


@pytest.fixture
def builder(nemo):
    """MegatronTrainerBuilder with its own two methods."""
    namespace = {
        **{name: recorder(name) for name in ("NLPDDPStrategy", "NLPFSDPStrategy", "PipelineMixedPrecisionPlugin",
                                             "MegatronHalfPrecisionPlugin", "FSDPMixedPrecisionPlugin")},
        "logging": logging.getLogger("nemo"), "sys": sys,
    }  # fmt: skip
    found = methods(nemo / NLP / "parts/megatron_trainer_builder.py", "MegatronTrainerBuilder",
                    ["_training_strategy", "_plugins"], namespace)  # fmt: skip
    module = types.SimpleNamespace(MegatronTrainerBuilder=type("MegatronTrainerBuilder", (), found))
    alias.HOOKS["nemo.collections.nlp.parts.megatron_trainer_builder"](module)

    def build(name, **model):
        cfg = {
            "trainer": {"precision": "bf16", "devices": 8, "num_nodes": 1},
            "model": {"optim": {"name": name}, "megatron_amp_O2": True, "gradient_as_bucket_view": False, **model},
            "cluster_type": None,
        }
        made = module.MegatronTrainerBuilder()
        made.cfg = omegaconf.OmegaConf.create(cfg)
        return made

    return build


def plugin_names(made):
    return [type(plugin).__name__ for plugin in made._plugins()]


def test_the_builder_chooses_the_plugin_of_a_distributed_optimizer(builder):
    assert plugin_names(builder(alias.STOCK_NAME)) == ["PipelineMixedPrecisionPlugin"]
    assert plugin_names(builder("fused_adam")) == ["MegatronHalfPrecisionPlugin"]
    made = builder(alias.BRIDGE_NAME)
    assert plugin_names(made) == ["PipelineMixedPrecisionPlugin"]
    assert made.cfg.model.optim.name == alias.BRIDGE_NAME


def test_fsdp_is_refused_as_for_the_stock_name(builder):
    for name in (alias.STOCK_NAME, alias.BRIDGE_NAME):
        made = builder(name, fsdp=True)
        with pytest.raises(AssertionError, match="FSDP"):
            made._training_strategy()
        assert made.cfg.model.optim.name == name


@pytest.fixture
def base_model(nemo):
    """MegatronBaseModel with its constructor's comparison and its own _validate_and_override_config."""
    path = nemo / NLP / "models/language_modeling/megatron_base_model.py"
    state = types.SimpleNamespace(data_parallel_size=2, model_parallel_size=1)
    namespace = {"AppState": lambda: state, "logging": logging.getLogger("nemo"), "open_dict": omegaconf.open_dict}
    found = methods(path, "MegatronBaseModel", ["_validate_and_override_config"], namespace)
    decide = compile(assignment(path, "MegatronBaseModel", "__init__", "with_distributed_adam"), str(path), "exec")

    def __init__(self, cfg):  # noqa: N807
        self.cfg = self._cfg = cfg
        self.use_mcore_dist_optim = False
        exec(decide, {}, {"self": self, "cfg": cfg})
        self._validate_and_override_config()

    def setup_optimization(self):
        return "set up"

    module = types.ModuleType(alias._BASE_MODEL)
    own = {**found, "__init__": __init__, "setup_optimization": setup_optimization}
    module.MegatronBaseModel = type("MegatronBaseModel", (), own)
    return module


def config(name):
    return omegaconf.OmegaConf.create(
        {"optim": {"name": name}, "gradient_accumulation_fusion": True, "megatron_amp_O2": True}
    )  # fmt: skip


def test_the_model_takes_the_distributed_path(base_model):
    without = base_model.MegatronBaseModel(config(alias.BRIDGE_NAME))
    assert without.with_distributed_adam is False  # as NeMo decides by itself
    assert without.cfg.gradient_accumulation_fusion is False
    alias.HOOKS[alias._BASE_MODEL](base_model)
    for name, distributed in ((alias.BRIDGE_NAME, True), (alias.STOCK_NAME, True), ("fused_adam", False)):
        model = base_model.MegatronBaseModel(config(name))
        assert model.with_distributed_adam is distributed
        assert model.cfg.gradient_accumulation_fusion is distributed
        assert model.cfg.optim.name == name  # what is saved keeps its name


def test_a_model_that_hides_the_hook_is_refused(base_model):
    alias.HOOKS[alias._BASE_MODEL](base_model)
    model = type("Own", (base_model.MegatronBaseModel,), {"_validate_and_override_config": lambda self: None})
    with pytest.raises(TargetError, match="Own"):
        model(config(alias.BRIDGE_NAME)).setup_optimization()
    assert model(config("fused_adam")).setup_optimization() == "set up"
    assert base_model.MegatronBaseModel(config(alias.BRIDGE_NAME)).setup_optimization() == "set up"


def test_a_trainer_built_too_early_is_refused(base_model):
    alias.HOOKS[alias._BASE_MODEL](base_model)
    model = base_model.MegatronBaseModel(config(alias.BRIDGE_NAME))
    for name, fine in (("PipelineMixedPrecisionPlugin", True), ("MegatronHalfPrecisionPlugin", False)):
        model.trainer = types.SimpleNamespace(precision_plugin=type("Own", (recorder(name),), {})())
        with nullcontext() if fine else pytest.raises(TargetError, match="built before"):
            model.setup_optimization()


def test_hooks_twice_are_hooks_once(base_model):
    alias.HOOKS[alias._BASE_MODEL](base_model)
    once = base_model.MegatronBaseModel._validate_and_override_config
    alias.HOOKS[alias._BASE_MODEL](base_model)
    assert base_model.MegatronBaseModel._validate_and_override_config is once


@pytest.mark.parametrize("module", alias.HOOKS)
def test_a_nemo_without_these_classes_is_left_alone(module):
    alias.HOOKS[module](types.ModuleType(module))


def test_without_the_hooks_the_optimizer_refuses(base_model, monkeypatch):
    alias.check_alias()
    monkeypatch.setitem(sys.modules, alias._BASE_MODEL, base_model)
    with pytest.raises(TargetError, match="register"):
        alias.check_alias()
    alias.HOOKS[alias._BASE_MODEL](base_model)
    alias.check_alias()


@pytest.mark.parametrize(
    ("module", "cls"),
    [("nlp_adapter_mixins", "NLPAdapterModelMixin"), ("multimodal_adapter_mixins", "MultimodalAdapterModelMixin")],
)
def test_adapters_are_refused_as_for_the_stock_name(nemo, module, cls):
    found = methods(nemo / NLP / f"parts/mixins/{module}.py", cls, ["add_adapter"], {})
    made = types.SimpleNamespace(**{cls: type(cls, (), found)})
    alias.HOOKS[f"nemo.collections.nlp.parts.mixins.{module}"](made)
    model = getattr(made, cls)()
    model.cfg = config(alias.BRIDGE_NAME)
    with pytest.raises(ValueError, match="not supported for PEFT"):
        model.add_adapter([])
    assert model.cfg.optim.name == alias.BRIDGE_NAME


@contextmanager
def use_stock(cfg):
    with alias.spelled_as_stock(cfg.optim):
        assert cfg.optim.name == alias.STOCK_NAME
        yield


@pytest.mark.parametrize("flag", [omegaconf.read_write, omegaconf.open_dict, nullcontext])
def test_names_are_spelled_back_whatever_happens(flag):
    cfg = omegaconf.OmegaConf.create({"which": alias.BRIDGE_NAME, "optim": {"name": "${which}"}})
    omegaconf.OmegaConf.set_readonly(cfg, True)
    with flag(cfg) if flag is not nullcontext else nullcontext(), pytest.raises(KeyError), use_stock(cfg):
        raise KeyError
    assert cfg.optim.name == alias.BRIDGE_NAME
    assert omegaconf.OmegaConf.to_container(cfg, resolve=False)["optim"]["name"] == "${which}"


@pytest.mark.parametrize("optim", [None, {}, {"name": "adamw"}, {"lr": 1}])
def test_other_configurations_are_left_alone(optim):
    cfg = optim if optim is None else omegaconf.OmegaConf.create(optim)
    with alias.spelled_as_stock(cfg):
        assert cfg == optim
