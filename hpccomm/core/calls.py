"""The checks of each operation's arguments: one function for its ordinary, persistent and batched form.

A function returns the Call for `Dispatcher.run`. It sends nothing and touches no array.
Error messages add `form`, such as ``"_init"``, to the operation's name. Ranks are ranks of the group. If the list of
operations describes an operation in full, a tool writes the function (`generated.py`); this file has the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableSequence, Sequence
from operator import itemgetter
from typing import Any, NoReturn

import numpy as np

from ..errors import UnsupportedOperationError, on_rank
from . import checks
from .annotations import Arrays, Integer, SplitSizes
from .arrays import Array
from .operation_list import OPERATIONS, START, TASK, OperationSpec
from .options import Membership


class Call(tuple[str, str, Any, tuple[Any, ...]]):
    """An operation with checked arguments; not a NamedTuple, whose constructor is slow because it is Python.

    `device` selects the backend, `result` is the value of `Work.result`, and `arguments` are those of the backend's
    method, without `async_op`.
    """

    __slots__ = ()
    name: str = property(itemgetter(0))  # type: ignore[assignment]
    device: str = property(itemgetter(1))  # type: ignore[assignment]
    result: Any = property(itemgetter(2))
    arguments: tuple[Any, ...] = property(itemgetter(3))  # type: ignore[assignment]

    @property
    def spec(self) -> OperationSpec:
        """Its entry in the list of operations."""
        return TASK if self.name == TASK.name else OPERATIONS[self.name.removesuffix(START)]

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by their names in the list of operations."""
        return dict(zip(self.spec.arguments, self.arguments))


# -- arrays that the list of operations does not describe in full -----------------------------------


def refuse_average(name: str) -> NoReturn:
    """Raise the error for AVG in a scan."""
    raise ValueError(f"{name}: AVG has no meaning for a prefix; use SUM and divide by the rank + 1{on_rank()}")


def all_to_all_single(
    group: Membership,
    output: Array,
    input: Array,
    output_split_sizes: SplitSizes,
    input_split_sizes: SplitSizes,
    form: str = "",
) -> Call:
    """Accept two arrays, and for each the number of rows per rank; without split sizes the parts are equal."""
    name = "all_to_all_single" + form
    device, out = checks.writable(name, "output", output)
    other, view = checks.readable(name, "input", input)
    checks.alike(name, "output and input", device, out, other, view)
    to_receive = checks.splits(name, "output", out, output_split_sizes, group.size)
    to_send = checks.splits(name, "input", view, input_split_sizes, group.size)
    own, room = to_send[group.rank], to_receive[group.rank]
    if own != room:
        raise ValueError(f"{name}: this rank sends {own} elements to itself, but output has room for {room}{on_rank()}")
    # Missing split sizes, not equal counts, select the form with equal parts: ranks can't see each other's counts.
    if not checks.has_splits(output_split_sizes) and not checks.has_splits(input_split_sizes):
        return Call(("all_to_all_single", device, output, (out, view, None, None)))
    return Call(("all_to_all_single", device, output, (out, view, to_receive, to_send)))


def all_gather_coalesced(group: Membership, output_lists: Sequence[Arrays], arrays: Arrays) -> Call:
    """Accept one list per rank, with one array per input; the arrays of this rank's list are as large as the inputs."""
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
    checks.apart(name, "output_lists", [each for row in outputs for each in row], columns=len(views))
    return Call((name, device, output_lists, (outputs, views)))


# -- messages ----------------------------------------------------------------------------------------


def sendrecv(
    group: Membership, array: Array, dst: int, output: Array, src: int | None, tag: int, recv_tag: int | None
) -> Call:
    """Accept two arrays of one device, of any dtypes and sizes."""
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
    """Accept a rank of the group; refuse a blocking message to this rank itself, which would never end."""
    peer = rank(group, f"{name}: {argument}", given)
    if is_blocking and peer == group.rank:
        hint = "; use async_op=True" if name.endswith("list") else f"; use i{name}, or sendrecv"
        raise ValueError(
            f"{name}: {argument} is this rank itself, and a blocking {name} would never end{hint}{on_rank()}"
        )
    return peer


# -- objects -----------------------------------------------------------------------------------------


def object_message(
    group: Membership, name: str, argument: str, peer: int | None, tag: int, async_op: bool
) -> tuple[int | None, int]:
    """Accept a rank (None: any) and a tag; return both. Refuse a blocking message to this rank itself."""
    number = None if peer is None else peer_number(group, name, argument, peer, not async_op)
    return number, tag_number(group, name, "tag", tag)


def objects(name: str, argument: str, given: Any, is_filled: bool = True) -> list[Any]:
    """Return the objects of a list; raise if `given` is no list, or must be filled and can't be."""
    kind = MutableSequence if is_filled else Sequence
    is_list = isinstance(given, kind) and not isinstance(given, str | bytes | bytearray | deque)
    if not is_list and not (isinstance(given, np.ndarray) and given.dtype.hasobject):
        raise TypeError(f"{name}: {argument} is a {type(given).__name__}; expected a list, such as [obj]{on_rank()}")
    return list(given)


def slots(group: Membership, name: str, argument: str, given: Any, is_filled: bool = True) -> None:
    """Raise unless a list has one slot per rank."""
    objects(name, argument, given, is_filled)
    if len(given) != group.size:
        expected = f"expected one for each of the {group.size} ranks"
        raise ValueError(f"{name}: {argument} has {len(given)} slots; {expected}{on_rank()}")


# -- the rest ----------------------------------------------------------------------------------------


def new_array(name: str, shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Accept lengths of 0 or more and any dtype that can be communicated; return both."""
    given = shape if isinstance(shape, tuple | list) else (shape,)
    lengths = tuple(checks.integer(f"{name}: a length of shape", length) for length in given)
    if any(length < 0 for length in lengths):
        raise ValueError(f"{name}: shape is {shape}; a length can't be negative{on_rank()}")
    kind = np.dtype(dtype)
    try:
        np.broadcast_to(np.empty((), f"V{kind.itemsize}"), lengths)
    except ValueError as error:
        raise ValueError(f"{name}: shape is {shape}: {error}{on_rank()}") from None
    if not kind.isnative:
        raise TypeError(f"{name}: dtype {kind} has a foreign byte order; give {kind.newbyteorder('=')!r}{on_rank()}")
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
    """Accept a tag in the range that this MPI allows."""
    tag = checks.integer(f"{name}: {argument}", given)
    if not 0 <= tag <= group.largest_tag:
        hint = " (MPI.ANY_TAG: a receive names its tag)" if tag == -1 else ""  # -1 in MPICH and Open MPI
        raise ValueError(f"{name}: {argument} is {tag}; this MPI allows 0 to {group.largest_tag}{hint}{on_rank()}")
    return tag


def sparse_messages(group: Membership, arrays: Any) -> dict[int, list[Any] | tuple[Any, ...]]:
    """Accept a tuple of host arrays for each receiver, or one array, which becomes a list of one."""
    name, found = "exchange_sparse", {}
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
    """Return True on the root; raise if the root lacks the list or another rank has it."""
    if group.rank == root:
        if given is None:
            raise ValueError(f"{name}: {argument} is missing, and this rank is the {role}{on_rank()}")
        return True
    if given is not None and len(given):
        raise ValueError(
            f"{name}: {argument} is given, but this rank is not the {role}; pass it on that rank only{on_rank()}"
        )
    return False
