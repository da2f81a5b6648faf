"""`Comm`: an mpi4py communicator whose calls on GPU arrays are operations of a group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ..api.world import connect
from ..core import generated
from ..core.calls import Call
from ..core.group import ProcessGroup
from ..core.registry import BackendConfig
from ..core.work import CompletedWork
from ..debug.mpi_calls import MAKING
from ..errors import DistError, on_rank
from .buffers import device_of_buffers
from .calls import INSTEAD, REDUCTIONS, ROUTES, Route, Step, is_accelerated, refuse
from .reductions import is_of_pairs, nccl_lacks, reduce_by_the_host, reduce_pairs, refuse_pairs
from .requests import Messages, as_prequest, fill_status, install

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm as _Base
else:
    _Base = object  # `_class_on` adds the given communicator's class as the other base

MESSAGES = ("send", "recv", "sendrecv")


class Comm(_Base):
    """An mpi4py communicator over hpccomm's transports.

    It is an ``MPI.Intracomm`` with the same handle as `comm`. If the arrays are on a GPU, its collectives and messages
    with capital letters (blocking, non-blocking and persistent) use the group's backend: NCCL, or MPI with copies on
    the host. Everything else is mpi4py's own. `Split`, `Dup`, `Create_cart` and similar methods also return a `Comm`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or ProcessGroup
        Every rank calls this. A communicator gets a group (:meth:`ProcessGroup.from_comm`), which `Free` destroys.
    accelerate : bool
        Whether hpccomm also does large reductions of host arrays (`Allreduce`, `Reduce`, `Reduce_scatter_block`,
        `Scan`, `Exscan`, from 128 KiB): through the node's shared memory, for any layout, and for float16.
    config, timeout, name
        As for :meth:`ProcessGroup.from_comm`.

    Attributes
    ----------
    process_group : ProcessGroup
        The group.

    Raises
    ------
    TypeError
        `comm` is neither a communicator nor a ProcessGroup.

    Notes
    -----
    The device of the arrays selects the route; it must be the same on all ranks of a call. A call on GPU arrays is
    ordered on CuPy's current stream, and ``Wait`` makes later work on the stream wait: the host does not wait. Messages
    of GPU arrays have tags unless NCCL carries them; a receive with ``MPI.ANY_TAG`` takes tag 0, and a message must
    fill the receive's array. Over NCCL, non-blocking messages begin together, when the program waits for one of them or
    makes another call on the communicator. ``MPI.Request`` and ``MPI.Prequest`` become subclasses, so that ``Waitall``
    can begin them. Reductions that NCCL lacks run on the host.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from hpccomm import mpi4py as hm
    >>> comm = hm.Comm(MPI.COMM_SELF.Dup())
    >>> isinstance(comm, MPI.Intracomm), comm.Get_size()
    (True, 1)
    >>> x, total = np.arange(3.0), np.empty(3)  # of cupy: the same lines
    >>> comm.Allreduce(x, total)
    >>> total
    array([0., 1., 2.])
    >>> comm.Free()
    """

    _group: ProcessGroup | None = None
    messages: Messages  # collected messages that have not begun
    collects: bool  # True over NCCL; over MPI, messages begin at once
    accelerates = False
    _options: dict[str, Any]  # for the groups of communicators that are made of it
    _is_ours = False  # whether `Free` destroys the group

    def __new__(
        cls,
        comm: MPI.Intracomm | ProcessGroup | None = None,
        *,
        accelerate: bool = False,
        config: BackendConfig | str | None = None,
        timeout: timedelta | float | None = None,
        name: str = "",
    ) -> Comm:
        """Return the communicator."""
        if comm is None:  # mpi4py calls it so in Dup
            return super().__new__(cls)
        if not isinstance(comm, ProcessGroup | MPI.Intracomm):
            raise TypeError(f"Comm: comm is {comm!r}; expected an MPI.Intracomm or a ProcessGroup{on_rank()}")
        own: Any = comm.comm.Dup() if isinstance(comm, ProcessGroup) else comm
        base: Any = type(own).__bases__[1] if isinstance(own, Comm) else type(own)
        make: Any = base.__new__
        self: Comm = make(_class_on(cls, base), own)
        self.accelerates = accelerate
        self._options = {"config": config, "timeout": timeout}
        install()
        if isinstance(comm, ProcessGroup):
            group = comm
        else:
            group = ProcessGroup.from_comm(own, name=name or own.Get_name(), **self._options)
            self._is_ours = True
        self._group = group
        self.messages = Messages(group)
        self.collects = "nccl" in group.config.device_map.values()
        return self

    @property
    def process_group(self) -> ProcessGroup:
        """The group that runs the calls' operations."""
        if self._group is None:
            raise DistError(
                f"process_group: mpi4py made this communicator (Idup): hm.Comm(comm) makes one of it{on_rank()}"
            )
        return self._group

    def Free(self) -> None:
        """Free the communicator and destroy its group; collective."""
        self._destroy()
        super().Free()

    def Disconnect(self) -> None:
        """Complete the communication, free the communicator and destroy its group; collective."""
        self._destroy()
        super().Disconnect()

    def _destroy(self) -> None:
        if self._is_ours and not self.process_group.is_destroyed:
            self.process_group.destroy()


_classes: dict[tuple[int, int], Any] = {}


