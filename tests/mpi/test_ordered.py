"""The "ordered" backend: every reduction is NumPy's own, from rank 0 on, to the last bit, whatever carries it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.core.operation_list import OPERATIONS
from hpccomm.mpi import ordered

from ..arrays import LAYOUTS, NUMERIC, REDUCTIONS, contiguous, reductions_of
from ..arrays import reduced as reduced_exactly
from ..arrays import values as exact_values
from ..matrix.cases import GOOD, WITH_OUTPUTS
from ..matrix.test_matrix import FORMS, Opposite, every_overlap, goes_to_itself, has_form, perform, share_memory

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
SUMS = ["SUM", "AVG", "PREMUL_SUM", "PRODUCT", "MIN", "MAX"]
FACTOR = 1 / 3
OPS = {name: getattr(hc.ReduceOp, name) for name in SUMS}
OPS["PREMUL_SUM"] = hc.ReduceOp.PREMUL_SUM(FACTOR)
UFUNCS = {**dict.fromkeys(SUMS, np.add), "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
DTYPES = [np.dtype(each) for each in ("f2", ml_dtypes.bfloat16, "f4", "f8", "g", "F", "D")]
SMALL, CUT, MANY = 5, 9_973, 700_001  # elements: of all ranks at once, in segments, in several pieces
FORMS_OF_SUMS = ["blocking", "async", "coalesced", "coalesced async", "persistent"]


@pytest.fixture(autouse=True)
def _arrays_of_cut_elements_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "GATHERED_BYTES", 64 << 10)


@pytest.fixture
def group(process_group: hc.ProcessGroup) -> Iterator[hc.ProcessGroup]:
    """All ranks, from the last to the first: so "in rank order" is not the order in which processes are numbered."""
    made = hc.new_group(list(range(SIZE))[::-1], backend="cpu:ordered", sort_ranks=False)
    yield made
    hc.destroy_process_group(made)


def values(rank: int, count: int, dtype: Any) -> Any:
    """What a rank of the group contributes: of very different sizes, so that every order has a sum of its own."""
    random = np.random.default_rng([rank, count])
    spread = (random.standard_normal(count) * np.exp2(random.integers(-6, 6, count))).astype(dtype)
    return spread * np.array(1 + 0.5j, dtype) if dtype.kind == "c" else spread


def folded(name: str, contributions: list[Any]) -> Any:
    """NumPy's left fold; half precisions in float32, rounded once."""
    dtype = contributions[0].dtype
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    operands = [each.astype(wide) for each in contributions]
    if name == "PREMUL_SUM":
        operands = [each * FACTOR for each in operands]
    with np.errstate(all="ignore"):
        result = reduce(UFUNCS[name], operands)
        return (result / len(operands) if name == "AVG" else result).astype(dtype)


def bits(array: Any) -> Any:
    """The bytes that count: of longdouble, all but the padding."""
    if array.dtype == np.longdouble:
        return np.ascontiguousarray(array).view(np.uint8).reshape(-1, array.itemsize)[:, :10].tobytes()
    return array.tobytes()


def all_reduced(form: str, array: Any, op: Any, group: hc.ProcessGroup) -> None:
    if form == "persistent":
        with hc.all_reduce_init(array, op, group=group) as work:
            work.start()
            work.wait()
        return
    done = (
        hc.all_reduce_coalesced([array[:1], array[1:]], op, group=group, async_op="async" in form)
        if "coalesced" in form
        else hc.all_reduce(array, op, group=group, async_op="async" in form)
    )
    assert (done is None) == ("async" not in form)
    if done is not None:
        done.wait()


