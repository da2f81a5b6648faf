from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.core import progress
from hpccomm.core.dispatcher import REAP_BYTES, all_dispatchers
from hpccomm.core.joined_work import JoinedWork
from tests.launch import until

pytestmark = pytest.mark.usefixtures("process_group")
needs_two = pytest.mark.mpi(min_size=2)


def test_a_work_says_what_it_is(process_group: hc.ProcessGroup) -> None:
    array = np.ones(3)
    first = hc.all_reduce(array, async_op=True)
    first.wait()
    second = hc.barrier(async_op=True)
    assert (first.op_type, second.op_type) == ("all_reduce", "barrier")
    assert second.sequence_number == first.sequence_number + 1
    assert first.result() is array
    assert first.status is hc.WorkStatus.COMPLETED
    assert first.is_completed()
    assert first.is_success()
    assert first.exception() is None
    second.synchronize()
    assert "barrier" in repr(second)
    assert "completed" in repr(second)
    with pytest.raises(hc.DistError, match="only a receive has a source rank"):
        first.source_rank()


def test_the_result_of_a_list_operation_is_the_list(process_group: hc.ProcessGroup) -> None:
    outputs = [np.empty(1) for _ in range(process_group.size)]
    work = hc.all_gather(outputs, np.ones(1), async_op=True)
    assert work.result() is outputs


def test_a_look_at_joined_works_does_not_note_that_the_program_asked_for_each(process_group: hc.ProcessGroup) -> None:
    me = process_group.rank
    works = [hc.irecv(np.zeros(1), me, tag=tag) for tag in (1, 2)]
    assert not JoinedWork(works).has_ended()
    assert [work.was_asked for work in works] == [False, False]
    for tag in (1, 2):
        hc.isend(np.ones(1), me, tag=tag).wait()
    assert [work.wait(10) for work in works] == [True, True]


def test_wait_with_a_timeout_leaves_the_receive_in_flight(process_group: hc.ProcessGroup) -> None:
    me, message = process_group.rank, np.zeros(2)
    work = hc.irecv(message, me)
    assert not work.is_completed()
    assert work.status is hc.WorkStatus.IN_FLIGHT
    for timeout in (0.02, timedelta(milliseconds=20)):
        with pytest.raises(hc.DistTimeoutError, match=r"recv #\d+: not done after 0.02 s; it is still in flight"):
            work.wait(timeout)
    with pytest.raises(TimeoutError):  # it is one of Python's, too
        work.wait(0)
    hc.isend(np.array([1.0, 2.0]), me).wait()
    assert work.wait(10)
    assert message.tolist() == [1.0, 2.0]


@needs_two
def test_wait_with_a_timeout_leaves_a_collective_in_flight(process_group: hc.ProcessGroup) -> None:
    array = np.ones(1, np.float16)
    ready = hc.irecv(np.zeros(1), (process_group.rank + 1) % process_group.size)
    if process_group.rank == 0:
        work = hc.all_reduce(array, "avg", async_op=True)
        with pytest.raises(hc.DistTimeoutError):
            work.wait(0.05)
        assert array[0] == 1
        hc.isend(np.zeros(1), process_group.size - 1).wait()
    else:
        if process_group.rank == process_group.size - 1:
            ready.wait()  # the all_reduce here begins after rank 0 has given up once
        work = hc.all_reduce(array, "avg", async_op=True)
        hc.isend(np.zeros(1), process_group.rank - 1).wait()
    work.wait()
    assert array[0] == 1
    if process_group.rank != process_group.size - 1:
        ready.wait()


