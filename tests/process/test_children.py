"""Processes that a rank starts, and that start MPI: none is taken for the rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..launch import run_program

pytestmark = pytest.mark.serial

PROGRAM = """\
import json, multiprocessing, os, subprocess, sys
import numpy as np
from mpi4py import MPI
import hpccomm as hc

size = MPI.COMM_WORLD.Get_size()  # in the processes of multiprocessing, too, which import this file

def square(number):
    return number * number, size

STARTED = {
    "starts MPI": "from mpi4py import MPI; print(MPI.COMM_WORLD.size)",
    "has a group of its own": "from mpi4py import MPI; import hpccomm as hc\\n"
        "print(hc.init_process_group(comm=MPI.COMM_SELF).size)",
    "wants the world": "import hpccomm as hc; hc.init_process_group()",
}

PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}

if __name__ == "__main__":
    with hc.init_process_group() as world:
        found = {}
        for start in ("spawn", "forkserver"):
            with multiprocessing.get_context(start).Pool(2) as pool:
                found[start] = pool.map(square, range(4), chunksize=1)
        environments = {"as it is": None, "a copy": dict(os.environ)}
        run = {
            f"{case}, {name}": subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, **PIPES)
            for name, environment in environments.items()
            for case, code in STARTED.items()
        }
        found.update({case: process.communicate()[0] for case, process in run.items()})
        all_found = [None] * world.size
        hc.all_gather_object(all_found, found)
        x = np.ones(1)
        hc.all_reduce(x)
        assert x[0] == world.size
        if world.rank == 0:
            print(json.dumps(all_found))
"""


@pytest.mark.parametrize("command", [["-u"], ["-m", "hpccomm", "run"]], ids=["python", "hpccomm run"])
def test_processes_that_a_rank_starts_are_worlds_of_their_own(command: list[str], tmp_path: Path) -> None:
    done = run_program(PROGRAM, tmp_path, 2, by=command, status=0, env={"HPCCOMM_TIMEOUT": "90"}, timeout=120)
    for rank, found in enumerate(json.loads(done.stdout)):
        assert found.pop("spawn") == found.pop("forkserver") == [[number**2, 1] for number in range(4)]
        for environment in ("as it is", "a copy"):
            assert found.pop(f"starts MPI, {environment}") == "1\n"
            assert found.pop(f"has a group of its own, {environment}") == "1\n"
            refused = found.pop(f"wants the world, {environment}")
            assert f"DistError: init_process_group: this process is no rank: rank {rank} (process " in refused
            assert 'below `if __name__ == "__main__":`' in refused
        assert not found
