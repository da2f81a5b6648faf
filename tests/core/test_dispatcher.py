"""The dispatchers of all groups."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.core import dispatcher


def test_the_dispatchers_of_all_groups_are_listed_while_they_live(process_group: hc.ProcessGroup) -> None:
    with hc.ProcessGroup.from_comm(MPI.COMM_SELF) as group:
        listed = dispatcher.all_dispatchers()
        assert process_group.dispatcher in listed
        assert group.dispatcher in listed
    known = weakref.ref(group.dispatcher)
    del group, listed
    gc.collect()
    assert known() is None
    assert process_group.dispatcher in dispatcher.all_dispatchers()


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
