"""The tree in which many ranks of a node meet (`native/meet.h`): by NUMA domain, last-level cache, and neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

FLAT = 16  # most ranks that meet without a tree: each looks at the flags of all others
TOGETHER = 8  # most ranks of one cache below one of them
CPUS = Path("/sys/devices/system/cpu")

Place = tuple[int, ...]  # of a rank: its NUMA domain, and the first CPU of its last-level cache; () if not in one alone


def place(cpus: Iterable[int], folder: Path = CPUS) -> Place:
    """Return the place of a rank that may run on `cpus`."""
    places = set()
    for cpu in cpus:
        domains = list(folder.glob(f"cpu{cpu}/node[0-9]*"))
        caches = sorted(folder.glob(f"cpu{cpu}/cache/index[0-9]/shared_cpu_list"))
        if not (domains and caches):
            return ()
        first = caches[-1].read_text().replace("-", ",").split(",")[0]
        places.add((int(domains[0].name.removeprefix("node")), int(first)))
    return places.pop() if len(places) == 1 else ()


def parents(places: Sequence[Place]) -> list[int]:
    """Return the rank above each rank in the tree, -1 for rank 0. A domain's lowest rank is above its others."""
    above, highest = [-1] * len(places), list(range(len(places)))
    known = places if all(places) else [()] * len(places)
    for depth, most in ((2, TOGETHER), (2, len(places)), (1, len(places)), (0, len(places))):
        domains: dict[Place, list[int]] = {}
        for rank in highest:
            domains.setdefault(known[rank][:depth], []).append(rank)
        highest = []
        for ranks in domains.values():
            for first in range(0, len(ranks), most):
                lowest, *others = ranks[first : first + most]
                highest.append(lowest)
                for rank in others:
                    above[rank] = lowest
        highest.sort()
    return above
