from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hpccomm as hc
from hpccomm.api.buckets import _partition

from .arrays import assert_same

pytestmark = pytest.mark.usefixtures("process_group")

SHAPES = [(3, 4), (5,), (), (0,), (100,), (2, 2)]


def gradients(rank: int, step: int) -> list[Any]:
    random = np.random.default_rng([rank, step])
    return [
        np.asarray(random.integers(0, 50, shape), np.float64 if i % 3 else np.float32) for i, shape in enumerate(SHAPES)
    ]


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("compression", [None, np.float16, ml_dtypes.bfloat16])
def test_steps_equal_numpy_whatever_the_order(
    process_group: hc.ProcessGroup, bucket_bytes: int, compression: Any
) -> None:
    n, me = process_group.size, process_group.rank
    buckets = hc.GradientBuckets(gradients(me, 0), bucket_bytes, "sum", compression=compression)
    for step in range(3):
        for array, gradient in zip(buckets.arrays, gradients(me, step), strict=True):
            array[...] = gradient
        for i in np.random.default_rng([me, step]).permutation(len(SHAPES)):  # another order on each rank
            buckets.ready(int(i))
        buckets.wait()
        everybody = [gradients(rank, step) for rank in range(n)]
        for i, array in enumerate(buckets.arrays):
            expected = sum(given[i] for given in everybody)  # below 256: exact in both half precisions
            assert_same(array, np.asarray(expected, array.dtype), i, step)


def test_the_average_is_the_default(process_group: hc.ProcessGroup) -> None:
    buckets = hc.GradientBuckets([np.full(3, float(process_group.rank))])
    buckets.ready(0)
    buckets.wait()
    assert (buckets.arrays[0] == (process_group.size - 1) / 2).all()


@pytest.mark.parametrize("options", [{"op": "sum", "compression": "f8"}, {"reproducible": True}], ids=str)
def test_numpys_floating_point_errors_do_not_leave_wait(process_group: hc.ProcessGroup, options: Any) -> None:
    smallest = 1e-45 if process_group.rank == 0 else 0
    buckets = hc.GradientBuckets([np.array([3e38, smallest], "f4")], **options)
    with np.errstate(all="raise"):
        buckets.ready(0)
        buckets.wait()


def test_arrays_are_views_of_flat_buckets() -> None:
    buckets = hc.GradientBuckets([np.ones((2, 3)), np.zeros(4), np.arange(2)], bucket_bytes=1000, op="sum")
    assert [bucket.size for bucket in buckets.buckets] == [2, 10]  # a bucket for each dtype, the last array first
    assert all(np.shares_memory(buckets.arrays[i], buckets.buckets[1]) for i in (0, 1))
    assert (buckets.arrays[0] == 1).all()


def test_an_op_that_the_arrays_do_not_have_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"GradientBuckets: ReduceOp.AVG is not defined for arrays\[1\]'s dtype int64"):
        hc.GradientBuckets([np.ones(2), np.arange(2)])


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([4, 4, 4], 8, [[2, 1], [0]]),
        ([4, 4, 4], 12, [[2, 1, 0]]),
        ([100, 4, 4], 8, [[2, 1], [0]]),
        ([4, 100, 4], 8, [[2], [1], [0]]),
        ([0, 0], 1, [[1, 0]]),
    ],
)
def test_how_arrays_share_buckets(sizes: list[int], limit: int, expected: list[list[int]]) -> None:
    assert _partition([(np.dtype("f4"), size) for size in sizes], limit) == expected


def test_a_bucket_leaves_when_its_last_array_is_ready(process_group: hc.ProcessGroup) -> None:
    buckets = hc.GradientBuckets([np.ones(1), np.ones(1), np.ones(1)], bucket_bytes=16)  # buckets [2, 1] and [0]
    before = len(process_group.dispatcher.in_flight)
    buckets.ready(0)
    buckets.ready(2)
    assert len(process_group.dispatcher.in_flight) == before  # bucket 0 is not complete; 1 waits for its turn
    buckets.ready(1)
    assert len(buckets._works) == 2
    buckets.wait()


def test_mistakes_are_told() -> None:
    buckets = hc.GradientBuckets([np.ones(1), np.ones(1)])
    with pytest.raises(hc.DistError, match=r"arrays \[0, 1\] are not ready"):
        buckets.wait()
    buckets.ready(1)
    with pytest.raises(hc.DistError, match="array 1 was ready already"):
        buckets.ready(1)
    with pytest.raises(IndexError, match="there is no array 2; expected 0 to 1"):
        buckets.ready(2)
    buckets.ready(0)
    buckets.wait()
    with pytest.raises(ValueError, match="GradientBuckets: arrays is empty"):
        hc.GradientBuckets([])
    with pytest.raises(ValueError, match="bucket_bytes is 0; expected 1 or more"):
        hc.GradientBuckets([np.ones(1)], 0)
    masked = np.ma.masked_array([1.0], [True])
    for thing in ("text", 3, None, masked, np.ones(2, ">f8"), np.array([{}])):
        with pytest.raises(TypeError, match=r"GradientBuckets: arrays\[1\] "):
            hc.GradientBuckets([np.ones(1), thing])


def test_outside_the_group_nothing_happens(process_group: hc.ProcessGroup) -> None:
    group = hc.new_group([0])
    buckets = hc.GradientBuckets([np.full(1, 3.0)], group=group)
    if process_group.rank:
        with pytest.warns(RuntimeWarning, match="this rank is not in"):
            buckets.ready(0)
    else:
        buckets.ready(0)
    buckets.wait()
    assert buckets.arrays[0][0] == 3
