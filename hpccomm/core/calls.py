"""The checks of each operation's arguments: one function for its ordinary, persistent and batched form.

A function returns the Call that `Dispatcher.run` takes. It sends nothing and touches no array.
`form` is added to the operation's name in messages: ``"_init"``. Ranks are ranks of the group. Where the list of
operations says all, a tool writes the function (`generated.py`); the others stand here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableSequence, Sequence
from datetime import timedelta
from operator import itemgetter
from typing import Any, NoReturn

import numpy as np

from ..errors import UnsupportedOperationError, on_rank
from . import checks
from .annotations import Arrays, Integer, SplitSizes
from .arrays import Array
from .operation_list import OPERATIONS, START, TASK, OperationSpec
from .options import Membership
from .timeouts import as_seconds


class Call(tuple[str, str, Any, tuple[Any, ...]]):
    """An operation whose arguments have been checked; a NamedTuple would be made by a function in Python.

    Its device is the one whose backend does it, its result is the value of `Work.result`, and its arguments are those
    of the backend's method, without `async_op`.
    """

    __slots__ = ()
    name: str = property(itemgetter(0))  # type: ignore[assignment]
    device: str = property(itemgetter(1))  # type: ignore[assignment]
    result: Any = property(itemgetter(2))
    arguments: tuple[Any, ...] = property(itemgetter(3))  # type: ignore[assignment]

    @property
    def spec(self) -> OperationSpec:
        """What the list of operations says of it."""
        return TASK if self.name == TASK.name else OPERATIONS[self.name.removesuffix(START)]

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by the names that they have in the list of operations."""
        return dict(zip(self.spec.arguments, self.arguments))


# -- arrays that the list of operations does not describe in full -----------------------------------


def refuse_average(name: str) -> NoReturn:
    """Raise for AVG of a prefix."""
    raise ValueError(f"{name}: AVG has no meaning for a prefix; use SUM and divide by the rank + 1{on_rank()}")


def all_to_all_single(
    group: Membership,
    output: Array,
    input: Array,
    output_split_sizes: SplitSizes,
    input_split_sizes: SplitSizes,
    form: str = "",
) -> Call:
    """Accept two arrays, and the number of rows of each for each rank; without split sizes the parts are equal."""
    name = "all_to_all_single" + form
    device, out = checks.writable(name, "output", output)
    other, view = checks.readable(name, "input", input)
    checks.alike(name, "output and input", device, out, other, view)
    to_receive = checks.splits(name, "output", out, output_split_sizes, group.size)
    to_send = checks.splits(name, "input", view, input_split_sizes, group.size)
    own, room = to_send[group.rank], to_receive[group.rank]
    if own != room:
        raise ValueError(f"{name}: this rank sends {own} elements to itself, but output has room for {room}{on_rank()}")
    # Equal parts are a form, not a coincidence of counts: ranks can't see each other's counts, and decide alike.
    if not checks.has_splits(output_split_sizes) and not checks.has_splits(input_split_sizes):
        return Call(("all_to_all_single", device, output, (out, view, None, None)))
    return Call(("all_to_all_single", device, output, (out, view, to_receive, to_send)))


def all_gather_coalesced(group: Membership, output_lists: Sequence[Arrays], arrays: Arrays) -> Call:
    """Accept a list for each rank of as many arrays as there are inputs; this rank's are as large as those."""
    name = "all_gather_coalesced"
    device, views = checks.array_list(name, "arrays", arrays, checks.readable)
    rows = list(output_lists) if isinstance(output_lists, Sequence) else [None]
    if len(rows) != group.size or any(not isinstance(row, Sequence) or len(row) != len(views) for row in rows):
        raise ValueError(
            f"{name}: output_lists must be {group.size} lists (one per rank) of {len(views)} arrays "
            f"(one per input){on_rank()}"
        )
    outputs = []
    for owner, output_list in enumerate(output_lists):
        device_out, gathered = checks.array_list(name, f"output_lists[{owner}]", output_list)
        for i, (out, view) in enumerate(zip(gathered, views, strict=True)):
            names = f"output_lists[{owner}][{i}] and arrays[{i}]"
            (checks.like if owner == group.rank else checks.alike)(name, names, device_out, out, device, view)
        outputs.append(gathered)
    return Call((name, device, output_lists, (outputs, views)))


# -- messages ----------------------------------------------------------------------------------------


def sendrecv(
    group: Membership, array: Array, dst: int, output: Array, src: int | None, tag: int, recv_tag: int | None
) -> Call:
    """Accept two arrays of one device, of whatever dtypes and sizes."""
    device, view = checks.readable("sendrecv", "array", array)
    device_out, out = checks.writable("sendrecv", "output", output)
    if device != device_out:
        raise ValueError(
            f"sendrecv: array and output are on {device} and {device_out}; one call, one device{on_rank()}"
        )
    dst = rank(group, "sendrecv: dst", dst)
    source = None if src is None else rank(group, "sendrecv: src", src)
    tag = tag_number(group, "sendrecv", "tag", tag)
    recv_tag = tag if recv_tag is None else tag_number(group, "sendrecv", "recv_tag", recv_tag)
    return Call(("sendrecv", device, output, (view, dst, out, source, tag, recv_tag)))