@pytest.mark.parametrize("form", FORMS_OF_SUMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_is_numpys_left_fold(group: hc.ProcessGroup, dtype: Any, form: str) -> None:
    for count in (SMALL, CUT) if form != "blocking" else (1, SMALL, CUT, MANY):
        everybody = [values(rank, count, dtype) for rank in range(SIZE)]
        for name in SUMS if count < MANY else ["SUM"]:
            if (name in ("MIN", "MAX") or name == "PRODUCT") and dtype.kind == "c":
                continue  # complex products are another test's
            x = everybody[group.rank].copy()
            all_reduced(form, x, OPS[name], group)
            assert bits(x) == bits(folded(name, everybody)), (count, name)


@pytest.mark.skipif(SIZE < 3, reason="two ranks make one addition")
def test_the_values_tell_one_order_from_another() -> None:
    everybody = [values(rank, CUT, np.dtype(np.float64)) for rank in range(SIZE)]
    assert bits(folded("SUM", everybody)) != bits(folded("SUM", everybody[::-1]))
    assert bits(folded("PRODUCT", everybody)) != bits(folded("PRODUCT", everybody[::-1]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("async_op", [False, True])
def test_every_reduction_and_layout(group: hc.ProcessGroup, layout: Any, async_op: bool) -> None:
    for dtype in (np.dtype(np.float16), np.dtype(np.float32)):
        for count in (SMALL, CUT):
            everybody = [values(rank, count, dtype) for rank in range(SIZE)]
            for name, expected in {
                "all_reduce": folded("SUM", everybody),
                "reduce": folded("SUM", everybody) if group.rank == SIZE - 1 else everybody[group.rank],
                "scan": folded("SUM", everybody[: group.rank + 1]),
                "exscan": folded("SUM", everybody[: group.rank] or everybody[:1]),
            }.items():
                x = layout(everybody[group.rank])
                options = {"group_dst": SIZE - 1} if name == "reduce" else {}
                work = getattr(hc, name)(x, group=group, async_op=async_op, **options)
                assert work is None or work.wait()
                assert bits(x) == bits(expected), (name, dtype, count)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("count", [SMALL, MANY])
def test_reduce_scatters(group: hc.ProcessGroup, count: int, async_op: bool) -> None:
    dtype = np.dtype(np.float64)
    everybody = [values(rank, SIZE * count, dtype) for rank in range(SIZE)]
    expected = folded("SUM", everybody).reshape(SIZE, -1)[group.rank]
    mine = everybody[group.rank]
    outputs = [np.zeros(count) for _ in range(4)]
    works = [
        hc.reduce_scatter_single(outputs[0], mine, group=group, async_op=async_op),
        hc.reduce_scatter(outputs[1], list(mine.reshape(SIZE, -1)), group=group, async_op=async_op),
        hc.reduce_scatter_single_coalesced([outputs[2]], [mine], group=group, async_op=async_op),
    ]
    for work in works:
        assert (work is None) != async_op
        assert work is None or work.wait()
    with hc.reduce_scatter_single_init(outputs[3], mine, group=group) as persistent:
        persistent.start()
        persistent.wait()
    for output in outputs:
        assert bits(output) == bits(expected)
    inside = mine.copy()  # the result may lie where the values were
    hc.reduce_scatter_single(inside.reshape(SIZE, -1)[0], inside, group=group)
    assert bits(inside[:count]) == bits(expected)


def test_uneven_parts(group: hc.ProcessGroup) -> None:
    dtype, sizes = np.dtype(np.float32), [3 * rank for rank in range(SIZE)]
    everybody = [values(rank, sum(sizes), dtype) for rank in range(SIZE)]
    ends = np.cumsum(sizes)[:-1]
    output = np.zeros(sizes[group.rank], dtype)
    hc.reduce_scatter(output, np.split(everybody[group.rank], ends), "avg", group=group)
    assert bits(output) == bits(np.split(folded("AVG", everybody), ends)[group.rank])


def test_neither_the_size_nor_the_cut_nor_who_comes_first_changes_a_bit(
    group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = np.dtype(np.float64)
    everybody = [values(rank, CUT, dtype) for rank in range(SIZE)]
    expected = bits(folded("SUM", everybody))
    for late in range(SIZE):
        for gathered, piece in ((1 << 40, 1 << 20), (0, 1 << 20), (0, 1000), (0, 8)):
            monkeypatch.setattr(ordered, "GATHERED_BYTES", gathered)
            monkeypatch.setattr(ordered, "PIECE_BYTES", max(piece, CUT // 50 * 8))
            x = everybody[group.rank].copy()
            if group.rank == late:
                time.sleep(0.002)  # only makes the others come first: the claim holds in any case
            hc.all_reduce(x, group=group)
            assert bits(x) == expected
    x = everybody[group.rank].copy()
    for start in range(0, CUT, 1111):
        hc.all_reduce(x[start : start + 1111], group=group)
    assert bits(x) == expected


def test_products_of_complex_numbers(group: hc.ProcessGroup) -> None:
    everybody = [exact_values(np.dtype(np.complex128), (7,), rank) for rank in range(SIZE)]
    x = everybody[group.rank].copy()
    hc.all_reduce(x, "product", group=group)
    assert x.tolist() == reduced_exactly("PRODUCT", everybody).tolist()


def test_nan_goes_to_every_rank(group: hc.ProcessGroup) -> None:
    for op in ("min", "max"):
        x = np.array([np.nan if group.rank == 0 else 1.0, np.nan if group.rank == SIZE - 1 else 2.0])
        hc.all_reduce(x, op, group=group)
        assert np.isnan(x).all()


def test_a_programs_own_mpi_op_is_called_in_rank_order(group: hc.ProcessGroup) -> None:
    def difference(first: Any, second: Any, _: Any) -> None:
        a, b = np.frombuffer(first), np.frombuffer(second)
        b[:] = a - b

    op = MPI.Op.Create(difference, commute=False)
    for count in (3, CUT):
        everybody = [values(rank, count, np.dtype(np.float64)) for rank in range(SIZE)]
        x = everybody[group.rank].copy()
        hc.all_reduce(x, op, group=group)
        assert bits(x) == bits(reduce(np.subtract, everybody))
    op.Free()


@pytest.mark.parametrize("dtype", NUMERIC, ids=str)
def test_every_dtype_and_reduction(group: hc.ProcessGroup, dtype: Any) -> None:
    for name in reductions_of(dtype):
        everybody = [exact_values(dtype, (3, 4), rank) for rank in range(SIZE)]
        x = contiguous(everybody[group.rank])
        hc.all_reduce(x, REDUCTIONS[name][0], group=group)
        assert x.tolist() == reduced_exactly(name, everybody).tolist()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", GOOD)
def test_every_form_of_every_operation(group: hc.ProcessGroup, name: str, form: str) -> None:
    collected = form != "coalescing" or OPERATIONS[name].is_collected
    if not has_form(name, form) or not collected or goes_to_itself(name, form, group):
        return
    opposite = Opposite(name, group)
    perform(name, form, group)
    opposite.finish()


@every_overlap
@pytest.mark.parametrize("form", ["ordinary", "async"])
@pytest.mark.parametrize("name", [name for name in WITH_OUTPUTS if OPERATIONS[name].reduces])
def test_inputs_may_share_memory_with_outputs(group: hc.ProcessGroup, name: str, form: str, how: str) -> None:
    share_memory(name, form, how, group)


def test_without_threads_of_its_own(group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "THREAD_MULTIPLE", False)
    dtype = np.dtype(np.float64)
    everybody = [values(rank, CUT * SIZE, dtype) for rank in range(SIZE)]
    arrays = [everybody[group.rank].copy() for _ in range(3)]
    part = np.zeros(CUT)
    works = [
        hc.all_reduce(arrays[0], group=group, async_op=True),
        hc.reduce(arrays[1], group_dst=0, group=group, async_op=True),
        hc.scan(arrays[2], group=group, async_op=True),
        hc.reduce_scatter_single(part, everybody[group.rank], group=group, async_op=True),
    ]
    for work in works:
        assert work is not None
        assert work.wait()
    total = folded("SUM", everybody)
    assert bits(arrays[0]) == bits(total)
    assert bits(arrays[1]) == bits(total if group.rank == 0 else everybody[group.rank])
    assert bits(arrays[2]) == bits(folded("SUM", everybody[: group.rank + 1]))
    assert bits(part) == bits(total.reshape(SIZE, -1)[group.rank])


def test_mixed_with_asynchronous_operations_of_mpis_thread(group: hc.ProcessGroup) -> None:
    big, counts = np.full(300_000, float(group.rank)), np.full(300_000, group.rank)
    gathered = np.zeros((SIZE, 300_000))
    works = [
        hc.all_reduce(big, group=group, async_op=True),
        hc.all_reduce(counts, group=group, async_op=True),
        hc.all_gather_single(gathered, np.full(300_000, float(group.rank)), group=group, async_op=True),
    ]
    for work in works:
        assert work is not None
        assert work.wait()
    assert big[0] == counts[-1] == SIZE * (SIZE - 1) / 2
    assert gathered[:, 5].tolist() == list(range(SIZE))


@pytest.mark.serial
def test_it_is_one_of_the_backends() -> None:
    assert hc.is_backend_available("ordered")
    assert hc.BackendConfig("ordered").device_map == {"cpu": "ordered"}
