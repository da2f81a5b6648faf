"""Beside: the times of hpccomm's calls and of hand-written code, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpccomm.bench.measure import Plan, measure
from hpccomm.debug.words import size_in_words

if TYPE_CHECKING:
    from mpi4py import MPI

OURS = ("hpccomm", "node-shared", "one call")  # the names of hpccomm's calls; the ratio is for the first


@dataclass(frozen=True)
class Step:
    """The times of one case and size, in us."""

    case: str
    nbytes: int
    times_us: dict[str, float]

    @property
    def ratio(self) -> float:
        """The time of hpccomm divided by the shortest time of the others."""
        return self.times_us["hpccomm"] / min(time for name, time in self.times_us.items() if name not in OURS)


def step(case: str, nbytes: int, calls: Mapping[str, Callable[[], Any]], comm: MPI.Intracomm, plan: Plan) -> Step:
    """Return the times of these calls, on every rank."""
    return Step(case, nbytes, {name: 1e6 * timing.median for name, timing in measure(calls, comm, plan).items()})


def text(title: str, size: str, found: Sequence[Step]) -> str:
    """Return a table for each case; `size` is the word for the number of bytes."""
    lines = [f"{title}; us, median; ratio: hpccomm / the best of the others"]
    for case in dict.fromkeys(each.case for each in found):
        of_case = [each for each in found if each.case == case]
        columns = (*of_case[0].times_us, "ratio")
        lines += ["", case, f"{size:>10} " + "".join(f"{name:>12}" for name in columns)]
        for each in of_case:
            times = "".join(f"{time:>12.2f}" for time in each.times_us.values())
            lines.append(f"{size_in_words(each.nbytes):>10} {times}{each.ratio:>12.2f}")
    return "\n".join(lines)
