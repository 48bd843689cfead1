"""The layers, and the house rules that a reader of the package relies on, enforced on its syntax trees.

errors  <-  core  <-  formats  <-  plugins
                          ^-----   cli
"""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nemo_optim_bridge
from nemo_optim_bridge.errors import MissingDependencyError

PACKAGE = "nemo_optim_bridge"
ROOT = Path(nemo_optim_bridge.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in sorted(ROOT.rglob("*.py"))
}
MAY_IMPORT = {
    "": {"errors", "version"},
    "version": set(),
    "errors": set(),
    "core": {"version", "errors", "core"},
    "formats": {"version", "errors", "core", "formats"},
    "plugins": {"version", "errors", "core", "formats", "plugins"},
    "cli": {"", "version", "errors", "core", "formats", "cli"},
}
READERS = {"nanotron", "torch_dist"}
CHOOSER = "checkpoints"  # opens a checkpoint of any format, so it knows all readers
FRAMEWORKS = {"apex", "lightning", "megatron", "nanotron", "nemo", "pytorch_lightning", "transformer_engine"}
HEAVY = FRAMEWORKS | {"torch", "numpy", "safetensors", "yaml", "rich", "typer"}


class Import:
    """One imported module: its absolute name, and whether the import statement runs when its module is imported."""

    def __init__(self, name: str, *, at_import: bool) -> None:
        self.name = name
        self.at_import = at_import

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    @property
    def inside(self) -> str | None:
        """The name below the package, or None for a foreign module."""
        return self.name[len(PACKAGE) :].lstrip(".") if self.top == PACKAGE else None


