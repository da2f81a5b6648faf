"""Dead ranks under an MPI with fault tolerance (ULFM, MPI-5 draft); without it, only `agree` does anything.

MPI reports a dead rank only to ranks that communicate with it. After such a rank has left with the error, other
survivors could wait for it forever. So the first rank to learn of a death revokes hpccomm's communicators that contain
the dead rank, which wakes all ranks that wait in them. A thread also checks for deaths, because the ranks may be
computing, or waiting in shared memory.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import DistBackendError, RankFailedError, on_rank

if TYPE_CHECKING:
    from mpi4py import MPI

    from .reserve import Reserve

HOW_TO_START = "start the job with Open MPI's `mpirun --with-ft ulfm`"
PAUSE = 0.1  # seconds between two checks for deaths
LONGEST_NEWS = 5.0  # seconds to wait after an error until MPI names the dead ranks

COMPARE = "HPCCOMM_DEBUG=DETAIL compares the ranks' calls"
AGREE = f"do sizes and dtypes agree on all ranks? {COMPARE}"
SHRINK = "shrink_group() makes a group of the ranks that are left"
next_step = SHRINK  # `Reserve` replaces it if there are spares
reserves: weakref.WeakKeyDictionary[Any, Reserve] = weakref.WeakKeyDictionary()  # of worlds with spares
unsafe_buffers: list[Any] = []  # buffers of failed operations, kept alive because MPI may still write to them


@functools.cache
def is_on() -> bool:
    """Return whether this job survives dead ranks: `mpirun --with-ft ulfm` sets the variable on every rank."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable", "0").lower() in ("1", "true", "yes", "enabled")  # noqa: SIM112


def prepare() -> None:
    """Before MPI starts, make MPI_Finalize not wait for dead ranks: Open MPI 5.0 may wait forever."""
    if is_on():
        os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")


class Watched:
    """A communicator of hpccomm and its parent: a group's has the world's as parent, any other has its group's.

    `members` has its ranks' numbers in MPI.COMM_WORLD.
    """

    def __init__(self, comm: MPI.Intracomm, parent: Watched | None) -> None:
        self.comm = comm
        self.parent = parent
        self.members = ranks_in_the_job(comm)
        self.is_revoked = False

    def is_part_of(self, other: Watched) -> bool:
        """Return whether it is `other` or a descendant of `other`."""
        return self is other or (self.parent is not None and self.parent.is_part_of(other))

    @property
    def world(self) -> Watched:
        """The communicator whose ranks are the global ranks."""
        return self if self.parent is None else self.parent.world

    def revoke(self) -> None:
        """Make all waits in it fail, on every rank. Afterwards it allows only shrink and agree."""
        if not self.is_revoked:
            self.is_revoked = True
            self.comm.Revoke()


_lock = threading.RLock()  # a communicator is not freed while it is being revoked
_watched: list[Watched] = []
_spares: dict[int, Any] = {}  # the duplicates of `keep_spare`, by the handle of the group's communicator
_thread: threading.Thread | None = None
_stopping = threading.Event()


def watch(comm: MPI.Intracomm, parent: MPI.Intracomm | None) -> None:
    """Start watching a communicator; see `Watched` for its parent. Not collective."""
    global _thread
    if not is_on():
        return
    from mpi4py import MPI

    with _lock:
        found = _found(comm) or Watched(comm, None)
        if found not in _watched:
            _watched.append(found)
        found.parent = None if parent is None else _found(parent)
        _revoke_with(_dead())  # one of its ranks may have died already
        if _thread is None and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            _thread = threading.Thread(target=_look_for_deaths, name="hpccomm-failures", daemon=True)
            _thread.start()
            atexit.register(_stop)  # before mpi4py's MPI_Finalize
            key = MPI.Comm.Create_keyval(delete_fn=lambda *_: _stop())  # before the program's, which deletes it first
            MPI.COMM_SELF.Set_attr(key, None)


def forget(comm: MPI.Intracomm) -> None:
    """Stop watching a communicator and its descendants, before it is freed or after it has been given up."""
    take_spare(comm)
    if not _watched:
        return
    with _lock:
        found = _found(comm)
        _watched[:] = [each for each in _watched if found is None or not each.is_part_of(found)]


