"""Record: an operation in reports and recordings, made of text and numbers only."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..core.arrays import count_of
from ..core.hooks import Operation
from ..core.members import shortened
from ..core.operation_list import TASK
from .groups_seen import key_of
from .mpi_calls import spec_of
from .sizes import sizes_by_rank
from .words import ranks_by_value, size_in_words

if TYPE_CHECKING:
    from ..core.group import ProcessGroup

_text = lru_cache(maxsize=64)(str)  # NumPy takes 4 us to format "float64"
# Seconds since the epoch minus perf_counter(); the largest of five, as the process may pause between the two readings.
EPOCH = max(time.time() - time.perf_counter() for _ in range(5))


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
        The dtype of its first array; ``""`` without one.
    count : int
        The elements of all its arrays; in a sparse exchange, those that it sends. -1 if only the name and the dtype
        are known.
    nbytes : int
        The bytes of these elements.
    op : str
        The name of the reduction.
    peer : int or None
        The root, destination or source: a rank of the group.
    tag : int or None
        The tag of a message.
    async_op : bool
    begin : float
        Seconds since the epoch.
    end : float
        Seconds since the epoch; 0 while it is in flight.
    state : str
        ``"in flight"``, ``"completed"`` or ``"failed"``.
    where : str
        The program's line that called it, ``"train.py:91"``; ``""`` if it is not known.
    details : str
        Further facts that ranks must agree on: ``"ranks 0, 2"`` of a new group. Of a task: its call, ``"load(3)"``.
    sizes : list of two lists of int, or None
        The elements sent to each rank of the group, and expected from each, if these are arguments; for more than
        64 ranks, sums that can be compared.
    called : str
        The program's call, if the operation is only a step of it: ``"redistribute"``, in which ranks first gather
        their boxes.

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
    details: str = ""
    sizes: list[list[int]] | None = None
    called: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as in a file."""
        return asdict(self)

    @property
    def is_a_message(self) -> bool:
        """True for an operation between two ranks, including a task from rank 0."""
        spec = spec_of(self.name)
        return spec is not None and spec.is_a_message

    @property
    def is_awaited(self) -> bool:
        """True for rank 0's record of a task that it waits for; only the worker's record has a number."""
        return self.name == TASK.name and self.number == 0

    def in_detail(self) -> str:
        """Return ``reduce (1048576 float32, SUM, root 0)``: the facts that ranks must agree on."""
        size = str(self.count) if self.count >= 0 else size_in_words(self.nbytes)
        details = [f"{size} {self.dtype}"] if self.dtype else []
        details += [self.op] if self.op else []
        details += [f"root {self.peer}"] if self.peer is not None else []
        details += [self.details] if self.details else []
        details += ["asynchronous"] if self.async_op else []
        name = self.called or self.name
        return f"{name} ({', '.join(details)})" if details else name

    def __str__(self) -> str:
        """Return ``all_reduce #41 of 'dp' (4 MiB float32)``, ``task #3 of 'world' (load(3))``."""
        sizes = f" ({size_in_words(self.nbytes)} {self.dtype})" if self.dtype else ""
        if self.name == TASK.name:
            sizes = f" ({self.details})"
        number = f" #{self.number}" if self.number and spec_of(self.name) is not None else ""
        return f"{self.called or self.name}{number} of {self.group_name!r}{sizes}"


def describe(group: ProcessGroup, name: str, number: int, arguments: Mapping[str, Any], **fields: Any) -> Record:
    """Return the record of an operation, or of another call, with these arguments."""
    operation = Operation(group, name, number, "", fields.pop("async_op", False), dict(arguments))
    return record_of_operation(operation, sizes=sizes_by_rank(operation), **fields)


def record_of_operation(operation: Operation, **fields: Any) -> Record:
    """Return the record of an Operation, which hooks see."""
    arrays, peer = operation.arrays, operation.peer
    counts = list(map(count_of, arrays))
    op: Any = operation.op
    return Record(
        operation.name,
        operation.sequence_number,
        key_of(operation.group),
        operation.group.name,
        dtype=_text(arrays[0].dtype) if arrays else "",
        count=sum(counts),
        nbytes=sum(count * array.dtype.itemsize for count, array in zip(counts, arrays)),
        op="" if op is None else str(getattr(op, "name", op)).upper(),
        peer=peer if isinstance(peer, int) else None,
        tag=operation.arguments.get("tag"),
        async_op=operation.async_op,
        details=details_of(operation),
        **fields,
    )


def details_of(operation: Operation) -> str:
    """Return the `details` of an operation's record."""
    arguments = operation.arguments
    if operation.name == TASK.name:
        return str(arguments["call"])
    of_some = arguments.get("use_local_synchronization") or arguments.get("comm") is not None
    if of_some or "ranks" not in arguments:  # not a new group that all ranks make
        return ""
    ranks = operation.group.ranks if arguments["ranks"] is None else list(arguments["ranks"])
    members = sorted(ranks) if arguments.get("sort_ranks") else ranks
    return shortened(f"ranks {', '.join(map(str, members))}")  # like the text of `new_group`


def key_of_operation(record: Record) -> tuple[str, int, str]:
    """Return group, number and name, which are the same on all ranks of an operation."""
    return record.group, record.number, record.name


def arrays_in(value: Any) -> list[Any]:
    """Return the arrays in an argument, including those in lists."""
    if isinstance(value, list | tuple):
        return [array for each in value for array in arrays_in(each)]
    return [value] if hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "argmax") else []


def sides(records: Mapping[int, Record]) -> list[list[int]]:
    """Return the sets of ranks that agree on one collective, the smallest first.

    Only facts that all records have are compared: a Work in flight has neither its reduction nor its root. Blocking and
    asynchronous calls match on GPUs, but not in MPI: they count as different only if nothing else differs and some have
    not completed.
    """
    each = records.values()
    has_all = all(record.count >= 0 for record in each)
    same_form = has_all and len({record.async_op for record in each}) == 1
    knows = has_all and all(record.op or record.peer is not None or not record.async_op for record in each)
    knows_roots = knows or all(record.peer is not None for record in each)
    has_dtypes = has_all or all(record.dtype for record in each)

    def signature(record: Record) -> tuple[object, ...]:
        spec = spec_of(record.name)
        count = record.count if same_form and spec is not None and spec.has_equal_counts else None
        root = record.peer if knows_roots and spec is not None and "root" in spec.arguments else None
        dtype = record.dtype if has_dtypes and not (spec is not None and spec.is_unlike) else ""
        return record.name, dtype, count, record.op if knows else "", root, record.details

    found = ranks_by_value((rank, signature(record)) for rank, record in records.items())
    if len(found) == 1 and has_all and any(record.state != "completed" for record in each):
        found = ranks_by_value((rank, (record.async_op,)) for rank, record in records.items())
    return sorted(found.values(), key=len)


def minority(sides: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks of all sides but the largest, which comes last; all ranks if the sides are equally large."""
    few = [side for side in sides if len(side) < len(sides[-1])] or sides
    return sorted(rank for side in few for rank in side)
