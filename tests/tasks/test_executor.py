"""A pool of ranks does what Python's own map and executors do."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
import hpccomm.debug
from hpccomm.tasks.messages import RemoteTraceback

from ..hooks import Noted
from ..launch import until

pytestmark = pytest.mark.usefixtures("process_group")
needs_two = pytest.mark.mpi(min_size=2)
needs_three = pytest.mark.mpi(min_size=3)


def square(x: float) -> float:
    return x * x


def ranks(_: object) -> int:
    return hc.get_rank()


def stretched(array: np.ndarray, factor: float) -> np.ndarray:
    assert array.flags.writeable
    return array * factor


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def pass_through(gate: Path) -> str:
    until(gate.exists, "open gate")
    return gate.name


def raises(kind: type[BaseException], *arguments: object) -> None:
    raise kind(*arguments)


def in_words(number: int) -> str:
    if number == 7:
        raise LookupError(f"no word for {number}")
    return str(number)


class Refuses(Noted):
    """A hook that keeps a task from being done."""

    def begin(self, operation: hc.Operation) -> None:
        if operation.name == "task" and str(operation.arguments["call"]) == "square(3)":
            raise ValueError(f"no {operation.arguments['call']} here")


class TwoArguments(Exception):
    """It has a pickle of which it can't be made."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen(Exception):
    """It takes no cause."""

    code: int


class Unloadable:
    """It has a pickle of which it can't be made."""

    def __init__(self, *making: Any) -> None:
        self._making = making or (math.sqrt, (-1.0,))

    def __reduce__(self) -> tuple[Any, ...]:
        return self._making


def unloadable(*making: Any) -> Unloadable:
    return Unloadable(*making)


def raises_with_a_note(text: str) -> None:
    error = TwoArguments(text, "soup")
    error.__notes__ = ["see the manual"]
    raise error


def stops(x: int) -> int:
    return x if x != 3 else next(iter(()))


def generator(n: int) -> Iterator[int]:
    return iter(lambda: n, 3)


_settings: dict[str, Any] = {}


def settings(_: object) -> dict[str, Any]:
    return _settings


def test_map_is_that_of_python() -> None:
    with hc.executor() as executor:
        if executor is not None:
            for chunksize in (1, 3, 100):
                assert list(executor.map(square, range(50), chunksize=chunksize)) == list(map(square, range(50)))
            assert list(executor.map(pow, range(5), [2, 3, 4])) == [0, 1, 16]
            assert list(executor.map(square, [])) == []
            calls = [(2, 5), (3, 2), (10, 3)]
            assert list(executor.starmap(pow, calls, chunksize=2)) == list(itertools.starmap(pow, calls))
            for chunksize in (1, 3):
                with pytest.raises(RuntimeError, match="StopIteration"):
                    list(executor.map(stops, range(9), chunksize=chunksize))
            assert executor.num_workers == max(1, hc.get_world_size() - 1)


def test_it_is_an_executor_of_python() -> None:
    with hc.executor() as executor:
        if executor is None:
            return
        assert isinstance(executor, concurrent.futures.Executor)
        futures = {executor.submit(pow, base, exp=3): base for base in range(8)}
        assert {f.result(): futures[f] for f in concurrent.futures.as_completed(futures)} == {n**3: n for n in range(8)}
        done, not_done = concurrent.futures.wait([executor.submit(sorted, [2, 1], reverse=True)])
        assert [each.result() for each in done] == [[2, 1]]
        assert not not_done
        called: list[object] = []
        came = threading.Event()
        future = executor.submit(square, 3)
        future.add_done_callback(lambda each: (called.append(each.result()), came.set()))
        assert came.wait(60)
        assert called == [9]
        assert future.exception() is None


def test_workers_get_none_and_do_the_tasks() -> None:
    with hc.executor() as executor:
        assert (executor is None) == (hc.get_rank() > 0)
        if executor is not None:
            expected = {0} if hc.get_world_size() == 1 else set(range(1, hc.get_world_size()))
            seen: set[int] = set()
            while seen < expected:  # a slow worker may come late to its first
                seen |= set(executor.map(ranks, range(20)))
            assert seen == expected
    hc.barrier()


