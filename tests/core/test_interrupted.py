"""Exceptions of the program's own signal handlers, at every moment of `wait` and `is_completed`.

CPython calls a handler in the main thread after any call; a profile function that raises after the k-th call is that
moment, and can be had for each k in turn.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.core import progress
from hpccomm.mpi import sparse_exchange
from hpccomm.mpi.reductions import in_place
from hpccomm.native import fastpath
from tests.launch import launch, until

pytestmark = pytest.mark.usefixtures("process_group")
PACKAGE = str(Path(hc.__file__).parent)
MOMENTS = 45  # more than there are calls in any of these waits


class Alarm(Exception):
    """What a handler of SIGALRM raises to bound a step."""


def interrupted(function: Callable[[], Any], moment: int, error: type[BaseException]) -> None:
    """Call `function`, and let a handler raise when its `moment`-th call has returned, if it comes so far."""
    left = moment

    def handler(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        is_a_generator = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)  # whose return may be that of a finaliser
        is_there = frame.f_code.co_filename.startswith((PACKAGE, threading.__file__))
        if is_there and event in ("c_return", *["return"][is_a_generator:]):
            left -= 1
            below = frame if event == "c_return" else frame.f_back  # where the handler would find the program
            if left == 0 and below is not None:
                raise error

    sys.setprofile(handler)
    try:
        function()
    except error:
        pass
    finally:
        sys.setprofile(None)


async def awaited(work: hc.Work) -> None:
    await work


def begin(kind: str, rank: int, size: int) -> tuple[Any, Callable[[], np.ndarray], np.ndarray]:
    """Begin an operation; return its Work, what gives its result, and what that must be."""
    values = np.arange(8.0) + rank
    total = size * np.arange(8.0) + sum(range(size))
    if kind == "contiguous":
        return hc.all_reduce(values, async_op=True), lambda: values, total
    if kind == "in a thread":
        large = np.tile(values, 1 << 15)
        return hc.all_reduce(large, async_op=True), lambda: large[-8:], total
    if kind == "average":
        return hc.all_reduce(values, "avg", async_op=True), lambda: values, total / size
    if kind == "strided average":
        array = np.repeat(values, 2)[::2]
        return hc.all_reduce(array, "avg", async_op=True), lambda: array, total / size
    if kind == "half average":
        half = values.astype(np.float16)
        return hc.all_reduce(half, "avg", async_op=True), lambda: half, (total / size).astype(np.float16)
    if kind == "several":
        arrays = [np.repeat(values, 2)[::2], values.astype(np.float32)]
        work = hc.all_reduce_coalesced(arrays, "avg", async_op=True)
        return work, lambda: np.array(arrays, float), np.array([total / size] * 2)
    if kind == "message":
        into = np.zeros(16)[::2]
        work = hc.irecv(into, rank)
        hc.isend(values, rank).wait()
        return work, lambda: into, values
    persistent = hc.all_reduce_init(values if kind == "small persistent" else np.repeat(values, 2)[::2], "avg")
    persistent.start()
    return persistent, lambda: persistent.output, total / size


KINDS = ["contiguous", "average", "strided average", "half average", "several", "message", "in a thread"]
KINDS += ["persistent", "small persistent"]


@pytest.mark.parametrize("error", [Alarm, KeyboardInterrupt])
@pytest.mark.parametrize("kind", KINDS)
def test_wait_goes_on_after_a_handler_has_raised_anywhere_in_it(
    process_group: hc.ProcessGroup, kind: str, error: type[BaseException]
) -> None:
    for moment in range(1, MOMENTS):
        work, result, expected = begin(kind, process_group.rank, process_group.size)
        interrupted(work.wait, moment, error)
        assert work.wait()
        np.testing.assert_array_equal(result(), expected, str(moment))
        if isinstance(work, hc.PersistentWork):
            work.start()
            work.wait()
            work.free()
        else:
            assert work.exception() is None
    assert not process_group.dispatcher.in_flight


def test_callbacks_of_other_works_come_after_a_handler_has_raised_anywhere_in_the_adding_of_one(
    process_group: hc.ProcessGroup,
) -> None:
    rank, count = process_group.rank, 0

    def called(_: object) -> None:
        nonlocal count
        count += 1

    hc.barrier(async_op=True).get_future().add_done_callback(lambda _: None)  # type: ignore[union-attr]
    for moment in range(1, MOMENTS):  # the thread that calls them has begun
        works = [hc.irecv(np.zeros(1), rank) for _ in range(2)]
        interrupted(lambda work=works[0]: work.get_future().add_done_callback(lambda _: None), moment, Alarm)  # type: ignore[misc]
        works[1].get_future().add_done_callback(called)
        sent = [hc.isend(np.ones(1), rank) for _ in works]
        until(lambda moment=moment: count == moment, f"callback after moment {moment}")  # type: ignore[misc]
        hc.wait_all([*works, *sent])


class Listener:
    """A hook: the dispatcher sees a start only where one listens."""

    def begin(self, operation: object) -> None: ...
    def end(self, operation: object) -> None: ...


@pytest.mark.skipif(fastpath is None, reason="a start of MPI's and the note of it are two steps of Python")
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("size", [1, 8, 100_000])
@pytest.mark.parametrize("listens", [True, False])
def test_a_start_has_happened_or_not_when_a_handler_has_raised_anywhere_in_it(
    process_group: hc.ProcessGroup, size: int, listens: bool
) -> None:
    with hc.new_group() as group:  # type: ignore[union-attr]
        array = np.zeros(size)
        listening: Any = group.register_hook(Listener()) if listens else _nothing()
        with listening, hc.all_reduce_init(array, group=group) as work:
            for moment in range(1, MOMENTS):
                array[:] = moment
                if group.rank == 0:
                    interrupted(work.start, moment, Alarm)
                if not work.is_active:
                    work.start()
                work.wait(60)
                assert (array == moment * group.size).all(), moment


@pytest.mark.skipif(fastpath is None, reason="a start of MPI's and the note of it are two steps of Python")
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("columns", [1, 100, 100_000])
@pytest.mark.parametrize("adds", [True, False])
def test_a_halo_starts_once_also_where_a_handler_has_raised_in_its_start(columns: int, adds: bool) -> None:
    with hc.new_grid((0,), periodic=True) as grid:  # type: ignore[union-attr]
        array, before = np.zeros((4, columns)), (grid.rank - 1) % grid.size
        with (hc.halo_accumulate_init if adds else hc.halo_exchange_init)(array, grid) as work:
            for moment in range(1, MOMENTS):
                array[:] = 100.0 * moment + grid.rank
                if grid.rank == 0:
                    interrupted(work.start, moment, Alarm)
                if not work.is_active:
                    work.start()
                work.wait(60)
                came = 100.0 * moment + before
                assert (array[1] == came + 100.0 * moment + grid.rank if adds else array[0] == came).all(), moment


@pytest.mark.parametrize("way", ["counted", "counted, and longer than a block", "consensus"])
def test_a_sparse_exchange_goes_on_after_a_handler_has_raised_anywhere_in_it(
    process_group: hc.ProcessGroup, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    me, size = process_group.rank, process_group.size
    monkeypatch.setattr(progress, "drive", lambda work: None)  # another thread might be faster
    monkeypatch.setattr(sparse_exchange, "FEW", 0 if way == "consensus" else size)
    if "longer" in way:
        monkeypatch.setattr(sparse_exchange, "BLOCKS", 16 * size)
    for moment in range(1, 2 * MOMENTS):
        sent = {to: (np.full(5000, 10.0 * me + to), np.array([moment])) for to in range(size)}
        work = hc.exchange_sparse(sent, async_op=True)
        interrupted(work.wait, moment, Alarm)
        assert work.wait(60)
        assert list(work.result()) == list(range(size)), moment
        for source, (values, number) in work.result().items():
            assert (values == 10.0 * source + me).all(), moment
            assert number.tolist() == [moment]
    assert not process_group.dispatcher.in_flight


@pytest.mark.parametrize("wait", ["wait", "exception", "done", "await"])
@pytest.mark.parametrize("kind", ["average", "several", "message"])
def test_a_future_completes_after_a_handler_has_raised_anywhere_in_a_wait_for_it(
    process_group: hc.ProcessGroup, kind: str, wait: str
) -> None:
    for moment in range(1, MOMENTS):
        work, result, expected = begin(kind, process_group.rank, process_group.size)
        future = work.get_future()
        waits = (lambda work=work: asyncio.run(awaited(work))) if wait == "await" else getattr(future, wait)
        interrupted(waits, moment, KeyboardInterrupt)
        future.wait(60)
        np.testing.assert_array_equal(result(), expected, str(moment))
    assert not process_group.dispatcher.in_flight


@pytest.mark.parametrize("kind", ["average", "strided average", "several", "message"])
def test_another_thread_can_end_what_was_interrupted(process_group: hc.ProcessGroup, kind: str) -> None:
    for moment in range(1, MOMENTS):
        work, result, expected = begin(kind, process_group.rank, process_group.size)
        interrupted(work.is_completed, moment, KeyboardInterrupt)
        other = threading.Thread(target=work.wait, daemon=True)
        other.start()
        other.join(60)
        assert not other.is_alive(), moment
        np.testing.assert_array_equal(result(), expected, str(moment))


def test_an_error_of_the_transport_still_ends_the_work(process_group: hc.ProcessGroup) -> None:
    class Broken(hc.Work):
        def poll(self) -> bool:
            raise OSError("cable pulled")

        block = poll

    work = Broken()
    for _ in range(2):
        with pytest.raises(OSError, match="cable pulled"):
            work.wait()
    assert work.status is hc.WorkStatus.FAILED


@pytest.mark.mpi(min_size=2)
def test_a_real_alarm_bounds_a_wait_and_the_operation_goes_on(process_group: hc.ProcessGroup) -> None:
    alarms = 0

    def handler(_: int, frame: FrameType | None) -> None:
        if any(each.f_code is hc.Work.wait.__code__ for each, _ in traceback.walk_stack(frame)):
            raise Alarm  # in no other place, such as the loop's own lines

    array = np.ones((50000, 2))[:, 0]
    before = signal.signal(signal.SIGALRM, handler)
    try:
        if process_group.rank == 0:
            work = hc.all_reduce(array, "avg", async_op=True)
            signal.setitimer(signal.ITIMER_REAL, 0.01, 0.002)
            while alarms < 5:  # the others have not begun
                try:
                    work.wait(0.005)
                except hc.DistTimeoutError:
                    pass
                except Alarm:
                    alarms += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert work.alive is not None
            assert not work.is_completed()
        gone_on = hc.irecv(np.zeros(1), 0) if process_group.rank else None
        if process_group.rank == 0:
            for other in range(1, process_group.size):
                hc.isend(np.zeros(1), other).wait()
        else:
            gone_on.wait()  # type: ignore[union-attr]
            work = hc.all_reduce(array, "avg", async_op=True)
        work.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (array == 1).all()


@pytest.mark.parametrize("dtype", ["f", "d", "g", "F", "D", "G"])
def test_no_handler_interrupts_the_division_of_an_average(dtype: str) -> None:
    """NumPy converts an int to a long double by Python's code, in which a handler may raise."""

    def handler(*_: object) -> None:
        raise Alarm

    array = np.full(3, 6, dtype)
    _, _, divide = in_place(array, hc.ReduceOp.AVG, 2)
    before = signal.signal(signal.SIGALRM, handler)
    arrives = partial(ctypes.pythonapi.PyErr_SetInterruptEx, signal.SIGALRM)
    try:
        with pytest.raises(Alarm):
            deque(map(methodcaller("__call__"), [arrives, divide]), 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (array == 3).all()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_the_progress_thread_survives_what_a_callback_raises(
    process_group: hc.ProcessGroup, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def callback(_: object) -> None:
        raise error

    called: list[int] = []
    futures = []
    for _ in range(3):
        future = hc.all_reduce(np.ones(3), async_op=True).get_future()
        if not future.done():  # otherwise it is called here, and raises here
            future.add_done_callback(lambda future: callback(future) if threading.current_thread().daemon else None)
        future.add_done_callback(lambda _: called.append(1))
        futures.append(future)
    for future in futures:
        future.wait(60)
    until(lambda: len(called) == 3, "call of every callback")
    hc.all_reduce(np.ones(3), async_op=True).get_future().then(lambda _: None).wait(60)


class Leaves:
    """A hook that ends the thread it is in."""

    def begin(self, operation: hc.Operation) -> None:
        pass

    def end(self, operation: hc.Operation) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit


def test_the_progress_thread_survives_what_a_hook_raises(process_group: hc.ProcessGroup) -> None:
    with process_group.register_hook(Leaves()):
        for _ in range(3):
            array = np.ones(3)
            hc.all_reduce(array, async_op=True).get_future().then(lambda _: None).wait(60)
            assert (array == process_group.size).all()


@pytest.mark.mpi(min_size=2)  # MPICH's message to oneself in a group of one ends when it is received
def test_a_group_whose_destruction_warns_is_destroyed_all_the_same(process_group: hc.ProcessGroup) -> None:
    for where in ("before the ranks meet", "afterwards"):
        group = hc.new_group()
        assert isinstance(group, hc.ProcessGroup)
        if where == "afterwards":
            hc.isend(np.ones(3), process_group.rank, group=group).wait()
        elif group.rank == 0:  # on one rank only
            hc.irecv(np.ones(3), process_group.rank, group=group)
            hc.isend(np.ones(2), process_group.rank, group=group).wait()
        with pytest.warns(RuntimeWarning) if where == "afterwards" or group.rank == 0 else _nothing():
            group.destroy()
        assert group.is_destroyed
        assert group not in process_group.children


PROGRAM = """
import warnings
import numpy as np
import hpccomm as hc

warnings.simplefilter("error")
world = hc.init_process_group()
child = hc.new_group()
hc.isend(np.ones(3), world.rank, group=child).wait()
hc.isend(np.ones(3), world.rank).wait()
try:
    hc.destroy_process_group()
except RuntimeWarning as warning:
    print(f"said: {str(warning)[:11]}", hc.is_initialized(), world.is_destroyed, child.is_destroyed, flush=True)
with hc.init_process_group():
    hc.barrier()
"""

FORKED = """
import os
import numpy as np
import hpccomm as hc

world = hc.init_process_group()
grid = hc.new_grid(0, periodic=True)
work = hc.irecv(np.zeros(1), world.rank)
y = [np.ones(size) for size in (3, 30_000, 1_000_000)]
started = [hc.all_reduce_init(y[0]), hc.all_reduce_init(y[1], "avg"), hc.all_reduce_init(y[2])]
started += [hc.broadcast_init(np.ones(3), 0), hc.recv_init(np.ones(1), world.rank)]
started += [hc.halo_exchange_init(np.ones(3), grid)]
ended = hc.all_reduce_init(np.ones(3))
for each in started:
    each.start()
child = os.fork()
if child == 0:
    assert ended.wait()
    waits = [each.wait for each in started for _ in range(2)]
    for call in (lambda: hc.all_reduce(np.ones(3)), hc.barrier, work.wait, lambda: hc.new_group(), ended.start, *waits):
        try:
            call()
        except hc.DistError as error:
            print(f"refused: {'forked from' in str(error)}", flush=True)
    os._exit(0)
os.waitpid(child, 0)
hc.isend(np.ones(1), world.rank).wait()
work.wait()
hc.isend(np.ones(1), world.rank).wait()
for each in started:
    each.wait()
assert [each[0] for each in y] == [2, 1, 2]
x = np.ones(3)
hc.all_reduce(x)
print(f"parent: {x.tolist()}", flush=True)
hc.destroy_process_group()
"""


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.mark.serial
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (PROGRAM, ["said: destroy of  False True True"] * 2),
        (FORKED, ["parent: [2.0, 2.0, 2.0]"] * 2 + ["refused: True"] * 34),
    ],
    ids=["warnings are errors", "forked"],
)
def test_programs(program: str, expected: list[str]) -> None:
    done = launch(2, sys.executable, "-c", program)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, expected), done.stderr
