"""Ranks that have died, under an MPI with fault tolerance (ULFM, MPI-5 draft); without it, only `agree` does anything.

MPI reports a dead rank only to those who communicate with it. A survivor that waits for another one, which has left
with the error, would wait for ever. So the first to learn of a death revokes the communicators of hpccomm that the dead
rank is in, which wakes everybody who waits in them. A thread looks for deaths too: all others may be computing, or
waiting in memory that ranks share.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import DistBackendError, RankFailedError, on_rank

if TYPE_CHECKING:
    from mpi4py import MPI

    from .reserve import Reserve

HOW_TO_START = "start the job with Open MPI's `mpirun --with-ft ulfm`"
PAUSE = 0.1  # seconds between two looks for deaths
LONGEST_NEWS = 5.0  # seconds until a rank that a death has disturbed knows who has died

next_step = "shrink_group() makes a group of the ranks that are left"  # or replace_failed, where there are spares
reserves: weakref.WeakKeyDictionary[Any, Reserve] = weakref.WeakKeyDictionary()  # of worlds with spares
unsafe_buffers: list[Any] = []  # buffers that MPI may still write to, because an operation on them has failed


@functools.cache
def is_on() -> bool:
    """Return whether this job survives dead ranks: `mpirun --with-ft ulfm` sets the variable in every rank."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable", "0").lower() in ("1", "true", "yes", "enabled")  # noqa: SIM112


def prepare() -> None:
    """Make MPI's end, before it starts, not wait for the dead: Open MPI 5.0 may do so for ever, in a barrier."""
    if is_on():
        os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")


class Watched:
    """A communicator of hpccomm, and its parent: that of the group it serves; of a group's own, the world's.

    `members` are its ranks' numbers in MPI.COMM_WORLD.
    """

    def __init__(self, comm: MPI.Intracomm, parent: Watched | None) -> None:
        self.comm = comm
        self.parent = parent
        group = comm.Get_group()
        self.members = ranks_in_the_job(group)
        group.Free()
        self.is_revoked = False

    def is_part_of(self, other: Watched) -> bool:
        """Return whether it is `other`, or a descendant of it."""
        return self is other or (self.parent is not None and self.parent.is_part_of(other))

    @property
    def world(self) -> Watched:
        """The communicator whose ranks are the global ranks."""
        return self if self.parent is None else self.parent.world

    def revoke(self) -> None:
        """Wake everybody who waits in it, on every rank, with an error. It can only be shrunk, and agreed in."""
        if not self.is_revoked:
            self.is_revoked = True
            self.comm.Revoke()


_lock = threading.RLock()  # a communicator is not freed while it is being revoked
_watched: list[Watched] = []
_spares: dict[int, Any] = {}  # of `keep_spare`, by the handle of the group's communicator
_thread: threading.Thread | None = None
_stopping = threading.Event()


def watch(comm: MPI.Intracomm, parent: MPI.Intracomm | None) -> None:
    """Begin to watch a communicator; see `Watched` for its parent. Not collective."""
    global _thread
    if not is_on():
        return
    from mpi4py import MPI

    with _lock:
        found = _found(comm) or Watched(comm, None)
        if found not in _watched:
            _watched.append(found)
        found.parent = None if parent is None else _found(parent)
        _revoke_with(_dead())  # one of its ranks may have died before
        if _thread is None and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            _thread = threading.Thread(target=_look_for_deaths, name="hpccomm-failures", daemon=True)
            _thread.start()
            atexit.register(_stop)  # before MPI_Finalize


def forget(comm: MPI.Intracomm) -> None:
    """Watch a communicator and its descendants no longer: it is about to be freed, or has been given up."""
    take_spare(comm)
    if not _watched:
        return
    with _lock:
        found = _found(comm)
        _watched[:] = [each for each in _watched if found is None or not each.is_part_of(found)]


