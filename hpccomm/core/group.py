"""ProcessGroup: its members, its dispatcher, its life."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, overload

from ..errors import DistError, DistStoreError, on_rank
from ..job import failures, mpi_library
from ..process.excepthook import end_with
from ..process.proc import MAPPED_LATER, take_names_away
from . import observers, registry
from .backends import Destroyed
from .dispatcher import Dispatcher
from .generated import GeneratedOperations
from .late import GRID_ON, late
from .members import shortened
from .operations import Operations
from .options import time_limit
from .registry import BackendConfig
from .timeouts import as_seconds
from .work import own_names

if TYPE_CHECKING:
    from mpi4py import MPI
    from typing_extensions import Self

    from .hooks import Hook, RemovableHandle

PUBLIC = [  # beside the operations
    "rank", "size", "ranks", "nodes", "local_rank", "local_ranks", "comm", "config", "device_id", "timeout", "name",
    "on_timeout", "description", "group_name", "group_desc", "is_destroyed", "sequence_number", "message_number",
    "is_replacement", "store", "on", "group_rank", "global_rank", "register_hook", "enable_timing", "destroy", "agree",
    "abort", "nccl_handle", "nccl_config",
]  # fmt: skip


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
        The number of ranks.
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
        The backend of each device.
    timeout : timedelta
        The time limit of operations, monitored_barrier and destroy.
    on_timeout : str
        ``"abort"`` ends the job after that time, ``"raise"`` raises DistTimeoutError where that is possible, ``"warn"``
        goes on.
    name : str
        For messages; also ``group_name``.
    description : str
        For messages; also ``group_desc``.
    is_replacement : bool
        True in the world that :func:`init_process_group` returns on a spare: it has the place of a dead rank, but not
        its state.

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
        self.dispatcher = Dispatcher(self)
        self.owner: ProcessGroup = self  # the world, of the groups made from it
        self.children: list[ProcessGroup] = []  # destroyed with it: those that it owns
        self.leaving: Any = None  # the meeting at the end, once begun
        self.on_destroy: Callable[[ProcessGroup], None] | None = None
        self.successor: ProcessGroup | None = None  # what shrink_group or replace_failed has made of it
        self.shrunk_from: ProcessGroup | None = None  # a world of more ranks, all of which live; it ends with this one
        self.is_replacement = False
        self.attachments: dict[type, Any] = {}  # by class; destroy calls their finish(), a death give_up(ranks)
        self._store: Any = None

    @overload
    @classmethod
    def on(
        cls, comm: MPI.Cartcomm, *,
        config: BackendConfig | str | None = ..., timeout: timedelta | float | None = ..., name: str = ...,
    ) -> Any: ...  # fmt: skip  # a Grid
    @overload
    @classmethod
    def on(
        cls, comm: Any, *,
        config: BackendConfig | str | None = ..., timeout: timedelta | float | None = ..., name: str = ...,
    ) -> ProcessGroup: ...  # fmt: skip
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
            It is duplicated, so that messages on it never mix with the group's. With a Cartesian topology
            (``Create_cart``) the group is a :class:`Grid`.
        config : BackendConfig or str, optional
            The backend of each device, as `backend` of :func:`init_process_group`.
        timeout
            As for :func:`init_process_group`.
        name : str, optional
            A name for messages.

        Returns
        -------
        ProcessGroup
            The group; :meth:`destroy`, or the end of a ``with`` block, destroys it.

        Raises
        ------
        TypeError
            `comm` is no intracommunicator.
        ValueError
            `config` or `timeout` is invalid, or an environment variable HPCCOMM_* of rank 0 (on every rank).

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
        mpi = mpi_library.load()
        observers.group_coming()
        fields = mpi_library.membership(comm)
        fields["place"] = observers.place_of_store(fields["comm"], fields["nodes"])
        fields.update(limit(fields["settings"]), config=config, name=name or "group")
        if comm.Get_topology() == mpi.CART:
            return late(GRID_ON)(comm, fields)  # type: ignore[no-any-return]
        return make_group(**fields)

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
                raise DistStoreError(f"{self!r} has no store: it was made without MPI{on_rank()}")
            self._store = self.place.open(self.timeout)
        return self._store

    @property
    def nccl_handle(self) -> int:
        """The address of the ncclComm_t that connects this rank's GPU to the others', for libraries that call NCCL.

        It is hpccomm's: others must not free it, and not use it after the group has been destroyed or has failed. What
        they put on it comes in the same order on every rank, among hpccomm's own operations too, and not from two
        threads at once. In groups with ``on_timeout="raise"`` its calls may return ncclInProgress.

        Raises
        ------
        DistError
            The ranks are not connected yet; the message says how.
        UnsupportedOperationError
            The group's GPU arrays do not go over NCCL.
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
        """Return a context in which NCCL does this group's collectives on GPU arrays as told (ncclCollConfig_t).

        Every rank enters it with the same values, which NCCL does not compare. Persistent operations keep what holds
        where they are made. Messages, and what is made of them (`gather`, `scatter`, `all_to_all` of lists or of parts
        of different sizes), have no such settings.

        Parameters
        ----------
        min_ctas, max_ctas : int, optional
            How many blocks of the GPU the kernel has at least and at most: few leave room for other kernels.
        nvls_ctas, cga_cluster_size : int, optional
            How many blocks for NVLink SHARP; how many make a cluster of thread blocks (Hopper and later).
        alg_selection : str, optional
            Which algorithms NCCL may choose from, such as ``"ring"``, ``"tree,ring"``, ``"^nvls"``.
        force_alg_selection : bool, optional
            False: another algorithm where none of these can do it; by default that is an error.
        cta_policy : int, optional
            ``NCCL_CTA_POLICY_*`` of nccl.h: 1 for efficiency, 2 to use no SM where that can be.
        user_profiler_tag : int, optional
            What NCCL's profiler plugins are told with the calls.

        Returns
        -------
        context manager
            Of None. What is left out is as for other calls.

        Raises
        ------
        DistBackendError
            NCCL is older than 2.31. A value that NCCL does not take is an error of the collective.
        DistError
            The ranks are not connected yet; the message says how.
        UnsupportedOperationError
            The group's GPU arrays do not go over NCCL.

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

    # -- operations, as the dispatcher gets them ----------------------------------------------------

    @property
    def sequence_number(self) -> int:
        """The number of collectives that this rank has begun in this group: the same number is the same collective."""
        return self.dispatcher.number_of("barrier")

    @property
    def message_number(self) -> int:
        """The number of messages that this rank has begun to send or to receive in this group."""
        return self.dispatcher.number_of("send")

    def register_hook(self, hook: Hook) -> RemovableHandle:
        """Call `hook` for every operation of this group on this rank, until the handle's ``remove()``.

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
        self.dispatcher.add_hook(hook)
        from .hooks import RemovableHandle

        return RemovableHandle(functools.partial(self.dispatcher.remove_hook, hook))

    def enable_timing(self) -> None:
        """Measure how long each operation takes from now on, on this rank: see :meth:`Work.get_duration`.

        Small operations take the long way then, which costs some microseconds. c10d calls it
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
        """Raise on every rank if not every rank makes this call, where calls are compared: HPCCOMM_DEBUG=DETAIL."""
        words = f"{name} ({shortened(details[0])})" if details else name
        self.dispatcher.recent.append((self.sequence_number, words, "", 0))
        if self.dispatcher.check is not None:
            self.dispatcher.check.agree(name, *details)

    # -- life ------------------------------------------------------------------------------------

    def __dir__(self) -> list[str]:
        """Return the names for programs, which completion shows; others are for hpccomm's own files."""
        operations = {*vars(Operations), *vars(GeneratedOperations)}
        return sorted({*PUBLIC, *own_names(type(self)), *(name for name in operations if not name.startswith("_"))})

    def destroy(self) -> None:
        """Finish what is in flight, free the backends and the communicator. Every rank of the group calls it.

        Groups made from it are destroyed first. Afterwards every operation on the group is refused. Messages that
        nobody has received are dropped, with a warning. A group that is destroyed already is left alone. In a group
        with ``on_timeout="raise"``, what has timed out is given up when every rank has come.

        Raises
        ------
        DistTimeoutError
            An operation is still in flight after the group's timeout (a receive that nobody sends to, for example:
            `Work.abort` takes it back), or another rank has not called it by then. The group is not destroyed.
        checkpoint.CheckpointError
            On every rank: the checkpoint of `checkpoint.save_async` that was under way has failed. The group is not
            destroyed.
        DistError
            Inside a coalescing() block.
        """
        for text in self._destroy():  # at the last: with -W error a warning raises, on some ranks only
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _destroy(self) -> list[str]:
        """Destroy the group; return the warnings."""
        if self.is_destroyed:
            return []
        if self.dispatcher.block is not None:
            raise DistError(f"destroy of {self!r}: leave its coalescing() block first{on_rank()}")
        for each in self.attachments.values():
            each.finish()
        self.agree_on("destroy")
        from .ending import call_all, finish, give_up_the_rest, meet

        warned = [text for child in list(self.children) for text in child._destroy()]
        deadline = time.monotonic() + as_seconds(self.timeout)
        warned += finish(self, deadline)
        all_free = self.comm is None or meet(self, deadline)
        is_clean = not give_up_the_rest(self) and all_free  # otherwise MPI keeps the communicator
        # From here on there is no way back: each step is taken, whatever one before it has raised.
        steps: list[Callable[[], Any]] = [functools.partial(observers.group_gone, self)]
        steps += [each.close if is_clean else each.abort for each in reversed(self.dispatcher.backends.values())]
        steps.append(self.dispatcher.close)
        if self.comm is not None and not is_clean:
            steps.append(functools.partial(failures.forget, self.comm))
        elif self.comm is not None:
            steps.append(lambda: warned.extend(mpi_library.free(self.comm, self, self.largest_tag, have_met=True)))
        steps.append(self._close_store)
        if self.dispatcher.check is not None:
            steps.append(self.dispatcher.check.close)
        if self.on_destroy is not None:
            steps.append(functools.partial(self.on_destroy, self))
        call_all(iter(steps))
        return warned

    def give_up(self, ranks: Sequence[int], refusal: str) -> None:
        """Free the group without the other ranks, because some (global) `ranks` have died.

        Operations in flight end with RankFailedError; later ones raise a DistError with the text `refusal`. The
        communicator is not freed, because MPI may still have messages on it.
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
        """Wait for the other ranks at the end of a program that has not destroyed the group: they may need this one.

        Where that takes a while it `tells` so.
        """
        from .ending import leave

        leave(self, tells)

    @property
    def is_destroyed(self) -> bool:
        """True if the group has been destroyed: it refuses every operation."""
        return isinstance(self.dispatcher.backends, Destroyed)

    def abort(self, status: int = 1) -> NoReturn:
        """End the whole MPI job at once, every rank of it, with exit status `status` (MPI_Abort)."""
        from ..process.abort import abort

        for backend in list(self.dispatcher.backends.values()):
            backend.abort()
        take_names_away(MAPPED_LATER)
        abort(status)
        raise SystemExit(status)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError; for a name of mpi4py's it says what that is here."""
            from .mpi4py_names import instead_of

            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{instead_of(name)}", name=name, obj=self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # Destroying is collective: a rank that is on its way out with an error would wait for ranks that never come.
        if isinstance(error, SystemExit) and self.owner is self and self.size > 1:
            end_with(error)
        if kind is None:
            group = self
            while group.successor is not None:
                group = group.successor
            group.destroy()

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.name!r}: rank {self.rank} of {self.size}, {self.config}>"


def make_group(
    owner: ProcessGroup | None = None, kind: Callable[..., ProcessGroup] | None = None, **fields: Any
) -> ProcessGroup:
    """Make a group; `kind` is its class, if that is not ProcessGroup."""
    group = (kind or ProcessGroup)(**fields)
    names = set(group.config.device_map.values())
    if len(names) == 1 and not names & registry.BUILT_IN:  # a custom backend, which may meet the other ranks when made
        group.dispatcher.backends[next(iter(group.config.device_map))]
    group.owner = owner or group
    observers.new_group(group)
    for device, name in group.config.device_map.items():
        if registry.REGISTRY[name].connects:
            group.dispatcher.backends[device]  # which makes it
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
    """Make the group of a new communicator of these ranks of `owner`, with which it is destroyed."""
    mpi_library.private(comm, owner.comm).Set_name(f"hpccomm {name}")
    if not is_duplicated:
        failures.keep_spare(comm)
    group = make_group(
        owner,
        kind,
        rank=comm.Get_rank(),
        size=comm.Get_size(),
        ranks=tuple(ranks),
        comm=comm,
        nodes=tuple(owner.nodes[owner.group_ranks[rank]] for rank in ranks),
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
