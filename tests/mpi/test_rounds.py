"""Arrays that go through memory of the node in several rounds, while inputs share memory with outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.core.operation_list import OPERATIONS

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
