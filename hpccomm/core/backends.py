"""The backends of a group: each is made for the first array of its device; a destroyed group refuses all."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ..errors import DistBackendError, DistError, on_rank
from . import registry
from .backend import Backend
from .late import OBJECT_TRANSPORT, late
from .options import BackendOptions, fields_of
from .registry import OBJECTS

if TYPE_CHECKING:
    from .dispatcher import Dispatcher
    from .group import ProcessGroup


class LazyBackends(dict[str, Backend]):
    """The backends by device, made on demand."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def __missing__(self, device: str) -> Backend:
        backend = make_backend(self._dispatcher.group, device)
        self.put(device, backend)
        return backend

    def put(self, device: str, backend: Backend) -> None:
        """Add the backend of a device and its fast path."""
        self[device] = backend
        if device == "cpu":
            self._dispatcher.take_fast_path(backend.fast_path)
        else:
            self._dispatcher.take_gpu_fast_path(backend.gpu_fast_path)


class Destroyed(dict[str, Backend]):
    """The backends of a destroyed group."""

    def __init__(self, group: ProcessGroup, refusal: str) -> None:
        self._name, self._refusal = group.name, refusal

    @property
    def refusal(self) -> str:
        """The text of the error that every operation raises."""
        return f"the process group {self._name!r} {self._refusal}{on_rank()}"

    def __missing__(self, device: str) -> Backend:
        raise DistError(self.refusal)


def make_backend(group: ProcessGroup, device: str) -> Backend:
    """Make the backend of a device in a group."""
    if device == OBJECTS:
        return cast("Backend", late(OBJECT_TRANSPORT)(options_for(group, device)))
    name = group.config.device_map.get(device)
    if name is None:
        backends = sorted([f"{device}:{registry.DEFAULT_DEVICE_MAP.get(device, '...')}", *str(group.config).split(",")])
        raise DistError(
            f"{group!r} has no backend for {device} arrays; start with "
            f"init_process_group({','.join(backends)!r}) or backend=None{on_rank()}"
        )
    return created(name, options_for(group, device))


def options_for(group: ProcessGroup, device: str) -> BackendOptions:
    """Return the options for the creator of a device's backend in a group."""
    row = registry.REGISTRY[group.config.device_map.get(device, "mpi")]
    store = group.store if row.uses_store and group.place is not None else None
    return BackendOptions(**fields_of(group), device=device, store=store)


def created(name: str, options: BackendOptions) -> Backend:
    """Return a new backend."""
    row = registry.REGISTRY[name]
    try:
        creator = row.load()
    except (ImportError, AttributeError) as error:
        raise DistBackendError(
            f"the {name!r} backend, which serves {options.device} arrays, can't be loaded: {error}{on_rank()}"
        ) from error
    if row.extended_api:
        backend = creator(options, None)
    else:
        backend = creator(options.store, options.rank, options.size, options.timeout)
    if not isinstance(backend, Backend):
        raise TypeError(f"the creator of backend {name!r} returned {backend!r}; expected a Backend{on_rank()}")
    if type(backend).name == Backend.name:
        backend.name = name
    return backend
