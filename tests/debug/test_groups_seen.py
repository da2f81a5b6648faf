"""The keys of groups: the same on all ranks, of one group only, and nothing is kept for them when it has gone."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm import place_of_store
from hpccomm.debug import groups_seen
from hpccomm.debug.groups_seen import key_of
from hpccomm.place_of_store import Place, WorldStore

TURNS = 4


class Gone(SimpleNamespace):
    """A group of some ranks."""

    comm, name, __hash__ = None, "gone", object.__hash__


@pytest.mark.once
@pytest.mark.parametrize(
    "ranks",
    [lambda i: range(i), lambda i: (i, i + 1), lambda i: range(i, 5 * i, 3), lambda i: (7, 3)],
    ids=["more and more", "pairs", "columns", "the same"],
)
def test_nothing_is_kept_for_groups_that_have_gone(ranks: Callable[[int], Any]) -> None:
    world = Place(WorldStore())

    def come_and_go(numbers: range) -> None:
        for number in numbers:
            group: Any = Gone(ranks=tuple(ranks(number)), number=number)
            group.owner = group
            groups_seen.add(group)
            assert key_of(group)
            world.of(ranks(number))
            del group.owner, group
        gc.collect()

    come_and_go(range(2, 500))
    files = [tracemalloc.Filter(True, each.__file__) for each in (groups_seen, place_of_store)]
    tracemalloc.start()
    try:
        come_and_go(range(500, 1000))
        kept = tracemalloc.take_snapshot().filter_traces(files)
    finally:
        tracemalloc.stop()
    assert sum(each.size for each in kept.statistics("filename")) < 4096


MADE: dict[str, Callable[[], Any]] = {
    "new_group": hc.new_group,
    "new_group, members alone": lambda: hc.new_group(use_local_synchronization=True),
    "split_group": lambda: hc.split_group(color=0),
    "new_grid": lambda: hc.new_grid((hc.get_world_size(),)),
    "on a communicator": lambda: hc.ProcessGroup.on(MPI.COMM_WORLD),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_groups_of_the_same_ranks_have_keys_and_stores_of_their_own(
    make: Callable[[], Any], process_group: hc.ProcessGroup
) -> None:
    keys = []
    for turn in range(TURNS):
        for _ in range(turn * process_group.rank):  # ranks have made other numbers of groups
            hc.ProcessGroup.on(MPI.COMM_SELF).destroy()
        with make() as group:
            keys.append(key_of(group))
            hc.barrier(group)
            assert not group.store.check(["turn"])
            hc.barrier(group)
            group.store.set("turn", str(turn))
    assert len(set(keys)) == TURNS
    every: list[Any] = [None] * process_group.size
    hc.all_gather_object(every, keys)
    assert every == [keys] * process_group.size
