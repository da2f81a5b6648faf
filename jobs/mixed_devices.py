"""One group, arrays on both devices: the same call sums a host array over MPI and a GPU array over NCCL.

    mpiexec -n 2 python jobs/mixed_devices.py
    mpiexec -n 2 python jobs/mixed_devices.py --transport mpi  # GPU arrays over MPI as well: ranks may share a GPU

Every rank integrates its part of sin over 0 ... pi, on the host and on its GPU at the same time. Both sums are under
way together; each Work is waited for where its result is needed.

The job is right if both answers are 2. Exit status: 0 if they are, 1 if not.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from types import ModuleType

import numpy as np

import hpccomm as hc


def integrate(xp: ModuleType, rank: int, ranks: int, points: int) -> np.ndarray:
    """Return this rank's part of the integral (midpoint rule), as an array of one element of NumPy or CuPy."""
    width = xp.pi / (points * ranks)
    middles = (xp.arange(rank * points, (rank + 1) * points) + 0.5) * width
    part: np.ndarray = xp.sin(middles).sum(keepdims=True) * width
    return part


def main() -> int:
    """Run the job and return its exit status, the same on every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1_000_000, metavar="N", help="on each rank (default: 1000000)")
    parser.add_argument("--transport", choices=["nccl", "mpi"], default="nccl", help="of the GPU arrays (nccl)")
    options = parser.parse_args()

    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        parser.error(f"GPU arrays are CuPy's: {error}; pip install 'hpccomm[cuda13]' (or [cuda12])")
    with hc.init_process_group(f"cpu:mpi,cuda:{options.transport}", device_id="auto") as world:
        on_host = integrate(np, world.rank, world.size, options.points)
        on_gpu = integrate(cupy, world.rank, world.size, options.points)
        sums = [hc.all_reduce(array, async_op=True) for array in (on_host, on_gpu)]
        for each in sums:
            each.wait()

        errors = abs(float(on_host[0]) - 2), abs(float(on_gpu[0]) - 2)
        right = max(errors) < 1e-9
        if world.rank == 0:
            print(f"host {hc.device_of(on_host)}: {float(on_host[0]):.12f}  error {errors[0]:.1e}")
            print(f"GPU {hc.device_of(on_gpu)}: {float(on_gpu[0]):.12f}  error {errors[1]:.1e}")
            print(f"ranks {world.size}  {world.config}  {'OK' if right else 'WRONG'}", flush=True)
        return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
