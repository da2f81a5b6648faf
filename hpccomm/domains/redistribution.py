"""Redistribution: change the layout of a global array of which each rank has a box.

The ranks exchange their boxes. Then each rank computes the parts to receive and their sources: if several ranks have a
cell, it comes from the lowest of them. The same computation for its receivers gives the parts to send.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ..api.world import member
from ..core import checks
from ..core.annotations import Array, Integer, Slices
from ..core.backend import Pieces
from ..core.calls import Call
from ..core.persistent_work import PersistentWork
from ..core.work import Work
from ..errors import on_rank
from .cache import cached

if TYPE_CHECKING:
    from ..core.non_member import Group
    from ..core.operations import Operations

Box: TypeAlias = tuple[tuple[int, int], ...]  # start and stop along each axis
Parts: TypeAlias = list[tuple[int, tuple[Any, ...]]]  # the other rank, and an index into the array


def redistribute(
    output: Array,
    input: Array,
    output_box: Slices,
    input_box: Slices,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Change the layout of a global array: each rank has one box of it, and receives another one.

    It changes slabs to pencils for Fourier transforms, transposes over all ranks, or changes blocks to blocks with
    ghosts. Every rank of the group calls it with the boxes of its own arrays.

    Parameters
    ----------
    output, input : array
        The array to fill and this rank's part of the global array, with the same dtype and any layouts. Their last axes
        are those of the boxes. Leading axes are the same on every rank, and are not split. They may share memory.
    output_box, input_box : tuple of slice
        Positions in the global array: a start and a stop for each axis; :func:`block_slice` helps. Outputs may
        overlap, and inputs too: if several ranks have a cell, it comes from the lowest of them. A box may be empty.
    group : ProcessGroup, optional
        Default: the world.
    async_op : bool
        True: return a Work at once. Don't touch either array until it is done.

    Returns
    -------
    Work or None
        A Work with ``async_op=True``; its result is `output`.

    Raises
    ------
    ValueError
        An array does not have the shape of its box, boxes have different numbers of axes, or no input has a cell of an
        output (the message names it); on every rank.
    TypeError
        A box is not made of slices, or output and input have different dtypes.

    Examples
    --------
    >>> n, me = hc.get_world_size(), hc.get_rank()
    >>> rows = np.arange(12.0).reshape(4, 3)[hc.block_slice(4, n, me)]  # a slab of the rows of a global array
    >>> columns = np.empty((4, 3))[:, hc.block_slice(3, n, me)]
    >>> hc.redistribute(columns, rows, (slice(0, 4), hc.block_slice(3, n, me)), (hc.block_slice(4, n, me), slice(0, 3)))
    >>> columns[:2]  # on one rank
    array([[0., 1., 2.],
           [3., 4., 5.]])
    """
    return member(group).redistribute(output, input, output_box, input_box, async_op)


def redistribute_init(
    output: Array, input: Array, output_box: Slices, input_box: Slices, group: Group | None = None
) -> PersistentWork:
    """Set up a :func:`redistribute`, to be started again and again; ranks compare their boxes only once.

    Arguments and errors are those of :func:`redistribute`, the result is that of :func:`all_reduce_init`.

    Returns
    -------
    PersistentWork

    Examples
    --------
    >>> mine, whole = np.array([hc.get_rank()]), np.empty(hc.get_world_size(), int)
    >>> me, n = hc.get_rank(), hc.get_world_size()
    >>> with hc.redistribute_init(whole, mine, slice(0, n), slice(me, me + 1)) as gathering:
    ...     gathering.start()
    ...     gathering.wait()
    True
    >>> whole  # on 3 ranks: array([0, 1, 2])
    array([0])
    """
    return member(group).redistribute_init(output, input, output_box, input_box)


