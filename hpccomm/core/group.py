"""ProcessGroup: its life, and the one door that each of its operations passes."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, cast

from ..errors import DistError, DistStoreError, here
from ..job import failures, mpi_library
from ..process.excepthook import end_with
from ..process.shared_files import MAPPED_LATER, take_names_away
from . import observers, registry
from .backend import Backend, FastPath, in_words_of_the_call
from .backends import Destroyed, LazyBackends, NotOverridden, created, options_for
from .calls import Call
from .ending import abandon, finish, leave, meet
from .hooks import Hook, Operation, RemovableHandle, Timing
from .operation_list import MESSAGES, OPERATIONS, START
from .operations import Operations
from .options import Membership, fields_of, time_limit
from .persistent_work import PersistentWork
from .registry import BackendConfig, is_custom
from .timeouts import as_seconds
from .work import CompletedWork, Work, WorkStatus, log_exception, with_title

if TYPE_CHECKING:
    from typing_extensions import Self

REAP_ABOVE = 64  # works in flight above which a new one first lets go of the completed
STEPS_ASIDE = FastPath()
CALLED = {  # what a program has called, where that has another name than the operation
    ("send", True): "isend",
    ("recv", True): "irecv",
    ("all_reduce_sparse", False): "all_reduce",
    ("all_reduce_sparse", True): "all_reduce",
}


class ProcessGroup(Operations):
    """A set of ranks that communicate, with a private MPI communicator and one backend per device.

    Programs get one from :func:`init_process_group` or :func:`new_group` and pass it to the functions of
    `hpccomm`; libraries make one on a communicator of their own by :meth:`on`. Each operation is also a method:
    ``group.all_reduce(x)`` is ``hc.all_reduce(x, group=group)``. Methods count ranks *in the group*.

    As a context manager it is destroyed at the end of the block.

    Attributes
    ----------
    rank : int
        This process's rank in the group.
    size : int
        How many ranks there are.
    ranks : tuple of int
        The global rank of each member.
    nodes : tuple of int
        The number of the node of each member.
    local_rank : int
        This process's rank among the members on its node.
    local_ranks : list of int
        The ranks (in the group) of the members on this node.
    comm : mpi4py.MPI.Intracomm
        The group's own communicator. Duplicate it for messages of your own.
    config : BackendConfig
        Which backend serves which device.
    timeout : timedelta
        How long an operation may take, and what destroy allows.
    on_timeout : str
        What happens then: ``"abort"``, ``"raise"`` or ``"warn"``.
    name : str
        For messages; also ``group_name``.
    description : str
        For messages; also ``group_desc``.

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

    def __init__(self, rank: int, size: int, **fields: Any) -> None:
        super().__init__(rank, size, **fields)
        self._backends: dict[str, Backend] = LazyBackends(self)
        self._fast_path = self._fast = STEPS_ASIDE  # that of the host's backend; and the one to ask
        self._hooks: tuple[Hook, ...] = ()
        self._check: Any = None  # compares what the ranks call: HPCCOMM_DEBUG=DETAIL
        self._block: Any = None  # the coalescing() block that collects
        self._collectives = self._messages = 0  # those that did not take the fast path
        self._in_flight: dict[Work, None] = {}  # insertion-ordered: the oldest first
        self._failed: list[Work] = []
        self._persistent: list[PersistentWork] = []
        self._owner: ProcessGroup = self  # the world, of the groups made from it
        self._children: list[ProcessGroup] = []  # destroyed with it: those that it owns
        self._patience = as_seconds(self.timeout) if self.on_timeout == "raise" else None
        self._leaving: Any = None  # the barrier at the end, once begun
        self._on_destroy: Callable[[ProcessGroup], None] | None = None
        self._successor: ProcessGroup | None = None  # what shrink_group has made of it
        self._store: Any = None

    def __init_subclass__(cls) -> None:
        """Let the operations that a class of the program's own overrides pass the door."""
        super().__init_subclass__()
        for name in OPERATIONS.keys() & vars(cls).keys():
            setattr(cls, name, _through_the_door(name, vars(cls)[name]))

    @classmethod
    def on(
        cls,
        comm: Any,
        *,
        config: BackendConfig | str | None = None,
        timeout: timedelta | float | None = None,
        name: str = "",
    ) -> ProcessGroup:
        """Make a group of the ranks of an MPI communicator; it needs no :func:`init_process_group`.

        For libraries that bring a communicator of their own. Every rank of `comm` calls it. The group's global ranks
        are the ranks of `comm`.

        Parameters
        ----------
        comm : mpi4py.MPI.Intracomm
            It is duplicated, so that messages on it never mix with the group's.
        config : BackendConfig or str, optional
            Which backend serves which device, as for :func:`init_process_group`.
        timeout : timedelta or float (seconds), optional
            How long an operation may take. Default: ``HPCCOMM_TIMEOUT``, or 30 minutes.
        name : str, optional
            A name for messages.

        Returns
        -------
        ProcessGroup
            To be destroyed by its :meth:`destroy`, or the end of a ``with`` block.

        Raises
        ------
        TypeError
            `comm` is no intracommunicator.
        ValueError
            `config` or `timeout` makes no sense, or an environment variable HPCCOMM_* of rank 0 (on every rank).

        Examples
        --------
        >>> from mpi4py import MPI
        >>> with hc.ProcessGroup.on(MPI.COMM_SELF, name="mine") as group:
        ...     x = np.array([1.0, 2.0])
        ...     hc.all_reduce(x, group=group)
        >>> x
        array([1., 2.])
        """
        if not isinstance(config, BackendConfig):
            config = BackendConfig(config)
        limit = time_limit(timeout)
        mpi_library.load()
        observers.group_coming()
        fields = mpi_library.membership(comm)
        place = observers.place_of_store(fields["comm"], fields["nodes"])
        limits = limit(fields["settings"])
        return make_group(Membership(**fields, **limits, config=config, name=name or "group", place=place))

    @property
    def store(self) -> Any:
        """The group's key-value :class:`Store`, which all members share; opened when it is first asked for.

        It is a part of the world's, which rank 0's process holds, or of the one that the program has given to
        :func:`init_process_group`. It ends with the world. Asking is not collective, and using it is not either.

        Examples
        --------
        >>> world = hc.GroupMember.WORLD
        >>> world.store.add("ticket", 1)
        1
        """
        if self.is_destroyed:
            raise DistError(self.refusal)
        if self._store is None:
            if self.place is None:
                raise DistStoreError(f"{self!r} has no store: it was made without MPI{here()}")
            self._store = self.place.open(self.timeout)
        return self._store

    # -- the one door ----------------------------------------------------------------------------

    def _run(self, call: Call, async_op: bool, step: Callable[[], Any] | None = None) -> Work | None:
        """Do an operation whose arguments have been checked: every one of the group passes here.

        It is the backend's method of that name, or `step`, for one that is more than a call of one backend.
        """
        name, device, result, arguments = call
        if self._block is not None and self._block.is_of_this_thread():
            self._block.collect(call, async_op)
            return None
        backend = self._backends[device]
        if name in MESSAGES:
            self._messages += 1
        else:
            self._collectives += 1
        operation = self._begin(call, async_op) if self._hooks else None
        try:
            outcome: Any = getattr(backend, name)(*arguments, async_op) if step is None else step()
        except Exception as error:
            error = in_words_of_the_call(error, CALLED.get((name, async_op), name))
            self._raise(self._numbered(backend.translate_error(name, error), name), error, operation)
        if async_op or isinstance(outcome, Work):
            work = outcome if isinstance(outcome, Work) else CompletedWork()
            peer = arguments[1] if name in MESSAGES else None
            return self._track(name, result, work, async_op, operation, peer)  # type: ignore[no-any-return]
        if operation is not None:
            operation.outcome = outcome
            operation.end()
        return outcome  # type: ignore[no-any-return]  # None; of a receive: the sender's rank

    def _track(
        self,
        name: str,
        result: Any,
        work: Work,
        async_op: bool,
        operation: Operation | None = None,
        peer: int | None = None,
    ) -> Any:
        """Number the Work of an operation that has begun, and keep it, and through it its arrays, while in flight."""
        work.op_type = name
        work._result = result
        work.group = self
        if name in MESSAGES:
            work.sequence_number = self._messages + self._fast_path.messages
            work.keeps_its_place = False
            work._peer = peer
        else:
            work.sequence_number = self._collectives + self._fast_path.count
        if not async_op:  # a backend that has only asynchronous operations
            try:
                work.wait()
            except Exception as error:
                self._raise(error, error, operation)
            if operation is not None:
                operation.outcome = work._source
                operation.end()
            return work._source
        if operation is not None:  # a recorded fast path has put its own there
            work._operation = operation
        work._patience = self._patience
        if len(self._in_flight) >= REAP_ABOVE or work.is_let_go_at_once:
            self._reap()
        self._in_flight[work] = None  # not before: a GPU would be asked for what has only just begun
        return work

    @property
    def sequence_number(self) -> int:
        """How many collectives of this group this rank has begun: those of the same number belong together."""
        return self._collectives + self._fast_path.count

    @property
    def message_number(self) -> int:
        """How many messages this rank has begun to send or to receive in this group."""
        return self._messages + self._fast_path.messages

    def _forget(self, work: Work) -> None:
        """Let go of a Work that has ended; called by the Work, maybe by several threads."""
        if self._in_flight.pop(work, work) is not None:  # another thread has done it
            return
        operation = work._operation
        if operation is not None:
            try:
                operation.end(work._exception)
            except Exception:  # this may be anybody's thread
                log_exception("a hook of %r raised at the end of %r", self, work)
            if operation.error is not work._exception:  # a hook knows it better
                work._exception, work._status = operation.error, WorkStatus.FAILED
        if work._status is WorkStatus.FAILED:
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

    # -- hooks -----------------------------------------------------------------------------------

    def register_hook(self, hook: Hook) -> RemovableHandle:
        """Let `hook` see every operation of this group on this rank, until the handle's ``remove()``.

        ``hook.begin(operation)`` is called before the transport is, ``hook.end(operation)`` when the operation has
        ended; each gets the same :class:`Operation`. While a hook is registered, small operations take the long way.

        Parameters
        ----------
        hook : object
            With the methods `begin` and `end` of :class:`Hook`.

        Returns
        -------
        RemovableHandle

        Examples
        --------
        >>> class Names:
        ...     def begin(self, operation):
        ...         print("begin", operation.name, operation.sequence_number, operation.nbytes)
        ...     def end(self, operation):
        ...         print("end", operation.name, operation.error)
        >>> group = hc.new_group()
        >>> with group.register_hook(Names()):
        ...     hc.all_reduce(np.ones(4), group=group)
        begin all_reduce 1 32
        end all_reduce None
        """
        self._hooks = (*self._hooks, hook)
        self._choose_fast_path()
        return RemovableHandle(functools.partial(self._remove_hook, hook))

    def enable_timing(self) -> None:
        """Let every Work of this group on this rank know how long it took: see :meth:`Work.get_duration`.

        From now on; on this rank only. Small operations take the long way then, which costs some microseconds. c10d
        calls it ``_enable_collectives_timing``.

        Examples
        --------
        >>> group = hc.new_group()
        >>> group.enable_timing()
        >>> work = hc.all_reduce(np.ones(4), group=group, async_op=True)
        >>> work.wait()
        True
        >>> 0 < work.get_duration() < 10  # seconds
        True
        """
        if not any(isinstance(hook, Timing) for hook in self._hooks):
            self.register_hook(Timing())

    def _remove_hook(self, hook: Hook) -> None:
        self._hooks = tuple(each for each in self._hooks if each is not hook)
        self._choose_fast_path()

    def _begin(self, call: Call, async_op: bool) -> Operation:
        name, device, _, arguments = call
        described = dict(zip(OPERATIONS[name.removesuffix(START)].arguments, arguments))
        number = self.message_number if name in MESSAGES else self.sequence_number
        work = call[2] if isinstance(call[2], PersistentWork) else None
        operation = Operation(self, name, number, device, async_op, described, self._hooks, work)
        operation.begin()
        return operation

    def _numbered(self, error: Exception, name: str) -> Exception:
        """Let the error of a transport say which operation of this group it was."""
        number = self.message_number if name in MESSAGES else self.sequence_number
        return with_title(error, f"#{number} of {self.name!r}")

    def _raise(self, error: Exception, cause: Exception, operation: Operation | None) -> NoReturn:
        """Raise what went wrong in an operation, in the words of the transport."""
        if operation is not None:
            operation.end(error)
        if error is cause:
            raise error
        raise error from cause

    def _choose_fast_path(self) -> None:
        """Let the fast path step aside while a hook listens, a block collects, or the group is destroyed.

        A hook that has a method `around` follows the fast path itself: it returns one that it has put around it.
        """
        followers = [getattr(hook, "around", None) for hook in self._hooks]
        self._fast = self._fast_path
        if self._block is not None or self.is_destroyed or None in followers:
            self._fast = STEPS_ASIDE
        elif self._fast.is_open:
            for around in followers:
                self._fast = around(self._fast)  # type: ignore[misc]

    def _agree_on(self, name: str, *details: str) -> None:
        """Raise on every rank if not every rank makes this call, where ranks compare: HPCCOMM_DEBUG=DETAIL."""
        if self._check is not None:
            self._check.agree(name, *details)

    # -- persistent operations -------------------------------------------------------------------

    def _set_up(self, call: Call) -> PersistentWork:
        """Set up the persistent form of an operation whose arguments have been checked."""
        name, device, result, arguments = call
        if self._block is not None and self._block.is_of_this_thread():
            raise DistError(f"{name}_init: not inside a coalescing() block{here()}")
        backend = self._backends[device]
        number = 0 if self._check is None else self._check.set_up(call)
        try:
            work = backend.persistent(name, *arguments)
        except Exception as error:
            error = in_words_of_the_call(error, f"{name}_init")
            self._raise(backend.translate_error(f"{name}_init", error), error, None)
        work.group = self
        work.number = number
        work.op_type = name
        work.output = result
        work._patience = self._patience
        work.call = f"{name}{START}", device, work, arguments
        self._persistent.append(work)
        return work

    def _start(self, work: PersistentWork) -> None:
        """Begin a persistent operation: an operation of its own each time."""
        name, device, _, _ = work.call
        if self._block is not None and self._block.is_of_this_thread():
            self._block.refuse(name)
        backend = self._backends[device]
        if name in MESSAGES:
            self._messages += 1
        else:
            self._collectives += 1
        operation = self._begin(work.call, False) if self._hooks else None
        try:
            started = work.begin()
        except Exception as error:
            self._raise(self._numbered(backend.translate_error(name, error), name), error, operation)
        if started is None:
            work._operation = operation
        else:
            self._track(name, work.output, started, True, operation, work.call[3][1] if name in MESSAGES else None)

    # -- life ------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Finish what is in flight, free the backends and the communicator. Every rank of the group calls it.

        Groups made from it are destroyed first. Afterwards every operation on the group is refused. Messages that
        nobody has received are dropped, with a warning. A group that is destroyed already is left alone.

        Raises
        ------
        DistTimeoutError
            An operation is still in flight after the group's timeout (a receive that nobody sends to, for example:
            `Work.abort` takes it back), or another rank has not called it by then. The group is not destroyed.
        DistError
            Inside a coalescing() block.
        """
        if self.is_destroyed:
            return
        if self._block is not None:
            raise DistError(f"destroy of {self!r}: leave its coalescing() block first{here()}")
        self._agree_on("destroy")
        for child in list(self._children):
            child.destroy()
        deadline = time.monotonic() + as_seconds(self.timeout)
        finish(self, deadline)
        if self.comm is not None:
            meet(self, deadline)
        observers.group_gone(self)
        for backend in self._backends.values():
            backend.close()
        self._backends = Destroyed(self)
        self._choose_fast_path()
        if self.comm is not None:
            mpi_library.free(self.comm, repr(self), self.largest_tag)
        self._close_store()
        if self._check is not None:
            self._check.close()
        if self._on_destroy is not None:
            self._on_destroy(self)

    def give_up(self, ranks: Sequence[int], refusal: str) -> None:
        """Let go of everything without the other ranks, because some (global) `ranks` have died.

        What is in flight ends with RankFailedError; `refusal` is what operations say from now on. The communicator is
        not freed, because MPI may still have messages on it.
        """
        abandon(self, ranks)
        if self.comm is not None:
            failures.forget(self.comm)
        self._backends = Destroyed(self, refusal)
        self._choose_fast_path()
        self._close_store()
        if self._on_destroy is not None:
            self._on_destroy(self)

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
        if self.place is not None and self._owner is self:
            self.place.close()

    def agree(self, flag: bool) -> bool:
        """See :func:`hpccomm.agree`."""
        if self.is_destroyed or self.comm is None:
            raise DistError(self.refusal if self.is_destroyed else f"agree: {self!r} has no MPI communicator{here()}")
        with failures.told("agree", self.comm):
            return failures.agree(self.comm, bool(flag))

    @property
    def refusal(self) -> str:
        """What a destroyed group says to every operation."""
        return getattr(self._backends, "refusal", "")

    def leave(self) -> None:
        """Wait for the other ranks at the end of a program that has not destroyed the group: they may need this one."""
        leave(self)

    @property
    def is_destroyed(self) -> bool:
        """Whether the group has been destroyed, so that it refuses every operation."""
        return isinstance(self._backends, Destroyed)

    def abort(self, status: int = 1) -> NoReturn:
        """End the whole MPI job at once, every rank of it, with exit status `status` (MPI_Abort)."""
        from mpi4py import MPI

        for backend in list(self._backends.values()):
            backend.abort()
        take_names_away(MAPPED_LATER)
        MPI.COMM_WORLD.Abort(status)
        raise SystemExit(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # Destroying is collective: a rank that is on its way out with an error would wait for ranks that never come.
        if isinstance(error, SystemExit) and self._owner is self and self.size > 1:
            end_with(error)
        if kind is None:
            group = self
            while group._successor is not None:
                group = group._successor
            group.destroy()

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.name!r}: rank {self.rank} of {self.size}, {self.config}>"

    # -- backends --------------------------------------------------------------------------------

    def _any_device(self) -> str:
        """Return the device whose backend does operations without arrays: the host's, where the group has one."""
        devices = self.config.device_map
        return "cpu" if "cpu" in devices else next(iter(devices))


