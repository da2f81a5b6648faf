"""all_reduce among the GPUs of one node without NCCL: every GPU reads the others' memory (CUDA IPC).

Small arrays take fewer steps than in NCCL's rings and trees: *one shot*, in which every rank sums the arrays of all, or
*two shots*, in which every rank sums one part and then reads the other parts. Each rank has one buffer, which the other
ranks open. If not all GPUs of a node are linked, as in a DGX-1 with eight, NCCL reduces.

Off unless ``HPCCOMM_INTRA_NODE`` is set: with ``1`` the GPUs wait for each other; with ``host`` the ranks wait over
MPI, which also works if they share a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.reduce_op import ReduceOp
from ..cuda.seam import Kernel, Runtime
from .plan import Plan, refuse_capture

if TYPE_CHECKING:
    from mpi4py import MPI

ONE_SHOT_BYTES = 256 << 10  # thresholds from the literature, not measured here: hence off by default
TWO_SHOT_BYTES = 10 << 20
VECTOR_BYTES = 16
MAX_RANKS = 8
BLOCKS, THREADS = 24, 512  # few enough to run all at once: they wait for each other
FLAG_BYTES = 2 * 4 * BLOCKS * MAX_RANKS
# CUDA IPC shares whole blocks of 2 MiB, so nothing else should be in them.
WHOLE_BYTES = -(-(FLAG_BYTES + TWO_SHOT_BYTES) // (2 << 20)) * (2 << 20)
DTYPES = ("float32", "float16", "bfloat16")
TEST_BYTES = 4096


def choose(nbytes: int, dtype: str, op: ReduceOp, by_host: bool) -> str | None:
    """Return the name of the kernel for an array of `nbytes` on every rank; None to use NCCL."""
    if op is not ReduceOp.SUM or dtype not in DTYPES or nbytes % VECTOR_BYTES or not 0 < nbytes <= TWO_SHOT_BYTES:
        return None
    return "one_shot" if by_host or nbytes <= ONE_SHOT_BYTES else "two_shot"


class IntraNode:
    """A group's buffers, and all_reduce on them."""

    def __init__(self, runtime: Runtime, comm: MPI.Intracomm, device: int, stream: int, by_host: bool) -> None:
        """Allocate the buffers and exchange their handles; every rank of the group calls it."""
        from mpi4py import MPI

        self._runtime = runtime
        self._comm = comm
        self._device = device
        self._stream = stream  # the group's stream
        self._done = runtime.create_event(device)
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        one_node = node.Get_size() == comm.Get_size()
        node.Free()
        self._memory, handle = self._allocated() if one_node and 2 <= comm.Get_size() <= MAX_RANKS else (0, None)
        handles = comm.allgather(handle)  # afterwards all test patterns are written
        self._opened = [self._open(each, rank) for rank, each in enumerate(handles)]
        access, gpus = zip(*comm.allgather((all(self._opened), runtime.identity(device))))  # now all have been read
        # Kernels that wait for each other may not run at the same time if ranks share a GPU.
        self._is_usable = all(access) and (by_host or len(set(gpus)) == len(gpus))
        self._by_host, self._pointers = by_host, _pointers(self._opened, by_host)

    def _allocated(self) -> tuple[int, bytes | None]:
        """Return memory for the flags and the buffer, and its handle; (0, None) if CUDA refuses."""
        runtime, ranks, rank = self._runtime, self._comm.Get_size(), self._comm.Get_rank()
        memory = 0
        try:
            runtime.compile_intra_node(ranks, rank, self._device)  # in an operation, a failure would block others
            memory = runtime.allocate(WHOLE_BYTES, self._device)
            runtime.clear(memory, FLAG_BYTES, self._stream)
            test, pattern = self._test_array(), _test_pattern(rank)
            runtime.to_device(test, pattern, self._stream)
            runtime.copy_bytes(memory + FLAG_BYTES, test.data.ptr, TEST_BYTES, self._stream)
            runtime.synchronize_stream(self._stream)
            return memory, runtime.ipc_handle(memory)
        except Exception as error:
            if runtime.explain(error) is None:
                raise
            if memory:
                runtime.free(memory)
            return 0, None

    def _open(self, handle: Any, rank: int) -> int:
        """Return the address of a rank's memory in this process; 0 if it can't be opened, or reads wrong."""
        if rank == self._comm.Get_rank():
            return self._memory
        if handle is None:
            return 0
        address = 0
        try:
            address = self._runtime.open_ipc(handle, self._device)
            if self._reads_right(address, rank):
                return address
        except Exception as error:
            if self._runtime.explain(error) is None:
                raise
        if address:
            self._runtime.close_ipc(address)
        return 0

    def _reads_right(self, address: int, rank: int) -> bool:
        """Return True if a rank's memory has that rank's test pattern; on some machines it reads wrong."""
        test, read = self._test_array(), np.zeros(TEST_BYTES, np.uint8)
        self._runtime.copy_bytes(test.data.ptr, address + FLAG_BYTES, TEST_BYTES, self._stream)
        self._runtime.to_host(read, test, self._stream)
        self._runtime.synchronize_stream(self._stream)
        return np.array_equal(read, _test_pattern(rank))

    def _test_array(self) -> Any:
        return self._runtime.empty((TEST_BYTES,), np.uint8, self._device, self._stream)

    def all_reduce(self, plan: Plan, array: Any, op: ReduceOp) -> bool:
        """Plan to reduce `array` in place and return True; return False to use NCCL."""
        kernel = choose(array.nbytes, array.dtype.name, op, self._by_host)
        if kernel is None or not self._is_usable:
            return False
        plan.do(self._run, kernel, plan.in_place(array, alignment=VECTOR_BYTES))
        return True

    def _run(self, kernel: str, array: Any, stream: int) -> None:
        runtime = self._runtime
        # A replay would run the kernels, but not record `_done`: CuPy has no cudaEventRecordExternal.
        refuse_capture(runtime, stream, "an all_reduce by HPCCOMM_INTRA_NODE")
        runtime.wait(stream, self._done)  # the last operation, on any stream, uses the buffers
        runtime.copy_bytes(self._memory + FLAG_BYTES, array.data.ptr, array.nbytes, stream)
        if self._by_host:
            self._everybody_waits(stream)
        runtime.intra_node_kernel(
            Kernel(kernel, array.dtype.name, self._comm.Get_size(), self._comm.Get_rank()),
            (BLOCKS, THREADS),
            array.data.ptr,
            self._pointers,
            array.nbytes // VECTOR_BYTES,
            stream,
        )
        runtime.record(self._done, stream)
        runtime.wait(self._stream, self._done)  # so that synchronizing the group's stream waits for the kernel
        if self._by_host:
            self._everybody_waits(stream)

    def _everybody_waits(self, stream: int) -> None:
        self._runtime.synchronize_stream(stream)
        self._comm.Barrier()

    def close(self, others_come: bool = True) -> None:
        """Free the buffers when no operation is in flight; all ranks call it, unless `others_come` is False."""
        rank = self._comm.Get_rank()
        for peer, address in enumerate(self._opened):
            if peer != rank and address:
                self._runtime.close_ipc(address)
        if others_come:
            self._comm.Barrier()  # all ranks have closed this rank's memory
        if self._memory:
            self._runtime.free(self._memory)
        self._runtime.destroy_event(self._done)


def _test_pattern(rank: int) -> np.ndarray:
    """Return the bytes that a rank writes to its memory as a test."""
    return np.random.default_rng(rank).integers(256, size=TEST_BYTES, dtype=np.uint8)


def _pointers(addresses: list[int], by_host: bool) -> np.ndarray:
    """Return the kernels' ``struct Memory`` as an array of one element; an address is 0 without access."""
    pointers = np.zeros((2, MAX_RANKS), np.uint64)
    for rank, address in enumerate(addresses[:MAX_RANKS]):
        pointers[:, rank] = address + FLAG_BYTES, 0 if by_host else address
    return pointers.reshape(-1).view(f"V{pointers.nbytes}")