def test_arrays_of_any_size_come_back_as_they_are() -> None:
    with hc.executor() as executor:
        if executor is not None:
            arrays = [np.arange(float(n)) for n in (0, 3, 1 << 12, 1 << 20)] + [np.eye(300)[::2, ::3]]
            for array, result in zip(arrays, executor.map(stretched, arrays, itertools.repeat(2.0)), strict=True):
                assert np.array_equal(result, 2 * array)
                result[:1] = 0  # writable


def test_results_come_one_by_one_in_order(tmp_path: Path) -> None:
    with hc.executor() as executor:
        if executor is not None:
            gates = [tmp_path / "open", tmp_path / "closed"]
            gates[0].touch()
            results = executor.map(pass_through, gates)
            assert next(results) == "open"
            gates[1].touch()
            assert list(results) == ["closed"]


@needs_three
def test_a_long_task_holds_up_one_worker_only(tmp_path: Path) -> None:
    with hc.executor() as executor:
        if executor is not None:
            gate = tmp_path / "gate"
            long = executor.submit(pass_through, gate)
            others = list(executor.map(ranks, range(50)))
            assert not long.done()
            assert len(set(others)) <= hc.get_world_size() - 2
            gate.touch()
            assert long.result() == "gate"


def test_an_exception_comes_with_the_traceback_of_the_worker() -> None:
    with hc.executor() as executor:
        if executor is None:
            return
        with pytest.raises(LookupError, match="no word for 7") as raised:
            list(executor.map(in_words, range(10)))
        if hc.get_world_size() > 1:
            assert isinstance(raised.value.__cause__, RemoteTraceback)
            text = str(raised.value.__cause__)
            assert "in in_words" in text
            assert "LookupError: no word for 7" in text
            assert ", in in_words(7):" in text
            assert str(Path(hc.__file__).parent) not in text
        with pytest.raises(SystemExit) as left:
            executor.submit(raises, SystemExit, 5).result()
        assert left.value.code == 5
        assert executor.submit(square, 2).result() == 4  # that worker has not left


