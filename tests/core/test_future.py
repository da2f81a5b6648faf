from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import pytest

import hpccomm as hc

pytestmark = pytest.mark.serial


def test_value_before_completion_is_an_error() -> None:
    future = hc.Future()
    with pytest.raises(RuntimeError, match=r"not completed; call wait\(\)"):
        future.value()
    future.set_result(3)
    assert future.done()
    assert future.value() == 3
    assert future.wait() == 3


def test_wait_for_too_long() -> None:
    with pytest.raises(concurrent.futures.TimeoutError):
        hc.Future().wait(0.01)


def test_a_result_is_set_once() -> None:
    future = hc.Future()
    future.set_result(1)
    with pytest.raises(concurrent.futures.InvalidStateError):
        future.set_result(2)


def test_then_on_a_completed_future_runs_at_once() -> None:
    future = hc.Future()
    future.set_result(20)
    assert future.then(lambda f: f.value() + 1).value() == 21


def test_an_error_in_a_callback_reaches_the_chained_future() -> None:
    future = hc.Future()
    chained = future.then(lambda _: 1 / 0)
    after = chained.then(lambda f: f.value())
    future.set_result(None)
    for each in (chained, after):
        with pytest.raises(ZeroDivisionError):
            each.value()


def test_an_exception_is_raised_by_wait_and_value() -> None:
    future = hc.Future()
    future.set_exception(KeyError("x"))
    for read in (future.wait, future.value):
        with pytest.raises(KeyError):
            read()


def test_collect_all_waits_for_all_and_keeps_errors_apart() -> None:
    futures = [hc.Future() for _ in range(3)]
    together = hc.collect_all(futures)
    futures[1].set_exception(ValueError("one"))
    futures[2].set_result(2)
    assert not together.done()
    futures[0].set_result(0)
    assert together.value() == futures
    assert [future.exception() is None for future in together.value()] == [True, False, True]


def test_collect_all_from_many_threads() -> None:
    futures = [hc.Future() for _ in range(64)]
    together = hc.collect_all(futures)
    threads = [threading.Thread(target=future.set_result, args=(i,)) for i, future in enumerate(futures)]
    for thread in threads:
        thread.start()
    assert [future.value() for future in together.wait(60)] == list(range(64))


def test_collect_all_of_nothing() -> None:
    assert hc.collect_all([]).value() == []


def test_await_a_future() -> None:
    async def program() -> int:
        future = hc.Future()
        threading.Timer(0.01, future.set_result, [5]).start()
        value: int = await future
        return value

    assert asyncio.run(program()) == 5
