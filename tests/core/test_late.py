"""What the core imports late: one table, every name of which exists."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import hpccomm
from hpccomm.core import late

PACKAGE = Path(hpccomm.__file__).parent
TABLE = {name: value for name, value in vars(late).items() if name.isupper()}
TABLE_FILE = PACKAGE / "core" / "late.py"

pytestmark = pytest.mark.once


@pytest.mark.parametrize("name", TABLE)
def test_each_name_of_the_table_is_defined_in_its_module(name: str) -> None:
    module, _, attribute = TABLE[name].partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    defined = {node.name for node in ast.parse(Path(spec.origin).read_text()).body if hasattr(node, "name")}
    assert not attribute or attribute in defined


def names_a_module(text: str) -> bool:
    """Whether a text is the name of a module in hpccomm, or begins with one, as those of the table do."""
    root, *parts = text.partition(":")[0].split(".")
    path = PACKAGE.joinpath(*parts)
    return root == "hpccomm" and all(parts) and bool(parts) and (path.is_dir() or path.with_suffix(".py").exists())


def named_as_text(source: str) -> list[str]:
    """Return the texts of a file that name modules of hpccomm: to import them, or to find them in `sys.modules`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        text = ast.unparse(node) if isinstance(node, ast.expr) else ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and names_a_module(node.value):
            found.append(text)
        if isinstance(node, ast.JoinedStr) and text[2:].startswith("hpccomm."):
            found.append(text)
        if re.match(r"(importlib\.import_module|__import__|sys\.modules)\W*(get\W*)?['\"]hpccomm\b", text):
            found.append(text)
    return found


def test_no_other_file_names_a_module_as_text() -> None:
    named = {str(path): named_as_text(path.read_text()) for path in PACKAGE.rglob("*.py") if path != TABLE_FILE}
    assert {path: texts for path, texts in named.items() if texts} == {}


@pytest.mark.parametrize(
    "source",
    [
        "importlib.import_module('hpccomm.nccl')",
        "FILES = resources.files('hpccomm.cuda')",
        "late('hpccomm.nccl.providers:NCCL')",
        "TABLE = {'run': Command('hpccomm.run.command', 'text')}",
        "world = sys.modules['hpccomm'].WORLD",
        "root = sys.modules.get('hpccomm')",
        "name = f'hpccomm.{module}'",
    ],
)
def test_a_module_that_is_named_as_text_is_found(source: str) -> None:
    assert named_as_text(source)


@pytest.mark.parametrize(
    "source", ["'hpccomm.other'", "'hpccomm.'", "f'hpccomm{x}'", "import hpccomm.mpi", "'see hpccomm.mpi'"]
)
def test_other_text_is_no_name_of_a_module(source: str) -> None:
    assert named_as_text(source) == []
