"""The reserve of a world: spare ranks that wait in init to replace ranks that die (ULFM only).

One communicator has the world's ranks and the spares. Survivors revoke it, which wakes the spares. All living ranks
shrink it, exchange their places in the world, give the places of the dead to spares, and make the new world. If another
rank dies meanwhile, all drop that world and begin again. A message to a spare lets it leave instead. The death of a
spare disturbs no other rank, because the world's communicators do not contain it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..errors import RankFailedError, TooFewSparesError, on_rank
from . import failures, mpi_library

if TYPE_CHECKING:
    from mpi4py import MPI

World = TypeVar("World", bound="CanBeGivenUp")
Result = TypeVar("Result")

PAUSE = 0.01  # seconds between two polls of a spare
LONGEST_FAREWELL = 5.0  # seconds for the spares to receive the message that lets them leave


def chosen(nodes: Sequence[int], count: int) -> frozenset[int]:
    """Return the ranks that become spares: the last rank of each node, beginning with the last node.

    `nodes` has the node of each rank. A second pass takes the last but one of each node, and so on.
    """
    left = {node: [rank for rank, its in enumerate(nodes) if its == node] for node in sorted(set(nodes))}
    taken: list[int] = []
    while len(taken) < count:
        taken += [ranks.pop() for _, ranks in sorted(left.items(), reverse=True) if ranks]
    return frozenset(taken[:count])


def placed(places: Sequence[int | None], size: int) -> tuple[dict[int, int], int]:
    """Return the rank at each place of a world of `size` ranks, and the number of places that stay empty.

    `places` has the place of each rank; None marks a spare. The first spare takes the first empty place.
    """
    ranks = {place: rank for rank, place in enumerate(places) if place is not None}
    spares = [rank for rank, place in enumerate(places) if place is None]
    empty = [place for place in range(size) if place not in ranks]
    return {**ranks, **dict(zip(empty, spares))}, max(0, len(empty) - len(spares))


class CanBeGivenUp(Protocol):
    """A world (a ProcessGroup, which this layer can't import)."""

    def give_up(self, ranks: Sequence[int], refusal: str) -> None:
        """Free the world without the other ranks."""


class Reserve:
    """The spares of a world, on a rank of the world or a spare. The constructor is collective over `comm`."""

    def __init__(self, comm: Any, count: int) -> None:
        from mpi4py import MPI

        from ..process.settings import agreed
        from .cuda_aware import asked_of_the_library

        self.comm: Any = MPI.Intracomm(comm).Dup()  # not watched: a spare's death is no failure of the world
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm.Set_name("hpccomm world and spares")
        self.settings = agreed(self.comm, lambda: asked_of_the_library().is_proven)
        self.nodes, self.processes = mpi_library.number_nodes(self.comm)
        self.spares = chosen(self.nodes, count)
        failures.next_step = "replace_failed() gives the places of the dead to spares"
        self.replaced: tuple[int, ...] = ()  # the world's ranks that the last call of `fill` replaced

    def begin(self) -> dict[str, Any]:
        """Return the fields of the first world, or {} on a spare; collective."""
        working = [rank for rank in range(self.comm.Get_size()) if rank not in self.spares]
        ranks = dict(enumerate(working))
        comm = self._split(ranks)
        return {} if comm is None else self._fields(comm, ranks)

    def wait(self) -> int | None:
        """Wait as a spare; return None when needed, or the exit status when no longer needed.

        The watchdog knows this function: a rank inside it does not hang.
        """
        from mpi4py import MPI

        status = MPI.Status()
        while True:
            try:
                if self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                    self.comm.Recv([None, 0, MPI.BYTE], status.Get_source())
                    return 0
            except MPI.Exception as error:
                if error.Get_error_class() == MPI.ERR_REVOKED:
                    return None
                self.comm.Ack_failed()  # a rank has died; survivors, if any, will revoke
                if len(failures.dead_in(self.comm) | self.spares) == self.comm.Get_size():
                    return 1
            time.sleep(PAUSE)

    def fill(self, place: int | None, size: int, make: Callable[[dict[str, Any]], World]) -> World | None:
        """Give the places of the dead to spares; return the new world, made by `make` from its fields.

        Every living rank calls it, with its place in the world and the world's size; a spare passes None and 0, and
        gets None if it remains a spare. TooFewSparesError on every rank of the world if there are too few spares.
        """
        while True:
            self._shrink()
            is_whole, agreed = self._together(partial(self._give_places, place, size))
            if not is_whole or agreed is None:
                continue
            ranks, missing, comm = agreed
            if missing:
                if place is None:
                    return None
                raise TooFewSparesError(_too_few(missing + len(self.spares), len(self.spares), size), "replace_failed")
            is_whole, made = self._together(partial(self._make, comm, ranks, make))
            if is_whole:
                self.replaced = tuple(sorted(place for place, rank in ranks.items() if rank in self.spares))
                self.spares -= set(ranks.values())
                return made
            if made is not None:
                made.give_up((), "has never been used, because another rank has died meanwhile")

    def dismiss(self, is_first: bool) -> None:
        """Let the spares leave at the end of the world: its first rank sends, or all ranks send if one has died."""
        from mpi4py import MPI

        dead = failures.dead_in(self.comm)
        if not is_first and dead <= self.spares:
            return
        requests = []
        for spare in self.spares - dead:
            with contextlib.suppress(MPI.Exception):  # the spare has just died
                requests.append(self.comm.Issend([None, 0, MPI.BYTE], spare))
        deadline = time.monotonic() + LONGEST_FAREWELL
        while requests and time.monotonic() < deadline:
            requests = [each for each in requests if not _has_ended(each)]
            time.sleep(PAUSE if requests else 0)

    # -- steps -----------------------------------------------------------------------------------

    def _shrink(self) -> None:
        """Revoke the communicator, and continue with one of the living ranks."""
        old = self.comm
        old.Revoke()
        self.comm, members = failures.survivors_of(old)
        self.nodes = tuple(self.nodes[rank] for rank in members)
        self.spares = frozenset(rank for rank, before in enumerate(members) if before in self.spares)

    def _together(self, step: Callable[[], Result]) -> tuple[bool, Result | None]:
        """Run `step`; return whether it succeeded on every living rank, and its result on this one."""
        from mpi4py import MPI

        result, is_done = None, False
        try:
            result, is_done = step(), True
        except (MPI.Exception, RankFailedError):
            self.comm.Revoke()  # other ranks may wait in it
        return failures.agree(self.comm, is_done), result

    def _give_places(self, place: int | None, size: int) -> tuple[dict[int, int], int, Any]:
        """Return the rank at each place, the number of empty places, and the new world's communicator (None: none)."""
        places, sizes = zip(*self.comm.allgather((place, size)), strict=True)
        ranks, missing = placed(places, max(sizes))
        return ranks, missing, None if missing else self._split(ranks)

    def _split(self, ranks: dict[int, int]) -> Any:
        """Return a communicator of these ranks, ordered by place; None on other ranks."""
        from mpi4py import MPI

        place = next((place for place, rank in ranks.items() if rank == self.comm.Get_rank()), None)
        comm = self.comm.Split(MPI.UNDEFINED if place is None else 0, place or 0)
        return None if comm == MPI.COMM_NULL else comm

    def _make(self, comm: Any, ranks: dict[int, int], make: Callable[[dict[str, Any]], World]) -> World | None:
        """Return the new world; None on a rank outside it."""
        from mpi4py import MPI

        if comm is None:
            return None
        try:
            return make(self._fields(comm, ranks))
        except (MPI.Exception, RankFailedError):
            failures.revoke(comm)  # other ranks may wait in it
            failures.forget(comm)
            raise

    def _fields(self, comm: Any, ranks: dict[int, int]) -> dict[str, Any]:
        """Return the fields of `Membership` of a world; collective over the world."""
        from .tags import LARGEST

        mpi_library.private(comm).Set_name("hpccomm world")
        failures.keep_spare(comm)
        homes = [self.nodes[ranks[place]] for place in range(len(ranks))]
        numbers = {node: number for number, node in enumerate(dict.fromkeys(homes))}
        fields = {"rank": comm.Get_rank(), "size": comm.Get_size(), "comm": comm, "processes": self.processes}
        nodes = tuple(numbers[node] for node in homes)
        return {**fields, "nodes": nodes, "settings": self.settings, "largest_tag": LARGEST}


def _too_few(dead: int, spares: int, size: int) -> str:
    have = f"{dead} rank{'s have' if dead > 1 else ' has'} died"
    left = f"{spares or 'no'} spare{'' if spares == 1 else 's'} {'is' if spares == 1 else 'are'} left"
    return f"{have}, and {left}; shrink_group() makes a group of the {size - dead} that live{on_rank()}"


def _has_ended(request: MPI.Request) -> bool:
    """Return whether the message has been received or its receiver has died."""
    from mpi4py import MPI

    try:
        return request.Test()
    except MPI.Exception:
        return True
