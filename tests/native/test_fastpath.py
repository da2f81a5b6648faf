"""The compiled extension: what it does is right, and ranks with and without it meet."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
import hpccomm.debug
from hpccomm.mpi import shared_memory
from hpccomm.native import fastpath, reason
from tests.launch import launch

needs_extension = pytest.mark.skipif(fastpath is None, reason="without the compiled extension")

DTYPES = ["f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "c16", "?"]
SIZES = [0, 1, 7, 100, 2049, 66_000, 131_073]  # beside and across the limits of one phase, of a slot, of the memory
FOLDS = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}


@pytest.fixture
def group(process_group: hc.ProcessGroup) -> hc.ProcessGroup:
    """Return a group whose memory of the node has been made."""
    for _ in range(20):
        hc.barrier()
    return process_group


def values(n: int, size: int, dtype: str) -> Any:
    """Return the arrays of all ranks, one row each."""
    generator = np.random.default_rng([n, size, *dtype.encode()])
    if np.dtype(dtype).kind in "fc":
        return (generator.random((n, size)) + 0.5).astype(dtype)
    return generator.integers(0, 2 if dtype == "?" else 100, (n, size)).astype(dtype)


def folded(rows: Any, op: str) -> Any:
    """Return the reduction in rank order; half precisions are rounded once."""
    wide = rows.astype(np.float32) if rows.dtype == np.float16 else rows
    total = wide[0].copy()
    with np.errstate(all="ignore"):
        for row in wide[1:]:
            total = FOLDS[op](total, row)
        return total.astype(rows.dtype)


def laid_out(array: Any, is_strided: bool) -> Any:
    """Return a copy of `array`, with gaps between its elements where asked for."""
    if not is_strided:
        return array.copy()
    room_for_two = np.zeros((*array.shape, 2), array.dtype)
    room_for_two[..., 0] = array
    return room_for_two[..., 0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives_of_arrays_that_one_rank_has_with_gaps(group: Any, dtype: str, size: int) -> None:
    n, me = group.size, group.rank
    rows = values(n, size, dtype)
    for odd in (0, n):  # the rank whose arrays have gaps; none
        for op in FOLDS if dtype not in ("c16",) else ("sum", "product"):
            array = laid_out(rows[me], me == odd)
            hc.all_reduce(array, op, group=group)  # type: ignore[arg-type]
            if np.dtype(dtype).kind in "fc":
                np.testing.assert_allclose(array, folded(rows, op), rtol=1e-2 if dtype == "f2" else 1e-5)
            else:
                np.testing.assert_array_equal(array, folded(rows, op))
        output = laid_out(np.zeros((n, size), dtype), me == odd)
        hc.all_gather_single(output, laid_out(rows[me], me == odd), group=group)
        np.testing.assert_array_equal(output, rows)
        for source in range(n):
            array = laid_out(rows[me], me == odd)
            hc.broadcast(array, group_src=source, group=group)
            np.testing.assert_array_equal(array, rows[source])
        parts = np.stack([np.roll(rows, shift, 1) for shift in range(n)], 1)  # [rank, part]
        reduced = laid_out(np.zeros(size, dtype), me == odd)
        hc.reduce_scatter_single(reduced, laid_out(parts[me], me == odd), "max" if dtype == "?" else "sum", group=group)
        expected = folded(parts[:, me], "max" if dtype == "?" else "sum")
        if np.dtype(dtype).kind in "fc":
            np.testing.assert_allclose(reduced, expected, rtol=1e-2 if dtype == "f2" else 1e-5)
        else:
            np.testing.assert_array_equal(reduced, expected)


@needs_extension
@pytest.mark.parametrize("size", SIZES[1:-1])
@pytest.mark.parametrize(("dtype", "part"), [("f4", "f4"), ("c8", "f4"), ("c16", "f8")])
def test_reductions_are_in_rank_order_and_have_the_same_bits_everywhere(
    group: Any, dtype: str, part: str, size: int
) -> None:
    width = size * np.dtype(dtype).itemsize // np.dtype(part).itemsize
    rows = np.random.default_rng(size).standard_normal((group.size, width)).astype(part).view(dtype)
    array = rows[group.rank].copy()
    hc.all_reduce(array, group=group)
    if group.size > 1:
        assert array.tobytes() == folded(rows, "sum").tobytes()


@needs_extension
@pytest.mark.parametrize("name", ["SUM", "PROD", "MIN", "MAX", "BAND", "BOR", "BXOR"])
def test_ops_of_mpi4py_take_the_fast_path(group: Any, name: str) -> None:
    fold = FOLDS | {"prod": np.multiply, "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
    rows = values(group.size, 7, "i4")
    array, before = rows[group.rank].copy(), group.dispatcher.fast_path.count
    hc.all_reduce(array, getattr(MPI, name), group)
    np.testing.assert_array_equal(array, fold[name.lower()].reduce(rows))
    assert group.dispatcher.fast_path.count == before + 1


@needs_extension
@pytest.mark.serial
@pytest.mark.parametrize("nbytes", [0, 24, 200_000])
def test_a_copy_is_numpys(nbytes: int) -> None:
    memory = np.random.default_rng(nbytes).integers(0, 99, 2 * nbytes + 64).astype(np.uint8)
    first, second = memory[:nbytes], memory[8 : 8 + nbytes]  # which share memory
    apart = np.zeros(nbytes, np.uint8)
    for target, source in ((apart, first), (second, first), (np.zeros(nbytes), first), (apart[::-1], second)):
        expected = target.copy()
        expected[...] = source.copy()
        fastpath.copy(target, source)
        np.testing.assert_array_equal(target, expected)
    memory.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        fastpath.copy(memory, memory.copy())


CALLS: dict[str, Any] = {
    "size": lambda group, odd: hc.all_reduce(np.ones(4 if odd else 3), group=group),
    "large": lambda group, odd: hc.all_reduce(np.ones(90_000 if odd else 3), group=group),
    "dtype": lambda group, odd: hc.all_reduce(np.ones(4, "i4" if odd else "f4"), group=group),
    "op": lambda group, odd: hc.all_reduce(np.ones(4), "max" if odd else "sum", group=group),
    "operation": lambda group, odd: hc.barrier(group=group) if odd else hc.all_reduce(np.ones(4), group=group),
    "rounds": lambda group, odd: broadcast(group, 90_000, group.rank) if odd else hc.barrier(group=group),
    "root, in rounds": lambda group, odd: broadcast(group, 90_000, group.size - 1 if odd else 0),
    "nothing to gather": lambda group, odd: hc.all_gather_single(
        np.ones(0 if odd else 3 * group.size), np.ones(0 if odd else 3), group
    ),
    "nothing to reduce": lambda group, odd: hc.reduce_scatter_single(
        np.ones(0 if odd else 3), np.ones(0 if odd else 3 * group.size), group=group
    ),
}


def broadcast(group: Any, count: int, root: int) -> None:
    hc.broadcast(np.ones(count), group=group, group_src=root)


@needs_extension
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", CALLS)
def test_ranks_that_do_not_make_the_same_call_all_hear_of_it_and_go_on(
    group: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group.dispatcher.fast, "tries", False)  # earlier tests may have found MPI faster
    with pytest.raises(hc.DistBackendError, match=r"rank \d of the group calls another operation, or with another op"):
        CALLS[what](group, group.rank == group.size - 1)
    hc.barrier(group)
    array = np.ones(3)
    hc.all_reduce(array, group=group)
    assert (array == group.size).all()


@needs_extension
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", ["root", "dtype"])
def test_all_ranks_hear_in_the_next_collective_of_a_broadcast_that_differs(group: Any, what: str) -> None:
    odd = group.rank == group.size - 1  # the others' root waits for no rank
    array = np.ones(300, np.int64 if odd and what == "dtype" else np.float64)
    with contextlib.suppress(hc.DistBackendError):
        hc.broadcast(array, group=group, group_src=group.rank if odd and what == "root" else 0)
    with pytest.raises(hc.DistBackendError, match=r"rank \d of the group called .*, in the collective before this one"):
        hc.barrier(group)
    hc.all_reduce(np.ones(3), group=group)


@needs_extension
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["all_gather_single", "all_to_all_single"])
def test_ranks_compare_dtypes_of_values_that_they_do_not_reduce(group: Any, name: str) -> None:
    dtype = np.int64 if group.rank == 0 else np.float64
    x, y = np.ones(group.size, dtype), np.zeros(group.size * (group.size if name == "all_gather_single" else 1), dtype)
    with pytest.raises(hc.DistBackendError, match=r"rank \d of the group calls another operation"):
        getattr(hc, name)(y, x, group=group)


def test_long_and_long_long_are_one_dtype(group: Any) -> None:
    array = np.ones(5, np.longlong if group.rank else np.int64)
    hc.all_reduce(array, group=group)
    assert (array == group.size).all()


# -- lists of arrays, and what only some ranks get ----------------------------------------------------------------


def one_of_lists(generator: Any, group: Any) -> None:
    """Do one operation, drawn alike on all ranks, on arrays that rank 0 may have with gaps; compare with NumPy's."""
    n, me = group.size, group.rank
    dtype = str(generator.choice(["f4", "f8", "i4", "u1", "f2"]))
    # The last but one goes in rounds, where all know how large it is; all ranks' parts of the last are left to MPI.
    largest = int(generator.choice([0, 3, 100, 30_000, 200_001, 700_001], p=[0.2, 0.2, 0.2, 0.2, 0.16, 0.04]))
    gaps = bool(generator.integers(2)) and me == 0
    root, op = int(generator.integers(n)), str(generator.choice(["sum", "max"]))
    sizes = generator.integers(0, largest + 1, n)
    table = generator.integers(0, largest + 1, (n, n))

    def arrays(sizes: Any) -> list[Any]:
        return [generator.integers(0, 3, size).astype(dtype) for size in sizes]

    def mine(made: list[Any]) -> list[Any]:
        return [laid_out(each, gaps) for each in made]

    def empty(sizes: Any) -> list[Any]:
        return mine([np.zeros(size, dtype) for size in sizes])

    def reduced(rows: list[Any]) -> Any:
        return folded(np.stack(rows), op)

    def same(given: Any, expected: Any) -> None:
        for one, other in zip(given, expected, strict=True):
            np.testing.assert_array_equal(one, other)

    name = str(generator.choice(["all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "reduce", "scan",
                                 "exscan", "all_to_all_single", "all_reduce_coalesced"]))  # fmt: skip
    if name in ("all_gather", "gather", "scatter"):
        data, outputs = arrays(sizes), empty(sizes)
        if name == "all_gather":
            hc.all_gather(outputs, laid_out(data[me], gaps), group)
            same(outputs, data)
        elif name == "gather":
            hc.gather(laid_out(data[me], gaps), outputs if me == root else None, group_dst=root, group=group)
            same(outputs if me == root else [], data if me == root else [])
        else:
            hc.scatter(outputs[me], mine(data) if me == root else None, group_src=root, group=group)
            same([outputs[me]], [data[me]])
    elif name == "reduce_scatter":
        rows, output = [arrays(sizes) for _ in range(n)], empty([sizes[me]])[0]
        hc.reduce_scatter(output, mine(rows[me]), op, group)  # type: ignore[arg-type]
        same([output], [reduced([row[me] for row in rows])])
    elif name == "all_to_all":
        rows, outputs = [arrays(row) for row in table], empty(table[:, me])
        hc.all_to_all(outputs, mine(rows[me]), group)
        same(outputs, [row[me] for row in rows])
    elif name == "all_to_all_single":
        rows, output = (
            [np.stack(arrays([largest] * n)) for _ in range(n)],
            laid_out(np.zeros((n, largest), dtype), gaps),
        )
        hc.all_to_all_single(output, laid_out(rows[me], gaps), group=group)
        same(output, [row[me] for row in rows])
    elif name == "all_reduce_coalesced":
        rows = [arrays(sizes) for _ in range(n)]
        given = mine(rows[me])
        hc.all_reduce_coalesced(given, op, group)  # type: ignore[arg-type]
        same(given, [reduced([row[i] for row in rows]) for i in range(n)])
    else:
        rows = arrays([largest] * n)
        given = laid_out(rows[me], gaps)
        if name == "reduce":
            hc.reduce(given, op=op, group_dst=root, group=group)  # type: ignore[arg-type]
            same([given], [reduced(rows) if me == root else rows[me]])
        elif name == "scan":
            hc.scan(given, op, group)  # type: ignore[arg-type]
            same([given], [reduced(rows[: me + 1])])
        else:
            hc.exscan(given, op, group)  # type: ignore[arg-type]
            same([given], [reduced(rows[:me]) if me else rows[0]])


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_of_lists(group: Any, seed: int) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(50):
        one_of_lists(generator, group)


