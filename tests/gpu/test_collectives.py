"""Every collective on GPU arrays: dtypes x reductions x layouts x shapes x groups x sync/async, as NumPy computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.nccl import plan
from hpccomm.nccl.backend import MOST_CALLS

from ..arrays import (
    ALL_DTYPES,
    assert_same,
    backwards,
    contiguous,
    dtype_name,
    fortran,
    reductions_of,
    strided,
    unaligned,
    uneven,
    uneven_backwards,
)
from ..calls import On, perform
from . import gpus
from .conftest import TRANSPORTS

pytestmark = pytest.mark.usefixtures("process_group")

# A misaligned access is cudaErrorMisalignedAddress in every later call of CUDA; the stand-in refuses it at once.
LAYOUTS = [contiguous, strided, backwards, fortran, unaligned, uneven, uneven_backwards]
NCCL_REDUCES = [np.dtype(name) for name in ["?", "i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]]
NCCL_REDUCES += [dtype for dtype in ALL_DTYPES if dtype.name == "bfloat16"]
MOVED = [dtype for dtype in ALL_DTYPES if dtype.kind not in "MmSU" and dtype.name != "longdouble" and not dtype.names]
THOROUGH = [np.dtype(np.float32), np.dtype(np.complex128)]  # and the others on some layouts and shapes
FEW = ["bool", "int32", "float16", "bfloat16", "float32", "complex128"]  # of each kind


def over(transports: list[str], dtypes: list[Any]) -> pytest.MarkDecorator:
    """Run a test with each dtype over NCCL on up to two ranks, and a few over MPI, whose own tests have all dtypes."""
    few = [dtype for dtype in dtypes if dtype.name in FEW]
    every = dtypes if MPI.COMM_WORLD.Get_size() < 3 else few
    chosen = [(each, dtype) for each in transports for dtype in (every if each == "nccl" else few)]
    names = [f"{transport}-{dtype_name(dtype)}" for transport, dtype in chosen]
    return pytest.mark.parametrize(("groups", "dtype"), chosen, indirect=["groups"], scope="module", ids=names)


Groups = list[hc.ProcessGroup]
Layout = Callable[[Any], Any]


def transport(groups: Groups) -> str:
    return groups[0].config.device_map["cuda"]


def cases(groups: Groups, thorough: bool = True) -> Iterator[tuple[hc.ProcessGroup, Layout, tuple[int, ...], bool]]:
    """Yield every layout and way to call, or some: the layout of an array and its values do not interact."""
    some = [
        (contiguous, (), True), (uneven, (0,), False), (strided, (5,), True), (backwards, (3, 4), False),
        (uneven_backwards, (4, 3), True),
    ]  # fmt: skip
    if transport(groups) == "nccl" and thorough and MPI.COMM_WORLD.Get_size() < 3:
        some += itertools.product(LAYOUTS, [(3, 4)], (False, True))
    return ((group, *case) for group in groups for case in some)


def reductions_over(groups: Groups, dtype: Any) -> list[str]:
    """Return the reductions that hpccomm promises for a dtype; NCCL lacks some."""
    if transport(groups) != "nccl":
        return reductions_of(dtype)
    lacking = {"b": ["BXOR"], "c": ["PRODUCT"]}.get(dtype.kind, ["BAND", "BOR", "BXOR"])
    return [name for name in reductions_of(dtype) if name not in lacking]


def check(how: str, on: On, layout: Layout, async_op: bool) -> None:
    """Make a call whose root is the last rank; `how` is its name, and "uneven" or "stacked".

    NCCL multiplies by 1/n where NumPy divides by n, which rounds differently.
    """
    name, on.stacked, on.uneven = how.partition(",")[0], "stacked" in how, "uneven" in how
    on.root, on.root_by, on.layout = on.n - 1, "", lambda given: gpus.array(given, layout)
    for array, expected in perform(name, on, async_op):
        actual = gpus.values(array)
        if on.op == "AVG" and on.n & (on.n - 1):  # no power of two
            wide = np.complex128 if expected.dtype.kind == "c" else np.float64
            epsilon = {2: 1e-2, 4: 1e-6, 8: 1e-6}.get(expected.dtype.itemsize, 1e-14)
            np.testing.assert_allclose(actual.astype(wide), expected.astype(wide), rtol=epsilon)
        else:
            assert_same(actual, expected, how, on, layout, async_op)


# -- reductions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single, stacked"])
@over(TRANSPORTS, NCCL_REDUCES)
def test_reductions(groups: Groups, dtype: Any, how: str) -> None:
    for op in reductions_over(groups, dtype):
        for group, layout, shape, async_op in cases(groups, thorough=op == "SUM" and dtype in THOROUGH):
            check(how, On(group, dtype, shape, op), layout, async_op)


@pytest.mark.parametrize("how", ["scan", "exscan"])
@over(TRANSPORTS[1:], NCCL_REDUCES)
def test_prefixes(groups: Groups, dtype: Any, how: str) -> None:
    for group, layout, shape, async_op in cases(groups):
        check(how, On(group, dtype, shape), layout, async_op)


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


@pytest.mark.parametrize("how", ["broadcast", "all_gather", "all_gather_single, stacked", "gather", "scatter"])
@over(TRANSPORTS, MOVED)
def test_moving(groups: Groups, dtype: Any, how: str) -> None:
    for group, layout, shape, async_op in cases(groups, thorough=dtype in THOROUGH):
        check(how, On(group, dtype, shape), layout, async_op)


@pytest.mark.parametrize(
    "how", ["reduce_scatter, uneven", "all_gather, uneven", "all_to_all, uneven", "all_to_all_single, uneven"]
)
def test_uneven_sizes(groups: Groups, how: str) -> None:
    for group in groups:
        check(how, On(group), contiguous, async_op=False)


def exchanged(groups: Groups, dtype: Any) -> None:
    for group, layout, shape, async_op in cases(groups, thorough=dtype in THOROUGH):
        for how in ("all_to_all", "all_to_all_single, stacked"):
            check(how, On(group, dtype, shape), layout, async_op)


@over(TRANSPORTS, MOVED)
def test_all_to_all(groups: Groups, dtype: Any) -> None:
    exchanged(groups, dtype)


@pytest.mark.parametrize("dtype", THOROUGH, ids=dtype_name)
def test_all_to_all_where_nccl_lacks_it(process_group: hc.ProcessGroup, dtype: Any, machine: Any) -> None:
    machine.has_all_to_all = False
    with hc.new_group() as group:
        exchanged([group], dtype)
    assert "all_to_all" not in machine.calls


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
    work = hc.all_gather(outputs, array, async_op=async_op)
    assert work is None or work.wait()
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


# -- coalesced ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("how", [
    "all_reduce_coalesced", "all_gather_coalesced", "all_gather_single_coalesced, stacked",
    "reduce_scatter_single_coalesced, stacked", "broadcast_coalesced",
])  # fmt: skip
def test_coalesced(groups: Groups, how: str, async_op: bool) -> None:
    several = [(np.dtype(dtype), (3, 2)) for dtype in ("f4", "i8")]
    for group, layout in itertools.product(groups, LAYOUTS):
        check(how, On(group, several=several), layout, async_op)


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
    monkeypatch.setattr(plan, "CALLS_PER_GROUP", 32)
    arrays = [gpus.array(np.ones(1)) for _ in range(80)]  # more than the fast path takes
    hc.all_reduce_coalesced(arrays)
    assert machine.calls.count("group_start") == machine.calls.count("group_end") == 3
    assert all(gpus.values(array)[0] == process_group.size for array in arrays)


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


# -- barrier ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cuda:nccl", "cuda:mpi"])
def test_barrier(backend: str) -> None:
    alone = hc.new_group(backend=backend)
    assert hc.barrier(alone) is None
    work = hc.barrier(alone, async_op=True)
    assert work.wait()
    alone.destroy()
