from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.core.registry import OBJECTS
from hpccomm.mpi.objects import BLOCK

from .arrays import assert_same

pytestmark = pytest.mark.usefixtures("process_group", "the_group_goes_on")
needs_two = pytest.mark.mpi(min_size=2)

Groups = list[hc.ProcessGroup]


def thing(rank: int) -> dict[str, Any]:
    return {"rank": rank, "large": np.full(300_000, rank, np.int32), "none": None, "nested": [{"x": (rank, "é")}]}


def assert_things(actual: Any, expected: Any) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert np.array_equal(actual[key], value), key


@pytest.mark.parametrize("async_op", [False, True])
def test_collectives_fill_their_lists(groups: Groups, async_op: bool) -> None:
    for group in groups:
        first, last = group.ranks[0], group.ranks[-1]
        every: list[Any] = [None] * group.size
        on_last: list[Any] | None = [None] * group.size if hc.get_rank() == last else None
        copied = [thing(last), "two"] if hc.get_rank() == last else [None, None]
        mine: list[Any] = [None, "kept"]
        source = [thing(rank) for rank in group.ranks] if hc.get_rank() == first else None
        works = [
            hc.all_gather_object(every, thing(hc.get_rank()), group, async_op=async_op),
            hc.gather_object(thing(hc.get_rank()), on_last, last, group, async_op=async_op),
            hc.broadcast_object_list(copied, last, group, async_op=async_op),
            hc.scatter_object_list(mine, source, group=group, async_op=async_op),
        ]
        if async_op:
            for work in works[group.rank :] + works[: group.rank]:  # each rank waits in an order of its own
                assert work.wait()
            assert works[0].result() is every
        for gathered in (every, on_last or []):
            for rank, each in zip(group.ranks, gathered, strict=False):
                assert_things(each, thing(rank))
                each["large"][0] = 1  # writable
        assert_things(copied[0], thing(last))
        assert copied[1] == "two"
        assert_things(mine[0], thing(hc.get_rank()))
        assert mine[1] == "kept"


@needs_two
def test_send_and_receive_objects(groups: Groups) -> None:
    for group in groups:
        if group.size == 1:
            continue
        if group.rank == 0:
            for rank in range(1, group.size):
                slots: list[Any] = [None, None]
                source = hc.recv_object_list(slots, None if rank == 1 else group.ranks[rank], group, tag=rank)
                assert source == group.ranks[rank]
                assert_things(slots[0], thing(source))
        else:
            hc.send_object_list([thing(hc.get_rank()), 2], group=group, group_dst=0, tag=group.rank)


@needs_two
@pytest.mark.parametrize("async_op", [False, True])
def test_several_buffers_for_which_a_blocking_sender_waits(process_group: hc.ProcessGroup, async_op: bool) -> None:
    arrays = [np.full(100_000, 1.0), np.full(100_000, 2.0)]
    if process_group.rank == 0:
        hc.send_object_list(arrays, 1)
    elif process_group.rank == 1:
        slots: list[Any] = [None, None]
        outcome = hc.recv_object_list(slots, 0, async_op=async_op)
        if async_op:
            outcome.wait(60)
        for slot, array in zip(slots, arrays):
            assert_same(slot, array)


def test_received_arrays_are_writable(process_group: hc.ProcessGroup) -> None:
    gathered: list[Any] = [None] * process_group.size
    hc.all_gather_object(gathered, np.zeros(200_000))
    for array in gathered:
        array += 1


class Long:
    """Its error has more to say than fits into one message."""

    def __reduce__(self) -> Any:
        raise ValueError("x" * 1000)


def each_function(mine: Any, group: hc.ProcessGroup) -> dict[str, list[Any]]:
    """Return what this rank has from each function, the last rank being root and source."""
    last, n = group.size - 1, group.size
    is_last = group.rank == last
    gathered, on_root, listed, slot = [None] * n, [None] * n if is_last else None, [mine] if is_last else [None], [None]
    hc.all_gather_object(gathered, mine)
    hc.gather_object(mine, on_root, last)
    hc.broadcast_object_list(listed, last)
    hc.scatter_object_list(slot, [mine] * n if is_last else None, last)
    return {"all_gather": gathered, "gather": on_root or [], "broadcast": listed, "scatter": slot}


