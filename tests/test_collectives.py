"""Every collective x dtype x ReduceOp x layout x shape x group x sync/async gives what NumPy computes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.core.operation_list import OPERATIONS

from .arrays import (
    ALL_DTYPES,
    HALVES,
    INTEGERS,
    LAYOUTS,
    NUMERIC,
    SHAPES,
    assert_same,
    contiguous,
    dtype_name,
    reductions_of,
)
from .calls import CALLS, On, perform

pytestmark = pytest.mark.usefixtures("process_group")
numeric = pytest.mark.parametrize("dtype", NUMERIC, ids=dtype_name)
every_dtype = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)

Groups = list[hc.ProcessGroup]
Layout = Callable[[Any], Any]


def cases(groups: Groups, how: str) -> Iterator[tuple[hc.ProcessGroup, Layout, tuple[int, ...], bool]]:
    """Every layout, shape, and way to call; on more ranks than cores, one shape for the two others."""
    if "uneven" in how:
        return itertools.product(groups, LAYOUTS, [(2,)], (False, True))
    if MPI.COMM_WORLD.Get_size() < 3:
        return itertools.product(groups, LAYOUTS, SHAPES, (False, True))
    some = [
        (layout, SHAPES[(i + 3 * async_op) % len(SHAPES)], async_op)
        for i, layout in enumerate(LAYOUTS)
        for async_op in (False, True)
    ]
    return ((group, *case) for group in groups for case in some)


def check(how: str, on: On, async_op: bool) -> None:
    """Make a call, whose root is the last rank; `how` is its name, and "uneven" or "stacked"."""
    name, on.stacked, on.uneven = how.partition(",")[0], "stacked" in how, "uneven" in how
    on.root, on.root_by = on.n - 1, ""
    for actual, expected in perform(name, on, async_op):
        assert_same(actual, expected, on, async_op)


VARIANTS = {
    **dict.fromkeys(["reduce_scatter", "gather", "scatter", "all_to_all"], (", uneven",)),
    **{"reduce_scatter_single": (", stacked",), "all_gather_single": ("", ", stacked")},
    **dict.fromkeys(["all_gather", "all_to_all_single"], ("", ", uneven")),
}
SINGLE = [(name, name + variant) for name in CALLS if "coalesced" not in name for variant in VARIANTS.get(name, ("",))]


@pytest.mark.parametrize("how", [how for name, how in SINGLE if OPERATIONS[name].reduces])
@numeric
def test_reductions(groups: Groups, dtype: Any, how: str) -> None:
    for op in reductions_of(dtype):
        if op != "AVG" or "scan" not in how:
            for group, layout, shape, async_op in cases(groups, how):
                check(how, On(group, dtype, shape, op, layout), async_op)


@pytest.mark.parametrize("how", [how for name, how in SINGLE if not OPERATIONS[name].reduces])
@every_dtype
def test_moving(groups: Groups, dtype: Any, how: str) -> None:
    for group, layout, shape, async_op in cases(groups, how):
        check(how, On(group, dtype, shape, layout=layout), async_op)


MIXED = list(zip(map(np.dtype, ("f4", "i8", "f4", "c16")), SHAPES))
EVERY = [(dtype, (i, 2)) for i, dtype in enumerate(ALL_DTYPES)]
COALESCED = [
    *(("all_reduce_coalesced", op, MIXED) for op in ("SUM", "PRODUCT", "PREMUL_SUM")),
    *(("all_reduce_coalesced", "AVG", [(np.dtype(code), shape) for shape in SHAPES]) for code in ("f8", "f2")),
    *(("reduce_scatter_single_coalesced, stacked", op, MIXED) for op in ("SUM", "PRODUCT", "PREMUL_SUM")),
    *((f"{name}_coalesced", None, EVERY) for name in ("broadcast", "all_gather", "all_gather_single")),
    ("all_gather_coalesced, uneven", None, EVERY),
    ("all_gather_single_coalesced, stacked", None, EVERY),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(("how", "op", "several"), COALESCED)
def test_coalesced(groups: Groups, layout: Layout, async_op: bool, how: str, op: str | None, several: Any) -> None:
    for group in groups:
        check(how, On(group, op=op, layout=layout, several=several), async_op)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("sizes", [[5000] * 200, [3, 70_000, 0, 400_000, 1, 250_000, 10_000]], ids=["alike", "uneven"])
def test_all_reduce_coalesced_of_many_arrays(process_group: hc.ProcessGroup, async_op: bool, sizes: list[int]) -> None:
    n = process_group.size
    given = np.arange(sum(sizes), dtype=np.float32)
    arrays = np.split(given + process_group.rank, np.cumsum(sizes)[:-1])
    work = hc.all_reduce_coalesced(arrays, "avg", process_group, async_op)
    assert work is None or work.wait()
    assert_same(np.concatenate(arrays), given + np.float32((n - 1) / 2))


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
        prefix, rooted = array.copy(), array.copy()
        for operation in (
            lambda: hc.all_reduce(array, async_op=async_op),  # noqa: B023
            lambda: hc.all_reduce(array, "avg", async_op=async_op),  # noqa: B023
            lambda: hc.scan(prefix, async_op=async_op),  # noqa: B023
            lambda: hc.reduce(rooted, 0, async_op=async_op),  # noqa: B023
        ):
            work = operation()
            assert work is None or work.wait()
            assert_same(array, whole.sum(0))
        assert_same(prefix, whole[: process_group.rank + 1].sum(0))
        assert_same(rooted, whole.sum(0) if process_group.rank == 0 else whole[process_group.rank])


def test_the_input_of_all_gather_single_may_be_part_of_its_output(process_group: hc.ProcessGroup) -> None:
    output = np.full((process_group.size, 3), -1.0)
    output[process_group.rank] = process_group.rank
    hc.all_gather_single(output, output[process_group.rank])
    assert_same(output, np.repeat(np.arange(float(process_group.size)), 3).reshape(-1, 3))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("uses_node", [False, True])
def test_outputs_that_share_memory_are_refused(process_group: hc.ProcessGroup, uses_node: bool) -> None:
    rank, size = process_group.rank, process_group.size
    for _ in range(10 * uses_node):
        hc.broadcast(np.ones(3), 0)
    block, array = np.zeros(3 * size), np.full(3, rank + 1.0)
    ends = [block[:: 3 * size - 1], *(block[i : i + 1] for i in range(1, size - 1)), block[-1:]]  # others lie between
    for outputs in ([np.zeros(3)] * size, [block[2 * i : 2 * i + 3] for i in range(size)][::-1], ends):
        with pytest.raises(ValueError, match=r"output_list\[\d\] and output_list\[\d\] share memory"):
            hc.all_gather(outputs, array)
        with pytest.raises(ValueError, match=r"output_list\[\d\] and output_list\[\d\] share memory"):
            hc.all_to_all(outputs, [array] * size)
        with pytest.raises(ValueError, match="share memory") if rank == 0 else contextlib.nullcontext():
            hc.gather(array, outputs if rank == 0 else None, 0)
        if rank == 0:  # the others wait for it, or have given their values
            hc.gather(array, list(block.reshape(size, 3)), 0)
    columns = list(np.zeros((3, size)).T)  # between each other, without a common element
    hc.all_gather(columns, array)
    assert_same(np.array(columns), np.repeat(np.arange(1.0, size + 1), 3).reshape(size, 3))


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


@pytest.mark.parametrize("dtype", INTEGERS, ids=dtype_name)
@pytest.mark.parametrize("factor", [np.int64(3), np.uint64(3), np.array(3)], ids=["int64", "uint64", "array"])
def test_a_factor_of_another_integer_dtype(process_group: hc.ProcessGroup, dtype: Any, factor: Any) -> None:
    array = np.arange(3).astype(dtype)
    hc.all_reduce(array, hc.ReduceOp.PREMUL_SUM(factor))
    assert_same(array, (np.arange(3) * 3 * process_group.size).astype(dtype))


def test_numpys_floating_point_errors_do_not_leave_an_average(process_group: hc.ProcessGroup) -> None:
    whole, parts = np.full(3, 3e38, np.complex64), np.full(3 * process_group.size, 5e-324)
    parts[: 3 * (process_group.rank + 1)] *= 3
    with np.errstate(all="raise"):
        for async_op in (False, True):
            for work in (
                hc.all_reduce(whole.copy(), "avg", async_op=async_op),
                hc.all_reduce(parts.copy(), "avg", async_op=async_op),
                hc.reduce_scatter_single(parts[:3].copy(), parts, "avg", async_op=async_op),
            ):
                assert work is None or work.wait()
