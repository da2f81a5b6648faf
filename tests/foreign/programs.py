"""Programs of others: their tests, a small program of each, and the message if one rank fails or waits in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FAULT = """\
import os, sys, time
from mpi4py import MPI
def fault():
    if MPI.COMM_WORLD.rank == 1 and sys.argv[1:]:
        if sys.argv[1] == "raises":
            raise KeyError("on purpose")
        time.sleep(1000)
"""
SLEEPS = r"it is in the program at \S*program.py:\d+ in fault, in time.sleep\(1000\)"


@dataclass
class Program:
    """A package, its tests, and a program that uses it, which calls `fault` where one rank may fail or wait.

    `tests` are files in its folder, `ranks` the numbers of ranks for these; `verdict` is a pattern of the message
    where rank 1 never comes back from `fault`; "" where that is not timed: the other ranks ask again and again, or no
    rank is in a call of mpi4py.
    """

    name: str
    tests: tuple[str, ...]
    ranks: tuple[int, ...]
    program: str
    verdict: str = r"rank 1 never reached .*: " + SLEEPS
    is_script: bool = False  # the tests are programs, and not pytest's
    from_sources: bool = False  # the tests are in the sdist only
    options: tuple[str, ...] = ()  # of pytest
    end: str = r"KeyError: 'on purpose'"  # the message if rank 1 raises
    is_debians: bool = False  # the package is Debian's, with its Open MPI


H5PY = """
        import h5py, numpy as np
        comm = MPI.COMM_WORLD
        f = h5py.File("x.h5", "w", driver="mpio", comm=comm)
        x = f.create_dataset("x", (comm.size, 4), "f8")
        with x.collective:
            x[comm.rank] = np.full(4, -1.0)
        with x.collective:
            print(x[:].sum())
"""
PETSC = """
        from petsc4py import PETSc
        comm = MPI.COMM_WORLD
        A = PETSc.Mat().createAIJ([30, 30], nnz=3, comm=comm)
        for i in range(*A.getOwnershipRange()):
            for j in range(max(i - 1, 0), min(i + 2, 30)):
                A[i, j] = 2.0 if i == j else -1.0
        A.assemble()
        x, b = A.createVecs()
        b.set(1.0)
        ksp = PETSc.KSP().create(comm)
        ksp.setOperators(A)
        ksp.setType("cg")
        ksp.getPC().setType("jacobi")
