"""Write a backend of your own: the classic dummy, which takes every array and communicates nothing.

    mpiexec -n 2 python jobs/dummy_backend.py

torch.distributed's tutorial on custom backends has a C++ one whose all_reduce sets every tensor to zero, so that one
sees who did the work. Here it is in a few lines of Python, in each way that a backend can be used:

* ``cpu:mpi,cuda:dummy``: host arrays are reduced by MPI, GPU arrays by the dummy, in one group;
* ``dummy``: it serves every device;
* what it does not have raises UnsupportedOperationError, by name.

No GPU is needed: a stand-in says that its memory is on one. Exit status: 0 if all of this holds on every rank, 1 if
not.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from typing import Any

import numpy as np

import hpccomm as hc

# -- the backend -----------------------------------------------------------------------------------------------------


class DummyBackend(hc.Backend):
    """Has two operations, and answers both with zeros. The group has checked the arguments before it calls them."""

    def all_reduce(self, array: Any, op: Any, async_op: bool) -> hc.Work | None:
        """Set `array` to zero."""
        array[:] = 0
        return hc.CompletedWork() if async_op else None

    def all_gather(self, outputs: list[Any], array: Any, async_op: bool) -> hc.Work | None:
        """Set every array of `outputs` to zero."""
        for output in outputs:
            output[:] = 0
        return hc.CompletedWork() if async_op else None


def create_dummy(store: Any, rank: int, size: int, timeout: timedelta) -> DummyBackend:
    """Make the backend of one group; called at the group's first array of a device that is mapped to it."""
    return DummyBackend(rank, size)


# -- the demonstration -----------------------------------------------------------------------------------------------


class CudaStandIn:
    """Host memory that says, by the DLPack protocol, that it is on GPU 0."""

    def __init__(self, values: np.ndarray) -> None:
        self.memory = values
        self.dtype, self.size, self.shape = values.dtype, values.size, values.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # kDLCUDA, device 0

    def __setitem__(self, where: Any, value: Any) -> None:
        self.memory[where] = value


def ones_on_gpu() -> CudaStandIn:
    """Return three ones "on the GPU"."""
    return CudaStandIn(np.ones(3))


def one_backend_per_device() -> bool:
    """In one group, a host array goes over MPI and a GPU array to the dummy."""
    with hc.init_process_group("cpu:mpi,cuda:dummy") as world:
        on_host, on_gpu = np.ones(3), ones_on_gpu()
        hc.all_reduce(on_host)
        hc.all_reduce(on_gpu)
        return bool((on_host == world.size).all() and (on_gpu.memory == 0).all())


def one_backend_for_all() -> bool:
    """The dummy serves host and GPU arrays alike, also asynchronously."""
    with hc.init_process_group("dummy") as world:
        on_host, on_gpu = np.ones(3), ones_on_gpu()
        hc.all_reduce(on_host)
        work = hc.all_reduce(on_gpu, async_op=True)
        work.wait()
        gathered = [np.ones(3) for _ in range(world.size)]
        hc.all_gather(gathered, np.ones(3))
        return not (on_host.any() or on_gpu.memory.any() or np.any(gathered))


def missing_operations_are_named() -> bool:
    """An operation that the dummy does not override is refused, and the array is left alone."""
    with hc.init_process_group("dummy"):
        array = np.ones(3)
        try:
            hc.broadcast(array, src=0)
        except hc.UnsupportedOperationError as error:
            return "broadcast" in str(error) and "dummy" in str(error) and bool((array == 1).all())
        return False


def main() -> int:
    """Run the job and return its exit status, the same on every rank."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    hc.register_backend("dummy", create_dummy, devices=["cpu", "cuda"])

    demonstrations = [one_backend_per_device, one_backend_for_all, missing_operations_are_named]
    claims = [demonstration() for demonstration in demonstrations]
    with hc.init_process_group() as world:
        claims = [hc.agree(claim) for claim in claims]
        if world.rank == 0:
            for demonstration, claim in zip(demonstrations, claims):
                print(f"{'right' if claim else 'WRONG'}  {demonstration.__doc__}")
            print(f"ranks {world.size}  {'OK' if all(claims) else 'WRONG'}", flush=True)
    return 0 if all(claims) else 1


if __name__ == "__main__":
    sys.exit(main())