def dead_ranks(comm: MPI.Intracomm | None, is_likely: bool) -> tuple[int, ...]:
    """Return the global ranks that have died, of the world of `comm`, and wake everybody who waits for one.

    `is_likely`: MPI's error is one that a death brings, so wait until MPI says which it is.
    """
    give_up = time.monotonic() + (LONGEST_NEWS if is_likely else PAUSE)
    while True:
        with _lock:
            found = _watched[0] if comm is None and _watched else _found(comm)
            if found is None:
                return ()
            dead = _dead()
            _revoke_with(dead)
            ranks = tuple(rank for rank, process in enumerate(found.world.members) if process in dead)
        if ranks or time.monotonic() > give_up:
            return ranks
        time.sleep(0.001)


def dead_members(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks of `comm` that have died. MPI does not tell of them again where one receives from any rank."""
    if not is_on():
        return ()
    from mpi4py import MPI

    comm.Ack_failed()
    failed, members = comm.Get_failed(), comm.Get_group()
    ranks = MPI.Group.Translate_ranks(failed, None, members)
    members.Free()
    if failed != MPI.GROUP_EMPTY:
        failed.Free()
    return tuple(ranks)


def is_death(error: MPI.Exception) -> bool:
    """Return whether an error of MPI says that a rank has died."""
    from mpi4py import MPI

    return is_on() and error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)


def revoke(comm: MPI.Intracomm) -> None:
    """Wake everybody who waits in `comm` or a descendant of it."""
    with _lock:
        top = _found(comm)
        for each in _watched:
            if top is not None and each.is_part_of(top):
                each.revoke()


def translated(operation: str, error: Exception, comm: MPI.Intracomm | None) -> RankFailedError | None:
    """Return the RankFailedError for an error of MPI in an operation on `comm`; None if nobody has died."""
    if not is_on():
        return None
    from mpi4py import MPI

    if not isinstance(error, MPI.Exception):
        return None
    kind = error.Get_error_class()
    is_certain = kind in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
    # Open MPI 5.0 also reports MPI_ERR_OTHER at times, even before it knows of the death
    ranks = dead_ranks(comm, is_certain or kind == MPI.ERR_OTHER)
    return rank_failed(operation, ranks) if ranks or is_certain else None


def rank_failed(operation: str, ranks: tuple[int, ...]) -> RankFailedError:
    """Return the error that names the dead ranks, and what to do."""
    if ranks:
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {'have' if len(ranks) > 1 else 'has'} died"
    else:
        who = "another rank has given the group up"
    return RankFailedError(f"{who}; {next_step}{on_rank()}", ranks, operation)


@contextlib.contextmanager
def translating(operation: str, comm: MPI.Intracomm | None) -> Iterator[None]:
    """Raise hpccomm's error in place of MPI's: RankFailedError when a rank has died, else DistBackendError."""
    from mpi4py import MPI

    try:
        yield
    except MPI.Exception as error:
        raise translated(operation, error, comm) or backend_error(operation, error) from error


def backend_error(operation: str, error: MPI.Exception) -> DistBackendError:
    """Return the error that the program should see for one of MPI, with MPI's text."""
    from mpi4py import MPI

    hint, text = "", error.Get_error_string().strip()
    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        hint = "; an array here is smaller than what another rank sent: do sizes and dtypes agree on all ranks?"
    elif "Too many communicators" in text:  # MPICH has 2048 for each process
        hint = (
            "; each group and grid uses up several of them: make one once and use it again, or destroy it when it is "
            "not needed any more: destroy_process_group(group), or a `with` block"
        )
    return DistBackendError(f"MPI reports: {text}{hint}{on_rank()}", operation)


def shrink(comm: Any) -> tuple[Any, list[int]]:
    """Return a communicator of the survivors of `comm`, and their ranks in `comm`; every survivor calls it."""
    from mpi4py import MPI

    revoke(comm)
    new, spare = _shrunk(comm), None
    while True:
        try:
            spare = new.Dup()
        except MPI.Exception:
            new.Revoke()  # others may wait in it
        if agree(new, spare is not None):
            break
        new, spare = _shrunk(new), None  # another rank has died meanwhile
    watch(new, None)
    keep_spare(new, spare)
    return new, _ranks_in(comm, new)


def survivors_of(comm: Any) -> tuple[Any, list[int]]:
    """Return what `shrink` does, of a communicator that is not watched and has been revoked."""
    from mpi4py import MPI

    new = _shrunk(comm)
    new.Set_errhandler(MPI.ERRORS_RETURN)
    return new, _ranks_in(comm, new)


def dead_in(comm: Any) -> frozenset[int]:
    """Return the ranks of a communicator that have died."""
    from mpi4py import MPI

    failed, everybody = comm.Get_failed(), comm.Get_group()
    ranks = frozenset(MPI.Group.Translate_ranks(failed, None, everybody)) if failed.Get_size() else frozenset()
    everybody.Free()
    if failed != MPI.GROUP_EMPTY:
        failed.Free()
    return ranks


def _ranks_in(comm: Any, new: Any) -> list[int]:
    """Return the rank in `comm` of each rank of `new`."""
    from mpi4py import MPI

    old_group, new_group = comm.Get_group(), new.Get_group()
    members = MPI.Group.Translate_ranks(new_group, None, old_group)
    old_group.Free()
    new_group.Free()
    return list(members)


def _shrunk(comm: Any) -> Any:
    from mpi4py import MPI

    while True:
        try:
            return comm.Shrink()
        except MPI.Exception as error:
            if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING):
                raise


