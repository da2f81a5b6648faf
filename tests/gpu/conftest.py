"""The tests of GPU arrays: on a real GPU where there is one, otherwise on the stand-in."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.cuda import seam
from hpccomm.job.cuda_aware import cuda_awareness

if os.environ.get("GPU_TESTS_ON") in ("bindings", "nccl4py", "ctypes"):
    from .bindings import provider  # noqa: F401  # before CuPy looks for libnccl

    collect_ignore = [
        *("test_provider.py", "test_cupy_runtime.py"),  # which look at CuPy as it is
        *("test_kernels.py", "test_jobs.py", "test_mpi4pys_own.py"),  # which ask none, or start jobs with another
    ]
if importlib.util.find_spec("cupy") is None:
    collect_ignore_glob = ["test_*.py"]  # there are no GPU arrays without CuPy
else:
    from . import gpus


@pytest.fixture(scope="package", autouse=True)
def _provider() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not gpus.is_real():
            patch.setenv("HPCCOMM_GPU_PROVIDER", gpus.PROVIDER)
            watch_cuda_aware_mpi(patch)
        patch.setattr("hpccomm.nccl.last_operation.LastOperation.due", math.inf)  # marking takes calls of CUDA
        gpus.use_own()
        forget_provider()
        yield
    forget_provider()


def watch_cuda_aware_mpi(patch: pytest.MonkeyPatch) -> None:
    """Take note of the GPU memory that the host gives to MPI."""
    from hpccomm.mpi.cuda_aware_backend import CudaAwareBackend

    from .stand_in import CudaAwareComm

    made = CudaAwareBackend.__init__

    def make(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        self._comm = CudaAwareComm(self._comm)

    patch.setattr(CudaAwareBackend, "__init__", make)


def forget_provider() -> None:
    seam.runtime.cache_clear()
    seam.nccl.cache_clear()


@pytest.fixture(scope="module")
def process_group() -> Iterator[hc.ProcessGroup]:
    """A world whose ranks are connected, each on its own GPU: a test does not depend on those before it."""
    with hc.init_process_group() as group:
        if gpus.connectable(group.size) == group.size:
            hc.all_reduce(gpus.array(np.ones(1)))
        yield group


TRANSPORTS = ["nccl", "mpi", "CUDA-aware mpi"]


@pytest.fixture(scope="module", params=TRANSPORTS)
def groups(process_group: hc.ProcessGroup, request: pytest.FixtureRequest) -> Iterator[list[hc.ProcessGroup]]:
    """The world, a group of two in reverse order, and a group of one: those that this rank is in; GPU arrays over..."""
    backend = f"cpu:mpi,cuda:{request.param.split()[-1]}"
    if request.param == "CUDA-aware mpi" and gpus.is_real() and not cuda_awareness().is_proven:
        pytest.skip("the MPI library is not CUDA-aware")
    last = process_group.size - 1
    made = [
        hc.new_group(backend=backend, group_desc="everybody"),
        hc.new_group([last], backend=backend, group_desc="alone"),
    ]
    if last > 0:
        made.append(hc.new_group([last, 0], backend=backend, sort_ranks=False, group_desc="reversed"))
    mine = [group for group in made if isinstance(group, hc.ProcessGroup)]
    for group in mine:
        if not gpus.is_real():
            group.settings = group.settings._replace(cuda_aware="CUDA-aware" in request.param)
        hc.all_reduce(gpus.array(np.ones(1)), group=group)
    yield mine
    for group in mine:
        group.destroy()


@pytest.fixture(autouse=True)
def _no_races() -> Iterator[None]:
    """Fail the test in which two uses of the same memory were not ordered."""
    yield
    if not gpus.is_real():
        from .stand_in import MACHINE

        races, MACHINE.races = MACHINE.races, []
        assert not races


@pytest.fixture(autouse=True)
def _no_context_on_the_gpu_of_another_rank(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test in which this process takes memory (some 500 MB) of a GPU that is not its own."""
    if gpus.is_real():
        yield
        return
    from .stand_in import MACHINE, OWN

    MACHINE.contexts.clear()
    yield
    if request.node.get_closest_marker("several_gpus") is None:
        assert MACHINE.contexts <= {OWN}


@pytest.fixture
def no_world_left() -> Iterator[None]:
    """Destroy the world that a test has made and left."""
    yield
    if hc.is_initialized():
        hc.destroy_process_group()


@pytest.fixture
def machine() -> Iterator[Any]:
    """The stand-in's machine, for events that no real one makes on demand; its settings are reset afterwards."""
    if gpus.is_real():
        pytest.skip("needs the stand-in")
    from .stand_in import MACHINE, Machine

    MACHINE.calls.clear()
    yield MACHINE
    fresh = Machine()
    for setting in (
        "devices",
        "identities",
        "device",
        "held",
        "capturing",
        "version",
        "has_all_to_all",
        "has_symmetric",
        "failures",
        "cuda_failures",
        "async_error",
        "blind",
    ):
        setattr(MACHINE, setting, getattr(fresh, setting))


@pytest.fixture(autouse=True)
def _the_watchdog_asks_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the watchdog's thread from asking the stand-in for events: the order would depend on the time."""
    monkeypatch.setattr("hpccomm.debug.watchdog._gpu_is_busy", lambda work: False)
