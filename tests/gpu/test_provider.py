"""The provider made of CuPy and libnccl, as far as it goes without a GPU; and the errors if it is missing."""

from __future__ import annotations

import builtins
import ctypes
import sys
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.cuda import seam
from hpccomm.cuda.time_limit import TimeLimit
from hpccomm.nccl import find, libnccl

from ..launch import launch
from . import gpus
from .conftest import forget_provider


@pytest.fixture
def cupy_nccl(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("HPCCOMM_GPU_PROVIDER", raising=False)
    try:
        from hpccomm.nccl import cupy_nccl
    except ImportError as error:
        pytest.skip(f"needs libnccl: {error}")
    forget_provider()
    yield cupy_nccl
    forget_provider()


@pytest.mark.serial
def test_result_codes_beyond_cupys_own_table(cupy_nccl: Any) -> None:
    nccl = seam.nccl()
    raised = []
    for code in range(1, 9):
        try:
            cupy_nccl.nccl.check_status(code)
        except Exception as error:
            raised.append(error)
    raised += [libnccl.NCCLError(code) for code in range(1, 9)]  # those of our own calls
    assert [nccl.result_code(error) for error in raised] == [*range(1, 9), *range(1, 9)]
    assert nccl.explain(raised[6]).startswith("ncclInProgress (7)")
    assert nccl.explain(raised[7]).startswith("ncclTimeout (8)")
    assert nccl.explain(KeyError("array")) is None
    assert nccl.explain(ValueError()) is None


@pytest.mark.serial
def test_it_has_what_the_seam_names(cupy_nccl: Any) -> None:
    nccl = seam.nccl()
    assert nccl.version() > 21800
    assert nccl.has_all_to_all == (nccl.version() >= 22800)
    assert nccl.unique_id() != nccl.unique_id()
    made = cupy_nccl.nccl.NcclCommunicator
    for comm in (
        libnccl.Communicator(nccl.library, ctypes.c_void_p(), None),
        cupy_nccl.Communicator(nccl.library, made.__new__(made)),
    ):
        for name in seam.Communicator.__dict__:
            assert name.startswith("_") or hasattr(comm, name)
        comm.group_start()
        comm.group_end()
    has = {"ncclAlltoAll": 22800, "ncclAllReduceConfig": 23100}  # since these versions
    assert {name: name in nccl.library for name in has} == {name: nccl.version() >= has[name] for name in has}
    for name in set(libnccl.FUNCTIONS) - {f"{each}Config" for each in libnccl.COLLECTIVES.values()} - {"ncclAlltoAll"}:
        assert name in nccl.library


@pytest.mark.serial
def test_the_last_error_is_told(cupy_nccl: Any) -> None:
    if gpus.is_real():
        pytest.skip("here is a GPU")
    nccl = seam.nccl()
    for time_limit in (None, TimeLimit(20)):
        with pytest.raises(Exception, match=r"NCCL|ncclUnhandledCudaError") as caught:
            nccl.connect(1, nccl.unique_id(), 0, time_limit)
        assert nccl.explain(caught.value).startswith("ncclUnhandledCudaError (1): Cuda failure")


def test_without_a_driver_every_rank_learns_that_there_is_no_gpu(cupy_nccl: Any) -> None:
    if gpus.is_real():
        pytest.skip("here is a GPU")
    with hc.init_process_group(), pytest.raises(hc.DistBackendError, match="rank 0 has no usable GPU: cudaError"):
        hc.all_reduce(host_array())


def host_array() -> Any:
    from . import stand_in

    return stand_in.Machine().array(np.ones(2), 0, 0)


@pytest.mark.parametrize("missing", ["cupy", "libnccl"])
def test_what_is_missing_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    array = host_array()
    monkeypatch.delenv("HPCCOMM_GPU_PROVIDER", raising=False)
    for name in (
        "hpccomm.cuda.cupy_runtime",
        "hpccomm.nccl.providers",
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)
    forget_provider()
    if missing == "cupy":
        original = builtins.__import__

        def without_cupy(name: str, *arguments: Any, **options: Any) -> Any:
            if name.split(".")[0] == "cupy":
                raise ImportError("No module named 'cupy'")
            return original(name, *arguments, **options)

        monkeypatch.setattr(builtins, "__import__", without_cupy)
    else:
        for module in ("cupy_nccl", "nccl4py_nccl"):
            monkeypatch.setitem(sys.modules, f"hpccomm.nccl.{module}", None)  # to import it is an ImportError
        monkeypatch.setattr(find, "_by_pathfinder", lambda: None)
        monkeypatch.setattr(find, "NAMES", ("libnccl.so.none",))
    match = {
        "cupy": r"can't be loaded: CuPy, which hpccomm needs.*No module named 'cupy'.*pip install 'hpccomm\[cuda13\]'",
        "libnccl": r"can't be loaded: there is no NCCL library \(libnccl.so.none\): pip install 'hpccomm\[cuda13\]'",
    }[missing]
    with hc.init_process_group(), pytest.raises(hc.DistBackendError, match=match):
        hc.all_reduce(array)
    assert not hc.is_nccl_available()
    monkeypatch.undo()
    forget_provider()


@pytest.mark.serial
def test_host_operations_do_not_import_cupy() -> None:
    program = (
        "import sys, numpy as np, hpccomm as hc\n"
        "with hc.init_process_group(): hc.all_reduce(np.ones(3)); hc.barrier()\n"
        "assert not {'cupy', 'hpccomm.cuda.seam', 'hpccomm.nccl'} & set(sys.modules), 'imported'\n"
    )
    done = launch(2, sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
