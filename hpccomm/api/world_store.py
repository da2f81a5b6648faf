"""The addresses of the groups' stores: init agrees on them, and a store is opened when the program first asks for it.

Rank 0 listens from the beginning, so any rank may open its store at any time without the others. Until then rank 0's
thread sleeps. On one node it does not listen on a port (`master.listen_on_this_node`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import DistNetworkError, DistStoreError, on_rank
from ..job import mpi_library

if TYPE_CHECKING:
    from datetime import timedelta

    from ..store.master import Master
    from ..store.rendezvous import Method
    from ..store.store import Store


class Place:
    """The part of the world's store that belongs to one group."""

    def __init__(self, world: WorldStore, ranks: tuple[int, ...] = (), edition: int | str = 1) -> None:
        self._world = world
        self._ranks = ranks  # the members; empty for the world
        self._edition = edition  # numbers the groups with the same members; the same on all of them
        self._made: dict[int, int] = {}  # number of groups made so far, by the hash of their ranks

    def open(self, timeout: timedelta) -> Store:
        """Return the group's store."""
        from hashlib import sha256

        from ..store.store import PrefixStore

        part = sha256(repr(self._ranks).encode()).hexdigest()[:16] if self._ranks else "world"
        store = PrefixStore(f"{part}/{self._edition}", self._world.open())
        store.set_timeout(timeout)
        return store

    def of(self, ranks: Sequence[int]) -> Place:
        """Return the place for a new group of these ranks of the world."""
        members = tuple(ranks)
        edition = self._made[hash(members)] = self._made.get(hash(members), 0) + 1
        return Place(self._world, members, f"{self._edition}.{edition}")

    def without_the_dead(self, comm: Any, nodes: Sequence[int]) -> Place:
        """Return the place for the survivors' world; each survivor calls it."""
        return agreed(comm, nodes) if self._world.given is None else in_given(self._world.given, comm)

    def close(self) -> None:
        """Close the world's store."""
        self._world.close()


class WorldStore:
    """The store of a world, opened once: the program's own or rank 0's."""

    def __init__(
        self,
        given: Store | None = None,  # the program's store
        where: tuple[str, int, bytes] | str | None = None,  # host, port and key; a file's path; None: one process
        master: Master | None = None,  # the server, on rank 0
        problem: str = "",  # the reason for having no store
        opened: Store | None = None,
    ) -> None:
        self.given = given
        self.where = where
        self.master = master
        self.problem = problem
        self.opened = opened
        self._lock = threading.Lock()

    def open(self) -> Store:
        """Return the store."""
        with self._lock:
            if self.problem:
                raise DistStoreError(f"the groups have no store: {self.problem}{on_rank()}")
            if self.opened is None:
                self.opened = self.given or self._open()
            return self.opened

    def _open(self) -> Store:
        from ..store import FileStore, HashStore, TCPStore

        if self.where is None:
            return HashStore()
        return FileStore(self.where) if isinstance(self.where, str) else TCPStore.at(*self.where)

    def close(self) -> None:
        """Close the store, unless it is the program's."""
        if self.opened is not None and self.given is None:
            self.opened.close()
        if self.master is not None:
            self.master.close()
        self.problem = self.problem or "the world has been destroyed"


def in_given(store: Store, comm: Any) -> Place:
    """Return the place of a world in the program's own store, without keys of others; every rank of `comm` calls it."""
    number: Any = None
    if comm.Get_rank() == 0:
        try:
            number = store.add("worlds", 1)
        except Exception as error:  # opening a group's store raises it
            number = str(error)
    number = comm.bcast(number)
    return Place(WorldStore(store, problem=number) if isinstance(number, str) else WorldStore(store), edition=number)


def agreed(comm: Any, nodes: Sequence[int], method: Method | None = None) -> Place:
    """Return the place of the world's store; every rank of `comm` calls it.

    If the address or file of `method` can't be used, every rank raises DistNetworkError or DistStoreError. Without a
    `method`, opening a store raises it later.
    """
    where = None if method is None else method.where
    if where is None and comm.Get_size() == 1:
        return Place(WorldStore())
    homes = list(zip(nodes, comm.allgather(mpi_library.namespace("net")), strict=True))
    stranger = next((rank for rank, home in enumerate(homes) if home != homes[0]), None)
    peer = None if stranger is None else comm.bcast(os.uname().nodename, root=stranger)
    found: Any = None  # the store's address or path, or an error
    master = store = None
    if comm.Get_rank() == 0:
        try:
            if isinstance(where, str):
                from ..store.file_store import FileStore

                store, found = FileStore.replacing(where), where
            else:
                from ..store.master import serve

                master, found = serve(where, peer)
                _tell_of_too_few_files(comm.Get_size())
        except (DistNetworkError, DistStoreError) as error:
            found = error
    found = comm.bcast(found)
    if stranger is not None:
        comm.Barrier()  # MPI may send only in its next call, and a store.get that waits for the receivers delays that
    if not isinstance(found, (DistNetworkError, DistStoreError)):
        return Place(WorldStore(where=found, master=master, opened=store))
    if where is None:
        return Place(WorldStore(problem=str(found)))
    raise type(found)(f"init_process_group: {found}")


def _tell_of_too_few_files(clients: int) -> None:
    """Log what to type if this process may open too few files for the clients of its store."""
    import resource

    from ..process.stderr import log

    needed = clients + 256  # files of the program, and connections of other processes
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < needed:
        log(
            f"a store has room for fewer than {clients} ranks, because rank 0 may open {hard} files: type "
            f"`ulimit -Hn {needed}` before the job is started, if the ranks use stores"
        )
