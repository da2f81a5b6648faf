"""Advice about speed that the recorded tables do not show fails the build of the pages (docs/faster.py)."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from .launch import ROOT

pytestmark = [pytest.mark.serial, pytest.mark.once]
value = runpy.run_path(str(ROOT / "tools" / "recorded.py"))["value"]

TABLES = """\
$ mpiexec -n 2 hpccomm bench

cut along the first axis
      face    one call  persistent
      64 B        2.00        1.00
     1 KiB           -        4.00

operation                             mpi4py  compiled
                                        (ns)      (ns)
all_reduce                               216       126
all_reduce, async + wait                 349       251
sum of float64                       0.16 ms    330 us
   4096  hpccomm                         97%        3%
"""
PAGE = """\
# A page

```{{{}}} halo, cut along the first axis
64 B: {}
64 B: {}
```
"""


@pytest.mark.parametrize(
    ("title", "row", "column", "number"),
    [
        ("cut along", "64 B", "one call", 2.0),
        ("", "64 B", "persistent", 1.0),
        ("operation", "all_reduce", "compiled", 126.0),
        ("", "all_reduce, async + wait", "mpi4py", 349.0),
        ("", "sum of float64", "mpi4py", 160.0),
        ("", "sum of float64", "compiled", 330.0),
        ("", "4096 hpccomm", "mpi4py", 97.0),
    ],
)
def test_a_number_is_found_by_its_row_and_column(title: str, row: str, column: str, number: float) -> None:
    assert value(TABLES, title, row, column) == number


@pytest.mark.parametrize(
    ("title", "row", "column"),
    [
        ("cut along the last", "64 B", "one call"),
        ("", "64", "one call"),
        ("", "64 B", "call"),
        ("", "1 KiB", "one call"),
    ],
)
def test_what_is_not_in_the_tables_is_an_error(title: str, row: str, column: str) -> None:
    with pytest.raises(LookupError):
        value(TABLES, title, row, column)


@pytest.mark.parametrize(
    ("directive", "columns", "said"),
    [
        ("faster", ("persistent", "one call"), None),
        ("slower", ("one call", "persistent"), None),
        ("faster", ("one call", "persistent"), "'64 B: one call' is 2, and '64 B: persistent' is 1"),
        ("slower", ("persistent", "one call"), "'64 B: one call' is 2, and '64 B: persistent' is 1"),
        ("faster", ("persistent", "one"), "the row '64 B' has no number in a column 'one'"),
    ],
)
def test_advice_that_the_tables_do_not_show_fails_the_build(
    directive: str, columns: tuple[str, str], said: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("myst_parser", reason="make docs installs Sphinx")
    from sphinx.cmd.build import main

    (tmp_path / "mpich-halo.txt").write_text(TABLES)
    (tmp_path / "index.md").write_text(PAGE.format(directive, *columns))
    (tmp_path / "conf.py").write_text(
        f"import sys\nfrom pathlib import Path\nsys.path.insert(0, {str(ROOT / 'docs')!r})\nimport faster\n"
        f"faster.BENCHMARKS = Path({str(tmp_path)!r})\nextensions = ['myst_parser', 'faster']\n"
    )
    status = main(["-W", "--keep-going", "-q", "-b", "text", str(tmp_path), str(tmp_path / "out")])
    if said is None:
        assert status == 0
        text = (tmp_path / "out" / "index.txt").read_text()
        times = "2.0 times as fast" if directive == "faster" else "2.0 times the time"
        assert f"Recorded: {times} with MPICH." in text
    else:
        assert status != 0
        assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    "file", sorted((ROOT / "docs" / "benchmarks").glob("*-collectives.txt")), ids=lambda file: file.stem
)
def test_most_collectives_are_faster_than_mpi4pys_as_the_readme_says(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        "most operations are [faster than mpi4py's](docs/reference/benchmarks.md)" in (ROOT / "README.md").read_text()
    )
    monkeypatch.syspath_prepend(ROOT / "tools")
    of_operations = runpy.run_path(str(ROOT / "tools" / "benchmark-ratios"))["ratios"](file.read_text())
    rows = [ratio for sizes in of_operations.values() for ratio in sizes.values()]
    assert sum(ratio < 1 for ratio in rows) > 0.8 * len(rows)
