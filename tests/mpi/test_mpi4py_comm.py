"""hpccomm.mpi4py on host arrays: mpi4py's own calls, and with accelerate=True hpccomm's large reductions."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from hpccomm import mpi4py as hm
from hpccomm.mpi4py.calls import SMALLEST, is_accelerated

from ..arrays import assert_same

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
LARGE = SMALLEST // 8


@pytest.fixture(params=[False, True], ids=["plain", "accelerated"])
def comm(request: pytest.FixtureRequest) -> Iterator[Any]:
    comm = hm.Comm(MPI.COMM_WORLD.Dup(), accelerate=request.param)
    yield comm
    comm.Free()


def given(rank: int, count: int, dtype: Any = float) -> Any:
    return (np.arange(count) % 5 + rank).astype(dtype)


def summed(count: int, dtype: Any = float, ranks: int = SIZE) -> Any:
    return np.sum([given(rank, count, dtype) for rank in range(ranks)], axis=0, dtype=dtype)


def test_it_is_a_communicator(comm: Any) -> None:
    assert isinstance(comm, hm.Comm)
    assert isinstance(comm, MPI.Intracomm)
    assert comm == MPI.Intracomm(comm)
    assert MPI._handleof(comm) == comm.handle
    assert MPI.Comm.f2py(comm.py2f()) == comm
    assert (comm.rank, comm.size, comm.is_intra) == (RANK, SIZE, True)
    assert (comm.process_group.rank, comm.process_group.size) == (RANK, SIZE)
    assert comm.group.size == SIZE
    assert comm.allreduce(RANK) == sum(range(SIZE))
    assert comm.bcast({"a": RANK}, root=SIZE - 1) == {"a": SIZE - 1}
    with pytest.raises(AttributeError, match="object has no attribute 'nothing'"):
        _ = comm.nothing


class OnADevice:
    """A message that CUDA knows, as far as mpi4py is told; its memory may be anywhere."""

    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = {**array.__array_interface__, "version": 3}


def test_what_numpy_can_see_is_accelerated() -> None:
    array = np.ones(LARGE)
    for message in (array, memoryview(array), [array, MPI.DOUBLE], [array, LARGE]):
        assert is_accelerated("Allreduce", message, message)
    for message in (OnADevice(array), [array, LARGE - 1], [array, "d", "too", "many", "items"], object()):
        assert not is_accelerated("Allreduce", message, message)


LAYOUTS = {
    "C": lambda values: values.copy(),
    "Fortran": np.asfortranarray,
    "columns": lambda values: np.repeat(values, 2, axis=1)[:, ::2],
    "rows of a Fortran array": lambda values: np.asfortranarray(np.repeat(values, 2, axis=0))[::2],
}


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("of", LAYOUTS)
def test_buffers_match_by_address_if_both_have_no_gaps_and_otherwise_by_index(of: str, to: str) -> None:
    values = given(RANK, 2 * LARGE).reshape(2, LARGE)
    sent, output = LAYOUTS[of](values), LAYOUTS[to](np.zeros((2, LARGE)))
    expected = summed(2 * LARGE).reshape(2, LARGE)
    comm = hm.Comm(MPI.COMM_WORLD.Dup(), accelerate=True)
    comm.Allreduce(sent, output)
    comm.Free()
    if {of, to} == {"C", "Fortran"}:  # as in MPI
        assert_same(output.ravel(order="K"), expected.ravel(order="K" if of == "C" else "F"))
    else:
        assert_same(np.ascontiguousarray(output), expected)


@pytest.mark.parametrize("writeable", [True, False])
@pytest.mark.parametrize("count", [3, LARGE])
def test_reductions(comm: Any, count: int, writeable: bool) -> None:
    sent = given(RANK, count)
    sent.flags.writeable = writeable
    begun, output = comm.process_group.sequence_number, np.zeros(count)
    comm.Allreduce(sent, output)
    assert_same(output, summed(count))
    comm.Allreduce(MPI.IN_PLACE, output, op=MPI.MAX)
    assert_same(output, summed(count))
    comm.Reduce([sent, MPI.DOUBLE], output if RANK == SIZE - 1 else None, root=SIZE - 1)
    assert_same(output, summed(count))
    output[...] = given(RANK, count)
    comm.Reduce(*((None, output) if RANK == 0 else (output, None)))  # which mpi4py takes for MPI.IN_PLACE
    assert_same(output, summed(count) if RANK == 0 else given(RANK, count))
    comm.Scan(sent, output)
    assert_same(output, summed(count, ranks=RANK + 1))
    comm.Exscan(sent, output)
    assert_same(output, summed(count, ranks=RANK) if RANK else summed(count, ranks=1))  # rank 0's stays as it was
    everybody = np.concatenate([given(RANK, count)] * SIZE)
    everybody.flags.writeable = writeable
    comm.Reduce_scatter_block(everybody, output)
    assert_same(output, summed(count))
    assert_same(sent, given(RANK, count))
    done = comm.process_group.sequence_number - begun
    assert done == (7 if comm.accelerates and count == LARGE else 0)


def test_what_mpi_has_not(comm: Any) -> None:
    if not comm.accelerates:
        pytest.skip("as mpi4py's own")
    half = np.zeros(3, np.float16)
    comm.Allreduce(given(RANK, 3, np.float16), half)
    assert_same(half, summed(3, np.float16))
    spread = np.zeros(2 * LARGE)[::2]
    comm.Allreduce(given(RANK, LARGE), spread)
    assert_same(spread, summed(LARGE))


def test_a_masked_array_on_one_rank_is_its_memory_as_in_mpi4py(comm: Any) -> None:
    sent: Any = given(RANK, LARGE)
    output = np.zeros(LARGE)
    comm.Allreduce(np.ma.masked_equal(sent, 0) if RANK == 0 else sent, output)
    assert_same(output, summed(LARGE))


def test_what_stays_with_mpi(comm: Any) -> None:
    begun = comm.process_group.sequence_number
    own = MPI.Op.Create(lambda a, b, _: np.frombuffer(b, float).__iadd__(np.frombuffer(a, float)), commute=True)
    output = np.zeros(LARGE)
    comm.Allreduce(given(RANK, LARGE), output, own)
    assert_same(output, summed(LARGE))
    own.Free()
    comm.Bcast(output)
    rows = MPI.DOUBLE.Create_contiguous(LARGE // 2).Commit()
    comm.Bcast([output, 2, rows])  # which other ranks may receive as what it is made of
    rows.Free()
    comm.Allreduce(bytearray(b"\1" * SMALLEST), bytearray(SMALLEST), MPI.LOR)
    assert comm.process_group.sequence_number == begun
    with pytest.raises(Exception, match="mismatch in send count"):
        comm.Allreduce(np.zeros(2), np.zeros(3))


def test_what_is_made_of_it(comm: Any) -> None:
    made = [comm.Dup(), comm.Split(0, -RANK), comm.Create_cart([SIZE]), comm.Create(comm.Get_group())]
    for each in made:
        assert isinstance(each, hm.Comm)
        assert each.accelerates == comm.accelerates
        output = np.zeros(LARGE)
        each.Allreduce(given(RANK, LARGE), output)
        assert_same(output, summed(LARGE))
        group = each.process_group
        each.Free()
        assert group.is_destroyed
    assert isinstance(made[2], MPI.Cartcomm)
    none = comm.Split(MPI.UNDEFINED)
    assert none == MPI.COMM_NULL
    other, request = comm.Idup()
    request.Wait()
    with pytest.raises(Exception, match=r"process_group: mpi4py made this communicator \(Idup\)"):
        _ = other.process_group
    for make in (other.Dup, lambda: other.Split(0)):  # as mpi4py's
        again = make()
        assert again.allreduce(1) == SIZE
        again.Free()
    again = hm.Comm(other)
    again.Free()


def test_requests_are_as_before(comm: Any) -> None:
    requests = [comm.Irecv(np.zeros(1), (RANK - 1) % SIZE), comm.Isend(np.ones(1), (RANK + 1) % SIZE)]
    assert all(isinstance(each, MPI.Request) for each in requests)
    assert type(requests[0]) == MPI.Request  # noqa: E721  # as programs ask
    assert issubclass(MPI.Prequest, MPI.Request)
    assert MPI.Request.Waitall(requests)
    assert all(each == MPI.REQUEST_NULL for each in requests)
    assert MPI.Request.Waitany(requests) == MPI.UNDEFINED
    assert MPI.Request.Testall(requests)
    request = comm.Send_init(np.ones(1), MPI.PROC_NULL)
    assert isinstance(request, MPI.Prequest)
    MPI.Prequest.Startall([request])
    request.Wait()
    request.Free()
    assert pickle.loads(pickle.dumps(MPI.COMM_WORLD)) == MPI.COMM_WORLD


def test_what_is_no_communicator() -> None:
    with pytest.raises(TypeError, match=r"expected an MPI\.Intracomm or a ProcessGroup"):
        hm.Comm(3)  # type: ignore[arg-type]


def test_mpi4pys_methods_take_any_request(comm: Any) -> None:
    world, array, into = MPI.COMM_WORLD, np.ones(2), np.zeros(2)
    requests = [world.Isend(array, (RANK + 1) % SIZE), world.Irecv(into, (RANK - 1) % SIZE)]
    assert list(map(MPI.Request.Wait, requests)) == [True, True]
    assert MPI.Request.wait(world.Ibarrier()) is None
    assert MPI.Request.Test(MPI.REQUEST_NULL)
    request = world.Send_init(array, (RANK + 1) % SIZE)
    MPI.Prequest.Start(request)
    world.Recv(into, (RANK - 1) % SIZE)
    MPI.Prequest.Wait(request)
    MPI.Prequest.Free(request)
    assert request == MPI.REQUEST_NULL


def test_a_programs_subclass_of_a_request_is_another_class(comm: Any) -> None:
    class Own(MPI.Request):
        pass

    request = MPI.COMM_WORLD.Ibarrier()
    assert isinstance(request, MPI.Request)
    assert not isinstance(request, Own)
    assert Own != MPI.Request
    assert not issubclass(MPI.Request, Own)
    request.Wait()


def test_disconnect_ends_the_group(comm: Any) -> None:
    made = comm.Dup()
    group = made.process_group
    made.Disconnect()
    assert made == MPI.COMM_NULL
    assert group.is_destroyed


def test_bytes_behind_the_last_element_are_left_out(comm: Any) -> None:
    memory = bytearray(8 * LARGE + 4 if RANK == 0 else 8 * LARGE)
    np.frombuffer(memory, float, LARGE)[:] = given(RANK, LARGE)
    result = np.zeros(LARGE)
    comm.Allreduce([memory, LARGE, MPI.DOUBLE], result)
    assert_same(result, summed(LARGE))
