"""Tiny measurements on the ranks that run the tests: every benchmark, every contender, and the checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hpccomm as hc
from hpccomm import native
from hpccomm.bench import registry
from hpccomm.bench.contenders import contender_class
from hpccomm.bench.measure import Plan
from hpccomm.bench.registry import Arrays, Benchmark, Case
from hpccomm.bench.session import Session
from hpccomm.bench.studies import tune
from hpccomm.process.tuning import Tuning

BENCHMARKS = registry.load()
TINY = Plan(iterations=2, warmup=1, batch=2)
SIZES = [8, 1000]
LISTS = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")


@pytest.fixture
def session(process_group: hc.ProcessGroup) -> Iterator[Session]:
    with Session(process_group, ["mpi4py"], TINY) as session:
        yield session


def runnable(benchmark: Benchmark, session: Session) -> bool:
    return session.group.size >= benchmark.least_ranks


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_gives_what_numpy_computes(session: Session, name: str, async_op: bool) -> None:
    benchmark = BENCHMARKS[name]
    if not runnable(benchmark, session):
        return
    for ours, raw in session.run(benchmark, SIZES, check=True, async_op=async_op):
        assert (ours.contender, raw.contender) == ("hpccomm", "mpi4py")
        assert ours.wrong == 0
        assert ours.median_us is not None
        assert 0 < (ours.min_us or 0) <= ours.median_us <= (ours.p99_us or 0)
        assert (ours.iterations, ours.batch, ours.ratio) == (2, 2, 1.0)
        if raw.median_us is None:  # packing and unpacking has no asynchronous form in raw mpi4py
            packs = async_op and (benchmark.kind == "coalesced" or name in LISTS)
            assert packs or raw.note == f"mpi4py has no {name}", raw.note
        else:
            assert raw.wrong == 0
            assert raw.ratio == pytest.approx(ours.median_us / raw.median_us)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "uint8", "complex64", ml_dtypes.bfloat16])
@pytest.mark.parametrize("op", ["sum", "avg", "max", "bxor"])
def test_dtypes_and_reductions(session: Session, dtype: Any, op: str) -> None:
    kind = "f" if dtype is ml_dtypes.bfloat16 else np.dtype(dtype).kind
    if kind not in getattr(hc.ReduceOp, op.upper()).kinds:
        return
    for name in ("all_reduce", "reduce", "reduce_scatter_single", "all_reduce_coalesced", "all_gather_single"):
        for rows in session.run(BENCHMARKS[name], [64], dtype, op, check=True):
            assert rows[0].wrong == 0, name
            half = np.dtype(dtype).itemsize == 2
            assert rows[1].wrong == (None if half and name != "all_gather_single" else 0), name


@pytest.mark.parametrize("name", LISTS)
def test_lists_have_arrays_that_lie_apart(session: Session, name: str) -> None:
    (case,) = session.cases(BENCHMARKS[name], [1000])
    arrays = BENCHMARKS[name].arrays(case)
    lists = [each for each in (arrays.send, arrays.receive) if isinstance(each, list)]
    assert lists or session.group.rank != case.root
    for each in lists:
        assert len(each) in (0, session.group.size)
        assert all(array.flags.owndata for array in each)


def test_sizes_bandwidths_and_counts_follow_from_each_other(session: Session) -> None:
    n = session.group.size
    for name in ("all_reduce", "all_gather_single"):
        for rows in session.run(BENCHMARKS[name], [4096]):
            for row in rows:
                assert row.size_bytes == row.count * 4
                assert row.median_us is not None
                assert row.algbw_gbs == pytest.approx(row.size_bytes / row.median_us / 1e3)
                assert row.busbw_gbs == pytest.approx((row.algbw_gbs or 0) * BENCHMARKS[name].busbw(n))
                assert row.ranks == n


def test_a_wrong_result_is_noticed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_one(self: Any, benchmark: Benchmark, case: Case, arrays: Arrays, async_op: bool) -> Any:
        return lambda: arrays.receive.__setitem__(slice(1, None), case.reduced(case.count)[1:])

    monkeypatch.setattr(contender_class("mpi4py"), "_call", forgets_one)
    (rows,) = session.run(BENCHMARKS["all_reduce"], [40], check=True)
    assert rows[0].wrong == 0
    # on one rank the sum of all equals the input
    assert rows[1].wrong == (session.group.size if session.group.size > 1 else 0)


def test_what_a_contender_can_not_do_is_a_row_that_says_why(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as if torch were not there, whether it is or not
    monkeypatch.setattr(contender_class("torch-gloo"), "missing", classmethod(lambda cls: "not installed"))
    with Session(process_group, ["torch-gloo", "mpi4py"], TINY) as session:
        assert list(session.contenders) == ["hpccomm", "mpi4py"]
        (rows,) = session.run(BENCHMARKS["scan"], [8], op="avg")
    assert [(row.contender, row.median_us is None) for row in rows] == [
        ("hpccomm", True),
        ("mpi4py", True),
        ("torch-gloo", True),
    ]
    assert "AVG" in rows[0].note
    assert rows[2].note == "not installed"


@pytest.mark.parametrize("name", ["shared", "persistent"])
def test_hpccomms_other_ways_where_there_are_any(process_group: hc.ProcessGroup, name: str) -> None:
    with Session(process_group, [name], TINY) as session:
        for benchmark in ("all_reduce", "broadcast", "all_gather_single", "all_to_all"):
            for rows in session.run(BENCHMARKS[benchmark], SIZES, check=True):
                assert rows[1].wrong == (0 if rows[1].median_us is not None else None)
                if benchmark == "all_reduce":
                    assert rows[1].median_us is not None, rows[1].note


def test_a_session_on_a_part_of_the_world(process_group: hc.ProcessGroup) -> None:
    group = hc.new_group([process_group.size - 1])
    if isinstance(group, hc.ProcessGroup):
        with Session(group, ["mpi4py"], TINY) as session:
            for name in ("all_reduce", "broadcast", "gather", "scatter", "sendrecv"):
                for rows in session.run(BENCHMARKS[name], [8], check=True):
                    assert [row.wrong for row in rows] == [0, 0]
        hc.destroy_process_group(group)


def test_tune_gives_every_rank_one_table_of_what_was_tried(process_group: hc.ProcessGroup) -> None:
    assert process_group.comm is not None
    pair = (64, 128)
    tried = tune.Sizes(pair, (1000, 2000), pair, (64, 128, 256), pair, pair, 256, pair)
    table, text = tune.tune(process_group, TINY, tried)
    assert process_group.comm.allgather((table, text)) == [(table, text)] * process_group.size
    assert table.segment_bytes in tried.segments
    assert table.reduce_scatter_bytes in (63, 127, tune.NEVER - 1)
    if process_group.size > 1:
        assert table.shared_chunk_bytes in tried.chunks
        assert table.shared_bytes in (*tried.shared, tune.NEVER)
        assert "shared all_reduce by (128 B):  MPI: " in text
    else:
        assert "node-shared arrays: not measured" in text
    if process_group.size > 1 and native.fastpath is not None:
        assert table.node_bytes in (0, 1, *tried.nodes)
        assert table.node_reduction_bytes in (1, *tried.nodes, *tried.reduce_scatters)
        assert "all_gather_single by (128 B):  memory of the node: " in text
        assert table.direct_bytes in (*tried.directs, tune.NEVER)
        assert "exchange by (128 B):  packing: " in text
    else:
        assert table.node_bytes == Tuning().node_bytes
        assert "memory of the node: not measured" in text


def test_memory_of_the_node_is_measured_only_where_it_is_used(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tune._has_node(process_group) == (process_group.size > 1 and native.fastpath is not None)
    with monkeypatch.context() as patch:
        if process_group.rank == process_group.size - 1:
            patch.setattr(native, "fastpath", None)
        assert not tune._has_node(process_group)  # one rank without it is enough
    if process_group.size > 1 and native.fastpath is not None:
        from hpccomm.mpi import shared_memory

        monkeypatch.setattr(shared_memory, "free_bytes", lambda: 0)
        assert not tune._has_node(process_group)


@pytest.mark.serial
def test_a_limit_is_the_largest_size_before_the_other_way_wins_for_good() -> None:
    def medians(*seconds: tuple[float, float]) -> tune.Medians:
        return {8 << i: {"memory of the node": first, "MPI": second} for i, (first, second) in enumerate(seconds)}

    assert tune._first_wins_up_to(medians((1, 2), (1, 2), (3, 2))) == 16
    assert tune._first_wins_up_to(medians((1, 2), (3, 2), (1, 2))) == 32
    assert tune._first_wins_up_to(medians((3, 2), (3, 2))) == 0


@pytest.mark.serial
def test_a_threshold_is_where_one_way_begins_to_win_and_goes_on() -> None:
    assert tune.threshold([(1, False), (2, True), (4, True)]) == 2
    assert tune.threshold([(1, True), (2, True)]) == 1
    assert tune.threshold([(1, True), (2, False), (4, True)]) == 4
    assert tune.threshold([(1, True), (2, False)]) == tune.NEVER


def test_one_by_one_makes_an_operation_for_each_array(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counted(name: str) -> Any:
        operation = getattr(hc, name)
        return lambda *arguments: [made.append(name), operation(*arguments)][1]

    coalesced = [each for each in BENCHMARKS.values() if each.kind == "coalesced"]
    for name in [each.name.removesuffix("_coalesced") for each in coalesced]:
        monkeypatch.setattr(hc, name, counted(name))
    with Session(process_group, ["one_by_one"], TINY) as session:
        for benchmark in coalesced:
            (case,) = session.cases(benchmark, [4096])
            arrays = benchmark.arrays(case)
            call = session.contenders["one_by_one"].call(benchmark, case, arrays, False)
            made.clear()
            call()
            assert made == [benchmark.name.removesuffix("_coalesced")] * len(arrays.send or arrays.receive)
            assert len(made) > 1
            (_, one_by_one) = session.measure(benchmark, case, check=True)
            assert one_by_one.wrong == 0