def _class_on(cls: Any, base: Any) -> Any:
    """Return the class for a communicator of class `base`, which may be Cartesian or watched by hpccomm run.

    A watched class compares equal to the class that it watches, so the cache uses identities.
    """
    key = id(cls), id(base)
    if key not in _classes:
        _classes[key] = type(cls.__name__, (cls, base), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    return _classes[key]


def perform(comm: Comm, step: Step) -> None:
    """Run an operation after the collected messages; if it is a message, together with them."""
    messages, group = comm.messages, comm.process_group
    sender: int | None = None
    if step.operation in MESSAGES and messages.waiting:
        for work in messages.begin(_messages(group, step)):
            work.wait()
            sender = work.source
    else:
        if messages.waiting:
            messages.begin()
        if step.operation:
            sender = _operate(comm, step, async_op=False)
    fill_status(step.status, step, sender)


def _operate(comm: Comm, step: Step, async_op: bool) -> Any:
    """Call the group's method; a reduction that NCCL lacks runs on the host."""
    if comm.collects and nccl_lacks(step):
        return reduce_by_the_host(comm.process_group, step, async_op)
    return getattr(comm.process_group, step.operation)(*step.arguments, async_op=async_op)


def _begin(comm: Comm, route: Route, arguments: Any, named: Any, request: Any) -> Any:
    """Begin an operation for `request`; over NCCL, collect messages instead."""
    messages, group = comm.messages, comm.process_group
    step = route(group, *arguments, **named)
    if step.operation in MESSAGES and comm.collects:
        checked = _messages(group, step)
        request.open(step, messages)
        messages.waiting.append((checked, request))
        return request
    if messages.waiting:
        messages.begin()
    work = _operate(comm, step, async_op=True) if step.operation else CompletedWork()
    request.open(step)
    request.follow(work)
    return request


def _messages(group: ProcessGroup, step: Step) -> list[Call]:
    """Return a step's messages, checked."""
    if step.operation == "send":
        return [generated.send(group, *step.arguments)]
    if step.operation == "recv":
        return [generated.recv(group, *step.arguments)]
    sent, to, output, source, tag, recv_tag = step.arguments
    return [generated.send(group, sent, to, tag), generated.recv(group, output, source, recv_tag)]


def _blocking(name: str, route: Route) -> Callable[..., Any]:
    can_be_accelerated = name in REDUCTIONS

    def call(self: Comm, *arguments: Any, **named: Any) -> Any:
        given, own = (*arguments, *named.values()), getattr(super(Comm, self), name)
        if device_of_buffers(given) == "cpu" and not (
            can_be_accelerated and self.accelerates and is_accelerated(name, *arguments, **named)
        ):
            return own(*arguments, **named)
        if is_of_pairs(given):
            if self.messages.waiting:
                self.messages.begin()
            return reduce_pairs(own, *arguments, **named)
        return perform(self, route(self.process_group, *arguments, **named))

    return call


def _non_blocking(name: str, route: Route) -> Callable[..., Any]:
    def call(self: Comm, *arguments: Any, **named: Any) -> Any:
        given = (*arguments, *named.values())
        if device_of_buffers(given) == "cpu":
            return getattr(super(Comm, self), name)(*arguments, **named)
        if is_of_pairs(given):
            refuse_pairs(name)
        return _begin(self, route, arguments, named, MPI.Request())

    return call


def _persistent(name: str, route: Route) -> Callable[..., Any]:
    def call(self: Comm, *arguments: Any, **named: Any) -> Any:
        given = (*arguments, *named.values())
        if device_of_buffers(given) == "cpu":
            return as_prequest(getattr(super(Comm, self), name)(*arguments, **named))
        if is_of_pairs(given):
            refuse_pairs(name)
        request: Any = MPI.Prequest()
        request.operation = lambda request: _begin(self, route, arguments, named, request)
        return request

    return call


def _refused(name: str) -> Callable[..., Any]:
    def call(self: Comm, *arguments: Any, **named: Any) -> Any:
        device = device_of_buffers((*arguments, *named.values()))
        if device != "cpu":
            refuse(name, device)
        return as_prequest(getattr(super(Comm, self), name)(*arguments, **named))

    return call


def _making(name: str) -> Callable[..., Any]:
    def call(self: Comm, *arguments: Any, **named: Any) -> Any:
        made = getattr(super(Comm, self), name)(*arguments, **named)
        if self._group is None:  # mpi4py has made it (Idup)
            return made
        backends = self.process_group.dispatcher.backends
        if made == MPI.COMM_NULL or not isinstance(made, MPI.Intracomm):
            return made
        new = Comm(made, accelerate=self.accelerates, **self._options)
        if "cuda" in backends:  # a message needs a connection to begin
            new.process_group.device_id = backends["cuda"].connected_on()
            connect(new.process_group)
        return new

    return call


def _add_methods() -> None:
    methods: dict[str, Callable[..., Any]] = {name: _making(name) for name in (*MAKING, "Create_group")}
    methods |= {name: _refused(name) for name in INSTEAD}
    for name, route in ROUTES.items():
        methods[name] = _blocking(name, route)
        methods[f"I{name.lower()}"] = _non_blocking(f"I{name.lower()}", route)
        methods[f"{name}_init"] = _persistent(f"{name}_init", route)
    for name, method in methods.items():
        own = getattr(MPI.Cartcomm if name == "Sub" else MPI.Intracomm, name, None)
        if own is not None:  # this mpi4py has the method
            setattr(Comm, name, update_wrapper(method, own))


_add_methods()
