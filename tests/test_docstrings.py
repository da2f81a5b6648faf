"""Every public function says what it returns, and shows a result that the doctests compare."""

from __future__ import annotations

import doctest
import inspect
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import hpccomm as hc
import hpccomm.debug
import hpccomm.mpi4py
from hpccomm.process.settings import VARIABLES

pytestmark = pytest.mark.serial

PUBLIC = [(name, getattr(hc, name)) for name in hc.__all__]
PUBLIC += [(f"checkpoint.{name}", getattr(hc.checkpoint, name)) for name in hc.checkpoint.__all__]
PUBLIC += [(f"mpi4py.{name}", getattr(hpccomm.mpi4py, name)) for name in hpccomm.mpi4py.__all__]
PUBLIC += [(f"debug.{name}", getattr(hpccomm.debug, name)) for name in hpccomm.debug.__all__]
FUNCTIONS = [(name, thing) for name, thing in PUBLIC if inspect.isfunction(thing)]
CLASSES = [
    (name, thing) for name, thing in PUBLIC if inspect.isclass(thing) and not issubclass(thing, (Exception, Warning))
]

every_function = pytest.mark.parametrize(("name", "function"), FUNCTIONS, ids=[name for name, _ in FUNCTIONS])
everything = pytest.mark.parametrize(
    ("name", "thing"), FUNCTIONS + CLASSES, ids=[name for name, _ in FUNCTIONS + CLASSES]
)


def section(thing: Any, title: str) -> str:
    """The text under a heading of a docstring in NumPy style; "" if there is none."""
    lines = (inspect.getdoc(thing) or "").splitlines()
    headings = [i for i in range(len(lines) - 1) if lines[i] and lines[i + 1] == "-" * len(lines[i])]
    for i, end in zip(headings, [*headings[1:], len(lines)]):
        if lines[i] == title:
            return "\n".join(lines[i + 2 : end]).strip()
    return ""


def test_public_functions_and_classes_are_found() -> None:
    assert len(FUNCTIONS) > 60
    assert len(CLASSES) > 10
    assert len(FUNCTIONS) + len(CLASSES) > 0.9 * len(PUBLIC)


@every_function
def test_a_function_says_what_it_returns(name: str, function: Any) -> None:
    assert section(function, "Returns"), f"{name} has no section 'Returns'"


@everything
def test_an_example_shows_a_result(name: str, thing: Any) -> None:
    examples = doctest.DocTestParser().get_examples(section(thing, "Examples"))
    assert examples, f"{name} has no section 'Examples' with a statement"
    assert any(example.want for example in examples), f"no example of {name} shows a result, so none can fail"
    skipped = [example for example in examples if example.options.get(doctest.SKIP)]
    assert not skipped, f"an example of {name} is skipped"


def test_a_function_without_a_result_is_noticed() -> None:
    def plain() -> None:
        """Do something.

        Examples
        --------
        >>> x = 1
        """

    assert section(plain, "Returns") == ""
    with pytest.raises(AssertionError, match="has no section 'Returns'"):
        test_a_function_says_what_it_returns("plain", plain)
    with pytest.raises(AssertionError, match="shows a result"):
        test_an_example_shows_a_result("plain", plain)


# -- the pages of the API ----------------------------------------------------------------------------

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted((DOCS / "api").glob("*.md"))
API_PAGES = runpy.run_path(str(DOCS / "api_pages.py"))


def documented() -> list[str]:
    """The names that the pages describe, each as often as they do."""
    names = []
    for page in PAGES:
        prefix = ""
        for line in API_PAGES["written_out"](page.read_text(encoding="utf-8")).splitlines():
            if match := re.match(r"\.\. currentmodule:: hpccomm\.?(\w*)", line):
                prefix = match[1] + "." if match[1] else ""
            elif match := API_PAGES["DESCRIBED"].match(line):
                names.append(prefix + match[1])
    return names


def test_each_public_name_is_on_one_page_of_the_api() -> None:
    assert sorted(documented()) == sorted(name for name, _ in PUBLIC)


def test_each_public_name_is_in_the_table_at_the_top_of_its_page() -> None:
    in_tables = [name for page in PAGES for name in API_PAGES["names_in_tables"](page.read_text(encoding="utf-8"))]
    bare = [name.rpartition(".")[2] for name, _ in PUBLIC]
    assert sorted([*in_tables, "group"]) == sorted(bare)  # that is GroupMember


def test_each_environment_variable_is_in_the_table() -> None:
    root = Path(__file__).parents[1]
    used = {
        name
        for file in (root / "hpccomm").rglob("*.py")
        for name in re.findall(r"\bHPCCOMM_[A-Z_]*[A-Z]\b", file.read_text(encoding="utf-8"))
    }
    page = (root / "docs" / "reference" / "variables.md").read_text(encoding="utf-8")
    assert used == VARIABLES == set(re.findall(r"^\| `(HPCCOMM_[A-Z_]+)", page, re.M))


def test_each_thread_is_in_the_table() -> None:
    files = [file.read_text(encoding="utf-8") for file in (DOCS.parent / "hpccomm").rglob("*.py")]
    started = {name for text in files for name in re.findall(r'(?:name|NAME) ?= ?"(hpccomm-[a-z-]+)"', text)}
    page = (DOCS / "threads.md").read_text(encoding="utf-8")
    assert started == set(re.findall(r"^\| `(hpccomm-[a-z-]+)`", page, re.M))
    assert sum(len(re.findall(r"threading\.Thread\(", text)) for text in files) == len(started) + 1  # two of progress


@pytest.mark.parametrize("page", ["SECURITY.md", "tests/README.md"])
def test_each_row_of_a_table_names_tests_that_are_there(page: str) -> None:
    lines = (DOCS.parent / page).read_text(encoding="utf-8").splitlines()
    rows = [row for row in lines if row.startswith("| ") and not row.endswith("| tests |")]
    assert rows
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS.parent / "tests").rglob("test_*.py"))
    for row in rows:
        named = re.findall(r"`(test_\w+)`|`((?:\w+/)?test_\w+\.py)`", row)
        assert named, row
        for function, file in named:
            assert (f"def {function}(" in tests) if function else (DOCS.parent / "tests" / file).exists(), (
                function or file
            )