def block_slice(n: Integer, parts: Integer, index: Integer) -> slice:
    """Return the slice of block `index` when `n` cells are divided into `parts` nearly equal blocks.

    Parameters
    ----------
    n : int
        Cells along an axis.
    parts : int
        Ranks along the axis.
    index : int
        This rank's number among them, from 0.

    Returns
    -------
    slice
        A slice with a start and a stop. Sizes of blocks differ by at most one cell.

    Raises
    ------
    ValueError
        `index` is not from 0 to `parts` - 1, or `n` is negative.

    Examples
    --------
    >>> [hc.block_slice(10, 3, index) for index in range(3)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 10, None)]
    """
    n, of, at = (
        checks.integer(f"block_slice: {what}", each) for what, each in zip(("n", "parts", "index"), (n, parts, index))
    )
    if n < 0 or not 0 <= at < of:
        raise ValueError(
            f"block_slice(n, parts, index): n is {n}, parts {of}, index {at}; expected 0 <= index < parts, and n >= 0"
            f"{on_rank()}"
        )
    return slice(n * at // of, n * (at + 1) // of)


class Last:
    """The last redistribution of a group: if every rank repeats it, the ranks compare only its number."""

    number = 0  # counts redistributions that differ from the one before
    sent: Any = None  # this rank's arguments, as sent to the other ranks
    parts: tuple[Parts, Parts] = ([], [])


class Redistribution(NamedTuple):
    """A redistribution whose arguments have been checked on this rank."""

    name: str
    group: Operations
    device: str
    output: Any
    input: Any
    boxes: tuple[Box, Box]  # of the output, of the input
    fault: str  # an error in the arguments, which all ranks will raise

    @property
    def call(self) -> Call:
        """The call for the dispatcher."""
        arguments = self.output, self.input, *self.boxes
        return Call((self.name.removesuffix("_init"), self.device, self.output, arguments))

    def begin(self, async_op: bool) -> Work | None:
        """Redistribute once; every rank of the group calls it."""
        sends, receives = self._agreed()
        dispatcher = self.group.dispatcher
        step = partial(dispatcher.backends[self.device].exchange, sends, receives, False, async_op)
        return dispatcher.run(self.call, async_op, step)

    def set_up(self) -> PersistentWork:
        """Set up a redistribution; every rank of the group calls it."""
        sends, receives = self._agreed()
        dispatcher = self.group.dispatcher
        step = partial(dispatcher.backends[self.device].persistent, "exchange", sends, receives, False)
        return dispatcher.set_up(self.call, step)

    def _agreed(self) -> tuple[Pieces, Pieces]:
        """Return the views to send and to receive into; raise on every rank if arguments do not fit."""
        batch = self.output.shape[: self.output.ndim - len(self.boxes[0])]
        mine = self.fault, self.boxes, self.device, str(self.output.dtype), batch
        last = cached(self.group, "last redistribution", self.name, Last)
        received = self._all_gathered(last.number if mine == last.sent else mine)
        if any(each != last.number for each in received):
            if any(type(each) is int for each in received):
                received = self._all_gathered(mine)
            last.number, last.sent, last.parts = last.number + 1, mine, self._compared(received)
        sends, receives = last.parts
        return [(to, self.input[where]) for to, where in sends], [(of, self.output[where]) for of, where in receives]

    def _all_gathered(self, mine: Any) -> list[Any]:
        received: list[Any] = [None] * self.group.size
        self.group.all_gather_object(received, mine)
        return received

    def _compared(self, received: list[Any]) -> tuple[Parts, Parts]:
        """Return the parts that this rank sends and receives, given the arguments of all ranks."""
        for rank, (fault, boxes, device, dtype, rows) in enumerate(received):
            if not fault and (len(boxes[0]), dtype, rows) != (len(received[0][1][0]), *received[0][3:]):
                fault = (
                    f"rank {rank} has boxes of {len(boxes[0])} axes, {dtype}, and leading axes {rows}; rank 0 others"
                )
            if not fault and device != received[0][2] and self.name == "redistribute_init":
                fault = f"rank 0 has arrays on {received[0][2]}, and rank {rank} on {device}; expected the same"
            if fault:
                raise ValueError(f"{self.name}: {fault}{on_rank()}")
        all_boxes = tuple(boxes for _, boxes, *_ in received)
        return cached(self.group, "redistribute", all_boxes, partial(self._parts, all_boxes))

    def _parts(self, boxes: tuple[tuple[Box, Box], ...]) -> tuple[Parts, Parts]:
        """Return the parts that this rank sends and receives; every rank has the same `boxes`."""
        layouts = Layouts(*zip(*boxes))
        missing: list[Any] = [None] * self.group.size
        self.group.all_gather_object(missing, layouts.missing(self.group.rank))
        for rank, cell in enumerate(missing):
            if cell is not None:
                raise ValueError(
                    f"{self.name}: rank {rank} wants cell {cell}, and no rank's input_box has it{on_rank()}"
                )
        return layouts.sends(self.group.rank), layouts.receives(self.group.rank)


class Layouts:
    """The output and input boxes of all ranks."""

    def __init__(self, outputs: Sequence[Box], inputs: Sequence[Box]) -> None:
        self._outputs, self._inputs = outputs, inputs
        axes = len(outputs[0])
        self._wanted, self._had = (np.array(boxes, np.int64).reshape(-1, axes, 2) for boxes in (outputs, inputs))

    def parts(self, rank: int) -> Iterator[tuple[int, Box]]:
        """Yield a rank's sources and the box from each; boxes that no rank has come last, with source -1."""
        left = [self._outputs[rank]] if size_of(self._outputs[rank]) else []
        for source in _meeting(self._had, self._wanted[rank]):
            rest = []
            for box in left:
                common = _common(box, self._inputs[source])
                if common is None:
                    rest.append(box)
                else:
                    yield source, common
                    rest += _without(box, common)
            left = rest
        yield from ((-1, box) for box in left)

    def missing(self, rank: int) -> tuple[int, ...] | None:
        """Return a cell of a rank's output that no rank has; None if there is none."""
        return next((tuple(start for start, _ in box) for source, box in self.parts(rank) if source < 0), None)

    def receives(self, rank: int) -> Parts:
        """Return a rank's sources, and the part of its output from each."""
        return [(source, _within(self._outputs[rank], box)) for source, box in self.parts(rank) if source >= 0]

    def sends(self, rank: int) -> Parts:
        """Return a rank's receivers, and the part of its input for each."""
        return [
            (receiver, _within(self._inputs[rank], box))
            for receiver in _meeting(self._wanted, self._had[rank])
            for source, box in self.parts(receiver)
            if source == rank
        ]


def _meeting(boxes: Any, box: Any) -> list[int]:
    """Return the ranks whose boxes have a cell in common with a box."""
    return np.flatnonzero(
        (np.maximum(boxes[..., 0], box[:, 0]) < np.minimum(boxes[..., 1], box[:, 1])).all(axis=1)
    ).tolist()


def _common(one: Box, other: Box) -> Box | None:
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other))
    return found if all(start < stop for start, stop in found) else None


