"""Large asynchronous operations run in a thread: with the same results, in order, beside whatever the program does."""

from __future__ import annotations

import asyncio
import gc
import resource
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.core.backend import Backend
from hpccomm.mpi import shared_memory
from hpccomm.mpi.communication_thread import ThreadWork
from hpccomm.native import fastpath
from hpccomm.process.tuning import Tuning

from ..arrays import LAYOUTS, REDUCTIONS, assert_same, reduced, reductions_of, values
from ..launch import run_program


@pytest.fixture(scope="module", params=[0, 4096, Tuning().node_bytes], ids=["MPI", "or node", "node"])
def group(process_group: hc.ProcessGroup, request: pytest.FixtureRequest) -> Iterator[hc.ProcessGroup]:
    """A group in which every asynchronous operation of some bytes runs in the thread, and large is 200 bytes."""
    group = hc.new_group()
    assert isinstance(group, hc.ProcessGroup)
    group.tuning = Tuning(
        thread_bytes=8, segment_bytes=200, node_bytes=request.param, node_reduction_bytes=request.param
    )
    yield group
    hc.destroy_process_group(group)


@pytest.mark.parametrize("dtype", [np.dtype("f8"), np.dtype("f2"), np.dtype("i4")], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_operation(group: hc.ProcessGroup, layout: Any, dtype: Any) -> None:
    n, me = group.size, group.rank
    given = [values(dtype, (20, 3), rank) for rank in range(n)]
    rows = [values(dtype, (n, 20), rank) for rank in range(n)]

    def mine() -> Any:
        return layout(given[me])

    def check(work: hc.Work | None, *pairs: tuple[Any, Any]) -> None:
        assert isinstance(work, ThreadWork)
        assert work.wait() is True
        for array, expected in pairs:
            assert_same(array, expected, work.op_type)

    check(hc.broadcast(array := mine(), n - 1, group, True), (array, given[-1]))
    for name in reductions_of(dtype):
        op = REDUCTIONS[name][0]
        check(hc.all_reduce(array := mine(), op, group, True), (array, reduced(name, given)))
        check(hc.reduce(array := mine(), 0, op, group, True), (array, given[me] if me else reduced(name, given)))
        output = layout(np.zeros(20, dtype))
        check(hc.reduce_scatter_single(output, layout(rows[me]), op, group, True), (output, reduced(name, rows)[me]))
    check(hc.scan(array := mine(), "sum", group, True), (array, reduced("SUM", given[: me + 1])))
    expected = reduced("SUM", given[:me]) if me else given[0]
    check(hc.exscan(array := mine(), "sum", group, True), (array, expected))
    output = layout(np.zeros((n, 20, 3), dtype))
    check(hc.all_gather_single(output, mine(), group, True), (output, np.stack(given)))
    output = layout(np.zeros((n, 20), dtype))
    check(hc.all_to_all_single(output, layout(rows[me]), group=group, async_op=True),
          (output, np.stack([row[me * 20 // 20] for row in rows])))  # fmt: skip

    many = [mine(), layout(rows[me])]
    check(hc.all_reduce_coalesced(many, "sum", group, True),
          (many[0], reduced("SUM", given)), (many[1], reduced("SUM", rows)))  # fmt: skip
    many = [mine(), layout(rows[me])]
    check(hc.broadcast_coalesced(many, 0, group, True), (many[0], given[0]), (many[1], rows[0]))
    output = layout(np.zeros((n, 20, 3), dtype))
    check(hc.all_gather_single_coalesced([output], [mine()], group, True), (output, np.stack(given)))
    output = layout(np.zeros(20, dtype))
    check(hc.reduce_scatter_single_coalesced([output], [layout(rows[me])], "sum", group, True),
          (output, reduced("SUM", rows)[me]))  # fmt: skip


def test_operations_whose_size_may_differ_between_ranks_do_not(group: hc.ProcessGroup) -> None:
    n, me = group.size, group.rank
    outputs = [np.zeros(100 * rank) for rank in range(n)]
    work = hc.all_gather(outputs, np.full(100 * me, float(me)), group=group, async_op=True)
    assert not isinstance(work, ThreadWork)
    work.wait()  # type: ignore[union-attr]
    assert all((output == rank).all() for rank, output in enumerate(outputs))


def test_they_run_in_the_order_of_their_launch_beside_blocking_ones(group: hc.ProcessGroup) -> None:
    n = group.size
    large = [np.full(5000, i + 1.0) for i in range(5)]
    works = [hc.all_reduce(array, group=group, async_op=True) for array in large]
    small = np.ones(1)
    for _ in range(50):
        hc.all_reduce(small, "max", group)  # not a number that the thread's messages could be mistaken for
        assert small[0] == 1
    futures = [work.get_future() for work in works]  # type: ignore[union-attr]
    ended: list[int] = []
    for i, future in enumerate(futures):
        future.add_done_callback(lambda _, i=i: ended.append(i))  # type: ignore[misc]
    for i, future in enumerate(futures):
        assert (future.result() == n * (i + 1)).all()
    assert ended == sorted(ended)


def test_a_work_that_is_dropped_goes_on_and_lets_go_of_its_arrays(group: hc.ProcessGroup) -> None:
    class Memory(bytearray):
        """Can be referenced weakly."""

    memory = Memory(80_000)
    array = np.frombuffer(memory)
    array[...] = 1
    alive = weakref.ref(memory)
    hc.all_reduce(array, group=group, async_op=True)
    del memory
    gc.collect()
    assert alive() is not None
    array_again = np.frombuffer(alive())  # type: ignore[arg-type]
    del array
    group.barrier()
    for work in list(group.dispatcher.in_flight):
        work.wait()
    assert (array_again == group.size).all()
    del array_again, work
    group.dispatcher.reap()
    gc.collect()
    assert alive() is None


def test_what_goes_wrong_is_raised_by_wait(group: hc.ProcessGroup) -> None:
    backend: Any = group.dispatcher.backends["cpu"]
    work = backend._thread.launch("all_reduce", np.ones(10), "no operation")  # the checks would not let it through
    with pytest.raises(AttributeError):
        work.wait()
    assert work.status is hc.WorkStatus.FAILED


@pytest.mark.serial
def test_errors_of_mpi_are_explained() -> None:
    class Broken(Backend):
        def all_reduce(self, array: Any, op: Any, async_op: bool) -> None:
            raise MPI.Exception(MPI.ERR_TRUNCATE)

    work = ThreadWork("all_reduce", (np.ones(1), "sum"))
    work.run(Broken(0, 1), None)
    with pytest.raises(hc.DistBackendError, match=r"MPI reports: .*[Tt]runc"):
        work.wait()


def test_a_thread_that_can_not_be_set_up_fails_its_operations(process_group: hc.ProcessGroup) -> None:
    group = hc.new_group()
    backend: Any = group.dispatcher.backends["cpu"]  # type: ignore[union-attr]

    def make(comm: Any) -> Any:
        comm.Free()
        raise hc.DistBackendError("no communicator is left")

    backend._thread._make = make
    for _ in range(2):
        work = hc.all_reduce(np.ones(Tuning().thread_bytes // 8), group=group, async_op=True)
        with pytest.raises(hc.DistBackendError, match="no communicator is left"):
            work.wait()  # type: ignore[union-attr]
    hc.destroy_process_group(group)


def test_await(group: hc.ProcessGroup) -> None:
    async def main() -> Any:
        array = np.ones(100)
        return await hc.all_reduce(array, group=group, async_op=True)  # type: ignore[misc]

    assert (asyncio.run(main()) == group.size).all()


def test_destroying_the_group_ends_its_thread(process_group: hc.ProcessGroup) -> None:
    def threads() -> int:
        return sum(thread.name == "hpccomm-communication" for thread in threading.enumerate())

    before = threads()
    group = hc.new_group()
    array = np.ones(Tuning().thread_bytes // 8)
    hc.all_reduce(array, group=group, async_op=True)
    assert threads() == before + 1
    hc.destroy_process_group(group)  # waits for the operation
    assert threads() == before
    assert (array == process_group.size).all()


def thread_memory(group: hc.ProcessGroup) -> Any:
    return group.dispatcher.backends["cpu"]._thread._backend.fast_path._memory


def maps() -> list[str]:
    """Return the files of memory of threads that this process has mapped."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/hpccomm-thread-" in line]


needs_extension = pytest.mark.skipif(fastpath is None, reason="without the compiled extension MPI does them")


@needs_extension
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("form", ["async", "persistent"])
def test_the_thread_has_memory_of_the_node_whose_file_has_no_name_and_goes_with_the_group(
    process_group: hc.ProcessGroup, form: str
) -> None:
    n, me = process_group.size, process_group.rank
    before = len(maps())
    with hc.new_group() as group:  # type: ignore[union-attr]
        given, output = np.zeros((n, 300_000)), np.zeros(300_000)
        for turn in range(3):
            given[:] = turn + me + np.arange(n)[:, None]
            if form == "async":
                hc.reduce_scatter_single(output, given, group=group, async_op=True).wait()  # type: ignore[union-attr]
            else:
                with hc.reduce_scatter_single_init(output, given, group=group) as work:
                    work.start()
                    work.wait()
            assert (output == n * (turn + me) + sum(range(n))).all()
        assert thread_memory(group) is not None
        assert len(maps()) > before
        assert all(line.endswith("(deleted)") for line in maps())
    assert len(maps()) == before


@needs_extension
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("lacks", ["free memory", "files of that size", "the file"])
@pytest.mark.parametrize("who", [0, -1])
def test_where_a_rank_can_not_have_that_memory_mpi_does_it(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch, lacks: str, who: int
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with hc.new_group() as group:  # type: ignore[union-attr]
        array, before = np.ones(300_000), len(maps())
        hc.all_reduce(array, group=group)  # makes the memory of the program's thread
        if group.rank == who % group.size:
            if lacks == "free memory":
                monkeypatch.setattr(shared_memory, "free_bytes", lambda: 1000)
            elif lacks == "the file":
                monkeypatch.setattr(shared_memory, "_mapped", lambda *_: None)
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limit[1]))
        try:
            for turn in range(12):
                array[:] = turn
                hc.all_reduce(array, group=group, async_op=True).wait()  # type: ignore[union-attr]
                assert (array == turn * group.size).all()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        is_there = thread_memory(group) is not None
        assert is_there == (lacks != "the file" and who == -1)  # rank 0 makes the file, and asks whether there is room
        assert len(maps()) == before + is_there


@pytest.mark.mpi(min_size=2)
def test_who_completes_futures_is_told_at_once(group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    monkeypatch.setattr("hpccomm.mpi.communication_thread.look_now", told.set)
    if group.rank > 0:
        MPI.COMM_WORLD.Barrier()  # the operation does not end before rank 0 has its Future
    work = hc.all_reduce(np.ones(100), group=group, async_op=True)
    assert work is not None
    future = work.get_future()
    future.add_done_callback(lambda _: None)
    if group.rank == 0:
        MPI.COMM_WORLD.Barrier()
        assert told.wait(60)
    future.wait(60)


def test_without_thread_multiple_there_is_no_thread(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpccomm.mpi.backend.THREAD_MULTIPLE", False)
    with hc.new_group() as group:
        array = np.ones(Tuning().thread_bytes // 8)
        work = hc.all_reduce(array, group=group, async_op=True)
        assert work is not None
        assert not isinstance(work, ThreadWork)
        work.wait()
        assert (array == process_group.size).all()


@pytest.mark.serial
def test_a_program_that_does_not_wait_for_it_ends_well(tmp_path: Path) -> None:
    program = """
        import numpy as np, hpccomm as hc
        hc.init_process_group()
        hc.all_reduce(np.ones(1 << 20), async_op=True)
        """
    run_program(program, tmp_path, 2, status=0)


@pytest.mark.serial
def test_operations_that_take_longer_than_a_rank_waits_for_them_end_before_mpi_does(tmp_path: Path) -> None:
    program = """
        import numpy as np, hpccomm as hc
        from hpccomm.mpi import communication_thread
        hc.init_process_group()
        communication_thread.LONGEST_GOODBYE = 0.01  # until a rank meets the others
        works = [hc.all_reduce(np.ones(1 << 20), async_op=True) for _ in range(20)]
        communication_thread.LONGEST_GOODBYE = 60
        """
    run_program(program, tmp_path, 2, status=0)