def peer_number(group: Membership, name: str, argument: str, given: int, is_blocking: bool) -> int:
    """Accept a rank of the group; a blocking message to this rank itself would never end."""
    peer = rank(group, f"{name}: {argument}", given)
    if is_blocking and peer == group.rank:
        hint = "; use async_op=True" if name.endswith("list") else f"; use i{name}, or sendrecv"
        raise ValueError(
            f"{name}: {argument} is this rank itself, which a blocking {name} would wait for for ever{hint}{on_rank()}"
        )
    return peer


# -- objects -----------------------------------------------------------------------------------------


def object_message(
    group: Membership, name: str, argument: str, peer: int | None, tag: int, async_op: bool
) -> tuple[int | None, int]:
    """Accept a rank (None: any), which is another one than this where it blocks, and a tag; return both."""
    number = None if peer is None else peer_number(group, name, argument, peer, not async_op)
    return number, tag_number(group, name, "tag", tag)


def objects(name: str, argument: str, given: Any, is_filled: bool = True) -> list[Any]:
    """Return the objects of a list; raise if it is none, or can't be filled."""
    kind = MutableSequence if is_filled else Sequence
    is_list = isinstance(given, kind) and not isinstance(given, str | bytes | bytearray | deque)
    if not is_list and not (isinstance(given, np.ndarray) and given.dtype.hasobject):
        raise TypeError(f"{name}: {argument} is a {type(given).__name__}; expected a list, such as [obj]{on_rank()}")
    return list(given)


def slots(group: Membership, name: str, argument: str, given: Any, is_filled: bool = True) -> None:
    """Raise if a list has not one slot for each rank."""
    objects(name, argument, given, is_filled)
    if len(given) != group.size:
        expected = f"expected one for each of the {group.size} ranks"
        raise ValueError(f"{name}: {argument} has {len(given)} slots; {expected}{on_rank()}")


# -- the rest ----------------------------------------------------------------------------------------


def time_to_wait(name: str, timeout: timedelta | float) -> float:
    """Accept a time of 0 or more; return it in seconds."""
    seconds = as_seconds(timeout, f"{name}: timeout")
    if not seconds >= 0:
        raise ValueError(f"{name}: timeout is {timeout}; expected 0 or more seconds{on_rank()}")
    return seconds


def new_array(name: str, shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Accept lengths of 0 or more and any dtype that can be moved; return both."""
    given = shape if isinstance(shape, tuple | list) else (shape,)
    lengths = tuple(checks.integer(f"{name}: a length of shape", length) for length in given)
    if any(length < 0 for length in lengths):
        raise ValueError(f"{name}: shape is {shape}; a length can't be negative{on_rank()}")
    kind = np.dtype(dtype)
    checks.writable(name, "the array", np.empty(0, kind))
    return lengths, kind


# -- pieces ------------------------------------------------------------------------------------------


def rank(group: Membership, what: str, given: Integer) -> int:
    """Return `given` as an int; ValueError if it is no rank of the group."""
    number = checks.integer(what, given)
    if not 0 <= number < group.size:
        from ..process.alone import start_more

        raise ValueError(f"{what} is {number}; expected 0 to {group.size - 1}{start_more()}{on_rank()}")
    return number


def tag_number(group: Membership, name: str, argument: str, given: int) -> int:
    """Accept a tag that MPI has."""
    tag = checks.integer(f"{name}: {argument}", given)
    if not 0 <= tag <= group.largest_tag:
        hint = " (MPI.ANY_TAG: a receive names its tag)" if tag == -1 else ""  # it is -1 in MPICH and in Open MPI
        raise ValueError(f"{name}: {argument} is {tag}; this MPI allows 0 to {group.largest_tag}{hint}{on_rank()}")
    return tag


def sparse_messages(group: Membership, arrays: Any) -> dict[int, list[Any] | tuple[Any, ...]]:
    """Accept a tuple of host arrays for each of some ranks, or one array, which becomes a list of one."""
    name, found = "all_to_all_sparse", {}
    if not isinstance(arrays, Mapping):
        raise TypeError(f"{name}: arrays is a {type(arrays).__name__}; expected a dict, arrays by receivers{on_rank()}")
    for dst, given in arrays.items():
        views = []
        for each in given if isinstance(given, (tuple, list)) else [given]:
            device, view = checks.readable(name, f"arrays[{dst!r}]", each)
            if device != "cpu":
                raise UnsupportedOperationError(f"not for {device} arrays; copy them to the host{on_rank()}", name)
            views.append(view)
        found[rank(group, f"{name}: a receiver", dst)] = tuple(views) if isinstance(given, (tuple, list)) else views
    return found


def has_list(group: Membership, name: str, argument: str, given: Any, role: str, root: int) -> bool:
    """Return True on the root; raise if the list is missing there, or given on another rank."""
    if group.rank == root:
        if given is None:
            raise ValueError(f"{name}: {argument} is missing, and this rank is the {role}{on_rank()}")
        return True
    if given is not None and len(given):
        raise ValueError(
            f"{name}: {argument} is given, but this rank is not the {role}; pass it on that rank only{on_rank()}"
        )
    return False
