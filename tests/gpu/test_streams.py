"""The order between the program's streams and the communicator's, and what the host waits for."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpccomm as hc

from ..arrays import assert_same, strided
from . import gpus

pytestmark = pytest.mark.usefixtures("process_group")


def total(group: hc.ProcessGroup) -> float:
    return float(sum(range(1, group.size + 1)))


def operations(group: hc.ProcessGroup) -> dict[str, Callable[[Any, Any], hc.Work | None]]:
    """Operations from `array` to `output`, which have group.size elements."""
    n, me = group.size, group.rank
    to, source = (me + 1) % n, (me - 1) % n
    rows = [slice(r, r + 1) for r in range(n)]
    return {
        "all_reduce": lambda array, output: hc.all_reduce(array, async_op=True),
        "broadcast": lambda array, output: hc.broadcast(array, 0, async_op=True),
        "reduce": lambda array, output: hc.reduce(array, 0, async_op=True),
        "all_gather": lambda array, output: hc.all_gather([output[r] for r in rows], array[:1], async_op=True),
        "all_gather_single": lambda array, output: hc.all_gather_single(output, array[:1], async_op=True),
        "gather": lambda array, output: hc.gather(
            array[:1], [output[r] for r in rows] if me == 0 else None, 0, async_op=True
        ),
        "scatter": lambda array, output: hc.scatter(
            output[:1], [array[r] for r in rows] if me == 0 else None, 0, async_op=True
        ),
        "reduce_scatter_single": lambda array, output: hc.reduce_scatter_single(output[:1], array, async_op=True),
        "all_to_all_single": lambda array, output: hc.all_to_all_single(output, array, async_op=True),
        "all_reduce_coalesced": lambda array, output: hc.all_reduce_coalesced([array, output], async_op=True),
        "sendrecv": lambda array, output: hc.sendrecv(array, to, output, source, async_op=True),
        "PREMUL_SUM": lambda array, output: hc.all_reduce(array, hc.ReduceOp.PREMUL_SUM(2), async_op=True),
    }


NAMES = [
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_single", "gather", "scatter",
    "reduce_scatter_single", "all_to_all_single", "all_reduce_coalesced", "sendrecv", "PREMUL_SUM",
]  # fmt: skip


@pytest.mark.parametrize("layout", [np.array, strided])
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_waits_for_the_stream_that_made_its_arrays(
    process_group: hc.ProcessGroup, name: str, layout: Any
) -> None:
    with gpus.another_stream():
        array = gpus.array(np.zeros(process_group.size), layout)
        output = gpus.array(np.zeros(process_group.size), layout)
        gpus.write(array, np.full(process_group.size, process_group.rank + 1.0))
        work = operations(process_group)[name](array, output)
        work.wait()
        seen = gpus.values(array), gpus.values(output)
    if name == "all_reduce":
        assert_same(seen[0], np.full(process_group.size, total(process_group)))
    if name == "all_gather_single":
        assert_same(seen[1], np.arange(1.0, process_group.size + 1))


@pytest.mark.parametrize("name", NAMES)
def test_without_the_first_wait_the_stand_in_finds_a_race(
    process_group: hc.ProcessGroup, machine: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from .stand_in import Runtime

    hc.all_reduce(gpus.array(np.ones(1)))  # the connection is there
    array, output = gpus.array(np.ones(process_group.size)), gpus.array(np.ones(process_group.size))
    monkeypatch.setattr(Runtime, "wait", lambda *_: None)
    operations(process_group)[name](array, output)
    monkeypatch.undo()
    races, machine.races = machine.races, []
    assert races
    assert all("does not wait for the program's writing" in race for race in races)
    machine.accesses.clear()


@pytest.mark.parametrize("name", NAMES)
def test_without_the_last_wait_the_stand_in_finds_a_race(
    process_group: hc.ProcessGroup, machine: Any, name: str
) -> None:
    array, output = gpus.array(np.ones(process_group.size)), gpus.array(np.ones(process_group.size))
    machine.held = True  # the GPU is not done yet
    operations(process_group)[name](array, output)  # and no wait()
    gpus.write(array, 0)
    gpus.write(output, 0)
    machine.held = False
    races, machine.races = machine.races, []
    assert races
    assert all("the program's writing on stream 0 does not wait for" in race for race in races)
    machine.accesses.clear()


def test_a_synchronous_operation_follows_the_same_rule(process_group: hc.ProcessGroup, machine: Any) -> None:
    array = gpus.array(np.ones(3))
    hc.all_reduce(array)
    machine.held = True  # nothing on the GPU ends any more
    hc.all_reduce(array)
    gpus.write(array, 0)  # ordered behind it, by its event
    assert "synchronize_event" not in machine.calls
    assert "synchronize_stream" not in machine.calls
    machine.held = False


def test_wait_orders_the_current_stream_and_does_not_block_the_host(
    process_group: hc.ProcessGroup, machine: Any
) -> None:
    array = gpus.array(np.ones(3))
    machine.held = True
    work = hc.all_reduce(array, async_op=True)
    machine.calls.clear()
    with gpus.another_stream():
        assert work.wait() is True
        assert_same(gpus.values(array), np.full(3, float(process_group.size)))
    assert machine.calls == ["wait"]
    assert not work.is_completed()
    assert work.status is hc.WorkStatus.IN_FLIGHT
    with pytest.raises(hc.DistTimeoutError, match=r"all_reduce #\d+: not done after 0.01 s"):
        work.wait(0.01)
    machine.held = False
    assert work.is_completed()
    assert work.is_success()


def test_synchronize_and_wait_with_a_timeout_block_the_host(machine: Any) -> None:
    for finish in (lambda work: work.synchronize(), lambda work: work.wait(30)):
        array = gpus.array(np.ones(3))
        machine.held = True
        work = hc.all_reduce(array, async_op=True)
        timer = threading.Timer(0.05, setattr, (machine, "held", False))
        timer.start()
        finish(work)
        assert not machine.held
        assert work.is_success()
        timer.join()


def test_blocking_wait(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCCOMM_BLOCKING_WAIT", "1")
    with hc.new_group() as group:
        array = gpus.array(np.ones(3))
        hc.all_reduce(array, group=group)
        assert machine.calls[-1] == "synchronize_event"
        machine.held = True
        work = hc.all_reduce(array, group=group, async_op=True)
        machine.calls.clear()
        timer = threading.Timer(0.05, setattr, (machine, "held", False))
        timer.start()
        work.wait()
        assert machine.calls == ["synchronize_event"]
        timer.join()


def test_arrays_of_a_dropped_work_live_until_it_is_done(process_group: hc.ProcessGroup, machine: Any) -> None:
    for layout in (np.array, strided):
        machine.held = True
        hc.all_reduce(gpus.array(np.ones(1000), layout), async_op=True)
        gc.collect()
        assert not machine.races  # the memory would have been used again
        machine.held = False
        hc.all_reduce(gpus.array(np.ones(1)), async_op=True).synchronize()
    process_group._reap()
    assert not process_group._in_flight


def test_a_dropped_array_without_its_work_is_a_race(machine: Any) -> None:
    """The counterpart of the test above: the stand-in does see it."""
    machine.held = True
    work = hc.all_reduce(gpus.array(np.ones(1000)), async_op=True)
    work.alive = work._result = None
    gc.collect()
    races, machine.races = machine.races, []
    assert any(race.startswith("the reuse of dropped memory") for race in races)


def test_temporary_memory_belongs_to_the_communicators_stream(process_group: hc.ProcessGroup) -> None:
    for _ in range(3):  # synchronous: nobody keeps the packed copy
        array = gpus.array(np.ones(8), strided)
        hc.all_reduce(array)
        gc.collect()
        assert_same(gpus.values(array), np.full(8, float(process_group.size)))


def test_futures_and_callbacks(process_group: hc.ProcessGroup) -> None:
    array = gpus.array(np.full(4, process_group.rank + 1.0))
    future = hc.all_reduce(array, async_op=True).get_future()
    result = future.then(lambda done: done.value()).wait()
    assert result is array
    assert_same(gpus.values(array), np.full(4, total(process_group)))


def test_many_in_flight_use_their_events_again(process_group: hc.ProcessGroup, machine: Any) -> None:
    array = gpus.array(np.zeros(1))
    hc.all_reduce(array, async_op=True).synchronize()
    before = len(machine.events)
    for _ in range(500):
        hc.all_reduce(array, async_op=True)
    hc.all_reduce(array, async_op=True).synchronize()
    assert len(machine.events) < before + 100


def test_host_and_gpu_arrays_in_one_group(process_group: hc.ProcessGroup) -> None:
    on_host, on_gpu = np.full(3, 1.0), gpus.array(np.full(3, 2.0))
    works = [hc.all_reduce(each, async_op=True) for each in (on_host, on_gpu)]
    for work in works:
        work.wait()
    assert_same(on_host, np.full(3, 1.0 * process_group.size))
    assert_same(gpus.values(on_gpu), np.full(3, 2.0 * process_group.size))