def make_group(membership: Membership) -> ProcessGroup:
    """Make a group; a custom backend that is alone in its configuration may bring one of its own class."""
    fields = fields_of(membership)
    group = ProcessGroup(**fields)
    names = set(group.config.device_map.values())
    if len(names) == 1 and is_custom(*names):
        (name,), device = names, next(iter(group.config.device_map))
        made = created(name, options_for(group, device))
        if isinstance(made, Backend):
            cast("LazyBackends", group._backends).put(device, made)
        else:
            group = cast("ProcessGroup", made)
            ProcessGroup.__init__(group, **fields)
            group._backends.update(dict.fromkeys(group.config.device_map, NotOverridden(group, name)))
    observers.new_group(group)
    for device, name in group.config.device_map.items():
        if registry.REGISTRY[name].connects:
            group._backends[device]  # which makes it
    return group


def _through_the_door(name: str, override: Callable[..., Any]) -> Callable[..., Any]:
    """Return a group's own operation `name` as one that hooks see; it sees to its arguments itself."""
    signature = inspect.signature(override)

    @functools.wraps(override)
    def operation(group: ProcessGroup, *arguments: Any, **options: Any) -> Any:
        bound = signature.bind(group, *arguments, **options)
        async_op = bool(bound.arguments.get("async_op", False))
        spec = OPERATIONS[name]
        described = tuple(bound.arguments.get(argument) for argument in spec.arguments)
        call = name, group._any_device(), bound.arguments.get("array"), described
        return group._run(call, async_op, functools.partial(override, group, *arguments, **options))

    return operation
