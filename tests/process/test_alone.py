"""Processes that are alone and were not meant to be: what they are told to type."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from hpccomm.process import alone
from hpccomm.process.alone import family, own_command, refusal, warning

from ..launch import clean_environment, time_limit

pytestmark = pytest.mark.serial

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: ..."
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution"
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
SHELL = {**SRUN, "SLURM_PROCID": "0", "SLURM_PTY_PORT": "40111"}  # of srun --pty bash


@pytest.mark.parametrize(
    ("library", "srun_type"),
    [
        (MPICH, "pmi2"),
        (OPEN_MPI, "pmix"),
        ("Intel(R) MPI Library 2021.6 for Linux* OS\n", "pmi2"),
        ("MVAPICH2 Version      :\t2.3.7", "pmi2"),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)", "cray_shasta"),
        ("FUJITSU MPI Library 4.0.1", None),
    ],
)
def test_how_srun_starts_each_mpi(library: str, srun_type: str | None) -> None:
    found = family(library)
    assert (found and found.srun_type) == srun_type


def test_the_mpi_of_these_tests_is_known() -> None:
    assert family(MPI.Get_library_version()) is not None


def said(library: str, environ: dict[str, str], command: str = "python program.py --steps 3") -> str:
    text = refusal(1, library, environ, command)
    assert text is not None
    assert "pass comm=MPI.COMM_SELF" in text
    return text


def test_srun_without_the_right_type() -> None:
    assert "srun started 4 processes, but MPI says that this one is alone (world size 1)" in said(MPICH, SRUN)
    assert "`srun --mpi=pmi2 python program.py --steps 3`" in said(MPICH, SRUN)
    assert "`srun --mpi=pmix python program.py --steps 3`" in said(OPEN_MPI, SRUN)
    unknown = said("FUJITSU MPI", SRUN)
    assert "try `srun --mpi=pmix python" in unknown
    assert "or `srun --mpi=pmi2 python" in unknown


def test_mpich_under_pmix() -> None:
    assert "`srun --mpi=pmi2 python" in said(MPICH, {**SRUN, "PMIX_RANK": "1"})


def test_pmix_whose_server_open_mpi_does_not_reach() -> None:
    pmix = {**SRUN, "PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.7.0"}
    text = said(OPEN_MPI, {**pmix, "SLURMD_NODENAME": "node1-not-this"})
    assert "srun offers PMIx, but Open MPI does not reach its server" in text
    assert f"Slurm calls this node node1-not-this, and its host name is {os.uname().nodename}" in text
    assert "Slurm calls" not in said(OPEN_MPI, {**pmix, "SLURMD_NODENAME": os.uname().nodename})
    assert "`mpiexec python program.py --steps 3` works without it" in text


def test_the_mpiexec_of_another_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "_both_wheels", lambda: False)
    text = said(MPICH, {"OMPI_COMM_WORLD_SIZE": "2"})
    assert "mpirun (Open MPI) started 2 processes" in text
    assert "mpi4py's is MPICH" in text
    assert "mpiexec -n 2 python program.py --steps 3`" in text
    monkeypatch.setattr(alone, "_both_wheels", lambda: True)
    assert "are both installed here" in said(MPICH, {"OMPI_COMM_WORLD_SIZE": "2"})


def test_both_wheels_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not alone._both_wheels()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0")
    assert alone._both_wheels()


def test_flux_without_the_right_protocol() -> None:
    assert "`flux run -o pmi=pmix -n 4 python" in said(OPEN_MPI, {"FLUX_JOB_SIZE": "4"})
    assert "`flux run -n 4 python" in said(MPICH, {"FLUX_JOB_SIZE": "4"})


def test_torchrun_also_inside_srun() -> None:
    by_hand = {"WORLD_SIZE": "8", "RANK": "3"}
    environ = {"TORCHELASTIC_RUN_ID": "none", **by_hand}
    for text in (said(MPICH, environ), said(MPICH, by_hand)):
        assert "8 processes, but MPI says that this one is alone" in text
        assert "`mpiexec -n 8 python program.py --steps 3`" in text
    assert said(MPICH, by_hand).startswith("RANK and WORLD_SIZE are those of 8")
    assert refusal(1, MPICH, {"PMI_SIZE": "1", **by_hand}) is None  # mpiexec -n 1 among torch's processes
    assert said(MPICH, {**SRUN, **environ}).startswith("torchrun started 8")
    assert refusal(1, MPICH, {"WORLD_SIZE": "8"}) is None  # a variable that a shell may have kept
    assert refusal(1, MPICH, {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("size", "environ"),
    [
        (4, {"PMI_SIZE": "4"}),
        (1, {}),
        (1, {"PMI_SIZE": "1", "MPI_LOCALNRANKS": "1", "SLURM_STEP_NUM_TASKS": "2"}),
        (1, {"PMI_SIZE": "1"}),
        (1, BATCH),
        (1, SHELL),
        (1, {**SHELL, "PMI_SIZE": "4", "PMI_RANK": "0"}),
        (8, {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8"}),
    ],
)
def test_launches_that_are_not_refused(size: int, environ: dict[str, str]) -> None:
    assert refusal(size, MPICH, environ) is None


@pytest.mark.parametrize(
    ("environ", "is_warned"),
    [
        (BATCH, True),
        ({**BATCH, "SLURM_STEP_NUM_TASKS": "1"}, True),  # the shell of salloc, where it is a step
        (SHELL, True),
        ({**SHELL, "PMI_SIZE": "4", "PMI_RANK": "0"}, True),  # srun --mpi=pmi2
        ({**SRUN, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, False),  # srun -n1, on purpose
        ({**BATCH, "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"}, False),  # mpiexec -n 1, on purpose
        ({"SLURM_NTASKS": "4"}, False),  # no job: a default for the user's own sbatch
        ({**BATCH, "SLURM_NTASKS": "1"}, False),
        ({}, False),
    ],
)
def test_a_process_alone_in_a_job_of_several_tasks(environ: dict[str, str], is_warned: bool) -> None:
    text = warning(1, MPICH, environ, "python program.py")
    assert (text is not None) == is_warned
    if text is not None:
        assert "this Slurm job has 4 tasks" in text
        assert text.endswith("`srun --mpi=pmi2 python program.py`")
    assert warning(4, MPICH, environ) is None


def test_the_command_can_be_pasted() -> None:
    assert own_command(["python", "a program.py", "--name=x y"]) == "python 'a program.py' '--name=x y'"
    assert own_command(["python", "-c", "import this\nprint(1)"]) == "python program.py"
    assert own_command(["python", *["x" * 50] * 9]) == "python program.py"
    assert sys.orig_argv[-1] in own_command() or own_command() == "python program.py"


WAITS = {
    "recv": "hc.recv(x)",
    "recv #3": "hc.isend(x.copy(), 0); hc.irecv(x).wait(); hc.irecv(x).wait()",
    "send": "hc.isend(x, 0).wait()",
    "recv_object_list": "hc.recv_object_list([None], async_op=True).wait()",
    "recv, polled": "work = hc.irecv(x)\nwhile not work.is_completed(): time.sleep(0.01)",
    "send, at the end": "with hc.init_process_group(): hc.isend(x, 0)",
    "recv, in destroy": "work = hc.irecv(x, 0); hc.destroy_process_group()",
}


def test_one_rank_that_waits_for_itself_is_told_so(tmp_path: Path) -> None:
    programs = {}
    for number, (operation, code) in enumerate(WAITS.items()):
        file = tmp_path / f"waits{number}.py"
        begin = "" if "init_process_group" in code else "hc.init_process_group(); "
        file.write_text(f"import time, numpy as np, hpccomm as hc; x = np.ones(1 << 20)\n{begin}\n{code}\n", "utf-8")
        command = ["timeout", str(time_limit(60)), sys.executable, str(file)]
        programs[operation] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_environment())
    for operation, program in programs.items():
        assert program.stderr is not None
        line = program.stderr.readline()
        program.terminate()
        program.communicate()
        assert line.startswith(f"hpccomm: {operation.partition(',')[0]}"), f"{operation}: {line}"
        assert "or receive here; this job has one rank: start the program with mpiexec -n 4 " in line, line
