"""What users of mpi4py keep: a Cartesian grid, their own communicators, windows and files, beside hpccomm."""

from __future__ import annotations

import sys

import numpy as np
from mpi4py import MPI

import hpccomm as hc


def heat(cart: MPI.Cartcomm) -> None:
    """Jacobi's method on a line that is cut into blocks; the ends of the line have nobody beside them."""
    n = 8
    total = n * cart.Get_size()
    left, right = cart.Shift(0, 1)
    u = np.zeros(n + 2)
    if right == MPI.PROC_NULL:
        u[-1] = 1.0  # the right end is warm
    for _ in range(6 * total**2):
        hc.sendrecv(u[1:2], left, u[-1:], right)  # from nobody nothing comes: the ends keep their values
        hc.sendrecv(u[-2:-1], right, u[:1], left)
        u[1:-1] = (u[:-2] + u[2:]) / 2
    exact = (np.arange(n) + 1 + n * cart.Get_rank()) / (total + 1)
    error = np.array([np.abs(u[1:-1] - exact).max()])
    hc.all_reduce(error, "max")
    if hc.get_rank() == 0:
        print(f"heat: right to 1e-6: {error[0] < 1e-6}")


def unequal_parts() -> None:
    """Gather parts of different sizes into views of one array."""
    rank, size = hc.get_rank(), hc.get_world_size()
    sizes = np.arange(size) + 1
    flat = np.zeros(sizes.sum())
    hc.all_gather(np.split(flat, np.cumsum(sizes)[:-1]), np.full(rank + 1, float(rank)))
    assert flat.tolist() == np.repeat(np.arange(float(size)), sizes).tolist()
    offset = np.array([rank + 1])
    hc.exscan(offset)
    if rank == size - 1:
        print(f"parts: {flat.size} values, the last rank's begin at {offset[0] if size > 1 else 0}")


def window(comm: MPI.Intracomm) -> None:
    """Put this rank's number into the next rank's memory."""
    own = np.full(1, -1)
    shared = MPI.Win.Create(own, comm=comm)
    shared.Fence()
    shared.Put(np.array([comm.Get_rank()]), (comm.Get_rank() + 1) % comm.Get_size())
    shared.Fence()
    shared.Free()
    hc.all_reduce(own)
    if hc.get_rank() == 0:
        print(f"window: {own[0]}")


def file(comm: MPI.Intracomm, name: str) -> None:
    """Write each rank's part of one file, behind those of the ranks before it."""
    part = np.full(hc.get_rank() + 1, float(hc.get_rank()))
    offset = np.array([part.nbytes])
    hc.scan(offset)
    output = MPI.File.Open(comm, name, MPI.MODE_CREATE | MPI.MODE_WRONLY)
    output.Write_at_all(offset[0] - part.nbytes, part)
    output.Close()
    hc.barrier()
    if hc.get_rank() == 0:
        print("file:", np.fromfile(name).tolist())


def halves() -> None:
    """A world on each half of the ranks, with traffic of their own on the same communicator at the same time."""
    rank = MPI.COMM_WORLD.Get_rank()
    half = MPI.COMM_WORLD.Split(rank % 2)
    with hc.init_process_group(comm=half):
        x = np.array([float(rank)])
        work = hc.all_reduce(x, async_op=True)
        ranks = half.allgather(rank)
        work.wait()
        assert x[0] == sum(ranks)
    half.Free()


if __name__ == "__main__":
    world = MPI.COMM_WORLD
    cart = world.Create_cart([world.Get_size()])
    with hc.init_process_group(comm=cart) as group:
        heat(cart)
        unequal_parts()
        window(group.comm.Dup())
        file(group.comm.Dup(), sys.argv[1])
    halves()
