"""Sparse exchange: what random ranks send to random ranks, of which each rank knows everything by the same seed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.core.backend import FastPath
from hpccomm.mpi import sparse_exchange
from hpccomm.mpi.sparse_exchange import SMALL, ConsensusExchange

from .hooks import Noted

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
several = pytest.mark.mpi(min_size=2)

DTYPES = ["f8", "f4", "i2", "c16", "?", "M8[s]", [("at", "f8", 3), ("number", "i4")], ml_dtypes.bfloat16]


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[hc.ProcessGroup]:
    with hc.init_process_group() as group:
        for _ in range(10):  # from here on it uses memory of the node, where it has some
            hc.barrier()
        yield group


@pytest.fixture(autouse=True, params=["node", "counted", "consensus"])
def way(request: pytest.FixtureRequest, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "node":
        path = type(world.dispatcher.fast_path)
        monkeypatch.setattr(path, "exchange_sparse", FastPath.exchange_sparse)
        monkeypatch.setattr(path, "node_exchange_sparse", FastPath.node_exchange_sparse)
    if request.param == "consensus":
        monkeypatch.setattr(sparse_exchange, "FEW", 0)


def sent(seed: int, source: int, destination: int, ranks: int) -> Any:
    """What a rank sends to another; None: nothing."""
    rng = np.random.default_rng([seed, source, destination])
    if rng.random() > 3 / ranks:
        return None

    def array() -> Any:
        shape = rng.integers(0, 5, int(rng.integers(0, 4))).tolist()
        if rng.random() < 0.2:
            shape = [int(rng.integers(3000, 9000))]  # too large to travel with what it is
        values = rng.integers(0, 99, [2 * n for n in shape])
        dtype = np.dtype(DTYPES[int(rng.integers(len(DTYPES)))])
        strided = np.zeros(values.shape, dtype)
        if dtype.names:
            strided["number"] = values
        else:
            strided[...] = values.astype(dtype)
        return np.asarray(strided[tuple(slice(None, None, 2) for _ in shape)])

    return array() if rng.random() < 0.5 else tuple(array() for _ in range(int(rng.integers(0, 4))))


def assert_same(received: Any, expected: Any) -> None:
    assert type(received) is type(expected)
    if isinstance(expected, tuple):
        assert len(received) == len(expected)
        for one, other in zip(received, expected):
            assert_same(one, other)
    else:
        assert (received.dtype, received.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(received, expected)


@pytest.mark.parametrize("kind", ["world", "reversed"])
def test_random_messages(kind: str) -> None:
    group = hc.split_group(color=0, key=-RANK if kind == "reversed" else RANK)
    ranks = group.ranks
    for seed in range(20):
        given = {to: each for to in range(SIZE) if (each := sent(seed, RANK, to, SIZE)) is not None}
        expected = {source: each for source in range(SIZE) if (each := sent(seed, source, RANK, SIZE)) is not None}
        if seed % 3 == 0:
            received = hc.exchange_sparse(given, group)
        elif seed % 3 == 1:
            received = hc.exchange_sparse(given, group, async_op=True).result()
        else:  # by ranks of the group
            mine = {group.group_rank(to): each for to, each in given.items()}
            received = {ranks[source]: each for source, each in group.exchange_sparse(mine).items()}
        assert set(received) == set(expected)
        for source, each in expected.items():
            assert_same(received[source], each)
        order = [group.group_rank(source) for source in received]
        assert order == sorted(order)
    group.destroy()


def content(source: int, destination: int, shape: tuple[int, ...], dtype: Any = "f8") -> np.ndarray:
    """Values that tell who has sent them to whom."""
    cells = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    return np.asarray((cells % 20 + 100 * source + 7 * destination) % 120).astype(dtype)


def large(source: int, destination: int) -> np.ndarray:
    array = np.full((16 << 20) + 8, (10 * source + destination) % 120, np.int8)
    array[::1009] = np.arange(array[::1009].size) % 120
    return array


# What a rank sends another, and what that one gets, where it is not the same.
KINDS: dict[str, tuple[Any, Any]] = {
    "a tuple": (lambda s, d: (content(s, d, (3, 2)), content(s, d, (4,), "i4")), None),
    "a list": (
        lambda s, d: [content(s, d, (3, 2)), content(s, d, (4,), "i4")],
        lambda s, d: (content(s, d, (3, 2)), content(s, d, (4,), "i4")),
    ),
    "a tuple of one": (lambda s, d: (content(s, d, (2,)),), None),
    "a list of none": (lambda s, d: [], lambda s, d: ()),
    "an empty array": (lambda s, d: np.empty((3, 0, s), "i2"), None),
    "empty arrays beside a full one": (
        lambda s, d: (np.empty((0, 4)), content(s, d, (5,)), np.empty(0, "c8"), np.empty((2, 0), "?")),
        None,
    ),
    "empty arrays beside a large one": (lambda s, d: (np.empty(0), large(s, d), np.empty((0, 2), "f2")), None),
    "of no dimensions": (lambda s, d: content(s, d, ()), None),
    "several of no dimensions": (lambda s, d: (content(s, d, (), "i8"), content(s, d, (), "f2")), None),
    "float16": (lambda s, d: content(s, d, (9, 5), "f2"), None),
    "large float16": (lambda s, d: content(s, d, (300, 200), "f2"), None),
    "strided": (lambda s, d: content(s, d, (8, 9))[::2, 1::3], None),
    "large and strided": (lambda s, d: content(s, d, (400, 300))[::3, ::-2], None),
    "large and in Fortran's order": (lambda s, d: (np.asfortranarray(content(s, d, (150, 170))),), None),
    "one value everywhere": (lambda s, d: np.broadcast_to(content(s, d, (1, 3)), (2000, 3)), None),
    "of more than 16 MiB": (large, None),
    "of more than 16 MiB together": (lambda s, d: (large(s, d)[: 12 << 20], large(s, d)[1 << 20 :: 2]), None),
    "at the largest size that travels with what it is": (lambda s, d: content(s, d, (SMALL // 8,)), None),
    "64 KiB": (lambda s, d: content(s, d, (8192,)), None),
    "more than 64 KiB": (lambda s, d: (content(s, d, (8192,)), content(s, d, (1,), "i1"), np.empty(0)), None),
    "read-only": (lambda s, d: np.frombuffer(content(s, d, (9,)).tobytes()), None),
    "one beyond that": (lambda s, d: (content(s, d, (SMALL // 8,)), content(s, d, (1,), "i1")), None),
}


def each_of(arrays: Any) -> Any:
    return arrays if isinstance(arrays, (tuple, list)) else [arrays]


def check_received(received: Any, expected: Any) -> None:
    """What comes is the same, in the order of the senders, and in arrays that the program may write to."""
    assert list(received) == sorted(expected)
    for source, each in expected.items():
        assert_same(received[source], each)
        for array in each_of(received[source]):
            assert type(array) is np.ndarray
            assert array.flags.writeable
            assert array.flags.c_contiguous


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_arrays(kind: str) -> None:
    send, receive = KINDS[kind]
    receive = receive or send
    partners = {"everybody": range(SIZE), "oneself": [RANK], "the next": [(RANK + 1) % SIZE]}
    for whom, ranks in partners.items():
        given, sources = {to: send(RANK, to) for to in ranks}, partners.get(whom, [])
        sources = [(RANK - 1) % SIZE] if whom == "the next" else sources
        received = hc.exchange_sparse(given)
        check_received(received, {source: receive(source, RANK) for source in sources})
        for to, arrays in given.items():  # and nobody has written to what is sent
            for one, other in zip(each_of(arrays), each_of(send(RANK, to))):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["a tuple", "float16", "of no dimensions", "of more than 16 MiB"])
def test_one_hears_everybody_and_nobody_else_hears(kind: str) -> None:
    send, _ = KINDS[kind]
    for one in range(SIZE):
        to_one = hc.exchange_sparse({one: send(RANK, one)}, async_op=True)
        from_one = hc.exchange_sparse({to: send(one, to) for to in range(SIZE)} if one == RANK else {})
        check_received(from_one, {one: send(one, RANK)})
        check_received(to_one.result(), {source: send(source, one) for source in range(SIZE)} if one == RANK else {})


def test_many_in_flight_and_fast_ranks() -> None:
    works = []
    for turn in range(50):
        works.append(hc.exchange_sparse({(RANK + turn) % SIZE: np.array([RANK, turn])}, async_op=True))
        if turn % 5 == RANK % 5:
            works[-1].wait()
    for turn, work in enumerate(works):
        ((source, array),) = work.result().items()
        assert array.tolist() == [source, turn]
        assert source == (RANK - turn) % SIZE


@pytest.mark.skipif(SIZE == 1, reason="nobody can be late")
def test_the_first_asynchronous_one_waits_for_nobody() -> None:
    group = hc.new_group()
    if RANK:
        hc.recv(np.empty(1), 0)  # before it comes, too
    work = hc.exchange_sparse({0: np.array([RANK])}, group, async_op=True)
    if RANK == 0:
        for dst in range(1, SIZE):
            hc.send(np.zeros(1), dst)
    check_received(work.result(), {source: np.array([source]) for source in range(SIZE)} if RANK == 0 else {})


@pytest.mark.skipif(SIZE == 1, reason="there is no other rank")
@pytest.mark.parametrize("between", ["a barrier", "another exchange"])
def test_ranks_wait_for_large_ones_in_different_orders(between: str) -> None:
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    sent = np.full(1 << 19, float(RANK))  # 4 MiB: no MPI sends it before the receiver has come

    def begin() -> hc.Work:
        return hc.exchange_sparse({after: sent}, async_op=True)

    waits: list[Any] = [begin(), begin()]
    if between == "a barrier":
        waits[1].wait()
        waits[1] = SimpleNamespace(wait=hc.barrier)
    first = waits[0]
    for work in waits if RANK == 0 else waits[::-1]:
        work.wait()
    check_received(first.result(), {before: np.full(1 << 19, float(before))})


@pytest.mark.parametrize("objects", [False, True])
@pytest.mark.parametrize("turns", [2, 4, 6])
def test_tags_are_used_again_when_their_last_exchange_is_done(
    objects: bool, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_exchange, "SPARSE_TURNS", turns)
    works: list[Any] = []
    for seed in range(4 * turns):
        if objects and seed % 2:
            slots: list[Any] = [None] * SIZE
            works.append(hc.all_gather_object(slots, (RANK, seed), async_op=True))
        else:  # to some ranks only, and from the first ones in two messages
            receivers = [rank for rank in range(SIZE) if (rank + RANK + seed) % 2]
            values = [np.full(9000 if RANK == 0 else 3, 100.0 * seed + RANK) for _ in receivers]
            works.append(hc.exchange_sparse(dict(zip(receivers, values)), async_op=True))
        in_flight = [work for work in works if not work.has_ended()]
        assert len(in_flight) <= turns // 2
    for seed, work in enumerate(works):
        if objects and seed % 2:
            assert work.result() == [(rank, seed) for rank in range(SIZE)]
        else:
            senders = [rank for rank in range(SIZE) if (rank + RANK + seed) % 2]
            expected = {rank: np.full(9000 if rank == 0 else 3, 100.0 * seed + rank) for rank in senders}
            check_received(work.result(), expected)


@pytest.mark.parametrize("way", ["consensus"], indirect=True)
def test_one_that_has_ended_is_polled_again_while_a_later_one_is_begun() -> None:
    unfinished: deque[ConsensusExchange] = deque()
    polls: list[bool] = []

    def begun(turn: int, comm: MPI.Intracomm) -> tuple[ConsensusExchange, dict[int, Any]]:
        received: dict[int, Any] = {}
        return ConsensusExchange(comm, unfinished, turn, {RANK: [np.array([turn])]}, received, range(SIZE)), received

    class AnotherThread(MPI.Intracomm):
        """What another thread does while an exchange is begun, here in the middle of that."""

        def Issend(self, *arguments: Any) -> MPI.Request:
            polls.append(earlier.poll())
            return super().Issend(*arguments)

    earlier, received = begun(1, MPI.COMM_WORLD)
    earlier.block()
    later, received_later = begun(2, AnotherThread(MPI.COMM_WORLD))
    assert polls == [True]
    later.block()
    assert (received, received_later) == ({RANK: 1}, {RANK: 2})
    assert not unfinished


def test_an_error_is_that_of_the_exchange_it_came_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a later one takes what comes of an earlier one, too, and may find that it can't."""

    def dtype_of(pickled: bytes) -> Any:
        dtype = made(pickled)
        if dtype == np.int16:
            raise MemoryError("too large")
        return dtype

    made = sparse_exchange._dtype_of
    monkeypatch.setattr(sparse_exchange, "_dtype_of", dtype_of)
    monkeypatch.setattr("hpccomm.core.progress.drive", lambda work: None)  # whose thread might look at the first first
    group = hc.new_group()
    for dtype in ("i2", "f8"):
        first = hc.exchange_sparse({RANK: np.ones(2, dtype)}, group, async_op=True)
        second = hc.exchange_sparse({RANK: np.ones(3)}, group, async_op=True)
        assert second.result()[RANK].tolist() == [1, 1, 1]
        if dtype == "f8":
            assert first.result()[RANK].tolist() == [1, 1]
        else:
            with pytest.raises(MemoryError, match="too large"):
                first.result()
    group.destroy()


