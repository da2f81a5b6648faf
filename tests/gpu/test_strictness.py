"""The stand-in is as strict as a GPU: hpccomm is changed in one place, and the stand-in notices it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.cuda import seam
from hpccomm.cuda.packing import Packing
from hpccomm.cuda.time_limit import TimeLimit
from hpccomm.nccl import connection, libnccl

from ..arrays import strided
from ..launch import ROOT, clean_environment
from . import gpus, smoke

SIZE = MPI.COMM_WORLD.Get_size()
pytestmark = pytest.mark.skipif(gpus.is_real(), reason="needs the stand-in")

# -- the host reads or writes the GPU's memory -------------------------------------------------------

PROGRAM = """\
import resource
import tempfile
import numpy as np
from mpi4py import MPI
import hpccomm as hc
from hpccomm.cuda import packing, staged_backend
from hpccomm.job import cuda_aware
from tests.gpu import gpus

def directly(array):
    return np.frombuffer(MPI.buffer.fromaddress(array.data.ptr, array.nbytes), array.dtype).reshape(array.shape)

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
{change}
with tempfile.TemporaryDirectory() as folder, hc.init_process_group("cpu:mpi,cuda:mpi"):
    array, output = gpus.array(np.arange(4.0)), gpus.array(np.zeros(4))
    hc.all_gather_single(output, array)
    np.testing.assert_array_equal(gpus.values(output), np.arange(4.0))
    hc.checkpoint.save(folder, {{"x": output}}, 1)
    np.testing.assert_array_equal(hc.checkpoint.load(folder).arrays["x"], np.arange(4.0))
