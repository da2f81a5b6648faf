"""The watched communicators: they do what mpi4py's own do, and know what is called on them."""

from __future__ import annotations

import pickle
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from hpccomm.debug.mpi_calls import CALLS
from hpccomm.debug.sources import named_in
from hpccomm.mpi4py.calls import SMALLEST
from hpccomm.run import communicators
from hpccomm.run.communicators import CODES, record_of, requests_in_flight, watched
from hpccomm.run.persistent import BASE

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


@pytest.fixture
def comm() -> Any:
    comm = watched(MPI.COMM_WORLD.Dup(), "mine")
    yield comm
    comm.Free()


def test_it_is_a_communicator_as_before(comm: Any) -> None:
    assert isinstance(comm, MPI.Intracomm)
    assert (type(comm).__name__, type(comm).__module__) == ("Intracomm", "mpi4py.MPI")
    assert comm == MPI.Intracomm(comm)
    assert MPI.Comm.Compare(comm, MPI.COMM_WORLD) == MPI.CONGRUENT
    assert MPI._handleof(comm) == comm.handle
    assert MPI.Comm.f2py(comm.py2f()) == comm
    assert (comm.rank, comm.size, comm.is_intra) == (RANK, SIZE, True)


def test_what_it_computes_is_right(comm: Any) -> None:
    mine, everybody = np.array([1.0 + RANK, 2.0]), np.empty((SIZE, 2))
    comm.Allgather(mine, everybody)
    assert everybody.tolist() == [[1.0 + rank, 2.0] for rank in range(SIZE)]
    comm.Allreduce(MPI.IN_PLACE, mine, op=MPI.MAX)
    assert mine.tolist() == [float(SIZE), 2.0]
    assert comm.allreduce(RANK) == sum(range(SIZE))
    assert comm.bcast({"a": RANK}, root=SIZE - 1) == {"a": SIZE - 1}
    assert comm.sendrecv(RANK, (RANK + 1) % SIZE, source=(RANK - 1) % SIZE) == (RANK - 1) % SIZE
    requests = [comm.isend([RANK], (RANK + 1) % SIZE, tag=3), comm.irecv(source=(RANK - 1) % SIZE, tag=3)]
    assert MPI.Request.waitall(requests)[1] == [(RANK - 1) % SIZE]
    with pytest.raises(TypeError):
        comm.Allreduce()


def test_what_is_made_of_it_is_watched_too(comm: Any) -> None:
    made = [
        comm.Dup(),
        comm.Clone(),
        comm.Split(RANK % 2, RANK),
        comm.Split_type(MPI.COMM_TYPE_SHARED),
        comm.Create(comm.Get_group()),
        comm.Create_group(comm.Get_group()),
        comm.Create_cart([SIZE], periods=[True]),
        comm.Create_graph(list(range(1, SIZE + 1)), [(rank + 1) % SIZE for rank in range(SIZE)]),
        comm.Create_dist_graph_adjacent([RANK], [RANK]),
    ]
    made.append(made[6].Sub([True]))
    kinds = [MPI.Intracomm] * 6 + [MPI.Cartcomm, MPI.Graphcomm, MPI.Distgraphcomm, MPI.Cartcomm]
    for each, kind in zip(made, kinds, strict=True):
        assert isinstance(each, kind)
        assert type(each) is communicators.WATCHING[kind]
        each.Barrier()
        assert each._seen.sequence_number == 1 + (each is made[6])
        assert comm.allgather(each._seen.key).count(each._seen.key) == each.size
    assert len({each._seen.key for each in made}) == len(made)
    assert made[2]._seen.ranks == tuple(range(RANK % 2, SIZE, 2))
    for each in reversed(made):
        each.Free()
    assert comm.Split(MPI.UNDEFINED) == MPI.COMM_NULL


def test_a_duplicate_that_is_made_without_blocking_is_watched(comm: Any) -> None:
    made, request = comm.Idup()
    request.Wait()
    made.Barrier()
    assert (made._seen.sequence_number, made._seen.ranks) == (1, comm._seen.ranks)
    assert comm.allgather(made._seen.key).count(made._seen.key) == SIZE
    made.free()
    made.free()
    assert made == MPI.COMM_NULL


