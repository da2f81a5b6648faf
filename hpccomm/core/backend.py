"""Backend (the class a transport subclasses), the registry of backends, and BackendConfig."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ..errors import DistBackendError, UnsupportedOperationError, here
from .arrays import BUILT_IN_DEVICES, known_devices
from .fast_path import FastPath
from .tuning import Tuning
from .work import Work

if TYPE_CHECKING:
    from mpi4py import MPI

    from .group import ProcessGroup
    from .persistent_work import PersistentWork
    from .reduce_op import ReduceOp

DEFAULT_DEVICE_MAP = {"cpu": "mpi", "cuda": "nccl"}


def _explained(operation: Any) -> Any:
    """Return `operation` with its errors passed through the backend's `explain`.

    For each number of arguments there is a wrapper of its own: a call with ``*arguments`` would cost as much as all
    the rest of the dispatch.
    """
    name: str = operation.__name__

    def explain(backend: Backend, error: Exception) -> NoReturn:
        explained = backend.explain(name, error)
        if explained is error:
            raise error
        raise explained from error

    def with_2(self: Any, a: Any, b: Any) -> Any:
        try:
            return operation(self, a, b)
        except Exception as error:
            explain(self, error)

    def with_3(self: Any, a: Any, b: Any, c: Any) -> Any:
        try:
            return operation(self, a, b, c)
        except Exception as error:
            explain(self, error)

    def with_4(self: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        try:
            return operation(self, a, b, c, d)
        except Exception as error:
            explain(self, error)

    def with_any(self: Any, *arguments: Any) -> Any:
        try:
            return operation(self, *arguments)
        except Exception as error:
            explain(self, error)

    wrapper = {3: with_2, 4: with_3, 5: with_4}.get(operation.__code__.co_argcount, with_any)
    return functools.update_wrapper(wrapper, operation)  # type: ignore[arg-type]


class Backend:
    """A transport for the arrays of one device; subclass it and override the operations it has.

    The group has checked every argument before it calls a backend: arrays are of this backend's device
    (host arrays come as ``numpy.ndarray``, possibly not contiguous), writable where they are written, their
    dtypes, sizes and list lengths fit, `op` suits the dtype, and `root`, `dst`, `src` are ranks of this group.

    With ``async_op=True`` an operation returns a :class:`Work` (or None, if it has completed already). With
    ``async_op=False`` it returns None after completion (or a Work, which the group waits for); a `recv` returns the
    rank the message came from.

    Examples
    --------
    >>> class Alone(hc.Backend):  # for groups of one rank: every array is its own sum
    ...     def all_reduce(self, array, op, async_op):
    ...         return hc.CompletedWork() if async_op else None
    >>> Alone(rank=0, size=1).all_reduce(np.ones(2), hc.ReduceOp.SUM, async_op=True).wait()
    True
    """

    name = "custom"
    fast_path = FastPath()  # of a backend of host arrays

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.explain is not Backend.explain:
            for name in OPERATIONS & vars(cls).keys():
                setattr(cls, name, _explained(vars(cls)[name]))

    @property
    def implementation(self) -> str:
        """The class that an error message names."""
        return type(self).__name__

    def broadcast(self, array: Any, root: int, async_op: bool) -> Work | None:
        """Copy `array` of rank `root` into `array` of every rank."""
        raise self._lacks("broadcast")

    def all_reduce(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        """Reduce `array` over the ranks, in place."""
        raise self._lacks("all_reduce")

    def reduce(self, array: Any, root: int, op: ReduceOp, async_op: bool) -> Work | None:
        """Reduce `array` over the ranks, in place on rank `root`; the others only read theirs."""
        raise self._lacks("reduce")

    def scan(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        """Reduce `array` over ranks 0..this one, in place."""
        raise self._lacks("scan")

    def exscan(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        """Reduce `array` over the ranks before this one, in place; rank 0's stays as it is."""
        raise self._lacks("exscan")

    def all_gather(self, outputs: list[Any], array: Any, async_op: bool) -> Work | None:
        """Copy `array` of rank r into ``outputs[r]`` of every rank; sizes may differ between ranks."""
        raise self._lacks("all_gather")

    def all_gather_single(self, output: Any, array: Any, async_op: bool) -> Work | None:
        """Copy the `array` of every rank, in rank order, into `output`, which is `size` times as large."""
        raise self._lacks("all_gather_single")

    def gather(self, array: Any, outputs: list[Any] | None, root: int, async_op: bool) -> Work | None:
        """Copy `array` of rank r into ``outputs[r]`` of rank `root`; `outputs` is None elsewhere."""
        raise self._lacks("gather")

    def scatter(self, output: Any, inputs: list[Any] | None, root: int, async_op: bool) -> Work | None:
        """Copy ``inputs[r]`` of rank `root` into `output` of rank r; `inputs` is None elsewhere."""
        raise self._lacks("scatter")

    def reduce_scatter(self, output: Any, inputs: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        """Reduce ``inputs[r]`` over the ranks into `output` of rank r."""
        raise self._lacks("reduce_scatter")

    def reduce_scatter_single(self, output: Any, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        """Reduce the r-th equal part of `array` over the ranks into `output` of rank r."""
        raise self._lacks("reduce_scatter_single")

    def all_to_all(self, outputs: list[Any], inputs: list[Any], async_op: bool) -> Work | None:
        """Copy ``inputs[r]`` of rank s into ``outputs[s]`` of rank r."""
        raise self._lacks("all_to_all")

    def all_to_all_single(
        self, output: Any, array: Any, output_counts: list[int] | None, input_counts: list[int] | None, async_op: bool
    ) -> Work | None:
        """Send ``input_counts[r]`` elements of `array` to each rank r, in order; receive likewise into `output`.

        Both counts are None where the program gave no split sizes: then the parts are equal.
        """
        raise self._lacks("all_to_all_single")

    def all_reduce_coalesced(self, arrays: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        """Reduce each of `arrays` in place, all in one message per dtype."""
        raise self._lacks("all_reduce_coalesced")

    def broadcast_coalesced(self, arrays: list[Any], root: int, async_op: bool) -> Work | None:
        """Broadcast all of `arrays` in one message."""
        raise self._lacks("broadcast_coalesced")

    def all_gather_coalesced(self, output_lists: list[list[Any]], arrays: list[Any], async_op: bool) -> Work | None:
        """Copy ``arrays[i]`` of rank r into ``output_lists[r][i]`` of every rank, in one message."""
        raise self._lacks("all_gather_coalesced")

    def all_gather_single_coalesced(self, outputs: list[Any], arrays: list[Any], async_op: bool) -> Work | None:
        """Do all_gather_single for each pair of `outputs` and `arrays`, in one message."""
        raise self._lacks("all_gather_single_coalesced")

    def reduce_scatter_single_coalesced(
        self, outputs: list[Any], arrays: list[Any], op: ReduceOp, async_op: bool
    ) -> Work | None:
        """Do reduce_scatter_single for each pair of `outputs` and `arrays`, in one message per dtype."""
        raise self._lacks("reduce_scatter_single_coalesced")

    def send(self, array: Any, dst: int, tag: int, async_op: bool) -> Work | None:
        """Send `array` to rank `dst`."""
        raise self._lacks("send")

    def recv(self, array: Any, src: int | None, tag: int, async_op: bool) -> Work | int | None:
        """Receive into `array` from rank `src` (None: from any); without `async_op` return the sender's rank."""
        raise self._lacks("recv")

    def sendrecv(
        self, array: Any, dst: int, output: Any, src: int | None, tag: int, recv_tag: int, async_op: bool
    ) -> Work | int | None:
        """Send `array` to `dst` and receive `output` from `src` at once; returns as `recv`."""
        raise self._lacks("sendrecv")

    def barrier(self, async_op: bool) -> Work | None:
        """Return when every rank has called it."""
        raise self._lacks("barrier")

    def monitored_barrier(self, timeout: float, wait_all_ranks: bool) -> None:
        """Return when every rank has called it, or raise DistTimeoutError naming those that have not."""
        raise self._lacks("monitored_barrier")

    def persistent(self, operation: str, *arguments: Any) -> PersistentWork:
        """Set up the operation of that name; `arguments` are those of its method, without `async_op`."""
        raise self._lacks("persistent")

    def connect(self) -> Any:
        """Make the connections that the first operation would make; called by every rank (``device_id=``)."""

    def batch(self, arrays: list[Any]) -> AbstractContextManager[None]:
        """Return a context manager: the asynchronous sends and receives of these arrays inside it start together."""
        return nullcontext()

    def split(self, options: BackendOptions | None, color: int) -> Backend | None:
        """Return the backend of a group made of ranks of this one, or None to have it made when needed.

        Every rank of this group calls it; those that are in no new group with ``options=None``. The ranks with the same
        `color` are in the same new group.
        """
        return None

    def close(self) -> None:
        """Free what the backend holds; called once, by every rank, when its group is destroyed."""

    def abort(self) -> None:
        """End what is in flight, without the other ranks, and within seconds: the job is about to end."""

    def explain(self, operation: str, error: Exception) -> Exception:
        """Return the error that the program should see for `error`, raised in `operation`."""
        return error

    def _lacks(self, operation: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(
            f"{operation}: backend {self.name!r} does not have it ({self.implementation}.{operation} is not "
            f"overridden); map the array's device to another backend, for example 'cpu:mpi'{here()}"
        )


OPERATIONS = {name for name in vars(Backend) if not name.startswith("_")} - {
    "abort",
    "batch",
    "close",
    "connect",
    "explain",
    "implementation",
    "name",
    "fast_path",
    "split",
}


class DeviceMap(dict[str, Backend]):
    """Maps the name of a device to the backend that serves its arrays."""

    collecting = False  # whether it is that of a coalescing() block
    fast = FastPath()  # the fast path of the host's backend, once there is that backend


@dataclass(frozen=True)
class BackendOptions:
    """What the creator of a backend is given (``register_backend(..., extended_api=True)``).

    Parameters
    ----------
    store : None
        Reserved.
    rank, size : int
        This process's rank in the group, and the number of ranks.
    timeout : timedelta
        That of the group.
    ranks : sequence of int
        Rank r of the group is rank ``ranks[r]`` of the world.
    group_name : str
    device : str
        The device whose arrays the backend will serve.
    comm : mpi4py.MPI.Intracomm or None
        The group's own communicator.
    tuning : Tuning
        The sizes from which an operation is done in another way; the same on all ranks.
    device_id : int, "auto" or None
        The `device_id` given to init_process_group.

    Examples
    --------
    >>> from datetime import timedelta
    >>> options = hc.BackendOptions(None, 0, 1, timedelta(seconds=60), (0,), "world", "cpu", None)
    >>> options.device
    'cpu'
    """

    store: Any
    rank: int
    size: int
    timeout: timedelta
    ranks: Sequence[int]
    group_name: str
    device: str
    comm: MPI.Intracomm | None
    tuning: Tuning = field(default_factory=Tuning)
    device_id: int | Literal["auto"] | None = None


Creator = Callable[..., "Backend | ProcessGroup"]


@dataclass
class _Registered:
    """One row of the registry; `creator` is a function, or a "module:name" that is imported when needed."""

    creator: Creator | str
    devices: tuple[str, ...]
    extended_api: bool
    needs: str | None = None  # a "module:function" that raises ImportError where what it needs is not installed

    def load(self) -> Creator:
        if self.needs is not None:
            _imported(self.needs)()
        if isinstance(self.creator, str):
            self.creator = _imported(self.creator)
        return self.creator  # type: ignore[return-value]


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


_registry: dict[str, _Registered] = {
    "mpi": _Registered("hpccomm.mpi.backend:create", ("cpu",), extended_api=True),
    "nccl": _Registered("hpccomm.nccl.backend:create", ("cuda",), extended_api=True, needs="hpccomm.cuda.seam:nccl"),
}


def register_backend(
    name: str, creator: Creator, *, devices: str | Sequence[str] | None = None, extended_api: bool = False
) -> None:
    """Add a backend, to be used in configurations: ``init_process_group("cpu:mpi,cuda:" + name)``.

    Parameters
    ----------
    name : str
        The name for configurations: letters, digits and "_".
    creator : callable
        Makes one instance for one group: ``creator(store, rank, size, timeout)``, or, with `extended_api`,
        ``creator(options, backend_options)`` where `options` is a :class:`BackendOptions` and `backend_options`
        is None for now. It returns a :class:`Backend`; or a whole :class:`ProcessGroup` of a class of your own,
        which then *is* the group (this needs a configuration with this one backend and nothing else, such as
        ``init_process_group(name)``). `store` is None in this version.
    devices : str or list of str, optional
        The devices it serves. Default: all known ones.
    extended_api : bool
        See `creator`.

    Returns
    -------
    None

    Raises
    ------
    ValueError
        The name is taken or is not a plain word, or a device is unknown.
    TypeError
        `creator` is not callable.

    Notes
    -----
    An installed package announces its backends without being imported, by entry points of the group
    ``hpccomm.backends``; each is a creator with the extended API, imported when a group first needs it.

    Examples
    --------
    >>> class Alone(hc.Backend):
    ...     def all_reduce(self, array, op, async_op):
    ...         array *= self.size
    >>> hc.register_backend("alone_backend", lambda store, rank, size, timeout: Alone(rank, size), devices="cpu")
    >>> group = hc.new_group(backend="cpu:alone_backend")
    >>> x = np.array([1.0])
    >>> hc.all_reduce(x, group=group)
    >>> x  # on 4 ranks: array([4.])
    array([1.])
    """
    name = name.strip().lower()
    if not name.isidentifier():
        raise ValueError(f"register_backend: {name!r} is not a backend name; use letters, digits and '_'")
    if name in known_backends():
        raise ValueError(f"register_backend: a backend called {name!r} exists already; choose another name")
    if not callable(creator):
        raise TypeError(f"register_backend: creator is {creator!r}; expected a function that returns a Backend")
    serves = known_devices() if devices is None else (devices,) if isinstance(devices, str) else tuple(devices)
    for device in serves:
        if device not in known_devices():
            raise ValueError(
                f"register_backend: no device is called {device!r}; the devices are "
                f"{', '.join(known_devices())} (register_device adds one)"
            )
    _registry[name] = _Registered(creator, serves, extended_api)


def known_backends() -> tuple[str, ...]:
    """Return the names of all backends: built in, registered, and announced by installed packages."""
    for name, creator in _announced_backends():
        if name not in _registry:
            _registry[name] = _Registered(creator, known_devices(), extended_api=True)
    return tuple(_registry)


@functools.cache
def _announced_backends() -> list[tuple[str, str]]:
    return [(entry.name.lower(), entry.value) for entry in importlib.metadata.entry_points(group="hpccomm.backends")]


def is_custom(name: str) -> bool:
    """Say whether `name` comes from register_backend or an installed package, and not from hpccomm."""
    return name not in DEFAULT_DEVICE_MAP.values()


def is_backend_available(name: str) -> bool:
    """Say whether there is a backend called `name`, and what it needs is installed here.

    Parameters
    ----------
    name : str
        A built-in backend, a registered one, or one of an installed package.

    Returns
    -------
    bool

    Examples
    --------
    >>> hc.is_backend_available("mpi"), hc.is_backend_available("pigeons")
    (True, False)
    """
    name = name.strip().lower()
    if name not in known_backends():
        return False
    try:
        _registry[name].load()
    except Exception:  # whatever keeps it from loading: a missing package, a missing library
        return False
    return True


def create_backend(name: str, options: BackendOptions) -> Backend | ProcessGroup:
    """Make the instance of backend `name` that serves one device of one group."""
    row = _registry[name]
    try:
        creator = row.load()
    except (ImportError, AttributeError) as error:
        raise DistBackendError(
            f"the {name!r} backend, which serves {options.device} arrays, can't be loaded: {error}{here()}"
        ) from error
    if row.extended_api:
        made = creator(options, None)
    else:
        made = creator(options.store, options.rank, options.size, options.timeout)
    if isinstance(made, Backend):
        if type(made).name == Backend.name:
            made.name = name
        return made
    from .group import ProcessGroup

    if isinstance(made, ProcessGroup):
        return made
    raise TypeError(f"the creator of backend {name!r} returned {made!r}; expected a Backend or a ProcessGroup{here()}")


class BackendConfig:
    """Which backend serves which device, parsed from what the program wrote.

    Parameters
    ----------
    backend : str, optional
        ``"cpu:mpi,cuda:nccl"`` names a backend for each device; ``"mpi"`` maps the devices that this backend serves.
        Case and white space do not matter. Default: every known device is mapped.

    Attributes
    ----------
    device_map : dict
        The name of the backend of each device.

    Raises
    ------
    ValueError
        `backend` is malformed, or a name is unknown; the message shows the bad part and lists the known names.
    TypeError
        `backend` is not a string.

    Examples
    --------
    >>> config = hc.BackendConfig(" CPU:mpi, cuda:NCCL")
    >>> str(config)
    'cpu:mpi,cuda:nccl'
    >>> config.device_map
    {'cpu': 'mpi', 'cuda': 'nccl'}
    """

    def __init__(self, backend: str | None = None) -> None:
        if backend is None:
            self.device_map = dict(DEFAULT_DEVICE_MAP)
            for name in known_backends():
                for device in _registry[name].devices:
                    if device not in BUILT_IN_DEVICES:
                        self.device_map.setdefault(device, name)
        elif isinstance(backend, str):
            self.device_map = self._parse(backend)
        else:
            raise TypeError(f"backend is {backend!r}; expected a string such as 'cpu:mpi,cuda:nccl', or None{here()}")

    @classmethod
    def _parse(cls, text: str) -> dict[str, str]:
        if ":" not in text and "," not in text:
            name = text.strip().lower()
            cls._known("backend", name, known_backends(), text)
            return dict.fromkeys(_registry[name].devices, name)
        device_map: dict[str, str] = {}
        for part in text.split(","):
            device, colon, name = (piece.strip().lower() for piece in part.partition(":"))
            if not colon or not device or not name or ":" in name:
                raise ValueError(
                    f"backend {text!r}: {part!r} is not 'device:backend'; "
                    f"the devices are {', '.join(known_devices())}, the backends {', '.join(known_backends())}{here()}"
                )
            cls._known("device", device, known_devices(), text)
            cls._known("backend", name, known_backends(), text)
            if device in device_map:
                raise ValueError(f"backend {text!r}: {part!r} maps {device!r} a second time{here()}")
            device_map[device] = name
        return device_map

    @staticmethod
    def _known(what: str, name: str, names: Sequence[str], text: str) -> None:
        if name not in names:
            raise ValueError(
                f"backend {text!r}: no {what} is called {name!r}; the {what}s are {', '.join(names)}{here()}"
            )

    def __str__(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self.device_map.items())

    def __repr__(self) -> str:
        return f"BackendConfig({str(self)!r})"
