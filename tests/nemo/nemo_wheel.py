"""Functions of NeMo 2.4.1, the last with the nlp collection, taken out of its wheel at test time."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

VERSION = "2.4.1"


def unpack_wheel(folder: Path) -> Path:
    """Download the wheel and return the folder it is unpacked in; skips the test where it cannot be had."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "-d",
        str(folder),
        f"nemo-toolkit=={VERSION}",
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"the NeMo {VERSION} wheel cannot be had: {error}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def _class_body(source: str, cls: str) -> list[ast.stmt]:
    found = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == cls]
    return found[0].body


def methods(path: Path, cls: str, names: list[str], namespace: dict[str, Any]) -> dict[str, Any]:
    """Return methods of a class, compiled in ``namespace``, without importing their module."""
    source = path.read_text()
    for node in _class_body(source, cls):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list = []
            code = compile(ast.Module([node], []), str(path), "exec", flags=annotations_off())
            exec(code, namespace)
    return {name: namespace[name] for name in names}


def assignment(path: Path, cls: str, method: str, attribute: str) -> str:
    """Return the source of the statement in a method that assigns ``self.<attribute>``."""
    source = path.read_text()
    for node in _class_body(source, cls):
        if isinstance(node, ast.FunctionDef) and node.name == method:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Assign) and ast.unparse(inner.targets[0]) == f"self.{attribute}":
                    return textwrap.dedent(ast.unparse(inner))
    raise LookupError(attribute)


def annotations_off() -> int:
    """Return the compiler flag under which annotations are not evaluated."""
    import __future__

    return __future__.annotations.compiler_flag
