"""Ten thousand ranks that wait for a verdict, in one process: how often they look, and that each gets it."""

from __future__ import annotations

import heapq
from collections import Counter

import pytest

from hpccomm.debug.waiting import LOST, PERIOD, Wait

pytestmark = [pytest.mark.serial, pytest.mark.once]

NODE = 128
TICK = 0.05  # seconds between two steps of a rank


class Folder:
    """What ranks see: a sign of life every two seconds until the rank that makes the verdict is done, or dead."""

    def __init__(self, done: float, dead: float = float("inf")) -> None:
        self.done, self.dead = done, dead

    def sign(self, now: float) -> str:
        return str(min(now, self.dead, self.done) // 2)

    def has_concluded(self, now: float) -> bool:
        return self.done <= now and self.done < self.dead


def wait_of_all(
    size: int, folder: Folder, stuck: frozenset[int] = frozenset()
) -> tuple[dict[int, tuple[str, float]], Counter[int]]:
    """Return the outcome of each rank and its time, and the looks of all ranks in each second."""
    outcomes: dict[int, tuple[str, float]] = {}
    looks: Counter[int] = Counter()
    waits = {rank: Wait(rank % NODE, 0.0) for rank in range(size) if rank not in stuck}
    woken: set[int] = set()
    # A rank that is not woken does nothing before it is due: only steps at which one looks are simulated.
    steps = [(0.0, rank) for rank in waits]
    while steps:
        now, rank = heapq.heappop(steps)
        if rank in outcomes:
            continue
        if waits[rank].is_due(now, rank in woken):
            woken.discard(rank)
            looks[int(now)] += 1
            if waits[rank].saw(now, folder.sign(now), folder.has_concluded(now)):
                first = rank - rank % NODE
                for other in range(first, min(first + NODE, size)):
                    if other in waits and other not in outcomes and other != rank:
                        woken.add(other)
                        heapq.heappush(steps, (now + TICK, other))
        if (outcome := waits[rank].outcome(now)) != "waits":
            outcomes[rank] = outcome, now
        else:
            heapq.heappush(steps, (waits[rank]._due, rank))
    return outcomes, looks


@pytest.mark.parametrize("stuck", [0, 1, 20], ids="{} of each node are stuck".format)
@pytest.mark.parametrize("size", [100, 1000, 10_000])
def test_a_node_looks_like_one_rank_and_each_rank_gets_the_verdict(size: int, stuck: int) -> None:
    done = 40.0
    outcomes, looks = wait_of_all(size, Folder(done), frozenset(rank for rank in range(size) if rank % NODE < stuck))
    nodes = -(-size // NODE)
    assert {outcome for outcome, _ in outcomes.values()} == {"given"}
    assert max(when for _, when in outcomes.values()) <= done + (stuck + 1) * PERIOD + 2 * TICK
    between = [looks[second] for second in range(1, int(done))]
    assert 0 < sum(between) / len(between) < 25 * nodes  # one rank looked 20 times a second before


@pytest.mark.parametrize("size", [100, 1000, 10_000])
@pytest.mark.parametrize("dead", [1.0, 30.0])
def test_who_is_dead_is_given_up_by_somebody_and_never_while_it_works(size: int, dead: float) -> None:
    outcomes, _ = wait_of_all(size, Folder(float("inf"), dead))
    assert {outcome for outcome, _ in outcomes.values()} == {"lost"}
    first = min(when for _, when in outcomes.values())
    assert LOST < first < dead + LOST + 2 * PERIOD
    assert first >= dead - 2 + LOST


def test_a_long_work_is_waited_for() -> None:
    outcomes, _ = wait_of_all(300, Folder(done=20 * LOST))
    assert {outcome for outcome, _ in outcomes.values()} == {"given"}
