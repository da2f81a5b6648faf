"""Arrays that no kernel of CUDA's may touch directly: addresses or strides that are no multiple of the element size.

A misaligned access is cudaErrorMisalignedAddress in every later call of CUDA. The stand-in refuses it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np
import pytest

import hpccomm as hc

from ..arrays import assert_same, unaligned, uneven, uneven_backwards
from . import gpus

pytestmark = pytest.mark.usefixtures("process_group")

SHAPE = (4, 3)
Make = Callable[[Any], Any]


def given(rank: int, dtype: str, size: int = 1) -> Any:
    return (np.arange(12 * size).reshape(4 * size, 3) + 100 * rank).astype(dtype)


def summed(group: hc.ProcessGroup, dtype: str, size: int = 1) -> Any:
    return sum(given(rank, dtype, size) for rank in range(group.size))


def all_reduce(group: hc.ProcessGroup, dtype: str, make: Make) -> Iterator[Any]:
    array = make(given(group.rank, dtype))
    hc.all_reduce(array, group=group)
    yield array, summed(group, dtype)


def asynchronously(group: hc.ProcessGroup, dtype: str, make: Make) -> Iterator[Any]:
    array = make(given(group.rank, dtype))
    hc.all_reduce(array, hc.ReduceOp.PREMUL_SUM(2), group=group, async_op=True).wait()
    yield array, 2 * summed(group, dtype)


def coalesced(group: hc.ProcessGroup, dtype: str, make: Make) -> Iterator[Any]:
    arrays = [make(given(group.rank, dtype, size)) for size in (1, 2)]
    hc.all_reduce_coalesced(arrays, group=group)
    for size, array in zip((1, 2), arrays):
        yield array, summed(group, dtype, size)


def persistent(group: hc.ProcessGroup, dtype: str, make: Make) -> Iterator[Any]:
    array = make(given(group.rank, dtype))
    with hc.all_reduce_init(array, group=group) as work:
        for _ in range(2):
            gpus.write(array, given(group.rank, dtype))
            work.start()
            work.wait()
    yield array, summed(group, dtype)


def broadcast(group: hc.ProcessGroup, dtype: str, make: Make) -> Iterator[Any]:
    array = make(given(group.rank, dtype))
    hc.broadcast(array, 0, group=group)
    yield array, given(0, dtype)


def gather_and_scatter(group: hc.ProcessGroup, dtype: str, make: Make) -> Iterator[Any]:
    everybody = np.concatenate([given(rank, dtype) for rank in range(group.size)])
    output = make(np.zeros_like(everybody))
    hc.all_gather_single(output, make(given(group.rank, dtype)), group=group)
    yield output, everybody
    part = make(np.zeros(SHAPE, dtype))
    hc.reduce_scatter_single(part, output, group=group)
    yield part, group.size * given(group.rank, dtype)


def lists(group: hc.ProcessGroup, dtype: str, make: Make) -> Iterator[Any]:
    outputs = [make(np.zeros(SHAPE, dtype)) for _ in range(group.size)]
    hc.all_to_all(outputs, [make(given(10 * group.rank + to, dtype)) for to in range(group.size)], group=group)
    for rank, output in enumerate(outputs):
        yield output, given(10 * rank + group.rank, dtype)


def messages(group: hc.ProcessGroup, dtype: str, make: Make) -> Iterator[Any]:
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    output = make(np.zeros(SHAPE, dtype))
    hc.sendrecv(make(given(group.rank, dtype)), after, output, before, group=group)
    yield output, given(before, dtype)


def halos(group: hc.ProcessGroup, dtype: str, make: Make) -> Iterator[Any]:
    with hc.new_grid((group.size, 1), periodic=True, group=group) as grid:
        for change in (hc.halo_exchange, hc.halo_accumulate):
            block = given(grid.rank, dtype)
            array = make(block)
            change(block, grid)  # on the host
            change(array, grid)
            yield array, block


def redistributions(group: hc.ProcessGroup, dtype: str, make: Make) -> Iterator[Any]:
    whole = given(0, dtype, group.size)
    have = hc.block_slice(len(whole), group.size, group.rank), slice(0, 3)
    want = slice(0, len(whole)), hc.block_slice(3, group.size, group.rank)
    output = make(np.zeros_like(whole[want]))
    hc.redistribute(output, make(whole[have]), want, have, group=group)
    yield output, whole[want]


PLACES = [
    all_reduce, asynchronously, coalesced, persistent, broadcast, gather_and_scatter, lists, messages, halos,
    redistributions,
]  # fmt: skip


@pytest.mark.parametrize("layout", [unaligned, uneven, uneven_backwards])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c16"])
@pytest.mark.parametrize("place", PLACES)
def test_the_result_is_that_of_an_aligned_array(
    groups: list[hc.ProcessGroup], place: Any, dtype: str, layout: Any
) -> None:
    group = groups[0]
    for array, expected in place(group, dtype, lambda values: gpus.array(values, layout)):
        assert_same(gpus.values(array), expected)


def test_an_output_whose_elements_share_memory_is_refused(process_group: hc.ProcessGroup) -> None:
    one, box = gpus.array(np.ones((1, 3))), (slice(0, 4), slice(0, 3))
    array = cupy.ndarray((4, 3), one.dtype, one.data, strides=(0, 8))  # as cupy.broadcast_to, whose arrays are writable
    for call in (
        lambda: hc.all_reduce(array),
        lambda: hc.reduce_scatter_single(array, gpus.array(np.ones((4 * process_group.size, 3)))),
        lambda: hc.irecv(array, process_group.rank),
        lambda: hc.all_gather([array] * process_group.size, gpus.array(np.ones((4, 3)))),
        lambda: hc.all_reduce_init(array),
        lambda: hc.redistribute(array, gpus.array(np.ones((4, 3))), box, box),
    ):
        with pytest.raises(ValueError, match=r"elements of .* share memory \(strides \(0, 8\)\).*give a copy"):
            call()
    hc.all_gather_single(output := gpus.array(np.zeros((4 * process_group.size, 3))), array)  # as an input it is right
    assert_same(gpus.values(output), np.ones((4 * process_group.size, 3)))
