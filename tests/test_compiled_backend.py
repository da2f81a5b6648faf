"""jobs/compiled_backend: a backend in C++ as a package of its own, built, installed and used by its name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from .launch import ROOT, clean_environment, mpiexec_folder, run_program, time_limit

pytestmark = pytest.mark.serial

PROGRAM = """
import numpy as np
import pytest
from mpi4py import MPI
import hpccomm as hc
from compiled_backend import CompiledWork
from compiled_backend.transport import Transport

with hc.init_process_group("cpu:compiled") as world:
    rank, size = world.rank, world.size
    parts = [np.random.default_rng(each).integers(1, 5, (3, 4)) for each in range(size)]
    for dtype in ("int32", "int64", "float32", "float64", "float16", "complex128"):
        for op, combine in (("sum", np.sum), ("product", np.prod), ("avg", np.mean))[: 2 if "int" in dtype else 3]:
            array, blocking = np.asfortranarray(parts[rank].astype(dtype)), parts[rank].astype(dtype)
            work = hc.all_reduce(array, op, async_op=True)
            hc.all_reduce(blocking, op)
            assert isinstance(work, CompiledWork) == (dtype != "complex128") and work.wait()
            for result in (array, blocking):
                np.testing.assert_allclose(result, combine(parts, axis=0), rtol=1e-3)

    for root in range(size):
        expected = np.arange(12).reshape(3, 4) + root
        for given in (expected, expected.astype("M8[s]"), expected[0, 0]):
            for order in "CF":
                array = np.array(given, order=order) if rank == root else np.zeros_like(given, order=order)
                array.flags.writeable = rank != root
                hc.broadcast(array, src=root)
                np.testing.assert_array_equal(array, given)
        strided = np.full((3, 8), rank)
        work = hc.broadcast(strided[:, ::2], src=root, async_op=True)
        assert isinstance(work, CompiledWork) and work.wait()
        np.testing.assert_array_equal(strided, np.tile([root, rank], (3, 4)))

    assert hc.all_reduced(rank, "max") == size - 1  # by hpccomm's MPI backend, as complex sums

    if rank == 0:
        late = hc.barrier(async_op=True)
        assert isinstance(late, CompiledWork) and not late.is_completed()  # rank 1 waits for the message
        hc.send(np.ones(1), dst=1)
        late.wait()
    elif rank == 1:
        hc.recv(np.ones(1), src=0)
        hc.barrier()

    with pytest.raises(MPI.Exception, match="root"):
        Transport(world.comm.handle).broadcast(np.ones(1), size)
"""


def test_a_backend_in_cpp_is_built_as_a_package_and_gives_numpys_results(tmp_path: Path) -> None:
    mpicxx = mpiexec_folder() / "mpicxx"
    missing = {"pip", "pybind11", "setuptools"} - {each.name for each in distributions()}
    if missing or not mpicxx.exists() or shutil.which("c++") is None:
        pytest.skip(f"needs {' and '.join(sorted(missing)) or 'a C++ compiler'}")
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(ROOT / "jobs" / "compiled_backend", source, ignore=shutil.ignore_patterns("build"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    built = subprocess.run(
        [*pip, "--target", site, source],
        env={**clean_environment(), "CXX": str(mpicxx), "CXXFLAGS": "-O0"},  # compiles faster
        capture_output=True,
        text=True,
        timeout=time_limit(120),
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    run_program(PROGRAM, tmp_path, 2, status=0, env={"PYTHONPATH": f"{site}:{ROOT}"})
