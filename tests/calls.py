"""The one list of calls: each collective with any dtype, shape, reduction, layout, root and group; NumPy's answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import hpccomm as hc

from .arrays import REDUCTIONS, reduced, values

F8 = np.dtype("f8")
Outcome = tuple[Any, Any]  # what came out, what NumPy says


@dataclass
class Good:
    """A call that is right on every rank of a group: the arguments before ``group=``, and what has to come out."""

    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)  # compared once the operation is done
    returns: Any = None  # of the blocking form


@dataclass
class On:
    """The group of a call, what its ranks contribute, and how that lies in memory."""

    group: hc.ProcessGroup
    dtype: Any = F8
    shape: tuple[int, ...] = (4,)
    op: str | None = None  # of REDUCTIONS; None is left out of the call, and is SUM
    layout: Callable[[Any], Any] = np.array
    root: int = 0  # its rank in the group
    root_by: str = "group_"  # or "": it is named by its rank in the world
    stacked: bool = False  # what is joined has an axis more
    uneven: bool = False  # lists have arrays of 0 to 2 times the shape
    several: list[tuple[Any, tuple[int, ...]]] = field(
        default_factory=lambda: [(F8, (3,)), (F8, (2,))]
    )  # the dtypes and shapes of a coalesced operation
    salt: int = 0

    def __post_init__(self) -> None:
        self.me, self.n = self.group.rank, self.group.size
        self.ops = {"op": REDUCTIONS[self.op][0]} if self.op else {}

    def part(self, number: int, shape: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Return the shape of an array in a list."""
        shape = self.shape if shape is None else shape
        return ((1 - number) % 3, *shape) if self.uneven else shape

    def of(self, rank: int, shape: tuple[int, ...], salt: int = 0, dtype: Any = None) -> Any:
        """Return what a rank contributes."""
        return np.asarray(values(dtype or self.dtype, shape, self.group.ranks[rank], self.salt + salt))

    def given(self, salt: int = 0) -> list[Any]:
        """Return what each rank contributes, in an array of the call's shape."""
        return [self.of(rank, self.shape, salt) for rank in range(self.n)]

    def empty(self, like: Any) -> Any:
        """Return an array for an output."""
        return self.layout(np.zeros_like(like))

    def rooted(self, name: str) -> dict[str, int]:
        """Return the option that names the root."""
        return {self.root_by + name: self.root if self.root_by else self.group.ranks[self.root]}

    def join(self, parts: list[Any]) -> Any:
        stacked = parts[0].ndim == 0 or (self.stacked and not self.uneven)
        return np.stack(parts) if stacked else np.concatenate(parts)

    def reduced(self, given: list[Any]) -> Any:
        return reduced(self.op or "SUM", given)


CALLS: dict[str, Callable[[On], Good]] = {}


def call_of(make: Callable[[On], Good]) -> Callable[[On], Good]:
    CALLS[make.__name__] = make
    return make


@call_of
def broadcast(on: On) -> Good:
    given = on.given()
    x = on.layout(given[on.me])
    return Good((x,), on.rooted("src"), [(x, given[on.root])])


@call_of
def all_reduce(on: On) -> Good:
    given = on.given()
    x = on.layout(given[on.me])
    return Good((x,), on.ops, [(x, on.reduced(given))])


@call_of
def reduce(on: On) -> Good:
    given = on.given()
    x = on.layout(given[on.me])
    return Good((x,), on.ops | on.rooted("dst"), [(x, on.reduced(given) if on.me == on.root else given[on.me])])


@call_of
def scan(on: On) -> Good:
    given = on.given()
    x = on.layout(given[on.me])
    return Good((x,), on.ops, [(x, on.reduced(given[: on.me + 1]))])


@call_of
def exscan(on: On) -> Good:
    given = on.given()
    x = on.layout(given[on.me])
    return Good((x,), on.ops, [(x, on.reduced(given[: on.me]) if on.me else given[0])])


@call_of
def all_gather(on: On) -> Good:
    given = [on.of(rank, on.part(rank)) for rank in range(on.n)]
    outputs = [on.empty(each) for each in given]
    return Good((outputs, on.layout(given[on.me])), {}, list(zip(outputs, given)))


@call_of
def all_gather_single(on: On) -> Good:
    given = on.given()
    output = on.empty(on.join(given))
    return Good((output, on.layout(given[on.me])), {}, [(output, on.join(given))])


@call_of
def gather(on: On) -> Good:
    given = [on.of(rank, on.part(rank)) for rank in range(on.n)]
    outputs = [on.empty(each) for each in given] if on.me == on.root else None
    return Good((on.layout(given[on.me]), outputs), on.rooted("dst"), list(zip(outputs or [], given)))


@call_of
def scatter(on: On) -> Good:
    given = [on.of(on.root, on.part(rank), rank) for rank in range(on.n)]
    output = on.empty(given[on.me])
    inputs = [on.layout(each) for each in given] if on.me == on.root else None
    return Good((output, inputs), on.rooted("src"), [(output, given[on.me])])


