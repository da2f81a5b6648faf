"""The fields of a group, also passed to the creators of its backends; the checks of its timeouts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from ..errors import on_rank
from ..process.settings import ON_TIMEOUT, Settings, folder_at_start
from ..process.tuning import Tuning
from .registry import BackendConfig
from .timeouts import as_seconds

if TYPE_CHECKING:
    from mpi4py import MPI

DEFAULT_TIMEOUT = timedelta(minutes=30)
LONGEST_TIMEOUT = timedelta.max.total_seconds() / 2


class Membership:
    """The members of a group on one rank: the fields that :class:`ProcessGroup` describes, and some more.

    If the group was made on a communicator, `processes` has the process id of each rank (of MPI.COMM_WORLD) on this
    node; otherwise it is empty.
    """

    rank: int
    size: int  # exactly an int, not a callable subclass: only then does NumPy keep the dtype of float32 / size
    ranks: tuple[int, ...] = ()
    comm: MPI.Intracomm | Any = None  # None: a group without MPI, connected by its backend
    nodes: tuple[int, ...] = ()
    processes: dict[int, int]
    config: BackendConfig
    settings: Settings  # the same on every rank
    timeout: timedelta = DEFAULT_TIMEOUT
    on_timeout: str = "abort"
    name: str = ""
    description: str = ""
    device_id: int | Literal["auto"] | None = None  # this rank's GPU, as passed to init_process_group
    largest_tag: int = 10235  # the least that MPI guarantees (MPI-4.1 §9.1.2), without the tags of job/tags.py
    place: Any = None  # of the group's store

    def __init__(self, rank: int, size: int, **fields: Any) -> None:
        if not fields.keys() <= FIELDS.keys():
            name = min(fields.keys() - FIELDS.keys())
            raise TypeError(f"{type(self).__name__} has no {name!r}; there are {', '.join(FIELDS)}")
        self.rank, self.size = rank, size
        for name, value in fields.items():  # not vars(self).update: an instance with a dict has slower methods
            setattr(self, name, value)
        self.ranks = tuple(self.ranks or range(size))
        self.nodes = tuple(self.nodes or [0] * size)
        self.processes = fields.get("processes", {})
        self.config = fields["config"] if "config" in fields else BackendConfig()
        self.settings = fields["settings"] if "settings" in fields else Settings(debug_dir=folder_at_start({}))

    @property
    def group_name(self) -> str:
        """The name of the group, by its c10d name."""
        return self.name

    @property
    def group_desc(self) -> str:
        """The description of the group, by its c10d name."""
        return self.description

    @property
    def tuning(self) -> Tuning:
        """The message sizes that select the algorithms of operations."""
        return self.settings.tuning

    @tuning.setter
    def tuning(self, table: Tuning) -> None:
        self.settings = self.settings._replace(tuning=table)

    @property
    def local_ranks(self) -> list[int]:
        """The ranks (in the group) of the members on this node."""
        return [rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.rank]]

    @property
    def local_rank(self) -> int:
        """This process's rank among the members on this node."""
        return self.local_ranks.index(self.rank)


FIELDS = Membership.__annotations__  # by name


class BackendOptions(Membership):
    """The argument of a backend's creator (``register_backend(..., extended_api=True)``): its group and its device.

    It has the attributes of a :class:`ProcessGroup`, and:

    Attributes
    ----------
    device : str
        The device whose arrays the backend will serve.
    store : Store or None
        The group's store, for example to exchange addresses.

    Examples
    --------
    >>> options = hc.BackendOptions(rank=0, size=1, device="cpu")
    >>> options.device, options.ranks, options.local_rank
    ('cpu', (0,), 0)
    """

    def __init__(self, rank: int, size: int, *, device: str = "cpu", store: Any = None, **fields: Any) -> None:
        super().__init__(rank, size, **fields)
        self.device = device
        self.store = store

    def _replace(self, **changes: Any) -> BackendOptions:
        """Return a copy with some fields changed."""
        return BackendOptions(**{**fields_of(self), "device": self.device, "store": self.store, **changes})


def fields_of(membership: Membership) -> dict[str, Any]:
    """Return the fields of a group, to make another Membership."""
    return {name: getattr(membership, name) for name in FIELDS}


def time_limit(
    timeout: timedelta | float | None = None, on_timeout: str | None = None
) -> Callable[[Membership | Settings], dict[str, Any]]:
    """Check both arguments; return a function that returns the fields `timeout` and `on_timeout` of a new group.

    The function's argument provides the defaults: the group that the new one is made from, or the settings.
    """
    given: dict[str, Any] = {}
    if timeout is not None:
        seconds = as_seconds(timeout)
        if not seconds > 0:
            raise ValueError(f"timeout is {timeout}; expected a positive timedelta or number of seconds{on_rank()}")
        given["timeout"] = timedelta(seconds=min(seconds, LONGEST_TIMEOUT))
    if on_timeout is not None:
        if on_timeout not in ON_TIMEOUT:
            raise ValueError(f"on_timeout is {on_timeout!r}; expected 'abort', 'raise' or 'warn'{on_rank()}")
        given["on_timeout"] = on_timeout

    def fields(parent: Membership | Settings) -> dict[str, Any]:
        timeout = parent.timeout
        if not isinstance(timeout, timedelta):
            timeout = DEFAULT_TIMEOUT if timeout is None else timedelta(seconds=min(timeout, LONGEST_TIMEOUT))
        return {"timeout": timeout, "on_timeout": parent.on_timeout, **given}

    return fields
