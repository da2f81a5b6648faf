"""The backends of a group: each is made for the first array of its device, and all are refused after its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

from ..errors import DistBackendError, DistError, UnsupportedOperationError, here
from . import registry
from .backend import Backend
from .late import OBJECT_TRANSPORT, late
from .members import Members
from .options import BackendOptions, fields_of
from .registry import OBJECTS

if TYPE_CHECKING:
    from .door import Door
    from .group import ProcessGroup


class LazyBackends(dict[str, Backend]):
    """The backends by device; each is made for the first array of its device."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def __missing__(self, device: str) -> Backend:
        backend = make_backend(self._door.group, device)
        self.put(device, backend)
        return backend

    def put(self, device: str, backend: Backend) -> None:
        """Add the backend of a device, and its fast path."""
        self[device] = backend
        if device == "cpu":
            self._door.take_fast_path(backend.fast_path)
        else:
            self._door.take_gpu_fast_path(backend.gpu_fast_path)


class Destroyed(dict[str, Backend]):
    """The backends of a destroyed group."""

    def __init__(self, group: ProcessGroup, refusal: str = "has been destroyed; make another one") -> None:
        self.refusal = f"the process group {group.name!r} {refusal}{here()}"

    def __missing__(self, device: str) -> Backend:
        raise DistError(self.refusal)


class NotOverridden(Backend):
    """The backend of a ProcessGroup class of the program's own: it refuses every operation not overridden there."""

    def __init__(self, group: ProcessGroup, name: str) -> None:
        super().__init__(group.rank, group.size)
        self.name = name
        self._group = group

    @property
    def implementation(self) -> str:
        return type(self._group).__name__

    def _each(self, operation: str, *_: Any) -> NoReturn:
        raise self._lacks(operation)

    def persistent(self, operation: str, *_: Any) -> NoReturn:
        raise self._lacks(f"{operation}_init")


def make_backend(group: ProcessGroup, device: str) -> Backend:
    """Make the backend of a device in a group."""
    if device == OBJECTS:
        return cast("Backend", late(OBJECT_TRANSPORT)(options_for(group, device)))
    name = group.config.device_map.get(device)
    if name is None:
        raise DistError(
            f"{group!r} has no backend for {device} arrays; start with "
            f"init_process_group('{group.config},{device}:...') or backend=None{here()}"
        )
    backend = created(name, options_for(group, device))
    if not isinstance(backend, Backend):
        raise UnsupportedOperationError(
            f"backend {name!r} makes whole process groups, which can't serve {device} arrays beside "
            f"other backends; use it alone: init_process_group({name!r}){here()}"
        )
    return backend


def options_for(group: ProcessGroup, device: str) -> BackendOptions:
    """Return the options for the creator of the backend of a device in a group."""
    row = registry.REGISTRY[group.config.device_map.get(device, "mpi")]
    store = group.store if row.uses_store and group.place is not None else None
    return BackendOptions(**fields_of(group), device=device, store=store)


def created(name: str, options: BackendOptions) -> Backend | Members:
    """Return a new backend, or the whole group that its creator made."""
    row = registry.REGISTRY[name]
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
    if not isinstance(made, (Backend, Members)):
        raise TypeError(
            f"the creator of backend {name!r} returned {made!r}; expected a Backend or a ProcessGroup{here()}"
        )
    if isinstance(made, Backend) and type(made).name == Backend.name:
        made.name = name
    return made
