"""Bad input: a clear error before anything is sent, buffers untouched, and the group goes on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc

from .arrays import BOOL, COMPLEX, HALVES, INTEGERS

pytestmark = pytest.mark.usefixtures("process_group", "the_group_goes_on")


def refused(
    error: type[Exception], message: str, function: Callable[..., Any], *arguments: Any, **options: Any
) -> None:
    """Synchronous or not, the call raises `error` with `message` and the rank in it, and changes no array."""
    arrays = [a for argument in arguments for a in (argument if isinstance(argument, list) else [argument])]
    arrays = [array for array in arrays if isinstance(array, np.ndarray) and array.dtype != object]
    before = [array.copy() for array in arrays]
    with pytest.raises(error, match=message) as caught:
        function(*arguments, **options)
    assert str(caught.value).endswith(f"(rank {hc.get_rank()})")
    for array, kept in zip(arrays, before, strict=True):
        assert array.tobytes() == kept.tobytes()


# -- dtypes and reductions ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", BOOL + INTEGERS, ids=str)
def test_avg_of_integers(dtype: Any) -> None:
    refused(TypeError, r"all_reduce: ReduceOp\.AVG is not defined for .* use SUM and divide",
            hc.all_reduce, np.ones(3, dtype), "avg")  # fmt: skip


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
@pytest.mark.parametrize("op", ["min", "max", "band", "bor", "bxor"])
def test_order_and_bits_of_complex(dtype: Any, op: str) -> None:
    refused(TypeError, "is not defined for array's dtype complex", hc.all_reduce, np.ones(3, dtype), op)


@pytest.mark.parametrize("dtype", [*HALVES, np.dtype("f4"), np.dtype("f8")], ids=str)
@pytest.mark.parametrize("op", ["band", "bor", "bxor"])
def test_bits_of_floating_point(dtype: Any, op: str) -> None:
    refused(TypeError, "is not defined for array's dtype", hc.all_reduce, np.ones(3, dtype), op)


@pytest.mark.parametrize("dtype", ["M8[s]", "m8[s]", "S3", "U2", [("a", "i4")], "float8_e5m2"], ids=str)
def test_reductions_of_what_has_no_arithmetic(dtype: Any, process_group: hc.ProcessGroup) -> None:
    import ml_dtypes

    dtype = ml_dtypes.float8_e5m2 if dtype == "float8_e5m2" else dtype
    n = process_group.size
    refused(TypeError, "all_reduce: .* is not defined for array's dtype", hc.all_reduce, np.zeros(3, dtype))
    refused(TypeError, "scan: .* is not defined", hc.scan, np.zeros(3, dtype))
    refused(TypeError, "reduce: .* is not defined", hc.reduce, np.zeros(3, dtype), 0)
    outs, ins = np.zeros(2, dtype), np.zeros(2 * n, dtype)
    refused(TypeError, "reduce_scatter_single: .* is not defined", hc.reduce_scatter_single, outs, ins)
    refused(TypeError, "reduce_scatter: .* is not defined", hc.reduce_scatter, outs, np.split(ins, n))
    refused(TypeError, r"arrays\[1\]'s dtype", hc.all_reduce_coalesced, [np.zeros(1), outs])


def test_an_mpi_op_on_what_mpi_cannot_reduce() -> None:
    from mpi4py import MPI

    for dtype in HALVES:
        match = r"all_reduce: ReduceOp\.MPI\.Op is not defined for array's dtype .*float16; convert to float32 first"
        refused(TypeError, match, hc.all_reduce, np.zeros(3, dtype), MPI.LAND)
    refused(TypeError, "scan: .* is not defined for array's dtype .S2", hc.scan, np.zeros(3, "S2"), MPI.LAND)


@pytest.mark.parametrize(("dtype", "factor"), [("i4", 0.5), ("f4", 1j), ("f8", [1.0, 2.0]), ("u1", 1.0), ("f4", "x")])
def test_factors_that_do_not_fit_the_dtype(dtype: str, factor: Any) -> None:
    refused(TypeError, "can't multiply a", hc.all_reduce, np.ones(3, dtype), hc.ReduceOp.PREMUL_SUM(factor))


def test_premul_sum_without_a_factor() -> None:
    refused(TypeError, r"PREMUL_SUM: factor is None; give a number, or use ReduceOp\.SUM", hc.ReduceOp.PREMUL_SUM, None)


def test_premul_sum_of_bool() -> None:
    refused(TypeError, r"PREMUL_SUM\(2\) is not defined", hc.all_reduce, np.ones(3, bool), hc.ReduceOp.PREMUL_SUM(2))


@pytest.mark.parametrize("function", [hc.scan, hc.exscan])
def test_avg_of_a_prefix(function: Any) -> None:
    refused(ValueError, "AVG has no meaning for a prefix", function, np.ones(3), "avg")


def test_unknown_reductions() -> None:
    refused(ValueError, "no reduction is called 'median'; the names are sum, avg", hc.all_reduce, np.ones(1), "median")
    refused(TypeError, "op is 3; expected a ReduceOp", hc.all_reduce, np.ones(1), 3)
    refused(TypeError, "op is a ndarray; expected a ReduceOp", hc.all_reduce, np.ones(1), np.ones(1))
    refused(TypeError, r"write ReduceOp\.PREMUL_SUM\(factor\)", hc.all_reduce, np.ones(1), hc.ReduceOp.PREMUL_SUM)
    refused(
        TypeError,
        r'op is sum; expected a ReduceOp, its name, or an MPI\.Op: write "sum" \(rank',
        hc.all_reduce,
        np.ones(1),
        np.sum,
    )
    refused(TypeError, r'an MPI\.Op: write "max" \(rank', hc.all_reduce, np.ones(1), np.maximum)
    refused(TypeError, r"an MPI\.Op \(rank", hc.all_reduce, np.ones(1), lambda: None)


def test_numpys_names_of_reductions(process_group: hc.ProcessGroup) -> None:
    array = np.array([2.0, 3.0])
    hc.all_reduce(array, "prod")
    np.testing.assert_array_equal(array, np.array([2.0, 3.0]) ** process_group.size)
    hc.all_reduce(array, "mean")
    np.testing.assert_array_equal(array, np.array([2.0, 3.0]) ** process_group.size)


def test_a_refused_reduction_is_one_error_and_not_two() -> None:
    for array in (np.ones(1, int), np.array(["a"])):
        with pytest.raises(TypeError, match="is not defined for array's dtype") as caught:
            hc.all_reduce(array, "avg")
        assert caught.value.__context__ is None


def test_words_of_mpi4py(process_group: hc.ProcessGroup) -> None:
    x = np.zeros(1)
    refused(TypeError, r"reductions are in place: all_reduce\(array, op\)", hc.all_reduce, MPI.IN_PLACE, x, MPI.SUM)
    in_place = r"array is an InPlaceType; .* \(reductions are in place: all_reduce\(array, op\)\)"
    refused(TypeError, in_place, hc.all_reduce, MPI.IN_PLACE)
    refused(TypeError, "array is a BottomType; expected", hc.all_reduce, MPI.BOTTOM)
    for described in ([x, 1, MPI.DOUBLE], (x, MPI.DOUBLE)):
        refused(TypeError, r"\(without count and MPI datatype: the array, or array\[:n\]\)", hc.all_reduce, described)
    refused(TypeError, r"new_group\(comm=\.\.\.\) makes one", hc.barrier, MPI.COMM_WORLD)
    refused(ValueError, r"\(MPI\.ANY_SOURCE: leave src out\)", hc.recv, x, MPI.ANY_SOURCE)
    refused(ValueError, r"\(MPI\.ANY_TAG: a receive names its tag\)", hc.recv, x, tag=MPI.ANY_TAG)


def test_completion_of_a_group_shows_what_programs_use(process_group: hc.ProcessGroup) -> None:
    shown = dir(process_group)
    assert {"rank", "all_reduce", "isend", "irecv", "destroy", "store", "__enter__"} <= {*shown, "__enter__"}
    assert not {"dispatcher", "settings", "give_up", "leave", "peer", "refusal"} & set(shown)
    for name in shown:
        inspect.getattr_static(process_group, name)  # the value of one may be refused: nccl_handle


def test_completion_of_a_work_shows_what_programs_use() -> None:
    work = hc.barrier(async_op=True)
    shown = {name for name in dir(work) if not name.startswith("_")}
    assert {"wait", "result", "get_future", "op_type"} <= shown
    assert len(shown) <= 15
    assert all(hasattr(work, name) for name in shown)
    work.wait()


def test_what_is_no_work_and_no_future() -> None:
    refused(TypeError, "wait_all: an item is a int; expected Works, as isend returns", hc.wait_all, [None, 3])
    refused(TypeError, "wait_any: an item is a int; expected Works, as isend returns", hc.wait_any, [3])
    refused(TypeError, r"collect_all: an item is a int; expected Futures, such as work\.get_", hc.collect_all, [3])
    refused(TypeError, r"Future\.then: callback is 3; expected a function", hc.Future().then, 3)


def test_a_description_that_is_no_text() -> None:
    refused(ValueError, r"group_desc is '\\udcff', which has half a character", hc.new_group, group_desc="\udcff")


def test_messages_by_the_methods_of_a_group(process_group: hc.ProcessGroup) -> None:
    received = np.zeros(2)
    works = [process_group.irecv(received, process_group.rank), process_group.isend(np.ones(2), process_group.rank)]
    assert all(work.wait() for work in works)
    np.testing.assert_array_equal(received, np.ones(2))


# -- what is no array, or not a usable one -----------------------------------------------------------

SINGLE = [hc.all_reduce, hc.scan, hc.broadcast, hc.reduce, hc.isend, hc.irecv]


def arguments_of(function: Any) -> tuple[int, ...]:
    return (0,) if function in (hc.broadcast, hc.reduce, hc.isend, hc.irecv) else ()


@pytest.mark.parametrize("function", SINGLE)
@pytest.mark.parametrize("thing", [3, 2.5, [1.0, 2.0], "text", None, {"a": 1}, np.float64(3), (1, 2), object], ids=str)
def test_what_is_no_array(function: Any, thing: Any) -> None:
    refused(TypeError, "array is an? .*; expected a NumPy or CuPy array", function, thing, *arguments_of(function))


@pytest.mark.parametrize("function", SINGLE)
def test_object_arrays(function: Any) -> None:
    refused(TypeError, r"array holds Python objects .* use the \*_object functions",
            function, np.array([{}, None]), *arguments_of(function))  # fmt: skip


@pytest.mark.parametrize("function", SINGLE)
@pytest.mark.parametrize("dtype", [">f8", ">i2", [("a", ">i4")]], ids=str)
def test_foreign_byte_order(function: Any, dtype: Any) -> None:
    match = r"foreign byte order \(dtype .*>.*newbyteorder\('='\)"
    refused(TypeError, match, function, np.zeros(3, dtype), *arguments_of(function))


@pytest.mark.parametrize("function", SINGLE)
def test_masked_arrays(function: Any) -> None:
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    refused(TypeError, r"the mask would be lost; communicate array\.data and array\.mask",
            function, masked, *arguments_of(function))  # fmt: skip


@pytest.mark.parametrize("function", SINGLE)
@pytest.mark.parametrize(
    ("name", "instead"), [("mask", "its data and its mask"), ("unit", "asarray"), ("units", "asarray")]
)
def test_subclasses_with_more_than_a_buffer(function: Any, name: str, instead: str) -> None:
    subclass = type("Subclass", (np.ndarray,), {name: property(lambda array: None)})  # as astropy's and unyt's
    message = rf"array is a Subclass, and its {name} would be lost; communicate .*{instead}"
    refused(TypeError, message, function, np.ones(2).view(subclass), *arguments_of(function))


def test_a_field_of_a_record_may_be_called_mask(process_group: hc.ProcessGroup) -> None:
    record = np.ones(2, [("mask", "i4"), ("unit", "f8")]).view(np.recarray)
    record.unit += process_group.rank
    hc.broadcast(record, src=0)
    assert (record.mask == 1).all()
    assert (record.unit == 1.0).all()


@pytest.mark.parametrize(
    "readonly", [np.broadcast_to(1.0, 4), memoryview(b"1234"), b"bytes"], ids=["view", "memory", "bytes"]
)
def test_read_only_outputs(readonly: Any, process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    message = r"is read-only, and the result would be written to it; communicate a copy, such as \S+\.copy\(\)"
    refused(ValueError, message, hc.all_reduce, readonly)
    refused(ValueError, message, hc.irecv, readonly, 0)
    refused(ValueError, message, hc.reduce, readonly, me)
    refused(ValueError, message, hc.broadcast, readonly, group_src=(me + 1) % n) if n > 1 else None
    refused(ValueError, message, hc.scatter, readonly)
    refused(ValueError, message, hc.all_gather, [readonly] * n, np.zeros(4))
    refused(ValueError, message, hc.all_gather_single, readonly, np.zeros(4))


def test_outputs_whose_elements_share_memory(process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    output, *others = (np.lib.stride_tricks.as_strided(np.ones(1), (4,), (0,)) for _ in range(n))
    message = r"elements of .* share memory \(strides \(0,\)\), and each would get a result of its own; give a copy"
    refused(ValueError, message, hc.irecv, output, 0)
    refused(ValueError, message, hc.scatter, output)
    refused(ValueError, message, hc.broadcast, output, group_src=(me + 1) % n) if n > 1 else None
    refused(ValueError, message, hc.all_gather, [output, *others], np.zeros(4))
    refused(ValueError, message, hc.all_gather_single, output, np.zeros(4))


def test_read_only_inputs_are_fine(process_group: hc.ProcessGroup) -> None:
    readonly = np.broadcast_to(2.0, 3)
    gathered = np.empty((process_group.size, 3))
    hc.all_gather_single(gathered, readonly)
    assert (gathered == 2).all()
    hc.all_gather_single(gathered.view("u1"), memoryview(b"x" * 24))
    assert gathered.tobytes() == b"x" * 24 * process_group.size
    if process_group.rank == 0:
        hc.broadcast(b"abc", 0)
    else:
        received = bytearray(3)
        hc.broadcast(received, 0)
        assert received == b"abc"


# -- lists, sizes, dtypes of one call ----------------------------------------------------------------


def test_wrong_list_lengths(process_group: hc.ProcessGroup) -> None:
    n = process_group.size
    outputs, array = [np.zeros(2) for _ in range(n + 1)], np.ones(2)
    said = rf"has {n + 1} arrays, but the group has {n} rank"
    refused(ValueError, "all_gather: output_list " + said, hc.all_gather, outputs, array)
    refused(ValueError, "reduce_scatter: input_list " + said, hc.reduce_scatter, array, outputs)
    refused(ValueError, "all_to_all: output_list " + said, hc.all_to_all, outputs, outputs[1:])
    refused(ValueError, "all_to_all: input_list " + said, hc.all_to_all, outputs[1:], outputs)
    if process_group.rank == 0:
        refused(ValueError, "gather: gather_list " + said, hc.gather, array, outputs)
        refused(ValueError, "scatter: scatter_list " + said, hc.scatter, array, outputs)
    refused(ValueError, "all_gather: output_list is empty", hc.all_gather, [], array)


def test_a_list_where_an_array_belongs_and_the_other_way_round(process_group: hc.ProcessGroup) -> None:
    n = process_group.size
    refused(
        TypeError, "output_list is a ndarray; expected a list of arrays; for one array there is the _single form",
        hc.all_gather, np.zeros((n, 2)), np.zeros(2),
    )  # fmt: skip
    for function in (hc.scatter, hc.gather):
        match = r"_list is a ndarray; expected a list of arrays: list\(np\.split\(array, n\)\)"
        refused(TypeError, match, function, np.zeros(2), np.zeros((n, 2)), process_group.rank)
    refused(TypeError, "output_list is a int; expected a list", hc.all_gather, 3, np.zeros(2))
    refused(TypeError, "arrays is a dict; expected a list", hc.all_reduce_coalesced, {"a": np.zeros(1)})
    refused(ValueError, "arrays is empty", hc.all_reduce_coalesced, [])


def test_the_root_needs_its_list_and_the_others_do_not(process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    parts = [np.zeros(2) for _ in range(n)]
    refused(ValueError, "gather_list is missing, and this rank is the destination", hc.gather, parts[0], None, me)
    refused(ValueError, "scatter_list is missing, and this rank is the source", hc.scatter, parts[0], None, me)
    if n > 1:
        other = (me + 1) % n
        refused(ValueError, "gather_list is given, but this rank is not the dest", hc.gather, parts[0], parts, other)
        refused(
            ValueError, "scatter_list is given, but this rank is not the source", hc.scatter, parts[0], parts, other
        )


def test_sizes_that_do_not_fit(process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    parts, wrong = [np.zeros(2) for _ in range(n)], np.ones(3)
    said = rf"\[{me}\] and \w+ have 2 and 3 elements; expected as many"
    refused(ValueError, "output_list" + said, hc.all_gather, parts, wrong)
    refused(ValueError, "input_list" + said, hc.reduce_scatter, wrong, parts)
    refused(ValueError, "gather_list" + said, hc.gather, wrong, parts, me)
    refused(ValueError, "scatter_list" + said, hc.scatter, wrong, parts, me)
    refused(ValueError, r"have 2 and 3 elements; expected as many", hc.all_to_all, parts, [np.zeros(3)] * n)
    said = rf"has {3 * n + 1} elements; expected {3 * n}, {n} ranks times the 3 of"
    refused(ValueError, "output " + said, hc.all_gather_single, np.zeros(3 * n + 1), wrong)
    refused(ValueError, "input " + said, hc.reduce_scatter_single, wrong, np.zeros(3 * n + 1))
    refused(ValueError, r"outputs\[0\] " + said, hc.all_gather_single_coalesced, [np.zeros(3 * n + 1)], [wrong])
    refused(ValueError, r"inputs\[0\] " + said, hc.reduce_scatter_single_coalesced, [wrong], [np.zeros(3 * n + 1)])
    refused(ValueError, "there are 2 outputs and 1 inputs", hc.all_gather_single_coalesced, parts[:1] * 2, [wrong])
    refused(ValueError, "output_lists must be", hc.all_gather_coalesced, [parts] * (n + 1), parts)
    refused(ValueError, r"expected as many", hc.all_gather_coalesced, [[np.zeros(2)]] * n, [wrong])


def test_split_sizes_that_do_not_fit(process_group: hc.ProcessGroup) -> None:
    n = process_group.size
    array = np.zeros((2 * n, 3))
    for wrong in ([2] * (n + 1), [3] * n, [2 * n + 1, *[-1] * (n - 1)] if n > 1 else [-2]):
        refused(ValueError, "input_split_sizes is", hc.all_to_all_single, array.copy(), array, None, wrong)
        refused(ValueError, "output_split_sizes is", hc.all_to_all_single, array.copy(), array, wrong)
    scalar, match = np.array(2 * n), "output_split_sizes is array.*; expected a list of integers"
    refused(TypeError, match, hc.all_to_all_single, array.copy(), array, scalar)
    if n > 1:
        refused(ValueError, r"ranks can't share equally; pass input_split_sizes",
                hc.all_to_all_single, array.copy(), np.zeros((2 * n + 1, 3)))  # fmt: skip
    else:
        refused(ValueError, "this rank sends 9 elements to itself, but output has room for 6",
                hc.all_to_all_single, array.copy(), np.zeros((3, 3)))  # fmt: skip


def test_dtypes_that_differ_within_a_call(process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    singles, doubles = [np.zeros(2, "f4") for _ in range(n)], [np.zeros(2) for _ in range(n)]
    said = "are float32 and float64; expected the same dtype"
    refused(TypeError, said, hc.all_gather, singles, doubles[0])
    refused(TypeError, said, hc.reduce_scatter, doubles[0], singles)
    refused(TypeError, said, hc.gather, doubles[0], singles, me)
    refused(TypeError, said, hc.scatter, doubles[0], singles, me)
    refused(TypeError, said, hc.all_to_all, singles, doubles)
    refused(TypeError, said, hc.all_gather_single, np.zeros(2 * n, "f4"), doubles[0])
    refused(TypeError, said, hc.reduce_scatter_single, singles[0], np.zeros(2 * n))
    refused(TypeError, said, hc.all_to_all_single, np.zeros(n, "f4"), np.zeros(n))
    refused(TypeError, said, hc.all_gather_coalesced, [singles] * n, doubles)
    refused(TypeError, said, hc.all_gather_single_coalesced, [np.zeros(2 * n, "f4")], doubles[:1])
    if n > 1:
        mixed = [*doubles[:-1], singles[0]]
        refused(
            TypeError, rf"\[{n - 1}\] is float32, but output_list\[0\] is float64", hc.all_gather, mixed, doubles[0]
        )


# -- roots and groups --------------------------------------------------------------------------------


def test_roots_that_do_not_exist(process_group: hc.ProcessGroup) -> None:
    n = process_group.size
    refused(ValueError, f"src is {n}, which is not in the group", hc.broadcast, np.zeros(1), n)
    refused(ValueError, f"group_src is {n}; expected 0 to", hc.broadcast, np.zeros(1), group_src=n)
    refused(ValueError, "neither src nor group_src is given", hc.broadcast, np.zeros(1))
    refused(ValueError, "both src and group_src are given", hc.broadcast, np.zeros(1), 0, group_src=0)
    refused(ValueError, "dst is -1, which is not", hc.reduce, np.zeros(1), -1)
    refused(ValueError, "dst is -1, which is not", hc.gather, np.zeros(1), None, -1)
    refused(ValueError, "src is -1, which is not", hc.scatter, np.zeros(1), None, -1)
    refused(ValueError, "src is -1, which is not", hc.broadcast_object_list, [1], -1)


def test_a_group_that_is_none() -> None:
    refused(TypeError, "group is 'world'; expected what new_group returns", hc.barrier, "world")