def runtime_imports(module: str, tree: ast.AST) -> Iterator[Import]:
    """Yield what a module imports, leaving out ``if TYPE_CHECKING:`` blocks."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            at_import = False
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, at_import=at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(name, at_import=at_import) for name in _imported_names(module, node))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import)

    yield from visit(tree, True)


def _imported_names(module: str, node: ast.ImportFrom) -> list[str]:
    is_package = module in MODULES and MODULES[module].name == "__init__.py"
    if node.level:
        parts = [PACKAGE, *filter(None, module.split("."))]
        base = parts[: len(parts) - node.level + is_package]
        name = ".".join([*base, *([node.module] if node.module else [])])
    else:
        name = node.module or ""
    if not name.startswith(PACKAGE):
        return [name]
    submodules = [f"{name}.{alias.name}" for alias in node.names]
    return [sub if sub[len(PACKAGE) + 1 :] in MODULES else name for sub in submodules]


def layer(module: str) -> str:
    first = module.partition(".")[0]
    return "cli" if first == "__main__" else first


def group(module: str) -> str:
    """The second part of a dotted name: which reader, or which plugin."""
    return module.split(".")[1] if "." in module else ""


def import_problems(module: str, source: str) -> list[str]:
    """List the imports of a module that break the layering."""
    problems = []
    for imported in runtime_imports(module, ast.parse(source)):
        inside, here = imported.inside, layer(module)
        if inside is not None and layer(inside) not in MAY_IMPORT.get(here, set()):
            problems.append(f"{module or PACKAGE} imports {inside or PACKAGE}: not a layer below")
        elif inside is not None and here == layer(inside) and group(inside) != group(module):
            if here == "plugins" and group(inside):
                problems.append(f"{module} imports {inside}: another plugin")
            if here == "formats" and group(inside) in READERS and group(module) != CHOOSER:
                problems.append(f"{module} imports {inside}: another format's reader")
        elif imported.top in FRAMEWORKS and here != "plugins":
            problems.append(f"{module} imports {imported.name}: only plugins may")
        elif imported.top == "torch" and imported.at_import and here != "plugins":
            problems.append(f"{module} imports {imported.name} when it is imported")
    return problems


def rule_problems(module: str, source: str) -> list[str]:
    """List what a module does that no module may: assert, print, run pickles, evaluate text."""
    tree = ast.parse(source)
    problems = [] if ast.get_docstring(tree) else ["no docstring"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            problems.append(f"line {node.lineno}: assert")
        elif isinstance(node, ast.ImportFrom) and node.module in ("pickle", "_pickle", "cloudpickle", "dill"):
            problems += [f"line {node.lineno}: {n.name}" for n in node.names if n.name in ("load", "loads")]
        elif isinstance(node, ast.Call):
            problems += [f"line {node.lineno}: {problem}" for problem in _call_problems(node, layer(module))]
    return problems


def _call_problems(node: ast.Call, here: str) -> Iterator[str]:
    name = ast.unparse(node.func)
    options = {option.arg: ast.unparse(option.value) for option in node.keywords}
    if name == "print" and here != "cli":
        yield "print"
    if name in ("eval", "exec", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open"):
        yield name
    if name == "torch.load" and options.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if options.get("allow_pickle", "False") != "False":
        yield "allow_pickle"


def all_problems(check: Callable[[str, str], list[str]]) -> list[str]:
    return [f"{name or PACKAGE}: {p}" for name, path in MODULES.items() for p in check(name, path.read_text())]


def test_no_module_imports_upward_or_sideways() -> None:
    assert all_problems(import_problems) == []


def test_house_rules() -> None:
    assert all_problems(rule_problems) == []


def test_every_module_belongs_to_a_layer() -> None:
    assert {layer(module) for module in MODULES} <= MAY_IMPORT.keys()


def loaded_after(statements: str) -> set[str]:
    """Top-level names in sys.modules after running statements in a fresh interpreter."""
    code = f"{statements}\nimport json, sys\nprint(json.dumps(sorted({{n.partition('.')[0] for n in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert loaded_after(f"import {PACKAGE}") & HEAVY == set()


@pytest.mark.parametrize(
    ("checkpoint", "reads_yaml"),
    [("nanotron/nt04-llama_tied-z0-tp2-pp1-dp1-ep1", True), ("nemo/fused_dense/ckpt", False)],
)
def test_inspect_imports_only_what_headers_need(checkpoint: str, reads_yaml: bool) -> None:
    path = Path(__file__).parent / "data" / checkpoint
    loaded = loaded_after(f"from {PACKAGE}.__main__ import main\nassert main(['inspect', {str(path)!r}]) in (0, 1)")
    unneeded = {"concurrent", "multiprocessing", "rich", "safetensors", "torch", "xxhash"}
    assert loaded & (FRAMEWORKS | unneeded) == set()
    assert loaded & {"yaml", "isal"} == {"yaml" if reads_yaml else "isal"}  # isal: the CRCs of common.pt are checked


def test_no_module_outside_plugins_brings_in_torch_or_a_framework() -> None:
    names = [f"{PACKAGE}.{module}".rstrip(".") for module in MODULES if layer(module) != "plugins"]
    assert loaded_after("\n".join(f"import {name}" for name in names)) & (FRAMEWORKS | {"torch"}) == set()


@pytest.mark.parametrize("module", MODULES)
def test_all_names_what_exists(module: str) -> None:
    try:
        loaded = importlib.import_module(f"{PACKAGE}.{module}".rstrip("."))
    except ImportError as error:
        if layer(module) == "plugins" and (error.name or "").partition(".")[0] in FRAMEWORKS:
            pytest.skip(f"{error.name} is not installed")
        raise
    names = list(getattr(loaded, "__all__", []))
    assert len(names) == len(set(names))
    for name in names:
        try:
            getattr(loaded, name)
        except MissingDependencyError:
            assert layer(module) in ("", "plugins")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("errors", "from nemo_optim_bridge.core import plan"),
        ("core.region", "from nemo_optim_bridge import formats"),
        ("core.region", "from ..formats import torch_zip"),
        ("core.region", "import torch"),
        ("core.region", "if True:\n    from torch import nn"),
        ("core.region", "class A:\n    import torch.nn"),
        ("core.region", "def f():\n    import nanotron"),
        ("formats.nanotron.names", "import nemo_optim_bridge.formats.torch_dist"),
        ("formats.topology", "from nemo_optim_bridge.formats.nanotron import names"),
        ("formats.nanotron.names", "from nemo_optim_bridge.plugins import nanotron"),
        ("plugins.nemo.register", "from nemo_optim_bridge.plugins.dcp import x"),
        ("plugins.nanotron", "from nemo_optim_bridge import __main__"),
        ("cli", "from nemo_optim_bridge.plugins import nemo"),
        ("", "from nemo_optim_bridge.core.region import Region"),
    ],
)
def test_a_forbidden_import_is_seen(module: str, source: str) -> None:
    assert len(import_problems(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.region", "def f():\n    import torch"),
        ("core.region", "from nemo_optim_bridge.errors import BridgeError"),
        ("core.region", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("formats.nanotron.names", "from nemo_optim_bridge.formats import topology"),
        ("formats.nanotron.names", "from nemo_optim_bridge.formats.nanotron.reader import read"),
        ("plugins.nanotron", "import nanotron, torch\nfrom nemo_optim_bridge.formats.nanotron import names"),
        ("cli", "from nemo_optim_bridge import __version__\nfrom nemo_optim_bridge.formats import nanotron"),
    ],
)
def test_an_allowed_import_is_not(module: str, source: str) -> None:
    assert import_problems(module, source) == []


@pytest.mark.parametrize(
    "statement",
    [
        "assert x",
        "print(x)",
        "import pickle\npickle.loads(x)",
        "from pickle import loads",
        "eval(x)",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "np.load(x, allow_pickle=True)",
    ],
)
def test_a_broken_rule_is_seen(statement: str) -> None:
    assert len(rule_problems("core.region", f'"""Say something."""\n{statement}')) == 1
