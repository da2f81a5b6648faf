"""Tables, CSV, JSON and pictures."""

from __future__ import annotations

import csv
import io
import json
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.bench import plot, registry, report
from hpccomm.bench.measure import Timing
from hpccomm.bench.registry import Case
from hpccomm.bench.report import Row, Table, row
from hpccomm.cli import machine

ALL_REDUCE = registry.load()["all_reduce"]


def timing(*microseconds: float) -> Timing:
    return Timing(np.array(microseconds) * 1e-6, 1)


def rows(size: int = 4096, wrong: int | None = None) -> list[Row]:
    case = Case(0, 4, size // 4, np.dtype(np.float32))
    ours = timing(1, 2, 3)
    return [
        row(ALL_REDUCE, case, "hpccomm", ours, ours, wrong),
        row(ALL_REDUCE, case, "mpi4py", timing(1.0, 1.6, 9), ours, wrong),
        row(ALL_REDUCE, case, "gloo", None, ours, note="not installed (pip install torch)"),
    ]


@pytest.mark.serial
def test_a_row_says_what_was_measured() -> None:
    ours, raw, gloo = rows()
    assert (ours.median_us, ours.min_us) == (pytest.approx(2), pytest.approx(1))
    assert ours.algbw_gbs == pytest.approx(4096 / 2e-6 / 1e9)
    assert ours.busbw_gbs == pytest.approx(1.5 * 4096 / 2e-6 / 1e9)
    assert (ours.ratio, raw.ratio) == (1.0, pytest.approx(2 / 1.6))
    assert (gloo.median_us, gloo.ratio, gloo.iterations) == (None, None, 0)


@pytest.mark.serial
def test_the_columns_of_a_table_are_aligned_and_fit_in_120() -> None:
    table = Table(ALL_REDUCE, ["hpccomm", "mpi4py", "gloo"], check=True)
    _, names, units = table.head().splitlines()
    lines = [table.line(rows(size, 0)) for size in (8, 4096, 1 << 20)]
    assert {len(line) for line in [names, *lines]} == {len(names)}
    assert len(names) <= 120
    for name, unit in (("size", "(bytes)"), ("time", "(us)"), ("busbw", "(GB/s)")):
        assert names.index(name) + len(name) == units.index(unit, names.index(name) - 4) + len(unit)
    assert lines[1].split() == ["4096", "1024", "2.00", "1.00", "2.98", "2.05", "3.07", "1.60", "1.25", "-", "-", "ok"]


@pytest.mark.serial
def test_the_summary_has_the_mean_ratio_and_why_columns_are_empty() -> None:
    table = Table(ALL_REDUCE, ["hpccomm", "mpi4py", "gloo"])
    table.line(rows(8))
    table.line([replace(each, ratio=each.ratio and 0.8 * each.ratio) for each in rows()])
    mean = f"{1.5 * (8 + 4096) / 2 / 2e-6 / 1e9:.3f}"
    assert table.summary().splitlines() == [
        f"# Avg bus bandwidth: {mean} GB/s",
        "# hpccomm takes 1.12 times the time of mpi4py, geometric mean of 2 sizes",
        "# gloo: not measured: not installed (pip install torch)",
    ]


@pytest.mark.serial
def test_wrong_results_are_shouted() -> None:
    table = Table(ALL_REDUCE, ["hpccomm", "mpi4py", "gloo"], check=True)
    line = table.line([replace(each, wrong=each.wrong and 3) for each in rows(8, 1)])
    assert line.endswith(" WRONG")
    assert "# WRONG: mpi4py, 8 bytes: 3 elements differ from NumPy's" in table.summary()


@pytest.mark.serial
def test_benchmarks_without_sizes_and_with_rates_have_other_columns() -> None:
    benchmarks = registry.load()
    barrier = Table(benchmarks["barrier"], ["hpccomm"])
    assert barrier.head().splitlines()[1].split() == ["time", "min", "p99"]
    case = Case(0, 4, 2, np.dtype(np.float32))
    rated = row(benchmarks["message_rate"], case, "hpccomm", timing(0.5))
    assert rated.messages_per_s == pytest.approx(4e6)  # two pairs, 2 million messages each
    assert Table(benchmarks["message_rate"], ["hpccomm"]).line([rated]).split()[-1] == "4.000"


@pytest.mark.serial
@pytest.mark.parametrize(
    ("time", "text"), [(None, "-"), (0.1234, "0.12"), (999.994, "999.99"), (1234.5, "1234.5"), (2e6, "2000000")]
)
def test_times(time: float | None, text: str) -> None:
    assert report.microseconds(time) == text


@pytest.mark.serial
@pytest.mark.parametrize(("value", "text"), [(None, "-"), (1.234, "1.23"), (0.1, "0.10"), (0.01234, "0.012")])
def test_ratios(value: float | None, text: str) -> None:
    assert report.ratio(value) == text


@pytest.mark.serial
def test_csv_can_be_read_back() -> None:
    text = "\n".join(map(report.csv_line, [None, *rows(wrong=0)]))
    found = list(csv.DictReader(io.StringIO(text)))
    assert [each["contender"] for each in found] == ["hpccomm", "mpi4py", "gloo"]
    assert float(found[1]["median_us"]) == pytest.approx(1.6)
    assert (found[2]["median_us"], found[2]["note"]) == ("", "not installed (pip install torch)")


def test_json_has_the_machine_and_all_rows_and_names_no_host(process_group: hc.ProcessGroup) -> None:
    facts = machine.machine(process_group)
    text = report.as_json(facts, {"op": "sum"}, rows(), overhead=[])
    document = json.loads(text)
    assert document["machine"]["ranks"] == process_group.size
    assert {"cpu", "cores", "mpi", "mpi4py", "numpy", "nodes", "date"} <= set(document["machine"])
    assert [each["contender"] for each in document["rows"]] == ["hpccomm", "mpi4py", "gloo"]
    assert document["rows"][2]["median_us"] is None
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text
    assert str(process_group.size) in machine.one_line(facts)
    assert machine.if_busy(1 << 20) == ""


@pytest.mark.serial
@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: ...\nMPICH configure: --prefix=/secret/path\n", "MPICH 5.0.2"),
        ("Open MPI v5.0.11, package: Open MPI me@host Distribution, ident: 5.0.11\0", "Open MPI v5.0.11"),
        ("Intel(R) MPI Library 2021.11 for Linux* OS\n", "Intel(R) MPI Library 2021.11 for Linux* OS"),
    ],
)
def test_the_name_of_the_mpi_library_without_its_build_host(version: str, name: str) -> None:
    assert machine.mpi_library(version) == name


@pytest.mark.serial
def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.png"
    plot.plot([*rows(8), *rows(4096), *rows(1 << 20)], file, "title")
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    plot.plot([], file)