@call_of
def reduce_scatter(on: On) -> Good:
    given = [[on.of(rank, on.part(part), part) for rank in range(on.n)] for part in range(on.n)]
    output = on.empty(given[on.me][0])
    return Good((output, [on.layout(part[on.me]) for part in given]), on.ops, [(output, on.reduced(given[on.me]))])


@call_of
def reduce_scatter_single(on: On) -> Good:
    given = [on.given(salt=part) for part in range(on.n)]
    output = on.empty(given[0][0])
    array = on.layout(on.join([part[on.me] for part in given]))
    return Good((output, array), on.ops, [(output, on.reduced(given[on.me]))])


@call_of
def all_to_all(on: On) -> Good:
    received = [on.of(sender, on.part(sender + 2 * on.me), on.me) for sender in range(on.n)]
    outputs = [on.empty(each) for each in received]
    inputs = [on.layout(on.of(on.me, on.part(on.me + 2 * receiver), receiver)) for receiver in range(on.n)]
    return Good((outputs, inputs), {}, list(zip(outputs, received)))


@call_of
def all_to_all_single(on: On) -> Good:
    received = [on.of(sender, on.part(sender + 2 * on.me), on.me) for sender in range(on.n)]
    sent = [on.of(on.me, on.part(on.me + 2 * receiver), receiver) for receiver in range(on.n)]
    output = on.empty(on.join(received))
    sizes = [[len(each) for each in parts] for parts in (received, sent)] if on.uneven else []
    return Good((output, on.layout(on.join(sent)), *sizes), {}, [(output, on.join(received))])


def _each(on: On, of: Callable[[int, Any, tuple[int, ...]], Any]) -> list[Any]:
    return [of(i, dtype, shape) for i, (dtype, shape) in enumerate(on.several)]


@call_of
def all_reduce_coalesced(on: On) -> Good:
    given = _each(on, lambda i, dtype, shape: [on.of(rank, shape, i, dtype) for rank in range(on.n)])
    arrays = [on.layout(each[on.me]) for each in given]
    return Good((arrays,), on.ops, list(zip(arrays, map(on.reduced, given))))


@call_of
def broadcast_coalesced(on: On) -> Good:
    arrays = _each(on, lambda i, dtype, shape: on.layout(on.of(on.me, shape, i, dtype)))
    expected = _each(on, lambda i, dtype, shape: on.of(on.root, shape, i, dtype))
    return Good((arrays,), on.rooted("src"), list(zip(arrays, expected)))


@call_of
def all_gather_coalesced(on: On) -> Good:
    given = [_each(on, lambda i, dtype, shape: on.of(r, on.part(i + r, shape), i, dtype)) for r in range(on.n)]  # noqa: B023
    outputs = [[on.empty(each) for each in row] for row in given]
    outcomes = [pair for row in zip(outputs, given) for pair in zip(*row)]
    return Good((outputs, [on.layout(each) for each in given[on.me]]), {}, outcomes)


@call_of
def all_gather_single_coalesced(on: On) -> Good:
    given = _each(on, lambda i, dtype, shape: [on.of(rank, shape, i, dtype) for rank in range(on.n)])
    outputs = [on.empty(on.join(each)) for each in given]
    inputs = [on.layout(each[on.me]) for each in given]
    return Good((outputs, inputs), {}, list(zip(outputs, map(on.join, given))))


@call_of
def reduce_scatter_single_coalesced(on: On) -> Good:
    def parts(rank: int) -> list[list[Any]]:
        return _each(on, lambda i, dtype, shape: [on.of(rank, shape, i + 9 * part, dtype) for part in range(on.n)])

    outputs = _each(on, lambda i, dtype, shape: on.empty(np.zeros(shape, dtype)))
    everybodys = [[each[on.me] for each in parts(rank)] for rank in range(on.n)]
    expected = [on.reduced(list(each)) for each in zip(*everybodys)]
    return Good((outputs, [on.layout(on.join(each)) for each in parts(on.me)]), on.ops, list(zip(outputs, expected)))


def perform(name: str, on: On, async_op: bool) -> list[Outcome]:
    """Make the call; return what came out, and the inputs, which are to be as they were.

    On a GPU it has come out for what follows on the current stream.
    """
    arrays, layout = [], on.layout

    def remember(given: Any) -> Any:
        arrays.append((layout(given), given))
        return arrays[-1][0]

    on.layout = remember
    made = CALLS[name](on)
    on.layout = layout
    work = getattr(hc, name)(*made.arguments, group=on.group, async_op=async_op, **made.options)
    if async_op:
        assert isinstance(work, hc.Work)
        assert work.wait() is True
        assert work.is_success() or work.waits_on_stream
    else:
        assert work is None
    return made.outcomes + [each for each in arrays if not any(each[0] is output for output, _ in made.outcomes)]
