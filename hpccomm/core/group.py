"""ProcessGroup: its members, its dispatcher, its creation and its end."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, overload

from ..errors import DistBackendError, DistError, DistStoreError, HpccommWarning, on_rank
from ..job import failures, mpi_library
from ..process.excepthook import end_with
from ..process.proc import MAPPED_LATER, take_names_away
from . import observers, registry
from .backends import Destroyed
from .dispatcher import Dispatcher
from .generated import GeneratedOperations
from .late import GRID_ON, late
from .members import shortened
from .mpi4py_names import MPI4PyNames
from .operations import Operations
from .options import time_limit
from .registry import BackendConfig
from .renamed import Renamed
from .timeouts import as_seconds
from .work import own_names

if TYPE_CHECKING:
    from typing import Self

    from mpi4py import MPI

    from .hooks import Hook, RemovableHandle

PUBLIC = [  # besides the operations
    "rank", "size", "ranks", "nodes", "local_rank", "local_ranks", "comm", "config", "device_id", "timeout", "name",
    "on_timeout", "description", "group_name", "group_desc", "is_destroyed", "sequence_number", "message_number",
    "is_replacement", "store", "from_comm", "group_rank", "global_rank", "register_hook", "enable_timing", "destroy",
    "agree", "abort", "nccl_handle", "nccl_config",
]  # fmt: skip


class ProcessGroup(Operations, MPI4PyNames):
    """A set of ranks that communicate, with a private MPI communicator and one backend per device.

    Programs get one from :func:`init_process_group` or :func:`new_group` and pass it to the functions of
    `hpccomm`; libraries make one on their own communicator by :meth:`from_comm`. Each operation is also a method:
    ``group.all_reduce(x)`` is ``hc.all_reduce(x, group=group)``. Methods take ranks *of the group*.

    A ``with`` block destroys the group at its end.

    Attributes
    ----------
    rank : int
        This process's rank in the group.
    size : int
        The number of ranks.
    ranks : tuple of int
        The global rank of each member.
    nodes : tuple of int
        The node number of each member.
    local_rank : int
        This process's rank among the members on its node.
    local_ranks : list of int
        The ranks (in the group) of the members on this node.
    comm : mpi4py.MPI.Intracomm
        The group's own communicator. Duplicate it for your own messages.
    config : BackendConfig
        The backend of each device.
    timeout : timedelta
        The time limit of operations, monitored_barrier and destroy.
    on_timeout : str
        After that time ``"abort"`` ends the job, ``"raise"`` raises DistTimeoutError if possible, and ``"warn"``
        continues.
    name : str
        For messages; also ``group_name``.
    description : str
        For messages; also ``group_desc``.
    is_replacement : bool
        True in the world that :func:`init_process_group` returns on a spare: it has the rank of a dead process, but
        not its state.

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

    leaving: Any = None  # the meeting at the end, after it has begun
    on_destroy: Callable[[ProcessGroup], None] | None = None
    successor: ProcessGroup | None = None  # the group that shrink_group or replace_failed made from it
    shrunk_from: ProcessGroup | None = None  # a larger world without dead ranks; destroyed with this one
    is_replacement = False
    _store: Any = None

    def __init__(self, rank: int, size: int, **fields: Any) -> None:
        super().__init__(rank, size, **fields)
        self.dispatcher = Dispatcher(self)
        self.owner: ProcessGroup = self  # for a group made from a world, that world
        self.children: list[ProcessGroup] = []  # groups made from this one, and destroyed with it
        self.attachments: dict[type, Any] = {}  # by class; destroy calls their finish(), a death give_up(ranks)

    @overload
    @classmethod
    def from_comm(
        cls, comm: MPI.Cartcomm, *,
        config: BackendConfig | str | None = ..., timeout: timedelta | float | None = ..., name: str = ...,
    ) -> Any: ...  # fmt: skip  # a Grid
    @overload
    @classmethod
    def from_comm(
        cls, comm: Any, *,
        config: BackendConfig | str | None = ..., timeout: timedelta | float | None = ..., name: str = ...,
    ) -> ProcessGroup: ...  # fmt: skip
    @classmethod
    def from_comm(
        cls,
        comm: Any,
        *,
        config: BackendConfig | str | None = None,
        timeout: timedelta | float | None = None,
        name: str = "",
    ) -> ProcessGroup:
        """Make a group of the ranks of an MPI communicator, without :func:`init_process_group`; collective.

        It is for libraries with their own communicator. The group's global ranks are the ranks of `comm`.

        Parameters
        ----------
        comm : mpi4py.MPI.Intracomm
            It is duplicated, so its messages never mix with the group's. With a Cartesian topology
            (``Create_cart``) the group is a :class:`Grid`.
        config : BackendConfig or str, optional
            The backend of each device, like `backend` of :func:`init_process_group`.
        timeout
            As for :func:`init_process_group`.
        name : str, optional
            A name for messages.

        Returns
        -------
        ProcessGroup
            The group; :meth:`destroy` or the end of a ``with`` block destroys it.

        Raises
        ------
        TypeError
            `comm` is not an intracommunicator.
        ValueError
            `config` or `timeout` is invalid, or (on every rank) an environment variable HPCCOMM_* of rank 0.

        Examples
        --------
        >>> from mpi4py import MPI
        >>> with hc.ProcessGroup.from_comm(MPI.COMM_SELF, name="mine") as group:
        ...     x = np.array([1.0, 2.0])
        ...     hc.all_reduce(x, group=group)
        >>> x
        array([1., 2.])
        """
        if not isinstance(config, BackendConfig):
            config = BackendConfig(config)
        limit = time_limit(timeout)
        mpi = mpi_library.load()
        observers.group_coming()
        fields = mpi_library.membership(comm)
        fields["place"] = observers.place_of_store(fields["comm"], fields["nodes"])
        fields.update(limit(fields["settings"]), config=config, name=name or "group")
        if comm.Get_topology() == mpi.CART:
            return late(GRID_ON)(comm, fields)  # type: ignore[no-any-return]
        return make_group(**fields)

    if not TYPE_CHECKING:
        on = Renamed("from_comm")
        all_to_all_sparse = Renamed("exchange_sparse")

    @property
    def store(self) -> Any:
        """The group's key-value :class:`Store`, shared by all members; opened at the first access.

        It is a part of the world's store, in the process of rank 0, or of the store that the program passed to
        :func:`init_process_group`. It ends with the world. Neither access nor use is collective.

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
                raise DistStoreError(f"{self!r} has no store: it was made without MPI{on_rank()}")
            self._store = self.place.open(self.timeout)
        return self._store

    @property
    def nccl_handle(self) -> int:
        """The address of the ncclComm_t that connects this rank's GPU to the others', for libraries that call NCCL.

        hpccomm owns it: do not free it, and do not use it after the group has been destroyed or has failed. Launch
        operations on it in the same order on every rank, relative to hpccomm's operations too, and never from two
        threads at once. In groups with ``on_timeout="raise"`` NCCL's calls may return ncclInProgress.

        Raises
        ------
        DistError
            The ranks are not connected yet; the message says how to connect them.
        UnsupportedOperationError
            The group does not use NCCL for GPU arrays.
        """
        return self.dispatcher.backends["cuda"].nccl_handle

    def nccl_config(
        self,
        *,
        min_ctas: int | None = None,
        max_ctas: int | None = None,
        nvls_ctas: int | None = None,
        cga_cluster_size: int | None = None,
        alg_selection: str | None = None,
        force_alg_selection: bool | None = None,
        cta_policy: int | None = None,
        user_profiler_tag: int | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context manager that configures this group's NCCL collectives on GPU arrays (ncclCollConfig_t).

        Every rank must enter it with the same values; NCCL does not compare them. Persistent operations keep the values
        of their set-up. Messages, and operations made of messages (`gather`, `scatter`, `all_to_all` of lists or of
        parts of different sizes), have no such settings.

        Parameters
        ----------
        min_ctas, max_ctas : int, optional
            The least and the largest number of thread blocks of the kernel: few leave space for other kernels.
        nvls_ctas, cga_cluster_size : int, optional
            The number of thread blocks for NVLink SHARP, and in a thread block cluster (Hopper and later).
        alg_selection : str, optional
            The algorithms that NCCL may choose from, such as ``"ring"``, ``"tree,ring"``, ``"^nvls"``.
        force_alg_selection : bool, optional
            False: NCCL may use another algorithm if none of these is possible; by default that is an error.
        cta_policy : int, optional
            ``NCCL_CTA_POLICY_*`` of nccl.h: 1 for efficiency, 2 to use no SM if possible.
        user_profiler_tag : int, optional
            A tag that NCCL passes to its profiler plugins.

        Returns
        -------
        context manager
            It yields None. Omitted settings are those of calls outside the block.

        Raises
        ------
        DistBackendError
            NCCL is older than 2.31. A value that NCCL refuses is an error of the collective.
        DistError
            The ranks are not connected yet; the message says how to connect them.
        UnsupportedOperationError
            The group does not use NCCL for GPU arrays.

        Examples
        --------
        >>> def beside_a_kernel(group, gradient):
        ...     with group.nccl_config(max_ctas=4):
        ...         return group.all_reduce(gradient, async_op=True)
        """
        given: dict[str, Any] = {
            "min_ctas": min_ctas,
            "max_ctas": max_ctas,
            "nvls_ctas": nvls_ctas,
            "cga_cluster_size": cga_cluster_size,
            "alg_selection": alg_selection and alg_selection.encode(),
            "force_alg_selection": force_alg_selection,
            "cta_policy": cta_policy,
            "user_profiler_tag": user_profiler_tag,
        }
        return self.dispatcher.backends["cuda"].nccl_config(
            {name: each for name, each in given.items() if each is not None}
        )

    # -- numbers, hooks and comparison of operations ------------------------------------------------

    @property
    def sequence_number(self) -> int:
        """The number of collectives that this rank has begun in this group; each has the same number on all ranks."""
        return self.dispatcher.number_of("barrier")

    @property
    def message_number(self) -> int:
        """The number of sends and receives that this rank has begun in this group."""
        return self.dispatcher.number_of("send")

    def register_hook(self, hook: Hook) -> RemovableHandle:
        """Call `hook` for every operation of this group on this rank, until the handle's ``remove()``.

        ``hook.begin(operation)`` is called before the transport, ``hook.end(operation)`` after the end of the
        operation, with the same :class:`Operation`. While a hook is registered, no operation takes the fast path.

        Parameters
        ----------
        hook : object
            An object with the methods `begin` and `end` of :class:`Hook`.

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
        self.dispatcher.add_hook(hook)
        from .hooks import RemovableHandle

        return RemovableHandle(functools.partial(self.dispatcher.remove_hook, hook))

    def enable_timing(self) -> None:
        """Measure the time of each later operation on this rank: see :meth:`Work.get_duration`.

        Operations then skip the fast path: each takes some microseconds longer. c10d's name is
        ``_enable_collectives_timing``.

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
        from .hooks import Timing

        if not any(isinstance(hook, Timing) for hook in self.dispatcher.hooks):
            self.register_hook(Timing())

    def agree_on(self, name: str, *details: str) -> None:
        """With HPCCOMM_DEBUG=DETAIL, raise on every rank unless all ranks make this call with these details."""
        words = f"{name} ({shortened(details[0])})" if details else name  # for reports
        self.dispatcher.recent.append((self.sequence_number, words, "", 0))
        if self.dispatcher.check is not None:
            self.dispatcher.check.agree(name, *details)

    # -- the end ---------------------------------------------------------------------------------

    def __dir__(self) -> list[str]:
        """Return the public names, which completion shows; others are for hpccomm's own files."""
        operations = {*vars(Operations), *vars(GeneratedOperations)}
        return sorted({*PUBLIC, *own_names(type(self)), *(name for name in operations if not name.startswith("_"))})

    def destroy(self) -> None:
        """Finish operations in flight, and free the backends and the communicator; collective.

        Groups made from it are destroyed first. Afterwards the group refuses every operation. Messages that no rank
        has received are dropped, with a warning. Destroying a group twice does nothing. In a group
        with ``on_timeout="raise"``, operations that have timed out are given up after every rank has come.

        Raises
        ------
        DistTimeoutError
            An operation is still in flight after the group's timeout (a receive without a send, for example:
            `Work.abort` cancels it), or another rank has not called it by then. The group is not destroyed.
        checkpoint.CheckpointError
            On every rank: the running checkpoint of `checkpoint.save_async` has failed. The group is not
            destroyed.
        DistError
            Inside a coalescing() block.
        DistBackendError
            MPI has been finalised.
        """
        for text in self._destroy():  # last: with -W error, warnings raise, and only on some ranks
            warnings.warn(text, HpccommWarning, stacklevel=3)

    def _destroy(self) -> list[str]:
        """Destroy the group; return the warnings."""
        if self.is_destroyed:
            return []
        if self.dispatcher.block is not None:
            raise DistError(f"destroy of {self!r}: leave its coalescing() block first{on_rank()}")
        if self.comm is not None and mpi_library.is_finalized():
            raise DistBackendError(f"destroy of {self!r}: MPI has been finalised: call MPI.Finalize() last{on_rank()}")
        for each in self.attachments.values():
            each.finish()
        self.agree_on("destroy")
        from .ending import finish, give_up_the_rest, meet

        warned: list[str] = []
        for child in list(self.children):
            warned += child._destroy()
        deadline = time.monotonic() + as_seconds(self.timeout)
        warned += finish(self, deadline)
        all_free = self.comm is None or meet(self, deadline)
        is_clean = not give_up_the_rest(self) and all_free  # otherwise the communicator is not freed
        # From here on every step runs, even if an earlier one has raised.
        steps: list[Callable[[], Any]] = [functools.partial(observers.group_gone, self, all_free)]
        steps += [each.close if is_clean else each.abort for each in reversed(self.dispatcher.backends.values())]
        steps.append(self.dispatcher.close)
        if self.comm is not None and not is_clean:
            steps.append(functools.partial(failures.forget, self.comm))
        elif self.comm is not None:
            steps.append(lambda: warned.extend(mpi_library.free(self.comm, self, self.largest_tag, have_met=True)))
        if self._store is not None or self.owner is self:
            steps.append(self._close_store)
        if self.dispatcher.check is not None:
            steps.append(self.dispatcher.check.close)
        if self.on_destroy is not None:
            steps.append(functools.partial(self.on_destroy, self))
        failures.call_all(iter(steps), self.comm)
        return warned

    def give_up(self, ranks: Sequence[int], refusal: str) -> None:
        """Free the group without the other ranks, because the (global) `ranks` have died.

        Operations in flight end with RankFailedError; later ones raise a DistError with the text `refusal`. The
        communicator is not freed, because it may still have messages in flight.
        """
        from .ending import abandon

        abandon(self, ranks)
        for child in list(self.children):
            child.give_up(ranks, refusal)
        for each in self.attachments.values():
            each.give_up(ranks)
        if self.comm is not None:
            failures.forget(self.comm)
        self.dispatcher.close(refusal)
        self._close_store()
        if self.on_destroy is not None:
            self.on_destroy(self)

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
        if self.place is not None and self.owner is self:
            self.place.close()

    def agree(self, flag: bool) -> bool:
        """See :func:`hpccomm.agree`."""
        if self.is_destroyed or self.comm is None:
            raise DistError(
                self.refusal if self.is_destroyed else f"agree: {self!r} has no MPI communicator{on_rank()}"
            )
        with failures.translating("agree", self.comm):
            return failures.agree(self.comm, bool(flag))

    @property
    def refusal(self) -> str:
        """The text of the error that every operation of a destroyed group raises."""
        return getattr(self.dispatcher.backends, "refusal", "")

    def leave(self, tells: bool = True) -> None:
        """Wait for the other ranks, which may need this one, if the program ends without destroying the group.

        If the wait is long and `tells` is true, print a message.
        """
        from .ending import leave

        leave(self, tells)

    @property
    def is_destroyed(self) -> bool:
        """True if the group has been destroyed and refuses every operation."""
        return isinstance(self.dispatcher.backends, Destroyed)

    def abort(self, status: int = 1) -> NoReturn:
        """End all ranks of the MPI job at once, with exit status `status` (MPI_Abort)."""
        from ..process.abort import abort

        for backend in list(self.dispatcher.backends.values()):
            backend.abort()
        take_names_away(MAPPED_LATER)
        abort(status)
        raise SystemExit(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # Destroying is collective: after an error, this rank would wait for ranks that never come.
        if isinstance(error, SystemExit) and self.owner is self and self.size > 1:
            end_with(error)
        if kind is None:
            group = self
            while group.successor is not None:
                group = group.successor
            group.destroy()

    def describe(self) -> str:
        """Return the group's rank, size and device map, and the ways that it has chosen by timing, one on each line.

        Of `broadcast`, `all_gather_single` and `all_to_all_single` of 64 KiB and more, a group within a node times
        memory of the node and MPI during its first calls of each size class. ``HPCCOMM_TUNING`` turns this off.
        """
        lines = [repr(self)]
        for name, nbytes, is_by_mpi, in_node, by_mpi in self.dispatcher.fast_path.decided():
            ways = [f"memory of the node ({in_node / 1000:.0f} us)", f"MPI ({by_mpi / 1000:.0f} us)"]
            chosen, other = reversed(ways) if is_by_mpi else ways
            lines.append(f"{name} from {nbytes >> 10} to {nbytes >> 9} KiB: by {chosen}, not {other}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        state = ", destroyed" if self.is_destroyed else ""
        return f"<ProcessGroup {self.name!r}: rank {self.rank} of {self.size}, {self.config}{state}>"


def make_group(
    owner: ProcessGroup | None = None, kind: Callable[..., ProcessGroup] | None = None, **fields: Any
) -> ProcessGroup:
    """Make a group; `kind` is its class (default: ProcessGroup)."""
    group = (kind or ProcessGroup)(**fields)
    names = set(group.config.device_map.values())
    if len(names) == 1 and not names & registry.BUILT_IN:  # a custom backend may communicate in its constructor
        group.dispatcher.backends[next(iter(group.config.device_map))]
    group.owner = owner or group
    observers.new_group(group)
    for device, name in group.config.device_map.items():
        if registry.REGISTRY[name].connects:
            group.dispatcher.backends[device]  # makes it
    return group


def child_of(
    owner: ProcessGroup,
    comm: Any,
    ranks: Sequence[int],
    config: BackendConfig,
    limits: dict[str, Any],
    name: str,
    description: str | None,
    is_duplicated: bool = False,
    kind: Callable[..., ProcessGroup] | None = None,
) -> ProcessGroup:
    """Make a group on a new communicator of these ranks of `owner`; it is destroyed with `owner`."""
    mpi_library.private(comm, owner.comm).Set_name(f"hpccomm {name}")
    if not is_duplicated:
        failures.keep_spare(comm)
    ranks = tuple(ranks)
    has_all = ranks == owner.ranks
    group = make_group(
        owner,
        kind,
        rank=comm.Get_rank(),
        size=len(ranks),
        ranks=ranks,
        comm=comm,
        nodes=owner.nodes if has_all else tuple([owner.nodes[owner.group_ranks[rank]] for rank in ranks]),
        config=config,
        settings=owner.settings,
        **limits,
        name=name,
        description=description or "",
        device_id=owner.device_id,
        largest_tag=owner.largest_tag,
        place=owner.place.of(ranks),
    )
    owner.children.append(group)
    group.on_destroy = owner.children.remove
    return group
