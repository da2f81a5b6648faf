"""Where the stores of groups are: agreed on when a world is made, opened when a group is first asked for its own.

Rank 0 listens from the beginning, so that any rank may open its store at any time, without the others; the thread
behind it sleeps until the first one does. On one node it listens at no port (`master.listen_on_this_node`).
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import DistNetworkError, DistStoreError, here

if TYPE_CHECKING:
    from datetime import timedelta

    from .master import Master
    from .rendezvous import Method
    from .store import Store


class Place:
    """The place of a group's store: the world's store, and which part of it.

    Parameters
    ----------
    world : WorldStore
    ranks : tuple of int
        The members of the group; none: the world.
    edition : int
        Which of the groups of these members it is, from 1; the members count alike.
    """

    def __init__(self, world: WorldStore, ranks: tuple[int, ...] = (), edition: int = 1) -> None:
        self._world = world
        self._ranks = ranks
        self._edition = edition
        self._made: Counter[tuple[int, ...]] = Counter()

    def open(self, timeout: timedelta) -> Store:
        """Return the group's store."""
        from hashlib import sha256

        from .store import PrefixStore

        part = sha256(repr(self._ranks).encode()).hexdigest()[:16] if self._ranks else "world"
        store = PrefixStore(f"{part}/{self._edition}", self._world.open())
        store.set_timeout(timeout)
        return store

    def of(self, ranks: Sequence[int]) -> Place:
        """Return the place of a new group of these ranks of the world."""
        members = tuple(ranks)
        self._made[members] += 1
        return Place(self._world, members, self._made[members])

    def without_the_dead(self, comm: Any, nodes: Sequence[int]) -> Place:
        """Return the place for the world of those who have survived; each of them calls it."""
        return Place(self._world) if self._world.is_the_programs else agreed(comm, nodes)

    def close(self) -> None:
        """Let go of the world's store."""
        self._world.close()


class WorldStore:
    """The store of a world, opened once: the program's own, or that of rank 0.

    Parameters
    ----------
    given : Store, optional
    where : tuple, str or None
        Host, port and key; the path of a file; None: this process is alone.
    master : Master, optional
        What serves it, on rank 0.
    problem : str
        Why there is none.
    opened : Store, optional
        What rank 0 has opened already.
    """

    def __init__(
        self,
        given: Store | None = None,
        where: tuple[str, int, bytes] | str | None = None,
        master: Master | None = None,
        problem: str = "",
        opened: Store | None = None,
    ) -> None:
        self.is_the_programs = given is not None
        self._store = given or opened
        self._where = where
        self._master = master
        self._problem = problem
        self._lock = threading.Lock()

    def open(self) -> Store:
        """Return the store."""
        with self._lock:
            if self._problem:
                raise DistStoreError(f"the groups have no store: {self._problem}{here()}")
            if self._store is None:
                self._store = self._opened()
            return self._store

    def _opened(self) -> Store:
        from . import FileStore, HashStore, TCPStore

        if self._where is None:
            return HashStore()
        if isinstance(self._where, str):
            return FileStore(self._where)
        return TCPStore.at(*self._where)

    def close(self) -> None:
        """Close the store, unless it is the program's."""
        if self._store is not None and not self.is_the_programs:
            self._store.close()
        if self._master is not None:
            self._master.close()
        self._problem = self._problem or "the world has been destroyed"


def agreed(comm: Any, nodes: Sequence[int], method: Method | None = None) -> Place:
    """Return the place of the world's store, which the ranks of `comm` agree on; each of them calls it.

    Raises DistNetworkError or DistStoreError on every rank if the address or file that `method` names can't be used.
    Where hpccomm chooses, that is said when a store is asked for.
    """
    where = None if method is None else method.where
    if where is None and comm.Get_size() == 1:
        return Place(WorldStore())
    homes = list(zip(nodes, comm.allgather(_network()), strict=True))
    stranger = next((rank for rank, home in enumerate(homes) if home != homes[0]), None)
    peer = None if stranger is None else comm.bcast(os.uname().nodename, root=stranger)
    told: Any = None  # where it is, or why there is none
    master = store = None
    if comm.Get_rank() == 0:
        try:
            if isinstance(where, str):
                from .file_store import FileStore

                store, told = FileStore.replacing(where), where
            else:
                from .master import serve

                master, told = serve(where, peer)
        except (DistNetworkError, DistStoreError) as error:
            told = error
    told = comm.bcast(told)
    if stranger is not None:
        comm.Barrier()  # MPI may send with its next call only: not after a store.get that waits for those who receive
    if not isinstance(told, (DistNetworkError, DistStoreError)):
        return Place(WorldStore(where=told, master=master, opened=store))
    if where is None:
        return Place(WorldStore(problem=str(told)))
    raise type(told)(f"init_process_group: {told}")


def _network() -> str:
    """Return the namespace of this process's sockets: containers of one node may have a network each."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:  # only Linux has it
        return ""