@pytest.mark.parametrize("large", ["nobody", "all", "the last rank", "the first rank"])
def test_objects_of_every_size(process_group: hc.ProcessGroup, large: str) -> None:
    last = process_group.size - 1

    def of(rank: int, nbytes: int) -> bytes:
        is_large = large == "all" or rank == {"the last rank": last, "the first rank": 0}.get(large)
        return bytes([rank]) * (nbytes if is_large else rank)

    for nbytes in range(BLOCK - 24, BLOCK + 2):
        found = each_function(of(process_group.rank, nbytes), process_group)
        assert found["all_gather"] == [of(rank, nbytes) for rank in range(last + 1)]
        assert found["gather"] == (found["all_gather"] if process_group.rank == last else [])
        assert found["broadcast"] == found["scatter"] == [of(last, nbytes)]


def test_an_object_that_communicates_while_it_is_unpickled(process_group: hc.ProcessGroup) -> None:
    gathered: list[Any] = [None] * process_group.size
    hc.all_gather_object(gathered, Communicates(process_group.rank))
    assert [each.rank for each in gathered] == list(range(process_group.size))
    assert all(each.seen == list(range(process_group.size)) for each in gathered)


class Communicates:
    """It gathers when it is unpickled."""

    seen: list[Any]

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.seen = [None] * hc.get_world_size()
        hc.all_gather_object(self.seen, hc.get_rank())


def test_the_source_keeps_its_objects(process_group: hc.ProcessGroup) -> None:
    for count in (1, 100_000):
        mine = [np.ones(count)]
        slots = list(mine)
        hc.broadcast_object_list(slots)
        assert process_group.rank or slots[0] is mine[0]
        assert (slots[0] == 1).all()


UNPICKLABLE = threading.Lock()


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("others", ["small", "large"])
@pytest.mark.parametrize("what", [UNPICKLABLE, Long()], ids=["lock", "long"])
def test_an_unpicklable_object_of_one_rank_is_an_error_of_all(
    process_group: hc.ProcessGroup, what: Any, others: str, where: str, async_op: bool
) -> None:
    n, me = process_group.size, process_group.rank
    bad = 0 if where == "first" else n - 1
    mine = what if me == bad else b"x" * (1000 if others == "large" else 1)
    text = "a lock can't be pickled" if what is UNPICKLABLE else r"a Long can't be pickled \(ValueError: x{1000}\)"
    slots: list[Any] = ["old"] * n
    how: dict[str, Any] = {"async_op": async_op}
    calls = {
        "all_gather_object": lambda: hc.all_gather_object(slots, mine, **how),
        "gather_object": lambda: hc.gather_object(mine, slots if me == 0 else None, **how),
        "broadcast_object_list": lambda: hc.broadcast_object_list([mine] * n if me == bad else slots, bad, **how),
        "scatter_object_list": lambda: hc.scatter_object_list(slots, [mine] * n if me == bad else None, bad, **how),
    }
    works = {name: call() for name, call in calls.items()} if async_op else {}
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"{name}: on rank {bad} of the group, (a list can't|{text})"):
            works[name].wait() if async_op else call()
    assert slots == ["old"] * n