def dead_ranks(comm: MPI.Intracomm | None, is_likely: bool) -> tuple[int, ...]:
    """Return the global ranks that have died in the world of `comm`, and wake all ranks that wait for one of them.

    `is_likely`: MPI's error probably comes from a death, so wait until MPI names the dead rank.
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
    """Return the dead ranks of `comm`, and acknowledge them: receives from any rank no longer fail because of them."""
    if not is_on():
        return ()
    comm.Ack_failed()
    return tuple(sorted(dead_in(comm)))


def is_death(error: MPI.Exception) -> bool:
    """Return whether MPI's error reports a dead rank."""
    from mpi4py import MPI

    return is_on() and error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)


def revoke(comm: MPI.Intracomm) -> None:
    """Revoke `comm` and its descendants, which wakes all ranks that wait in them."""
    with _lock:
        top = _found(comm)
        for each in _watched:
            if top is not None and each.is_part_of(top):
                each.revoke()


def translated(operation: str, error: Exception, comm: MPI.Intracomm | None) -> RankFailedError | None:
    """Return the RankFailedError for MPI's error in an operation on `comm`; None if no rank has died."""
    if not is_on():
        return None
    from mpi4py import MPI

    if not isinstance(error, MPI.Exception):
        return None
    kind = error.Get_error_class()
    is_certain = kind in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
    # Open MPI 5.0 sometimes reports MPI_ERR_OTHER, even before it knows of the death
    ranks = dead_ranks(comm, is_certain or kind == MPI.ERR_OTHER)
    return rank_failed(operation, ranks) if ranks or is_certain else None


def rank_failed(operation: str, ranks: tuple[int, ...]) -> RankFailedError:
    """Return the error with the dead ranks and the next step."""
    if ranks:
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {'have' if len(ranks) > 1 else 'has'} died"
    else:
        who = "another rank has given the group up"
    return RankFailedError(f"{who}; {next_step}{on_rank()}", ranks, operation)


class translating:  # contextlib.contextmanager takes 2 us more
    """Translate MPI's errors in the block: to RankFailedError if a rank has died, otherwise to DistBackendError."""

    def __init__(self, operation: str, comm: MPI.Intracomm | None) -> None:
        self._operation, self._comm = operation, comm

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            from mpi4py import MPI

            if isinstance(error, MPI.Exception):
                raise translated(self._operation, error, self._comm) or backend_error(self._operation, error) from error


def call_all(steps: Iterator[Callable[[], Any]], comm: MPI.Intracomm | None) -> None:
    """Call every step of destroy, even if an earlier one has raised; if a rank has died, only forget `comm`."""
    try:
        for step in steps:
            try:
                step()
            except Exception as error:
                if comm is None or translated("destroy", error, comm) is None:
                    raise
                forget(comm)
    except BaseException:
        call_all(steps, comm)
        raise


def backend_error(operation: str, error: MPI.Exception) -> DistBackendError:
    """Return a DistBackendError with the text of MPI's error."""
    from mpi4py import MPI

    kind, hint, text = error.Get_error_class(), "", error.Get_error_string().strip()
    if len(text) >= MPI.MAX_ERROR_STRING - 2:  # cut off by MPI, also inside a word
        text = f"{text.rsplit(None, 1)[0].rstrip(' .:')} ..."
    if kind == MPI.ERR_IN_STATUS:  # its text says nothing else
        text = "an error of one of several messages"
    if kind == MPI.ERR_TRUNCATE:
        hint = f"; an array here is smaller than what another rank sent: {AGREE}"
    elif kind == MPI.ERR_IN_STATUS or "message sizes" in text:
        hint = f"; {AGREE}"
    elif "allocate_shared" in text:
        hint = f"; there is too little room in /dev/shm, or the ranks call different operations: {COMPARE}"
    elif "Too many communicators" in text:  # MPICH allows 2048 per process
        hint = (
            "; each group and grid uses up several of them: make one once and use it again, or destroy it when it is "
            "not needed any more: destroy_process_group(group), or a `with` block"
        )
    return DistBackendError(f"MPI reports: {text}{hint}{on_rank()}", operation)