def test_copies_and_the_predefined_ones_are_freed_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    world = watched(MPI.COMM_WORLD, "COMM_WORLD")
    monkeypatch.setattr(MPI, "COMM_WORLD", world)
    world.free()
    assert world.allreduce(1) == SIZE
    copy = type(world)(world)
    copy.Barrier()
    assert copy._seen is world._seen
    copy.free()
    assert copy == MPI.COMM_NULL
    assert world.allreduce(1) == SIZE
    with pytest.raises(AttributeError, match="no attribute 'anything'"):
        world.anything  # noqa: B018


@pytest.mark.parametrize(
    "make",
    [
        lambda comm: MPI.Comm.Dup(comm),
        lambda comm: MPI.Intracomm.Dup(comm),
        lambda comm: MPI.Comm.Clone(comm),
        lambda comm: next(map(MPI.Comm.Dup, [comm])),
        lambda comm: type("Named", (type(comm),), {})(comm).Dup(),
        lambda comm: type(comm)(comm).Dup(),
    ],
)
def test_one_that_is_made_by_whatever_way_is_watched(comm: Any, make: Any) -> None:
    made = make(comm)
    before = made._seen.sequence_number
    assert made.allreduce(1) == SIZE
    made.Barrier()
    assert made._seen.sequence_number == before + 2
    made.Dup().Free()
    made.Free()


def test_without_a_communicator_the_error_is_mpis(comm: Any) -> None:
    with pytest.raises(MPI.Exception):
        type(comm)().Barrier()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = comm.nothing


def test_its_class_equals_mpi4pys(comm: Any) -> None:
    own, copy, another = type(comm), type(MPI.Comm.f2py(comm.py2f())), communicators.WATCHING[MPI.Cartcomm]
    assert (own == MPI.Intracomm, MPI.Intracomm == own, own == copy) == (True, True, True)
    assert {MPI.Intracomm: 1}[own] == 1
    assert (own == MPI.Cartcomm, own == another) == (False, False)


def test_intercommunicators(comm: Any) -> None:
    if SIZE < 2:
        pytest.skip("needs two ranks")
    half = comm.Split(RANK % 2, RANK)
    between = half.Create_intercomm(0, comm, 1 - RANK % 2, tag=5)
    assert isinstance(between, MPI.Intercomm)
    between.Barrier()
    merged = between.Merge(high=RANK % 2 == 1)
    assert merged.allreduce(1) == SIZE
    assert (between._seen.sequence_number, merged._seen.sequence_number) == (2, 1)
    for each in (merged, between, half):
        each.Free()


def test_every_method_in_the_table_is_counted() -> None:
    for base, own in communicators.WATCHING.items():
        for name in CALLS.keys() & set(dir(base)):
            assert vars(own)[name].__code__ in CODES, name


def test_calls_are_numbered(comm: Any) -> None:
    array = np.zeros(3)
    comm.Barrier()
    comm.Iallreduce(MPI.IN_PLACE, array).Wait()
    comm.Sendrecv(array, RANK, 1, np.empty(3), RANK, 1)
    comm.bcast(None)
    facts = comm._seen.facts()
    assert (facts["collectives"], facts["messages"]) == (3, 1)
    bcast = [3, "bcast", "", 0, -1, "", 0, False]
    assert facts["recent"] == [[1, "Barrier", "", 0], [2, "Iallreduce", "", 0], bcast]
    comm.Bcast(array, SIZE - 1)
    comm.Bcast([array, MPI.DOUBLE], root=SIZE - 1)
    assert [each[-2] for each in comm._seen.facts()["recent"][-2:]] == [SIZE - 1, SIZE - 1]


