"""The checks of each operation's arguments: one function for its ordinary, persistent and batched form alike.

A function returns the Call, which is all that the door (`Door.run`) needs. Nothing is sent, and no array is touched.
`form` is added to the operation's name in messages: ``"_init"``. Ranks are ranks of the group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableSequence, Sequence
from datetime import timedelta
from operator import itemgetter
from typing import Any

import numpy as np

from ..errors import UnsupportedOperationError, here
from . import checks
from .annotations import Arrays, Integer, SplitSizes
from .arrays import Array
from .operation_list import OPERATIONS, START, TASK, OperationSpec
from .options import Membership
from .reduce_op import ReduceOp, ReduceOpLike
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


# -- one array ---------------------------------------------------------------------------------------


def broadcast(group: Membership, array: Array, root: int, form: str = "") -> Call:
    """Accept any array; it is written where this rank is not the root."""
    name = "broadcast" + form
    root = rank(group, f"{name}: root", root)
    device, view = (checks.readable if root == group.rank else checks.writable)(name, "array", array)
    return Call(("broadcast", device, array, (view, root)))


def all_reduce(group: Membership, array: Array, op: ReduceOpLike, form: str = "") -> Call:
    """Accept an array that `op` can reduce."""
    device, view, reduce_op = checks.reducible("all_reduce" + form, "array", array, op)
    return Call(("all_reduce", device, array, (view, reduce_op)))


def reduce(group: Membership, array: Array, root: int, op: ReduceOpLike) -> Call:
    """Accept an array that `op` can reduce; it is written where this rank is the root."""
    root = rank(group, "reduce: root", root)
    check = checks.writable if root == group.rank else checks.readable
    device, view, reduce_op = checks.reducible("reduce", "array", array, op, check)
    return Call(("reduce", device, array, (view, root, reduce_op)))


def scan(group: Membership, name: str, array: Array, op: ReduceOpLike) -> Call:
    """Accept an array that `op` can reduce; `name` is "scan" or "exscan"."""
    device, view, reduce_op = checks.reducible(name, "array", array, op)
    if reduce_op is ReduceOp.AVG:
        raise ValueError(f"{name}: AVG has no meaning for a prefix; use SUM and divide by the rank + 1{here()}")
    return Call((name, device, array, (view, reduce_op)))


# -- one array from or to each rank ------------------------------------------------------------------


def all_gather(group: Membership, output_list: Arrays, array: Array) -> Call:
    """Accept a list of one array for each rank, this rank's as large as `array`."""
    device, view = checks.readable("all_gather", "array", array)
    outputs = _parts(group, "all_gather", "output_list", output_list, checks.writable, "array", device, view)
    return Call(("all_gather", device, output_list, (outputs, view)))


def all_gather_single(group: Membership, output: Array, input: Array, form: str = "") -> Call:
    """Accept an output as large as the inputs of all ranks together."""
    name = "all_gather_single" + form
    device, out, view = checks.pair(name, output, input)
    _check_multiple(group, name, "output", out, "input", view)
    return Call(("all_gather_single", device, output, (out, view)))


def gather(group: Membership, array: Array, gather_list: Any, root: int) -> Call:
    """Accept a list of one array for each rank on the root, and none elsewhere."""
    root = rank(group, "gather: root", root)
    device, view = checks.readable("gather", "array", array)
    outputs = None
    if has_list(group, "gather", "gather_list", gather_list, "destination", root):
        outputs = _parts(group, "gather", "gather_list", gather_list, checks.writable, "array", device, view)
    return Call(("gather", device, gather_list, (view, outputs, root)))


def scatter(group: Membership, output: Array, scatter_list: Any, root: int) -> Call:
    """Accept a list of one array for each rank on the root, and none elsewhere."""
    root = rank(group, "scatter: root", root)
    device, view = checks.writable("scatter", "output", output)
    inputs = None
    if has_list(group, "scatter", "scatter_list", scatter_list, "source", root):
        inputs = _parts(group, "scatter", "scatter_list", scatter_list, checks.readable, "output", device, view)
    return Call(("scatter", device, output, (view, inputs, root)))


def reduce_scatter(group: Membership, output: Array, input_list: Arrays, op: ReduceOpLike) -> Call:
    """Accept a list of one array for each rank, this rank's as large as `output`."""
    name = "reduce_scatter"
    device, view = checks.writable(name, "output", output)
    inputs = _parts(group, name, "input_list", input_list, checks.readable, "output", device, view)
    return Call((name, device, output, (view, inputs, checks.reduction(name, "output", view, op))))


