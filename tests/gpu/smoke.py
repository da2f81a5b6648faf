"""Small checks of the GPU half, each a process of its own: python -m tests.gpu.smoke NAME (tools/gpu-first runs all).

Each calls some functions of the seam, or of hpccomm, once, on one rank, and looks at the values. Status 77: not here.
Without a GPU they run over the stand-in.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.cuda import seam
from hpccomm.cuda.time_limit import TimeLimit
from hpccomm.nccl import intra_node

from ..arrays import strided
from . import gpus

SKIPPED = 77
FLOAT64, SUM = 8, 0  # nccl.h
CHECKS: dict[str, Callable[[], object]] = {}


def check(function: Callable[[], object]) -> Callable[[], object]:
    CHECKS[function.__name__] = function
    return function


def skip(reason: str) -> None:
    print(reason)
    sys.exit(SKIPPED)


def same(array: Any, expected: Any) -> None:
    np.testing.assert_array_equal(gpus.values(array), expected)


def on_a_gpu() -> tuple[seam.Runtime, int, int]:
    """Return CUDA, the number of the current GPU, and a new stream of it."""
    runtime = seam.runtime()
    runtime.use_device(gpus.own())
    return runtime, gpus.own(), runtime.create_stream(gpus.own())


# -- CUDA, through the seam ------------------------------------------------------------------------------------------


@check
def devices() -> None:
    runtime = seam.runtime()
    count = runtime.device_count()
    names = [runtime.identity(device) for device in range(count)]
    assert count == len(set(names)) > 0
    runtime.use_device(gpus.own())
    assert runtime.current_device() == gpus.own()
    print(count, "GPU(s):", *names)


@check
def streams_and_events() -> None:
    runtime, device, stream = on_a_gpu()
    other, event = runtime.create_stream(device), runtime.create_event(device)
    runtime.record(event, stream)
    runtime.wait(other, event)
    runtime.synchronize_stream(other)
    runtime.synchronize_event(event)
    assert runtime.is_done(event)
    assert not runtime.is_capturing(stream)
    runtime.destroy_event(event)
    for each in (stream, other):
        runtime.destroy_stream(each)


@check
def an_event_behind_work_passes() -> None:
    runtime, device, _ = on_a_gpu()
    array = gpus.array(np.zeros(1000))
    gpus.write(array, np.arange(1000.0))
    event = runtime.create_event(device)
    runtime.record(event, gpus.current_stream())
    while not runtime.is_done(event):
        time.sleep(1e-3)
    same(array, np.arange(1000.0))


def _copied(dtype: Any) -> None:
    runtime, device, _ = on_a_gpu()
    stream, wanted = gpus.current_stream(), np.arange(12).reshape(3, 4).astype(dtype)
    source = gpus.array(wanted)
    packed, back = runtime.empty((4, 3), source.dtype, device, stream), gpus.array(np.zeros((4, 6), dtype))
    runtime.copy(packed, source.T, stream)
    same(packed, wanted.T)
    runtime.copy(back[:, ::2], packed, stream)
    same(back[:, ::2], wanted.T)
    same(back[:, 1::2], np.zeros((4, 3), dtype))


@check
def copies_of_strided_arrays() -> None:
    for dtype in ("u1", "f2", "f4", "f8", "c8", "c16"):
        _copied(dtype)


@check
def many_strided_arrays_are_copied_at_once() -> None:
    runtime, device, _ = on_a_gpu()
    stream, pairs, wanted = gpus.current_stream(), [], []
    for number in range(40):
        values = np.arange(24).reshape(2, 3, 4).astype(("u1", "f2", "f4", "f8", "c16")[number % 5]) + number
        pairs.append((runtime.empty((4, 3, 2), values.dtype, device, stream), gpus.array(values).T))
        wanted.append(values.T)
    for launch in runtime.copies(pairs):
        launch(stream)
    for (target, _), values in zip(pairs, wanted):
        same(target, values)


@check
def kernels_that_copy_are_loaded_early() -> None:
    runtime, device, stream = on_a_gpu()
    runtime.relax_captures()
    began = time.monotonic()
    runtime.load_copies(device, stream)
    runtime.synchronize_stream(stream)
    print(f"{time.monotonic() - began:.2f} s")


@check
def kernels_that_add_are_loaded_early() -> None:
    runtime, device, stream = on_a_gpu()
    began = time.monotonic()
    for dtype in ("f4", "c16"):
        runtime.load_additions(np.dtype(dtype), 3, device, stream)
    runtime.synchronize_stream(stream)
    print(f"{time.monotonic() - began:.2f} s")
    target, source = gpus.array(np.ones((2, 2, 2), "f4"), strided), gpus.array(np.ones((2, 2, 2), "f4"))
    runtime.add(target, source, gpus.current_stream())
    same(target, np.full((2, 2, 2), 2))


@check
def copies_of_dtypes_of_ml_dtypes() -> None:
    if importlib.util.find_spec("ml_dtypes") is None:
        skip("ml_dtypes is not installed")
    import ml_dtypes

    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        _copied(dtype)


@check
def arithmetic() -> None:
    runtime, _, _ = on_a_gpu()
    stream = gpus.current_stream()
    for dtype in ("f4", "f8", "c16", "i8"):
        values = np.arange(6).astype(dtype)
        one, two = gpus.array(values), gpus.array(np.repeat(values, 2))[::2]
        runtime.add(one, two, stream)
        same(one, 2 * values)
        runtime.multiply(two, one, np.dtype(dtype).type(3), stream)
        same(two, 6 * values)


@check
def to_the_host_and_back() -> None:
    runtime, _, _ = on_a_gpu()
    stream, wanted = gpus.current_stream(), np.arange(1000.0)
    pinned = runtime.pinned(wanted.nbytes)
    runtime.to_host(pinned, gpus.array(wanted), stream)
    runtime.synchronize_stream(stream)
    np.testing.assert_array_equal(pinned.view("f8"), wanted)
    back = gpus.array(np.zeros(1000))
    runtime.to_device(back, pinned, stream)
    same(back, wanted)


@check
def memory_for_other_processes() -> None:
    runtime, device, stream = on_a_gpu()
    memory = runtime.allocate(4096, device)
    runtime.clear(memory, 4096, stream)
    array = gpus.array(np.ones(512))
    runtime.synchronize_stream(gpus.current_stream())
    runtime.copy_bytes(array.data.ptr, memory, 4096, stream)
    runtime.synchronize_stream(stream)
    same(array, np.zeros(512))
    print("handle of", len(runtime.ipc_handle(memory)), "bytes")
    runtime.free(memory)


@check
def kernels_within_a_node_compile() -> None:
    runtime, device, _ = on_a_gpu()
    for ranks in (2, 4, 8):
        runtime.compile_intra_node(ranks, ranks - 1, device)


@check
def kernels_within_a_node_meet() -> None:
    """Run the kernels of several ranks at once in this process, a stream for each; modules are to be loaded eagerly."""
    if not gpus.is_real():
        skip("there is no GPU")
    for ranks, blocks in ((2, intra_node.BLOCKS), (4, intra_node.BLOCKS), (8, 16)):  # all of them fit on 132 SMs
        for algorithm in ("one_shot", "two_shot"):
            _kernels_meet(ranks, blocks, algorithm)


def _kernels_meet(ranks: int, blocks: int, algorithm: str) -> None:
    runtime, device, _ = on_a_gpu()
    values = np.random.default_rng(ranks).integers(100, size=(ranks, 4096)).astype("f4")
    nbytes = values[0].nbytes
    streams = [runtime.create_stream(device) for _ in range(ranks)]
    arrays = [gpus.array(each) for each in values]
    sums = [gpus.array(np.zeros(4096, "f4")) for _ in range(ranks)]
    memory = [runtime.allocate(intra_node.WHOLE_BYTES, device) for _ in range(ranks)]
    for rank in range(ranks):
        runtime.compile_intra_node(ranks, rank, device)
        runtime.clear(memory[rank], intra_node.FLAG_BYTES, streams[rank])
        runtime.synchronize_stream(streams[rank])
    runtime.synchronize_stream(gpus.current_stream())
    pointers, began = intra_node._pointers(memory, by_host=False), time.monotonic()
    for _ in range(500):
        for rank, stream in enumerate(streams):
            runtime.copy_bytes(memory[rank] + intra_node.FLAG_BYTES, arrays[rank].data.ptr, nbytes, stream)
            kernel = seam.Kernel(algorithm, "float32", ranks, rank)
            shape = blocks, intra_node.THREADS
            runtime.intra_node_kernel(kernel, shape, sums[rank].data.ptr, pointers, nbytes // 16, stream)
    for stream in streams:
        runtime.synchronize_stream(stream)
    print(f"{ranks} ranks, {algorithm}: {(time.monotonic() - began) / 500 * 1e6:.1f} us")
    for each in sums:
        same(each, values.sum(axis=0))
    for each in memory:
        runtime.free(each)


@check
def errors_are_explained() -> None:
    runtime = seam.runtime()
    with pytest.raises(Exception, match=r".") as raised:
        runtime.use_device(4096)
    assert "invalid device ordinal" in str(runtime.explain(raised.value)), raised.value
    assert runtime.explain(KeyError("x")) is None


# -- NCCL, through the seam ------------------------------------------------------------------------------------------


def _connected(time_limit: TimeLimit | None) -> seam.Communicator:
    nccl = seam.nccl()
    seam.runtime().use_device(gpus.own())
    comm = nccl.connect(1, nccl.unique_id(), 0, time_limit)
    print("NCCL", nccl.version(), "ncclAlltoAll:", nccl.has_all_to_all)
    return comm


def _reduces(comm: seam.Communicator) -> None:
    mine, sums = gpus.array(np.arange(8.0)), gpus.array(np.zeros(8))
    comm.all_reduce(mine.data.ptr, sums.data.ptr, 8, FLOAT64, SUM, gpus.current_stream())
    same(sums, np.arange(8.0))
    assert comm.async_error() is None


@check
def nccl_blocking() -> None:
    comm = _connected(None)
    _reduces(comm)
    assert comm.split(-1, 0, None) is None
    child = comm.split(0, 0, None)
    assert child is not None
    _reduces(child)
    child.destroy()
    comm.destroy()


@check
def nccl_not_blocking() -> None:
    comm = _connected(TimeLimit(10))
    _reduces(comm)
    child = comm.split(0, 0, TimeLimit(10))
    assert child is not None, "ncclCommSplit gave no communicator"
    _reduces(child)
    child.destroy()
    comm.destroy()


@check
def nccl_aborts() -> None:
    for limit in (None, TimeLimit(10)):
        comm = _connected(limit)
        _reduces(comm)
        comm.abort()


@check
def nccl_group() -> None:
    comm = _connected(None)
    sent, received = gpus.array(np.arange(4.0)), gpus.array(np.zeros(4))
    comm.group_start()
    comm.send(sent.data.ptr, 4, FLOAT64, 0, gpus.current_stream())
    comm.recv(received.data.ptr, 4, FLOAT64, 0, gpus.current_stream())
    comm.group_end()
    same(received, np.arange(4.0))
    comm.destroy()


# -- hpccomm ---------------------------------------------------------------------------------------------------------


@check
def collectives() -> None:
    with hc.init_process_group():
        for layout in (slice(None), slice(None, None, -2)):
            array = gpus.array(np.arange(10.0))[layout]
            wanted = np.arange(10.0)[layout]
            hc.all_reduce(array)
            hc.broadcast(array, 0)
            out = gpus.array(np.zeros(wanted.size))
            hc.all_gather_single(out, array)
            same(out, wanted)
            hc.reduce_scatter_single(array, out)
            hc.all_reduce(array, async_op=True).wait()
            same(array, wanted)
        hc.barrier()


@check
def half_precision() -> None:
    with hc.init_process_group():
        for dtype in ("f2", "f4", "c8", "i4", "u1"):
            array = gpus.array(np.arange(7).astype(dtype))
            hc.all_reduce(array)
            same(array, np.arange(7).astype(dtype))


@check
def a_halo() -> None:
    with hc.init_process_group():
        grid = hc.new_grid((1,), periodic=True)
        field = gpus.array(np.array([0.0, 1, 2, 3, 0]))
        hc.halo_exchange(field, grid)
        same(field, [3.0, 1, 2, 3, 1])


@check
def persistent() -> None:
    with hc.init_process_group():
        array = gpus.array(np.arange(5.0))
        with hc.all_reduce_init(array) as sums:
            for _ in range(3):
                sums.start()
                sums.wait()
        same(array, np.arange(5.0))


@check
def over_mpi() -> None:
    with hc.init_process_group("cpu:mpi,cuda:mpi"):
        array = gpus.array(np.arange(1 << 20, dtype="f8"))
        hc.all_reduce(array)
        same(array, np.arange(1 << 20))


@check
def a_captured_graph() -> None:
    with hc.init_process_group():
        array = gpus.array(np.ones(4))
        hc.all_reduce(array)
        with gpus.captured() as graph:
            hc.all_reduce(array, hc.ReduceOp.PREMUL_SUM(2.0))
        graph.launch()
        graph.launch()
        same(array, np.full(4, 4.0))


@check
def a_time_limit() -> None:
    with hc.init_process_group(timeout=10, on_timeout="raise"):
        array = gpus.array(np.arange(3.0))
        hc.all_reduce(array)
        group = hc.new_group()
        hc.all_reduce(array, group=group)
        same(array, np.arange(3.0))


@check
def a_checkpoint() -> None:
    with tempfile.TemporaryDirectory() as folder, hc.init_process_group():
        hc.checkpoint.save(folder, {"x": gpus.array(np.arange(5.0))}, 1)
        np.testing.assert_array_equal(hc.checkpoint.load(folder).arrays["x"], np.arange(5.0))


# -- arrays of others ------------------------------------------------------------------------------------------------


def _arrays_of(library: str) -> Any:
    if not gpus.is_real():
        skip("there is no GPU")
    if importlib.util.find_spec(library) is None:
        skip(f"{library} is not installed")
    return importlib.import_module(library)


@check
def arrays_of_torch() -> None:
    torch = _arrays_of("torch")
    tensor = torch.arange(4.0, device="cuda")
    with hc.init_process_group():
        hc.all_reduce(tensor, hc.ReduceOp.PREMUL_SUM(2.0))
        with torch.cuda.stream(torch.cuda.Stream()):
            hc.all_reduce(tensor)
        torch.cuda.synchronize()
        hc.all_reduce(tensor, async_op=True).wait()  # from now on PyTorch's stream is CuPy's: the compiled path
        last = torch.zeros_like(tensor)
        hc.all_gather_single(last, tensor)
    assert last.tolist() == [0, 2, 4, 6]


@check
def arrays_of_jax() -> None:
    jax = _arrays_of("jax")
    array = jax.numpy.arange(4.0)
    with hc.init_process_group():
        out = gpus.array(np.zeros(4, "f4"))
        hc.all_gather_single(out, array)
        same(out, np.arange(4, dtype="f4"))


@check
def arrays_of_numba() -> None:
    _arrays_of("numba")
    from numba import cuda

    array = cuda.to_device(np.arange(4.0))
    with hc.init_process_group():
        hc.all_reduce(array, hc.ReduceOp.PREMUL_SUM(2.0))
    np.testing.assert_array_equal(array.copy_to_host(), 2 * np.arange(4.0))


# -- the questions of gpu-first --------------------------------------------------------------------------------------


def place() -> None:
    """Print the machine on which the checks run."""
    print(gpus.mode())


def checks() -> None:
    """List the checks."""
    print(*CHECKS, sep="\n")


def ground() -> None:
    """Describe the machine."""
    print(gpus.mode())
    for command in (["nvidia-smi"], ["df", "-h", "/dev/shm"], [sys.executable, "-m", "hpccomm", "info", "--gpu"]):
        if shutil.which(command[0]):
            sys.stdout.flush()
            subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)


def hangs() -> None:
    """Hang, with a process that has left the group."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    print("hangs", flush=True)
    time.sleep(1000)


def fails() -> None:
    """Fail."""
    raise AssertionError("fails")


def crashes() -> None:
    """Crash."""
    print("crashes", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def main() -> None:
    """Run the check that the only argument names."""
    if not gpus.is_real():
        os.environ["HPCCOMM_GPU_PROVIDER"] = gpus.PROVIDER
    others = {"place": place, "checks": checks, "ground": ground, "hangs": hangs, "fails": fails, "crashes": crashes}
    (others | CHECKS)[sys.argv[1]]()


if __name__ == "__main__":
    main()
