"""The cost of an operation: every function of CUDA and NCCL that it calls, in order. One more fails a test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.cuda import seam
from hpccomm.native import fastpath

from . import gpus

pytestmark = pytest.mark.skipif(fastpath is None, reason="without the compiled extension, operations are planned")
LOOK_UPS = ["current_stream", "current_device"]
FOLLOW = ["record", "wait"]  # a stream waits for another
OF_NCCL = ["group_start", "group_end", "all_reduce", "broadcast", "reduce"]
Calls = list[str]


@pytest.fixture
def array(process_group: hc.ProcessGroup, machine: Any) -> Any:
    """An array on which operations have been done, by which everything has been made; none is in flight."""
    made = gpus.array(np.ones(3))
    first = hc.all_reduce(made, async_op=True)
    machine.held = True  # so that there are two events, because two are in flight at once
    second = hc.all_reduce(made, async_op=True)
    machine.held = False
    assert first.is_completed()
    assert second.is_completed()
    for _ in range(2):
        hc.all_reduce(made)
    process_group.dispatcher.reap()
    return made


@pytest.fixture
def calls(array: Any, machine: Any, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The functions of CUDA and NCCL that this thread calls."""
    noted: Calls = []
    mine = threading.get_ident()

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if threading.get_ident() == mine:
                noted.append(name)
            return function(*arguments)

        return call

    class Noting(list[str]):
        def append(self, name: str) -> None:
            super().append(name)
            if threading.get_ident() == mine and name in OF_NCCL:
                noted.append(name)

    monkeypatch.setattr(machine, "calls", Noting())
    runtime: Any = seam.runtime()
    for name, function in vars(seam.Runtime).items():
        if callable(function) and not name.startswith("_"):
            monkeypatch.setattr(runtime, name, noting(name, getattr(runtime, name)), raising=False)
    return noted


def taken(calls: Calls) -> Calls:
    """Return the calls since the last time."""
    found = calls.copy()
    calls.clear()
    return found


def test_a_blocking_operation_is_its_call_of_nccl_and_two_look_ups(array: Any, calls: Calls) -> None:
    operations = {
        "all_reduce": lambda: hc.all_reduce(array),
        "broadcast": lambda: hc.broadcast(array, 0),
        "reduce": lambda: hc.reduce(array, 0),
    }
    for name, operation in operations.items():
        for _ in range(2):
            operation()
            assert taken(calls) == [*LOOK_UPS, name]


def test_on_a_stream_of_the_programs_the_first_follows_the_default_stream(array: Any, calls: Calls) -> None:
    with gpus.another_stream():
        taken(calls)
        hc.all_reduce(array)
        assert taken(calls) == [*LOOK_UPS, "is_capturing", *FOLLOW, "all_reduce"]
        for _ in range(2):
            hc.all_reduce(array)
            assert taken(calls) == [*LOOK_UPS, "all_reduce"]
        gpus.values(array)


def test_an_asynchronous_operation_follows_the_current_stream_and_marks_its_end(array: Any, calls: Calls) -> None:
    work = hc.all_reduce(array, async_op=True)
    assert taken(calls) == [*LOOK_UPS, "is_capturing", *FOLLOW, "all_reduce", "record"]
    work.wait()
    assert taken(calls) == [*LOOK_UPS, "wait"]


def test_a_blocking_operation_after_an_asynchronous_one_follows_it_once(array: Any, calls: Calls) -> None:
    work = hc.all_reduce(array, async_op=True)
    taken(calls)
    hc.all_reduce(array)
    assert taken(calls) == [*LOOK_UPS, "wait", "all_reduce"]
    for _ in range(2):
        hc.all_reduce(array)
        assert taken(calls) == [*LOOK_UPS, "all_reduce"]
    work.wait()


def test_a_stream_that_waits_for_an_asynchronous_operation_has_followed_it(array: Any, calls: Calls) -> None:
    hc.all_reduce(array, async_op=True).wait()
    taken(calls)
    hc.all_reduce(array)
    assert taken(calls) == [*LOOK_UPS, "all_reduce"]


def test_asynchronous_operations_one_after_the_other_follow_the_current_stream_only(array: Any, calls: Calls) -> None:
    first = hc.all_reduce(array, async_op=True)
    taken(calls)
    second = hc.all_reduce(array, async_op=True)
    # and whether the first has passed, so that it is let go of
    assert taken(calls) == [*LOOK_UPS, "is_capturing", *FOLLOW, "all_reduce", "record", "is_done"]
    first.wait()
    second.wait()


def test_ten_coalesced_arrays_are_one_group(array: Any, calls: Calls) -> None:
    arrays = [gpus.array(np.ones(3)) for _ in range(10)]
    taken(calls)
    hc.all_reduce_coalesced(arrays)
    assert taken(calls) == [*LOOK_UPS, "group_start", *["all_reduce"] * 10, "group_end"]


@contextlib.contextmanager
def below() -> Iterator[Calls]:
    if not gpus.IS_BINDINGS:
        pytest.skip("counted below CuPy's bindings, in the run with GPU_TESTS_ON=bindings")
    from .bindings.counting import counted

    with counted() as calls:
        yield calls


def test_below_the_seam_there_is_no_more(array: Any) -> None:
    with below() as calls:  # the current stream is CuPy's own, which needs no call of CUDA
        hc.all_reduce(array)
        assert taken(calls) == ["getDevice", "ncclAllReduce"]
        work = hc.all_reduce(array, async_op=True)
        follow = ["eventRecord", "streamWaitEvent"]
        assert taken(calls) == ["getDevice", "streamIsCapturing", *follow, "ncclAllReduce", "eventRecord"]
        work.wait()
        assert taken(calls) == ["getDevice", "streamWaitEvent"]
        hc.all_reduce(array)
        assert taken(calls) == ["getDevice", "ncclAllReduce"]
        hc.all_reduce_coalesced([array] * 1)
        assert taken(calls) == ["getDevice", "ncclAllReduce"]
