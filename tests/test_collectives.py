"""Every collective x dtype x ReduceOp x layout x shape x group x sync/async gives what NumPy computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc

from .arrays import (
    ALL_DTYPES,
    HALVES,
    LAYOUTS,
    NUMERIC,
    REDUCTIONS,
    SHAPES,
    assert_same,
    contiguous,
    dtype_name,
    reduced,
    reductions_of,
    values,
)

pytestmark = pytest.mark.usefixtures("process_group")
numeric = pytest.mark.parametrize("dtype", NUMERIC, ids=dtype_name)
every_dtype = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)

Groups = list[hc.ProcessGroup]
Layout = Callable[[Any], Any]


def cases(groups: Groups) -> Iterator[tuple[hc.ProcessGroup, Layout, tuple[int, ...], bool]]:
    """Every layout, shape, and way to call; on more ranks than cores, one shape for the two others."""
    if MPI.COMM_WORLD.Get_size() < 3:
        return itertools.product(groups, LAYOUTS, SHAPES, (False, True))
    some = [
        (layout, SHAPES[(i + 3 * async_op) % len(SHAPES)], async_op)
        for i, layout in enumerate(LAYOUTS)
        for async_op in (False, True)
    ]
    return ((group, *case) for group in groups for case in some)


def call(function: Callable[..., Any], *arguments: Any, group: hc.ProcessGroup, async_op: bool, **options: Any) -> None:
    """Run an operation to its end, and check what it returns."""
    work = function(*arguments, group=group, async_op=async_op, **options)
    if async_op:
        assert isinstance(work, hc.Work)
        assert work.wait() is True
        assert work.is_success()
    else:
        assert work is None


def contributions(group: hc.ProcessGroup, dtype: Any, shape: tuple[int, ...], salt: int = 0) -> list[Any]:
    return [values(dtype, shape, rank, salt) for rank in group.ranks]


# -- reductions --------------------------------------------------------------------------------------


@numeric
def test_all_reduce(groups: Groups, dtype: Any) -> None:
    for name in reductions_of(dtype):
        for group, layout, shape, async_op in cases(groups):
            given = contributions(group, dtype, shape)
            array = layout(given[group.rank])
            call(hc.all_reduce, array, REDUCTIONS[name][0], group=group, async_op=async_op)
            assert_same(array, reduced(name, given), name, layout, shape, group, async_op)


@numeric
def test_reduce_writes_on_the_destination_only(groups: Groups, dtype: Any) -> None:
    for name in reductions_of(dtype):
        for group, layout, shape, async_op in cases(groups):
            given = contributions(group, dtype, shape)
            dst = group.ranks[-1]
            array = layout(given[group.rank])
            call(hc.reduce, array, dst, REDUCTIONS[name][0], group=group, async_op=async_op)
            expected = reduced(name, given) if hc.get_rank() == dst else given[group.rank]
            assert_same(array, expected, name, layout, shape, group, async_op)


@numeric
@pytest.mark.parametrize("inclusive", [True, False], ids=["scan", "exscan"])
def test_scans(groups: Groups, dtype: Any, inclusive: bool) -> None:
    for name in reductions_of(dtype):
        if name == "AVG":
            continue
        for group, layout, shape, async_op in cases(groups):
            given = contributions(group, dtype, shape)
            array = layout(given[group.rank])
            call(hc.scan if inclusive else hc.exscan, array, REDUCTIONS[name][0], group=group, async_op=async_op)
            before = given[: group.rank + inclusive]
            expected = reduced(name, before) if before else given[0]
            assert_same(array, expected, name, layout, shape, group, async_op)


@numeric
def test_reduce_scatter_with_uneven_parts(groups: Groups, dtype: Any) -> None:
    for name in reductions_of(dtype):
        for group, layout, async_op in itertools.product(groups, LAYOUTS, (False, True)):
            shapes = [(rank % 3, 2) for rank in range(group.size)]
            given = [[values(dtype, shape, member, i) for i, shape in enumerate(shapes)] for member in group.ranks]
            output = layout(np.zeros(shapes[group.rank], dtype))
            inputs = [layout(part) for part in given[group.rank]]
            call(hc.reduce_scatter, output, inputs, REDUCTIONS[name][0], group=group, async_op=async_op)
            expected = reduced(name, [parts[group.rank] for parts in given])
            assert_same(output, expected, name, layout, group, async_op)
            for part, kept in zip(inputs, given[group.rank], strict=True):
                assert_same(part, kept, "inputs are not changed", name, layout)


@numeric
def test_reduce_scatter_single(groups: Groups, dtype: Any) -> None:
    for name in reductions_of(dtype):
        for group, layout, shape, async_op in cases(groups):
            given = contributions(group, dtype, (group.size, *shape))
            output, array = layout(np.zeros(shape, dtype)), layout(given[group.rank])
            call(hc.reduce_scatter_single, output, array, REDUCTIONS[name][0], group=group, async_op=async_op)
            assert_same(output, reduced(name, given)[group.rank], name, layout, shape, group, async_op)
            assert_same(array, given[group.rank], "the input is not changed", name, layout)


# -- moving ------------------------------------------------------------------------------------------


@every_dtype
def test_broadcast(groups: Groups, dtype: Any) -> None:
    for group, layout, shape, async_op in cases(groups):
        given = contributions(group, dtype, shape)
        array = layout(given[group.rank])
        call(hc.broadcast, array, group.ranks[-1], group=group, async_op=async_op)
        assert_same(array, given[-1], layout, shape, group, async_op)


@every_dtype
def test_all_gather_with_uneven_sizes(groups: Groups, dtype: Any) -> None:
    for group, layout, async_op in itertools.product(groups, LAYOUTS, (False, True)):
        given = [values(dtype, (rank % 3, 2), member) for rank, member in enumerate(group.ranks)]
        outputs = [layout(np.zeros(each.shape, dtype)) for each in given]
        call(hc.all_gather, outputs, layout(given[group.rank]), group=group, async_op=async_op)
        for output, expected in zip(outputs, given, strict=True):
            assert_same(output, expected, layout, group, async_op)


@every_dtype
def test_all_gather_of_every_shape(groups: Groups, dtype: Any) -> None:
    for group, layout, shape, async_op in cases(groups):
        given = contributions(group, dtype, shape)
        outputs = [layout(np.zeros(shape, dtype)) for _ in given]
        call(hc.all_gather, outputs, layout(given[group.rank]), group=group, async_op=async_op)
        for output, expected in zip(outputs, given, strict=True):
            assert_same(output, expected, layout, shape, group, async_op)


@every_dtype
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "concatenated"])
def test_all_gather_single(groups: Groups, dtype: Any, stacked: bool) -> None:
    for group, layout, shape, async_op in cases(groups):
        if not stacked and not shape:
            continue
        given = contributions(group, dtype, shape)
        expected = np.stack(given) if stacked else np.concatenate(given)
        output = layout(np.zeros(expected.shape, dtype))
        call(hc.all_gather_single, output, layout(given[group.rank]), group=group, async_op=async_op)
        assert_same(output, expected, layout, shape, group, async_op)


@every_dtype
def test_gather_with_uneven_sizes(groups: Groups, dtype: Any) -> None:
    for group, layout, async_op in itertools.product(groups, LAYOUTS, (False, True)):
        given = [values(dtype, (rank % 3, 2), member) for rank, member in enumerate(group.ranks)]
        dst = group.ranks[-1]
        outputs = [layout(np.zeros(each.shape, dtype)) for each in given] if hc.get_rank() == dst else None
        call(hc.gather, layout(given[group.rank]), outputs, dst, group=group, async_op=async_op)
        for output, expected in zip(outputs or [], given, strict=False):
            assert_same(output, expected, layout, group, async_op)


@every_dtype
def test_scatter_with_uneven_sizes(groups: Groups, dtype: Any) -> None:
    for group, layout, async_op in itertools.product(groups, LAYOUTS, (False, True)):
        given = [values(dtype, (rank % 3, 2), member) for rank, member in enumerate(group.ranks)]
        src = group.ranks[-1]
        inputs = [layout(each) for each in given] if hc.get_rank() == src else None
        output = layout(np.zeros(given[group.rank].shape, dtype))
        call(hc.scatter, output, inputs, src, group=group, async_op=async_op)
        assert_same(output, given[group.rank], layout, group, async_op)


@every_dtype
def test_all_to_all_with_uneven_sizes(groups: Groups, dtype: Any) -> None:
    def part(sender: int, receiver: int) -> Any:
        return values(dtype, ((sender + 2 * receiver) % 4, 2), sender, receiver)

    for group, layout, async_op in itertools.product(groups, LAYOUTS, (False, True)):
        everyone = range(group.size)
        expected = [part(sender, group.rank) for sender in everyone]
        outputs = [layout(np.zeros(each.shape, dtype)) for each in expected]
        inputs = [layout(part(group.rank, receiver)) for receiver in everyone]
        call(hc.all_to_all, outputs, inputs, group=group, async_op=async_op)
        for output, each in zip(outputs, expected, strict=True):
            assert_same(output, each, layout, group, async_op)


@every_dtype
def test_all_to_all_single_with_equal_parts(groups: Groups, dtype: Any) -> None:
    for group, layout, rows, async_op in itertools.product(groups, LAYOUTS, (0, 1, 2), (False, True)):
        given = contributions(group, dtype, (group.size * rows, 2))
        output = layout(np.zeros(given[0].shape, dtype))
        call(hc.all_to_all_single, output, layout(given[group.rank]), group=group, async_op=async_op)
        mine = slice(group.rank * rows, (group.rank + 1) * rows)
        assert_same(output, np.concatenate([each[mine] for each in given]), layout, rows, group, async_op)


@every_dtype
def test_all_to_all_single_with_split_sizes(groups: Groups, dtype: Any) -> None:
    def rows(sender: int, receiver: int) -> int:
        return (sender + 2 * receiver) % 4

    for group, layout, async_op in itertools.product(groups, LAYOUTS, (False, True)):
        everyone = range(group.size)
        sizes = [[rows(sender, receiver) for receiver in everyone] for sender in everyone]
        given = [values(dtype, (sum(sizes[s]), 2), group.ranks[s]) for s in everyone]
        received = [sizes[s][group.rank] for s in everyone]
        starts = [sum(sizes[s][: group.rank]) for s in everyone]
        expected = np.concatenate([given[s][starts[s] : starts[s] + received[s]] for s in everyone])
        output = layout(np.zeros(expected.shape, dtype))
        arguments = output, layout(given[group.rank]), received, sizes[group.rank]
        call(hc.all_to_all_single, *arguments, group=group, async_op=async_op)
        assert_same(output, expected, layout, group, async_op)


# -- coalesced ---------------------------------------------------------------------------------------

MIXED = [np.dtype("f4"), np.dtype("i8"), np.dtype("f4"), np.dtype("c16")]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("name", ["SUM", "PRODUCT", "PREMUL_SUM"])
def test_all_reduce_coalesced(groups: Groups, layout: Layout, async_op: bool, name: str) -> None:
    for group in groups:
        given = [[values(d, s, m) for d, s in zip(MIXED, SHAPES, strict=False)] for m in group.ranks]
        arrays = [layout(each) for each in given[group.rank]]
        call(hc.all_reduce_coalesced, arrays, REDUCTIONS[name][0], group=group, async_op=async_op)
        for i, array in enumerate(arrays):
            assert_same(array, reduced(name, [each[i] for each in given]), i, group)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("sizes", [[5000] * 200, [3, 70_000, 0, 400_000, 1, 250_000, 10_000]], ids=["alike", "uneven"])
def test_all_reduce_coalesced_of_many_arrays(process_group: hc.ProcessGroup, async_op: bool, sizes: list[int]) -> None:
    n = process_group.size
    given = np.arange(sum(sizes), dtype=np.float32)
    arrays = np.split(given + process_group.rank, np.cumsum(sizes)[:-1])
    call(hc.all_reduce_coalesced, arrays, "avg", group=process_group, async_op=async_op)
    assert_same(np.concatenate(arrays), given + np.float32((n - 1) / 2))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", [np.dtype("f8"), np.dtype("f2")], ids=str)
def test_all_reduce_coalesced_avg(groups: Groups, layout: Layout, async_op: bool, dtype: Any) -> None:
    for group in groups:
        given = [[values(dtype, shape, m) for shape in SHAPES] for m in group.ranks]
        arrays = [layout(each) for each in given[group.rank]]
        call(hc.all_reduce_coalesced, arrays, "avg", group=group, async_op=async_op)
        for i, array in enumerate(arrays):
            assert_same(array, reduced("AVG", [each[i] for each in given]), i, group)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("async_op", [False, True])
def test_broadcast_coalesced(groups: Groups, layout: Layout, async_op: bool) -> None:
    for group in groups:
        given = [[values(d, (i,), m) for i, d in enumerate(ALL_DTYPES)] for m in group.ranks]
        arrays = [layout(each) for each in given[group.rank]]
        call(hc.broadcast_coalesced, arrays, group.ranks[-1], group=group, async_op=async_op)
        for array, expected in zip(arrays, given[-1], strict=True):
            assert_same(array, expected, group)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("async_op", [False, True])
def test_all_gather_coalesced_of_uneven_sizes(groups: Groups, layout: Layout, async_op: bool) -> None:
    for group in groups:
        given = [[values(d, ((i + r) % 4, 2), m) for i, d in enumerate(ALL_DTYPES)] for r, m in enumerate(group.ranks)]
        outputs = [[layout(np.zeros(each.shape, each.dtype)) for each in row] for row in given]
        inputs = [layout(each) for each in given[group.rank]]
        call(hc.all_gather_coalesced, outputs, inputs, group=group, async_op=async_op)
        for row, expected in zip(outputs, given, strict=True):
            for output, each in zip(row, expected, strict=True):
                assert_same(output, each, group)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("async_op", [False, True])
def test_all_gather_single_coalesced(groups: Groups, layout: Layout, async_op: bool) -> None:
    for group in groups:
        given = [[values(d, (i, 2), m) for i, d in enumerate(ALL_DTYPES)] for m in group.ranks]
        outputs = [layout(np.zeros((group.size, i, 2), d)) for i, d in enumerate(ALL_DTYPES)]
        inputs = [layout(each) for each in given[group.rank]]
        call(hc.all_gather_single_coalesced, outputs, inputs, group=group, async_op=async_op)
        for i, output in enumerate(outputs):
            assert_same(output, np.stack([row[i] for row in given]), group)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("name", ["SUM", "PRODUCT", "PREMUL_SUM"])
def test_reduce_scatter_single_coalesced(groups: Groups, layout: Layout, async_op: bool, name: str) -> None:
    for group in groups:
        shapes = [(group.size, *shape) for shape in SHAPES]
        given = [[values(d, s, m) for d, s in zip(MIXED, shapes, strict=False)] for m in group.ranks]
        outputs = [layout(np.zeros(s[1:], d)) for d, s in zip(MIXED, shapes, strict=False)]
        inputs = [layout(each) for each in given[group.rank]]
        options = {"group": group, "async_op": async_op}
        call(hc.reduce_scatter_single_coalesced, outputs, inputs, REDUCTIONS[name][0], **options)
        for i, output in enumerate(outputs):
            assert_same(output, reduced(name, [row[i] for row in given])[group.rank], i, group)


# -- single claims -----------------------------------------------------------------------------------


def test_half_precisions_are_accumulated_in_float32(process_group: hc.ProcessGroup) -> None:
    n = process_group.size
    array = np.array([2048.0 if process_group.rank == 0 else 0.5], np.float16)
    hc.all_reduce(array)
    # float16 has no 2048.5: added one after the other in float16, every 0.5 would be lost
    assert array[0] == np.float16(2048 + 0.5 * (n - 1))


def test_every_rank_ends_with_bitwise_the_same_sum(process_group: hc.ProcessGroup) -> None:
    array = np.random.default_rng(process_group.rank).standard_normal(10007).astype(np.float32)
    hc.all_reduce(array)
    everybody = np.empty((process_group.size, array.size), array.dtype)
    hc.all_gather_single(everybody, array)
    assert all(np.array_equal(each, array) for each in everybody)


def test_large_reductions_in_segments_equal_numpy(process_group: hc.ProcessGroup, random: np.random.Generator) -> None:
    size = 3 * (1 << 20) + 5  # float32: 12 MiB and a bit, so the last segment is short
    whole = random.integers(0, 100, (process_group.size, size)).astype(np.float32)
    for async_op in (False, True):
        array = whole[process_group.rank].copy()
        call(hc.all_reduce, array, "sum", group=process_group, async_op=async_op)
        assert_same(array, whole.sum(0))
        call(hc.all_reduce, array, "avg", group=process_group, async_op=async_op)
        assert_same(array, whole.sum(0))
        prefix = whole[process_group.rank].copy()
        call(hc.scan, prefix, group=process_group, async_op=async_op)
        assert_same(prefix, whole[: process_group.rank + 1].sum(0))
        rooted = whole[process_group.rank].copy()
        call(hc.reduce, rooted, 0, group=process_group, async_op=async_op)
        assert_same(rooted, whole.sum(0) if process_group.rank == 0 else whole[process_group.rank])


def test_the_input_of_all_gather_single_may_be_part_of_its_output(process_group: hc.ProcessGroup) -> None:
    output = np.full((process_group.size, 3), -1.0)
    output[process_group.rank] = process_group.rank
    hc.all_gather_single(output, output[process_group.rank])
    assert_same(output, np.repeat(np.arange(float(process_group.size)), 3).reshape(-1, 3))


def test_all_to_all_single_may_work_on_overlapping_memory(process_group: hc.ProcessGroup) -> None:
    array = np.arange(float(process_group.size)) + 10 * process_group.rank
    hc.all_to_all_single(array, array)
    assert_same(array, 10.0 * np.arange(process_group.size) + process_group.rank)


def test_the_output_of_reduce_scatter_single_may_be_part_of_its_input(process_group: hc.ProcessGroup) -> None:
    array = np.ones((process_group.size, 3))
    hc.reduce_scatter_single(array[process_group.rank], array)
    assert_same(array[process_group.rank], np.full(3, float(process_group.size)))


def test_group_ranks_can_name_the_root(groups: Groups) -> None:
    for group in groups:
        array = np.array([float(hc.get_rank())])
        hc.broadcast(array, group=group, group_src=group.size - 1)
        assert array[0] == group.ranks[-1]
        hc.reduce(array, group=group, group_dst=0)
        assert array[0] == group.ranks[-1] * (group.size if group.rank == 0 else 1)
        outputs = [np.empty(1) for _ in group.ranks] if group.rank == 0 else None
        hc.gather(array, outputs, group=group)  # the group's first rank is the default
        output = np.empty(1)
        hc.scatter(output, outputs, group=group, group_src=0)
        assert output[0] == array[0]


def test_ops_by_name_and_by_mpi_op(process_group: hc.ProcessGroup) -> None:
    from mpi4py import MPI

    n = process_group.size
    for op in ("max", "MAX", " Max ", MPI.MAX, hc.ReduceOp.MAX):
        array = np.array([process_group.rank], np.float16)
        hc.all_reduce(array, op)
        assert array[0] == n - 1
    logical = np.array([process_group.rank, 1], np.int32)
    hc.all_reduce(logical, MPI.LAND)
    assert logical.tolist() == [0, 1]


def test_an_mpi_op_of_ones_own(process_group: hc.ProcessGroup) -> None:
    from mpi4py import MPI

    def keep_larger_magnitude(a: memoryview, b: memoryview, datatype: MPI.Datatype) -> None:
        x, y = np.frombuffer(a, np.float64), np.frombuffer(b, np.float64)
        y[:] = np.where(abs(x) > abs(y), x, y)

    op = MPI.Op.Create(keep_larger_magnitude, commute=True)
    array = np.array([-1.0, 1.0]) * process_group.rank
    hc.all_reduce(array, op)
    assert_same(array, np.array([-1.0, 1.0]) * (process_group.size - 1))
    op.Free()


def test_barrier(groups: Groups) -> None:
    for group in groups:
        assert hc.barrier(group) is None
        work = hc.barrier(group, async_op=True)
        assert work is not None
        assert work.wait()
        assert work.result() is None


def test_names_of_older_torch_versions(process_group: hc.ProcessGroup) -> None:
    assert hc.all_gather_into_tensor is hc.all_gather_single
    assert hc.reduce_scatter_tensor is hc.reduce_scatter_single


def test_contiguous_arrays_are_not_copied(process_group: hc.ProcessGroup) -> None:
    # tracemalloc sees NumPy's buffers: a staging copy would be as large as the array
    import tracemalloc

    array = contiguous(np.ones(1 << 20))
    everybody = np.empty((process_group.size, array.size))
    hc.all_reduce(array)
    tracemalloc.start()
    try:
        hc.all_reduce(array)
        hc.broadcast(array, 0)
        hc.all_gather_single(everybody, array)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < array.nbytes // 8


# -- corners of arithmetic ---------------------------------------------------------------------------


@pytest.mark.parametrize("code", "bBhH")
@pytest.mark.parametrize("op", ["sum", "product", "max", "bxor"])
def test_small_integers_wrap_around_as_numpys_do(process_group: hc.ProcessGroup, code: str, op: str) -> None:
    dtype, n, me = np.dtype(code), process_group.size, process_group.rank
    ufunc = {"sum": np.add, "product": np.multiply, "max": np.maximum, "bxor": np.bitwise_xor}[op]
    for size in (1, 15, 16, 64, 1000):  # vectorised from 16 on
        limits = np.iinfo(dtype)
        given = [
            np.random.default_rng([r, size]).integers(limits.min, limits.max, n * size, dtype, endpoint=True)
            for r in range(n)
        ]
        expected = ufunc.reduce(np.array(given), 0, dtype)
        array = given[me].copy()
        hc.all_reduce(array, op)
        assert_same(array, expected, op, size)
        array = given[me].copy()
        hc.all_reduce(array, op, async_op=True).wait()
        assert_same(array, expected, op, size)
        part = np.empty(size, dtype)
        hc.reduce_scatter_single(part, given[me], op)
        assert_same(part, expected[me * size : (me + 1) * size], op, size)
        with hc.all_reduce_init(array, op) as persistent:
            array[...] = given[me]
            persistent.start()
            persistent.wait()
        assert_same(array, expected, op, size)
        hc.scan(array := given[me].copy(), op)
        assert_same(array, ufunc.reduce(np.array(given[: me + 1]), 0, dtype), op, size)


@pytest.mark.parametrize("op", ["sum", "product", "min", "max", "band", "bor", "bxor"])
def test_every_byte_of_a_bool_but_0_is_true(process_group: hc.ProcessGroup, op: str) -> None:
    n, me = process_group.size, process_group.rank
    ufunc = {"sum": np.logical_or, "max": np.logical_or, "bor": np.logical_or, "bxor": np.logical_xor}.get(
        op, np.logical_and
    )
    given = [np.array([0, 1, 2, 255, r, 2 * r], np.uint8) for r in range(n)]
    expected = ufunc.reduce([each != 0 for each in given], 0)
    for way in (hc.all_reduce, lambda x, op: hc.all_reduce(x, op, async_op=True).wait(), hc.scan):
        if way is hc.scan and me < n - 1:
            hc.scan(given[me].copy().view(bool), op)
            continue
        array = given[me].copy().view(bool)
        way(array, op)
        assert array.view(np.uint8).tolist() == expected.astype(np.uint8).tolist()
    array = np.zeros(6, bool)
    with hc.all_reduce_init(array, op) as persistent:
        array.view(np.uint8)[...] = given[me]
        persistent.start()
        persistent.wait()
    assert array.view(np.uint8).tolist() == expected.astype(np.uint8).tolist()


@pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
@pytest.mark.filterwarnings("error")
def test_an_overflow_is_infinite_and_no_exception(process_group: hc.ProcessGroup, dtype: Any) -> None:
    n = process_group.size
    largest = np.array([6e4 if dtype == np.float16 else 3e38] * 3, np.float32).astype(dtype)
    for op in ("sum", "product", hc.ReduceOp.PREMUL_SUM(4.0)):
        array = largest.copy()
        hc.all_reduce(array, op)
        if n > 1 or not isinstance(op, str):
            assert np.isinf(array.astype(np.float32)).all()
    array = np.full(3, 3e38, np.float32)
    hc.all_reduce(array, hc.ReduceOp.PREMUL_SUM(4.0))
    assert np.isinf(array).all()
