"""Tensors on a GPU take the fast path, by DLPack's functions in C: here those of a class, as PyTorch has no GPU."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hpccomm as hc
from hpccomm.core.arrays import device_of_type, look_at_tensors
from hpccomm.cuda import seam
from hpccomm.native import fastpath

from .. import dlpack
from ..arrays import assert_same, contiguous, strided
from . import gpus
from .test_fast_path import NAMES, Arrays, operations, plans, results

__all__ = ["plans"]
pytestmark = pytest.mark.skipif(fastpath is None, reason="without the compiled extension")
CODES = {"i": 0, "u": 1, "f": 2, "V": 4, "c": 5, "b": 6}  # "V": bfloat16


class Tensor:
    """A tensor of PyTorch's on the memory of a CuPy array."""

    __dlpack_c_exchange_api__: Any
    stream: int | None = None  # PyTorch's current one; None: CuPy's

    def __init__(self, array: Any, is_negated: bool = False, is_meta: bool = False, device_type: int = 2) -> None:
        self.array, self.is_negated, self.is_meta, self.device_type = array, is_negated, is_meta, device_type
        self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.strides = (ctypes.c_int64 * array.ndim)(*(each // array.itemsize for each in array.strides))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, self.array.data.device_id

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("the provider of these tests views it")

    def is_neg(self) -> bool:
        """Whether the values are those in memory times -1."""
        return self.is_negated

    def untyped_storage(self) -> Any:
        """Return the owner of the memory."""
        return self.array

    def is_conj(self) -> bool:
        """Whether the values are conjugated."""
        return False


def look_at(tensor: Tensor, seen: Any) -> int:
    array, data = tensor.array, tensor.array.data
    where = None if tensor.is_meta else data.ptr - 16, tensor.device_type, data.device_id, array.ndim
    seen[0] = dlpack.Tensor(*where, CODES[array.dtype.kind], 8 * array.itemsize, 1, tensor.shape, tensor.strides, 16)
    return 0


def current_stream(device_type: int, device: int, found: Any) -> int:
    found[0] = gpus.current_stream() if Tensor.stream is None else Tensor.stream
    return 0


Tensor.__dlpack_c_exchange_api__, FUNCTIONS = dlpack.capsule(look_at, current_stream)


@pytest.fixture
def tensors(plans: list[bool], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """The plans made; the extension and the provider know the class, as they know PyTorch's."""
    fastpath.set_up_tensors((Tensor,), {})
    kind = type(seam.runtime())
    view = kind.as_array
    monkeypatch.setattr(kind, "as_array", lambda self, x: x.array if type(x) is Tensor else view(self, x))
    monkeypatch.setitem(device_of_type, Tensor, "")
    monkeypatch.setattr(Tensor, "stream", None)
    yield plans
    look_at_tensors.cache_clear()  # it sets up PyTorch's again


def of_tensors(on: Arrays, make: Callable[..., Tensor] = Tensor) -> Any:
    return SimpleNamespace(**{name: make(array) for name, array in vars(on).items()})


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64, ml_dtypes.bfloat16])
def test_no_operation_needs_a_plan(
    process_group: hc.ProcessGroup, tensors: list[bool], dtype: Any, name: str, async_op: bool
) -> None:
    on = Arrays(process_group, dtype)
    if name == "reduce" and dtype is np.complex64:
        return  # it has no order
    work = operations(process_group, async_op)[name](of_tensors(on))
    if async_op:
        work.wait()
    results(process_group, name, on)
    assert not tensors


MANAGED = 13  # of CUDA and of the host: DLPack has a number of its own
LEFT = {"negated": {"is_negated": True}, "without memory": {"is_meta": True}, "managed": {"device_type": MANAGED}}


@pytest.mark.parametrize("why", [*LEFT, "gaps", "another stream", "hidden"])
@pytest.mark.parametrize("name", NAMES)
def test_others_are_left_to_the_checks(
    process_group: hc.ProcessGroup, tensors: list[bool], monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    on = Arrays(process_group, layout=strided if why == "gaps" else contiguous)
    if why == "another stream":  # the checked way makes CuPy's wait for it
        monkeypatch.setattr(Tensor, "stream", gpus.current_stream() + 64)
    if why == "hidden":  # a device is registered, whose arrays may be of this class
        monkeypatch.delitem(device_of_type, Tensor)
    operations(process_group)[name](of_tensors(on, partial(Tensor, **LEFT.get(why, {}))))
    results(process_group, name, on)
    assert len(tensors) == 1


def test_messages(process_group: hc.ProcessGroup, tensors: list[bool]) -> None:
    n, me = process_group.size, process_group.rank
    on = Arrays(process_group)
    works = hc.batch_isend_irecv([
        hc.P2POp(hc.isend, Tensor(on.one), (me + 1) % n), hc.P2POp(hc.irecv, Tensor(on.other), (me - 1) % n)
    ])  # fmt: skip
    for work in works:
        work.wait()
    assert_same(gpus.values(on.other), np.full(4, (me - 1) % n + 1, np.float32))
    if n > 1:
        if me == 0:
            hc.send(Tensor(on.one), 1)
        elif me == 1:
            assert hc.recv(Tensor(on.other), 0) == 0
            assert_same(gpus.values(on.other), np.full(4, 1, np.float32))
    assert not tensors


def test_parts_are_rows_of_the_first_axis(process_group: hc.ProcessGroup, tensors: list[bool]) -> None:
    n = process_group.size
    array, into = (gpus.array(np.ones((n, 2), np.float32)) for _ in range(2))
    hc.all_to_all_single(Tensor(into), Tensor(array))
    assert not tensors
    flat, one = (gpus.array(np.ones(shape, np.float32)) for shape in ((1, 2 * n), (1, 2 * n)))
    if n > 1:
        with pytest.raises(ValueError, match=r"1 row"):
            hc.all_to_all_single(Tensor(one), Tensor(flat))


def test_an_operation_in_flight_keeps_its_tensor(process_group: hc.ProcessGroup, tensors: list[bool]) -> None:
    tensor = Tensor(gpus.array(np.ones(4)))
    known = weakref.ref(tensor)
    work = hc.all_reduce(tensor, async_op=True)
    assert work.result() is tensor
    assert "all_reduce" in repr(work)
    del tensor
    assert known() is not None
    work.wait()
    hc.synchronize() if hasattr(hc, "synchronize") else work.synchronize()
    del work
    hc.barrier()
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("name", ["all_reduce", "all_gather_single", "isend"])
def test_an_operation_in_flight_keeps_the_memory_that_its_tensor_had(
    process_group: hc.ProcessGroup, tensors: list[bool], machine: Any, name: str
) -> None:
    machine.held = True
    tensor = Tensor(gpus.array(np.ones(1000)))
    into = Tensor(gpus.array(np.ones(1000 * process_group.size)))
    if name == "all_reduce":
        works = [hc.all_reduce(tensor, async_op=True)]
    elif name == "all_gather_single":
        works = [hc.all_gather_single(into, tensor, async_op=True)]
    else:
        to, source = (process_group.rank + 1) % process_group.size, (process_group.rank - 1) % process_group.size
        other = Tensor(gpus.array(np.ones(1000)))
        works = hc.batch_isend_irecv([hc.P2POp(hc.isend, tensor, to), hc.P2POp(hc.irecv, other, source)])
    known = weakref.ref(tensor.array)
    tensor.array = gpus.array(np.zeros(3))  # as `tensor.data = ...`
    assert known() is not None
    races = list(machine.races)
    machine.held = False
    for work in works:
        work.wait()
    assert not races
    assert not tensors


def test_a_list_may_change_while_its_tensors_are_looked_at(
    process_group: hc.ProcessGroup, tensors: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = [gpus.array(np.ones(3)) for _ in range(8)]
    given = [Tensor(array) for array in arrays]

    def is_neg(_: Tensor) -> bool:
        del given[1:]
        return False

    monkeypatch.setattr(Tensor, "is_neg", is_neg)
    hc.all_reduce_coalesced(given, async_op=True).wait()
    assert not tensors
    for array in arrays:
        assert_same(gpus.values(array), np.full(3, float(process_group.size)))


def test_functions_of_another_version_are_left_alone() -> None:
    new_class, functions = dlpack.capsule(look_at, current_stream)
    functions.major = 2
    for attributes in ({"__dlpack_c_exchange_api__": new_class}, {"__dlpack_c_exchange_api__": 1}, {}):
        kind = type("Tensor", (), attributes)
        torch = SimpleNamespace(Tensor=kind, nn=SimpleNamespace(Parameter=kind))
        assert look_at_tensors.__wrapped__(torch) == ()
