"""Overlap: the measurement, and the share that is computed from it."""

from __future__ import annotations

import pytest

import hpccomm as hc
from benchmarks import overlap
from hpccomm.bench.measure import Plan


def test_each_contender_and_operation_has_a_line(process_group: hc.ProcessGroup) -> None:
    found = list(overlap.steps(process_group, [96], Plan(iterations=2, warmup=1, batch=2)))
    assert [each.contender for each in found] == ["hpccomm", "mpi4py"] * len(overlap.OPERATIONS)
    for each in found:
        assert 0 <= each.hidden <= 1
        assert 0 <= each.hidden_polled <= 1
    assert overlap.text(found).count("\n         96    hpccomm ") == len(overlap.OPERATIONS)


@pytest.mark.serial
@pytest.mark.parametrize(
    ("communication", "compute", "both", "hidden"),
    [(10, 10, 20, 0), (10, 10, 10, 1), (10, 10, 15, 0.5), (10, 10, 30, 0), (10, 5, 10, 1), (5, 10, 9, 1)],
)
def test_the_hidden_share(communication: float, compute: float, both: float, hidden: float) -> None:
    assert overlap.Overlap("x", "y", 8, communication, compute, both, both, compute, both).hidden == pytest.approx(
        hidden
    )
