"""The verdict from made-up recordings of 2 to 8 ranks, each with one thing wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hpccomm.debug.records import Record
from hpccomm.debug.trace.files import GroupInfo, Trace
from hpccomm.debug.trace.history import history

pytestmark = pytest.mark.serial

SIZES = [2, 3, 4, 8]
every_size = pytest.mark.parametrize("n", SIZES)


class Rank:
    """Makes the recording of one rank; groups are named by letters."""

    def __init__(self, rank: int, size: int, **groups: Sequence[int]) -> None:
        everyone = {"world": range(size), **groups}
        self.trace = Trace(rank, size)
        for name, ranks in everyone.items():
            if rank in ranks:
                self.trace.groups[name] = GroupInfo(name, tuple(ranks))

    def call(self, name: str = "all_reduce", group: str = "world", state: str = "completed", **fields: Any) -> Record:
        about = self.trace.groups[group]
        is_message = name in ("send", "recv", "sendrecv", "task")
        about.messages += is_message
        about.collectives += not is_message
        number = about.messages if is_message else about.collectives
        begin = 100.0 + len(self.trace.records) + 0.001 * self.trace.rank
        op = "SUM" if name == "all_reduce" else ""
        what: dict[str, Any] = {"dtype": "float32", "count": 4, "nbytes": 16, "op": op, **fields}
        end = begin + 0.5 if state != "in flight" else 0.0
        record = Record(name, number, group, group, **what, begin=begin, end=end)
        record.state = state
        record.where = record.where or f"train.py:{len(self.trace.records) + 1}"
        self.trace.records.append(record)
        return record

    def forget(self, count: int) -> None:
        """The ring is full: lose the oldest."""
        del self.trace.records[:count]


def job(n: int, **groups: Sequence[int]) -> list[Rank]:
    ranks = [Rank(rank, n, **groups) for rank in range(n)]
    for _ in range(3):
        for each in ranks:
            each.call()
    return ranks


def verdict(ranks: list[Rank]) -> Any:
    return history([each.trace for each in ranks])


def others(n: int) -> str:
    return {2: "rank 0", 3: "ranks 0-1"}.get(n, f"ranks 0-{n - 2}")


@every_size
def test_ranks_that_agree(n: int) -> None:
    ranks = job(n)
    found = verdict(ranks)
    assert (found.culprits, found.lines, found.marks) == ([], [], set())
    assert history([]).lines == []


@every_size
@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ({}, {"name": "broadcast", "peer": 0}, "broadcast (4 float32, root 0)"),
        ({}, {"op": "MAX"}, "all_reduce (4 float32, MAX)"),
        ({}, {"dtype": "int32"}, "all_reduce (4 int32, SUM)"),
        ({}, {"count": 5}, "all_reduce (5 float32, SUM)"),
        ({"name": "broadcast", "peer": 0}, {"name": "broadcast", "peer": 1}, "broadcast (4 float32, root 1)"),
        ({"state": "in flight"}, {"state": "in flight", "async_op": True}, "all_reduce (4 float32, SUM, asynchronous)"),
    ],
    ids=["operation", "op", "dtype", "count", "root", "async"],
)
def test_one_rank_calls_something_else(n: int, right: Any, wrong: Any, said: str) -> None:
    ranks = job(n)
    for each in ranks[:-1]:
        each.call(**right)
    ranks[-1].call(**wrong)
    found = verdict(ranks)
    assert found.culprits == ([0, 1] if n == 2 else [n - 1])
    assert found.marks == {("world", 4)}
    (line, *_) = found.lines
    assert line.startswith("collective #4 of group 'world' differs: ")
    assert f"{others(n)} call" in line
    assert f"rank {n - 1} calls {said} at train.py:4" in line


def test_what_may_differ() -> None:
    ranks = job(3)
    for each in ranks:
        each.call("all_gather", count=4 + each.trace.rank)
        each.call("gather", count=4 if each.trace.rank else 16, peer=0)
        each.call(async_op=each.trace.rank == 1)  # all of them have ended
    assert verdict(ranks).culprits == []


@every_size
@pytest.mark.parametrize("state", ["in flight", "completed"])
def test_one_rank_skips_the_last(n: int, state: str) -> None:
    ranks = job(n)
    for each in ranks[:-1]:
        each.call(state=state)
    found = verdict(ranks)
    assert found.culprits == [n - 1]
    assert found.lines[0].startswith(
        f"rank {n - 1} never reached all_reduce #4 of 'world' (16 B float32); {others(n)} "
    )
    assert found.lines[0].endswith("there at train.py:4")
    assert (
        f"rank {n - 1}: its last operation was all_reduce #3 of 'world' (16 B float32) at train.py:3" in found.lines[1]
    )


@every_size
def test_one_rank_skips_one_in_the_middle(n: int) -> None:
    ranks = job(n)
    for each in ranks:
        if each is not ranks[-1]:
            each.call("barrier", dtype="", count=0)
        each.call("broadcast", peer=0)
        each.call()
    found = verdict(ranks)
    assert found.marks == {("world", 4)}
    assert f"rank {n - 1} calls broadcast" in found.lines[0]
    if n > 2:
        assert found.lines[1] == f"rank {n - 1} may have left out what the others call #4: it fits their #5"


def test_one_rank_calls_one_more() -> None:
    ranks = job(3)
    ranks[0].call("barrier", dtype="", count=0)
    for each in ranks:
        each.call("broadcast", peer=0)
        each.call()
    found = verdict(ranks)
    assert found.culprits == [0]
    assert found.lines[1] == "rank 0 may have called one more than the others, #4"


def test_alike_operations_one_of_which_is_skipped_are_told_apart_by_their_lines() -> None:
    ranks = job(3)
    for line in range(10, 15):
        for each in ranks:
            if (each.trace.rank, line) != (1, 11):
                each.call(
                    where=f"train.py:{line}", state="in flight" if line == 14 and each.trace.rank != 1 else "completed"
                )
    found = verdict(ranks)
    assert found.culprits == [1]
    assert found.lines[-1] == (
        "  they have called from different lines since #5: rank 1 at train.py:12, rank 0 at train.py:11"
    )


@every_size
def test_other_order_in_one_group(n: int) -> None:
    ranks = job(n)
    for each in ranks:
        for name in ("scan", "exscan") if each is not ranks[-1] else ("exscan", "scan"):
            each.call(name)
    found = verdict(ranks)
    assert found.marks == {("world", 4)}
    assert len(found.lines) == 1  # neither left out nor one more


@every_size
def test_other_order_of_two_groups(n: int) -> None:
    ranks = job(n, dp=range(n))
    for each in ranks[:-1]:
        each.call(group="dp", state="in flight")
    ranks[-1].call(group="world", state="in flight")
    found = verdict(ranks)
    assert found.culprits == ([0, 1] if n == 2 else [n - 1])
    assert found.marks == {("dp", 1), ("world", 4)}
    assert found.lines[0].startswith("ranks wait for each other: ")
    assert f"{others(n)} {'is' if n == 2 else 'are'} in all_reduce #1 of 'dp'" in found.lines[0]
    assert f"rank {n - 1} is in all_reduce #4 of 'world'" in found.lines[0]


def test_one_rank_calls_on_another_group() -> None:
    ranks = job(4, dp=[2, 3])
    for each in ranks[:-1]:
        each.call(state="in flight")
    ranks[3].call(group="dp", state="in flight")
    found = verdict(ranks)
    assert found.culprits == [3]
    assert "ranks 0-2 are in all_reduce #4 of 'world'" in found.lines[0]


@every_size
def test_two_groups_interleaved_and_one_is_wrong(n: int) -> None:
    ranks = job(n, dp=range(n))
    for step in range(4):
        for each in ranks:
            each.call(group="dp", op="MAX")
            wrong = step == 2 and each is ranks[-1]
            each.call(group="world", count=8 if wrong else 4)
    found = verdict(ranks)
    assert found.marks == {("world", 6)}
    assert "#6 of group 'world'" in found.lines[0]


def test_who_waits_in_another_group_is_not_to_blame() -> None:
    ranks = job(4, a=[0, 1], b=[1, 2])
    ranks[0].call(group="a", state="in flight")  # waits for 1,
    ranks[1].call(group="b", state="in flight")  # who waits for 2, who has ended
    found = verdict(ranks)
    assert found.culprits == [2]
    assert "rank 2 never reached all_reduce #1 of 'b'" in found.lines[0]


def test_a_rank_waits_for_a_message_and_the_others_for_it() -> None:
    ranks = job(3)
    ranks[0].call("recv", peer=2, state="in flight", tag=1)
    ranks[1].call(state="in flight")
    found = verdict(ranks)  # rank 2 has ended without either
    assert found.culprits == [2]
    ranks[2].call(state="in flight")
    found = verdict(ranks)
    assert found.culprits == [0]
    assert "rank 0 is in recv #1 of 'world'" in found.lines[0]


@every_size
def test_only_what_all_have_is_compared(n: int) -> None:
    ranks = job(n)
    ranks[0].trace.records[0].op = "MAX"  # it was wrong, but rank 1 has forgotten it
    ranks[1].forget(2)
    assert verdict(ranks).culprits == []
    ranks[1].forget(1)  # it has nothing left
    assert verdict(ranks).culprits == []
    for each in ranks[:-1]:
        each.call()
    assert verdict(ranks).culprits == [n - 1]


def test_a_program_that_goes_on_has_no_culprit_because_a_rank_is_behind() -> None:
    ranks = job(3)
    for each in ranks[:-1]:
        each.call(state="in flight")
    ranks[2].trace.is_final = False
    assert verdict(ranks).culprits == []


def test_ranks_without_a_recording() -> None:
    ranks = job(4)
    found = verdict([ranks[0], ranks[2]])
    assert found.culprits == []
    assert found.lines == ["there is no recording of ranks 1, 3"]
    for rank in (0, 1, 2):
        ranks[rank].call(state="in flight")
    found = verdict(ranks[:3])
    assert found.culprits == [3]
    assert "rank 3: there is no recording of it" in found.lines[1]


def test_tasks_are_no_messages_and_are_named_while_they_last() -> None:
    ranks = job(3)
    for number, each in enumerate(ranks[1:]):
        for _ in range(number + 1):
            each.call("task", dtype="", details="load(7)")
    ranks[0].call("send", peer=2)
    ranks[2].call("recv", peer=0)
    assert verdict(ranks).lines == []
    ranks[1].call("task", dtype="", details="load(8)", state="in flight", where="pool.py:9")
    found = verdict(ranks)
    assert (found.culprits, found.lines) == ([], ["rank 1 is in task #2 of 'world' (load(8)) at pool.py:9"])


def messages(sent: int, received: int) -> Iterator[list[Rank]]:
    ranks = job(2)
    for _ in range(sent):
        ranks[0].call("send", peer=1, tag=0)
    for number in range(received):
        ranks[1].call("recv", peer=0, tag=0, state="completed" if number < sent else "in flight")
    yield ranks


@pytest.mark.parametrize(("sent", "received"), [(2, 2), (2, 1), (1, 2)])
def test_messages_without_a_partner(sent: int, received: int) -> None:
    (ranks,) = messages(sent, received)
    found = verdict(ranks)
    if sent == received:
        assert found.culprits == []
        return
    assert found.culprits == [0, 1]
    assert found.lines[0].startswith(
        f"rank 0 has sent {sent} to rank 1, which has received {received} in group 'world'"
    )
    ranks[1].call("recv", peer=None)  # from any: who knows
    assert verdict(ranks).culprits == []
