"""The order between the program's streams and the communicator's, and the waits of the host."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.cuda import seam
from hpccomm.debug import watchdog

from ..arrays import assert_same, strided
from ..launch import until
from . import gpus

pytestmark = pytest.mark.usefixtures("process_group")


def total(group: hc.ProcessGroup) -> float:
    return float(sum(range(1, group.size + 1)))


def operate(name: str, group: hc.ProcessGroup, array: Any, output: Any, async_op: bool = True) -> hc.Work | None:
    """Do an operation from `array` to `output`, which have group.size elements."""
    n, me = group.size, group.rank
    inputs, outputs = ([each[r : r + 1] for r in range(n)] for each in (array, output))
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (array,),
        "PREMUL_SUM": (array, hc.ReduceOp.PREMUL_SUM(2)),
        "broadcast": (array, 0),
        "reduce": (array, 0),
        "all_gather": (outputs, array[:1]),
        "all_gather_single": (output, array[:1]),
        "gather": (array[:1], outputs if me == 0 else None, 0),
        "scatter": (output[:1], inputs if me == 0 else None, 0),
        "reduce_scatter": (output[:1], inputs),
        "reduce_scatter_single": (output[:1], array),
        "all_to_all": (outputs, inputs),
        "all_to_all_single": (output, array),
        "all_reduce_coalesced": ([array, output],),
        "broadcast_coalesced": ([array, output], 0),
        "all_gather_coalesced": ([[each] for each in outputs], [array[:1]]),
        "all_gather_single_coalesced": ([output], [array[:1]]),
        "reduce_scatter_single_coalesced": ([output[:1]], [array]),
        "sendrecv": (array, (me + 1) % n, output, (me - 1) % n),
    }
    function = hc.all_reduce if name == "PREMUL_SUM" else getattr(hc, name)
    return function(*arguments[name], async_op=async_op)


@contextmanager
def gpu_goes_on(machine: Any) -> Iterator[None]:
    """Have a GPU that is held go on while the block waits for it."""
    timer = threading.Timer(0.05, setattr, (machine, "held", False))
    timer.start()
    yield
    assert not machine.held, "the block has not waited"
    timer.join()


def taken_races(machine: Any) -> list[str]:
    """Take the races that the stand-in has found: they are no failure of the test."""
    races, machine.races = machine.races, []
    machine.accesses.clear()
    assert races
    return races


NAMES = [
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_single", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_single", "all_to_all", "all_to_all_single", "all_reduce_coalesced", "broadcast_coalesced",
    "all_gather_coalesced", "all_gather_single_coalesced", "reduce_scatter_single_coalesced", "sendrecv", "PREMUL_SUM",
]  # fmt: skip


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("layout", [np.array, strided])
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_waits_for_the_stream_that_made_its_arrays(
    process_group: hc.ProcessGroup, name: str, layout: Any, async_op: bool
) -> None:
    if name == "sendrecv":
        hc.all_reduce(gpus.array(np.ones(1)))  # the connection is there
    with gpus.another_stream():
        array = gpus.array(np.zeros(process_group.size), layout)
        output = gpus.array(np.zeros(process_group.size), layout)
        gpus.write(array, np.full(process_group.size, process_group.rank + 1.0))
        work = operate(name, process_group, array, output, async_op)
        if isinstance(work, hc.Work):
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
    operate(name, process_group, array, output)
    monkeypatch.undo()
    assert all("does not wait for the program's writing" in race for race in taken_races(machine))


@pytest.mark.parametrize("name", NAMES)
def test_without_the_last_wait_the_stand_in_finds_a_race(
    process_group: hc.ProcessGroup, machine: Any, name: str
) -> None:
    array, output = gpus.array(np.ones(process_group.size)), gpus.array(np.ones(process_group.size))
    machine.held = True  # the GPU is not done yet
    operate(name, process_group, array, output)  # and no wait()
    gpus.write(array, 0)
    gpus.write(output, 0)
    machine.held = False
    assert all("the program's writing on stream 0 does not wait for" in race for race in taken_races(machine))


# -- blocking operations -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [np.array, strided])
@pytest.mark.parametrize("name", NAMES)
def test_all_of_a_blocking_operation_is_on_the_current_stream(
    process_group: hc.ProcessGroup, machine: Any, monkeypatch: pytest.MonkeyPatch, name: str, layout: Any
) -> None:
    hc.all_reduce(gpus.array(np.ones(1)))  # the connection is there
    used = set()
    runs = machine.runs
    monkeypatch.setattr(
        machine, "runs", lambda stream, *rest, **ranges: (used.add(stream), runs(stream, *rest, **ranges))
    )
    with gpus.another_stream() as stream:
        array = gpus.array(np.ones(process_group.size), layout)
        output = gpus.array(np.ones(process_group.size), layout)
        machine.held = True  # nothing on the GPU ends any more
        operate(name, process_group, array, output, async_op=False)
        gpus.write(array, 0)
        gpus.write(output, 0)
        machine.held = False
    assert used == {stream}
    assert not {"synchronize_event", "synchronize_stream"} & set(machine.calls)


async def awaits(work: hc.Work) -> None:
    await work


WAITS: dict[str, Callable[[Any, Any, Any, Any], object]] = {  # for an operation on an array of a group, or for a block
    "synchronize": lambda work, group, array, block: work.synchronize(),
    "wait(timeout)": lambda work, group, array, block: work.wait(60),
    "is_completed": lambda work, group, array, block: until(work.is_completed, "end of the operation"),
    "wait_any": lambda work, group, array, block: hc.wait_any([None, work]),
    "a Future": lambda work, group, array, block: work.get_future().wait(),
    "a Future, for a time": lambda work, group, array, block: work.get_future().wait(60),
    "collect_all": lambda work, group, array, block: hc.collect_all(
        [work.get_future(), hc.all_reduce(np.ones(1), async_op=True).get_future()]
    ).wait(),
    "await": lambda work, group, array, block: asyncio.run(awaits(work)),
    "a block": lambda work, group, array, block: block.wait(),
    "a limit": lambda work, group, array, block: work.wait(),
    "a blocking operation": lambda work, group, array, block: hc.all_reduce(array, group=group),
    "barrier": lambda work, group, array, block: hc.barrier(group),
    "new_group": lambda work, group, array, block: hc.split_group(group, [[*range(group.size)]]).destroy(),
    "destroy": lambda work, group, array, block: None,  # at the end of the block below
}


@pytest.mark.parametrize("wait", WAITS)
def test_messages_of_the_host_go_on_while_it_waits_for_the_gpu(
    process_group: hc.ProcessGroup, machine: Any, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    """Those of other groups too."""

    class Message(hc.Work):
        """A message for which the rank waits that the GPU waits for."""

        def poll(self) -> bool:
            giving_up.cancel()
            machine.held = False
            return True

    def give_up() -> None:
        given_up.append("nobody has looked at the message")
        machine.held = False

    given_up: list[str] = []
    giving_up = threading.Timer(20, give_up)
    array = gpus.array(np.ones(3))
    blocks = wait in ("a limit", "a block", "a blocking operation")  # HPCCOMM_BLOCKING_WAIT
    monkeypatch.setattr(process_group, "settings", process_group.settings._replace(blocking_wait=blocks))
    limit = {"on_timeout": "raise", "timeout": 60} if wait in ("a limit", "a block") else {}
    with hc.new_group(backend="nccl" if wait == "barrier" else "cpu:mpi,cuda:nccl", **limit) as group:
        hc.all_reduce(array, group=group)
        machine.held = True
        with hc.coalescing(group, async_ops=True) if wait == "a block" else nullcontext() as block:
            work = hc.all_reduce(array, group=group, async_op=block is None)
            if block is not None:
                hc.broadcast(gpus.array(np.ones(3)), 0, group=group)
        (group if wait == "destroy" else process_group).dispatcher.follow(Message(), "send", 1, np.ones(3), 0, 0)
        giving_up.start()
        found = WAITS[wait](work, group, array, block)
        assert wait != "wait_any" or found == 1
        assert machine.held is (wait == "destroy")
    giving_up.join()
    assert not given_up


# -- CUDA graphs -------------------------------------------------------------------------------------


def test_a_captured_blocking_operation_is_done_at_every_launch(process_group: hc.ProcessGroup) -> None:
    array = gpus.array(np.ones(4))
    hc.all_reduce(array)
    with gpus.captured() as graph:
        hc.all_reduce(array)
    assert_same(gpus.values(array), np.full(4, float(process_group.size)))
    for value in (2.0, 3.0):
        gpus.write(array, np.full(4, value + process_group.rank))
        graph.launch()
        assert_same(gpus.values(array), np.full(4, total(process_group) + process_group.size * (value - 1)))


def test_calls_that_block_the_host_can_be_captured(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = gpus.array(np.ones(3))
    hc.all_reduce(array)
    backend: Any = process_group.dispatcher.backends["cuda"]
    monkeypatch.setattr(backend._connection, "wait_blocks", True)  # HPCCOMM_BLOCKING_WAIT=1
    with gpus.captured() as graph:
        hc.all_reduce(array)
    graph.launch()
    assert_same(gpus.values(array), np.full(3, float(process_group.size**2)))


def test_in_a_capture_what_a_replay_would_get_wrong_is_refused() -> None:
    array, with_gaps = gpus.array(np.ones(4)), gpus.array(np.ones(4), strided)
    hc.all_reduce(array)
    hc.barrier()
    for what, call in (
        ("an asynchronous operation", lambda: hc.all_reduce(array, async_op=True)),
        ("an operation that needs temporary memory", lambda: hc.all_reduce(with_gaps)),
        ("an operation that needs temporary memory", lambda: hc.reduce(array, 0, hc.ReduceOp.PREMUL_SUM(2.0))),
    ):
        refused = f"{what} can't be replayed by a CUDA graph.*take it out of the graph"
        with gpus.captured(), pytest.raises(hc.DistBackendError, match=refused):
            call()
    hc.all_reduce(array, async_op=True).wait()
    gpus.values(array)


@pytest.mark.once
def test_hpccomms_threads_ask_for_events_without_ending_a_capture(machine: Any) -> None:
    array = gpus.array(np.ones(3))
    work = hc.all_reduce(array, async_op=True)
    machine.held = True
    with gpus.captured():
        asked: list[bool] = []
        thread = threading.Thread(target=lambda: asked.append(work.is_completed()), name="hpccomm-watchdog")
        thread.start()
        thread.join()
    machine.held = False
    assert asked == [False]
    assert not machine.races
    work.wait()


def test_the_stand_in_refuses_in_a_capture_what_cuda_refuses(machine: Any) -> None:
    from .stand_in import CUDAError, Runtime

    cuda = Runtime()
    outside, fork, event = (
        cuda.create_stream(machine.device),
        cuda.create_stream(machine.device),
        cuda.create_event(machine.device),
    )
    memory = gpus.array(np.zeros(1, np.uint8)).data.ptr
    with gpus.captured():
        origin = gpus.current_stream()
        cuda.record(event, outside)
        for call, error in (
            (lambda: cuda.wait(origin, event), "StreamCaptureIsolation"),
            (lambda: cuda.synchronize_stream(origin), "StreamCaptureUnsupported"),
            (lambda: gpus.array(np.zeros(1)), "StreamCaptureUnsupported"),
        ):
            with pytest.raises(CUDAError, match=error):
                call()
        cuda.record(event, origin)
        for ask in (cuda.is_done, cuda.synchronize_event):
            with pytest.raises(CUDAError, match="CapturedEvent"):
                ask(event)
        cuda.wait(fork, event)
        assert cuda.is_capturing(fork)
        cuda.clear(memory, 1, fork)
        cuda.record(event, fork)
        cuda.wait(origin, event)
    assert not cuda.is_capturing(fork)
    capture = gpus.captured()
    capture.__enter__()
    cuda.record(event, gpus.current_stream())
    cuda.wait(fork, event)
    with pytest.raises(CUDAError, match="StreamCaptureUnjoined"):
        capture.__exit__(None, None, None)


# -- operations on several streams -------------------------------------------------------------------


def a_batch(array: Any, output: Any) -> None:
    n, me = hc.get_world_size(), hc.get_rank()
    hc.batch_isend_irecv([hc.P2POp(hc.irecv, output, (me - 1) % n), hc.P2POp(hc.isend, array, (me + 1) % n)])


SEQUENCES = [  # "elsewhere" is another stream of the program's
    ("async", "blocking"),
    ("batch", "blocking"),
    ("blocking", "async"),
    ("blocking", "blocking elsewhere"),
    ("blocking", "async elsewhere"),
    ("async", "blocking elsewhere, another array", "blocking"),
    ("async, another array", "blocking", "blocking elsewhere after a wait for the first"),
]


def in_sequence(group: hc.ProcessGroup, sequence: tuple[str, ...], array: Any) -> tuple[int, int]:
    """Do operations one after the other; return the streams of the first and of the last on `array`."""
    streams, works = [], []
    for how in sequence:
        with gpus.another_stream() if "elsewhere" in how else nullcontext(0) as current:
            if how == "batch":
                a_batch(gpus.array(np.ones(3)), array)
            else:
                on = gpus.array(np.ones(3)) if "another array" in how else array
                if "after a wait" in how:
                    works[0].wait()
                works.append(hc.all_reduce(on, async_op="async" in how))
        if "another array" not in how:
            streams.append(current if "blocking" in how else group.dispatcher.backends["cuda"]._connection.stream)
    return streams[0], streams[-1]


@pytest.mark.parametrize("layout", [np.array, strided])
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_an_operation_waits_for_the_one_before(
    process_group: hc.ProcessGroup, machine: Any, sequence: tuple[str, ...], layout: Any
) -> None:
    """Also where the program does not: it has changed the stream, or has not called wait()."""
    array = gpus.array(np.ones(3), layout)
    hc.all_reduce(gpus.array(np.ones(1)))
    machine.held = True
    _, last = in_sequence(process_group, sequence, array)
    assert not machine.races
    machine.held = False
    machine.host_waits(machine.streams[last])


@pytest.mark.parametrize("layout", [np.array, strided])
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_without_that_wait_the_stand_in_finds_a_race(
    process_group: hc.ProcessGroup,
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
    sequence: tuple[str, ...],
    layout: Any,
) -> None:
    from .stand_in import Runtime

    array = gpus.array(np.ones(3), layout)
    hc.all_reduce(gpus.array(np.ones(1)))
    machine.held = True
    monkeypatch.setattr(Runtime, "wait", lambda *_: None)
    first, second = in_sequence(process_group, sequence, array)
    monkeypatch.undo()
    machine.held = False
    races = taken_races(machine)
    earlier, later = f"(all_reduce|recv|a copy) on stream {first}", f"(all_reduce|a copy) on stream {second}"
    assert any(re.match(f"{later} does not wait for {earlier},", race) for race in races), races


def test_streams_of_the_program_may_be_gone_at_the_next_operation(process_group: hc.ProcessGroup, machine: Any) -> None:
    """CUDA does not define calls on a stream that has been destroyed."""
    from .stand_in import Runtime

    def once_on_a_stream_of_its_own() -> None:
        with gpus.another_stream() as stream:
            hc.all_reduce(gpus.array(np.ones(3), strided))
            machine.host_waits(machine.streams[stream])
        Runtime().destroy_stream(stream)

    array = gpus.array(np.ones(3))
    once_on_a_stream_of_its_own()
    hc.all_reduce(array)
    once_on_a_stream_of_its_own()
    hc.all_reduce(array, async_op=True).wait()
    once_on_a_stream_of_its_own()
    with hc.new_group() as group:
        hc.all_reduce(array, group=group)
    assert_same(gpus.values(array), np.full(3, float(process_group.size**3)))


@pytest.mark.several_gpus
@pytest.mark.parametrize("layout", [np.array, strided])
@pytest.mark.parametrize("async_op", [False, True])
def test_the_gpu_need_not_be_the_current_one(machine: Any, layout: Any, async_op: bool) -> None:
    machine.device = 0
    with hc.new_group(use_local_synchronization=True) as group:  # the GPU of the first array is its own
        array = gpus.array(np.arange(4.0), layout, device=1)
        outputs = gpus.array(np.zeros(4 * group.size), layout, device=1)
        parts = [outputs[4 * r : 4 * r + 4] for r in range(group.size)]
        for work in (
            hc.all_reduce(array, group=group, async_op=async_op),
            hc.all_to_all(parts, [array] * group.size, group=group, async_op=async_op),
        ):
            if work is not None:
                work.wait()
        assert machine.device == 0
        assert_same(gpus.values(outputs), np.tile(np.arange(4.0) * group.size, group.size))


# -- waits of the host -------------------------------------------------------------------------------


@pytest.mark.parametrize("blocking_wait", [False, True])
def test_the_host_waits_in_a_blocking_barrier(
    machine: Any, process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch, blocking_wait: bool
) -> None:
    monkeypatch.setattr(process_group, "settings", process_group.settings._replace(blocking_wait=blocking_wait))
    hc.all_reduce(gpus.array(np.ones(1)))  # on this rank's GPU, which is the new group's, too
    with hc.new_group(backend="nccl") as group:
        hc.barrier(group)
        machine.held = True
        work = hc.barrier(group, async_op=True)
        assert not work.is_completed()
        with gpu_goes_on(machine):
            hc.barrier(group)
        assert work.is_completed()


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
        with gpu_goes_on(machine):
            finish(work)
        assert work.is_success()


def test_blocking_wait(machine: Any, process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "settings", process_group.settings._replace(blocking_wait=True))
    with hc.new_group() as group:
        array = gpus.array(np.ones(3))
        machine.held = True
        with gpu_goes_on(machine):
            hc.all_reduce(array, group=group)
        machine.held = True
        work = hc.all_reduce(array, group=group, async_op=True)
        machine.calls.clear()
        with gpu_goes_on(machine):
            work.wait()
        assert machine.calls == ["synchronize_event"]


def test_arrays_of_a_dropped_work_live_until_it_is_done(process_group: hc.ProcessGroup, machine: Any) -> None:
    for layout in (np.array, strided):
        machine.held = True
        hc.all_reduce(gpus.array(np.ones(1000), layout), async_op=True)
        gc.collect()
        assert not machine.races  # the memory would have been used again
        machine.held = False
        hc.all_reduce(gpus.array(np.ones(1)), async_op=True).synchronize()
    process_group.dispatcher.reap()
    assert not process_group.dispatcher.in_flight


@pytest.mark.parametrize("layout", [np.array, strided])
@pytest.mark.parametrize("name", [*NAMES, "batch_isend_irecv"])
def test_what_nccl_uses_is_kept_without_the_work(
    process_group: hc.ProcessGroup, machine: Any, name: str, layout: Any
) -> None:
    """As where an abort has failed: the group lets go of its Works, and NCCL may still write."""
    n = process_group.size
    hc.all_reduce(gpus.array(np.ones(1)), async_op=True).synchronize()
    machine.held = True
    array, output = gpus.array(np.ones(n), layout), gpus.array(np.ones(n), layout)
    if name == "batch_isend_irecv":
        a_batch(array, output)
    elif (
        name == "all_to_all"
    ):  # each array in memory of its own: the copy of a rank to itself, which is kept, keeps no other
        hc.all_to_all(*([gpus.array(np.ones(1)) for _ in range(n)] for _ in "io"), async_op=True)
    else:
        operate(name, process_group, array, output)
    del array, output
    process_group.dispatcher.in_flight.clear()
    gc.collect()
    races = list(machine.races)  # if the memory is used again
    machine.held = False
    hc.all_reduce(gpus.array(np.ones(1)), async_op=True).synchronize()
    assert not races


def test_a_wait_for_one_operation_orders_nothing_behind_a_later_one(
    process_group: hc.ProcessGroup, machine: Any
) -> None:
    array = gpus.array(np.ones(3))
    machine.held = True  # the first is still in flight
    first = hc.all_reduce(gpus.array(np.ones(3)), async_op=True)
    second = hc.all_reduce(array, async_op=True)
    first.wait()
    hc.all_reduce(array)  # behind the second; the stand-in sees it if not
    second.wait()
    machine.held = False
    assert_same(gpus.values(array), np.full(3, float(process_group.size) ** 2))


def test_large_temporary_memory_is_kept_without_the_work(
    process_group: hc.ProcessGroup, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = []
    empty = type(seam.runtime()).empty

    def allocate(self: Any, *arguments: Any) -> Any:
        memory = empty(self, *arguments)
        known.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(type(seam.runtime()), "empty", allocate)
    machine.held = True
    hc.all_reduce(gpus.array(np.ones(1 << 18), strided), async_op=True)
    process_group.dispatcher.in_flight.clear()
    gc.collect()
    races, is_kept = list(machine.races), [each() is not None for each in known]
    machine.held = False
    assert not races
    assert is_kept == [True]


def test_arrays_that_the_stream_of_the_call_waits_for_are_the_programs_alone(
    process_group: hc.ProcessGroup, machine: Any
) -> None:
    """As those of a blocking operation: the next use of their memory on that stream comes behind the operation."""
    hc.all_reduce(gpus.array(np.ones(1)), async_op=True).synchronize()
    for layout in (np.array, strided):
        array = gpus.array(np.ones(1000), layout)
        alive = weakref.ref(array)
        machine.held = True  # the GPU is not done
        work = hc.all_reduce(array, async_op=True)
        work.wait()
        assert work.result() is array
        assert not work.is_completed()
        del array, work
        gc.collect()
        assert alive() is None
        assert not machine.races
        machine.held = False
    process_group.dispatcher.reap()
    assert not process_group.dispatcher.in_flight


def test_arrays_that_another_stream_waits_for_are_kept(machine: Any) -> None:
    array = gpus.array(np.ones(1000))
    alive = weakref.ref(array)
    machine.held = True
    work = hc.all_reduce(array, async_op=True)
    with gpus.another_stream():
        work.wait()
    del array, work
    gc.collect()
    assert alive() is not None
    assert not machine.races
    machine.held = False


def test_a_work_that_a_stream_waits_for_goes_on_as_before(process_group: hc.ProcessGroup, machine: Any) -> None:
    array = gpus.array(np.ones(3))
    for finish in (
        lambda work: work.synchronize(),
        lambda work: work.wait(10),
        lambda work: work.get_future().wait(),
        lambda work: until(work.is_completed, "end of the operation"),
    ):
        machine.held = True
        work = hc.all_reduce(array, async_op=True)
        number = work.sequence_number
        work.wait()
        with pytest.raises(hc.DistTimeoutError, match=f"all_reduce #{number}: not done after 0.01 s"):
            work.wait(0.01)
        with gpus.another_stream():
            work.wait()
            gpus.values(array)  # no race: this stream waits as well
        assert work.status is hc.WorkStatus.IN_FLIGHT
        with gpu_goes_on(machine):
            finish(work)
        assert work.is_success()
        assert work.sequence_number == number
    process_group.dispatcher.reap()
    assert not process_group.dispatcher.in_flight


def test_a_program_may_wait_for_a_work_as_often_as_it_likes(machine: Any) -> None:
    machine.held = True
    work = hc.all_reduce(gpus.array(np.ones(3)), async_op=True)
    for _ in range(2 * sys.getrecursionlimit()):
        work.wait()
    machine.held = False
    work.synchronize()


def test_whose_wait_makes_a_stream_wait(process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    array = gpus.array(np.ones(3))
    work = hc.all_reduce(array, async_op=True)
    assert work.waits_on_stream
    work.synchronize()
    with hc.new_group(backend="cpu:mpi,cuda:mpi") as group:
        work = hc.all_reduce(array, group=group, async_op=True)
        assert not work.waits_on_stream
        work.wait()
    monkeypatch.setattr(process_group, "settings", process_group.settings._replace(blocking_wait=True))
    with hc.new_group() as group:
        assert not hc.all_reduce(array, group=group, async_op=True).waits_on_stream


def test_several_streams_may_wait_for_a_block(process_group: hc.ProcessGroup, machine: Any) -> None:
    summed, sent = gpus.array(np.ones(3)), gpus.array(np.full(3, 7.0))
    machine.held = True
    with hc.coalescing(async_ops=True) as block:
        hc.all_reduce(summed)
        hc.broadcast(sent, 0)
    for stream in (nullcontext, gpus.another_stream):
        with stream():
            block.wait()
            gpus.values(summed), gpus.values(sent)  # no race
    work = block._block.work
    assert not work.is_completed()
    assert work in [call.work() for call in watchdog.in_flight() if call.work is not None]
    machine.held = False
    work.synchronize()
    assert work.is_completed()
    assert_same(gpus.values(summed), np.full(3, float(process_group.size)))
    alive = [weakref.ref(summed), weakref.ref(sent)]
    del summed, sent, block, work
    hc.all_reduce(gpus.array(np.ones(1)), async_op=True).wait()
    gc.collect()
    assert [each() for each in alive] == [None, None]


def test_an_alarm_ends_the_wait_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with hc.coalescing(async_ops=True) as block:
            hc.all_reduce(gpus.array(np.ones(3)))
            hc.broadcast(gpus.array(np.ones(3)), 0)
        monkeypatch.setattr(seam.runtime(), "wait", lambda *_: signal.raise_signal(signal.SIGALRM))
        with pytest.raises(InterruptedError):
            block.wait()
        monkeypatch.undo()
        block.wait()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_what_a_coalescing_block_has_started_is_let_go(process_group: hc.ProcessGroup) -> None:
    arrays = [gpus.array(np.ones(1000)) for _ in range(2)]
    alive = [weakref.ref(array) for array in arrays]
    with hc.coalescing(async_ops=True) as block:
        for array in arrays:
            hc.all_reduce(array)
    block.wait()
    del array, arrays, block
    gc.collect()
    assert [each() for each in alive] == [None, None]
    hc.all_reduce(gpus.array(np.ones(1)), async_op=True).synchronize()
    process_group.dispatcher.reap()
    assert not process_group.dispatcher.in_flight


def test_a_dropped_array_without_its_work_is_a_race(machine: Any) -> None:
    """The counterpart of the test above: the stand-in does see it."""
    machine.held = True
    work = hc.all_reduce(gpus.array(np.ones(1000)), async_op=True)
    work.info = work.info._replace(result=None)
    work.group.dispatcher.backends["cuda"]._connection.in_flight.clear()
    gc.collect()
    races, machine.races = machine.races, []
    assert any(race.startswith("the reuse of dropped memory") for race in races)


def test_temporary_memory_belongs_to_the_operations_stream(process_group: hc.ProcessGroup) -> None:
    for _ in range(3):  # blocking: nobody keeps the packed copy
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