MANY = (np.empty((0,) * 32, "i2"),) * 2000  # their shapes alone take more than 512 KiB
NOT_ORDINARY: dict[str, Any] = {
    "a dtype of its own": lambda given: {to: np.array([(1, 2.5)], "i4,f8") for to in given},
    "more than has room": lambda given: dict.fromkeys(given, MANY),
    "another mapping": MappingProxyType,
    "NumPy's numbers": lambda given: {np.int64(to): each for to, each in given.items()},
    "strided": lambda given: {to: np.repeat(each, 2)[::2] for to, each in given.items()},
    "a hook": dict,
}


@pytest.mark.parametrize("way", ["node"], indirect=True)
@pytest.mark.parametrize("what", NOT_ORDINARY)
def test_one_rank_is_not_ordinary(what: str, world: hc.ProcessGroup) -> None:
    def arrays(source: int) -> dict[int, Any]:
        return {to: np.array([source, to]) for to in range(SIZE)}

    hook = Noted()
    for odd in range(SIZE):
        given = NOT_ORDINARY[what](arrays(RANK)) if odd == RANK else arrays(RANK)
        with world.register_hook(hook) if what == "a hook" and odd == RANK else nullcontext():
            received = hc.exchange_sparse(given)
        for source, came in received.items():
            if source != odd or what in ("another mapping", "NumPy's numbers", "strided", "a hook"):
                assert came.tolist() == [source, RANK]
            elif what == "a dtype of its own":
                assert came.tolist() == [(1, 2.5)]
            else:
                assert [(each.shape, each.dtype) for each in came] == [(MANY[0].shape, np.int16)] * len(MANY)
        assert list(received) == list(range(SIZE))
        everybody = np.array([RANK])
        hc.all_reduce(everybody)  # and the ranks are together after it
        assert everybody == SIZE * (SIZE - 1) // 2
    assert hook.names == (["exchange_sparse"] if what == "a hook" else [])


