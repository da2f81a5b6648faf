"""Ranks of a node that meet in a tree: where they stand in it, results and errors, and groups of more than 64 ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.mpi import node_tree
from hpccomm.native import fastpath
from tests.launch import launch

needs_extension = pytest.mark.skipif(fastpath is None, reason="without the compiled extension")


@pytest.mark.once
def test_without_places_eight_neighbours_are_together() -> None:
    above = node_tree.parents([()] * 20)
    assert above == [-1, *[0] * 7, 0, *[8] * 7, 0, 16, 16, 16]


@pytest.mark.once
def test_one_rank_without_a_place_is_enough_to_join_neighbours() -> None:
    assert node_tree.parents([(0, 0)] * 9 + [()]) == node_tree.parents([()] * 10)


@pytest.mark.once
def test_one_rank_of_each_cache_and_domain_meets_the_others() -> None:
    # Ranks take turns between two domains, each with two caches: what Slurm's default distribution does.
    places = [(rank % 2, 4 * (rank % 2) + rank // 2 % 2) for rank in range(40)]
    above = node_tree.parents(places)
    for rank, parent in enumerate(above):
        assert parent < rank
        if parent >= 0 and places[parent] != places[rank]:  # the first of its cache; of two caches, or of the root's
            assert rank == places.index(places[rank])
            assert parent == (0 if rank < 2 else rank - 2)
    ranks_below = [above.count(rank) for rank in range(40)]
    assert ranks_below[0] == 7 + 1 + 1 + 1  # of its cache; another group of its cache; a cache; a domain


@pytest.mark.once
def test_a_place_is_the_domain_and_the_last_cache_of_all_cpus(tmp_path: Path) -> None:
    for cpu, (domain, last) in enumerate([(0, "0-1,4"), (0, "0-1,4"), (1, "2-3"), (1, "2-3"), (0, "0-1,4")]):
        (tmp_path / f"cpu{cpu}" / f"node{domain}").mkdir(parents=True)
        for index, shared in ((0, str(cpu)), (3, last)):
            cache = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            cache.mkdir(parents=True)
            (cache / "shared_cpu_list").write_text(shared + "\n")
    assert node_tree.place({0, 4}, tmp_path) == (0, 0)
    assert node_tree.place({3}, tmp_path) == (1, 2)
    assert node_tree.place({1, 2}, tmp_path) == ()
    assert node_tree.place({9}, tmp_path) == ()


@pytest.fixture
def in_a_tree(process_group: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a group whose ranks meet in a tree, as they do where there are many and each has a core."""
    monkeypatch.setattr(node_tree, "FLAT", 1)
    monkeypatch.setattr(node_tree, "TOGETHER", 2)
    monkeypatch.setattr("hpccomm.mpi.compiled.patience", lambda comm: (20, -1))
    group = hc.new_group()
    hc.all_reduce(np.ones(1), group=group)
    yield group
    hc.destroy_process_group(group)


@needs_extension
def test_operations_in_a_tree_give_what_numpy_gives(in_a_tree: Any) -> None:
    check_operations(in_a_tree)


@needs_extension
def test_calls_that_differ_are_an_error_on_all_ranks_and_the_next_call_works(in_a_tree: Any) -> None:
    n, me = in_a_tree.size, in_a_tree.rank
    if n == 1:
        return
    for odd in range(n):
        for count in (1, 100):
            x = np.full(count, me + 1.0)
            with pytest.raises(hc.DistBackendError, match=r"rank \d+ of the group calls another operation"):
                hc.all_reduce(x, "max" if me == odd else "sum", group=in_a_tree)
            with pytest.raises(hc.DistBackendError, match=r"rank \d+ of the group calls another operation"):
                hc.barrier(group=in_a_tree) if me == odd else hc.broadcast(x, 0, group=in_a_tree)
            x[:] = me + 1
            hc.all_reduce(x, group=in_a_tree)
            assert (x == n * (n + 1) / 2).all()


@needs_extension
@pytest.mark.once
def test_more_than_64_ranks_use_memory_of_the_node() -> None:
    done = launch(
        66, sys.executable, "-c",
        "import hpccomm as hc; from tests.mpi.test_node_tree import check_operations\n"
        "with hc.init_process_group() as g:\n    check_operations(g, [9])\n"
        "    g.rank or print(g.dispatcher.fast.is_node_open())",
        timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def check_operations(group: Any, counts: Any = (0, 1, 8, 9, 40, 3000)) -> None:
    """Check blocking collectives of `counts` elements; sums are in rank order, to the last bit."""
    n, me = group.size, group.rank
    last = hc.get_global_rank(group, n - 1)
    for count in counts:
        rows = np.random.default_rng(count).standard_normal((n, n * count))
        short = rows[:, :count]
        sums = np.add.accumulate(short, axis=0)
        expected: Any
        half = np.add.accumulate(short.astype("f2"), dtype="f4", axis=0)[-1]
        for dtype, expected in (("f8", sums[-1]), ("f2", half)):
            x = short[me].astype(dtype)
            hc.all_reduce(x, group=group)
            np.testing.assert_array_equal(x, expected.astype(dtype))
        x = short[me].copy()
        hc.all_reduce(x, "max", group=group)
        np.testing.assert_array_equal(x, short.max(axis=0))
        for name, expected in (("reduce", sums[-1] if me == n - 1 else None), ("scan", sums[me])):
            x = short[me].copy()
            getattr(hc, name)(x, *([last] if name == "reduce" else []), group=group)
            if expected is not None:
                np.testing.assert_array_equal(x, expected)
        x = short[me].copy()
        hc.broadcast(x, last, group=group)
        np.testing.assert_array_equal(x, short[-1])
        y = np.empty((n, count))
        hc.all_gather_single(y, short[me].copy(), group=group)
        np.testing.assert_array_equal(y, short)
        parts = rows.reshape(n, n, count)
        hc.all_to_all_single(y, parts[me].copy(), group=group)
        np.testing.assert_array_equal(y, parts[:, me])
        z = np.empty(count)
        hc.reduce_scatter_single(z, parts[me].copy(), group=group)
        np.testing.assert_array_equal(z, np.add.accumulate(parts[:, me], axis=0)[-1])
        gathered = [np.empty(count + rank % 2) for rank in range(n)] if me == n - 1 else None
        hc.gather(np.full(count + me % 2, 1.0 * me), gathered, last, group=group)
        for rank, array in enumerate(gathered or []):
            np.testing.assert_array_equal(array, np.full(count + rank % 2, rank))
        hc.barrier(group=group)
