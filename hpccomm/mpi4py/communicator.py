"""`Comm`: a communicator of mpi4py whose calls on GPU arrays are operations of a group."""

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
from ..errors import DistError, on_rank
from .buffers import device_of_buffers
from .calls import INSTEAD, REDUCTIONS, ROUTES, Route, Step, is_accelerated, refuse
from .reductions import is_of_pairs, nccl_lacks, reduce_by_the_host, reduce_pairs, refuse_pairs
from .requests import Messages, as_prequest, fill_status, install

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm as _Base
else:
    _Base = object  # the other base is the class of the communicator that is given

MESSAGES = ("send", "recv", "sendrecv")
MAKING = (
    *("Dup", "Dup_with_info", "Clone", "Split", "Split_type", "Create", "Create_group", "Create_cart", "Create_graph"),
    *("Create_dist_graph", "Create_dist_graph_adjacent", "Sub", "Shrink"),
)


class Comm(_Base):
    """A communicator of mpi4py over hpccomm's transports.

    It is an ``MPI.Intracomm`` on the same handle as `comm`. Its collectives and messages with capital letters, their
    non-blocking forms and their persistent ones, go to the group's backend where their arrays are on a GPU: to
    NCCL, or to MPI by way of the host. Everything else is mpi4py's own. What `Split`, `Dup`, `Create_cart` and the like
    return is one, too.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or ProcessGroup
        Every rank of it calls this. A communicator gets a group (:meth:`ProcessGroup.on`), which `Free` destroys.
    accelerate : bool
        Whether large reductions of host arrays (`Allreduce`, `Reduce`, `Reduce_scatter_block`, `Scan`, `Exscan`, from
        128 KiB on) are hpccomm's, too: through the node's memory, of any layout, of float16.
    config, timeout, name
        As for :meth:`ProcessGroup.on`.

    Attributes
    ----------
    process_group : ProcessGroup
        The group.

    Raises
    ------
    TypeError
        `comm` is neither.

    Notes
    -----
    The route is chosen by the device of the arrays, which has to be the same on all ranks of a call. A call on GPU
    arrays is ordered on CuPy's current stream, and so is what comes after ``Wait``: the host does not wait. Their
    messages have tags where the transport has (NCCL has none), a receive with ``MPI.ANY_TAG`` takes tag 0, and a
    message has as many bytes as the receive's array. Over NCCL non-blocking messages begin together, when the program
    waits for one of them or calls something else of the communicator: ``MPI.Request`` and ``MPI.Prequest`` become
    subclasses, so that ``Waitall`` sees that. Reductions that NCCL lacks go by way of the host.

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
    messages: Messages  # that have not begun
    collects: bool  # them, over NCCL: over MPI they begin at once
    accelerates = False
    _options: tuple[Any, ...] = ()
    _is_ours = False  # the group

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
        if comm is None:  # as mpi4py makes what Dup returns
            return super().__new__(cls)
        if not isinstance(comm, ProcessGroup | MPI.Intracomm):
            raise TypeError(f"Comm: comm is {comm!r}; expected an MPI.Intracomm or a ProcessGroup{on_rank()}")
        own: Any = comm.comm.Dup() if isinstance(comm, ProcessGroup) else comm
        base: Any = type(own).__bases__[1] if isinstance(own, Comm) else type(own)
        make: Any = base.__new__
        self: Comm = make(_class_on(cls, base), own)
        self.accelerates = accelerate
        self._options = config, timeout, name
        self._is_ours = not isinstance(comm, ProcessGroup)
        install()
        if isinstance(comm, ProcessGroup):
            group = comm
        else:
            group = ProcessGroup.on(own, config=config, timeout=timeout, name=name or own.Get_name())
        self._group = group
        self.messages = Messages(group)
        self.collects = any(transport == "nccl" for transport in group.config.device_map.values())
        return self

    @property
    def process_group(self) -> ProcessGroup:
        """The group whose operations the calls are."""
        if self._group is None:
            raise DistError(
                f"process_group: mpi4py made this communicator (Idup): hm.Comm(comm) makes one of it{on_rank()}"
            )
        return self._group

    def Free(self) -> None:
        """Free the communicator, and destroy its group; every rank calls this."""
        if self._is_ours and not self.process_group.is_destroyed:
            self.process_group.destroy()
        super().Free()


_classes: dict[tuple[int, int], Any] = {}


def _class_on(cls: Any, base: Any) -> Any:
    """Return the class of a communicator that has been of class `base`: Cartesian, or watched by hpccomm run.

    A watched class is equal to the one that it watches, so classes are told apart by identity.
    """
    key = id(cls), id(base)
    if key not in _classes:
        _classes[key] = type(cls.__name__, (cls, base), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    return _classes[key]


def perform(comm: Comm, step: Step) -> None:
    """Do an operation, after the messages that have not begun, or together with them."""
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
    """Call the method of the group; what NCCL lacks goes by way of the host."""
    if comm.collects and nccl_lacks(step):
        return reduce_by_the_host(comm.process_group, step, async_op)
    return getattr(comm.process_group, step.operation)(*step.arguments, async_op=async_op)


def _begin(comm: Comm, route: Route, arguments: Any, named: Any, request: Any) -> Any:
    """Begin an operation, messages with those that come next; its request is `request`."""
    messages, group = comm.messages, comm.process_group
    step = route(group, *arguments, **named)
    if step.operation in MESSAGES and comm.collects:
        checked = _messages(group, step)
        request.open(step, messages)
        messages.add(checked, request)
        return request
    if messages.waiting:
        messages.begin()
    work = _operate(comm, step, async_op=True) if step.operation else CompletedWork()
    request.open(step)
    request.follow(work)
    return request


def _messages(group: ProcessGroup, step: Step) -> list[Call]:
    """Return the messages of a step, checked."""
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
        if made == MPI.COMM_NULL or not isinstance(made, MPI.Intracomm):
            return made
        config, timeout, _ = self._options
        new = Comm(made, accelerate=self.accelerates, config=config, timeout=timeout)
        _connect_like(self.process_group, new.process_group)
        return new

    return call


def _connect_like(parent: ProcessGroup, group: ProcessGroup) -> None:
    """Connect the GPUs of a new group if those of its parent are: with a message alone it could not begin."""
    if "cuda" in parent.dispatcher.backends:
        group.device_id = parent.dispatcher.backends["cuda"].connected_on()
        connect(group)


def _add_methods() -> None:
    methods: dict[str, Callable[..., Any]] = {name: _making(name) for name in MAKING}
    methods |= {name: _refused(name) for name in INSTEAD}
    for name, route in ROUTES.items():
        methods[name] = _blocking(name, route)
        methods[f"I{name.lower()}"] = _non_blocking(f"I{name.lower()}", route)
        methods[f"{name}_init"] = _persistent(f"{name}_init", route)
    for name, method in methods.items():
        own = getattr(MPI.Cartcomm if name == "Sub" else MPI.Intracomm, name, None)
        if own is not None:  # of this mpi4py
            setattr(Comm, name, update_wrapper(method, own))


_add_methods()
