"""Arrays that go through memory of the node in several rounds: inputs in the outputs' memory, and ranks that differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.core.operation_list import OPERATIONS
from hpccomm.native import fastpath

from ..matrix import cases
from ..matrix.test_matrix import EVERY, every_overlap, share_memory

SLOT = 4096  # bytes, of a rank: the least
LISTS = [name for name in cases.WITH_OUTPUTS if name != "redistribute" and not OPERATIONS[name].is_a_message]


@pytest.fixture(scope="module")
def group(process_group: hc.ProcessGroup) -> Iterator[hc.ProcessGroup]:
    """A group whose slots are small, and in use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpccomm.mpi.compiled.LARGEST_SLOT", SLOT)
        with hc.new_group() as made:
            for _ in range(20):
                hc.barrier(made)
            yield made


def repeated(value: Any, times: int, made: dict[int, Any]) -> Any:
    """Return what has `times` as many of each element, and keep which array is which."""
    if isinstance(value, list):
        return [repeated(each, times, made) for each in value]
    if not isinstance(value, np.ndarray):
        return value
    return made.setdefault(id(value), np.repeat(value, times))


@every_overlap
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize(("name", "form"), [each for each in EVERY if each[0] in LISTS and each[1] != "batched"])
def test_inputs_may_share_memory_with_outputs(
    name: str, form: str, slots: int, how: str, group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = cases.GOOD[name]

    def larger(group: hc.ProcessGroup) -> cases.Good:
        fine, made = good(group), dict[int, Any]()
        times = slots * SLOT // 32 + 1  # they have four numbers of eight bytes
        arguments = tuple(repeated(each, times, made) for each in fine.arguments)
        outcomes = [(repeated(actual, times, made), repeated(wanted, times, made)) for actual, wanted in fine.outcomes]
        return cases.Good(arguments, fine.options, outcomes, fine.returns)

    monkeypatch.setitem(cases.GOOD, name, larger)
    if form != "coalescing" or OPERATIONS[name].is_collected:
        share_memory(name, form, how, group)


def differing_call(name: str, group: hc.ProcessGroup) -> None:
    """Make a call of two rounds in which rank 1 has another size for rank 0's part."""
    sizes = [5, 700, *[3] * (group.size - 2)]
    told = [6, *sizes[1:]] if group.rank == 1 else sizes
    mine = np.ones(sizes[group.rank])
    raises = pytest.raises(hc.DistBackendError, match="calls another operation")
    with raises if group.rank == (0 if name == "reduce_scatter" else 1) else nullcontext():
        if name == "all_gather":
            hc.all_gather([np.zeros(size) for size in told], mine, group)
        elif name == "reduce_scatter":
            hc.reduce_scatter(mine, [np.zeros(size) for size in told], group=group)
        else:
            first = 399 if group.rank == 1 else 400
            outputs = [[np.zeros(400 if rank else first), np.zeros(400)] for rank in range(group.size)]
            hc.all_gather_coalesced(outputs, [np.ones(400), np.ones(400)], group)


@pytest.mark.skipif(fastpath is None, reason="without the compiled extension there are no rounds")
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_gather_coalesced"])
def test_after_an_error_of_one_rank_all_go_on(name: str, group: hc.ProcessGroup) -> None:
    differing_call(name, group)
    hc.barrier(group)
    hc.barrier(group)
    x = np.ones(3)
    hc.all_reduce(x, group=group)
    assert (x == group.size).all()
