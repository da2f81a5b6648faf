"""The table of operations in the documentation is that of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

import hpccomm as hc
from hpccomm.core.operation_list import COMMAND, OPERATIONS, as_markdown

pytestmark = pytest.mark.serial

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "operations.md"


def test_the_page_of_operations_is_what_the_list_says() -> None:
    written, expected = PAGE.read_text(encoding="utf-8"), as_markdown() + "\n"
    assert written == expected, f"{PAGE.name} is out of date; make it again, in the repository:\n    {COMMAND}"


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {"all_reduce_sparse"}))
def test_every_operation_is_a_function_with_the_forms_of_the_list(name: str) -> None:
    assert callable(getattr(hc, name))
    assert hasattr(hc, f"{name}_init") == OPERATIONS[name].is_persistent
