"""ProcessGroup: its members, its backends, its life, and what is in flight."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from ..errors import DistError, DistTimeoutError, UnsupportedOperationError, here
from .backend import Backend, BackendConfig, BackendOptions, DeviceMap, create_backend
from .operations import Operations
from .persistent_work import PersistentWork
from .tuning import Tuning
from .work import CompletedWork, Work, WorkStatus, as_seconds

if TYPE_CHECKING:
    from mpi4py import MPI

DEFAULT_TIMEOUT = timedelta(minutes=30)
MESSAGES = ("send", "recv", "sendrecv")  # every other operation keeps the order of its group
REAP_ABOVE = 64  # works in flight above which a new one first lets go of the completed


class ProcessGroup(Operations):
    """A set of ranks that communicate, with a private MPI communicator and one backend per device.

    Programs get one from :func:`init_process_group` or :func:`new_group` and pass it to the functions of
    `hpccomm`. Its methods of those names (in :class:`Operations`) count ranks *in the group*; each checks its
    arguments, picks the backend of the arrays' device, calls it, and hands what it returned to `_launched`.

    As a context manager it is destroyed at the end of the block.

    Attributes
    ----------
    rank : int
        This process's rank in the group.
    size : int
        How many ranks there are.
    ranks : tuple of int
        The global rank of each member.
    comm : mpi4py.MPI.Intracomm
        The group's private communicator. Traffic of your own on it would mix with hpccomm's: duplicate it first.
    config : BackendConfig
    timeout : timedelta
        How long monitored_barrier and destroy wait; creators of backends are given it.
    name : str
    description : str
    device_id : int, "auto" or None
        The `device_id` given to init_process_group.

    Examples
    --------
    >>> world = hc.GroupMember.WORLD
    >>> world.rank, world.size  # on rank 1 of 4: (1, 4)
    (0, 1)
    >>> with hc.new_group() as group:  # destroyed at the end of the block
    ...     hc.barrier(group)
    >>> group.is_destroyed
    True
    """

    def __init__(self, rank: int, size: int) -> None:
        self.attach(rank, size)

    def attach(
        self,
        rank: int,
        size: int,
        *,
        ranks: Sequence[int] | None = None,
        comm: MPI.Intracomm | None = None,
        config: BackendConfig | None = None,
        tuning: Tuning | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        name: str = "",
        description: str = "",
        device_id: int | Literal["auto"] | None = None,
    ) -> ProcessGroup:
        """Give the group its members and its communicator; called by `world`, and returns the group."""
        self.rank = rank
        self.size = size
        self.ranks = tuple(range(size) if ranks is None else ranks)
        self._group_ranks = {global_rank: group_rank for group_rank, global_rank in enumerate(self.ranks)}
        self.comm = comm
        self.config = config or BackendConfig()
        self.tuning = tuning or Tuning()
        self.timeout = timeout
        self.name = name
        self.description = description
        self.device_id = device_id
        self._backends: DeviceMap = _LazyBackends(self)
        self._sequence = 0
        self._in_flight: dict[Work, None] = {}  # insertion-ordered: the oldest first
        self._failed: list[Work] = []
        self._persistent: list[PersistentWork] = []
        return self

    # -- members ---------------------------------------------------------------------------------

    def group_rank(self, global_rank: int) -> int:
        """Convert a global rank into the rank in this group; ValueError if it is not a member."""
        try:
            return self._group_ranks[global_rank]
        except KeyError:
            raise ValueError(
                f"rank {global_rank} is not a member of {self!r}, whose ranks are {_some(self.ranks)}{here()}"
            ) from None

    def global_rank(self, group_rank: int) -> int:
        """Convert a rank in this group into the global rank; ValueError if there is no such rank."""
        return self.ranks[self._in_range("group rank", group_rank)]

    def peer(self, operation: str, argument: str, global_rank: int | None, group_rank: int | None) -> int:
        """Return the group rank that ``src=`` (a global rank) or ``group_src=`` (a group rank) names."""
        if group_rank is None and global_rank in self._group_ranks:
            return self._group_ranks[global_rank]
        if global_rank is not None and group_rank is not None:
            raise ValueError(f"{operation}: both {argument} and group_{argument} are given; choose one{here()}")
        if group_rank is not None:
            return self._in_range(f"{operation}: group_{argument}", group_rank)
        if global_rank is None:
            raise ValueError(f"{operation}: neither {argument} nor group_{argument} is given{here()}")
        raise ValueError(
            f"{operation}: {argument} is {global_rank}, which is not in the group; "
            f"its (global) ranks are {_some(self.ranks)}{here()}"
        )

    def root(self, operation: str, argument: str, global_rank: int | None, group_rank: int | None) -> int:
        """As `peer`; the group's first rank if neither is given."""
        if global_rank is None and group_rank is None:
            return 0
        return self.peer(operation, argument, global_rank, group_rank)

    def _in_range(self, what: str, group_rank: int) -> int:
        if not 0 <= group_rank < self.size:
            raise ValueError(f"{what} is {group_rank}; expected 0 to {self.size - 1}{here()}")
        return group_rank

    # -- life ------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Finish what is in flight, free the backends and the communicator. Every rank of the group calls it.

        Afterwards every operation on the group is refused. Raises DistTimeoutError, and destroys nothing, if an
        operation is still in flight after the group's timeout (a receive that nobody sends to, for example:
        `Work.abort` takes it back). A group that is destroyed already is left alone.
        """
        if self.is_destroyed:
            return
        if self._backends.collecting:
            raise DistError(f"destroy of {self!r}: leave its coalescing() block first{here()}")
        deadline = time.monotonic() + as_seconds(self.timeout)
        for work in list(self._in_flight):
            try:
                work.wait(max(0.0, deadline - time.monotonic()))
            except DistTimeoutError as error:
                raise DistTimeoutError(f"destroy of {self!r}: {error}") from error
            except Exception:  # told below, with those that failed earlier
                work.error_was_seen = False
        for work in self._failed:
            if not work.error_was_seen:  # the program dropped this Work, and with it its error
                warnings.warn(f"{work!r}: {work._exception}", RuntimeWarning, stacklevel=3)
        for persistent in list(self._persistent):
            persistent.wait(max(0.0, deadline - time.monotonic()))
            persistent.free()
        for backend in self._backends.values():
            backend.close()
        self._backends = _Destroyed(self)
        if self.comm is not None:
            self.comm.Free()

    @property
    def is_destroyed(self) -> bool:
        """Whether the group has been destroyed, so that it refuses every operation."""
        return isinstance(self._backends, _Destroyed)

    def abort(self, status: int = 1) -> NoReturn:
        """End the whole MPI job at once, every rank of it, with exit status `status` (MPI_Abort)."""
        from mpi4py import MPI

        for backend in list(self._backends.values()):
            backend.abort()
        MPI.COMM_WORLD.Abort(status)
        raise SystemExit(status)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Destroying is collective: a rank that is on its way out with an error would wait for ranks that never come.
        if kind is None:
            from ..world import destroy_process_group

            destroy_process_group(self)

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.name!r}: rank {self.rank} of {self.size}, {self.config}>"

    # -- the one place that every operation passes -----------------------------------------------

    def _launched(self, operation: str, outcome: Any, result: Any, async_op: bool) -> Work | None:
        """Number the operation that a backend has begun, and keep its Work and its arrays alive while in flight."""
        self._sequence += 1
        if outcome is None and not async_op:
            return None
        if not isinstance(outcome, Work):
            if not async_op:
                return cast("Work | None", outcome)  # of a receive: the sender's rank
            outcome = CompletedWork()
        outcome.op_type = operation
        outcome.sequence_number = self._sequence
        outcome._result = result
        outcome.group = self
        if not async_op:  # a backend that has only asynchronous operations
            outcome.wait()
            return cast("Work | None", outcome._source)
        if operation in MESSAGES:
            outcome.keeps_its_place = False
        self._in_flight[outcome] = None
        if len(self._in_flight) > REAP_ABOVE or outcome.is_let_go_at_once:
            self._reap()
        return cast("Work | None", outcome)

    def _forget(self, work: Work) -> None:
        if self._in_flight.pop(work, work) is None and work._status is WorkStatus.FAILED:  # it was there
            self._failed.append(work)

    def _reap(self) -> None:
        """Let go of completed works that the program has dropped, from the oldest on."""
        while True:
            try:
                oldest = next(iter(self._in_flight))
            except (StopIteration, RuntimeError):  # none left, or another thread has just let go of one
                return
            # A Future has the progress thread, which keeps the order of its callbacks.
            if oldest._future is not None or not oldest.is_completed():
                return
            self._in_flight.pop(oldest, None)

    def _any_backend(self) -> Backend:
        """Return the backend for operations without arrays: the host's, where the group has one."""
        devices = self.config.device_map
        return self._backends["cpu" if "cpu" in devices else next(iter(devices))]

    def _make_backend(self, device: str) -> Backend:
        name = self.config.device_map.get(device)
        if name is None:
            raise DistError(
                f"{self!r} has no backend for {device} arrays; start with "
                f"init_process_group('{self.config},{device}:...') or backend=None{here()}"
            )
        backend = create_backend(name, self._options_for(device))
        if not isinstance(backend, Backend):
            raise UnsupportedOperationError(
                f"backend {name!r} makes whole process groups, which can't serve {device} arrays beside "
                f"other backends; use it alone: init_process_group({name!r}){here()}"
            )
        return backend

    def _options_for(self, device: str) -> BackendOptions:
        return BackendOptions(
            store=None,
            rank=self.rank,
            size=self.size,
            timeout=self.timeout,
            ranks=self.ranks,
            group_name=self.name,
            device=device,
            comm=self.comm,
            tuning=self.tuning,
            device_id=self.device_id,
        )


class _LazyBackends(DeviceMap):
    """The usual device map: a backend is made when the first array of its device comes along."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def __missing__(self, device: str) -> Backend:
        self[device] = backend = self._group._make_backend(device)
        if device == "cpu":
            self.fast = backend.fast_path
        return backend


class _Destroyed(DeviceMap):
    """The device map of a destroyed group."""

    def __init__(self, group: ProcessGroup) -> None:
        self._name = group.name

    def __missing__(self, device: str) -> Backend:
        raise DistError(f"the process group {self._name!r} has been destroyed; make another one{here()}")


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 16 else f"{', '.join(map(str, ranks[:8]))} ... {ranks[-1]}"
