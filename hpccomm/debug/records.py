"""Record: one operation as reports and recordings tell it; everything in it is text or numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..core.arrays import count_of
from ..core.hooks import Operation
from ..core.operation_list import MESSAGES, OPERATIONS, START
from .words import size_in_words

if TYPE_CHECKING:
    from ..core.group import ProcessGroup

# What has to be the same on every rank; of other operations each rank may have arrays of its own sizes.
SAME_SIZES = {
    "broadcast",
    "all_reduce",
    "reduce",
    "scan",
    "exscan",
    "all_gather_single",
    "reduce_scatter_single",
    "all_reduce_coalesced",
    "broadcast_coalesced",
}


@dataclass(slots=True)
class Record:
    """One operation of one rank.

    Attributes
    ----------
    name : str
        ``"all_reduce"``.
    number : int
        Its number among the collectives, or the messages, of its group.
    group : str
        The key of its group, which is the same on every rank (`key_of`).
    group_name : str
    dtype : str
        Of its first array; ``""`` without one.
    count : int
        Elements of all of its arrays.
    nbytes : int
        Their bytes.
    op : str
        The reduction.
    peer : int or None
        The root, destination or source: a rank of the group.
    tag : int or None
        Of a message.
    async_op : bool
    begin : float
        Seconds since the epoch.
    end : float
        Likewise; 0 while it is in flight.
    state : str
        ``"in flight"``, ``"completed"`` or ``"failed"``.
    where : str
        The line of the program that called it, ``"train.py:91"``; ``""`` where that is not known.

    Examples
    --------
    >>> import hpccomm.debug
    >>> with hpccomm.debug.record():
    ...     hc.all_reduce(np.ones(1 << 17), "max")
    >>> (record,) = hpccomm.debug.recorded()
    >>> print(record)
    all_reduce #1 of 'world' (1 MiB float64)
    >>> record.op, record.count, record.state, record.end > record.begin
    ('MAX', 131072, 'completed', True)
    """

    name: str
    number: int
    group: str
    group_name: str
    dtype: str = ""
    count: int = 0
    nbytes: int = 0
    op: str = ""
    peer: int | None = None
    tag: int | None = None
    async_op: bool = False
    begin: float = 0.0
    end: float = 0.0
    state: str = "in flight"
    where: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return what goes into a file."""
        return asdict(self)

    @property
    def is_a_message(self) -> bool:
        """Whether it is between two ranks."""
        return self.name in MESSAGES

    def in_detail(self) -> str:
        """Return ``reduce (1048576 float32, SUM, root 0)``: what ranks have to agree on."""
        details = [f"{self.count} {self.dtype}"] if self.dtype else []
        details += [self.op] if self.op else []
        details += [f"root {self.peer}"] if self.peer is not None else []
        details += ["asynchronous"] if self.async_op else []
        return f"{self.name} ({', '.join(details)})" if details else self.name

    def __str__(self) -> str:
        """Return ``all_reduce #41 of 'dp' (4 MiB float32)``."""
        sizes = f" ({size_in_words(self.nbytes)} {self.dtype})" if self.dtype else ""
        number = f" #{self.number}" if self.name.removesuffix(START) in OPERATIONS else ""
        return f"{self.name}{number} of {self.group_name!r}{sizes}"


def describe(group: ProcessGroup, name: str, number: int, arguments: Mapping[str, Any], **fields: Any) -> Record:
    """Return the record of an operation with these arguments."""
    operation = Operation(group, name, number, "", False, dict(arguments))
    arrays = operation.arrays
    op, peer = operation.op, operation.peer
    return Record(
        name,
        number,
        key_of(group),
        group.name,
        dtype=str(arrays[0].dtype) if arrays else "",
        count=sum(map(count_of, arrays)),
        nbytes=operation.nbytes,
        op="" if op is None else str(getattr(op, "name", op)),
        peer=peer if isinstance(peer, int) else None,
        tag=arguments.get("tag"),
        **fields,
    )


def key_of(group: ProcessGroup) -> str:
    """Return what names a group on every rank alike: its members, and which one of these members it is."""
    return group.__dict__.get("_debug_key") or f"{group.name}:{'-'.join(map(str, group.ranks[:8]))}"