def test_post_processing_happens_once(process_group: hc.ProcessGroup) -> None:
    array = np.full((4, 4), 8.0)[:, ::2]
    work = hc.all_reduce(array, hc.ReduceOp.AVG, async_op=True)
    threads = [threading.Thread(target=work.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    future = work.get_future()
    for thread in threads:
        thread.join()
    work.wait()
    assert work.is_completed()
    assert future.wait(10) is array
    assert (array == 8.0).all()  # divided by the number of ranks once


def test_a_thousand_operations_in_flight_complete_in_order(process_group: hc.ProcessGroup) -> None:
    arrays = np.arange(1000.0).reshape(-1, 1).repeat(3, axis=1)
    done: list[int] = []
    works = []
    for array in arrays:
        work = hc.all_reduce(array, async_op=True)
        work.add_done_callback(lambda work: done.append(work.sequence_number))
        works.append(work)
    for work in works:
        work.wait()
    assert done == sorted(done)
    assert len(done) == 1000
    assert np.array_equal(arrays, process_group.size * np.arange(1000.0).reshape(-1, 1).repeat(3, axis=1))
    assert not process_group.dispatcher.in_flight


def test_a_dropped_work_keeps_its_arrays_until_it_is_done(process_group: hc.ProcessGroup) -> None:
    me = process_group.rank

    class Watched(np.ndarray):  # a plain ndarray can't be referenced weakly
        pass

    array: Any = np.zeros(1000).view(Watched)
    watched = weakref.ref(array)
    hc.irecv(array, me, tag=5)
    del array
    gc.collect()
    assert watched() is not None  # MPI still writes to it
    hc.isend(np.ones(1000), me, tag=5)
    while process_group.dispatcher.in_flight:
        for work in list(process_group.dispatcher.in_flight):
            work.wait()
    del work
    gc.collect()
    assert watched() is None


def test_dropped_works_are_let_go_of_while_the_program_runs(process_group: hc.ProcessGroup) -> None:
    array = np.ones(1)
    for _ in range(500):
        hc.all_reduce(array, "max", async_op=True)
        hc.barrier()
    assert len(process_group.dispatcher.in_flight) < 100
    for work in list(process_group.dispatcher.in_flight):
        work.wait()


def test_abort_takes_a_receive_back_and_the_group_goes_on(process_group: hc.ProcessGroup) -> None:
    me = process_group.rank
    work = hc.irecv(np.zeros(4), me, tag=9)
    work.abort()
    assert work.status is hc.WorkStatus.ABORTED
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(hc.DistError, match="aborted by the program"):
        work.wait()
    work.abort()  # once more does nothing
    message = np.zeros(4)
    later = hc.irecv(message, me, tag=9)
    hc.isend(np.ones(4), me, tag=9).wait()
    later.wait()
    assert message.tolist() == [1.0] * 4


@pytest.mark.parametrize("is_strided", [False, True])
def test_abort_of_a_receive_whose_message_has_come_completes_it(
    process_group: hc.ProcessGroup, is_strided: bool
) -> None:
    me = process_group.rank
    sent = hc.isend(np.ones(4), me, tag=9)
    while not process_group.comm.Iprobe(me, 9):
        pass
    message = np.zeros((4, 2))[:, 0] if is_strided else np.zeros(4)
    work = hc.irecv(message, me, tag=9)
    work.abort()
    assert (work.status, work.exception(), message.tolist()) == (hc.WorkStatus.COMPLETED, None, [1.0] * 4)
    assert work.source_rank() == me
    sent.wait()


@pytest.mark.parametrize("array", [np.zeros(0), np.zeros(4), np.zeros((4, 2))[:, 0]])
def test_abort_goes_on_where_a_signal_handler_has_interrupted_it(
    process_group: hc.ProcessGroup, array: np.ndarray
) -> None:
    work = hc.irecv(array, process_group.rank, tag=9)
    work.cancel()
    work.abort()
    assert work.status is hc.WorkStatus.ABORTED


def test_a_dropped_group_keeps_the_arrays_of_its_operations(process_group: hc.ProcessGroup) -> None:
    def receive(comm: MPI.Intracomm) -> list[weakref.ref[Any]]:
        one, other = np.zeros(3), np.zeros(3)
        hc.ProcessGroup.from_comm(comm, name="dropped 1").irecv(one, 0, tag=1)
        hc.ProcessGroup.from_comm(comm, name="dropped 2").recv_init(other, 0, tag=2).start()
        return [weakref.ref(one), weakref.ref(other)]

    arrays = [array() for array in receive(MPI.COMM_SELF) if gc.collect() >= 0]
    dropped = [each.group for each in all_dispatchers() if each.group.name.startswith("dropped")]
    for group in dropped:
        group.isend(np.ones(3), 0, tag=int(group.name[-1]))
        group.destroy()
    assert [None if array is None else array.tolist() for array in arrays] == 2 * [[1.0, 1.0, 1.0]]


def test_a_work_is_followed_although_an_earlier_ones_callback_raises(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises() -> None:
        raise KeyboardInterrupt

    me, group = process_group.rank, hc.new_group(use_local_synchronization=True, ranks=[process_group.rank])
    assert isinstance(group, hc.ProcessGroup)
    for _ in range(100):
        group.irecv(np.zeros(1), 0, tag=1)  # dropped
    monkeypatch.setattr(group.dispatcher, "reap", raises)
    for strided in (False, True):
        for tag in range(2, 200):
            array = np.zeros((5, 2))[:, 0] if strided else np.zeros(5)
            try:
                group.irecv(array, 0, tag=tag)
            except KeyboardInterrupt:
                break
        else:
            pytest.fail("nobody called reap")
        kept = weakref.ref(array if array.base is None else array.base)
        del array
        gc.collect()
        assert kept() is not None, me
    for work in list(group.dispatcher.in_flight):
        work.abort()
    group.destroy()


def test_abort_of_what_mpi_cannot_take_back_is_refused(process_group: hc.ProcessGroup) -> None:
    array = np.ones(1)
    work = hc.all_reduce(array, async_op=True)
    if not work.is_completed():
        with pytest.raises(hc.UnsupportedOperationError, match="can't be taken back"):
            work.abort()
    work.wait()
    work.abort()  # it has ended: nothing to take back
    assert work.is_success()
    both = hc.sendrecv(np.ones(1), process_group.rank, np.zeros(1), process_group.rank, recv_tag=1, async_op=True)
    with pytest.raises(hc.UnsupportedOperationError, match="sendrecv: it has begun"):
        both.abort()
    hc.irecv(np.zeros(1), process_group.rank).wait()
    hc.isend(np.zeros(1), process_group.rank, tag=1).wait()
    both.wait()


def test_callbacks_of_an_ended_work_run_at_once(process_group: hc.ProcessGroup) -> None:
    work = hc.barrier(async_op=True)
    work.wait()
    seen: list[hc.Work] = []
    work.add_done_callback(seen.append)
    assert seen == [work]


def test_futures_complete_without_anybody_waiting(process_group: hc.ProcessGroup) -> None:
    array = np.ones(3)
    work = hc.all_reduce(array, async_op=True)
    future = work.get_future()
    assert work.get_future() is future
    until(future.done, "end of the operation")  # asks the future only
    assert future.value() is array
    assert array.tolist() == [process_group.size] * 3


def test_then_runs_in_a_chain(process_group: hc.ProcessGroup) -> None:
    work = hc.all_reduce(np.ones(3), async_op=True)
    total = work.get_future().then(lambda f: f.value().sum()).then(lambda f: 2 * f.value())
    assert total.wait(60) == 6 * process_group.size


@pytest.mark.parametrize("count", [1, 1 << 20], ids=["small", "large"])
def test_a_callback_may_wait_for_the_future_of_an_operation_that_it_begins(
    process_group: hc.ProcessGroup, count: int
) -> None:
    array = np.ones(count)

    def again(future: hc.Future) -> float:
        return float(begun(array, deeper).wait(60))

    def deeper(future: hc.Future) -> float:
        return float(begun(array, lambda last: last.value()[0]).wait(60))

    def begun(array: np.ndarray, callback: Any) -> hc.Future:
        work = hc.all_reduce(array, async_op=True)
        assert work is not None
        return work.get_future().then(callback)

    assert begun(array, again).wait(60) == process_group.size**3


def test_the_future_of_a_failed_work_has_its_error(process_group: hc.ProcessGroup) -> None:
    me = process_group.rank
    work = hc.irecv(np.zeros(2), me)
    future = work.get_future()
    hc.isend(np.zeros(1), me).wait()  # too short
    with pytest.raises(hc.DistBackendError):
        future.wait(60)
    chained = future.then(lambda f: f.value())
    with pytest.raises(hc.DistBackendError):
        chained.wait(60)


def test_a_failed_work_whose_error_was_raised_is_not_kept(process_group: hc.ProcessGroup) -> None:
    me, arrays = process_group.rank, []
    for _ in range(5):
        array = np.zeros(2)
        arrays.append(weakref.ref(array))
        work = hc.irecv(array, me)
        hc.isend(np.zeros(1), me).wait()  # too short
        with pytest.raises(hc.DistBackendError):
            work.wait()
        del array, work
    gc.collect()
    assert [array() for array in arrays[:-1]] == [None] * 4  # the last one stays until another fails


def test_await_in_asyncio(process_group: hc.ProcessGroup) -> None:
    async def program() -> list[float]:
        first, second = np.ones(2), np.full(2, 2.0)
        works = [hc.all_reduce(array, async_op=True) for array in (first, second)]
        results = await asyncio.gather(*works)
        assert results[0] is first
        await works[0].get_future()
        return [float(result[0]) for result in results]

    assert asyncio.run(program()) == [process_group.size, 2.0 * process_group.size]


def test_works_of_many_futures_complete_in_order(process_group: hc.ProcessGroup) -> None:
    order: list[int] = []
    futures = []
    for i in range(200):
        work = hc.all_reduce(np.ones(1), async_op=True)
        futures.append(work.get_future().then(lambda _, i=i: order.append(i)))
    hc.collect_all(futures).wait(60)
    assert order == list(range(200))


# -- futures and await: who waits drives the operation -----------------------------------------------


def test_no_thread_until_a_callback_needs_one(process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_thread", None)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail(f"{thread.name} is started"))

    def begun() -> hc.Work:
        return hc.all_reduce(np.ones(3), async_op=True)

    async def program() -> list[float]:
        awaited = [await begun(), await begun().get_future(), *await asyncio.gather(begun(), begun())]
        awaited += (await hc.collect_all([begun().get_future()]))[0].value(), await asyncio.wait_for(begun(), 60)
        return [float(array[0]) for array in awaited]

    assert begun().get_future().wait()[0] == begun().get_future().result(60)[0] == process_group.size
    assert begun().get_future().exception() is None
    until(begun().get_future().done, "end of the operation")
    assert [each.value()[0] for each in hc.collect_all([begun().get_future() for _ in range(3)]).wait()] == [
        process_group.size
    ] * 3
    assert asyncio.run(program()) == [process_group.size] * 6
    assert progress._thread is None
    monkeypatch.undo()
    me = process_group.rank
    ended = hc.irecv(np.zeros(3), me).get_future().then(lambda _: None)
    assert any(thread.name == progress.NAME for thread in threading.enumerate())
    hc.isend(np.ones(3), me).wait()
    ended.wait(60)


def test_several_threads_wait_for_one_future(process_group: hc.ProcessGroup) -> None:
    me, message = process_group.rank, np.zeros(2)
    future = hc.irecv(message, me, tag=3).get_future()
    seen: list[Any] = []
    waits = [future.wait, lambda: future.result(60), lambda: hc.collect_all([future]).wait()[0].value()]
    threads = [threading.Thread(target=lambda wait=wait: seen.append(wait()), daemon=True) for wait in waits]
    for thread in threads:
        thread.start()
    assert not future.done()
    hc.isend(np.array([1.0, 2.0]), me, tag=3).wait()
    for thread in threads:
        thread.join(60)
    assert [each is message for each in seen] == [True] * 3
    assert message.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("comes_first", ["callback", "waiter"])
def test_a_callback_and_a_waiter(process_group: hc.ProcessGroup, comes_first: str) -> None:
    me, message = process_group.rank, np.zeros(2)
    future = hc.irecv(message, me, tag=3).get_future()
    called: list[Any] = []
    waiter = threading.Thread(target=future.wait, daemon=True)
    if comes_first == "waiter":
        waiter.start()
    for _ in range(2):
        future.add_done_callback(called.append)
    if comes_first == "callback":
        waiter.start()
    hc.isend(np.ones(2), me, tag=3).wait()
    waiter.join(60)
    assert not waiter.is_alive()
    until(lambda: len(called) == 2, "call of both callbacks")
    assert called == [future, future]
    assert message.tolist() == [1.0, 1.0]


def test_callbacks_come_before_the_end_of_later_futures(process_group: hc.ProcessGroup) -> None:
    called: list[int] = []
    for turn in range(20):
        for i in range(3):
            future = hc.all_reduce(np.ones(1), async_op=True).get_future()
            future.add_done_callback(lambda _, i=i: called.append(i))  # type: ignore[misc]
        hc.all_reduce(np.ones(1), async_op=True).get_future().wait(60)
        assert called == [0, 1, 2] * (turn + 1)


def test_what_waits_for_futures_in_python_itself(process_group: hc.ProcessGroup) -> None:
    def begun() -> list[hc.Future]:
        return [hc.all_reduce(np.ones(1), async_op=True).get_future() for _ in range(3)]

    async def wrapped() -> int:
        return len(await asyncio.gather(*map(asyncio.wrap_future, begun())))

    done, left = concurrent.futures.wait(begun(), 60)
    assert (len(done), len(left)) == (3, 0)
    assert len(list(concurrent.futures.as_completed(begun(), 60))) == 3
    assert len(concurrent.futures.wait([hc.collect_all(begun())], 60).done) == 1
    assert asyncio.run(wrapped()) == 3


def test_a_future_that_is_waited_for_too_long(process_group: hc.ProcessGroup) -> None:
    with hc.new_group(timeout=0.2, on_timeout="raise") as group:
        work = hc.irecv(np.zeros(2), process_group.rank, group=group)
        future = work.get_future()
        for wait in (future.wait, hc.collect_all([future]).wait, future.exception):
            with pytest.raises(concurrent.futures.TimeoutError):
                wait(0.01)
        with pytest.raises(hc.DistTimeoutError, match=r"recv #1: not done after 0.2 s"):
            future.wait()
        assert not future.done()
        work.abort()
        with pytest.raises(hc.DistError, match="aborted by the program"):
            future.wait()
        assert future.exception() is work.exception()


def test_an_event_loop_goes_on_while_an_operation_is_awaited(process_group: hc.ProcessGroup) -> None:
    me, message = process_group.rank, np.zeros(2)

    async def send() -> None:
        await asyncio.sleep(0.02)
        await hc.isend(np.ones(2), me, tag=3)

    async def program() -> Any:
        return (await asyncio.gather(hc.irecv(message, me, tag=3), send()))[0]

    assert asyncio.run(program()) is message
    assert message.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("has_callback", [False, True])
@pytest.mark.parametrize("form", ["work", "future"])
def test_a_cancelled_await_leaves_the_operation_in_flight(
    process_group: hc.ProcessGroup, form: str, has_callback: bool
) -> None:
    me, message = process_group.rank, np.zeros(2)
    work = hc.irecv(message, me, tag=3)
    called: list[Any] = []
    if has_callback:
        work.get_future().add_done_callback(called.append)

    async def program() -> Any:
        awaited: Any = work if form == "work" else work.get_future()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(awaited, 0.01)
        task = asyncio.ensure_future(awaited)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not work.is_completed()
        hc.isend(np.ones(2), me, tag=3)
        return await awaited

    assert asyncio.run(program()) is message
    assert message.tolist() == [1.0, 1.0]
    until(lambda: len(called) == has_callback, "call of the callback")


def test_awaiting_a_failed_operation_raises_its_error(process_group: hc.ProcessGroup) -> None:
    me = process_group.rank

    async def program(form: str) -> None:
        work = hc.irecv(np.zeros(2), me)
        hc.isend(np.zeros(1), me).wait()  # too short
        with pytest.raises(hc.DistBackendError, match="at most its first part was written"):
            await (work if form == "work" else work.get_future())

    for form in ("work", "future"):
        asyncio.run(program(form))


def test_a_hook_has_the_last_word_on_a_future(process_group: hc.ProcessGroup) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Judge:
        def begin(self, operation: hc.Operation) -> None:
            pass

        def end(self, operation: hc.Operation) -> None:
            inside.set()
            assert go_on.wait(60)
            operation.error = ValueError("not what it should be")

    with process_group.register_hook(Judge()):
        work = hc.all_reduce(np.ones(1), async_op=True)
    future = work.get_future()
    other = threading.Thread(target=future.exception, daemon=True)
    other.start()
    assert inside.wait(60)
    assert not future.done()
    go_on.set()
    with pytest.raises(ValueError, match="not what it should be"):
        future.wait()
    other.join(60)


def test_a_work_of_ones_own_only_needs_poll(process_group: hc.ProcessGroup) -> None:
    class Countdown(hc.Work):
        left = 3

        def poll(self) -> bool:
            self.left -= 1
            if self.left < -10:
                raise OSError("polled after the end")
            return self.left < 0

    work = Countdown()
    assert not work.is_completed()
    assert work.wait()
    assert work.left == -1

    class Broken(hc.Work):
        def poll(self) -> bool:
            raise OSError("no such device")

    with pytest.raises(OSError, match="no such device"):
        Broken().wait()
    with pytest.raises(hc.UnsupportedOperationError, match="can't be taken back"):
        Countdown().abort()
    assert hc.CompletedWork().is_success()
    assert hc.CompletedWork().wait()


# -- what goes wrong in somebody else's code ---------------------------------------------------------


def test_a_callback_that_raises_is_logged_and_stops_nothing(
    process_group: hc.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[str] = []
    work = hc.all_reduce(np.ones(3), async_op=True)
    work.get_future()
    work.add_done_callback(lambda _: called.append("before"))
    work.add_done_callback(lambda _: 1 / 0)
    work.add_done_callback(lambda _: called.append("behind"))
    with caplog.at_level("ERROR", logger="hpccomm"):
        assert work.wait()
        while len(called) < 2:
            time.sleep(1e-3)
    assert "ZeroDivisionError" in caplog.text
    array = np.ones(3)
    future = hc.all_reduce(array, async_op=True).get_future().then(lambda f: f.value())
    assert future.wait(60) is array  # the progress thread lives
    assert (array == process_group.size).all()


def test_a_future_can_not_be_cancelled(process_group: hc.ProcessGroup) -> None:
    array = np.ones(3)
    work = hc.all_reduce(array, async_op=True)
    future = work.get_future()
    assert not future.cancel()
    assert work.wait()
    assert future.wait(60) is array
    chained = hc.all_reduce(np.ones(3), async_op=True).get_future().then(lambda f: f.value()[0])
    assert chained.wait(60) == process_group.size
    assert hc.all_reduce(np.ones(3), async_op=True).get_future().wait(60)[0] == process_group.size


@pytest.mark.parametrize("timeout", ["x", [], True, np.zeros(2)])
def test_a_timeout_is_a_time(process_group: hc.ProcessGroup, timeout: Any) -> None:
    work = hc.barrier(async_op=True)
    with pytest.raises(TypeError, match=r"barrier.wait: timeout is .*; expected a timedelta or a number of seconds"):
        work.wait(timeout)
    for wrong in (float("nan"), -1):
        with pytest.raises(ValueError, match=f"barrier.wait: timeout is {wrong}; expected 0 or more seconds"):
            work.wait(wrong)
    assert work.wait(np.float32(60))


def test_dropped_works_keep_no_more_than_some_bytes(process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    hc.all_reduce(np.ones(3))
    output, arrays, most = np.empty(1 << 18), [], 0
    for _ in range(3 * REAP_BYTES // output.nbytes):
        array = np.ones(1 << 18)
        arrays.append(weakref.ref(array))
        receive = hc.irecv(output, (me - 1) % n)
        hc.isend(array, (me + 1) % n)  # its Work is dropped
        receive.wait()
        hc.barrier()
        del array, receive
        most = max(most, sum(each() is not None for each in arrays))
    assert most <= REAP_BYTES // output.nbytes + 2
