"""What happens above 2^31 elements on MPI libraries with 32-bit counts, shown with a limit of a few elements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.core.backends import options_for
from hpccomm.mpi import datatypes, large_counts
from hpccomm.process.tuning import Tuning

from ..arrays import LAYOUTS, REDUCTIONS, assert_same, reduced, values
from ..matrix.cases import WITH_OUTPUTS
from ..matrix.test_matrix import every_overlap, share_memory

DTYPES = [np.dtype("f8"), np.dtype("f2"), np.dtype("M8[s]")]
both = pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
layouts = pytest.mark.parametrize("layout", LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=[6, 2**31 - 1], ids=["limit 6", "limit 2^31"])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[hc.ProcessGroup]:
    monkeypatch.setattr(datatypes, "LARGEST_COUNT", request.param)
    tuning = Tuning(segment_bytes=32 if request.param == 6 else 2 << 20, node_bytes=0)
    datatypes._block.cache_clear()
    with hc.init_process_group() as group:
        group.tuning = tuning
        group.dispatcher.backends["cpu"] = large_counts.LargeCountMPIBackend(options_for(group, "cpu"))
        yield group
    datatypes._block.cache_clear()


def finish(work: hc.Work | None, async_op: bool) -> None:
    assert (work is not None) == async_op
    if work is not None:
        work.wait()


@every_overlap
@pytest.mark.parametrize("form", ["ordinary", "async"])
@pytest.mark.parametrize("name", [name for name in WITH_OUTPUTS if "coalesced" not in name])
def test_inputs_may_share_memory_with_outputs(group: hc.ProcessGroup, name: str, form: str, how: str) -> None:
    share_memory(name, form, how, group)


@both
@layouts
@dtypes
def test_movements(group: hc.ProcessGroup, async_op: bool, layout: Any, dtype: Any) -> None:
    n, me = group.size, group.rank
    shapes = [(5 + rank, 3) for rank in range(n)]
    given = [values(dtype, shape, rank) for rank, shape in enumerate(shapes)]
    outputs = [layout(np.zeros(shape, dtype)) for shape in shapes]

    finish(hc.all_gather(outputs, layout(given[me]), async_op=async_op), async_op)
    for output, expected in zip(outputs, given, strict=True):
        assert_same(output, expected, "all_gather")

    stacked = layout(np.zeros((n, 7), dtype))
    finish(hc.all_gather_single(stacked, layout(values(dtype, (7,), me)), async_op=async_op), async_op)
    assert_same(stacked, np.stack([values(dtype, (7,), rank) for rank in range(n)]), "all_gather_single")

    outputs = [layout(np.zeros(shape, dtype)) for shape in shapes]
    finish(hc.gather(layout(given[me]), outputs if me == n - 1 else None, n - 1, async_op=async_op), async_op)
    if me == n - 1:
        for output, expected in zip(outputs, given, strict=True):
            assert_same(output, expected, "gather")

    output = layout(np.zeros(shapes[me], dtype))
    parts = [layout(each) for each in given] if me == 0 else None
    finish(hc.scatter(output, parts, 0, async_op=async_op), async_op)
    assert_same(output, given[me], "scatter")

    array = layout(given[0] if me == 0 else np.zeros(shapes[0], dtype))
    finish(hc.broadcast(array, 0, async_op=async_op), async_op)
    assert_same(array, given[0], "broadcast")

    message = layout(np.zeros(shapes[me - 1], dtype))
    outcome = hc.sendrecv(layout(given[me]), (me + 1) % n, message, (me - 1) % n, async_op=async_op)
    assert (outcome.source_rank() if async_op else outcome) == (me - 1) % n
    assert_same(message, given[me - 1], "sendrecv")


@both
@layouts
@dtypes
def test_all_to_all(group: hc.ProcessGroup, async_op: bool, layout: Any, dtype: Any) -> None:
    n, me = group.size, group.rank

    def part(sender: int, receiver: int) -> Any:
        return values(dtype, (2 + (sender + 2 * receiver) % 3, 2), sender, receiver)

    expected = [part(sender, me) for sender in range(n)]
    outputs = [layout(np.zeros(each.shape, dtype)) for each in expected]
    inputs = [part(me, receiver) for receiver in range(n)]
    finish(hc.all_to_all(outputs, [layout(each) for each in inputs], async_op=async_op), async_op)
    for output, each in zip(outputs, expected, strict=True):
        assert_same(output, each, "all_to_all")

    output = layout(np.zeros((sum(map(len, expected)), 2), dtype))
    sizes = [len(each) for each in expected], [len(each) for each in inputs]
    finish(hc.all_to_all_single(output, layout(np.concatenate(inputs)), *sizes, async_op=async_op), async_op)
    assert_same(output, np.concatenate(expected), "all_to_all_single, uneven")

    given = [values(dtype, (2 * n, 4), rank) for rank in range(n)]
    output = layout(np.zeros((2 * n, 4), dtype))
    finish(hc.all_to_all_single(output, layout(given[me]), async_op=async_op), async_op)
    assert_same(output, np.concatenate([each[2 * me : 2 * me + 2] for each in given]), "all_to_all_single, even")


@both
@layouts
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_reductions(group: hc.ProcessGroup, async_op: bool, layout: Any, dtype: Any) -> None:
    n, me = group.size, group.rank
    for name, rows in itertools.product(("SUM", "AVG", "PREMUL_SUM"), (1, 9)):
        op = REDUCTIONS[name][0]
        given = [values(dtype, (n, rows), rank) for rank in range(n)]
        output = layout(np.zeros(rows, dtype))
        finish(hc.reduce_scatter_single(output, layout(given[me]), op, async_op=async_op), async_op)
        assert_same(output, reduced(name, given)[me], name, "reduce_scatter_single")

        parts = [[values(dtype, (rank + rows,), sender, rank) for rank in range(n)] for sender in range(n)]
        output = layout(np.zeros(me + rows, dtype))
        finish(hc.reduce_scatter(output, [layout(part) for part in parts[me]], op, async_op=async_op), async_op)
        assert_same(output, reduced(name, [row[me] for row in parts]), name, "reduce_scatter")

        array = layout(given[me])
        finish(hc.all_reduce(array, op, async_op=async_op), async_op)
        assert_same(array, reduced(name, given), name, "all_reduce")
