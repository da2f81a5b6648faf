"""PyLops-MPI over `hm.Comm` on the stand-in for GPUs gives its results on NumPy's arrays over mpi4py.

python -m tests.foreign.pylops_twin BIN [RANKS]: on two or more, in the virtual environment of `make test-foreign`.
PyLops-MPI is not changed: it takes `hm.Comm` for a CUDA-aware MPI. The names that
its imports need of CuPy, and the stand-in lacks, are here.
"""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..launch import IMITATED_GPU, ROOT, clean_environment

OPERATIONS = {
    "all_reduce",
    "all_gather_single",
    "broadcast",
    "send",
    "recv",
    "sendrecv",
}  # that hpccomm has to have done
REFUSED = {
    "nccl": {
        "ghost cells from the one before": "NCCL has no tags",
        "halo, its first messages": "not connected by NCCL yet",  # but where all ranks of two take part
    },
    "mpi": {},
}


def main() -> None:
    """Start the ranks; on a rank compare, and print a line."""
    if "HPCCOMM_GPU_PROVIDER" in os.environ:
        on_a_rank(sys.argv[1])
        return
    place, ranks = Path(sys.argv[1]).absolute(), sys.argv[2] if len(sys.argv) > 2 else "3"
    own = {**IMITATED_GPU, "PYLOPS_MPI_CUDA_AWARE": "1", "NCCL_PYLOPS_MPI": "0", "TIME_LIMIT": "120"}
    words = [
        str(ROOT / "tools" / "run-mpi"),
        str(place),
        ranks,
        str(place / "python"),
        "-m",
        "tests.foreign.pylops_twin",
    ]
    runs = [
        subprocess.run([*words, transport], cwd=ROOT, env={**clean_environment(), **own}, check=False)
        for transport in REFUSED
    ]
    sys.exit(any(run.returncode for run in runs))


def on_a_rank(transport: str) -> None:
    """Compute twice, and compare."""
    complete_cupy()
    import cupy
    from mpi4py import MPI

    from hpccomm import mpi4py as hm
    from hpccomm.errors import DistError
    from hpccomm.mpi4py import communicator

    seen: Counter[str] = Counter()
    perform = communicator.perform

    def noted(comm: Any, step: Any) -> None:
        seen[step.operation] += 1
        perform(comm, step)

    communicator.perform = noted
    expected = {name: compute() for name, compute in computed(MPI.COMM_WORLD, "numpy", np.asarray)}
    wrong = [f"hpccomm did {dict(seen)} for NumPy"] if seen else []
    comm, results = hm.Comm(MPI.COMM_WORLD, config=f"cpu:mpi,cuda:{transport}"), 0
    for name, compute in computed(comm, "cupy", cupy.array):
        refused = REFUSED[transport].get(name, "")
        if "not connected" in refused and comm.size == 2:
            refused = ""
        try:
            found = compute()
        except DistError as error:
            if not refused or refused not in str(error):
                wrong.append(f"{name}: {error}")
            continue
        results += 1
        if refused:
            wrong.append(f"{name}: is not refused any more")
        if not np.array_equal(np.asarray(found), expected[name]):
            wrong.append(f"{name}: {found}, expected {expected[name]}")
    if missing := OPERATIONS - {step for each in MPI.COMM_WORLD.allgather(set(seen)) for step in each}:
        wrong.append(f"hpccomm did not do {missing}")
    if MPI.COMM_WORLD.rank == 0:
        print(f"over {transport}: {results} of {len(expected)} results, by {dict(seen)}")
    for each in wrong:
        print(f"rank {MPI.COMM_WORLD.rank}: {each}", file=sys.stderr)
    if MPI.COMM_WORLD.allreduce(bool(wrong), MPI.LOR):
        sys.exit(1)


