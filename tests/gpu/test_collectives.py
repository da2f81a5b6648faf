"""Every collective on GPU arrays: dtypes x reductions x layouts x shapes x groups x sync/async, as NumPy computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.nccl import plan
from hpccomm.nccl.backend import MOST_CALLS

from ..arrays import (
    ALL_DTYPES,
    REDUCTIONS,
    assert_same,
    backwards,
    contiguous,
    dtype_name,
    fortran,
    reduced,
    reductions_of,
    strided,
    values,
)
from . import gpus

pytestmark = pytest.mark.usefixtures("process_group")

LAYOUTS = [contiguous, strided, backwards, fortran]
SHAPES = [(), (0,), (3, 4)]
NCCL_REDUCES = [np.dtype(name) for name in ["?", "i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]]
NCCL_REDUCES += [dtype for dtype in ALL_DTYPES if dtype.name == "bfloat16"]
MOVED = [dtype for dtype in ALL_DTYPES if dtype.kind not in "MmSU" and dtype.name != "longdouble" and not dtype.names]
THOROUGH = [np.dtype(np.float32), np.dtype(np.complex128)]  # and the others on some layouts and shapes
FEW = ["bool", "int32", "float16", "bfloat16", "float32", "complex128"]  # of each kind


def of_interest(dtypes: list[Any]) -> list[Any]:
    """Return all dtypes on one and two ranks, and some on more."""
    return [dtype for dtype in dtypes if MPI.COMM_WORLD.Get_size() < 3 or dtype.name in FEW]


numeric = pytest.mark.parametrize("dtype", of_interest(NCCL_REDUCES), ids=dtype_name)
every_dtype = pytest.mark.parametrize("dtype", of_interest(MOVED), ids=dtype_name)

Groups = list[hc.ProcessGroup]


def transport(groups: Groups) -> str:
    return groups[0].config.device_map["cuda"]


def cases(
    groups: Groups, thorough: bool = True
) -> Iterator[tuple[hc.ProcessGroup, Callable[[Any], Any], tuple[int, ...], bool]]:
    """Every layout, shape, and way to call, or some: what an array looks like and what is in it do not interact."""
    if transport(groups) == "nccl" and thorough and MPI.COMM_WORLD.Get_size() < 3:
        return itertools.product(groups, LAYOUTS, SHAPES, (False, True))
    some = [(contiguous, (), True), (contiguous, (0,), False), (strided, (5,), True), (backwards, (3, 4), False)]
    return ((group, *case) for group in groups for case in some)


def reductions_over(groups: Groups, dtype: Any) -> list[str]:
    """What hpccomm promises for a dtype; NCCL does not have all of it."""
    if transport(groups) != "nccl":
        return reductions_of(dtype)
    lacking = {"b": ["BXOR"], "c": ["PRODUCT"]}.get(dtype.kind, ["BAND", "BOR", "BXOR"])
    return [name for name in reductions_of(dtype) if name not in lacking]


def call(function: Callable[..., Any], *arguments: Any, group: hc.ProcessGroup, async_op: bool, **options: Any) -> None:
    """Run an operation; what comes after it on the current stream sees its result."""
    work = function(*arguments, group=group, async_op=async_op, **options)
    if async_op:
        assert isinstance(work, hc.Work)
        assert work.wait() is True
    else:
        assert work is None


def contributions(group: hc.ProcessGroup, dtype: Any, shape: tuple[int, ...], salt: int = 0) -> list[Any]:
    return [values(dtype, shape, rank, salt) for rank in group.ranks]


def assert_reduced(array: Any, name: str, given: list[Any], *case: object) -> None:
    """NCCL multiplies by 1/n where NumPy divides by n, which rounds differently."""
    actual, expected = gpus.values(array), reduced(name, given)
    if name == "AVG" and len(given) & (len(given) - 1):  # no power of two
        wide = np.complex128 if expected.dtype.kind == "c" else np.float64
        epsilon = {2: 1e-2, 4: 1e-6, 8: 1e-6}.get(expected.dtype.itemsize, 1e-14)
        np.testing.assert_allclose(actual.astype(wide), expected.astype(wide), rtol=epsilon)
    else:
        assert_same(actual, expected, name, *case)


# -- reductions --------------------------------------------------------------------------------------


@numeric
def test_all_reduce(groups: Groups, dtype: Any) -> None:
    for name in reductions_over(groups, dtype):
        for group, layout, shape, async_op in cases(groups, thorough=name == "SUM" and dtype in THOROUGH):
            given = contributions(group, dtype, shape)
            array = gpus.array(given[group.rank], layout)
            call(hc.all_reduce, array, REDUCTIONS[name][0], group=group, async_op=async_op)
            assert_reduced(array, name, given, layout, shape, group, async_op)


@numeric
def test_reduce_writes_on_the_destination_only(groups: Groups, dtype: Any) -> None:
    for name in reductions_over(groups, dtype):
        for group, layout, shape, async_op in cases(groups, thorough=name == "SUM" and dtype in THOROUGH):
            given = contributions(group, dtype, shape)
            dst = group.ranks[-1]
            array = gpus.array(given[group.rank], layout)
            call(hc.reduce, array, dst, REDUCTIONS[name][0], group=group, async_op=async_op)
            if hc.get_rank() == dst:
                assert_reduced(array, name, given, layout, shape, group, async_op)
            else:
                assert_same(gpus.values(array), given[group.rank], name, layout, shape, group, async_op)


@numeric
def test_reduce_scatter(groups: Groups, dtype: Any) -> None:
    for name in reductions_over(groups, dtype):
        for group, layout, shape, async_op in cases(groups, thorough=name == "SUM" and dtype in THOROUGH):
            inputs = [contributions(group, dtype, shape, salt=part) for part in range(group.size)]
            output = gpus.array(np.zeros(shape, dtype), layout)
            mine = [gpus.array(part[group.rank], layout) for part in inputs]
            call(hc.reduce_scatter, output, mine, REDUCTIONS[name][0], group=group, async_op=async_op)
            assert_reduced(output, name, inputs[group.rank], layout, shape, group, async_op)
            for part, array in zip(inputs, mine, strict=True):
                assert_same(gpus.values(array), part[group.rank], "input", name, layout, shape, async_op)


@numeric
def test_reduce_scatter_single(groups: Groups, dtype: Any) -> None:
    for name in reductions_over(groups, dtype):
        for group, layout, shape, async_op in cases(groups, thorough=name == "SUM" and dtype in THOROUGH):
            whole = contributions(group, dtype, (group.size, *shape))
            output = gpus.array(np.zeros(shape, dtype), layout)
            array = gpus.array(whole[group.rank], layout)
            call(hc.reduce_scatter_single, output, array, REDUCTIONS[name][0], group=group, async_op=async_op)
            parts = [np.asarray(each[group.rank]) for each in whole]
            assert_reduced(output, name, parts, layout, shape, group, async_op)
            assert_same(gpus.values(array), whole[group.rank], "input", name, layout, shape, async_op)


def test_uneven_reduce_scatter(groups: Groups) -> None:
    for group in groups:
        inputs = [np.full(part + 1, group.rank + 1.0) for part in range(group.size)]
        output = gpus.array(np.zeros(group.rank + 1))
        hc.reduce_scatter(output, [gpus.array(each) for each in inputs], group=group)
        assert_same(gpus.values(output), np.full(group.rank + 1, sum(range(1, group.size + 1)), float))


@numeric
@pytest.mark.parametrize("name", ["scan", "exscan"])
def test_prefixes(groups: Groups, dtype: Any, name: str) -> None:
    if transport(groups) == "nccl":
        pytest.skip("NCCL has none")
    for group, layout, shape, async_op in cases(groups):
        given = contributions(group, dtype, shape)
        array = gpus.array(given[group.rank], layout)
        call(getattr(hc, name), array, group=group, async_op=async_op)
        prefix = given[: group.rank + 1] if name == "scan" else given[: group.rank]
        assert_reduced(array, "SUM", prefix or given[:1], layout, shape, group, async_op)


def test_a_reduction_in_float16_is_done_in_float16s_range(groups: Groups) -> None:
    for group in groups:
        array = gpus.array(np.full(3, 60000, np.float16))
        hc.all_reduce(array, "max", group=group)
        assert_same(gpus.values(array), np.full(3, 60000, np.float16))


def test_a_complex_factor(groups: Groups) -> None:
    for group in groups:
        array = gpus.array(np.full(2, 1 + 1j, np.complex64))
        hc.all_reduce(array, hc.ReduceOp.PREMUL_SUM(2j), group=group)
        assert_same(gpus.values(array), np.full(2, 2j * (1 + 1j) * group.size, np.complex64))


# -- moving ------------------------------------------------------------------------------------------


@every_dtype
def test_broadcast(groups: Groups, dtype: Any) -> None:
    for group, layout, shape, async_op in cases(groups, thorough=dtype in THOROUGH):
        src = group.ranks[-1]
        array = gpus.array(values(dtype, shape, hc.get_rank()), layout)
        call(hc.broadcast, array, src, group=group, async_op=async_op)
        assert_same(gpus.values(array), values(dtype, shape, src), layout, shape, group, async_op)


@every_dtype
def test_all_gather_single(groups: Groups, dtype: Any) -> None:
    for group, layout, shape, async_op in cases(groups, thorough=dtype in THOROUGH):
        given = contributions(group, dtype, shape)
        output = gpus.array(np.zeros((group.size, *shape), dtype), layout)
        call(hc.all_gather_single, output, gpus.array(given[group.rank], layout), group=group, async_op=async_op)
        assert_same(gpus.values(output), np.stack(given), layout, shape, group, async_op)


@every_dtype
def test_all_gather(groups: Groups, dtype: Any) -> None:
    for group, layout, shape, async_op in cases(groups, thorough=dtype in THOROUGH):
        given = contributions(group, dtype, shape)
        outputs = [gpus.array(np.zeros(shape, dtype), layout) for _ in given]
        call(hc.all_gather, outputs, gpus.array(given[group.rank], layout), group=group, async_op=async_op)
        for output, expected in zip(outputs, given, strict=True):
            assert_same(gpus.values(output), expected, layout, shape, group, async_op)


@every_dtype
def test_gather_and_scatter(groups: Groups, dtype: Any) -> None:
    for group, layout, shape, async_op in cases(groups, thorough=dtype in THOROUGH):
        given = contributions(group, dtype, shape)
        root = group.ranks[-1]
        is_root = hc.get_rank() == root
        outputs = [gpus.array(np.zeros(shape, dtype), layout) for _ in given] if is_root else None
        call(hc.gather, gpus.array(given[group.rank], layout), outputs, root, group=group, async_op=async_op)
        for output, expected in zip(outputs or [], given, strict=False):
            assert_same(gpus.values(output), expected, layout, shape, group, async_op)
        back = gpus.array(np.zeros(shape, dtype), layout)
        call(hc.scatter, back, outputs, root, group=group, async_op=async_op)
        assert_same(gpus.values(back), given[group.rank], layout, shape, group, async_op)


@every_dtype
@pytest.mark.parametrize("native", [True, False])
def test_all_to_all(groups: Groups, dtype: Any, native: bool, request: pytest.FixtureRequest) -> None:
    if not gpus.is_real():
        request.getfixturevalue("machine").has_all_to_all = native
    elif not native:
        pytest.skip("the library has ncclAlltoAll or not")
    for group, layout, shape, async_op in cases(groups, thorough=dtype in THOROUGH):
        given = [contributions(group, dtype, shape, salt=part) for part in range(group.size)]
        inputs = [gpus.array(part[group.rank], layout) for part in given]
        outputs = [gpus.array(np.zeros(shape, dtype), layout) for _ in given]
        call(hc.all_to_all, outputs, inputs, group=group, async_op=async_op)
        for output, expected in zip(outputs, given[group.rank], strict=True):
            assert_same(gpus.values(output), expected, layout, shape, group, async_op)
        whole = gpus.array(np.stack([part[group.rank] for part in given]), layout)
        output = gpus.array(np.zeros((group.size, *shape), dtype), layout)
        call(hc.all_to_all_single, output, whole, group=group, async_op=async_op)
        assert_same(gpus.values(output), np.stack(given[group.rank]), layout, shape, group, async_op)


def gathers(machine: Any) -> list[str]:
    """Return which functions of NCCL have been called since the last time, and how often."""
    called = [call for call in machine.calls if call in ("all_gather", "broadcast", "group_start")]
    machine.calls.clear()
    return called


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("layout", [contiguous, strided, "in one array"])
def test_lists_of_equal_sizes_are_one_call_of_nccl(
    process_group: hc.ProcessGroup, machine: Any, layout: Any, async_op: bool
) -> None:
    n = process_group.size
    array = gpus.array(np.full(3, process_group.rank))
    if layout == "in one array":
        outputs = [*gpus.array(np.zeros((n, 3), int))]
    else:
        outputs = [gpus.array(np.zeros(3, int), layout) for _ in range(n)]
    gathers(machine)
    call(hc.all_gather, outputs, array, group=process_group, async_op=async_op)
    assert gathers(machine) == ["all_gather"]
    for rank, output in enumerate(outputs):
        assert_same(gpus.values(output), np.full(3, rank))


def test_in_a_capture_lists_are_broadcasts_which_need_no_memory(process_group: hc.ProcessGroup, machine: Any) -> None:
    n = process_group.size
    array = gpus.array(np.full(3, process_group.rank))
    outputs = [gpus.array(np.zeros(3, int)) for _ in range(n)]
    hc.all_gather(outputs, array)
    gathers(machine)
    with gpus.captured() as graph:
        hc.all_gather(outputs, array)
    assert gathers(machine) == ["group_start"] * (n > 1) + ["broadcast"] * n
    gpus.write(array, np.full(3, 10 + process_group.rank))
    graph.launch()
    for rank, output in enumerate(outputs):
        assert_same(gpus.values(output), np.full(3, 10 + rank))


def test_uneven_sizes(groups: Groups) -> None:
    for group in groups:
        sizes = list(range(group.size))  # rank 0's is empty
        outputs = [gpus.array(np.zeros(size)) for size in sizes]
        hc.all_gather(outputs, gpus.array(np.full(group.rank, group.rank, float)), group=group)
        for size, output in zip(sizes, outputs, strict=True):
            assert_same(gpus.values(output), np.full(size, size, float))
        # rank s sends r + 1 elements of the value s to rank r
        array = gpus.array(np.full(sum(sizes) + group.size, group.rank, np.int32))
        output = gpus.array(np.zeros((group.rank + 1) * group.size, np.int32))
        splits = [size + 1 for size in sizes]
        hc.all_to_all_single(output, array, [group.rank + 1] * group.size, splits, group=group)
        assert_same(gpus.values(output), np.repeat(np.arange(group.size, dtype=np.int32), group.rank + 1))


# -- coalesced ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
def test_coalesced(groups: Groups, async_op: bool) -> None:
    dtypes = [np.dtype(np.float32), np.dtype(np.int64)]
    for group, layout in itertools.product(groups, LAYOUTS):
        given = [contributions(group, dtype, (3, 2), salt=i) for i, dtype in enumerate(dtypes)]

        def arrays(given: Any = given, rank: int = group.rank, layout: Any = layout) -> list[Any]:
            return [gpus.array(each[rank], layout) for each in given]

        summed = arrays()
        call(hc.all_reduce_coalesced, summed, group=group, async_op=async_op)
        for array, each in zip(summed, given, strict=True):
            assert_same(gpus.values(array), reduced("SUM", each))
        gathered = [[gpus.array(np.zeros((3, 2), dtype), layout) for dtype in dtypes] for _ in range(group.size)]
        call(hc.all_gather_coalesced, gathered, arrays(), group=group, async_op=async_op)
        for rank, outputs in enumerate(gathered):
            for output, each in zip(outputs, given, strict=True):
                assert_same(gpus.values(output), each[rank])
        stacks = [gpus.array(np.zeros((group.size, 3, 2), dtype), layout) for dtype in dtypes]
        call(hc.all_gather_single_coalesced, stacks, arrays(), group=group, async_op=async_op)
        for stack, each in zip(stacks, given, strict=True):
            assert_same(gpus.values(stack), np.stack(each))
        back = [gpus.array(np.zeros((3, 2), dtype), layout) for dtype in dtypes]
        call(hc.reduce_scatter_single_coalesced, back, stacks, group=group, async_op=async_op)
        for array, each in zip(back, given, strict=True):
            assert_same(gpus.values(array), each[group.rank] * group.size)
        src = group.ranks[-1]
        copied = arrays()
        call(hc.broadcast_coalesced, copied, src, group=group, async_op=async_op)
        for array, each in zip(copied, given, strict=True):
            assert_same(gpus.values(array), each[-1])


def test_a_coalescing_block_is_one_group_call(machine: Any, process_group: hc.ProcessGroup) -> None:
    arrays = [gpus.array(np.ones(4)) for _ in range(5)]
    machine.calls.clear()
    with hc.coalescing():
        for array in arrays:
            hc.all_reduce(array)
    assert machine.calls.count("group_start") == machine.calls.count("group_end") == 1
    assert machine.calls.count("all_reduce") == 5
    for array in arrays:
        assert_same(gpus.values(array), np.full(4, process_group.size, float))


def test_very_many_calls_are_several_groups(
    machine: Any, process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 2 * plan.CALLS_PER_GROUP <= MOST_CALLS  # a step may be as long as that
    monkeypatch.setattr(plan, "CALLS_PER_GROUP", 16)
    arrays = [gpus.array(np.ones(1)) for _ in range(40)]
    hc.all_reduce_coalesced(arrays)
    assert machine.calls.count("group_start") == machine.calls.count("group_end") == 3
    assert all(gpus.values(array)[0] == process_group.size for array in arrays)


# -- barrier ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cuda:nccl", "cuda:mpi"])
def test_barrier(backend: str) -> None:
    alone = hc.new_group(backend=backend)
    assert hc.barrier(alone) is None
    work = hc.barrier(alone, async_op=True)
    assert work.wait()
    alone.destroy()
