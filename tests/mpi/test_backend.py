from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.core.operation_list import OPERATIONS
from hpccomm.job.failures import AGREE, COMPARE, backend_error
from hpccomm.mpi import works
from hpccomm.native import fastpath

from ..calls import CALLS, On

pytestmark = pytest.mark.usefixtures("process_group")


class Memory(bytearray):
    """Memory of an array that can be referenced weakly: it lives as long as any view of it."""


Layout = Callable[[Any], Any]


def begun(name: str, group: hc.ProcessGroup, layout: Layout) -> hc.Work:
    """Begin the call of that name; nothing here keeps its arrays."""
    if name in ("send", "recv"):
        return (hc.isend if name == "send" else hc.irecv)(layout(np.zeros(4)), group.rank, tag=1)
    shape = (3 << 20,) if "segments" in name else (4,)
    made = CALLS[name.partition(" ")[0]](On(group, shape=shape, layout=layout))
    work = getattr(hc, name.partition(" ")[0])(*made.arguments, **made.options, async_op=True)
    assert isinstance(work, hc.Work)
    return work


@pytest.mark.parametrize("name", [*CALLS, "all_reduce in segments", "send", "recv"])
def test_whatever_mpi_works_on_lives_until_the_work_is_done(process_group: hc.ProcessGroup, name: str) -> None:
    memory: list[weakref.ref[Any]] = []

    def layout(values: Any) -> Any:
        block = Memory(values.tobytes())
        memory.append(weakref.ref(block))
        return np.frombuffer(block, values.dtype).reshape(values.shape)

    work = begun(name, process_group, layout)
    gc.collect()
    roles = OPERATIONS[name.partition(" ")[0]].roles
    packed = any(role.is_array and role.form != "one" for role in roles)  # lists are packed: MPI sees the copy
    alive = [reference() is not None for reference in memory]
    assert all(alive) or packed, alive
    if name == "send":
        hc.irecv(np.empty(4), process_group.rank, tag=1).wait()
    if name == "recv":
        hc.isend(np.ones(4), process_group.rank, tag=1).wait()
    work.wait()
    assert work.alive is None
    del work
    gc.collect()
    assert [reference() for reference in memory] == [None] * len(memory)


def test_packed_copies_live_until_the_work_is_done(process_group: hc.ProcessGroup) -> None:
    # Freed too early, the memory of the packed and premultiplied inputs would be reused by the next ones.
    n = process_group.size
    double = hc.ReduceOp.PREMUL_SUM(2)
    outputs = np.zeros((50, 3))
    works = []
    for i, output in enumerate(outputs):
        strided = np.full((n, 6), float(i))[:, ::2]
        works.append(hc.reduce_scatter(output, list(strided), double, async_op=True))
    rooted = [np.full(6, float(i))[::2] for i in range(50)]
    works += [hc.reduce(array, 0, double, async_op=True) for array in rooted]
    for work in works:
        work.wait()
    expected = 2.0 * n * np.arange(50.0)
    assert np.array_equal(outputs, expected.repeat(3).reshape(-1, 3))
    if process_group.rank == 0:
        assert np.array_equal(np.stack(rooted), outputs)


@pytest.mark.skipif(MPI.COMM_WORLD.Get_size() < 2, reason="Open MPI truncates messages to oneself without an error")
@pytest.mark.parametrize("is_compiled", [False, *[True] * (fastpath is not None)])
def test_a_thread_waits_for_all_requests_also_after_an_error(
    process_group: hc.ProcessGroup, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hc.all_reduce(np.ones(1))  # sets up the compiled extension
    monkeypatch.setattr(works, "MAIN", None)
    if not is_compiled:
        monkeypatch.setattr(works, "fastpath", None)
    comm, outputs = process_group.comm, [np.zeros(1), np.zeros(2)]
    requests = [comm.Irecv(output, (process_group.rank - 1) % process_group.size) for output in outputs]
    # the first message is too long
    sent = [comm.Isend(np.full(2, i), (process_group.rank + 1) % process_group.size) for i in (1.0, 2.0)]
    with pytest.raises(MPI.Exception) as caught:
        works.wait_for(requests, [MPI.Status() for _ in requests])
    assert caught.value.Get_error_class() == MPI.ERR_TRUNCATE
    assert (outputs[1] == 2).all()
    MPI.Request.Waitall(sent)


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (MPI.ERR_IN_STATUS, "See the MPI_ERROR field", f"an error of one of several messages; {AGREE}"),
        (MPI.ERR_OTHER, "message sizes do not match across pro", f"message sizes do not match across pro; {AGREE}"),
        (MPI.ERR_OTHER, f"{'x' * (MPI.MAX_ERROR_STRING - 9)}(9)..: \nth", f"{'x' * (MPI.MAX_ERROR_STRING - 9)}(9) ..."),
        (MPI.ERR_OTHER, "MPI_Win_allocate_shared_c() failed", f"or the ranks call different operations: {COMPARE}"),
    ],
)
def test_an_error_of_mpi_ends_with_a_hint(code: int, text: str, said: str) -> None:
    class Failed(MPI.Exception):
        def Get_error_string(self) -> str:
            return text

    assert str(backend_error("gather", Failed(code))).partition(" (rank")[0].endswith(said)