def computed(comm: Any, engine: str, array: Callable[..., Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the results, each with its name."""
    import pylops
    import pylops_mpi
    from pylops_mpi.basicoperators.Halo import MPIHalo

    rank, size = comm.Get_rank(), comm.Get_size()

    def distributed(shape: Any, values: np.ndarray, **options: Any) -> Any:
        made = pylops_mpi.DistributedArray(global_shape=shape, base_comm=comm, engine=engine, **options)
        made[:] = array(values.reshape(made.local_shape))
        return made

    x = distributed(4 * size + 1, np.arange(5.0 if rank == 0 else 4.0) + 10 * rank)
    y = distributed(4 * size + 1, np.arange(5.0 if rank == 0 else 4.0) - rank)
    yield "dot", lambda: x.dot(y)
    for order in (None, 1, 3, 0, np.inf, -np.inf):
        yield f"norm {order}", partial(x.norm, order)
    yield "asarray, of different sizes", lambda: x.asarray()
    yield "sum", lambda: (x + y).asarray()
    yield "ghost cells from the next", lambda: x.add_ghost_cells(cells_back=1)
    yield "ghost cells from the one before", lambda: x.add_ghost_cells(cells_front=2)
    masked = pylops_mpi.DistributedArray(
        global_shape=2 * size, base_comm=comm, engine=engine, mask=[each % 2 for each in range(size)]
    )
    masked[:] = array([1.0, rank])
    yield "dot in each half", lambda: masked.dot(masked)
    yield "asarray of a half", lambda: masked.asarray(masked=True)
    same = pylops_mpi.DistributedArray(
        global_shape=3, base_comm=comm, engine=engine, partition=pylops_mpi.Partition.BROADCAST
    )
    same[:] = array([1.0, 2.0, 3.0]) + rank
    yield "broadcast", lambda: same.local_array
    yield "norm of what is everywhere", lambda: same.norm()
    matrix = distributed((2 * size, 3 * size), np.arange(6.0 * size) * (rank + 1))
    yield "norm along an axis", lambda: matrix.norm(axis=0)
    yield "redistribute", lambda: matrix.redistribute(1).local_array
    yield "ghost cells of a matrix", lambda: matrix.add_ghost_cells(cells_back=1)
    operator = pylops_mpi.MPIBlockDiag(ops=[pylops.MatrixMult(array(np.full((3, 2), rank + 1.0)))], base_comm=comm)
    z = distributed(2 * size, np.arange(2.0) + rank)
    yield "block diagonal", lambda: (operator @ z).asarray()
    yield "its adjoint", lambda: (operator.H @ (operator @ z)).asarray()
    halo = MPIHalo(dims=(4 * size,), halo=1, comm=comm)
    w = distributed(4 * size, np.arange(4.0) + 10 * rank)
    yield "halo, its first messages", lambda: (halo @ w).local_array
    halo.cart_comm.Bcast(array([0.0]))  # which connects the ranks of this communicator
    yield "halo", lambda: (halo @ w).local_array
    yield "its adjoint, halo", lambda: (halo.H @ (halo @ w)).local_array


def complete_cupy() -> None:
    """Add the names of PyLops' imports to the stand-in, and let its reductions be arrays, as CuPy's are."""
    import cupy

    wrapped = cupy.__getattr__

    def attribute(name: str) -> Any:
        found = wrapped(name)
        if not callable(found) or isinstance(found, type):
            return found

        def function(*arguments: Any, **options: Any) -> Any:
            result = found(*arguments, **options)
            return np.asarray(result).view(cupy.ndarray) if isinstance(result, np.generic) else result

        return function

    cupy.__getattr__ = attribute
    cupy.get_array_module = lambda *arrays: cupy if any(isinstance(each, cupy.ndarray) for each in arrays) else np
    cupy.cuda.Device.synchronize = lambda self: None
    for name in ("", ".scipy", ".scipy.fft", ".scipy.linalg", ".scipy.ndimage", ".scipy.signal", ".scipy.sparse"):
        sys.modules[f"cupyx{name}"] = Named(f"cupyx{name}")
        sys.modules[f"cupyx{name}"].__spec__ = importlib.machinery.ModuleSpec(f"cupyx{name}", None)


class Named(ModuleType):
    """A module that has whatever it is asked for, and nothing that can be called."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}", object)


if __name__ == "__main__":
    main()
