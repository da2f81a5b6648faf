"""One good call and the bad ones of every operation; `test_matrix` tries each in every form on every kind of group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import hpccomm as hc
from hpccomm.core.operation_list import OPERATIONS

from ..calls import CALLS, Good, On, Outcome


def values(rank: int, n: int = 4, salt: int = 0) -> Any:
    """What a rank contributes."""
    return np.random.default_rng([rank, salt]).integers(0, 9, n).astype(float)


def everybody(group: hc.ProcessGroup, n: int = 4, salt: int = 0) -> list[Any]:
    """What all ranks of the group contribute, in group order."""
    return [values(rank, n, salt) for rank in range(group.size)]


def _called(name: str) -> Callable[[hc.ProcessGroup], Good]:
    def make(group: hc.ProcessGroup) -> Good:
        root = group.size - 1 if name == "broadcast" else 0
        return CALLS[name](On(group, op="MAX" if name == "all_reduce" else None, root=root))

    return make


GOOD: dict[str, Callable[[hc.ProcessGroup], Good]] = {name: _called(name) for name in CALLS}


def good(make: Callable[[hc.ProcessGroup], Good]) -> Callable[[hc.ProcessGroup], Good]:
    GOOD[make.__name__] = make
    return make


@good
def all_reduce_sparse(group: hc.ProcessGroup) -> Good:
    import scipy.sparse

    n = group.size
    matrix = scipy.sparse.coo_array(([1.0, 2.0], ([0, group.rank], [0, 1])), shape=(n, 2)).tocsr()
    dense = np.zeros((n, 2))
    dense[0, 0], dense[:, 1] = n, 2.0
    return Good((matrix,), {}, [(matrix, dense)])


@good
def send(group: hc.ProcessGroup) -> Good:
    return Good((values(group.rank),), {"group_dst": (group.rank + 1) % group.size})


@good
def recv(group: hc.ProcessGroup) -> Good:
    x, source = np.zeros(4), (group.rank - 1) % group.size
    return Good((x,), {"group_src": source}, [(x, values(source))], returns=group.ranks[source])


@good
def sendrecv(group: hc.ProcessGroup) -> Good:
    x, source = np.zeros(4), (group.rank - 1) % group.size
    options = {"group_dst": (group.rank + 1) % group.size, "group_src": source}
    return Good((values(group.rank), None, x), options, [(x, values(source))], returns=group.ranks[source])


@good
def barrier(group: hc.ProcessGroup) -> Good:
    return Good()


@good
def monitored_barrier(group: hc.ProcessGroup) -> Good:
    return Good((), {"timeout": 60})


@good
def all_gather_object(group: hc.ProcessGroup) -> Good:
    slots: list[Any] = [None] * group.size
    return Good((slots, {"rank": group.rank}), {}, [(slots, [{"rank": r} for r in range(group.size)])])


@good
def gather_object(group: hc.ProcessGroup) -> Good:
    slots: list[Any] | None = [None] * group.size if group.rank == 0 else None
    return Good((group.rank, slots), {"group_dst": 0}, [(slots, list(range(group.size)))] if slots else [])


@good
def broadcast_object_list(group: hc.ProcessGroup) -> Good:
    slots = [group.rank, "x"]
    return Good((slots,), {"group_src": 0}, [(slots, [0, "x"])])


@good
def scatter_object_list(group: hc.ProcessGroup) -> Good:
    mine: list[Any] = [None]
    given: list[Any] = list(range(group.size)) if group.rank == 0 else [None] * group.size  # ignored, as in c10d
    return Good((mine, given), {"group_src": 0}, [(mine, [group.rank])])


@good
def send_object_list(group: hc.ProcessGroup) -> Good:
    return Good(([group.rank],), {"group_dst": (group.rank + 1) % group.size})


@good
def recv_object_list(group: hc.ProcessGroup) -> Good:
    slots, source = [None], (group.rank - 1) % group.size
    return Good((slots,), {"group_src": source}, [(slots, [source])], returns=group.ranks[source])


# -- inputs and outputs in the same memory -----------------------------------------------------------


@good
def redistribute(group: hc.ProcessGroup) -> Good:
    n, me = group.size, group.rank
    whole = np.array(everybody(group))  # a row of each rank, and a column of each
    output = np.empty((n, 4))[:, hc.block_slice(4, n, me)]
    boxes = (slice(0, n), hc.block_slice(4, n, me)), (slice(me, me + 1), slice(0, 4))
    return Good((output, values(me)[None], *boxes), {}, [(output, whole[:, hc.block_slice(4, n, me)])])


WITH_OUTPUTS = [name for name in GOOD if any(each.startswith("output") for each in OPERATIONS[name].arguments)]
OVERLAPS = ["in place", "reversed", "shifted", "strided"]


def in_one_memory(
    arguments: list[Any], outcomes: list[Outcome], how: str, rank: int
) -> tuple[list[Any], list[Outcome]]:
    """The arguments of a call with its inputs and its outputs in one memory, and its outcomes there.

    "in place" is where this rank's part would be.
    """
    outputs = _arrays_in([actual for actual, _ in outcomes])
    inputs = [each for each in _arrays_in(arguments) if not any(each is output for output in outputs)]
    if not inputs:  # what comes out is what went in
        return arguments, outcomes
    n_in, n_out = sum(map(_padded, inputs)), sum(map(_padded, outputs))
    memory = np.zeros(16 + 2 * (n_in + n_out) * (rank + 2), np.uint8)
    places = _laid_out(outputs, memory, rank * n_out if n_in > n_out else 0, 1 + (how == "strided"))
    given = inputs[::-1] if how == "reversed" else inputs
    places |= _laid_out(given, memory, 16 * (how == "shifted") + (rank * n_in if n_in < n_out else 0))
    for each in inputs:
        places[id(each)][...] = each
    return _moved(arguments, places), [(_moved(actual, places), expected) for actual, expected in outcomes]


def _arrays_in(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [array for each in value for array in _arrays_in(each)]
    return [value] if isinstance(value, np.ndarray) else []


def _padded(array: Any) -> int:
    return int(-array.nbytes // 16 * -16)


def _laid_out(arrays: list[Any], memory: Any, start: int, stride: int = 1) -> dict[int, Any]:
    """Views like `arrays`, by their ids, one after the other in `memory`; stride 2: with gaps in them."""
    places = {}
    for array in arrays:
        strides = [stride * each for each in np.empty_like(array, order="C").strides]
        places[id(array)] = np.ndarray(array.shape, array.dtype, memory, start, strides)
        start += stride * _padded(array)
    return places


def _moved(value: Any, places: dict[int, Any]) -> Any:
    return [_moved(each, places) for each in value] if isinstance(value, list) else places.get(id(value), value)


FUNCTIONS: dict[str, Any] = {name: getattr(hc, name, None) for name in OPERATIONS} | {
    "all_reduce_sparse": hc.all_reduce
}
MESSAGES = {"send": "isend", "recv": "irecv"}  # whose asynchronous form has a name of its own


def function(name: str, form: str) -> Any:
    """The public function of an operation in a form."""
    if form == "persistent":
        return getattr(hc, f"{name}_init")
    return getattr(hc, MESSAGES[name]) if form == "async" and name in MESSAGES else FUNCTIONS[name]


# -- arguments that are refused ----------------------------------------------------------------------

NUMBERS = [0.0, np.float64(0), True, "0", [0], np.zeros(1), 99, -1]
READ_ONLY = np.broadcast_to(1.0, 4)


def bad_calls(name: str, group: hc.ProcessGroup) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Calls with one wrong argument: (what is wrong, arguments, options)."""
    found: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def wrong(what: str, place: int | None = None, value: Any = None, **options: Any) -> None:
        fine = GOOD[name](group)
        arguments = list(fine.arguments)
        if place is not None:
            arguments[place] = value
        found.append((what, tuple(arguments), {**fine.options, **options}))

    spec = OPERATIONS[name]
    fine = GOOD[name](group)
    for option in ("group_src", "group_dst"):
        if option in fine.options:
            for value in NUMBERS:
                wrong(f"{option}={value!r}", **{option: value})
            if name != "sendrecv":
                wrong("both kinds of rank", **{option: 0, option.removeprefix("group_"): 0})
    if "tag" in spec.arguments:
        for value in (-1, 0.5, None, "x", 2**40):
            wrong(f"tag={value!r}", tag=value)
    if spec.reduces and name != "all_reduce_sparse":
        for value in ("median", None, 3, hc.ReduceOp.PREMUL_SUM("x"), hc.ReduceOp.BAND, [1]):
            wrong(f"op={value!r}", op=value)
    for place, argument in enumerate(fine.arguments):
        if name.endswith(("object", "object_list")) or name == "all_reduce_sparse":
            continue
        if isinstance(argument, np.ndarray):
            for value in (3.0, None, [1.0], "text", np.array([{}]), np.zeros(4, ">f8"), np.ma.masked_array([1.0])):
                wrong(f"argument {place} is {value!r}", place, value)
        if isinstance(argument, list):
            for value in (3, [], [None] * len(argument), [*argument, argument[0]], [np.array([{}])] * len(argument)):
                longer = isinstance(value, list) and len(value) == len(argument) + 1
                if not (longer and name in ("all_reduce_coalesced", "broadcast_coalesced")):
                    wrong(f"argument {place} is {str(value)[:60]}", place, value)
    for place, role in enumerate(spec.roles):
        if role.kind in ("out", "inout") and role.form == "one":
            wrong("a read-only output", place, np.broadcast_to(0.0, fine.arguments[place].shape))
    sees_both = name != "scatter" or group.rank == 0  # the others have only what they receive
    is_checked = spec.sizes or name == "all_to_all_single"
    if is_checked and sees_both and (spec.roles[0].kind, spec.roles[0].form) == ("out", "one"):
        wrong("a size that does not fit", 0, np.zeros(4 * group.size + 3))
        wrong("another dtype", 0, fine.arguments[0].astype(np.float32))
    if name == "all_to_all_single":
        for sizes in ([1] * (group.size + 1), [-1] * group.size, [0.5] * group.size, 3):
            wrong(f"split sizes {sizes}", input_split_sizes=sizes)
    if name == "monitored_barrier":
        for value in (-1, "x", [], float("nan"), True):
            wrong(f"timeout={value!r}", timeout=value)
    if name in ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"):
        if name == "all_gather_object" or (name == "gather_object" and group.rank == 0):
            wrong("too few slots", name == "gather_object", [])
        if name == "scatter_object_list":
            wrong("no slot", 0, [])
    return found