def reduce_scatter_single(group: Membership, output: Array, input: Array, op: ReduceOpLike, form: str = "") -> Call:
    """Accept an input as large as the outputs of all ranks together."""
    name = "reduce_scatter_single" + form
    device, out, view = checks.pair(name, output, input)
    _check_multiple(group, name, "input", view, "output", out)
    return Call(("reduce_scatter_single", device, output, (out, view, checks.reduction(name, "output", out, op))))


def all_to_all(group: Membership, output_list: Arrays, input_list: Arrays) -> Call:
    """Accept two lists of one array for each rank; this rank's two have the same size."""
    device, inputs = checks.one_for_each_rank("all_to_all", "input_list", input_list, group.size, checks.readable)
    own = f"input_list[{group.rank}]", device, inputs[group.rank]
    outputs = _parts(group, "all_to_all", "output_list", output_list, checks.writable, *own)
    return Call(("all_to_all", device, output_list, (outputs, inputs)))


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
    device, out, view = checks.pair(name, output, input)
    to_receive = checks.splits(name, "output", out, output_split_sizes, group.size)
    to_send = checks.splits(name, "input", view, input_split_sizes, group.size)
    own, room = to_send[group.rank], to_receive[group.rank]
    if own != room:
        raise ValueError(f"{name}: this rank sends {own} elements to itself, but output has room for {room}{here()}")
    # Equal parts are a form, not a coincidence of counts: ranks can't see each other's counts, and decide alike.
    if not checks.has_splits(output_split_sizes) and not checks.has_splits(input_split_sizes):
        return Call(("all_to_all_single", device, output, (out, view, None, None)))
    return Call(("all_to_all_single", device, output, (out, view, to_receive, to_send)))


# -- many arrays in one message ----------------------------------------------------------------------


def all_reduce_coalesced(group: Membership, arrays: Arrays, op: ReduceOpLike, form: str = "") -> Call:
    """Accept arrays of one device that `op` can reduce."""
    name = "all_reduce_coalesced" + form
    device, views = checks.array_list(name, "arrays", arrays)
    return Call(("all_reduce_coalesced", device, arrays, (views, checks.reductions(name, "arrays", views, op))))


def broadcast_coalesced(group: Membership, arrays: Arrays, root: int) -> Call:
    """Accept arrays of one device; they are written where this rank is not the root."""
    root = rank(group, "broadcast_coalesced: root", root)
    check = checks.readable if root == group.rank else checks.writable
    device, views = checks.array_list("broadcast_coalesced", "arrays", arrays, check)
    return Call(("broadcast_coalesced", device, arrays, (views, root)))


def all_gather_coalesced(group: Membership, output_lists: Sequence[Arrays], arrays: Arrays) -> Call:
    """Accept a list for each rank of as many arrays as there are inputs; this rank's are as large as those."""
    name = "all_gather_coalesced"
    device, views = checks.array_list(name, "arrays", arrays, checks.readable)
    rows = list(output_lists) if isinstance(output_lists, Sequence) else [None]
    if len(rows) != group.size or any(not isinstance(row, Sequence) or len(row) != len(views) for row in rows):
        raise ValueError(
            f"{name}: output_lists must be {group.size} lists (one per rank) of {len(views)} arrays "
            f"(one per input){here()}"
        )
    outputs = []
    for owner, output_list in enumerate(output_lists):
        device_out, gathered = checks.array_list(name, f"output_lists[{owner}]", output_list)
        for i, (out, view) in enumerate(zip(gathered, views, strict=True)):
            names = f"output_lists[{owner}][{i}] and arrays[{i}]"
            checks.alike(name, device_out, out, device, view, names)
            if owner == group.rank:
                checks.same_size(name, names, out, view)
        outputs.append(gathered)
    return Call((name, device, output_lists, (outputs, views)))


def all_gather_single_coalesced(group: Membership, outputs: Arrays, inputs: Arrays) -> Call:
    """Accept pairs as all_gather_single does, of one device."""
    device, outs, views = _pairs(group, "all_gather_single_coalesced", outputs, inputs, larger="outputs")
    return Call(("all_gather_single_coalesced", device, outputs, (outs, views)))


