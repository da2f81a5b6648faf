"""Reductions in pieces, with pieces of a few elements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.mpi.segments import columns, segments
from hpccomm.process.tuning import Tuning

from ..arrays import LAYOUTS, NUMERIC, REDUCTIONS, assert_same, dtype_name, reduced, reductions_of, values

SHAPES = [(0,), (1,), (8,), (50,), (3, 7)]


@pytest.fixture(scope="module")
def group(process_group: hc.ProcessGroup) -> Iterator[Any]:
    group = hc.new_group()
    assert isinstance(group, hc.ProcessGroup)
    group.tuning = Tuning(segment_bytes=64, reduce_scatter_bytes=100, node_bytes=0)
    yield group
    hc.destroy_process_group(group)


def call(function: Any, *arguments: Any, async_op: bool, **options: Any) -> None:
    work = function(*arguments, async_op=async_op, **options)
    if async_op:
        work.wait()


@pytest.mark.serial
def test_segments_are_the_whole_in_order() -> None:
    whole = np.arange(100.0)
    pieces = segments(whole.reshape(10, 10), 56)
    assert [piece.size for piece in pieces] == [7] * 14 + [2]
    assert np.array_equal(np.concatenate(pieces), whole)
    assert [piece.size for piece in segments(whole, 3)] == [1] * 100  # smaller than an element


@pytest.mark.serial
@pytest.mark.parametrize("nbytes", [1, 100, 10_000])
def test_columns_have_a_piece_of_every_part(nbytes: int) -> None:
    array, output = np.arange(60.0), np.zeros(20)
    seen = [np.empty(0)] * 3
    for piece, target in columns(array.reshape(3, -1), output, np.empty(nbytes, np.uint8)):
        assert piece.nbytes <= max(nbytes, 24)
        target[...] = 1
        seen = [np.append(before, row) for before, row in zip(seen, piece.reshape(3, -1), strict=True)]
    assert output.all()
    assert np.array_equal(np.concatenate(seen), array)


@pytest.mark.parametrize("dtype", NUMERIC, ids=dtype_name)
def test_reductions(group: hc.ProcessGroup, dtype: Any) -> None:
    n, me = group.size, group.rank
    for name, layout, shape, async_op in itertools.product(reductions_of(dtype), LAYOUTS, SHAPES, (False, True)):
        op = REDUCTIONS[name][0]
        given = [values(dtype, shape, rank) for rank in range(n)]
        expected = reduced(name, given)
        array = layout(given[me])
        call(hc.all_reduce, array, op, group=group, async_op=async_op)
        assert_same(array, expected, "all_reduce", name, layout, shape, async_op)

        array = layout(given[me])
        call(hc.reduce, array, n - 1, op, group=group, async_op=async_op)
        assert_same(array, expected if me == n - 1 else given[me], "reduce", name, layout, shape, async_op)

        rows = [values(dtype, (n, *shape), rank) for rank in range(n)]
        output = layout(np.zeros(shape, dtype))
        call(hc.reduce_scatter_single, output, layout(rows[me]), op, group=group, async_op=async_op)
        assert_same(output, reduced(name, rows)[me], "reduce_scatter_single", name, layout, shape, async_op)
