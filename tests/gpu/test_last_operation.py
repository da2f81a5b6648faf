"""The watchdog sees blocking operations that the GPU does not end, while the host is back in the program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.debug import groups_seen, watchdog
from hpccomm.nccl import last_operation

from ..arrays import strided
from ..launch import until
from . import gpus


@pytest.fixture
def dog(monkeypatch: pytest.MonkeyPatch, process_group: hc.ProcessGroup) -> None:
    """The watchdog asks the GPU, where every blocking operation is marked."""
    hc.all_reduce(gpus.array(np.ones(1)))
    monkeypatch.setattr(watchdog, "_gpu_is_busy", lambda work: not work.poll())
    monkeypatch.setattr(last_operation.LastOperation, "due", 0.0)
    backend = process_group.dispatcher.backends["cuda"]
    monkeypatch.setattr(backend.last_on_gpu, "due", 0.0)  # another test may have set it far ahead
    monkeypatch.setattr(backend.gpu_fast_path, "period", 0, raising=False)
    monkeypatch.setattr(last_operation, "PERIOD", 0.0)


def seen() -> list[tuple[str, int, int]]:
    return [(call.record.name, call.record.number, call.record.nbytes) for call in watchdog.in_flight()]


@pytest.mark.parametrize("layout", [np.asarray, strided])
def test_a_blocking_operation_is_seen_until_the_gpu_has_done_it(
    dog: None, machine: Any, process_group: hc.ProcessGroup, layout: Any
) -> None:
    array = gpus.array(np.ones(3), layout)
    before = set(groups_seen.works_in_flight())  # of other tests
    hc.all_reduce(array)
    assert seen() == []
    machine.held = True  # the GPU waits
    try:
        hc.all_reduce(array)
        number = process_group.sequence_number
        hc.broadcast(array, 0)  # behind the first
        assert seen() == [("all_reduce", number, 24)]
        (call,) = watchdog.in_flight()
        assert "test_last_operation.py:" in call.record.where
    finally:
        machine.held = False
    assert seen() == []
    assert set(groups_seen.works_in_flight()) <= before  # nor has a report it
    hc.broadcast(array, 0)
    assert seen() == []


def test_an_asynchronous_operation_is_seen_also_after_a_stream_waits_for_it(
    dog: None, machine: Any, process_group: hc.ProcessGroup
) -> None:
    array = gpus.array(np.ones(3))
    assert seen() == []
    machine.held = True
    try:
        hc.all_reduce(array, async_op=True).wait()
        assert seen() == [("all_reduce", process_group.sequence_number, 24)]
    finally:
        machine.held = False
    assert seen() == []


def test_so_is_a_message(dog: None, machine: Any, process_group: hc.ProcessGroup) -> None:
    me, n = process_group.rank, process_group.size
    array, got = gpus.array(np.full(3, float(me))), gpus.array(np.zeros(3))
    assert seen() == []
    machine.held = True
    try:
        hc.sendrecv(array, (me + 1) % n, got, (me - 1) % n)
        assert [(name, nbytes) for name, _, nbytes in seen()] == [("sendrecv", 24)]
    finally:
        machine.held = False
    until(lambda: not seen(), "end of the message")
    assert gpus.values(got)[0] == (me - 1) % n


@pytest.mark.usefixtures("dog", "machine")
def test_what_is_captured_is_not_marked(process_group: hc.ProcessGroup) -> None:
    array = gpus.array(np.ones(3))
    last: Any = process_group.dispatcher.backends["cuda"].last_on_gpu
    assert last.poll()
    with gpus.captured() as graph:
        hc.all_reduce(array)
    assert last.group is None
    graph.launch()


def test_between_two_marks_there_is_a_while(dog: None, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_operation, "PERIOD", 3600.0)
    array = gpus.array(np.ones(3))
    hc.all_reduce(array)
    machine.held = True
    hc.all_reduce(array)
    machine.held = False
    assert seen() == []


def test_the_event_of_a_group_that_is_gone_is_another_groups(machine: Any, dog: None) -> None:
    array = gpus.array(np.ones(3))
    events = set()
    for _ in range(3):
        group = hc.new_group()
        hc.all_reduce(array, group=group)
        last: Any = group.dispatcher.backends["cuda"].last_on_gpu
        events.add(last._event)
        group.destroy()
        assert last.poll()
        assert last.group is None
    assert len(events) == 1