class NeedsAnArgument(Exception):
    """Pickles, and can't be made again: Exception calls it with its `args`, of which there is one."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("size", [1, 1000])
def test_an_object_that_can_not_be_unpickled(process_group: hc.ProcessGroup, size: int, async_op: bool) -> None:
    n, me = process_group.size, process_group.rank
    last, other = n - 1, me < n - 1
    bad = NeedsAnArgument(1, "x" * size)
    mine: Any = bad if me == last else me

    def call(function: Any, *arguments: Any) -> Any:
        done = function(*arguments, async_op=async_op)
        return done.wait() if async_op else done

    def refused(function: Any, *arguments: Any) -> None:
        text = (
            rf"{function.__name__}.*: what rank {last} of the group has sent can't be unpickled \(TypeError: .*'text'"
        )
        with pytest.raises(TypeError, match=text):
            call(function, *arguments)

    slots: list[Any] = ["old"] * n
    refused(hc.all_gather_object, slots, mine)
    assert slots == [*range(last), "old"]
    slots = ["old"] * n
    if me == 0:
        refused(hc.gather_object, mine, slots)
        assert slots == [*range(last), "old"]
    else:
        call(hc.gather_object, mine)
    if other:
        refused(hc.broadcast_object_list, [None], last)
        refused(hc.scatter_object_list, [None], None, last)
    else:
        call(hc.broadcast_object_list, [bad], last)
        refused(hc.scatter_object_list, [None], [bad] * n, last)
    if n > 1 and me == 0:
        refused(hc.recv_object_list, [None], last)
        with pytest.raises(TypeError, match=f"recv_object_list: what rank {last} of the group has sent"):
            hc.recv_object_list([None])
    elif n > 1 and me == last:
        call(hc.send_object_list, [bad], 0)
        hc.send_object_list([bad], 0)


@needs_two
def test_an_unpicklable_message_raises_on_both_sides(process_group: hc.ProcessGroup) -> None:
    if process_group.rank == 0:
        with pytest.raises(TypeError, match="send_object_list: on rank 0 of the group, a list can't be pickled"):
            hc.send_object_list([UNPICKLABLE], 1)
    elif process_group.rank == 1:
        with pytest.raises(TypeError, match="recv_object_list: on rank 0 of the group"):
            hc.recv_object_list([None], 0)


@pytest.mark.parametrize(
    "wrong",
    [{"a": 1}, "text", ("a", "b"), 7, None, {1}, b"bytes", iter([1]), np.ones(1)],
    ids=lambda wrong: type(wrong).__name__,
)
def test_what_is_no_list_is_refused_before_anything_is_sent(wrong: Any, process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    refusals = {
        "all_gather_object: object_list": lambda: hc.all_gather_object(wrong, 1),
        "broadcast_object_list: object_list": lambda: hc.broadcast_object_list(wrong, 0),
        "scatter_object_list: scatter_object_output_list": lambda: hc.scatter_object_list(wrong, [1] * n),
        "recv_object_list: object_list": lambda: hc.recv_object_list(wrong, (me + 1) % n),
        "send_object_list: object_list": lambda: hc.send_object_list(wrong, (me + 1) % n),
    }
    if me == 0:
        refusals["scatter_object_list: scatter_object_input_list"] = lambda: hc.scatter_object_list([None], wrong)
        refusals["gather_object: object_gather_list"] = lambda: hc.gather_object(1, wrong)
    for text, call in refusals.items():
        if isinstance(wrong, tuple) and ("send" in text or "input" in text):
            continue  # which is only read
        missing = wrong is None and ("gather_list" in text or "input" in text)
        with pytest.raises(ValueError if missing else TypeError, match=f"{text} is (a .*; expected a list|missing)"):
            call()


def test_wrong_list_lengths_are_refused(process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    with pytest.raises(ValueError, match=rf"object_list has {n + 1} slots; expected one for each of the {n} ranks"):
        hc.all_gather_object([None] * (n + 1), 1)
    if me == 0:
        with pytest.raises(ValueError, match="object_gather_list is missing, and this rank is the destination"):
            hc.gather_object(1)
        with pytest.raises(ValueError, match="object_gather_list has"):
            hc.gather_object(1, [None] * (n + 1))
        with pytest.raises(ValueError, match="scatter_object_input_list has"):
            hc.scatter_object_list([None], [1] * (n + 1))
    else:
        with pytest.raises(ValueError, match="but this rank is not the destination"):
            hc.gather_object(1, [None] * n)
    with pytest.raises(ValueError, match="scatter_object_output_list is empty"):
        hc.scatter_object_list([], [1] * n if me == 0 else None)


@needs_two
@pytest.mark.parametrize("async_op", [False, True])
def test_lists_that_differ_in_length_between_ranks(process_group: hc.ProcessGroup, async_op: bool) -> None:
    is_wrong = process_group.rank > 0
    text = "object_list has 1 slots, but 2 objects were sent"
    with pytest.raises(ValueError, match=text) if is_wrong else nullcontext():
        work = hc.broadcast_object_list([None] if is_wrong else [1, 2], async_op=async_op)
        assert work is None or work.wait()


# -- asynchronously ----------------------------------------------------------------------------------


def go_on(group: hc.ProcessGroup) -> None:
    check = np.ones(1)
    hc.all_reduce(check, group=group)
    assert check[0] == group.size


def test_many_at_once_and_in_between(process_group: hc.ProcessGroup) -> None:
    n = process_group.size
    lists: list[list[Any]] = [[None] * n for _ in range(30)]
    works = [hc.all_gather_object(each, (process_group.rank, k), async_op=True) for k, each in enumerate(lists)]
    slots: list[Any] = [None] * n
    hc.all_gather_object(slots, process_group.rank)
    go_on(process_group)
    hc.wait_all(works[::-1])
    assert lists == [[(rank, k) for rank in range(n)] for k in range(30)]
    assert slots == list(range(n))


def test_one_rank_waits_while_another_is_in_a_later_operation(process_group: hc.ProcessGroup) -> None:
    slots: list[Any] = [None] * process_group.size
    work = hc.all_gather_object(slots, thing(process_group.rank), async_op=True)
    if process_group.rank % 2:
        go_on(process_group)
        assert work.wait()
    else:
        assert work.wait()
        go_on(process_group)
    for rank, each in enumerate(slots):
        assert_things(each, thing(rank))


def test_the_object_may_be_changed_at_once(process_group: hc.ProcessGroup) -> None:
    slots: list[Any] = [None] * process_group.size
    mine = np.full(300_000, process_group.rank)
    work = hc.all_gather_object(slots, mine, async_op=True)
    mine[:] = -1
    work.wait()
    assert [int(each.max()) for each in slots] == list(range(process_group.size))


def test_a_future_of_objects(process_group: hc.ProcessGroup) -> None:
    slots: list[Any] = [None] * process_group.size
    future = hc.all_gather_object(slots, process_group.rank, async_op=True).get_future()
    assert future.then(lambda done: sum(done.value())).wait() == sum(range(process_group.size))


# -- messages that do not block ------------------------------------------------------------------------


def ring(group: hc.ProcessGroup) -> tuple[int, int]:
    return (group.rank - 1) % group.size, (group.rank + 1) % group.size


@pytest.mark.parametrize(("sends", "receives"), [(True, True), (True, False), (False, True)])
def test_messages_match_in_every_form(groups: Groups, sends: bool, receives: bool) -> None:
    for group in groups:
        source, destination = ring(group)
        if group.size == 1 and not (sends and receives):
            continue
        slots: list[Any] = [None, None]
        received = hc.recv_object_list(slots, None, group, tag=5, group_src=source, async_op=True) if receives else None
        sent = hc.send_object_list([thing(group.rank), "x"], None, group, tag=5, group_dst=destination, async_op=sends)
        if received is None:
            assert hc.recv_object_list(slots, None, group, tag=5, group_src=source) == group.ranks[source]
        else:
            assert received.source_rank() == group.ranks[source]
            assert received.result() is slots
        assert sent is None or sent.wait()
        assert_things(slots[0], thing(source))
        slots[0]["large"][0] = 1  # writable
        assert slots[1] == "x"


def test_receives_take_messages_in_the_order_in_which_they_have_begun(process_group: hc.ProcessGroup) -> None:
    source, destination = ring(process_group)
    slots: list[list[Any]] = [[None] for _ in range(6)]
    others = [None, source, source, None, source]
    works = [hc.recv_object_list(each, src, async_op=True) for each, src in zip(slots, others, strict=False)]
    elsewhere: list[Any] = [None]
    apart = hc.recv_object_list(elsewhere, source, tag=7, async_op=True)
    sent = [hc.send_object_list([thing(k)], destination, async_op=True) for k in range(6)]
    if process_group.size > 1:
        assert hc.recv_object_list(slots[5], source) == source  # behind those that have begun
    else:
        works.append(hc.recv_object_list(slots[5], async_op=True))
    assert all(work.wait() for work in works[::-1])
    for k, (each,) in enumerate(slots):
        assert_things(each, thing(k))
    assert not apart.is_completed()
    hc.barrier()
    sent.append(hc.send_object_list(["seven"], destination, tag=7, async_op=True))
    assert apart.wait()
    assert elsewhere == ["seven"]
    hc.wait_all(sent)


FORMS = ["blocking", "asynchronous"]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("sends", FORMS)
@pytest.mark.parametrize("first", ["object", "array"])
@pytest.mark.parametrize("size", [1, 2, 5, 100_000])
def test_arrays_and_objects_of_one_tag_do_not_take_each_others_messages(
    process_group: hc.ProcessGroup, sends: str, first: str, size: int
) -> None:
    n, me = process_group.size, process_group.rank
    if me == 0:
        for rank in range(1, n):
            given, objects = np.full(size, rank), [f"to {rank}", np.arange(size)]
            works = []
            for what in ("object", "array") if first == "object" else ("array", "object"):
                if what == "object":
                    works.append(hc.send_object_list(objects, rank, tag=3, async_op=sends == "asynchronous"))
                else:
                    works.append(hc.isend(given, rank, tag=3))
            for work in works:
                assert work is None or work.wait()
        return
    array, slots = np.zeros(size, int), [None, None]
    received = hc.recv_object_list(slots, 0, tag=3, async_op=True)
    came = hc.irecv(array, 0, tag=3)
    came.wait()
    assert received is not None
    received.wait()
    assert (array == me).all()
    assert slots[0] == f"to {me}"
    assert (slots[1] == np.arange(size)).all()


@pytest.mark.mpi(min_size=2)
def test_objects_that_nobody_receives_are_named_when_the_group_ends(process_group: hc.ProcessGroup) -> None:
    group = hc.new_group()
    assert isinstance(group, hc.ProcessGroup)
    if group.rank == 0:
        hc.send_object_list([1], 1, group, tag=3)
    if group.rank == 1:
        with pytest.warns(RuntimeWarning, match="never received .* bytes of objects from rank 0 with tag 3"):
            group.destroy()
    else:
        group.destroy()


@pytest.mark.mpi(min_size=3)
def test_a_receive_from_any_rank_does_not_wait_for_an_earlier_one_from_a_silent_rank(
    process_group: hc.ProcessGroup,
) -> None:
    if process_group.rank == 0:
        first, second = [None], [None]
        works = [hc.recv_object_list(first, 1, async_op=True), hc.recv_object_list(second, async_op=True)]
        assert works[1].source_rank() == 2
        assert second == ["from 2"]
        assert not works[0].is_completed()
        hc.send_object_list(["go on"], 1)
        assert works[0].source_rank() == 1
        assert first == ["from 1"]
    elif process_group.rank == 1:
        hc.recv_object_list([None], 0)
        hc.send_object_list(["from 1"], 0)
    elif process_group.rank == 2:
        hc.send_object_list(["from 2"], 0)


@needs_two
@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_ranks_that_face_each_other_with_large_objects(process_group: hc.ProcessGroup, is_asynchronous: bool) -> None:
    source, destination = ring(process_group)
    slots: list[Any] = [None]
    received = hc.recv_object_list(slots, source, async_op=True)
    mine = np.full(1_000_000, process_group.rank)
    sent = hc.send_object_list([mine], destination, async_op=is_asynchronous)
    mine[:] = -1  # it has gone, or has been copied
    assert sent is None or sent.wait()
    assert received.wait()
    assert np.array_equal(slots[0], np.full(1_000_000, source))


@needs_two
def test_a_large_object_is_taken_while_its_receiver_is_in_another_operation(process_group: hc.ProcessGroup) -> None:
    slots: list[Any] = [None]
    if process_group.rank == 1:
        hc.send_object_list([np.arange(1_000_000)], 0)
    received = hc.recv_object_list(slots, 1, async_op=True) if process_group.rank == 0 else None
    hc.barrier()  # rank 1 comes when its message has been taken
    if received is not None:
        assert received.wait()
        assert np.array_equal(slots[0], np.arange(1_000_000))


def test_an_unpicklable_object_fails_both_works(process_group: hc.ProcessGroup) -> None:
    source, destination = ring(process_group)
    slots: list[Any] = ["old"]
    received = hc.recv_object_list(slots, source, async_op=True)
    sent = hc.send_object_list([UNPICKLABLE], destination, async_op=True)
    for name, work, rank in (("send", sent, process_group.rank), ("recv", received, source)):
        with pytest.raises(TypeError, match=f"{name}_object_list: on rank {rank} of the group, a list can't be"):
            work.wait()
    assert slots == ["old"]


def test_a_list_of_another_length_fails_the_receive(process_group: hc.ProcessGroup) -> None:
    source, destination = ring(process_group)
    received = hc.recv_object_list([None], source, async_op=True)
    assert hc.send_object_list([1, 2], destination, async_op=True).wait()
    with pytest.raises(ValueError, match="recv_object_list: object_list has 1 slots, but 2 objects were sent"):
        received.wait()


def test_a_receive_of_objects_is_taken_back(process_group: hc.ProcessGroup) -> None:
    source, destination = ring(process_group)
    slots: list[Any] = ["old"]
    received = hc.recv_object_list(["old"], source, async_op=True)
    assert received.status is hc.WorkStatus.IN_FLIGHT
    received.abort()
    assert received.status is hc.WorkStatus.ABORTED
    hc.barrier()
    received = hc.recv_object_list(slots, source, async_op=True)  # it gets what comes
    assert (received.info.peer, received.info.tag) == (source, 0)
    assert hc.send_object_list(["new"], destination, async_op=True).wait()
    assert received.result() == ["new"]


def test_a_future_of_a_message(process_group: hc.ProcessGroup) -> None:
    source, destination = ring(process_group)
    future = hc.recv_object_list([None], source, async_op=True).get_future()
    sent = hc.send_object_list([process_group.rank], destination, async_op=True)
    assert future.then(lambda done: done.value()[0]).wait() == source
    assert sent.wait()


@pytest.mark.parametrize(
    "kind", ["small", "one is large", "large", "none can be pickled", "one is large, one no pickle"]
)
def test_a_gather_sends_all_to_the_root_only(
    kind: str, process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, rank = process_group.size - 1, process_group.rank
    large, bad = np.arange(300_000), threading.Lock()
    mine = {
        "small": rank,
        "one is large": large if rank == 0 else rank,
        "large": large + rank,
        "none can be pickled": bad,
        "one is large, one no pickle": bad if rank == 0 else large,
    }[kind]
    slots: list[Any] | None = [None] * process_group.size if rank == root else None
    hc.gather_object(large, slots, root)  # makes the transport, and all that it makes once
    transport: Any = process_group.dispatcher.backends[OBJECTS]
    called: list[str] = []

    class Spy:
        def __getattr__(self, name: str) -> Any:
            called.append(name)
            return getattr(comm, name)

    comm = transport._comm
    monkeypatch.setattr(transport, "_comm", Spy())
    monkeypatch.setattr(type(transport._messages), "allgather", None)
    if "pickle" in kind:
        with pytest.raises(TypeError, match="on rank 0 of the group, a lock can't be pickled"):
            hc.gather_object(mine, slots, root)
    else:
        hc.gather_object(mine, slots, root)
        for source, each in enumerate(slots or []):
            expected = {"small": source, "large": large + source}.get(kind, source if source else large)
            assert np.array_equal(each, expected)
    assert called == ["Gather", "Bcast"]
