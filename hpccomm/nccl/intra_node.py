"""all_reduce among the GPUs of one node without NCCL: every GPU reads the others' memory (CUDA IPC).

For small arrays that takes fewer steps than NCCL's rings and trees: *one shot*, in which every rank sums everybody's
array, or *two shots*, in which every rank sums one part and then collects the others'. On the hybrid cube mesh of eight
GPUs, where not all are linked, a way of its own. Each rank has one buffer, registered once, that the others see.

Off unless ``HPCCOMM_INTRA_NODE`` asks for it: with ``1`` the GPUs wait for each other; with ``host`` the ranks do, over
MPI, which also works where they share a GPU.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.reduce_op import ReduceOp
from ..cuda.packing import Packing
from ..cuda.seam import Runtime, on_device
from .launch import refuse_capture

if TYPE_CHECKING:
    from mpi4py import MPI

ONE_SHOT_BYTES = 256 << 10
TWO_SHOT_BYTES = 10 << 20
VECTOR_BYTES = 16
MAX_RANKS = 8
BLOCKS, THREADS = 24, 512  # few enough to be on the GPU all at once: they wait for each other
FLAG_BYTES = 4 * BLOCKS * MAX_RANKS
# CUDA shares whole blocks of 2 MiB with the processes that open a handle: nothing else is to be in them.
WHOLE_BYTES = -(-(FLAG_BYTES + TWO_SHOT_BYTES + ONE_SHOT_BYTES) // (2 << 20)) * (2 << 20)
DTYPES = ("float32", "float16", "bfloat16")


class Algorithm(enum.Enum):
    """How an all_reduce is done."""

    NCCL = "nccl"
    ONE_SHOT = "one_shot"
    TWO_SHOT = "two_shot"
    CUBE_MESH = "cube_mesh"


class Links(enum.Enum):
    """Which GPUs of the node can access which."""

    ALL = "every GPU sees every other one"
    CUBE_MESH = "hybrid cube mesh"
    TOO_FEW = "some do not"


class Topology(NamedTuple):
    """Where the ranks of a group are; the same on all of them."""

    ranks: int
    links: Links
    one_node: bool = True
    shares_gpu: bool = False
    host_synchronised: bool = False


def choose(nbytes: int, dtype: str, op: ReduceOp, topology: Topology) -> Algorithm:
    """Return the algorithm for an array of `nbytes` on every rank."""
    if op is not ReduceOp.SUM or dtype not in DTYPES:
        return Algorithm.NCCL
    if nbytes == 0 or nbytes % VECTOR_BYTES or nbytes > TWO_SHOT_BYTES:
        return Algorithm.NCCL
    if not topology.one_node or not 2 <= topology.ranks <= MAX_RANKS or topology.links is Links.TOO_FEW:
        return Algorithm.NCCL
    if topology.host_synchronised:
        return Algorithm.ONE_SHOT if topology.links is Links.ALL else Algorithm.NCCL
    if topology.shares_gpu:  # two kernels that wait for each other may not run at the same time
        return Algorithm.NCCL
    if nbytes <= ONE_SHOT_BYTES:
        return Algorithm.CUBE_MESH if topology.links is Links.CUBE_MESH else Algorithm.ONE_SHOT
    return Algorithm.TWO_SHOT if topology.links is Links.ALL else Algorithm.NCCL


def links_of(sees: list[list[bool]]) -> Links:
    """Return the Links of a node; ``sees[r][s]`` says whether the GPU of rank r can access that of rank s."""
    ranks = range(len(sees))
    if all(map(all, sees)):
        return Links.ALL
    if len(sees) == 8 and all(sees[r][s] for r in ranks for s in ranks if r & 4 == s & 4 or r ^ 4 == s):
        return Links.CUBE_MESH
    return Links.TOO_FEW


class IntraNode:
    """The buffers of a group's ranks, and the operation on them."""

    def __init__(self, runtime: Runtime, comm: MPI.Intracomm, device: int, stream: int, by_host: bool) -> None:
        """Make and exchange the buffers; every rank of the group calls it."""
        from mpi4py import MPI

        self._runtime = runtime
        self._comm = comm
        self._device = device
        self._stream = stream  # the group's own
        self._done = runtime.create_event(device)
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        one_node = node.Get_size() == comm.Get_size()
        node.Free()
        self._meetings = 1
        self._memory, handle = self._allocated(device) if one_node else (0, None)
        peers = comm.allgather(handle)
        self._opened = [self._open(device, handle, rank) for rank, handle in enumerate(peers)]
        sees = comm.allgather([address != 0 for address in self._opened])
        gpus = comm.allgather(runtime.identity(device))
        self.topology = Topology(len(gpus), links_of(sees), one_node, len(set(gpus)) < len(gpus), by_host)
        self._flags = runtime.table(self._opened, device)
        self._buffers = runtime.table([address and address + FLAG_BYTES for address in self._opened], device)

    def _allocated(self, device: int) -> tuple[int, bytes | None]:
        """Return memory for the flags and both parts of the buffer, and its handle; (0, None) if that fails."""
        memory = 0
        try:
            self._runtime.compile_intra_node(device)  # now: at the first operation the others would wait for ever
            memory = self._runtime.allocate(WHOLE_BYTES, device)
            self._runtime.clear(memory, FLAG_BYTES, self._stream)
            self._runtime.synchronize_stream(self._stream)
            return memory, self._runtime.ipc_handle(memory)
        except Exception as error:
            if self._runtime.explain(error) is None:
                raise
            if memory:
                self._runtime.free(memory)
            return 0, None

    def _open(self, device: int, handle: Any, rank: int) -> int:
        """Return the address of another rank's memory in this process; 0 if it can't be opened."""
        if rank == self._comm.Get_rank():
            return self._memory
        if handle is None:
            return 0
        try:
            return self._runtime.open_ipc(handle, device)
        except Exception as error:
            if self._runtime.explain(error) is None:
                raise
            return 0

    def all_reduce(self, packing: Packing, array: Any, op: ReduceOp) -> bool:
        """Reduce `array` in place and return True; or do nothing and return False: NCCL has to do it."""
        algorithm = choose(array.nbytes, array.dtype.name, op, self.topology)
        if algorithm is Algorithm.NCCL:
            return False
        refuse_capture(self._runtime, packing.stream, "an all_reduce by HPCCOMM_INTRA_NODE")  # it counts its meetings
        with on_device(self._runtime, self._device):
            self._launch(algorithm, packing, array)
        return True

    def _launch(self, algorithm: Algorithm, packing: Packing, array: Any) -> None:
        runtime, rank, stream = self._runtime, self._comm.Get_rank(), packing.stream
        runtime.wait(stream, self._done)  # the buffers are in use by the last operation, on whatever stream that is
        array = packing.in_place(array, alignment=VECTOR_BYTES)
        runtime.copy_bytes(self._memory + FLAG_BYTES, array.data.ptr, array.nbytes, stream)
        host_synchronised = self.topology.host_synchronised
        if host_synchronised:
            self._everybody_waits(stream)
        number = 0 if host_synchronised else self._meetings  # of the first of two or three meetings
        self._meetings = (self._meetings + 3) % 2**32 or 3
        fourth = TWO_SHOT_BYTES // VECTOR_BYTES if algorithm is Algorithm.CUBE_MESH else self.topology.ranks
        runtime.intra_node_kernel(
            (algorithm.value, array.dtype.name),
            (BLOCKS, THREADS),
            (array.data.ptr, self._buffers, self._flags, rank, fourth, number, array.nbytes // VECTOR_BYTES),
            stream,
        )
        runtime.record(self._done, stream)
        runtime.wait(self._stream, self._done)  # and with it those who wait for the group to have done everything
        if host_synchronised:
            self._everybody_waits(stream)

    def _everybody_waits(self, stream: int) -> None:
        self._runtime.synchronize_stream(stream)
        self._comm.Barrier()

    def close(self, others_come: bool = True) -> None:
        """Free the buffers; every rank of the group calls it, when nothing is in flight, or some are gone."""
        rank = self._comm.Get_rank()
        for peer, address in enumerate(self._opened):
            if peer != rank and address:
                self._runtime.close_ipc(address)
        if others_come:
            self._comm.Barrier()  # nobody sees this rank's memory any more
        if self._memory:
            self._runtime.free(self._memory)
        self._runtime.free_table(self._flags)
        self._runtime.free_table(self._buffers)
        self._runtime.destroy_event(self._done)
