"""Hooks see every operation once, with all that describes it; and nobody pays for them when there are none."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest

import hpccomm as hc

from ..hooks import Noted

pytestmark = pytest.mark.usefixtures("process_group")


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, operation: hc.Operation) -> None:
        self.lines.append(f"begin {operation.name}")

    def end(self, operation: hc.Operation) -> None:
        self.lines.append(f"end {operation.name} {type(operation.error).__name__}")


def test_begin_comes_before_the_transport_and_end_after_it(process_group: hc.ProcessGroup) -> None:
    log, array = Log(), np.ones(2)

    class Look(Log):
        def begin(self, operation: hc.Operation) -> None:
            assert operation.arguments["array"] is array
            assert operation.op is hc.ReduceOp.SUM
            assert (array == 1).all()

        def end(self, operation: hc.Operation) -> None:
            assert (array == process_group.size).all()

    with process_group.register_hook(log), process_group.register_hook(Look()):
        hc.all_reduce(array)
    assert log.lines == ["begin all_reduce", "end all_reduce NoneType"]
    hc.all_reduce(array)
    assert len(log.lines) == 2  # the handles are gone


def test_the_end_of_an_asynchronous_operation_is_when_it_has_ended(process_group: hc.ProcessGroup) -> None:
    log = Log()
    handle = process_group.register_hook(log)
    work = hc.all_reduce(np.ones(2), async_op=True)
    assert log.lines == ["begin all_reduce"]
    handle.remove()  # who has seen the begin sees the end
    handle.remove()
    work.wait()
    work.wait()
    assert log.lines == ["begin all_reduce", "end all_reduce NoneType"]


def test_what_describes_an_operation(process_group: hc.ProcessGroup) -> None:
    n, noted = process_group.size, Noted()
    with process_group.register_hook(noted):
        hc.reduce(np.zeros(3, np.float32), group_dst=n - 1, op="max")
        hc.all_gather([np.zeros(2) for _ in range(n)], np.zeros(2), async_op=True).wait()
        hc.irecv(np.zeros(1), group_src=0, tag=5).abort()
        hc.barrier()
        hc.broadcast_object_list([np.zeros(5)], group_src=0)
    reduce, gather, recv, barrier, objects = noted.begun
    assert (reduce.group, reduce.device, reduce.async_op) == (process_group, "cpu", False)
    assert (reduce.peer, reduce.op, reduce.nbytes) == (n - 1, hc.ReduceOp.MAX, 12)
    assert (gather.nbytes, len(gather.arrays), gather.async_op, gather.op) == (16 * (n + 1), n + 1, True, None)
    assert (recv.peer, recv.arguments["tag"]) == (0, 5)
    assert isinstance(recv.error, hc.DistError)
    assert (barrier.arrays, barrier.peer, barrier.arguments) == ([], None, {})
    assert (objects.arrays, objects.nbytes) == ([], 0)  # other ranks have none
    numbers = [each.sequence_number for each in (reduce, gather, barrier)]
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    assert recv.sequence_number == process_group.message_number  # messages are counted apart
    assert repr(barrier) == f"<Operation barrier #{numbers[-1]} of 'world'>"


def test_a_hook_can_refuse(process_group: hc.ProcessGroup) -> None:
    class Refuse(Log):
        def begin(self, operation: hc.Operation) -> None:
            raise PermissionError(operation.name)

    array = np.ones(2)
    with process_group.register_hook(Refuse()), pytest.raises(PermissionError, match="all_reduce"):
        hc.all_reduce(array)
    assert (array == 1).all()
    hc.all_reduce(array)
    assert (array == process_group.size).all()


def test_a_hook_that_destroys_its_group() -> None:
    class Destroy(Log):
        def begin(self, operation: hc.Operation) -> None:
            operation.group.destroy()

    log, group = Log(), hc.new_group()
    group.register_hook(log)
    group.register_hook(Destroy())
    with pytest.raises(hc.DistError, match="has been destroyed; make another one"):
        group.all_reduce(np.ones(2))
    assert log.lines == ["begin all_reduce", "end all_reduce DistError"]


def test_who_has_seen_the_begin_sees_the_end(process_group: hc.ProcessGroup) -> None:
    first, last = Log(), Log()

    class Broken(Log):
        def __init__(self, where: str) -> None:
            super().__init__()
            setattr(self, where, self.fail)

        def fail(self, operation: hc.Operation) -> None:
            raise RuntimeError("hook is broken")

    for where in ("begin", "end"):
        with (
            process_group.register_hook(first),
            process_group.register_hook(Broken(where)),
            process_group.register_hook(last),
            pytest.raises(RuntimeError, match="hook is broken"),
        ):
            hc.barrier()
    assert first.lines == ["begin barrier", "end barrier RuntimeError", "begin barrier", "end barrier NoneType"]
    assert last.lines == ["begin barrier", "end barrier NoneType"]


def test_a_block_is_described_by_what_it_collected(process_group: hc.ProcessGroup) -> None:
    noted = Noted()
    with process_group.register_hook(noted), hc.coalescing():
        hc.all_reduce(np.ones(4))
        hc.all_reduce(np.ones(2))
    (block,) = noted.begun
    assert (block.name, block.nbytes, len(block.arrays)) == ("coalescing", 48, 2)


def test_errors_reach_the_end(process_group: hc.ProcessGroup) -> None:
    class Failing(hc.Backend):
        def all_reduce(self, array: Any, op: Any, async_op: bool) -> hc.Work | None:
            if not async_op:
                raise ConnectionError("cable pulled")

            class Late(hc.Work):
                def poll(self) -> bool:
                    raise ConnectionError("cable pulled later")

            return Late()

        def translate_error(self, operation: str, error: Exception) -> Exception:
            return hc.DistBackendError(str(error), operation)

    hc.register_backend("failing_for_hooks", lambda store, rank, size, timeout: Failing(rank, size), devices="cpu")
    with hc.new_group(backend="failing_for_hooks") as group:
        log = Log()
        with group.register_hook(log):
            with pytest.raises(hc.DistBackendError, match=r"all_reduce #1 of '.*': cable pulled$"):
                hc.all_reduce(np.ones(1), group=group)
            with pytest.raises(ConnectionError, match="cable pulled later"):
                hc.all_reduce(np.ones(1), group=group, async_op=True).wait()
    assert log.lines == ["begin all_reduce", "end all_reduce DistBackendError",
                         "begin all_reduce", "end all_reduce ConnectionError"]  # fmt: skip


def test_what_a_hook_raises_at_the_end(process_group: hc.ProcessGroup, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Log):
        def end(self, operation: hc.Operation) -> None:
            raise RuntimeError("hook is broken")

    with process_group.register_hook(Broken()):
        with pytest.raises(RuntimeError, match="hook is broken"):
            hc.barrier()
        with caplog.at_level(logging.ERROR, logger="hpccomm"):
            assert hc.barrier(async_op=True).wait()  # may be anybody's thread
        assert "hook is broken" in caplog.text


def test_a_coalescing_block_collects_its_own_thread_only(process_group: hc.ProcessGroup) -> None:
    mine, other, group = np.ones(2), np.ones(2), hc.new_group()

    def elsewhere() -> None:
        hc.all_reduce(other, group=group)

    with hc.coalescing(group):
        hc.all_reduce(mine, group=group)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert (other == process_group.size).all()
        assert (mine == 1).all()
    assert (mine == process_group.size).all()
    hc.destroy_process_group(group)
