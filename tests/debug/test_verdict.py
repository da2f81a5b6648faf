"""The verdict, from made-up reports of 2 to 8 ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from hpccomm.debug.culprits import verdict
from hpccomm.debug.words import as_ranges

pytestmark = pytest.mark.serial

SIZES = range(2, 9)
NAMES = {"w": "world", "d": "dp"}


def is_in(name: str, number: int, group: str = "w", seconds: float = 30.0, **fields: Any) -> dict[str, Any]:
    """Return what a rank waits in."""
    known = {"dtype": "float32", "count": 1 << 20, "nbytes": 4 << 20, "op": "SUM", "where": "train.py:91"}
    if name == "barrier":
        known = {"where": "train.py:88"}
    record = {"name": name, "number": number, "group": group, "group_name": NAMES[group], **known}
    return {**record, "seconds": seconds, "waits": True, **fields}


def report(rank: int, size: int, *operations: Any, reached: Mapping[str, int] | None = None, **fields: Any) -> Any:
    """Return the report of a rank that is in these operations; in none: it computes."""
    reached = {**{each["group"]: each["number"] for each in operations}, **(reached or {})}
    members = fields.pop("members", {"w": range(size), "d": range(size)})
    groups = {
        key: {"name": NAMES[key], "ranks": as_ranges(members[key]), "collectives": reached.get(key, 0), "messages": 0}
        for key in members
        if rank in members[key]
    }
    known = {
        "operations": list(operations),
        "groups": groups,
        "left": False,
        "reason": "asked",
        "neighbours": {},
        "size": size,
    }
    return {"rank": rank, "program": "data.py:7 in load", **known, **fields}


def others(size: int, *culprits: int) -> list[int]:
    return [rank for rank in range(size) if rank not in culprits]


def text(found: Any) -> str:
    return "\n".join(found.lines)


def ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_in_the_program(size: int) -> None:
    late = size - 1
    reports = [report(rank, size, is_in("all_reduce", 41, "d")) for rank in others(size, late)]
    found = verdict([*reports, report(late, size, reached={"d": 40})], size)
    assert found.culprits == [late]
    waiting = others(size, late)
    verb = "waits" if len(waiting) == 1 else "wait"
    assert text(found) == (
        f"rank {late} never reached all_reduce #41 of 'dp' (4 MiB float32): it is in the program at data.py:7 in load "
        f"(its last collective: #40 of 'dp'); {ranks_in_words(waiting)} {verb} at train.py:91, for 30 s"
    )


@pytest.mark.parametrize("size", range(3, 9))
def test_a_rank_that_skipped_an_operation_and_waits_in_another_group(size: int) -> None:
    late = 1
    reports = [report(rank, size, is_in("all_reduce", 41, "d")) for rank in others(size, late)]
    found = verdict([*reports, report(late, size, is_in("barrier", 40), reached={"d": 40})], size)
    assert found.culprits == [late]
    assert (
        "rank 1 never reached all_reduce #41 of 'dp' (4 MiB float32): it is in barrier #40 of 'world', train.py:88, for"
        in text(found)
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"name": "reduce", "peer": 0}, "reduce (1048576 float32, SUM, root 0)"),
        ({"name": "barrier", "dtype": "", "op": ""}, "barrier"),
        ({"dtype": "float64"}, "all_reduce (1048576 float64, SUM)"),
        ({"count": 100}, "all_reduce (100 float32, SUM)"),
        ({"op": "MAX"}, "all_reduce (1048576 float32, MAX)"),
    ],
    ids=["other op", "other kind", "dtype", "size", "ReduceOp"],
)
def test_ranks_that_differ(size: int, other: dict[str, Any], said: str) -> None:
    reports = [report(rank, size, is_in("all_reduce", 5)) for rank in others(size, 1)]
    differing = {**is_in("all_reduce", 5, where="train.py:99"), **other}
    found = verdict([*reports, report(1, size, differing)], size)
    assert found.culprits == ([0, 1] if size == 2 else [1])  # of two ranks nobody knows which one is right
    assert "the ranks differ in operation #5 of 'world': " in text(found)
    assert f"rank 1 calls {said} at train.py:99" in text(found)
    assert "all_reduce (1048576 float32, SUM) at train.py:91" in text(found)


@pytest.mark.parametrize("size", SIZES)
def test_another_root(size: int) -> None:
    reports = [report(rank, size, is_in("reduce", 5, peer=int(rank == 1))) for rank in range(size)]
    found = verdict(reports, size)
    assert 1 in found.culprits
    assert "rank 1 calls reduce (1048576 float32, SUM, root 1)" in text(found)


@pytest.mark.parametrize("size", SIZES)
def test_two_groups_in_two_orders(size: int) -> None:
    half = size // 2
    reports = [report(rank, size, is_in("barrier", 3, "w" if rank < half else "d")) for rank in range(size)]
    for rank in range(size):  # nobody has been in the other group
        reports[rank]["groups"]["d" if rank < half else "w"]["collectives"] = 2
    found = verdict(reports, size)
    assert found.culprits
    assert "barrier #3 of 'world'" in text(found)
    assert "barrier #3 of 'dp'" in text(found)
    if size % 2 == 0:
        assert "wait for each other" in text(found)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tag", [None, 5])
def test_tags_are_named_where_no_message_has_the_right_one(size: int, tag: int | None) -> None:
    reports = [report(0, size, is_in("barrier", 1)), report(1, size, is_in("recv", 3, peer=0, tag=5), reached={"w": 0})]
    reports[0]["groups"]["w"]["sent"] = [[1, "9"], [1, "7"], [1, "9"], [size - 1, "4"]]
    reports[0]["groups"]["w"]["sent"] += [] if tag is None else [[1, f"{tag}"]]
    found = verdict(reports, size)
    few = "tags 4, 7, 9" if size == 2 else "tags 7, 9"
    said = f"rank 1 waits for a message with tag 5; the last from rank 0 to it have {few}"
    assert (said in found.lines) == (tag is None)


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_has_ended(size: int) -> None:
    reports = [report(rank, size, is_in("all_reduce", 41)) for rank in others(size, 0)]
    found = verdict([*reports, report(0, size, reached={"w": 40}, left=True)], size)
    assert found.culprits == [0]
    assert "rank 0 never reached all_reduce #41" in text(found)
    assert "it has come to the end of its program without that" in text(found)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("state", "said"), [("dead", "its process is gone"), ("stopped", "its process is stopped")])
def test_a_rank_that_is_stopped_or_dead(size: int, state: str, said: str) -> None:
    last = size - 1
    reports = [
        report(rank, size, is_in("all_reduce", 41), neighbours={state: as_ranges([last])})
        for rank in others(size, last)
    ]
    found = verdict(reports, size)
    assert found.culprits == [last]
    assert said in text(found)


def test_several_ranks_that_are_gone() -> None:
    gone = {"neighbours": {"dead": as_ranges([0, 2])}}
    found = verdict([report(1, 3, is_in("all_reduce", 41), **gone)], 3)
    assert "ranks 0, 2 never reached all_reduce #41 of 'world' (4 MiB float32): each process is gone" in text(found)


def test_a_rank_that_does_not_answer() -> None:
    found = verdict([report(0, 2, is_in("all_reduce", 41))], 2)
    assert found.culprits == [1]
    assert "it does not answer" in text(found)


def test_init_of_a_rank_that_never_calls_it() -> None:
    init = {"name": "init_process_group", "number": 0, "group": "", "group_name": "world", "where": "a.py:3"}
    waiting = {**init, "seconds": 30.0, "waits": True}
    reports = [report(rank, 3, waiting, members={}) for rank in (0, 2)]
    found = verdict(reports, 3)
    assert found.culprits == [1]
    assert "rank 1 never reached init_process_group" in text(found)
    assert "has it called init_process_group?" in text(found)


def message(name: str, peer: int | None, seconds: float = 30.0, group: str = "w") -> dict[str, Any]:
    return is_in(name, 7, group, seconds, peer=peer, tag=5, op="")


def test_messages_that_wait_for_each_other() -> None:
    found = verdict(
        [report(0, 3, message("recv", 1)), report(1, 3, message("recv", 2)), report(2, 3, message("recv", 0))], 3
    )
    assert found.culprits == [0, 1, 2]
    assert "ranks 0-2 wait for each other:" in text(found)
    assert "rank 1 is in recv #7 of 'world' (4 MiB float32) with rank 2 of the group, tag 5, train.py:91" in text(found)


def test_a_chain_ends_at_who_is_to_blame() -> None:
    # 0 waits for 1, 1 for 2, which computes; the barrier of 3 is nobody's fault but 2's
    reports = [
        report(0, 4, message("recv", 1)),
        report(1, 4, message("recv", 2)),
        report(2, 4),
        report(3, 4, is_in("barrier", 2)),
    ]
    found = verdict(reports, 4)
    assert found.culprits == [2]
    assert "rank 2 has not answered recv #7" in text(found)
    assert "rank 2 never reached barrier #2" in text(found)


def test_who_waits_for_a_moment_does_not_count() -> None:
    # ranks 0 and 1 hang; 3 has just begun to wait for 2, which computes
    reports = [
        report(0, 4, message("recv", 1)),
        report(1, 4, message("recv", 0)),
        report(2, 4),
        report(3, 4, message("recv", 2, 0.1)),
    ]
    assert verdict(reports, 4).culprits == [0, 1]


def test_a_root_that_is_through_is_not_waited_for() -> None:
    # the root of a broadcast has left; of the others one has never come
    reports = [
        report(0, 3, reached={"w": 6}),
        report(1, 3, is_in("broadcast", 6, peer=0)),
        report(2, 3, reached={"w": 5}),
    ]
    assert verdict(reports, 3).culprits == [2]


def test_a_work_that_nobody_waits_for() -> None:
    lying = {**is_in("all_reduce", 6, async_op=True, op=""), "waits": False}
    reports = [report(0, 2, is_in("all_reduce", 6, async_op=True, op="")), report(1, 2, lying)]
    reports[1]["groups"]["w"]["collectives"] = 6
    found = verdict(reports, 2)
    assert found.culprits == [1]
    assert "rank 1 has begun all_reduce #6 of 'world' (4 MiB float32) and does not wait for it" in text(found)


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_has_left_an_operation(size: int) -> None:
    # rank 1 has caught an error of all_reduce #2 and gone on
    reports = [report(rank, size, is_in("all_reduce", 2)) for rank in others(size, 1)]
    found = verdict([*reports, report(1, size, is_in("barrier", 3))], size)
    assert found.culprits == [1]
    assert "rank 1 has left all_reduce #2 of 'world' (4 MiB float32), and is in barrier #3 of 'world'" in text(found)


def test_groups_of_some_ranks() -> None:
    # evens hang on 2; the odds are nobody's business
    members = {"w": range(4), "d": (0, 2)}
    reports = [report(0, 4, is_in("all_reduce", 3, "d"), members=members)]
    reports += [report(rank, 4, members=members, reached={"d": 2}) for rank in (1, 2, 3)]
    assert verdict(reports, 4).culprits == [2]


def test_nobody_waits() -> None:
    found = verdict([report(rank, 3) for rank in range(3)], 3)
    assert (found.culprits, found.lines) == ([], ["no rank waits for another one"])
    assert verdict([], 3).culprits == []


def in_task(rank: int, size: int, seconds: float = 30.0, **fields: Any) -> Any:
    """Return the report of a rank that is in a task of an executor."""
    task = {"name": "task", "number": 3, "group": "w", "group_name": "world", "details": "load(7)"}
    return report(rank, size, tasks=[{**task, "where": "pool.py:9", "seconds": seconds}], **fields)


def test_tasks_are_named_where_nobody_waits() -> None:
    found = verdict([report(0, 3), in_task(1, 3), report(2, 3)], 3)
    task = "rank 1 is in task #3 of 'world' (load(7)), pool.py:9, for 30 s"
    assert (found.culprits, found.lines) == ([], ["no rank waits for another one", task])


def test_a_rank_that_is_waited_for_is_in_a_task() -> None:
    found = verdict([report(0, 3, is_in("barrier", 2, "d")), in_task(1, 3), report(2, 3, is_in("barrier", 2, "d"))], 3)
    assert found.culprits == [1]
    said = "rank 1 never reached barrier #2 of 'dp': it is in task #3 of 'world' (load(7)), pool.py:9, for 30 s"
    assert text(found).startswith(said)


def awaits(peer: int | None, seconds: float = 30.0) -> dict[str, Any]:
    """Return the wait of rank 0 for the result of a task."""
    task = {"name": "task", "number": 0, "group": "w", "group_name": "world", "details": "load(7)", "peer": peer}
    return {**task, "where": "pool.py:30", "seconds": seconds, "waits": True}


def test_the_rank_of_a_task_is_named_whose_result_is_waited_for() -> None:
    found = verdict([report(0, 4, awaits(2)), in_task(1, 4), in_task(2, 4), report(3, 4)], 4)
    task = "task #3 of 'world' (load(7)), pool.py:9, for 30 s"
    said = f"rank 2 has not answered task of 'world' (load(7)): it is in {task}; rank 0 waits at pool.py:30, for 30 s"
    assert (found.culprits, found.lines) == ([2], [said, f"rank 1 is in {task}"])


def test_a_task_that_no_rank_has_begun_waits_for_those_that_are_in_others() -> None:
    found = verdict([report(0, 3, awaits(None)), in_task(1, 3), in_task(2, 3)], 3)
    said = "ranks 1-2 have not answered task of 'world' (load(7)): each is in task #3 of 'world' (load(7)), pool.py:9"
    assert found.culprits == [1, 2]
    assert found.lines == [f"{said}, for 30 s; rank 0 waits at pool.py:30, for 30 s"]


def test_a_collective_in_a_task_waits_for_rank_0() -> None:
    in_barrier = in_task(1, 2, operations=[is_in("barrier", 2)])
    found = verdict([report(0, 2, awaits(1)), in_barrier], 2)
    assert (found.culprits, found.lines[0]) == ([0, 1], "ranks 0-1 wait for each other:")
    assert "  rank 0 waits for task of 'world' (load(7)) on rank 1 of the group, pool.py:30, for 30 s" in text(found)
    assert "  rank 1 is in barrier #2 of 'world', train.py:88, for 30 s, and waits for rank 0" in found.lines


def test_a_task_of_days_does_not_hide_a_hang_elsewhere() -> None:
    members = {"w": range(4), "d": [2, 3]}
    pair = [report(2, 4, is_in("barrier", 2, "d"), members=members), report(3, 4, members=members)]
    found = verdict([report(0, 4, awaits(1, 9e5)), in_task(1, 4, 9e5), *pair], 4)
    assert found.culprits == [3]
    assert "never reached barrier #2 of 'dp'" in text(found)


def test_a_task_in_a_call_of_c_may_take_its_time() -> None:
    stands = {"stands": 99.0}
    assert verdict([report(0, 2, **stands), report(1, 2, **stands)], 2).standstill == 99
    found = verdict([report(0, 2, **stands), in_task(1, 2, **stands)], 2)
    assert (found.culprits, found.standstill) == ([], 0)
    assert "rank 1 is in task #3" in text(found)


# -- what the ranks differ in ------------------------------------------------------------------------


def test_one_calls_blocking_and_the_other_asynchronously() -> None:
    asynchronous = is_in("all_reduce", 12, async_op=True, op="", where="join.py:7")
    found = verdict([report(0, 2, is_in("all_reduce", 12)), report(1, 2, asynchronous)], 2)
    assert found.culprits == [0, 1]
    assert "rank 0 calls all_reduce (1048576 float32, SUM) at train.py:91" in text(found)
    assert "rank 1 calls all_reduce (1048576 float32, asynchronous) at join.py:7" in text(found)
    assert text(found).endswith(": MPI does not match a blocking call with an asynchronous one")


def test_the_asynchronous_one_lies() -> None:
    lying = {**is_in("all_reduce", 12, async_op=True, op=""), "waits": False}
    reports = [report(0, 2, is_in("all_reduce", 12)), report(1, 2, lying)]
    found = verdict(reports, 2)
    assert found.culprits == [1]
    assert (
        "rank 1 has begun all_reduce #12 of 'world' (4 MiB float32) asynchronously, and rank 0 calls it as a blocking "
        "operation, which MPI does not match: it is in the program at data.py:7 in load"
    ) in text(found)


@pytest.mark.parametrize("form", ["", "_coalesced"])
def test_sizes_are_compared_wherever_they_have_to_be_the_same(form: str) -> None:
    name = f"all_gather_single{form}"
    reports = [report(rank, 3, is_in(name, 4, op="", count=8 + 2 * (rank == 1))) for rank in range(3)]
    found = verdict(reports, 3)
    assert found.culprits == [1]
    assert f"rank 1 calls {name} (10 float32)" in text(found)


def test_dtypes_are_compared_where_sizes_may_differ() -> None:
    dtypes = ["float32", "float64", "float32"]
    reports = [report(rank, 3, is_in("all_reduce_sparse", 4, dtype=dtypes[rank], count=rank)) for rank in range(3)]
    assert verdict(reports, 3).culprits == [1]


def test_each_rank_sends_what_it_wants_to_in_a_sparse_exchange() -> None:
    sent = [("float32", 4), ("int16", 2), ("", 0)]
    waits = [is_in("exchange_sparse", 4, dtype=dtype, count=count, op="") for dtype, count in sent]
    found = verdict([report(rank, 4, each) for rank, each in enumerate(waits)] + [report(3, 4)], 4)
    assert found.culprits == [3]
    assert "the ranks differ" not in text(found)


def test_who_has_waited_for_less_time_is_compared_too() -> None:
    # rank 1 has begun late, with another size
    own = is_in("all_reduce", 2, seconds=3.0, count=9, where="train.py:99")
    found = verdict([report(0, 3, is_in("all_reduce", 2)), report(1, 3, own), report(2, 3, is_in("all_reduce", 2))], 3)
    assert found.culprits == [1]
    assert "rank 1 calls all_reduce (9 float32, SUM) at train.py:99" in text(found)


def test_split_sizes_that_do_not_fit() -> None:
    fitting: list[list[list[int]]] = [[[2, 2, 2], [2, 3, 2]], [[3, 2, 1], [2, 2, 2]], [[2, 2, 2], [2, 3, 2]]]
    # rank 1 sends 3, 2, 1 where the others expect 3, 3; and ranks 0 and 2 send it 2 each, as it expects
    reports = [report(rank, 3, is_in("all_to_all_single", 4, op="", sizes=fitting[rank])) for rank in range(3)]
    reports[0]["operations"][0]["sizes"] = [[2, 2, 2], [2, 3, 2]]
    found = verdict(reports, 3)
    assert found.culprits == [1, 2]
    assert (
        "the ranks differ in operation #4 of 'world': rank 1 sends 1 elements to rank 2 at train.py:91, "
        "which expects 3 at train.py:91"
    ) in text(found)


def test_a_rank_all_of_whose_split_sizes_are_wrong() -> None:
    sizes = [[[2, 2, 2], [2, 2, 2]] for _ in range(3)]
    sizes[1] = [[3, 2, 1], [2, 2, 2]]
    reports = [report(rank, 3, is_in("all_to_all_single", 4, op="", sizes=sizes[rank])) for rank in range(3)]
    assert verdict(reports, 3).culprits == [1]


def test_another_list_of_ranks_for_a_new_group() -> None:
    ranks = ["ranks 0, 1", "ranks 0, 1, 2", "ranks 0, 1"]
    reports = [
        report(rank, 3, is_in("new_group", 4, dtype="", op="", details=ranks[rank], where="groups.py:2"))
        for rank in range(3)
    ]
    found = verdict(reports, 3)
    assert found.culprits == [1]
    assert "ranks 0, 2 call new_group (ranks 0, 1) at groups.py:2" in text(found)
    assert "rank 1 calls new_group (ranks 0, 1, 2) at groups.py:2" in text(found)


# -- what the ranks have called before -----------------------------------------------------------------


def with_past(said: Any, *recent: tuple[Any, ...]) -> Any:
    """Add to a report what else it says of the last collectives of the world."""
    said["groups"]["w"]["recent"] = [list(each) for each in recent]
    return said


def test_a_rank_that_has_left_another_operation() -> None:
    # rank 1 has called reduce where the others call all_reduce, and is through
    reports = [
        with_past(report(rank, 3, is_in("all_reduce", 1)), (1, "all_reduce", "float32", 4 << 20)) for rank in (0, 2)
    ]
    reports.append(with_past(report(1, 3, is_in("barrier", 2)), (1, "reduce", "float32", 96), (2, "barrier", "", 0)))
    found = verdict(reports, 3)
    assert found.culprits == [1]
    assert text(found) == (
        "the ranks differ in operation #1 of 'world': "
        "ranks 0, 2 call all_reduce (1048576 float32, SUM) at train.py:91; "
        "rank 1 has called reduce (96 B float32)"
    )


def test_a_rank_whose_earlier_operation_had_another_dtype() -> None:
    past = [(1, "all_reduce_sparse", "float32", 0), (2, "barrier", "", 0)]
    reports = [with_past(report(rank, 3, is_in("barrier", 2)), *past) for rank in (0, 1)]
    reports.append(with_past(report(2, 3, is_in("all_gather", 3)), (1, "all_reduce_sparse", "float64", 0)))
    found = verdict(reports, 3)
    assert found.culprits == [2]
    assert "rank 2 has called all_reduce_sparse (0 B float64)" in text(found)


def test_an_operation_that_is_no_small_one() -> None:
    # of the small operations of ranks 0 and 2 only the number is known
    reports = [with_past(report(rank, 3, is_in("all_reduce", 3))) for rank in (0, 2)]
    reports.append(with_past(report(1, 3, is_in("barrier", 2)), (1, "monitored_barrier", "", 0), (2, "barrier", "", 0)))
    for each in reports:
        each["groups"]["w"]["collectives"] = 3 - (each["rank"] == 1)
    found = verdict(reports, 3)
    assert found.culprits == [1]
    assert "rank 1 has called monitored_barrier" in text(found)
    assert (
        "ranks 0, 2 have called one of all_gather, all_gather_coalesced, all_gather_single, all_gather_single_coalesced"
        in text(found)
    )


def test_small_operations_that_may_have_been_the_same() -> None:
    reports = [
        with_past(report(rank, 2, is_in("recv", 7, peer=1 - rank, op="")), (1, "all_reduce", "int8", 8))
        for rank in (0, 1)
    ]
    reports[0]["groups"]["w"] |= {"recent": [], "collectives": 1}
    assert "wait for each other" in text(verdict(reports, 2))


def small(number: int, name: str = "all_reduce", op: str = "SUM", root: int | None = None) -> tuple[Any, ...]:
    """Return what a report says of a collective that took the compiled fast path."""
    return number, name, "float64", 8, 1, op, root, False


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (small(2, op="MAX"), "all_reduce (1 float64, MAX)"),
        (small(2, "broadcast", "", 1), "broadcast (1 float64, root 1)"),
        ((2, "all_reduce", "float64", 16, 2, "SUM", None, False), "all_reduce (2 float64, SUM)"),
    ],
    ids=["ReduceOp", "operation", "size"],
)
def test_small_operations_that_differ_and_have_passed(other: tuple[Any, ...], said: str) -> None:
    reports = []
    for rank in range(3):
        past = [small(1), other if rank == 1 else small(2), *map(small, range(3, 20))]
        is_waiting = is_in("recv", 1, peer=0, op="") if rank == 1 else is_in("barrier", 20)
        reports.append(with_past(report(rank, 3, is_waiting), *past))
        reports[rank]["groups"]["w"]["collectives"] = 19 + (rank != 1)
    found = verdict(reports, 3)
    assert found.culprits == [1]
    assert text(found) == (
        "the ranks differ in operation #2 of 'world': ranks 0, 2 have called all_reduce (1 float64, SUM); "
        f"rank 1 has called {said}"
    )


def test_small_operations_that_were_the_same_are_not_told_of() -> None:
    reports = [with_past(report(rank, 3, is_in("barrier", 4)), *map(small, (1, 2, 3))) for rank in (0, 2)]
    reports.append(with_past(report(1, 3, is_in("recv", 1, peer=0, op="")), *map(small, (1, 2, 3))))
    reports[2]["groups"]["w"]["collectives"] = 3
    assert "wait for each other" in text(verdict(reports, 3))
    reports[2]["groups"]["w"]["recent"] = []  # without the extension only the number is known
    assert "wait for each other" in text(verdict(reports, 3))


def test_what_has_passed_is_told_beside_another_culprit() -> None:
    reports = [with_past(report(rank, 3, is_in("barrier", 3)), small(1), small(2)) for rank in (0, 2)]
    reports.append(with_past(report(1, 3, reached={"w": 2}), small(1), small(2, op="MAX")))
    found = verdict(reports, 3)
    assert found.culprits == [1]
    assert found.lines[0].startswith("rank 1 never reached barrier #3 of 'world'")
    assert found.lines[1].startswith("the ranks differ in operation #2 of 'world': ranks 0, 2 have called all_reduce (")


def test_the_last_collectives_of_who_is_late_are_named() -> None:
    reports = [report(rank, 3, is_in("barrier", 42)) for rank in (0, 2)]
    past = [small(number, "broadcast", "", 0) if number % 5 == 0 else small(number) for number in range(30, 41)]
    past[7] = past[7][:4]  # it has passed the checks
    late = with_past(report(1, 3, reached={"w": 41}), *past, (41, "monitored_barrier", "", 0))
    assert (
        "(its last collectives: #36-#39 all_reduce (8 B float64), #40 broadcast (8 B float64), #41 monitored_barrier "
        "of 'world')"
    ) in text(verdict([*reports, late], 3))


def test_what_has_been_dropped_is_not_compared() -> None:
    past = [(number, "barrier", "", 0) for number in range(12, 20)]
    reports = [
        with_past(report(0, 2, is_in("all_reduce", 21)), *past),
        with_past(report(1, 2, is_in("barrier", 20)), (11, "scan", "int8", 8)),
    ]
    reports[1]["groups"]["w"]["recent"] += [[number, "barrier", "", 0] for number in range(13, 20)]
    found = verdict(reports, 2)
    assert "scan" not in text(found)


def test_calls_that_are_no_operations_are_compared() -> None:
    past = [
        (1, "new_group (ranks 0, 1)", "", 0),
        (1, "new_group (ranks 0)", "", 0),
        (1, "new_group (ranks 0, 1)", "", 0),
    ]
    waiting = is_in("new_group", 2, dtype="", op="", details="ranks 0, 1", where="groups.py:2")
    reports = [with_past(report(rank, 3, is_in("barrier", 2) if rank else waiting), past[rank]) for rank in range(3)]
    found = verdict(reports, 3)
    assert found.culprits == [1]
    assert "ranks 1-2 call barrier at train.py:88" in text(found)
    assert "rank 0 calls new_group (ranks 0, 1) at groups.py:2" in text(found)
    assert "calls since #1: ranks 0, 2 new_group (ranks 0, 1), rank 1 new_group (ranks 0)" in text(found)


def test_a_call_is_not_named_again_as_a_call_before_it() -> None:
    reports = [report(rank, 3, is_in("all_reduce", 2)) for rank in (0, 2)]
    leaving = is_in("destroy", 2, dtype="", op="", where="train.py:2")
    reports.append(with_past(report(1, 3, leaving), (1, "destroy", "", 0)))
    assert text(verdict(reports, 3)) == (
        "the ranks differ in operation #2 of 'world': ranks 0, 2 call all_reduce (1048576 float32, SUM) at "
        "train.py:91; rank 1 calls destroy at train.py:2"
    )


def polls(name: str, peer: int | None) -> dict[str, Any]:
    return is_in(name, 0, peer=peer, dtype="", where="manager.py:9", seconds=0.0, waits=False, polls=True)


@pytest.mark.parametrize("name", ["Iprobe", "improbe", "Irecv"])
@pytest.mark.parametrize("peer", [1, None])
def test_the_search_goes_on_through_a_rank_that_polls(name: str, peer: int | None) -> None:
    waits = is_in("recv", 1, peer=0, dtype="")
    found = verdict([report(0, 3, polls(name, peer)), report(1, 3), report(2, 3, waits)], 3)
    assert found.culprits == [1]
    assert text(found) == (
        f"rank 1 has not answered {name} of 'world': it is in the program at data.py:7 in load; rank 0 asks for it "
        "again and again at manager.py:9"
    )


def test_a_rank_that_polls_is_named_where_nobody_else_is_late() -> None:
    waits = is_in("recv", 1, peer=0, dtype="")
    found = verdict([report(0, 3, polls("Iprobe", None)), report(1, 3, waits), report(2, 3, waits)], 3)
    assert found.culprits == [0]
    assert text(found).startswith("rank 0 has not answered recv #1 of 'world': it is in the program at data.py:7")


def test_a_chain_ends_at_the_one_that_waits_for_nobody() -> None:
    late = is_in("recv", 1, "d", peer=0, dtype="", seconds=3.0)
    found = verdict([report(0, 3), report(1, 3, late), report(2, 3, is_in("recv", 1, peer=1, dtype=""))], 3)
    assert found.culprits == [0]
    assert "rank 0 has not answered recv #1 of 'dp'" in text(found)
    assert text(found).endswith("; rank 1 waits at train.py:91, for 3.0 s")
