"""What the core imports late: one table, every name of which exists."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

import hpccomm
from hpccomm.core import late

PACKAGE = Path(hpccomm.__file__).parent
TABLE = {name: value for name, value in vars(late).items() if name.isupper()}

pytestmark = pytest.mark.once


@pytest.mark.parametrize("name", TABLE)
def test_each_name_of_the_table_is_defined_in_its_module(name: str) -> None:
    module, _, attribute = TABLE[name].partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    defined = {node.name for node in ast.parse(Path(spec.origin).read_text()).body if hasattr(node, "name")}
    assert attribute in defined


def test_no_other_file_imports_by_a_name_in_text() -> None:
    allowed = {PACKAGE / "core" / "late.py"}
    named = [
        (path.name, node.lineno)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if path not in allowed
        and isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("hpccomm.")
        and ":" in node.value
        and " " not in node.value
    ]
    assert named == []