def reduce_scatter_single_coalesced(group: Membership, outputs: Arrays, inputs: Arrays, op: ReduceOpLike) -> Call:
    """Accept pairs as reduce_scatter_single does, of one device."""
    name = "reduce_scatter_single_coalesced"
    device, outs, views = _pairs(group, name, outputs, inputs, larger="inputs")
    return Call((name, device, outputs, (outs, views, checks.reductions(name, "outputs", outs, op))))


def _pairs(
    group: Membership, name: str, outputs: Arrays, inputs: Arrays, larger: str
) -> tuple[str, list[Any], list[Any]]:
    device, outs = checks.array_list(name, "outputs", outputs)
    device_in, views = checks.array_list(name, "inputs", inputs, checks.readable)
    if len(outs) != len(views):
        raise ValueError(f"{name}: there are {len(outs)} outputs and {len(views)} inputs; expected pairs{here()}")
    large, small = (outs, views) if larger == "outputs" else (views, outs)
    if device == device_in == "cpu" and checks.pairs_fit(large, small, group.size):
        return device, outs, views
    for i, (out, view) in enumerate(zip(outs, views, strict=True)):
        checks.alike(name, device, out, device_in, view, f"outputs[{i}] and inputs[{i}]")
        pair = (f"outputs[{i}]", out, f"inputs[{i}]", view)
        _check_multiple(group, name, *(pair if larger == "outputs" else pair[2:] + pair[:2]))
    return device, outs, views


# -- messages ----------------------------------------------------------------------------------------


def send(group: Membership, array: Array, dst: int, tag: int, form: str = "", is_blocking: bool = False) -> Call:
    """Accept an array, a rank and a tag; a blocking send to this rank itself would never end."""
    name = "send" + form
    device, view = checks.readable(name, "array", array)
    return Call(
        ("send", device, array, (view, _peer(group, name, "dst", dst, is_blocking), _tag(group, name, "tag", tag)))
    )


def recv(group: Membership, array: Array, src: int | None, tag: int, form: str = "", is_blocking: bool = False) -> Call:
    """Accept an array, a rank (None: any) and a tag; a blocking receive from this rank itself would never end."""
    name = "recv" + form
    device, view = checks.writable(name, "array", array)
    source = None if src is None else _peer(group, name, "src", src, is_blocking)
    return Call(("recv", device, array, (view, source, _tag(group, name, "tag", tag))))


def sendrecv(
    group: Membership, array: Array, dst: int, output: Array, src: int | None, tag: int, recv_tag: int | None
) -> Call:
    """Accept two arrays of one device, of whatever dtypes and sizes."""
    device, view = checks.readable("sendrecv", "array", array)
    device_out, out = checks.writable("sendrecv", "output", output)
    if device != device_out:
        raise ValueError(f"sendrecv: array and output are on {device} and {device_out}; one call, one device{here()}")
    dst = rank(group, "sendrecv: dst", dst)
    source = None if src is None else rank(group, "sendrecv: src", src)
    tag = _tag(group, "sendrecv", "tag", tag)
    recv_tag = tag if recv_tag is None else _tag(group, "sendrecv", "recv_tag", recv_tag)
    return Call(("sendrecv", device, output, (view, dst, out, source, tag, recv_tag)))


def _peer(group: Membership, name: str, argument: str, given: int, is_blocking: bool) -> int:
    peer = rank(group, f"{name}: {argument}", given)
    if is_blocking and peer == group.rank:
        hint = "; use async_op=True" if name.endswith("list") else f"; use i{name}, or sendrecv"
        raise ValueError(
            f"{name}: {argument} is this rank itself, which a blocking {name} would wait for for ever{hint}{here()}"
        )
    return peer


# -- objects -----------------------------------------------------------------------------------------


def object_message(
    group: Membership, name: str, argument: str, peer: int | None, tag: int, async_op: bool
) -> tuple[int | None, int]:
    """Accept a rank (None: any), which is another one than this where it blocks, and a tag; return both."""
    return None if peer is None else _peer(group, name, argument, peer, not async_op), _tag(group, name, "tag", tag)


def objects(name: str, argument: str, given: Any, is_filled: bool = True) -> list[Any]:
    """Return the objects of a list; raise if it is none, or can't be filled."""
    kind = MutableSequence if is_filled else Sequence
    is_list = isinstance(given, kind) and not isinstance(given, str | bytes | bytearray | deque)
    if not is_list and not (isinstance(given, np.ndarray) and given.dtype.hasobject):
        raise TypeError(f"{name}: {argument} is a {type(given).__name__}; expected a list, such as [obj]{here()}")
    return list(given)


