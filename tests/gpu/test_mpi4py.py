"""hpccomm.mpi4py: mpi4py's calls on GPU arrays give the results of mpi4py on the same arrays of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm import mpi4py as hm
from hpccomm.errors import UnsupportedOperationError

from ..arrays import assert_same, fortran, strided
from . import gpus

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
NEXT, BEFORE = (RANK + 1) % SIZE, (RANK - 1) % SIZE
HERE, EVERYBODY = np.arange(1.0, 5.0) * (RANK + 1), np.arange(4.0 * SIZE) + 100 * RANK


@pytest.fixture(scope="module", params=["nccl", "mpi"])
def comm(request: pytest.FixtureRequest) -> Iterator[Any]:
    comm = hm.Comm(MPI.COMM_WORLD.Dup(), config=f"cpu:mpi,cuda:{request.param}")
    comm.Bcast(gpus.array(np.zeros(1)))  # which connects
    yield comm
    comm.Free()


Make = Callable[..., Any]
COUNTS = [rank + 1 for rank in range(SIZE)]
PLACES = [sum(COUNTS[:rank]) + rank for rank in range(SIZE)]  # with a gap behind each
ROWS, IN_PLACE = np.arange(1.0 * sum(COUNTS)) * (RANK + 1), MPI.IN_PLACE


class Form(NamedTuple):
    """A form of some calls."""

    calls: str
    how: str
    output: Any  # as it is before the call
    arguments: Callable[[Make, Any], list[Any]]  # with the output, and arrays that are made for the call
    defined: slice = slice(None)  # the part of the output that the call defines

    def call(self, function: Callable[..., Any], make: Make) -> tuple[Any, Any]:
        """Call a function; return its result, and the output."""
        output = make(self.output, fortran) if "memory's order" in self.how else make(self.output)
        arguments = self.arguments(make, output)
        if "None" in self.how:
            arguments = [None if each is IN_PLACE else each for each in arguments]
        return function(*arguments), output[self.defined]

    def expected(self, name: str) -> Any:
        """Return the output of mpi4py's own call on the host's arrays."""
        return self.call(getattr(MPI.COMM_WORLD, name), lambda values, layout=np.array: layout(values))[1]


FORMS = [
    Form("Bcast", "", HERE, lambda make, out: [out, SIZE - 1]),
    Form("Bcast", "as bytes", HERE, lambda make, out: [[out, 16, MPI.BYTE], 0]),
    Form("Bcast", "in memory's order", HERE.reshape(2, 2), lambda make, out: [out]),
    Form("Allreduce Scan Exscan", "", np.zeros(4), lambda make, out: [make(HERE), out]),
    Form("Allreduce Scan", "in place", HERE, lambda make, out: [IN_PLACE, out, MPI.MAX]),
    Form("Allreduce Scan Exscan", "of a part", np.zeros(9),
         lambda make, out: [[make(HERE), 2], [out, (2, 3), MPI.DOUBLE], MPI.PROD]),
    Form("Reduce", "", np.zeros(4),
         lambda make, out: [make(HERE), out if RANK == SIZE - 1 else None, MPI.SUM, SIZE - 1]),
    Form("Reduce", "in place", HERE, lambda make, out: [out, None] if RANK else [IN_PLACE, out]),
    Form("Allgatherv", "unequally", np.zeros(sum(COUNTS) + SIZE),
         lambda make, out: [make(EVERYBODY[: RANK + 1]), [out, (COUNTS, PLACES), MPI.DOUBLE]]),
    Form("Allgather Allgatherv", "", np.zeros((SIZE, 4)), lambda make, out: [make(HERE), out]),
    Form("Allgather Allgatherv", "in place", EVERYBODY, lambda make, out: [IN_PLACE, out]),
    Form("Allgather", "counts", np.zeros(3 * SIZE), lambda make, out: [[make(HERE), 2], [out, 2, MPI.DOUBLE]]),
    Form("Allgatherv", "unequally without gaps", np.zeros(sum(COUNTS)),
         lambda make, out: [make(EVERYBODY[: RANK + 1]), [out, COUNTS]]),
    Form("Gather", "", np.zeros(4 * SIZE), lambda make, out: [make(HERE), None if RANK else out]),
    Form("Gather Gatherv", "in place", EVERYBODY,
         lambda make, out: [*((IN_PLACE, out) if RANK == SIZE - 1 else (make(HERE), None)), SIZE - 1]),
    Form("Gatherv", "unequally", np.zeros(sum(COUNTS)),
         lambda make, out: [make(EVERYBODY[: RANK + 1]), None if RANK else [out, COUNTS]]),
    Form("Scatter", "", np.zeros(4), lambda make, out: [None if RANK else make(EVERYBODY), out]),
    Form("Scatter Scatterv", "in place", np.zeros(4) if RANK else EVERYBODY,
         lambda make, out: [None, out] if RANK else [out, IN_PLACE]),
    Form("Scatterv", "unequally", np.zeros(RANK + 1),
         lambda make, out: [None if RANK else [make(np.arange(20.0)), COUNTS, PLACES, MPI.DOUBLE], out]),
    Form("Alltoall", "", np.zeros(4 * SIZE), lambda make, out: [make(EVERYBODY), out]),
    Form("Alltoall Alltoallv", "in place", EVERYBODY, lambda make, out: [IN_PLACE, out]),
    Form("Alltoallv", "unequally", np.zeros(SIZE * (RANK + 1)),
         lambda make, out: [[make(EVERYBODY), COUNTS, [2 * rank for rank in range(SIZE)], MPI.DOUBLE],
                            [out, [RANK + 1] * SIZE]]),
    Form("Reduce_scatter_block", "", np.zeros(4), lambda make, out: [make(EVERYBODY), out]),
    Form("Reduce_scatter_block", "in place", EVERYBODY, lambda make, out: [IN_PLACE, out], slice(4)),
    Form("Reduce_scatter", "unequally", np.zeros(RANK + 1), lambda make, out: [make(ROWS), out, COUNTS]),
    Form("Reduce_scatter", "of unknown counts", np.zeros(RANK + 1), lambda make, out: [make(ROWS), out]),
]  # fmt: skip
FORMS += [form._replace(how="by None") for form in FORMS if form.how == "in place"]
EVERY = [(name, form) for form in FORMS for name in form.calls.split()]


@pytest.mark.parametrize(("name", "form"), EVERY, ids=[f"{name}-{form.how}" for name, form in EVERY])
def test_collectives(comm: Any, name: str, form: Form) -> None:
    right, not_blocking = form.expected(name), getattr(comm, f"I{name.lower()}")
    _, output = form.call(getattr(comm, name), gpus.array)
    assert_same(gpus.values(output), right)
    request, output = form.call(not_blocking, gpus.array)
    assert type(request) is MPI.Request
    request.Wait()
    assert request == MPI.REQUEST_NULL
    assert_same(gpus.values(output), right)
    other = comm.Ibarrier()
    request, output = form.call(not_blocking, gpus.array)
    MPI.Request.Waitall([request, other])  # which waits in C
    assert_same(gpus.values(output), right)


FIRST = dict(reversed([each for each in EVERY if each[1].how not in ("in place", "by None")]))  # can be started again


@pytest.mark.parametrize("name", [name for name in FIRST if hasattr(MPI.Comm, f"{name}_init")])
def test_persistent_collectives(comm: Any, name: str) -> None:
    request, output = FIRST[name].call(getattr(comm, f"{name}_init"), gpus.array)
    assert type(request) is MPI.Prequest
    for _ in range(3):
        request.Start()
        request.Wait()
    MPI.Prequest.Startall([request])
    MPI.Request.Waitall([request])
    assert_same(gpus.values(output), FIRST[name].expected(name))
    request.Free()


def test_persistent_requests_are_of_the_class_prequest(comm: Any) -> None:
    output, other = np.zeros(1), gpus.array(np.zeros(1))
    made = [comm.Recv_init(output, BEFORE), comm.Ssend_init(np.array([RANK + 1.0]), NEXT), comm.Bcast_init(other)]
    made += [type(each).fromhandle(each.handle) for each in made[:2]]
    assert all(type(each) is MPI.Prequest for each in made)
    MPI.Prequest.Startall(made[:3])
    MPI.Request.Waitall(made[:3])
    assert output.tolist() == [BEFORE + 1]
    for each in made[:3]:
        each.Free()


def farther(a: Any, b: Any) -> Any:
    return np.where(np.abs(a) < np.abs(b), b, a)


REDUCED_ON_THE_HOST: dict[str, tuple[Any, Any, Any]] = {  # rank 0's array, the op, and NumPy's function for two arrays
    "a product of complex numbers": (np.array([3 + 1j, -2, 5j]), MPI.PROD, np.multiply),
    "bits": (np.array([3, -2, 5], np.int32), MPI.BAND, np.bitwise_and),
    "short integers": (np.array([3, -2, 5], np.int16), MPI.SUM, np.add),
    "an op of the program's own": (np.array([3.0, -2.0, 5.0]), farther, farther),
}


@pytest.mark.parametrize("case", REDUCED_ON_THE_HOST)
def test_reductions_that_nccl_lacks(comm: Any, case: str) -> None:
    array, op, function = REDUCED_ON_THE_HOST[case]
    if op is farther:
        op = MPI.Op.Create(lambda a, b, _: np.copyto(np.frombuffer(b), farther(*map(np.frombuffer, (a, b)))), True)
    each = [(array * (rank + 1)).astype(array.dtype) for rank in range(SIZE)]
    right = each[0]
    for other in each[1:]:
        right = function(right, other)
    output = gpus.array(np.zeros_like(array))
    comm.Allreduce(gpus.array(each[RANK]), output, op)
    assert_same(gpus.values(output), right)
    output = gpus.array(each[RANK])
    comm.Iallreduce(None, output, op).Wait()
    assert_same(gpus.values(output), right)
    output = gpus.array(np.zeros_like(array))
    request = comm.Allreduce_init(gpus.array(each[RANK]), output, op)
    for _ in range(2):
        request.Start()
        request.Wait()
    assert_same(gpus.values(output), right)
    output = gpus.array(each[RANK])
    comm.Reduce(*((output, None) if RANK else (None, output)), op)
    assert_same(gpus.values(output), each[RANK] if RANK else right)
    output = gpus.array(np.zeros_like(array))
    comm.Reduce_scatter_block(gpus.array(np.tile(each[RANK], SIZE)), output, op)
    assert_same(gpus.values(output), right)
    if not op.is_predefined:
        op.Free()


def test_minloc(comm: Any) -> None:
    pairs = np.array([[RANK + 1, RANK], [SIZE - RANK, RANK]], np.int32)
    output = gpus.array(np.zeros((2, 2), np.int32))
    comm.Allreduce([gpus.array(pairs), MPI.TWOINT], [output, MPI.TWOINT], MPI.MINLOC)
    assert_same(gpus.values(output), np.array([[1, 0], [1, SIZE - 1]], np.int32))
    output = gpus.array(pairs)
    comm.Scan(MPI.IN_PLACE, [output, 2, MPI.TWOINT], op=MPI.MAXLOC)
    assert_same(gpus.values(output), np.array([[RANK + 1, RANK], [SIZE, 0]], np.int32))
    with pytest.raises(UnsupportedOperationError, match=r"Iallreduce: .* in the blocking form only; call Allreduce"):
        comm.Iallreduce([gpus.array(pairs), MPI.TWOINT], [output, MPI.TWOINT], MPI.MINLOC)


def test_the_plain_call_does_not_go_by_the_host(comm: Any) -> None:
    if comm.process_group.config.device_map["cuda"] == "nccl":
        with pytest.raises(
            UnsupportedOperationError, match=r"all_reduce: NCCL has no ReduceOp\.PRODUCT for complex128"
        ):
            comm.process_group.all_reduce(gpus.array(np.ones(2, complex)), "product")
        with pytest.raises(UnsupportedOperationError, match="scan: NCCL does not have it; MPI has"):
            comm.process_group.scan(gpus.array(np.ones(2)))
    with pytest.raises(TypeError, match=r"all_reduce: ReduceOp\.MAX is not defined for array's dtype complex128"):
        comm.Allreduce(None, gpus.array(np.ones(2, complex)), MPI.MAX)  # on every rank


@pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to send to")
def test_messages(comm: Any) -> None:
    status, output = MPI.Status(), gpus.array(np.zeros(4))
    if RANK == 0:
        comm.Send(gpus.array(HERE), 1)
        comm.Send([gpus.array(EVERYBODY), (2, 1), MPI.DOUBLE], dest=1)
    elif RANK == 1:
        comm.Recv(output, 0, status=status)
        assert (status.source, status.tag, status.Get_count(MPI.DOUBLE)) == (0, 0, 4)
        assert_same(gpus.values(output), np.arange(1.0, 5.0))
        comm.Recv([output, 2], source=0)
        assert_same(gpus.values(output), np.array([1.0, 2.0, 3.0, 4.0]))
    comm.Sendrecv(gpus.array(HERE), NEXT, 0, output, BEFORE, status=status)
    assert status.source == BEFORE
    assert_same(gpus.values(output), np.arange(1.0, 5.0) * (BEFORE + 1))
    array = gpus.array(HERE, strided)
    comm.Sendrecv_replace(array, NEXT, source=BEFORE)
    assert_same(gpus.values(array), np.arange(1.0, 5.0) * (BEFORE + 1))


@pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to send to")
@pytest.mark.parametrize("waits", ["Wait", "waitall", "MPI.Waitall", "Test", "persistent"])
def test_messages_in_flight(comm: Any, waits: str) -> None:
    output, host = gpus.array(np.zeros(4)), np.zeros(1)
    if waits == "persistent":
        requests = [comm.Recv_init(output, BEFORE), comm.Send_init(gpus.array(HERE), NEXT)]
        MPI.Prequest.Startall(requests)
    else:
        requests = [comm.Irecv(output, BEFORE), comm.Isend(gpus.array(HERE), NEXT)]
    requests += [comm.Irecv(host, BEFORE), comm.Isend(np.array([RANK + 1.0]), NEXT)]
    if waits == "MPI.Waitall":
        statuses = [MPI.Status() for _ in requests]
        MPI.Request.Waitall(requests, statuses)
        assert [each.source for each in statuses[::2]] == [BEFORE, BEFORE]
        assert statuses[0].Get_count(MPI.DOUBLE) == 4
    elif waits == "waitall":
        MPI.Request.waitall(requests)
    elif waits == "Test":
        while not all(each.Test() for each in requests):
            pass
    else:
        for each in requests:
            each.Wait()
    assert_same(gpus.values(output), np.arange(1.0, 5.0) * (BEFORE + 1))
    assert host.tolist() == [BEFORE + 1.0]


def test_nobody(comm: Any) -> None:
    array, status = gpus.array(HERE), MPI.Status()
    comm.Send(array, MPI.PROC_NULL)
    comm.Recv(array, MPI.PROC_NULL, status=status)
    assert (status.source, status.Get_count(MPI.BYTE)) == (MPI.PROC_NULL, 0)
    comm.Isend(array, MPI.PROC_NULL).Wait()
    comm.Sendrecv(array, MPI.PROC_NULL, 0, array, MPI.PROC_NULL)
    assert_same(gpus.values(array), HERE)


def test_what_is_not_done_is_said(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCCOMM_CUDA_AWARE", "0")
    array = gpus.array(HERE)
    with pytest.raises(UnsupportedOperationError, match=r"Ssend: this call goes to MPI, .* use Send, or Isend"):
        comm.Ssend(array, NEXT)
    with pytest.raises(TypeError, match=r"Bcast: buf has the datatype .*, and only MPI's own have a dtype"):
        comm.Bcast([array, 1, MPI.DOUBLE.Create_contiguous(2)])
    with pytest.raises(ValueError, match=r"Allreduce: sendbuf has 4 float64 on \w+, and recvbuf 3 float64"):
        comm.Allreduce(array, gpus.array(np.zeros(3)))
    with pytest.raises(ValueError, match=r"Allgatherv: recvbuf has 4 elements, and not 5 from 0 on"):
        comm.Allgatherv(array, [array, [5] * SIZE])
    with pytest.raises(ValueError, match=r"Send: buf is not contiguous"):
        comm.Send([gpus.array(HERE, strided), 2], NEXT)
    request = comm.Allreduce_init(MPI.IN_PLACE, array) if hasattr(MPI.Comm, "Allreduce_init") else None
    if request is not None:
        request.Start()
        request.Wait()


def test_what_is_made_of_it_takes_gpu_arrays_too(comm: Any) -> None:
    for made in (comm.Dup(), comm.Split(0, -RANK), comm.Create_cart([SIZE], [True])):
        assert isinstance(made, hm.Comm)
        output = gpus.array(np.zeros(4))
        made.Allreduce(gpus.array(HERE), output)
        assert_same(gpus.values(output), np.arange(1.0, 5.0) * (SIZE * (SIZE + 1) // 2))
        if isinstance(made, MPI.Cartcomm):
            source, to = made.Shift(0, 1)
            made.Sendrecv(gpus.array(HERE), to, 0, output, source)
            assert_same(gpus.values(output), np.arange(1.0, 5.0) * (BEFORE + 1))
        made.Free()


def test_what_is_made_of_it_may_begin_with_a_message(comm: Any) -> None:
    comm.Barrier()
    comm.Bcast(gpus.array(np.zeros(1)))  # which connects
    for made in (comm.Create_cart([SIZE], [True]), comm.Split(RANK % 2), comm.Create_group(comm.Get_group())):
        rank, size = made.Get_rank(), made.Get_size()
        output = gpus.array(np.zeros(1))
        made.Sendrecv(gpus.array(np.array([float(rank)])), (rank + 1) % size, 0, output, (rank - 1) % size)
        assert gpus.values(output).tolist() == [(rank - 1) % size]
        made.Free()


def test_a_group_has_a_communicator(process_group: hc.ProcessGroup) -> None:
    comm = hm.Comm(process_group)
    assert comm.process_group is process_group
    output = gpus.array(np.zeros(4))
    comm.Allreduce(gpus.array(HERE), output)
    assert_same(gpus.values(output), np.arange(1.0, 5.0) * (SIZE * (SIZE + 1) // 2))
    comm.Free()
    assert not process_group.is_destroyed
