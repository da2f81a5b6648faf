"""Copies from one process's memory to another's, in chunks of a few elements; and what happens where there are none."""

from __future__ import annotations

import ctypes
import errno
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.mpi import single_copy
from hpccomm.process.tuning import NEVER, Tuning

from ..arrays import LAYOUTS, NUMERIC, REDUCTIONS, assert_same, dtype_name, reduced, reductions_of, values

FINE = Tuning(segment_bytes=64, single_copy_bytes=1, node_bytes=0)
SHAPES = [(9,), (50,), (3, 7), (1000,), (4, 517)]


def new_group(ranks: list[int] | None = None, tuning: Tuning = FINE) -> Any:
    group = hc.new_group(ranks)
    if isinstance(group, hc.ProcessGroup):
        group.tuning = tuning  # before the first operation makes the backend
    return group


def single_copies(group: Any) -> Any:
    """The SingleCopy of a group that has done something."""
    return group.dispatcher.backends["cpu"]._single_copy


def refuse(*arguments: Any) -> int:
    ctypes.set_errno(errno.EPERM)
    return -1


def a_rank_that_refuses(name: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = single_copy.system_call
    if hc.get_rank() == rank:
        monkeypatch.setattr(single_copy, "system_call", lambda call: refuse if call == name else found(call))


@pytest.fixture(scope="module")
def allowed(process_group: hc.ProcessGroup) -> Iterator[Any]:
    """A group; skips the tests where the kernel refuses."""
    group = new_group()
    hc.all_reduce(np.ones(100), group=group)
    if group.size > 1 and not single_copies(group)._is_allowed:
        pytest.skip("the kernel lets no process copy from another one")
    yield group
    hc.destroy_process_group(group)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_copy, "CHUNK_BYTES", 1024)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", NUMERIC, ids=dtype_name)
def test_reductions(allowed: Any, dtype: Any) -> None:
    n, me = allowed.size, allowed.rank
    for name, layout, shape in itertools.product(reductions_of(dtype), LAYOUTS, SHAPES):
        given = [values(dtype, shape, rank) for rank in range(n)]
        array = layout(given[me])
        hc.all_reduce(array, REDUCTIONS[name][0], allowed)
        assert_same(array, reduced(name, given), name, layout, shape)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_it_adds_in_rank_order(allowed: Any, dtype: Any) -> None:
    given = [np.random.default_rng(rank).standard_normal(12_345).astype(dtype) for rank in range(allowed.size)]
    expected = given[0].copy()
    for each in given[1:]:
        expected = expected + each
    array = given[allowed.rank].copy()
    hc.all_reduce(array, group=allowed)
    if allowed.size > 1:
        assert array.tobytes() == expected.tobytes()


def test_the_layouts_of_the_ranks_may_differ(allowed: Any) -> None:
    given = [values(np.dtype(np.float64), (60, 50), rank) for rank in range(allowed.size)]
    array = LAYOUTS[allowed.rank % len(LAYOUTS)](given[allowed.rank])
    hc.all_reduce(array, group=allowed)
    assert_same(array, reduced("SUM", given))


def test_it_leaves_nothing_to_mpi(allowed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.ones(1000)
    if allowed.size > 1:
        monkeypatch.setattr(allowed.dispatcher.backends["cpu"], "_segments", None)
    hc.all_reduce(array, group=allowed)
    assert (array == allowed.size).all()


def test_overflow_warns_no_more_than_mpi(allowed: Any) -> None:
    array = np.full(1000, np.finfo(np.float64).max)
    hc.all_reduce(array, group=allowed)
    assert np.isinf(array).all() == (allowed.size > 1)


def test_a_part_of_the_ranks(process_group: hc.ProcessGroup) -> None:
    members = list(range(process_group.size - 1, -1, -2))  # not in the order of the world
    group = new_group(members)
    if process_group.rank in members:
        array = np.full(1000, float(process_group.rank))
        hc.all_reduce(array, group=group)
        assert (array == sum(members)).all()
        hc.destroy_process_group(group)


@pytest.mark.parametrize("name", ["process_vm_readv", "process_vm_writev"])
def test_where_the_kernel_refuses_one_rank_all_leave_it_to_mpi(
    process_group: hc.ProcessGroup, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_rank_that_refuses(name, process_group.size - 1, monkeypatch)
    group = new_group()
    for _ in range(2):
        array = np.full(1000, float(group.rank + 1))
        hc.all_reduce(array, group=group)
        assert (array == sum(range(1, group.size + 1))).all()
    assert not single_copies(group)._is_allowed
    hc.destroy_process_group(group)


def test_an_array_that_the_kernel_can_not_reach_on_one_rank_is_left_to_mpi(
    allowed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if allowed.size > 1 and allowed.rank == 0:
        monkeypatch.setattr(single_copies(allowed)._read, "_call", refuse)
    array = np.ones(1000)
    hc.all_reduce(array, group=allowed)
    assert (array == allowed.size).all()


def test_a_copy_that_fails_on_the_way_is_an_error_on_every_rank(allowed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if allowed.size == 1:
        return
    if allowed.rank == 0:
        monkeypatch.setattr(single_copies(allowed)._system_calls, "reach", lambda *arguments: True)
        monkeypatch.setattr(single_copies(allowed)._read, "_call", refuse)
    what = "Operation not permitted" if allowed.rank == 0 else "on another rank"
    with pytest.raises(hc.DistBackendError, match=f"between the memories of the ranks failed .*{what}"):
        hc.all_reduce(np.ones(1000), group=allowed)


def test_calls_that_differ_are_an_error_on_every_rank(allowed: Any) -> None:
    if allowed.size == 1:
        return
    array = np.ones(1000 + allowed.rank)
    with pytest.raises(ValueError, match=f"the same call: 'all_reduce sum size={array.size} dtype=float64' here"):
        hc.all_reduce(array, group=allowed)


@pytest.mark.parametrize(
    "tuning",
    [
        Tuning(segment_bytes=8000, single_copy_bytes=1, node_bytes=0),
        Tuning(single_copy_bytes=NEVER, node_bytes=0),
    ],
)
def test_arrays_below_the_threshold_and_of_one_segment_are_left_to_mpi(
    process_group: hc.ProcessGroup, tuning: Tuning
) -> None:
    group = new_group(tuning=tuning)
    hc.all_reduce(np.ones(1000), group=group)  # on the fast path
    hc.all_reduce(np.ones(2000)[::2], group=group)  # past it
    assert single_copies(group)._is_allowed is None
    hc.destroy_process_group(group)


def test_the_thread_of_asynchronous_operations_makes_none(process_group: hc.ProcessGroup) -> None:
    group = new_group(tuning=Tuning(segment_bytes=64, single_copy_bytes=1, thread_bytes=1, node_bytes=0))
    array = np.ones(1000)
    work = hc.all_reduce(array, group=group, async_op=True)
    assert work is not None
    work.wait()
    assert (array == group.size).all()
    backend: Any = group.dispatcher.backends["cpu"]
    for each in (backend, backend._thread._backend):
        assert each is None or each._single_copy._is_allowed is None
    hc.destroy_process_group(group)


@pytest.mark.serial
def test_a_system_without_such_calls_is_one_that_refuses() -> None:
    transfer = single_copy.Transfer("process_vm_that_does_not_exist")
    with pytest.raises(OSError, match="not implemented") as refusal:
        transfer(1, 0, 0, 1)
    assert refusal.value.errno == errno.ENOSYS