WAYS = {  # to wait for tasks: of the executor, and of the Future of one that has not ended
    "result": lambda _, other: other.result(),
    "result with a time limit": lambda _, other: other.result(60),
    "exception": lambda _, other: other.exception(),
    "wait": lambda _, other: concurrent.futures.wait([other]),
    "as_completed": lambda _, other: list(concurrent.futures.as_completed([other])),
    "map": lambda executor, _: list(executor.map(square, [1, 2])),
    "shutdown": lambda executor, _: executor.shutdown(),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_a_callback_cannot_wait_for_its_own_thread(way: Callable[..., object], tmp_path: Path) -> None:
    with hc.executor() as executor:
        if executor is None:
            return
        gates = [tmp_path / "first", tmp_path / "other"]
        first, other = (executor.submit(pass_through, gate) for gate in gates)
        refused = hc.Future()

        def callback(_: object) -> None:
            try:
                way(executor, other)
            except BaseException as error:
                refused.set_exception(error)

        first.add_done_callback(callback)
        gates[0].touch()
        with pytest.raises(RuntimeError, match=r"can't wait for tasks.*add_done_callback, shutdown\(wait=False\)"):
            refused.result(60)
        gates[1].touch()
        assert other.result() == "other"
        assert list(executor.map(square, range(20))) == [x * x for x in range(20)]


def test_what_callbacks_may_do(tmp_path: Path) -> None:
    with hc.executor() as executor:
        if executor is None:
            return
        gates = [tmp_path / "first", tmp_path / "other"]
        done = executor.submit(square, 2)
        assert done.result() == 4
        first, other = (executor.submit(pass_through, gate) for gate in gates)
        found, last = hc.Future(), hc.Future()

        def callback(future: Any) -> None:
            found.set_result([future.result(), done.result(), list(concurrent.futures.as_completed([done, future]))])
            with pytest.raises(concurrent.futures.TimeoutError):
                other.result(timeout=0)
            assert not other.done()
            executor.submit(square, 3).add_done_callback(lambda each: last.set_result(each.result()))
            executor.shutdown(wait=False)

        first.add_done_callback(callback)
        gates[0].touch()
        name, number, completed = found.result(60)
        assert (name, number, set(completed)) == ("first", 4, {done, first})
        gates[1].touch()
        assert other.result() == "other"
        assert last.result(60) == 9
        executor.shutdown()


@needs_two
def test_what_cannot_be_pickled_is_an_error_that_says_so() -> None:
    with hc.executor() as executor:
        if executor is None:
            return
        cases = [
            (executor.submit(lambda: 1), TypeError, "can't be pickled .*top of a module"),
            (executor.submit(square, threading.Lock()), TypeError, r"square\(lock\) can't be pickled"),
            (executor.submit(generator, 3), TypeError, r"the result of generator\(3\), a callable_iterator, can't be"),
            (executor.submit(unloadable), TypeError, r"the result of unloadable\(\) can't be made of its pickle"),
            (executor.submit(square, Unloadable()), TypeError, "a call can't be made of its pickle on rank"),
            (executor.submit(square, Unloadable(sys.exit, (3,))), TypeError, "a call can't be made of its pickle on"),
            (executor.submit(unloadable, sys.exit, (3,)), TypeError, "can't be made of its pickle .SystemExit"),
            (executor.submit(raises_with_a_note, "pepper"), hc.DistError, "raised .*TwoArguments: pepper in soup"),
            (
                executor.submit(raises, TwoArguments, "salt", "soup"),
                hc.DistError,
                "raised .*TwoArguments: salt in soup",
            ),
            (
                executor.submit(raises, Frozen, 10**5000),
                hc.DistError,
                r"raises\(type, int\) on rank \d raised .*Frozen",
            ),
        ]
        for future, kind, text in cases:
            with pytest.raises(kind, match=text):
                future.result()
        assert executor.submit(square, 2).result() == 4


def test_futures_are_cancelled_before_they_begin(tmp_path: Path) -> None:
    with hc.executor() as executor:
        if executor is not None:
            first, second = tmp_path / "first", tmp_path / "second"
            busy = [executor.submit(pass_through, first) for _ in range(executor.num_workers)]
            waiting = [executor.submit(square, k) for k in range(5)]
            assert waiting[-1].cancel()
            first.touch()
            assert [each.result() for each in waiting[:-1]] == [0, 1, 4, 9]
            assert waiting[-1].cancelled()
            assert all(each.result() == "first" for each in busy)
            busy = [executor.submit(pass_through, second) for _ in range(executor.num_workers)]
            until(lambda: all(each.running() for each in busy), "task that has begun")
            assert not busy[0].cancel()
            waiting = [executor.submit(square, k) for k in range(5)]
            executor.shutdown(wait=False, cancel_futures=True)
            assert all(each.cancelled() for each in waiting)
            with pytest.raises(RuntimeError, match="after shutdown"):
                executor.submit(square, 1)
            second.touch()
            executor.shutdown()
            assert all(each.result() == "second" for each in busy)


def test_map_has_a_timeout(tmp_path: Path) -> None:
    with hc.executor() as executor:
        if executor is not None:
            gate = tmp_path / "gate"
            results = executor.map(pass_through, [gate] * 3, timeout=0.01)
            with pytest.raises(concurrent.futures.TimeoutError):
                list(results)
            gate.touch()


def test_the_initializer_is_called_once_by_each_worker() -> None:
    with hc.executor(initializer=lambda **_: None) as executor:
        if executor is not None:
            assert executor.submit(square, 3).result() == 9
    _settings.clear()
    with hc.executor(initializer=_settings.update, initargs=({"scale": hc.get_rank()},)) as executor:
        if executor is not None:
            own = 0 if hc.get_world_size() == 1 else 1
            assert executor.submit(settings, 0).result()["scale"] >= own


def test_hooks_and_recordings_have_the_tasks_of_their_rank() -> None:
    group = hc.new_group()
    noted = Noted()
    before = group.message_number
    with hpccomm.debug.record(), group.register_hook(noted), hc.executor(group) as executor:
        if executor is not None:
            assert list(executor.map(square, range(9))) == [x * x for x in range(9)]
            with pytest.raises(LookupError):
                executor.submit(in_words, 7).result()
    tasks = [each for each in noted.ended if each.name == "task"]
    records = [each for each in hpccomm.debug.recorded() if each.name == "task"]
    assert [(each.number, each.details, each.state) for each in records] == [
        (before + place + 1, str(each.arguments["call"]), "completed" if each.error is None else "failed")
        for place, each in enumerate(tasks)
    ]
    assert all(each.group_name == group.name and each.is_a_message and each.end >= each.begin for each in records)
    assert group.message_number == before + len(records)
    for each in tasks:
        assert each.arrays == []
        if each.arguments["call"].fn is in_words:
            assert isinstance(each.error, LookupError)
        else:  # of map: a chunk of one call
            assert [f"square({math.isqrt(result)})" for result in each.outcome] == [str(each.arguments["call"])]
    done: list[list[str]] = [[]] * group.size
    hc.all_gather_object(done, [str(each.arguments["call"]) for each in tasks])
    assert sorted(itertools.chain(*done)) == sorted([f"square({x})" for x in range(9)] + ["in_words(7)"])
    assert group.size == 1 or done[0] == []


def test_what_a_hook_raises_is_the_error_of_the_task() -> None:
    group = hc.new_group()
    with group.register_hook(Refuses()), hc.executor(group) as executor:
        if executor is not None:
            with pytest.raises(ValueError, match=r"no square\(3\) here"):
                list(executor.map(square, [1, 2, 3]))
            assert executor.submit(square, 4).result() == 16


def test_an_initializer_that_fails_breaks_the_executor() -> None:
    with hc.executor(initializer=in_words, initargs=(7,)) as executor:
        if executor is not None:
            with pytest.raises(concurrent.futures.BrokenExecutor):
                executor.submit(square, 1).result()
            with pytest.raises(concurrent.futures.BrokenExecutor):
                executor.submit(square, 1)
    hc.barrier()


def test_workers_are_released_where_the_block_raises() -> None:
    def block() -> None:
        with hc.executor() as executor:
            if executor is not None:
                executor.map(sleep, [0.01] * 20)
                raise KeyError("of the block")

    if hc.get_rank() == 0:
        with pytest.raises(KeyError, match="of the block"):
            block()
    else:
        block()
    hc.barrier()
    with hc.executor() as executor:  # another one, at once
        if executor is not None:
            assert executor.submit(square, 2).result() == 4


@needs_two
def test_a_block_without_if_ends_on_workers_where_it_uses_the_executor() -> None:
    reached = []
    with hc.executor() as executor:
        reached.append(1)
        assert list(executor.map(square, [1, 2])) == [1, 4]  # type: ignore[union-attr]
        reached.append(2)
    assert reached == ([1, 2] if hc.get_rank() == 0 else [1])

    def block() -> None:
        with hc.executor() as executor:
            if executor is None:
                executor.color  # type: ignore[attr-defined]  # noqa: B018

    if hc.get_rank() > 0:
        with pytest.raises(AttributeError, match="color"):
            block()
    else:
        block()


@needs_two
def test_an_executor_of_a_part_of_the_world() -> None:
    group = hc.new_group([0, hc.get_world_size() - 1])
    with hc.executor(group) as executor:
        if executor is not None:
            assert set(executor.map(ranks, range(5))) == {hc.get_world_size() - 1}
    halves = hc.split_group(color=hc.get_rank() % 2)
    with hc.executor(halves) as executor:  # two at the same time
        if executor is not None:
            assert list(executor.map(square, range(9))) == list(map(square, range(9)))


def nested(_: object) -> str:
    with hc.ProcessGroup.from_comm(__import__("mpi4py.MPI").MPI.COMM_SELF) as alone, hc.executor(alone) as inner:
        assert inner is not None
        assert inner.submit(square, 4).result() == 16
    try:
        with hc.executor():
            return "no error"
    except hc.DistError as error:
        return str(error)


@needs_two
def test_nested_executors() -> None:
    with hc.executor() as executor:
        if executor is not None:
            with pytest.raises(hc.DistError, match="this rank is in the block of the executor of 'world', and so"):
                hc.executor()
            assert "is in the block of the executor of 'world'" in executor.submit(nested, 0).result()


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="task_timeout is 0 s"):
        hc.executor(task_timeout=0)
    with pytest.raises(TypeError, match="task_timeout is 'long'"):
        hc.executor(task_timeout="long")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="initializer is 3"):
        hc.executor(initializer=3)  # type: ignore[arg-type]
    block = hc.executor()
    with block as executor:
        if executor is not None:
            with pytest.raises(ValueError, match="chunksize is 0"):
                executor.map(square, [1], chunksize=0)
    with pytest.raises(RuntimeError, match="can be entered once"), block:
        pass


def test_many_executors_leave_nothing_behind() -> None:
    def threads() -> int:
        return sum(thread.name == "hpccomm-executor" for thread in threading.enumerate())

    for _ in range(20):
        with hc.executor() as executor:
            if executor is not None:
                assert executor.submit(square, 3).result() == 9
    until(lambda: threads() == 0, "end of the threads")