@pytest.mark.parametrize("way", ["node"], indirect=True)
def test_small_ones_need_no_checks(world: hc.ProcessGroup) -> None:
    path = world.dispatcher.fast_path
    if not path.is_node_open():
        pytest.skip("there is no memory of the node")
    for array in (np.ones(2), np.ones(20_000)):  # the larger one itself goes by MPI
        before = path.count
        assert hc.exchange_sparse({RANK: array})[RANK].size == array.size
        assert path.count == before + 1


@pytest.mark.parametrize("way", ["node"], indirect=True)
@pytest.mark.parametrize("error", [MPI.Exception(MPI.ERR_OTHER), KeyError("of a signal handler")])
def test_one_that_fails_is_counted(error: Exception, world: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise error

    path = world.dispatcher.fast_path
    if not path.is_node_open():
        pytest.skip("there is no memory of the node")
    monkeypatch.setattr(type(path), "move_large", fail)
    before = path.count
    with pytest.raises(KeyError if type(error) is KeyError else hc.DistBackendError):
        hc.exchange_sparse({RANK: np.ones(20_000)})
    assert path.count == before + 1
    assert hc.exchange_sparse({RANK: np.ones(2)})[RANK].tolist() == [1, 1]


def test_nothing_at_all() -> None:
    assert hc.exchange_sparse({}) == {}
    assert hc.exchange_sparse({RANK: ()}) == {RANK: ()}


@pytest.mark.parametrize(
    ("arrays", "error", "words"),
    [
        ([np.zeros(1)], TypeError, "arrays is a list; expected a dict"),
        ({SIZE: np.zeros(1)}, ValueError, f"a receiver is {SIZE}, which is not in the group"),
        ({0.5: np.zeros(1)}, TypeError, "expected an integer"),
        ({0: [1.0]}, TypeError, "arrays"),
        ({0: np.array([None])}, TypeError, "arrays"),
    ],
)
def test_wrong_arguments(arrays: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        hc.exchange_sparse(arrays)
    assert hc.exchange_sparse({}) == {}


@several
def test_outside_the_group() -> None:
    group = hc.new_group([0])
    if RANK == 0:
        assert hc.exchange_sparse({0: np.ones(2)}, group)[0].tolist() == [1, 1]
    else:
        with pytest.warns(RuntimeWarning, match="exchange_sparse: this rank is not in"):
            assert hc.exchange_sparse({}, group) is None