"""
CHANGES = {
    "MPI without CUDA is given GPU memory": (
        "cuda_aware.asked_of_the_library = lambda: cuda_aware.CudaAwareness(True, '')"
    ),
    "no copy to the host": "staged_backend.SmallStaging.on_host = lambda staging, array, *uses: directly(array)",
    "no copy for a checkpoint": "packing.on_the_host = lambda array, host=None: directly(array)",
}


@pytest.mark.once
@pytest.mark.parametrize("change", ["", *CHANGES])
def test_the_host_has_no_access_to_the_gpus_memory(change: str) -> None:
    environment = {"GPU_TESTS_ON": "", "HPCCOMM_GPU_PROVIDER": "tests.gpu.stand_in"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(change=CHANGES.get(change, ""))],
        cwd=ROOT, env={**clean_environment(), **environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == (-signal.SIGSEGV if change else 0), ended.stderr


@pytest.mark.usefixtures("process_group")
def test_the_gpu_has_no_access_to_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_the_host(packing: Packing, shape: tuple[int, ...], dtype: Any) -> Any:
        host = np.empty(shape, dtype)
        memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, device_id=gpus.own())
        packing.alive.append(cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0)))
        return packing.alive[-1]

    array, op = gpus.array(np.ones(4), strided), hc.ReduceOp.PREMUL_SUM(2)  # is planned
    hc.all_reduce(array, op)
    monkeypatch.setattr(Packing, "empty", on_the_host)
    with pytest.raises(Exception, match="cudaErrorIllegalAddress"):
        hc.all_reduce(array, op)


# -- kernels that are loaded behind one that waits ---------------------------------------------------


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks")
@pytest.mark.parametrize(
    ("forgets", "late"), [(None, None), ("load_copies", "copies"), ("load_additions", "an addition")]
)
def test_kernels_are_loaded_before_a_message_is_waited_for(
    process_group: hc.ProcessGroup,
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
    forgets: str | None,
    late: str | None,
) -> None:
    runtime = type(seam.runtime())
    monkeypatch.setattr(machine, "loaded", set())
    monkeypatch.setattr(connection, "HAVE_KERNELS", set())
    if forgets is not None:
        monkeypatch.setattr(runtime, forgets, lambda *_: None)
    with hc.new_group() as group:
        grid = hc.new_grid((group.size, 1), periodic=True, group=group)
        for change in (hc.halo_exchange, hc.halo_accumulate):
            change(gpus.array(np.ones((4, 4)), strided), grid)
            change(gpus.array(np.ones((4, 4, *[2] * 9)), strided), grid, axes=(0, 1))
        sent, output = gpus.array(np.ones((4, 4), "i2")), gpus.array(np.ones((4, 4), "i2"), strided)
        after, before = (group.rank + 1) % SIZE, (group.rank - 1) % SIZE
        hc.sendrecv(sent, after, output, before, group=group)
    races, machine.races = machine.races, []
    assert {race.split("'")[1] for race in races if " is loaded behind" in race} == ({late} if late else set())


# -- calls that end the capture of another thread ----------------------------------------------------


@pytest.mark.parametrize("forgets", [False, True])
def test_threads_of_hpccomms_do_not_end_captures(
    process_group: hc.ProcessGroup, machine: Any, monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    def in_a_thread(function: Callable[[], object]) -> None:
        thread = threading.Thread(target=function, name="hpccomm-test")
        thread.start()
        thread.join()

    if forgets:  # to relax their mode
        monkeypatch.setattr(type(seam.runtime()), "relax_captures", lambda runtime: None)
    group = hc.new_group()
    hc.all_reduce(gpus.array(np.ones(3)), group=group)
    machine.held = True
    works = [hc.all_reduce(gpus.array(np.ones(3)), async_op=True) for _ in range(2)]
    machine.held = False
    with gpus.captured():
        for function in (works[0].is_completed, works[1].synchronize):
            in_a_thread(function)
        group.destroy()  # in a thread, with a time limit
    races, machine.races = machine.races, []
    ended = {race.partition(" while a thread captures")[0] for race in races}
    waits = {"the host waits for an event", "the host waits for a stream"}
    assert ended == ({"an event is asked for", *waits} if forgets else set())


# -- connecting when it is needed, and calls that do not block ---------------------------------------


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks")
def test_who_takes_groups_in_another_order_than_the_other_rank_connects_with_nobody(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpccomm.core.dispatcher._order_of", lambda dispatcher: 0)
    groups = [hc.new_group(on_timeout="raise", timeout=2) for _ in range(2)]
    for group in groups:
        hc.all_reduce(gpus.array(np.ones(1)), group=group)
    if process_group.rank < 2:
        first, second = groups if process_group.rank == 0 else reversed(groups)
        array, peer = gpus.array(np.ones(3)), 1 - process_group.rank
        received = hc.P2POp(hc.irecv, gpus.array(np.zeros(3)), peer, first)
        with pytest.raises(hc.DistTimeoutError, match="NCCL has not connected"):
            hc.batch_isend_irecv([received, hc.P2POp(hc.isend, array, peer, second)])
    for group in groups:
        group.dispatcher.backends["cuda"].abort()
        group.dispatcher.in_flight.clear()
    hc.barrier()


def goes_on_at_once(comm: libnccl.Communicator, code: int) -> None:
    if code not in (libnccl.SUCCESS, libnccl.IN_PROGRESS):
        raise libnccl.NCCLError(code)


def takes_the_answer_for_the_end(comm: libnccl.Communicator, color: int, key: int, limit: TimeLimit) -> Any:
    made = libnccl.COMM()
    comm.finish(comm._library["ncclCommSplit"](comm._comm, color, key, made, libnccl.Config(blocking=False)))
    return libnccl.Communicator(comm._library, made, limit) if made else None


def does_not_finalize(comm: libnccl.Communicator) -> None:
    comm.finish(comm._library["ncclCommDestroy"](comm._comm))


@pytest.mark.once
@pytest.mark.parametrize(
    ("method", "instead"),
    [("finish", goes_on_at_once), ("split", takes_the_answer_for_the_end), ("destroy", does_not_finalize)],
)
def test_calls_that_do_not_block_answer_before_their_end(
    monkeypatch: pytest.MonkeyPatch, method: str, instead: Callable[..., object]
) -> None:
    if not gpus.IS_BINDINGS:
        pytest.skip("below hpccomm's own provider, in the run with GPU_TESTS_ON=bindings")
    smoke.nccl_not_blocking()
    monkeypatch.setattr(libnccl.Communicator, method, instead)
    with pytest.raises((libnccl.NCCLError, AssertionError)):
        smoke.nccl_not_blocking()
