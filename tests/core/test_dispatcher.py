"""The dispatchers of all groups."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.core import dispatcher


def test_they_are_listed_while_another_thread_makes_a_group(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Another:
        """Of another thread's group."""

    another = Another()

    class Doors(WeakSet[Any]):
        def __iter__(self) -> Any:
            for each in super().__iter__():
                self.add(another)  # what the other thread does
                yield each

    monkeypatch.setattr(dispatcher, "_dispatchers", Doors([process_group.dispatcher]))
    assert set(dispatcher.all_dispatchers()) == {process_group.dispatcher, another}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("name", ["broadcast", "all_reduce", "isend", "irecv"])
def test_an_operation_keeps_its_number_whatever_begins_before_it_ends(name: str, is_refused: bool) -> None:
    array, me = np.zeros(40_000)[::2], hc.get_rank()  # not the fast path's
    with hc.new_group() as group:
        hc.barrier(group)
        backend, method = group.dispatcher.backends["cpu"], name.removeprefix("i")

        def others_begin(*_: Any) -> hc.Work:
            delattr(backend, method)
            hc.barrier(group)
            receive = hc.irecv(np.zeros(1), me, group)
            hc.isend(np.ones(1), me, group).wait()
            receive.wait()
            if is_refused:
                raise hc.DistBackendError("refused")
            return hc.CompletedWork()

        setattr(backend, method, others_begin)
        number = 1 + group.dispatcher.number_of(method)
        arguments = {"broadcast": (0, group, True), "all_reduce": ("sum", group, True)}.get(name, (me, group))
        if is_refused:
            with pytest.raises(hc.DistBackendError, match=f"^{name} #{number} of"):
                getattr(hc, name)(array, *arguments)
        else:
            assert getattr(hc, name)(array, *arguments).sequence_number == number