class Looks:
    """A buffer that looks at the stack from inside a call: MPI asks for its memory."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.dtype, self.size = array.dtype, array.size
        self.record: Any = None

    @property
    def __dlpack__(self) -> Any:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code not in CODES:
            frame = frame.f_back
        assert frame is not None
        self.record = record_of(frame, "here")
        raise AttributeError

    __cuda_array_interface__ = __dlpack__


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda comm, array: comm.Allreduce(array, np.zeros(3), MPI.MAX), ("Allreduce", "float64", 3, "MAX", None)),
        (lambda comm, array: comm.Bcast([array, 2, MPI.DOUBLE], root=0), ("Bcast", "float64", 2, "", 0)),
        (lambda comm, array: comm.Reduce(array, np.zeros(3), root=0), ("Reduce", "float64", 3, "SUM", 0)),
        (lambda comm, array: comm.Send(array, 0, tag=4), ("Send", "float64", 3, "", 0)),
        (lambda comm, array: comm.Recv(array), ("Recv", "float64", 3, "", None)),
    ],
)
def test_a_call_on_the_stack_is_described(comm: Any, call: Any, said: tuple[Any, ...]) -> None:
    array = Looks(np.zeros(3))
    with pytest.raises((TypeError, BufferError, NotImplementedError, ValueError)):
        call(comm, array)
    record = array.record
    assert (record.name, record.dtype, record.count, record.op, record.peer) == said
    assert (record.number, record.group_name, record.where) == (1, "mine", "here")
    assert str(record) == f"{said[0]} #1 of 'mine' ({8 * said[2]} B float64)"
    comm.Barrier()


def test_requests_are_known_until_they_have_ended(comm: Any) -> None:
    array = np.zeros(2)
    request = comm.Irecv(array, source=RANK, tag=6)
    (record,) = requests_in_flight()
    assert (record.name, record.peer, record.tag, record.async_op) == ("Irecv", RANK, 6, True)
    comm.Send(np.ones(2), RANK, 6)
    request.Wait()
    assert requests_in_flight() == []
    reduction = comm.Iallreduce(np.ones(2), np.empty(2), MPI.MAX)
    (record,) = requests_in_flight()
    assert (record.name, record.dtype, record.count, record.op) == ("Iallreduce", "float64", 2, "MAX")
    reduction.Wait()
    assert array.tolist() == [1.0, 1.0]


def test_only_the_requests_that_are_named_are_known(comm: Any) -> None:
    arrays = np.zeros((3, 2))
    requests = [comm.Irecv(array, source=RANK, tag=tag) for tag, array in enumerate(arrays)]
    holder = type("Holder", (), {})()
    holder.some = requests[1:]
    frame: Any = sys._getframe()
    for text, tags in (
        ("requests[0].Wait()", [0, 1, 2]),
        ("MPI.Request.Waitall(holder.some)", [1, 2]),
        ("holder.others.Wait()", [0, 1, 2]),  # nothing is known of them
    ):
        assert [each.tag for each in requests_in_flight(named_in(text, frame))] == tags
    for tag in range(3):
        comm.Send(np.ones(2), RANK, tag)
    MPI.Request.Waitall(requests)


def test_each_start_of_a_persistent_request_is_a_call(comm: Any) -> None:
    array, sent = np.zeros(2), np.ones(2)
    receive, send = comm.Recv_init(array, source=RANK, tag=6), comm.Send_init(sent, RANK, 6)
    assert isinstance(receive, MPI.Prequest)
    assert isinstance(receive, BASE)
    assert type(receive) == BASE  # noqa: E721
    assert (requests_in_flight(), comm._seen.message_number) == ([], 0)
    for turn in range(1, 4):
        sent[:] = turn
        if turn == 2:
            type(receive).Startall([receive, send])
        else:
            receive.Start()
            send.Start()
        records = [(each.name, each.number, each.peer, each.tag) for each in requests_in_flight()]
        assert sorted(records) == [("Recv_init", 2 * turn - 1, RANK, 6), ("Send_init", 2 * turn, RANK, 6)]
        assert receive.Wait() is True
        while not send.Test():
            pass
        assert requests_in_flight() == []
        assert array.tolist() == [turn, turn]
    for request in (receive, send):
        request.Free()
        assert request == MPI.REQUEST_NULL


def test_a_persistent_request_of_a_handle_is_of_the_same_class(comm: Any) -> None:
    request = comm.Send_init(np.ones(2), RANK, 6)
    own = type(request)
    made = [own(request), own.fromhandle(request.handle), own.f2py(request.py2f())]
    assert [(type(each) is own, each == request) for each in made] == [(True, True)] * 3
    request.Free()


@pytest.mark.skipif(MPI.VERSION < 4, reason="MPI 4")
@pytest.mark.parametrize(
    "name", sorted(name for name in dir(MPI.Intracomm) if name in CALLS and name.endswith("_init"))
)
def test_a_persistent_request_has_all_arguments_of_its_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(communicators, "_persistent", lambda *arguments: made.append(arguments))
    parameters = [each.name for each in communicators._parameters(name)]
    call = communicators._compiled(communicators._kind(name), name, lambda self, *arguments: arguments)
    call(SimpleNamespace(_seen=SimpleNamespace(sequence_number=0, names=[])), *parameters)
    ((given, _, named, arguments),) = made
    assert (list(given), named, list(arguments)) == (parameters, name, parameters)


@pytest.mark.skipif(MPI.VERSION < 4, reason="MPI 4")
def test_a_persistent_barrier(comm: Any) -> None:
    request = comm.Barrier_init()
    for turn in range(1, 3):
        request.Start()
        assert [(each.name, each.number) for each in requests_in_flight()] == [("Barrier_init", 1 + turn)]
        request.Wait()
    request.Free()


@pytest.mark.skipif(MPI.VERSION < 4, reason="MPI 4")
def test_persistent_collectives_and_partitioned_messages_are_numbered(comm: Any) -> None:
    array, total = np.full(2, RANK + 1.0), np.empty(2)
    reduction = comm.Allreduce_init(array, total)
    for turn in range(1, 3):
        reduction.Start()
        assert [(each.name, each.number) for each in requests_in_flight()] == [("Allreduce_init", 1 + turn)]
        reduction.Wait()
        assert total.tolist() == [SIZE * (SIZE + 1) / 2] * 2
    assert comm._seen.facts()["recent"] == [[number, "Allreduce_init", "", 0] for number in (1, 2, 3)]
    reduction.Free()
    parts, received = np.arange(4.0), np.zeros(4)
    send, receive = comm.Psend_init(parts, 2, RANK, 3), comm.Precv_init(received, 2, RANK, 3)
    type(send).Startall([send, receive])
    assert sorted(each.name for each in requests_in_flight()) == ["Precv_init", "Psend_init"]
    send.Pready_range(0, 1)
    for request in (send, receive):
        request.Wait()
        request.Free()
    assert received.tolist() == parts.tolist()


def test_a_copy_can_be_pickled_where_mpi4pys_own_can() -> None:
    for name in ("COMM_WORLD", "COMM_SELF"):
        copy = pickle.loads(pickle.dumps(communicators.WATCHING[MPI.Intracomm](getattr(MPI, name))))
        assert copy == getattr(MPI, name)
    duplicate = watched(MPI.COMM_SELF.Dup(), "mine")
    with pytest.raises(ValueError, match="cannot serialize"):
        pickle.dumps(duplicate)
    duplicate.Free()


def test_one_over_hpccomms_transports_is_counted_too(comm: Any) -> None:
    from hpccomm import mpi4py as hm

    mine, output = hm.Comm(comm, accelerate=True), np.empty(SMALLEST // 8)
    assert isinstance(mine, type(comm))
    mine.Allreduce(np.ones(output.size), output)
    assert output.tolist() == [float(SIZE)] * output.size
    mine.Barrier()
    mine.Allreduce(np.ones(2), output[:2])
    assert list(mine._seen.names)[-2:] == ["Barrier", "Allreduce"]
    assert mine.process_group.sequence_number == 1
    made = mine.Split(0)
    assert isinstance(made, hm.Comm)
    made.Barrier()
    assert made._seen.sequence_number == 1
    made.Free()
    mine.process_group.destroy()