def shrink(comm: Any, make: Callable[[Any, list[int]], None]) -> None:
    """Make a communicator of the survivors of `comm`, and a group of it; collective over the survivors.

    `make` gets the communicator and its ranks in `comm`, and may communicate. If another rank dies before it has ended
    on every rank, all begin again: a rank that had ended it would wait in that group, and the others in a new shrink.
    """
    from mpi4py import MPI

    revoke(comm)
    new, is_whole = comm, False
    while not is_whole:
        new, is_whole = _shrunk(new), True
        watch(new, None)
        try:
            keep_spare(new)
            make(new, ranks_in(comm, new))
        except (MPI.Exception, RankFailedError):
            revoke(new)  # other ranks may wait in it
            is_whole = False
        if not (is_whole := agree(new, is_whole)):
            forget(new)


def survivors_of(comm: Any) -> tuple[Any, list[int]]:
    """Do the same as `shrink` for a communicator that is not watched and has been revoked."""
    from mpi4py import MPI

    new = _shrunk(comm)
    new.Set_errhandler(MPI.ERRORS_RETURN)
    return new, ranks_in(comm, new)


def dead_in(comm: Any) -> frozenset[int]:
    """Return the dead ranks of a communicator."""
    from mpi4py import MPI

    failed, everybody = comm.Get_failed(), comm.Get_group()
    ranks = frozenset(MPI.Group.Translate_ranks(failed, None, everybody)) if failed.Get_size() else frozenset()
    everybody.Free()
    if failed != MPI.GROUP_EMPTY:
        failed.Free()
    return ranks


def ranks_in(comm: Any, other: Any) -> list[int]:
    """Return the rank in `comm` of each rank of `other`."""
    from mpi4py import MPI

    group, others = comm.Get_group(), other.Get_group()
    ranks = MPI.Group.Translate_ranks(others, None, group)
    group.Free()
    others.Free()
    return list(ranks)


def ranks_in_the_job(comm: MPI.Comm) -> tuple[int, ...]:
    """Return the numbers of the ranks of `comm` in MPI.COMM_WORLD."""
    from mpi4py import MPI

    return tuple(ranks_in(MPI.COMM_WORLD, comm))


def _shrunk(comm: Any) -> Any:
    from mpi4py import MPI

    while True:
        try:
            return comm.Shrink()
        except MPI.Exception as error:
            if not is_death(error):
                raise


def keep_spare(comm: Any) -> None:
    """Duplicate a group's communicator for its communication thread if the thread can't do it; collective.

    If two threads of a process make communicators, Open MPI 5.0 proceeds with only one until all its ranks have come:
    on two ranks, thread and program could wait for each other. It also does not notice a dead rank there.
    """
    if _keeps_spares():
        from mpi4py import MPI

        with translating("making a group", comm):
            spare = comm.Dup()
        watch(spare, comm)
        _spares[MPI._handleof(comm)] = spare


@functools.cache
def _keeps_spares() -> bool:
    from mpi4py import MPI

    return is_on() or (MPI.get_vendor()[0] == "Open MPI" and MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def take_spare(comm: Any) -> Any:
    """Remove and return the duplicate that `keep_spare` made; None if it made none."""
    if not _spares:
        return None
    from mpi4py import MPI

    return _spares.pop(MPI._handleof(comm), None)


def agree(comm: MPI.Intracomm, flag: bool) -> bool:
    """Return whether `flag` is true on all living ranks; all get the same answer. `comm` may be revoked."""
    from mpi4py import MPI

    if not is_on():
        answer = bytearray([flag])
        comm.Allreduce(MPI.IN_PLACE, [answer, MPI.BYTE], MPI.BAND)
        return bool(answer[0])
    while True:
        comm.Ack_failed()
        try:
            return bool(comm.Agree(int(flag)))
        except MPI.Exception as error:  # raised on every rank: not all had acknowledged a death
            if error.Get_error_class() != MPI.ERR_PROC_FAILED:
                raise


def _found(comm: MPI.Intracomm | None) -> Watched | None:
    return next((each for each in _watched if each.comm == comm), None)


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