"""
PROGRAMS = [
    Program(
        "schwimmbad",
        ("tests/test_mpi.py",),
        (2,),
        """
        from schwimmbad import MPIPool
        def work(x):
            fault()
            return x * x
        with MPIPool() as pool:
            print(pool.map(work, range(20)))
        """,
        verdict=r"rank 1 has not answered Probe #\d+ of 'COMM_WORLD': " + SLEEPS,
        is_script=True,
        from_sources=True,
    ),
    Program(
        "emcee",
        (),
        (3,),
        """
        import numpy as np, emcee
        from schwimmbad import MPIPool
        def log_prob(x):
            fault()
            return -0.5 * np.sum(x**2)
        with MPIPool() as pool:
            np.random.seed(3)
            sampler = emcee.EnsembleSampler(8, 2, log_prob, pool=pool)
            sampler.run_mcmc(np.random.randn(8, 2), 20)
            print(sampler.get_chain().sum())
        """,
        verdict=r"rank 1 has not answered Probe #\d+ of 'COMM_WORLD': " + SLEEPS,
    ),
    Program(
        "mpi4py.futures",
        (),
        (3,),
        """
        from mpi4py.futures import MPICommExecutor
        def work(x):
            fault()
            return x * x
        with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
            if executor is not None:
                print(list(executor.map(work, range(20))))
        """,
        verdict="",
    ),
    Program(
        "mpiarray",
        ("tests/unit",),
        (1, 2, 6),
        """
        import numpy as np, mpiarray as mpa
        a = mpa.array(np.arange(36.0).reshape(6, 6), split=0)
        print(a.gather().sum())
        fault()
        print(a.redistribute(mpa.zeros((6, 6), split=1).layout).gather().sum())
        """,
        options=("-k", "not examples and not guides"),  # these start jobs of their own
    ),
    Program(
        "pylops-mpi",
        ("tests/test_distributedarray.py", "tests/test_stack.py", "tests/test_blockdiag.py", "tests/test_halo.py"),
        (2, 3),
        """
        import numpy as np, pylops, pylops_mpi
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        op = pylops_mpi.MPIBlockDiag(ops=[pylops.MatrixMult(np.full((3, 3), rank + 1.0))])
        x = pylops_mpi.DistributedArray(global_shape=3 * size)
        x[:] = 1.0
        print((op @ x).asarray().sum())
        fault()
        print(x.dot(x))
        """,
        from_sources=True,
        options=("--noconftest",),  # it is for older pytests
    ),
    Program(  # its messages are those of numba-mpi, from compiled code that keeps Python's other threads out
        "py-pde",
        (
            "tests/tools/test_mpi.py",
            "tests/grids/test_grid_mesh.py",
            "tests/pdes/test_pdes_mpi.py",
            "tests/solvers/test_explicit_mpi_solvers.py",
        ),
        (2,),
        """
        import numpy as np, pde
        field = pde.ScalarField.random_uniform(pde.UnitGrid([16, 16]), rng=np.random.default_rng(1))
        fault()
        result = pde.DiffusionPDE().solve(field, t_range=1, dt=0.1, solver="explicit_mpi", tracker=None)
        if MPI.COMM_WORLD.rank == 0:
            print(round(float(result.data.sum()), 6))
        """,
        verdict=r"rank 1 (?:is|never reached|has not answered) .*program.py:\d+ in fault, in time.sleep\(1000\)",
        from_sources=True,
        options=("--use_mpi",),
    ),
    Program(
        "pySDC",
        (),
        (2, 4),
        """
        from pySDC.implementations.controller_classes.controller_MPI import controller_MPI
        from pySDC.implementations.problem_classes.TestEquation_0D import testequation0d
        from pySDC.implementations.sweeper_classes.generic_implicit import generic_implicit
        description = {
            "problem_class": testequation0d,
            "problem_params": {"lambdas": [[-1.0]], "u0": 1.0},
            "sweeper_class": generic_implicit,
            "sweeper_params": {"quad_type": "RADAU-RIGHT", "num_nodes": 3, "QI": "LU"},
            "level_params": {"restol": 1e-10, "dt": 0.1},
            "step_params": {"maxiter": 50},
        }
        controller = controller_MPI({"logger_level": 40}, description, MPI.COMM_WORLD)
        problem = controller.S.levels[0].prob
        fault()
        end, _ = controller.run(u0=problem.u_exact(0.0), t0=0.0, Tend=0.8)
        print(end)
        """,
        verdict=r"rank 1 (never reached|has not answered) .*: " + SLEEPS,
    ),
    Program(  # rank 1 is in a call of mpi4py, the others are inside HDF5
        "h5py",
        (),
        (3,),
        H5PY
        + """
        if sys.argv[1:] == ["waits"] and comm.rank == 1:
            comm.Barrier()
        fault()
        with x.collective:
            x[comm.rank] = np.full(4, comm.rank + 1.0)
        f.close()
        """,
        verdict=r"ranks 0, 2 never reached Barrier .*: each is in the program at \S*:\d+ .*, in x\[comm.rank\] = ",
        is_debians=True,
    ),
    Program(  # rank 1 sleeps, the others are inside HDF5
        "h5py.write",
        (),
        (3,),
        H5PY
        + """
        with x.collective:
            fault()
            x[comm.rank] = np.full(4, comm.rank + 1.0)
        f.close()
        """,
        verdict=r"rank 1 is at \S*:\d+ in fault, in time.sleep",
        is_debians=True,
    ),
    Program(  # all are inside HDF5, rank 1 in f.close(): so it is after an exception in `with h5py.File`
        "h5py.close",
        (),
        (3,),
        H5PY
        + """
        if sys.argv[1:] == ["waits"] and comm.rank == 1:
            f.close()
        fault()
        with x.collective:
            x[comm.rank] = np.full(4, comm.rank + 1.0)
        f.close()
        """,
        verdict=r"rank 1 is at \S*:\d+ in <module>, in f.close\(\)",
        is_debians=True,
    ),
    Program(  # rank 1 is in a call of mpi4py, the others are inside PETSc, which keeps Python's other threads out
        "petsc4py",
        (),
        (3,),
        PETSC
        + """
        if sys.argv[1:] == ["waits"] and comm.rank == 1:
            comm.Barrier()
        fault()
        ksp.solve(b, x)
        print(round(x.norm(), 6))
        """,
        verdict=r"ranks 0, 2 never reached Barrier",
        is_debians=True,
    ),
    Program(  # rank 1 sleeps, the others are inside PETSc
        "petsc4py.solve",
        (),
        (3,),
        PETSC
        + """
        fault()
        ksp.solve(b, x)
        print(round(x.norm(), 6))
        """,
        verdict=r"rank 0: (Python has not run there|its process runs, and does not answer)",
        is_debians=True,
    ),
]


def folder_of(program: Program, installed: Path, sources: Path) -> Path:
    """Return the folder that its tests are named in."""
    name = program.name.replace("-", "_").lower()
    if not program.from_sources:
        return installed / name
    return next(folder for folder in sources.glob(f"{name}-*") if folder.is_dir())
