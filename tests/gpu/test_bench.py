"""hpccomm bench --device cuda: every benchmark with every contender there is, and whole runs."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.bench import gpu, registry
from hpccomm.bench.contenders import cupyx_calls
from hpccomm.bench.measure import Plan
from hpccomm.bench.session import Session
from hpccomm.cuda.packing import on_the_host

from ..launch import IMITATED_GPU, launch
from . import gpus

BENCHMARKS = registry.load()
TINY = Plan(iterations=2, warmup=1, batch=2)
GPU_CONTENDERS = ["hpccomm", "cuda:mpi", "nccl", "cupyx"]


@pytest.fixture
def session(process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    if gpus.IS_BINDINGS and not gpus.is_real():
        from .bindings import provider

        # CuPy destroys blocking communicators without ncclCommFinalize, and asks the driver for the current stream
        monkeypatch.setattr(
            provider.Library,
            "ncclCommDestroy",
            staticmethod(lambda comm: provider.COMMUNICATORS.pop(comm).destroy()),
        )
        backend = pytest.importorskip("cupyx.distributed").NCCLBackend
        monkeypatch.setattr(backend, "_get_stream", lambda self, stream: gpus.current_stream())
    with Session(process_group, GPU_CONTENDERS[1:], TINY, "cuda") as session:
        yield session


def test_the_contenders_are_those_of_this_machine(session: Session) -> None:
    has_bindings = gpus.is_real() or gpus.IS_BINDINGS
    assert list(session.contenders) == GPU_CONTENDERS[: 4 if has_bindings else 2]
    assert all(session.missing.values())


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_gives_what_numpy_computes(session: Session, name: str, async_op: bool) -> None:
    benchmark = BENCHMARKS[name]
    if session.group.size < benchmark.least_ranks:
        return
    for rows in session.run(benchmark, [8, 1000], check=True, async_op=async_op):
        assert [row.contender for row in rows] == [*session.contenders, *session.missing]
        for row in rows:
            if row.median_us is None:
                assert row.note, row
            else:
                assert row.wrong == 0, row
                assert row.host_us is not None
                assert 0 < row.host_us <= row.median_us * 1.001, row
        ours, by_mpi, *_ = rows
        assert by_mpi.median_us is not None
        nccl = type(session.group.dispatcher.backends["cuda"])
        lacks = getattr(nccl, name, 0) is getattr(hc.Backend, name, 1)
        assert (ours.median_us is None) == lacks


def test_the_host_time_is_until_the_calls_have_returned(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    finish = gpu.finish
    monkeypatch.setattr(session, "finish", lambda: [finish(), waited.append(1)])
    (rows,) = session.run(BENCHMARKS["all_reduce"], [8])
    contenders = len(session.contenders)
    # tried, warmed up, how long a batch takes, and the two timed batches
    assert len(waited) == 5 * contenders
    assert rows[0].batch == 2


# -- whole runs ----------------------------------------------------------------------------------------------

once = pytest.mark.once


def bench(ranks: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {} if gpus.is_real() else IMITATED_GPU
    command = (sys.executable, "-m", "hpccomm", "bench", "--device", "cuda", *arguments)
    return launch(gpus.connectable(ranks), *command, timeout=gpus.PATIENCE, env=environment)


@once
def test_a_run_prints_a_column_for_each_contender_and_why_others_have_none(tmp_path: Path) -> None:
    file, picture = tmp_path / "result.json", tmp_path / "result.png"
    ended = bench(2, "-e", "4K", "-f", "512", "-n", "2", "--check", "--json", file, "--plot", picture)
    assert ended.returncode == 0, ended.stderr
    head, sizes = ended.stdout.splitlines()[:3], [8, 4096]
    assert "by the host's clock; time: until the GPU is done; host: until the calls have returned" in head[2]
    assert "cuda:mpi     host  ratio" in ended.stdout
    rows = json.loads(file.read_text())["rows"]
    assert [row["size_bytes"] for row in rows if row["contender"] == "hpccomm"] == sizes
    measured = [row for row in rows if row["contender"] in ("hpccomm", "cuda:mpi")]
    assert all(row["host_us"] and row["wrong"] == 0 for row in measured)
    for row in rows:
        if row["median_us"] is None:
            assert f"# {row['contender']}: not measured: {row['note']}\n" in ended.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@once
def test_csv_has_the_host_time() -> None:
    ended = bench(2, "broadcast", "-e", "8", "-n", "2", "--csv", "--against", "cuda:mpi,persistent,one_by_one")
    assert ended.returncode == 0, ended.stderr
    rows = {row["contender"]: row for row in csv.DictReader(io.StringIO(ended.stdout))}
    assert list(rows) == ["hpccomm", "cuda:mpi", "persistent", "one_by_one"]
    assert float(rows["hpccomm"]["host_us"]) <= float(rows["hpccomm"]["median_us"])
    assert (rows["one_by_one"]["host_us"], rows["hpccomm"]["note"]) == ("", "")


@pytest.mark.serial
def test_an_array_of_the_benchmarks_holds_what_is_written(process_group: hc.ProcessGroup) -> None:
    array = gpu.empty((2, 3), np.int16)
    registry.assign(array, None)
    assert on_the_host(array).tolist() == [[0] * 3] * 2
    registry.assign(array, np.arange(6))
    assert on_the_host(array[1]).tolist() == [3, 4, 5]


@pytest.mark.serial
def test_cupyx_has_some_reductions() -> None:
    with pytest.raises(Exception, match="cupyx has no band"):
        cupyx_calls._op(registry.Case(0, 1, 1, np.dtype("i4"), "band"))