def _without(box: Box, part: Box) -> list[Box]:
    """Return the boxes that make up `box` without `part`."""
    rest = []
    for axis, ((start, stop), (low, high)) in enumerate(zip(box, part)):
        for piece in ((start, low), (high, stop)):
            if piece[0] < piece[1]:
                rest.append((*part[:axis], piece, *box[axis + 1 :]))
    return rest


def _within(box: Box, part: Box) -> tuple[Any, ...]:
    """Return the index of a part of a box, in an array whose last axes are the box."""
    return (..., *(slice(start - low, stop - low) for (start, stop), (low, _) in zip(part, box)))


def size_of(box: Box) -> int:
    """Return the number of cells of a box."""
    return int(np.prod([max(0, stop - start) for start, stop in box], dtype=object))


def checked(
    name: str, group: Operations, output: Array, input: Array, output_box: Slices, input_box: Slices
) -> Redistribution:
    """Return the redistribution of these arguments; raise TypeError or ValueError for a wrong type or device."""
    device, view = checks.writable(name, "output", output)
    device_in, given = checks.readable(name, "input", input)
    if device != device_in:
        raise ValueError(f"{name}: output and input are on {device} and {device_in}; one call, one device{on_rank()}")
    if view.dtype != given.dtype:
        raise TypeError(f"{name}: output is {view.dtype}, but input is {given.dtype}{on_rank()}")
    boxes = _box(name, "output_box", output_box), _box(name, "input_box", input_box)
    faults = chain(_fault(group.rank, "output", view, boxes[0]), _fault(group.rank, "input", given, boxes[1]))
    fault = next(faults, "")
    if not fault and len(boxes[0]) != len(boxes[1]):
        fault = f"output_box of rank {group.rank} has {len(boxes[0])} axes, and its input_box {len(boxes[1])}"
    leading = [each.shape[: each.ndim - len(boxes[0])] for each in (view, given)]
    if not fault and leading[0] != leading[1]:
        fault = f"output and input of rank {group.rank} have leading axes {leading[0]} and {leading[1]}"
    return Redistribution(name, group, device, view, given, boxes, fault)


def _box(name: str, argument: str, given: Slices) -> Box:
    box = []
    for each in checks.one_or_more(given):
        if not isinstance(each, slice) or each.step not in (None, 1) or each.stop is None:
            raise TypeError(f"{name}: {argument} has {each!r}; expected slices with a start and a stop{on_rank()}")
        start = 0 if each.start is None else checks.integer(f"{name}: a start of {argument}", each.start)
        box.append((start, checks.integer(f"{name}: a stop of {argument}", each.stop)))
    return tuple(box)


def _fault(rank: int, what: str, view: Any, box: Box) -> Iterator[str]:
    """Yield the error if an array does not have the shape of its box, in words."""
    sizes = tuple(max(0, stop - start) for start, stop in box)
    if any(start < 0 for start, _ in box):
        yield f"{what}_box of rank {rank} begins with a negative number: {in_words(box)}"
    elif not box or view.ndim < len(box) or view.shape[view.ndim - len(box) :] != sizes:
        yield f"{what}_box of rank {rank} is {in_words(box)}, which has shape {sizes}, but {what} has {view.shape}"


def in_words(box: Box) -> str:
    """Return a box as text: [0:4, 2:6]."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"
