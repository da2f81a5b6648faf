"""How ranks come to life on two hosts: srun with each protocol, mpirun in an allocation, and where they don't."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .slurm import BIN, IS_OPEN_MPI, MPI_TYPE, OTHER_TYPE, PROGRAMS, ROOT, Job, run, sbatch, srun, succeeded

WHERE = """
import socket, hpccomm as hc
with hc.init_process_group() as world:
    node = hc.split_group(color=hc.get_node_rank())
    said = [None] * world.size
    hc.all_gather_object(said, (socket.gethostname(), hc.get_node_rank(), hc.get_local_rank(), node.size))
    if world.rank == 0:
        print(hc.get_node_count(), said)
"""
TWO_BY_TWO = [("node1", 0, 0, 2), ("node1", 0, 1, 2), ("node2", 1, 0, 2), ("node2", 1, 1, 2)]


def test_srun_starts_ranks_on_both_hosts_and_a_node_is_a_group() -> None:
    assert succeeded(srun(sys.executable, "-c", WHERE)) == f"2 {TWO_BY_TWO}\n"


@pytest.mark.parametrize("script", ["mpirun", "mpiexec"])
def test_mpirun_needs_no_arguments_in_an_allocation(script: str) -> None:
    shape = ["--nodes=2", "--ntasks-per-node=2"]
    ended = run("salloc", "--quiet", *shape, BIN / script, sys.executable, "-c", WHERE)
    assert succeeded(ended) == f"2 {TWO_BY_TWO}\n"


def test_mpirun_in_a_batch_script_needs_none_either(tmp_path: Path) -> None:
    file = tmp_path / "where.py"
    file.write_text(WHERE)
    script = tmp_path / "script"
    script.write_text(f"#!/bin/bash\nmpirun {sys.executable} {file}\n")
    job = sbatch("--nodes=2", "--ntasks-per-node=2", script, cwd=tmp_path)
    assert job.succeeds() == f"2 {TWO_BY_TWO}\n"


def test_without_ntasks_per_node_the_first_node_is_filled_first() -> None:
    where = run("srun", "--nodes=2", "--ntasks=4", f"--mpi={MPI_TYPE}", sys.executable, "-c", WHERE)
    hosts = re.findall(r"node\d", succeeded(where))
    assert hosts == ["node1"] * 3 + ["node2"]


def refused(mpi: str) -> subprocess.CompletedProcess[str]:
    ended = srun(sys.executable, "-c", WHERE, mpi=mpi)
    assert ended.returncode != 0
    assert ended.stdout == ""
    return ended


def test_without_a_protocol_every_rank_would_be_alone_and_the_error_says_what_to_type() -> None:
    said = refused("none").stderr
    assert "srun started 4 processes, but MPI says that this one is alone" in said
    assert f"--mpi={MPI_TYPE}" in said


def in_a_shell_of_srun(command: str) -> str:
    """Return what a command prints that is typed in the shell of `srun --pty bash`, which needs a terminal."""
    typed = ["srun", "--ntasks=4", "--mpi=none", "--pty", "bash", "-c", f"{command}; true"]
    ended = run(sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", *typed)
    return ended.stdout


def test_in_the_shell_of_srun_a_program_is_alone_with_a_warning() -> None:
    said = in_a_shell_of_srun(f"{sys.executable} -c '{WHERE}'")
    assert "[('node1', 0, 0, 1)]" in said
    assert "this Slurm job has 4 tasks, but the program was started without srun" in said


@pytest.mark.parametrize("started", ["{python} -c", "bash -c '{python} -c \"$0\"; true'"], ids=["program", "script"])
def test_a_step_that_is_started_in_the_shell_of_srun_is_one(started: str) -> None:
    program = '"from hpccomm.process.environment import launcher; print(launcher().name)"'
    step = f"srun --overlap --ntasks=2 --mpi=none {started.format(python=sys.executable)}"
    assert in_a_shell_of_srun(f"{step} {program}").split() == ["srun", "srun"]


def test_the_protocol_of_the_other_mpi_is_an_error_that_says_so() -> None:
    said = refused(OTHER_TYPE).stderr
    if IS_OPEN_MPI:  # it does not speak PMI-2, and does not notice
        assert "started 4 processes, but MPI says that this one is alone" in said
    else:
        assert "unsupported PMI version PMIx" in said


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_every_operation_is_right_across_two_hosts(ranks: int) -> None:
    shape = ["--nodes=2", f"--ntasks={ranks}", f"--mpi={MPI_TYPE}"]
    said = succeeded(run("srun", *shape, sys.executable, PROGRAMS / "every_operation.py"))
    told = [tuple(map(int, each)) for each in re.findall(r"\((\d+), (\d+), (\d+), (\d+), (\d+)\)", said)]
    assert len(told) == ranks
    assert {node for node, *_ in told} == {0, 1}
    for node, of_node, across, local_size, calls in told:
        assert of_node == local_size == sum(other == node for other, *_ in told)
        assert across in (1, 2)
        assert calls > 150


def test_the_projects_own_tests_of_collectives_pass_on_two_hosts() -> None:
    suite = [sys.executable, "-m", "mpi4py", "-m", "pytest", "--with-mpi", "-q", "-p", "no:cacheprovider"]
    said = succeeded(srun(*suite, "tests/core/test_hooks.py", "tests/test_coalescing.py"))
    assert re.search(r"\b\d\d+ passed", said)


def test_hpccomm_info_says_where_it_runs() -> None:
    said = succeeded(srun(BIN / "hpccomm", "info"))
    assert re.search(r"^ranks +4$", said, re.M)
    assert len(re.findall(r"^hpccomm ", said, re.M)) == 1


def test_more_than_a_node_has_is_refused_when_it_is_submitted() -> None:
    ended = run("sbatch", "--ntasks-per-node=5", "--nodes=1", "--exclusive", "--wrap=true")
    assert ended.returncode != 0
    assert "Requested node configuration is not available" in ended.stderr


def test_from_another_folder_the_setup_is_not_found(tmp_path: Path) -> None:
    job = sbatch(ROOT / "slurm" / "train_digits.sbatch", cwd=tmp_path)
    assert job.becomes("COMPLETED", "FAILED") == "FAILED"
    assert "slurm/setup.sh: No such file or directory" in job.output()


def test_the_script_that_hpccomm_slurm_makes_runs(folder: Path) -> None:
    shape = ["--nodes=2", "--ntasks-per-node=2", "--time=10"]
    program = ["python", "jobs/sample_sort.py", "--size", "10000"]
    made = run(BIN / "hpccomm", "slurm", "--submit", *shape, "--", *program, cwd=folder)
    said = Job(succeeded(made).strip()).succeeds()
    assert said.endswith("ranks 4  equals np.sort  OK\n")


STORE = """
import hpccomm as hc
with hc.init_process_group() as world:
    store = world.store
    store.set(f"from {world.rank}", str(hc.get_node_rank()))
    said = [int(store.get(f"from {rank}")) for rank in range(world.size)]
    assert said == [0, 0, 1, 1], said
    assert store.add("count", 1) <= 4
    hc.barrier()
    assert store.get("count") == b"4"
"""


def test_a_store_is_reached_from_the_other_host() -> None:
    succeeded(srun(sys.executable, "-c", STORE))


OF_MPI4PY = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
assert comm.allreduce(1) == 4
if comm.rank != 3:
    comm.Barrier()
else:
    import time
    time.sleep(100)
"""


def test_a_hang_of_a_program_for_mpi4py_has_a_verdict_across_two_hosts(folder: Path) -> None:
    ended = srun(BIN / "hpccomm", "run", "--timeout", "5", "-c", OF_MPI4PY, cwd=folder)
    assert ended.returncode != 0
    assert "rank 3 never reached Barrier #2 of 'COMM_WORLD'" in ended.stderr
    assert "time.sleep(100)" in ended.stderr
