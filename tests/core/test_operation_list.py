"""The table of operations in the documentation is that of the code."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

from hpccomm.core.operation_list import OF_GRIDS, OF_SEVERAL, OPERATIONS

pytestmark = pytest.mark.serial

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "operations.md"
API_PAGES = runpy.run_path(str(ROOT / "docs" / "api_pages.py"))
MADE = runpy.run_path(str(ROOT / "docs" / "operations_page.py"))


def test_the_page_of_operations_is_what_the_list_says() -> None:
    written, expected = PAGE.read_text(encoding="utf-8"), MADE["as_markdown"]() + "\n"
    assert written == expected, f"{PAGE.name} is out of date; make it again, in the repository:\n    {MADE['COMMAND']}"


# -- the places that have to know an operation: docs/adding-an-operation.md ------------------------------------------

MADE_OF_OTHERS = {"all_reduce_sparse", "coalescing", "exchange_sparse"} | OF_SEVERAL | OF_GRIDS
OF_OBJECTS = {name for name in OPERATIONS if "object" in name}
OF_ARRAYS = OPERATIONS.keys() - MADE_OF_OTHERS - OF_OBJECTS
ON_GPUS = {"empty_symmetric"}
SHARED = {"empty_shared", "fence"} | ON_GPUS
MEASURED = OF_ARRAYS - SHARED - {"send", "recv", "monitored_barrier"}  # messages are measured in patterns of their own
IN_THE_MATRIX = OPERATIONS.keys() - SHARED - OF_GRIDS - {"coalescing", "exchange_sparse"}
PLACES = {  # what a transport other than MPI lacks, the page of operations says
    "hpccomm/mpi/backend.py": OF_ARRAYS - ON_GPUS,
    "hpccomm/mpi/objects.py": OF_OBJECTS | {"exchange_sparse"},
    "hpccomm/bench/operations.py": MEASURED,
    "tests/calls.py and tests/matrix/cases.py": IN_THE_MATRIX,
}


def defined_in(files: str) -> set[str]:
    """The names of the functions and methods that files define, and of what they assign to (``all_gather = ...``)."""
    text = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in files.split(" and "))
    nodes = list(ast.walk(ast.parse(text.replace("from __future__ import annotations", ""))))
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    return functions | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


@pytest.mark.parametrize("file", PLACES)
def test_no_place_has_forgotten_an_operation(file: str) -> None:
    missing = PLACES[file] - defined_in(file)
    assert not missing, f"{file} has no {', '.join(sorted(missing))}: see docs/adding-an-operation.md"


def test_the_guides_speak_of_every_operation() -> None:
    pages = [page for part in ("concepts", "how-to") for page in (ROOT / "docs" / part).glob("*.md")]
    text = "\n".join(API_PAGES["written_out"](page.read_text(encoding="utf-8")) for page in pages)
    silent = [name for name in OPERATIONS if f"`{name}" not in text and f"hc.{name}" not in text]
    assert not silent, f"no page of docs/concepts or docs/how-to has {', '.join(silent)}"


def test_the_list_of_places_is_on_the_page_for_those_who_add_one() -> None:
    page = (ROOT / "docs" / "adding-an-operation.md").read_text(encoding="utf-8")
    assert not [file for files in PLACES for file in files.split(" and ") if f"`{file}`" not in page]
