"""Large arrays of lists, which MPI receives where they lie: apart, in any order, with what they share memory with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.mpi.backend import MPIBackend
from hpccomm.mpi.large_counts import LargeCountMPIBackend
from hpccomm.mpi.layout import APART_BYTES, apart

COUNT = 300_000  # larger than what goes through memory of the node
DTYPES = [np.float64, np.dtype("i4, u1")]  # one that MPI has, and one that travels as bytes


@pytest.fixture(params=["compiled", "python"])
def group(process_group: hc.ProcessGroup, request: pytest.FixtureRequest) -> Any:
    """A group whose collectives go through memory of the node, where they are small; and one that has none."""
    made: Any = hc.new_group()
    if request.param == "python":
        made.tuning = made.tuning._replace(node_bytes=0)
    for _ in range(20):
        hc.barrier(made)
    yield made
    hc.destroy_process_group(made)


def values(rank: int, count: int, dtype: Any = np.float64) -> Any:
    numbers = np.arange(count) % 97 + 100 * rank
    if np.dtype(dtype).names is None:
        return numbers.astype(dtype)
    made = np.zeros(count, dtype)
    made["f0"], made["f1"] = numbers, numbers % 251
    return made


def scattered(counts: list[int], dtype: Any) -> list[Any]:
    """Arrays apart in one memory, the last one first."""
    gap, dtype = 7, np.dtype(dtype)
    memory = np.zeros(sum(counts) + gap * len(counts), dtype)
    found, end = [], memory.size
    for count in counts:
        found.append(memory[end - count : end])
        end -= count + gap
    return found


def works(call: Any, async_op: bool) -> None:
    work = call(async_op)
    if async_op:
        work.wait()


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_gather_into_arrays_apart(group: hc.ProcessGroup, dtype: Any, async_op: bool) -> None:
    counts = [COUNT + 11 * rank for rank in range(group.size)]
    outputs, mine = scattered(counts, dtype), values(group.rank, counts[group.rank], dtype)
    works(lambda how: hc.all_gather(outputs, mine, group, how), async_op)
    for rank, output in enumerate(outputs):
        assert np.array_equal(output, values(rank, counts[rank], dtype))


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
def test_all_gather_of_one_of_the_outputs(group: hc.ProcessGroup, async_op: bool) -> None:
    outputs = scattered([COUNT] * group.size, np.float64)
    shifted = outputs[(group.rank + 1) % group.size]
    shifted[...] = values(group.rank, COUNT)
    works(lambda how: hc.all_gather(outputs, shifted, group, how), async_op)
    for rank, output in enumerate(outputs):
        assert np.array_equal(output, values(rank, COUNT))


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
def test_all_to_all_gather_and_scatter_of_arrays_apart(group: hc.ProcessGroup, async_op: bool) -> None:
    size, me, root = group.size, group.rank, group.size - 1

    def part(source: int, target: int) -> Any:
        return values(source * size + target, COUNT + target + 2 * source)

    outputs = scattered([COUNT + me + 2 * source for source in range(size)], np.float64)
    works(lambda how: hc.all_to_all(outputs, [part(me, to) for to in range(size)], group, how), async_op)
    for source, output in enumerate(outputs):
        assert np.array_equal(output, part(source, me))

    into = scattered([COUNT + 2 * source for source in range(size)], np.float64) if me == root else None
    works(lambda how: hc.gather(part(me, 0), into, group.ranks[root], group=group, async_op=how), async_op)
    for source, output in enumerate(into or []):
        assert np.array_equal(output, part(source, 0))

    given = [part(root, to) for to in range(size)] if me == root else None
    output = np.zeros(COUNT + me + 2 * root)
    works(lambda how: hc.scatter(output, given, group.ranks[root], group=group, async_op=how), async_op)
    assert np.array_equal(output, part(root, me))


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("extra", [0, 5], ids=["equal", "uneven"])
@pytest.mark.parametrize("count", [1000, COUNT])
def test_reduce_scatter_of_arrays_apart(group: hc.ProcessGroup, count: int, extra: int, async_op: bool) -> None:
    size, me = group.size, group.rank
    inputs = [values(me + target, count + extra * target) for target in range(size)]
    output = inputs[0][: count + extra * me] if extra == 0 else np.zeros(count + extra * me)  # or one of the inputs
    works(lambda how: hc.reduce_scatter(output, inputs, "sum", group, how), async_op)
    assert np.array_equal(output, sum(values(rank + me, count + extra * me) for rank in range(size)))


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
@pytest.mark.parametrize("count", [10, COUNT])
def test_exscan_leaves_the_first_ranks_array(group: hc.ProcessGroup, count: int, dtype: Any) -> None:
    for async_op in (False, True):
        array = (values(group.rank, count) % 7).astype(dtype)
        before = array.copy()
        works(lambda how: hc.exscan(array, "sum", group, how), async_op)  # noqa: B023
        sums = sum((values(rank, count) % 7).astype(dtype) for rank in range(group.rank))
        assert np.array_equal(array, sums if group.rank else before)


@pytest.mark.serial
def test_arrays_that_mpi_can_not_receive_where_they_lie() -> None:
    memory = np.zeros(4 * APART_BYTES, np.uint8)
    whole = memory.view(np.float64)
    half, other = whole[: whole.size // 2], whole[whole.size // 2 :]
    assert apart([other, half]) is not None
    assert apart([other, half[1:]]) is not None
    assert apart([half, whole[whole.size // 4 :]]) is None  # they overlap
    assert apart([half, other[::2]]) is None
    assert apart([whole[:2], other]) is None  # small
    shifted = memory[4 : 4 + 2 * APART_BYTES].view(np.float64)  # not aligned
    assert apart([shifted, other]) is None


@pytest.mark.serial
def test_one_way_for_all_libraries() -> None:
    for name in ("gather", "scatter", "all_to_all"):
        assert getattr(LargeCountMPIBackend, name) is getattr(MPIBackend, name)