def keep_spare(comm: Any, spare: Any = None) -> None:
    """Duplicate a group's communicator for its communication thread, where the thread can't do it; collective.

    Where threads of a process make communicators at once, Open MPI 5.0 goes on with one only, until all its ranks have
    come: the thread's and the program's could wait for each other on two ranks. And it does not notice a dead rank.
    """
    from mpi4py import MPI

    if is_on() or (MPI.get_vendor()[0] == "Open MPI" and MPI.Query_thread() == MPI.THREAD_MULTIPLE):
        with translating("making a group", comm):
            spare = spare or comm.Dup()
        watch(spare, comm)
        _spares[MPI._handleof(comm)] = spare


def take_spare(comm: Any) -> Any:
    """Return the duplicate that `keep_spare` has made, once; None where there is none."""
    from mpi4py import MPI

    return _spares.pop(MPI._handleof(comm), None)


def agree(comm: MPI.Intracomm, flag: bool) -> bool:
    """Return whether `flag` is true on all living ranks of `comm`, which may be revoked; all get the same answer."""
    from mpi4py import MPI

    if not is_on():
        answer = bytearray([flag])
        comm.Allreduce(MPI.IN_PLACE, [answer, MPI.BYTE], MPI.BAND)
        return bool(answer[0])
    while True:
        comm.Ack_failed()
        try:
            return bool(comm.Agree(int(flag)))
        except MPI.Exception as error:  # on every rank: one has died that not all had acknowledged
            if error.Get_error_class() != MPI.ERR_PROC_FAILED:
                raise


def _found(comm: MPI.Intracomm | None) -> Watched | None:
    return next((each for each in _watched if each.comm == comm), None)


def ranks_in_the_job(group: MPI.Group) -> tuple[int, ...]:
    """Return the numbers of the members of `group` in MPI.COMM_WORLD."""
    from mpi4py import MPI

    everybody = MPI.COMM_WORLD.Get_group()
    ranks = MPI.Group.Translate_ranks(group, None, everybody)
    everybody.Free()
    return tuple(ranks)


def _dead() -> frozenset[int]:
    """Return the dead ranks' numbers in MPI.COMM_WORLD."""
    from mpi4py import MPI

    MPI.COMM_SELF.Iprobe()  # MPI learns of deaths only while it makes progress
    return dead_in(MPI.COMM_WORLD)


def _revoke_with(dead: frozenset[int]) -> None:
    """Revoke the communicators with a dead member."""
    for each in _watched:
        if dead and not each.is_revoked and not dead.isdisjoint(each.members):
            each.revoke()


def _look_for_deaths() -> None:
    while not _stopping.wait(PAUSE):
        with _lock:
            _revoke_with(_dead())


def _stop() -> None:
    _stopping.set()
    if _thread is not None:
        _thread.join()