def slots(group: Membership, name: str, argument: str, given: Any, is_filled: bool = True) -> None:
    """Raise if a list has not one slot for each rank."""
    objects(name, argument, given, is_filled)
    if len(given) != group.size:
        expected = f"expected one for each of the {group.size} ranks"
        raise ValueError(f"{name}: {argument} has {len(given)} slots; {expected}{here()}")


# -- the rest ----------------------------------------------------------------------------------------


def time_to_wait(name: str, timeout: timedelta | float) -> float:
    """Accept a time of 0 or more; return it in seconds."""
    seconds = as_seconds(timeout, f"{name}: timeout")
    if not seconds >= 0:
        raise ValueError(f"{name}: timeout is {timeout}; expected 0 or more seconds{here()}")
    return seconds


def new_array(name: str, shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Accept lengths of 0 or more and any dtype that can be moved; return both."""
    given = shape if isinstance(shape, tuple | list) else (shape,)
    lengths = tuple(checks.integer(f"{name}: a length of shape", length) for length in given)
    if any(length < 0 for length in lengths):
        raise ValueError(f"{name}: shape is {shape}; a length can't be negative{here()}")
    kind = np.dtype(dtype)
    checks.writable(name, "the array", np.empty(0, kind))
    return lengths, kind


# -- pieces ------------------------------------------------------------------------------------------


def rank(group: Membership, what: str, given: Integer) -> int:
    """Return `given` as an int; ValueError if it is no rank of the group."""
    number = checks.integer(what, given)
    if not 0 <= number < group.size:
        from ..process.alone import start_more

        raise ValueError(f"{what} is {number}; expected 0 to {group.size - 1}{start_more()}{here()}")
    return number


def _tag(group: Membership, name: str, argument: str, given: int) -> int:
    tag = checks.integer(f"{name}: {argument}", given)
    if not 0 <= tag <= group.largest_tag:
        hint = " (MPI.ANY_TAG: a receive names its tag)" if tag == -1 else ""  # it is -1 in MPICH and in Open MPI
        raise ValueError(f"{name}: {argument} is {tag}; this MPI allows 0 to {group.largest_tag}{hint}{here()}")
    return tag


def sparse_messages(group: Membership, arrays: Any) -> dict[int, list[Any] | tuple[Any, ...]]:
    """Accept a tuple of host arrays for each of some ranks, or one array, which becomes a list of one."""
    name, found = "all_to_all_sparse", {}
    if not isinstance(arrays, Mapping):
        raise TypeError(f"{name}: arrays is a {type(arrays).__name__}; expected a dict, arrays by receivers{here()}")
    for dst, given in arrays.items():
        views = []
        for each in given if isinstance(given, (tuple, list)) else [given]:
            device, view = checks.readable(name, f"arrays[{dst!r}]", each)
            if device != "cpu":
                raise UnsupportedOperationError(f"not for {device} arrays; copy them to the host{here()}", name)
            views.append(view)
        found[rank(group, f"{name}: a receiver", dst)] = tuple(views) if isinstance(given, (tuple, list)) else views
    return found


def has_list(group: Membership, name: str, argument: str, given: Any, role: str, root: int) -> bool:
    """Return True on the root; raise if the list is missing there, or given on another rank."""
    if group.rank == root:
        if given is None:
            raise ValueError(f"{name}: {argument} is missing, and this rank is the {role}{here()}")
        return True
    if given is not None and len(given):
        raise ValueError(
            f"{name}: {argument} is given, but this rank is not the {role}; pass it on that rank only{here()}"
        )
    return False


def _parts(
    group: Membership, name: str, argument: str, given: Any, check: Any, other: str, other_device: str, array: Any
) -> list[Any]:
    """Return the views of a list of one array for each rank, this rank's like `array`, the argument `other`."""
    device, parts = checks.one_for_each_rank(name, argument, given, group.size, check)
    names, own = f"{argument}[{group.rank}] and {other}", parts[group.rank]
    checks.alike(name, device, own, other_device, array, names)
    checks.same_size(name, names, own, array)
    return parts


def _check_multiple(group: Membership, name: str, large_name: str, large: Any, small_name: str, small: Any) -> None:
    if large.size != group.size * small.size:
        raise ValueError(
            f"{name}: {large_name} has {large.size} elements; expected {group.size * small.size}, "
            f"{group.size} ranks times the {small.size} of {small_name}{here()}"
        )