@pytest.mark.parametrize("largest", [0, 5, 4000, 90_000])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "f2", "S3", "mixed"])
def test_coalesced_forms_in_one_run_and_in_several(group: Any, dtype: str, largest: int) -> None:
    n, me = group.size, group.rank
    generator = np.random.default_rng([largest, *dtype.encode()])
    sizes = generator.integers(0, largest + 1, 9)
    dtypes = [str(generator.choice(["f4", "i2"])) if dtype == "mixed" else dtype for _ in sizes]
    rows = [[generator.integers(0, 3, (n, size)).astype(each) for size, each in zip(sizes, dtypes)] for _ in range(n)]
    for gaps in (False, me == 0):
        for root in range(n):
            given = [laid_out(each[0], gaps) for each in rows[me]]
            hc.broadcast_coalesced(given, group_src=root, group=group)
            for array, expected in zip(given, rows[root]):
                np.testing.assert_array_equal(array, expected[0])
        outputs = [laid_out(np.zeros_like(each), gaps) for each in rows[me]]
        hc.all_gather_single_coalesced(outputs, [laid_out(each[0], gaps) for each in rows[me]], group)
        for i, output in enumerate(outputs):
            np.testing.assert_array_equal(output, [row[i][0] for row in rows])
        parts = [[each[0][: len(each[0]) // (rank + 1)] for each in rows[rank]] for rank in range(n)]  # fewer and fewer
        lists = [[laid_out(np.zeros_like(part), gaps) for part in of_rank] for of_rank in parts]
        hc.all_gather_coalesced(lists, [laid_out(part, gaps) for part in parts[me]], group)
        for of_rank, expected_of_rank in zip(lists, parts):
            for output, expected in zip(of_rank, expected_of_rank):
                np.testing.assert_array_equal(output, expected)
        for op in ("sum", "max") if dtype != "S3" else ():
            reduced = [laid_out(np.zeros_like(each[0]), gaps) for each in rows[me]]
            hc.reduce_scatter_single_coalesced(reduced, [laid_out(each, gaps) for each in rows[me]], op, group)  # type: ignore[arg-type]
            for i, output in enumerate(reduced):
                np.testing.assert_array_equal(output, folded(np.stack([row[i][me] for row in rows]), op))


@pytest.mark.parametrize("left", [0, 1, 15, 16, 17, 32, 48])
def test_a_run_of_coalesced_arrays_may_fill_the_slot(group: Any, left: int) -> None:
    n, me = group.size, group.rank
    sizes = [131_000, (512 << 10) // 4 - 131_000 - left, 7]  # a slot has 16 elements less than 512 KiB, up to 31 ranks
    arrays = [np.arange(size, dtype=np.float32) + me for size in sizes]
    lists = [[np.zeros(size, np.float32) for size in sizes] for _ in range(n)]
    hc.all_gather_coalesced(lists, arrays, group)
    for rank, of_rank in enumerate(lists):
        for size, output in zip(sizes, of_rank):
            np.testing.assert_array_equal(output, np.arange(size, dtype=np.float32) + rank)


@pytest.mark.parametrize("size", [4, 60_000])
@pytest.mark.parametrize("form", ["all_gather", "all_gather_single", "reduce_scatter_single"])
@pytest.mark.parametrize("shared", [0, 1, 8])
def test_inputs_and_outputs_of_a_coalesced_form_alternate(group: Any, shared: int, form: str, size: int) -> None:
    """The first `shared` outputs are where inputs are, in reverse order."""
    n, me = group.size, group.rank
    memory = np.zeros((8, 2, n * size))
    given, made = (size, n * size) if form != "reduce_scatter_single" else (n * size, size)
    inputs = [memory[i, 0, :given] for i in range(8)]
    outputs = [memory[7 - i, 0, :made] if i < shared else memory[i, 1, :made] for i in range(8)]
    for i, array in enumerate(inputs):
        array[...] = me + 10 * i
    if form == "all_gather":
        hc.all_gather_coalesced([[each[rank * size :][:size] for each in outputs] for rank in range(n)], inputs, group)
    elif form == "all_gather_single":
        hc.all_gather_single_coalesced(outputs, inputs, group)
    else:
        hc.reduce_scatter_single_coalesced(outputs, inputs, group=group)
    for i, array in enumerate(outputs):
        gathered = np.repeat(np.arange(n) + 10 * i, size)
        expected = gathered if form != "reduce_scatter_single" else gathered.reshape(n, size).sum(0)
        np.testing.assert_array_equal(array, expected)


@needs_extension
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("size", [3, 60_000])  # of which four have no room in a slot together
def test_coalesced_forms_take_the_fast_path(group: Any, size: int) -> None:
    n, fast = group.size, group.dispatcher.fast_path
    small, large = [[np.zeros(each, "f4") for _ in range(4)] for each in (size, n * size)]
    calls: list[Any] = [
        lambda: hc.broadcast_coalesced(small, 0, group),
        lambda: hc.all_gather_single_coalesced(large, small, group),
        lambda: hc.reduce_scatter_single_coalesced(small, large, group=group),
        lambda: hc.all_gather_coalesced([[each.copy() for each in small] for _ in range(n)], small, group),
    ]
    for call in calls:
        before = fast.count
        call()
        assert fast.count == before + 1
    hc.barrier(group)


def test_coalesced_arrays_that_do_not_fit_are_refused_and_stay(group: Any) -> None:
    n = group.size
    small, large, frozen = np.zeros(3), np.zeros(3 * n + 1), np.zeros(3 * n)
    frozen.flags.writeable = False
    calls: list[Any] = [
        lambda: hc.broadcast_coalesced([small], group_src=n, group=group),
        lambda: hc.broadcast_coalesced([object()], group_src=0, group=group),  # type: ignore[list-item]
        lambda: hc.all_gather_single_coalesced([large], [small], group),
        lambda: hc.all_gather_single_coalesced([frozen], [small], group),
        lambda: hc.all_gather_single_coalesced([large, large], [small], group),
        lambda: hc.all_gather_coalesced([[small]] * n, [large], group),
        lambda: hc.all_gather_coalesced([[small]] * (n + 1), [small], group),
        lambda: hc.all_gather_coalesced([[small, large]] * n, [small], group),
        lambda: hc.all_gather_coalesced([[frozen]] * n, [frozen], group),
        lambda: hc.reduce_scatter_single_coalesced([small], [large], group=group),
        lambda: hc.reduce_scatter_single_coalesced([small], [small.astype("i4")], group=group),
        lambda: hc.reduce_scatter_single_coalesced([small], [np.zeros(3 * n)], "xor", group),  # type: ignore[arg-type]
    ]
    before = group.sequence_number
    for call in calls:
        with pytest.raises((ValueError, TypeError)):
            call()
    assert group.sequence_number == before
    assert not small.any()
    hc.barrier(group)


@needs_extension
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("own", [3, 4])
def test_a_part_of_another_size_is_an_error_where_it_is_taken_and_everywhere_if_it_is_the_largest(
    own: int, group: Any
) -> None:
    outputs = [np.zeros(own)] + [np.zeros(3 if group.rank == 0 else 4) for _ in range(1, group.size)]
    array = np.zeros(own if group.rank == 0 else 4)
    if group.rank == 0 or own == 3:  # rank 0 is told 3 of each, and the others give 4
        with pytest.raises(hc.DistBackendError, match=r"all_gather .*: rank \d of the group calls another operation"):
            hc.all_gather(outputs, array, group)
    else:
        hc.all_gather(outputs, array, group)
    hc.barrier(group)


# -- groups that can't have memory of the node ------------------------------------------------------------------


def use(group: Any) -> bool:
    """Run operations on a new group; return whether they went through memory of the node."""
    for _ in range(10):
        hc.barrier(group)
    array = np.ones(3)
    hc.all_reduce(array, group=group)
    assert (array == group.size).all()
    return bool(group.dispatcher.fast_path.node_part)


@needs_extension
@pytest.mark.mpi(min_size=2)
def test_a_process_has_a_limited_number_of_groups_with_memory(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "MOST_NODE_WINDOWS", shared_memory.Window.alive + 2)
    groups = [hc.new_group() for _ in range(4)]
    assert [use(group) for group in groups] == [True, True, False, False]
    for group in groups:
        hc.destroy_process_group(group)


@needs_extension
@pytest.mark.skipif(MPI.get_vendor()[0] != "MPICH", reason="MPICH has 2048 ids of communicators")
@pytest.mark.parametrize("free", [0, 1, 2, 4])
def test_the_last_groups_that_mpi_can_make_work(process_group: hc.ProcessGroup, free: int) -> None:
    with hc.new_group() as group:
        spare = []
        with contextlib.suppress(MPI.Exception):
            while True:
                spare.append(MPI.COMM_WORLD.Dup())
        for _ in range(free):
            spare.pop().Free()
        try:
            use(group)
        finally:
            for each in spare:
                each.Free()


# -- what is prepared for MPI ------------------------------------------------------------------------------------


def test_every_float16_comes_through_as_it_is(process_group: hc.ProcessGroup) -> None:
    for part in np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(-1, 2048):
        array = part.copy()
        hc.all_reduce(array, "max")
        is_number = ~np.isnan(part)
        assert (np.isnan(array) == ~is_number).all()
        np.testing.assert_array_equal(array.view(np.uint16)[is_number], part.view(np.uint16)[is_number])


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_sums_of_float16_are_rounded_once(process_group: hc.ProcessGroup, op: Any) -> None:
    n, me = process_group.size, process_group.rank
    generator = np.random.default_rng(1)
    for exponent in range(-9, 6):  # subnormal results, and infinite ones
        rows = (generator.standard_normal((n, 500)) * 10.0**exponent).clip(-65504, 65504).astype(np.float16)
        array = rows[me].copy()
        hc.all_reduce(array, op)
        with np.errstate(all="ignore"):
            total = folded(rows.astype(np.float32), "sum") / np.float32(n if op == "avg" else 1)
            expected = total.astype(np.float16)
        if n < 3:  # of more ranks MPI may add in another order
            np.testing.assert_array_equal(array, expected)
        else:
            np.testing.assert_allclose(array, expected, rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "c8"])
def test_averages_of_arrays_of_any_layout(process_group: hc.ProcessGroup, dtype: str) -> None:
    n, me = process_group.size, process_group.rank
    for layout in (slice(None), slice(None, None, 2), slice(None, None, -3)):
        array = np.arange(24, dtype=dtype).reshape(2, 12)[:, layout]
        array += me
        hc.all_reduce(array, "avg")
        expected = np.arange(24, dtype="f8").reshape(2, 12)[:, layout] + (n - 1) / 2
        np.testing.assert_allclose(array, expected, rtol=1e-3)


# -- Works -----------------------------------------------------------------------------------------------------


def test_a_message_is_a_work_in_every_respect(process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    array, seen = np.zeros(2), []
    receive, send = hc.irecv(array, (me - 1) % n), hc.isend(np.full(2, float(me)), (me + 1) % n)
    assert isinstance(receive, hc.Work)
    receive.add_done_callback(seen.append)
    assert (receive.op_type, send.op_type) == ("recv", "send")
    assert send.sequence_number == receive.sequence_number + 1
    assert receive.group is process_group
    hc.wait_all([receive, send])
    assert receive.result() is array
    assert (array == (me - 1) % n).all()
    assert receive.source_rank() == (me - 1) % n
    assert seen == [receive]
    assert receive.is_completed()
    assert receive.status is hc.WorkStatus.COMPLETED
    assert receive.exception() is None
    assert repr(receive).endswith(f"recv #{receive.sequence_number}: completed>")
    assert not process_group.dispatcher.in_flight


@needs_extension
def test_dropped_works_are_let_go_of_where_nothing_else_makes_mpi_progress(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpccomm.mpi import compiled

    for looks in ("LOOKS", "LOOKS_OF_MANY"):  # who waits in the memory of the node never asks MPI
        monkeypatch.setattr(compiled, looks, 200_000)
    group = hc.new_group()
    array = np.ones(1)
    for _ in range(500):
        hc.all_reduce(array, "max", group=group, async_op=True)
        hc.barrier(group)
    assert len(group.dispatcher.in_flight) < 100
    for work in list(group.dispatcher.in_flight):
        work.wait()
    hc.destroy_process_group(group)


@needs_extension
def test_works_that_the_program_holds_are_not_polled_before_it_waits(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, me, polls = process_group.size, process_group.rank, []
    monkeypatch.setattr(process_group.dispatcher, "reap", lambda: polls.append(len(process_group.dispatcher.in_flight)))
    _, works = messages(n, me, 200)
    assert not polls
    hc.wait_all(works)
    _, works = messages(n, me, 50)
    del works[0]
    hc.wait_all(works + messages(n, me, 50)[1])
    assert polls


@needs_extension
def test_large_messages_take_the_fast_path(process_group: hc.ProcessGroup) -> None:
    n, me, checked = process_group.size, process_group.rank, process_group.dispatcher.messages
    output = np.zeros(1 << 20)  # more bytes than a collective's segment
    hc.wait_all([hc.irecv(output, (me - 1) % n), hc.isend(np.full(1 << 20, 1.0 * me), (me + 1) % n)])
    assert process_group.dispatcher.messages == checked
    assert (output == (me - 1) % n).all()


# -- wait_all ----------------------------------------------------------------------------------------------------


def messages(n: int, me: int, count: int, wide: int = 3) -> tuple[list[Any], list[hc.Work]]:
    """Begin messages around a ring; return the arrays that receive them, and the Works."""
    arrays = [np.zeros(wide) for _ in range(count)]
    works = [hc.irecv(array, (me - 1) % n, tag=i) for i, array in enumerate(arrays)]
    works += [hc.isend(np.full(3, 1.0 * me + i), (me + 1) % n, tag=i) for i in range(count)]
    return arrays, works


@pytest.mark.parametrize("count", [0, 1, 2, 32, 40, 100])  # 64 are waited for in C at once
def test_waiting_for_messages_of_any_number_once_and_again(process_group: hc.ProcessGroup, count: int) -> None:
    n, me = process_group.size, process_group.rank
    of_earlier_tests = set(process_group.dispatcher.in_flight)  # which have dropped them
    arrays, works = messages(n, me, count)
    if works:
        works[0].wait()
    for given in ([None, *works, None], tuple(reversed(works)), [*works, *works], [None]):
        hc.wait_all(given)
    for i, array in enumerate(arrays):
        assert (array == (me - 1) % n + i).all()
        assert works[i].source_rank() == (me - 1) % n
    assert set(process_group.dispatcher.in_flight) <= of_earlier_tests


def test_works_of_all_kinds_in_one_list(process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    arrays, works = messages(n, me, 4)
    seen: list[hc.Work] = []
    works[1].add_done_callback(seen.append)
    future = works[2].get_future()
    total, strided, large = np.full(2, me + 1.0), np.zeros((3, 2))[:, 0], np.ones(1 << 18)
    patient = hc.new_group(timeout=60, on_timeout="raise")
    works.append(hc.all_reduce(total, async_op=True))
    works += [hc.all_reduce(strided, async_op=True), hc.all_reduce(large, async_op=True), hc.CompletedWork()]
    works.append(hc.barrier(patient, async_op=True))
    works.append(works[0])  # twice
    hc.wait_all(works)
    assert seen == [works[1]]
    assert future.done()
    assert [array[0] for array in arrays] == [(me - 1) % n + i for i in range(4)]
    assert (total == n * (n + 1) / 2).all()
    assert (large == n).all()
    hc.destroy_process_group(patient)


def test_those_that_fail_keep_their_own_errors(process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    arrays = [np.zeros(wide) for wide in (3, 5, 3, 7)]
    of_earlier_tests = set(process_group.dispatcher.in_flight)  # which have dropped them
    works = [hc.irecv(array, (me - 1) % n, tag=i) for i, array in enumerate(arrays)]
    works += [hc.isend(np.full(3, 1.0), (me + 1) % n, tag=i) for i in range(4)]
    with pytest.raises(hc.DistBackendError, match=rf"recv #{works[1].sequence_number} of .*24 bytes, but the array 40"):
        hc.wait_all(works)
    failed = [i for i, work in enumerate(works) if not work.is_success()]
    assert failed == [1, 3]
    assert "the array 56" in str(works[3].exception())
    assert (arrays[0] == arrays[2]).all()
    assert set(process_group.dispatcher.in_flight) <= of_earlier_tests


@pytest.mark.parametrize("nbytes", [2048, 2049, 2112, 2303, 70_001])
def test_arrays_of_any_size_may_begin_anywhere(process_group: hc.ProcessGroup, nbytes: int) -> None:
    n, me = process_group.size, process_group.rank
    values = np.arange(n * nbytes, dtype=np.uint32).reshape(n, nbytes).astype(np.uint8)
    for begin in range(0, 66, 3):
        memory = np.zeros(66 + (n + 1) * nbytes, np.uint8)
        array = memory[begin : begin + nbytes]
        gathered = memory[begin + nbytes : begin + (n + 1) * nbytes].reshape(n, nbytes)
        array[:] = values[me]
        hc.all_gather_single(gathered, array)
        hc.broadcast(array, n - 1)
        assert (memory[begin : begin + (n + 1) * nbytes] == np.concatenate((values[-1], values.reshape(-1)))).all()
        assert not memory[:begin].any()
        assert not memory[begin + (n + 1) * nbytes :].any()


# -- a rank alone ------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(process_group: hc.ProcessGroup) -> Any:
    """Yield a group of this rank."""
    with hc.new_group([process_group.rank], use_local_synchronization=True) as group:
        yield group


@pytest.mark.parametrize("op", [*FOLDS, "avg", hc.ReduceOp.SUM])
@pytest.mark.parametrize("dtype", ["f4", "i8", "f2"])
def test_a_rank_alone_keeps_what_it_has(alone: Any, dtype: str, op: Any) -> None:
    op = "sum" if (op, dtype) == ("avg", "i8") else op
    for gaps in (False, True):
        for shape in ((0,), (1,), (3000,), (4, 5)):
            given = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
            array = laid_out(given, gaps)
            hc.all_reduce(array, op, alone)
            hc.reduce(array, op=op, group_dst=0, group=alone)
            hc.broadcast(array, group_src=0, group=alone)
            hc.all_reduce(array, op, alone, async_op=True).wait()
            hc.broadcast(array, group_src=0, group=alone, async_op=True).wait()
            np.testing.assert_array_equal(array, given)
            calls: list[Any] = [hc.all_gather_single, hc.all_to_all_single]
            calls.append(lambda output, array, group: hc.reduce_scatter_single(output, array, op, group))
            for call in calls:
                output = laid_out(np.zeros(shape, dtype), gaps)
                call(output, array, group=alone)
                np.testing.assert_array_equal(output, given)
    given.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        hc.all_reduce(given, group=alone)
    with pytest.raises(ValueError, match="group_src is 1"):
        hc.broadcast(array, group_src=1, group=alone)


def test_the_works_of_a_rank_alone_are_works_in_every_respect(alone: Any) -> None:
    array, seen = np.ones(2), []
    for name in ("all_reduce", "broadcast", "barrier"):
        with hc.debug.record():
            call = {"all_reduce": lambda: hc.all_reduce(array, group=alone, async_op=True),
                    "broadcast": lambda: hc.broadcast(array, group_src=0, group=alone, async_op=True),
                    "barrier": lambda: hc.barrier(alone, async_op=True)}[name]  # fmt: skip
            before = alone.sequence_number
            work: Any = call()
            work.add_done_callback(seen.append)
            assert (work.op_type, work.sequence_number, work.group) == (name, before + 1, alone)
            work.wait()
            work.wait(5)
            assert work.get_future().wait() is (None if name == "barrier" else array)
            assert work.is_completed()
            assert work.is_success()
            assert work.status is hc.WorkStatus.COMPLETED
            assert work.exception() is None
            work.abort()
            record = hc.debug.recorded()[-1]
            assert (record.name, record.state) == (name, "completed")
        dropped = call()
        hc.wait_all([dropped, None])
        del dropped
        assert seen.pop() is work
        assert not alone.dispatcher.in_flight


def test_a_receive_can_be_taken_back(process_group: hc.ProcessGroup) -> None:
    work = hc.irecv(np.zeros(2), process_group.rank, tag=7)
    work.abort()
    assert work.status is hc.WorkStatus.ABORTED
    sent = hc.isend(np.zeros(2), process_group.rank, tag=7)
    with pytest.raises(hc.UnsupportedOperationError, match=r"send: .* can't be taken back"):
        sent.abort()
    hc.irecv(np.zeros(2), process_group.rank, tag=7).wait()
    sent.wait()


@pytest.mark.parametrize("asks", ["wait", "is_completed"])
def test_a_short_message_is_an_error_of_its_work(process_group: hc.ProcessGroup, asks: str) -> None:
    receive = hc.irecv(np.zeros(3), process_group.rank)
    hc.isend(np.zeros(2), process_group.rank).wait()
    while asks == "is_completed" and not receive.is_completed():
        pass
    with pytest.raises(hc.DistBackendError, match=rf"recv #{receive.sequence_number} of .*16 bytes, but the array 24"):
        receive.wait()
    assert receive.status is hc.WorkStatus.FAILED


# -- with and without -------------------------------------------------------------------------------------------

MEETS = """
import os, sys
import numpy as np
from mpi4py import MPI
if MPI.COMM_WORLD.Get_rank() in {without}:
    os.environ["HPCCOMM_NATIVE"] = "0"
import hpccomm as hc
from hpccomm import native
with hc.init_process_group() as world:
    n, me = world.size, world.rank
    for size in [1, 3000, 90_000] * 6:
        x, y = np.full(size, me + 1.0), np.empty((n, size))
        hc.all_gather_single(y, x)
        assert (y == np.arange(1, n + 1)[:, None]).all()
        hc.all_reduce(x)
        assert (x == n * (n + 1) / 2).all()
        hc.broadcast(x, 0)
        hc.barrier()
        z = np.empty(size)
        hc.wait_all([hc.irecv(z, (me - 1) % n), hc.isend(x, (me + 1) % n)])
        assert (z == x).all()
    print(me, native.fastpath is not None, native.reason)
"""


@pytest.mark.serial
@needs_extension
@pytest.mark.parametrize("without", [{1}, {0, 1, 2}])
def test_ranks_with_and_without_the_room_meet(without: set[int]) -> None:
    done = launch(3, sys.executable, "-c", MEETS.format(without=without))
    assert done.returncode == 0, done.stderr
    expected = [f"{r} False HPCCOMM_NATIVE=0; unset it" if r in without else f"{r} True " for r in range(3)]
    assert sorted(done.stdout.splitlines()) == expected


@pytest.mark.serial
@pytest.mark.skipif(os.environ.get("HPCCOMM_NATIVE") == "0", reason="HPCCOMM_NATIVE=0")
@pytest.mark.skipif(not shutil.which(os.environ.get("CC", "cc")), reason="there is no C compiler")
def test_there_is_one_where_it_can_be_built() -> None:
    assert fastpath is not None, reason  # otherwise all of this would be tested without it, and nobody would know


@pytest.mark.serial
def test_info_says_whether_there_is_one() -> None:
    for value, line in [("0", "no: HPCCOMM_NATIVE=0; unset it")] + [("1", "yes")] * (fastpath is not None):
        done = launch(1, sys.executable, "-m", "hpccomm", "info", env={"HPCCOMM_NATIVE": value})
        assert f"\nC extension      {line}" in done.stdout, done.stdout + done.stderr


AFTER_THE_END = """
from mpi4py import MPI
import numpy as np, hpccomm as hc
world = hc.init_process_group()
x, spread = np.ones(8), np.ones((8, 2))[:, 0]
started = world.all_reduce_init(np.ones(8))
started.start()
started.wait()
calls = [
    lambda: hc.all_reduce(x), lambda: hc.all_reduce(spread), lambda: hc.all_reduce(x, async_op=True), hc.barrier,
    lambda: hc.send(x, 1) if world.rank == 0 else hc.recv(x, 0), started.start,
    world.destroy,
]
for call in calls[:4]:
    call()
MPI.Finalize()
for call in calls:
    try:
        call()
    except hc.DistBackendError as error:
        assert "MPI has been finalised" in str(error), error
    else:
        print("it has communicated")
"""


@pytest.mark.serial
@needs_extension
def test_after_mpi_has_been_finalised_operations_raise() -> None:
    done = launch(2, sys.executable, "-c", AFTER_THE_END)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
