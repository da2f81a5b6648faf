"""What ranks may use, and what is odd about it, of jobs that are imitated."""

from __future__ import annotations

import os

import pytest

from hpccomm.cli import binding
from hpccomm.cli.binding import Binding

pytestmark = pytest.mark.once


def node(*cpus: tuple[int, ...], threads: str = "1", number: int = 0) -> list[Binding]:
    return [Binding(f"node{number}", number, each, 4, threads) for each in cpus]


def test_this_process() -> None:
    here = binding.of_this_rank("somewhere", 0, {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "1"})
    assert set(here.cpus) == os.sched_getaffinity(0)
    assert str(here).startswith("somewhere: ")
    assert str(here).endswith(", OMP_NUM_THREADS=3, CUDA_VISIBLE_DEVICES=1")


def test_ranks_that_may_use_the_same_are_one_line() -> None:
    everybody = [*node((0, 1, 2, 3), (0, 1, 2, 3)), *node((0, 1), (2, 3), threads="", number=1)]
    assert list(binding.described(everybody)) == [
        ("ranks 0-1", "node0: all 4 CPUs, OMP_NUM_THREADS=1"),
        ("rank 2", "node1: CPUs 0-1 of 4, OMP_NUM_THREADS not set"),
        ("rank 3", "node1: CPUs 2-3 of 4, OMP_NUM_THREADS not set"),
    ]


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (node((0, 1), (2, 3)), []),
        (node((0, 1, 2, 3), (0, 1, 2, 3)), []),  # nobody is bound
        (node((0,), (0,)), ["ranks 0-1 share 1 CPU of node0, and wait for each other"]),
        (node((0, 1, 2), (2, 3)), ["ranks 0-1 of node0 are bound to CPUs that overlap"]),
        (node((0, 1), (2, 3), threads="4"), ["rank 0 has OMP_NUM_THREADS=4, and may use 2 CPUs"]),
        ([*node((0,)), *node((0,), threads="", number=1)], ["OMP_NUM_THREADS is not the same on all ranks"]),
    ],
)
def test_what_is_odd_is_said(job: list[Binding], said: list[str]) -> None:
    found = binding.oddities(job)
    assert len(found) == len(said)
    assert all(map(str.startswith, found, said)), found
