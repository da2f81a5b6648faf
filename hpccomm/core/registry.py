"""The registry of backends by name; BackendConfig: the backend of each device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from ..errors import on_rank
from .arrays import BUILT_IN_DEVICES, known_devices
from .c10d_names import c10d_names
from .late import GLOO, GLOO_NEEDS, MPI, NCCL, NCCL_NEEDS, late

DEFAULT_DEVICE_MAP = {"cpu": "mpi", "cuda": "nccl"}


class Made(Protocol):
    """The result of a creator: a `Backend`."""

    rank: int
    size: int

    def close(self) -> None: ...  # noqa: D102


Creator = Callable[..., Made]


class Registered(NamedTuple):
    """One row of the registry."""

    creator: Creator | str  # a function, or a "module:name", imported on demand
    devices: tuple[str, ...]
    extended_api: bool
    needs: str | None = None  # a "module:function" that raises ImportError if a package is missing
    uses_store: bool = True  # whether to open the group's store for it
    connects: bool = False  # whether its creation connects all ranks, so it must be made with its group

    def load(self) -> Creator:
        """Import and return the creator; ImportError names the missing package."""
        if self.needs is not None:
            late(self.needs)()
        return late(self.creator) if isinstance(self.creator, str) else self.creator


REGISTRY: dict[str, Registered] = {
    "mpi": Registered(MPI, ("cpu",), extended_api=True, uses_store=False),
    "nccl": Registered(NCCL, ("cuda",), extended_api=True, needs=NCCL_NEEDS, uses_store=False),
    "gloo": Registered(GLOO, ("cpu",), extended_api=True, needs=GLOO_NEEDS, connects=True),
}
BUILT_IN = frozenset(REGISTRY)

# Python objects always use the group's MPI communicator, regardless of the device map.
OBJECTS = "objects"


def register_backend(
    name: str, creator: Creator, *, devices: str | Sequence[str] | None = None, extended_api: bool = False
) -> None:
    """Add a backend for use in configurations: ``init_process_group("cpu:mpi,cuda:" + name)``.

    Parameters
    ----------
    name : str
        The name for configurations: letters, digits and "_".
    creator : callable
        Makes one instance for one group: ``creator(store, rank, size, timeout)``, or, with `extended_api`,
        ``creator(options, backend_options)``; `options` is a :class:`BackendOptions`, and `backend_options`
        is None for now. It returns a :class:`Backend`. `store` is the group's :class:`Store`.
    devices : str or list of str, optional
        The devices that it serves. Default: all known ones.
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
    An installed package announces its backends by entry points of the group ``hpccomm.backends``, without being
    imported; each is a creator with the extended API, imported when a group first needs it.

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
    REGISTRY[name] = Registered(creator, serves, extended_api)


def known_backends() -> tuple[str, ...]:
    """Return the names of all backends: built in, registered, and announced by installed packages."""
    for name, creator in _announced_backends():
        if name not in REGISTRY:
            REGISTRY[name] = Registered(creator, known_devices(), extended_api=True)
    return tuple(REGISTRY)


@functools.cache
def _announced_backends() -> list[tuple[str, str]]:
    from importlib.metadata import entry_points  # takes 20 ms

    return [(entry.name.lower(), entry.value) for entry in entry_points(group="hpccomm.backends")]


@c10d_names(backend="name")
def is_backend_available(name: str) -> bool:
    """Return True if there is a backend called `name` and its packages are installed here.

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
    if name not in REGISTRY and name not in known_backends():
        return False
    try:
        REGISTRY[name].load()
    except Exception:  # any reason: a missing package, a missing library
        return False
    return True


class BackendConfig:
    """The backend of each device of a group, parsed from the program's text.

    Parameters
    ----------
    backend : str, optional
        ``"cpu:mpi,cuda:nccl"`` names a backend for each device; ``"mpi"`` maps all devices that this backend serves.
        Case and white space do not matter. By default every known device is mapped.

    Attributes
    ----------
    device_map : dict
        The name of the backend of each device.

    Raises
    ------
    ValueError
        `backend` is malformed, or a name is unknown; the message shows the wrong part and lists the known names.
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
            own = known_devices()[len(BUILT_IN_DEVICES) :]
            for name in known_backends() if own else ():  # usually none: then don't search for packages
                for device in REGISTRY[name].devices:
                    if device in own:
                        self.device_map.setdefault(device, name)
        elif isinstance(backend, str):
            self.device_map = self._parse(backend)
        else:
            raise TypeError(
                f"backend is {backend!r}; expected a string such as 'cpu:mpi,cuda:nccl', or None{on_rank()}"
            )

    @classmethod
    def _parse(cls, text: str) -> dict[str, str]:
        if ":" not in text and "," not in text:
            name = text.strip().lower()
            cls._known("backend", name, REGISTRY if name in REGISTRY else known_backends(), text)
            return dict.fromkeys(REGISTRY[name].devices, name)
        device_map: dict[str, str] = {}
        for part in text.split(","):
            device, colon, name = (piece.strip().lower() for piece in part.partition(":"))
            if not colon or not device or not name or ":" in name:
                raise ValueError(
                    f"backend {text!r}: {part!r} is not 'device:backend'; "
                    f"the devices are {', '.join(known_devices())}, the backends "
                    f"{', '.join(known_backends())}{on_rank()}"
                )
            cls._known("device", device, known_devices(), text)
            cls._known("backend", name, REGISTRY if name in REGISTRY else known_backends(), text)
            if device in device_map:
                raise ValueError(f"backend {text!r}: {part!r} maps {device!r} a second time{on_rank()}")
            device_map[device] = name
        return device_map

    @staticmethod
    def _known(what: str, name: str, names: Iterable[str], text: str) -> None:
        if name not in names:
            raise ValueError(
                f"backend {text!r}: no {what} is called {name!r}; the {what}s are {', '.join(names)}{on_rank()}"
            )

    def __str__(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self.device_map.items())

    def __repr__(self) -> str:
        return f"BackendConfig({str(self)!r})"
