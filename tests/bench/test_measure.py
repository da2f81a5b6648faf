"""Timing: the order of the calls, and the rank whose time counts."""

from __future__ import annotations

import itertools
import time
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.bench.measure import LARGEST_BATCH, Plan, Timing, measure


@pytest.mark.serial
def test_contenders_take_turns_in_a_random_order() -> None:
    calls: list[str] = []
    contenders = {name: partial(calls.append, name) for name in "abc"}
    measure(contenders, MPI.COMM_SELF, Plan(iterations=50, warmup=0, batch=1))
    assert "".join(calls[:3]) == "abc"  # one batch of each to see how long it takes
    rounds = ["".join(calls[start : start + 3]) for start in range(3, len(calls), 3)]
    assert len(rounds) == 50
    assert set(rounds) == {"abc", "acb", "bac", "bca", "cab", "cba"}


@pytest.mark.serial
def test_warm_up_iterations_and_batches_are_what_the_plan_says() -> None:
    calls: list[None] = []
    timing = measure({"a": lambda: calls.append(None)}, MPI.COMM_SELF, Plan(iterations=7, warmup=3, batch=5))["a"]
    assert len(calls) == 3 + 5 + 7 * 5
    assert len(timing.samples) == 7
    assert timing.batch == 5


@pytest.mark.serial
@pytest.mark.parametrize(("seconds", "batch"), [(0, LARGEST_BATCH), (2**-20, 1153), (2e-3, 1)])
def test_a_batch_of_quick_calls_grows_until_the_clock_can_see_it(
    seconds: float, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    late = itertools.chain([0.0, 0.5], itertools.repeat(0.0))  # the first batch takes half a second more
    monkeypatch.setattr(time, "perf_counter", lambda: len(calls) * seconds + next(late))
    plan = Plan(iterations=1, warmup=0, batch_seconds=1e-3)
    slower = {"a": lambda: calls.append(None), "b": lambda: calls.extend([None] * 3)}
    assert {timing.batch for timing in measure(slower, MPI.COMM_SELF, plan).values()} == {batch}


@pytest.mark.serial
def test_work_that_goes_on_after_a_call_is_timed_to_its_end_and_the_host_is_not() -> None:
    begun: list[None] = []

    def finish() -> None:
        time.sleep(0.01)
        begun.clear()

    timing = measure({"a": lambda: begun.append(None)}, MPI.COMM_SELF, Plan(iterations=3, batch=2), finish)["a"]
    assert begun == []  # each batch was waited for
    assert timing.minimum >= 0.005
    assert timing.host is not None
    assert timing.host_median is not None
    assert timing.host_median < timing.minimum
    assert timing.scaled(2).host_median == pytest.approx(timing.host_median / 2)


def test_the_slowest_rank_counts(process_group: hc.ProcessGroup) -> None:
    last = process_group.rank == process_group.size - 1
    comm = process_group.comm
    assert comm is not None
    timing = measure({"a": lambda: time.sleep(0.02 if last else 0)}, comm, Plan(iterations=3, warmup=0))["a"]
    assert timing.minimum >= 0.02
    assert comm.allgather(timing.samples.tolist()) == [timing.samples.tolist()] * process_group.size


@pytest.mark.serial
def test_the_budget_decides_how_many_iterations() -> None:
    plan = Plan(budget=1.0, fewest=10, most=1000)
    assert plan.iterations_of(0.01) == 100
    assert plan.iterations_of(60.0) == 10
    assert plan.iterations_of(1e-6) == 1000
    assert Plan(iterations=3).iterations_of(1e-6) == 3


@pytest.mark.serial
def test_statistics() -> None:
    timing = Timing(np.array([3.0, 1.0, 2.0, 100.0]), 1)
    assert (timing.median, timing.minimum) == (2.5, 1.0)
    assert timing.p99 == pytest.approx(97.09)
    assert timing.scaled(2).samples.tolist() == [1.5, 0.5, 1.0, 50.0]
