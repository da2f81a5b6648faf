"""What whole jobs do: start, end, and end badly."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from .launch import clean_environment, run_program

pytestmark = pytest.mark.serial


def alone(program: str, folder: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run a program without a launcher; return how it ended, and its file."""
    file = folder / "program.py"
    file.write_text(textwrap.dedent(program))
    environment = {**clean_environment(), **environment}
    command = [sys.executable, file]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False), file


DIVIDES = """
    import sys, numpy as np, hpccomm as hc
    with hc.init_process_group() as world:
        x = np.ones(3)
        hc.all_reduce(x)
        if world.rank == 2:
            1 / 0
        hc.all_reduce(x)
        {after}
    """


def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    start = time.monotonic()
    result = run_program(DIVIDES.format(after="pass"), tmp_path, 4, timeout=60)
    # within 5 seconds, says the promise; without it the job would hang until the 60 s are over
    assert time.monotonic() - start < 30
    assert result.returncode not in (0, 124)
    assert "[rank 2] ZeroDivisionError: division by zero" in result.stderr
    assert "[rank 2]     1 / 0" in result.stderr
    assert "hpccomm: ZeroDivisionError on rank 2 ends the job" in result.stderr


UNKNOWN = """
    import numpy as np, hpccomm as hc
    with hc.init_process_group():
        x = np.ones(3)
        {call}
    """
ENDS = {  # programs that end badly, on how many ranks, and what is said
    "an exception, though the program's excepthook is broken": (
        """
        import sys, hpccomm as hc
        def broken(*_): raise OSError("no log file")
        sys.excepthook = broken
        world = hc.init_process_group()
        if world.rank == 1:
            raise KeyError("lost")
        hc.barrier()
        """,
        4,
        "KeyError: 'lost'",
    ),
    "an exception that a runner of the program shows": (
        """
        import sys, hpccomm as hc
        world = hc.init_process_group()
        def run():  # as `coverage run` does
            try:
                if world.rank == 1:
                    raise KeyError("lost")
            except KeyError:
                sys.excepthook(*sys.exc_info())
        run()
        hc.barrier()
        """,
        2,
        "hpccomm: KeyError on rank 1 ends the job",
    ),
    "sizes that differ between ranks": (  # MPI notices, and the job ends instead of hanging or going on
        """
        import numpy as np, hpccomm as hc
        world = hc.init_process_group()
        hc.all_reduce(np.ones(1000 * (1 + world.rank)))
        hc.barrier()
        """,
        2,
        "",
    ),
    "abort": (
        """
        import hpccomm as hc
        world = hc.init_process_group()
        if world.rank == 1:
            world.abort(7)
        hc.barrier()
        """,
        4,
        "",
    ),
    "an asynchronous operation that others never join": (
        """
        import numpy as np, hpccomm as hc
        world = hc.init_process_group()
        if world.rank == 0:
            work = hc.all_reduce(np.ones(4), async_op=True)
            work.get_future()
            work.wait(0.2)
        hc.barrier()
        """,
        2,
        "work.wait(0.2)\n[rank 0] hpccomm.errors.DistTimeoutError: all_reduce #1: not done after 0.2 s",
    ),
    "an unknown keyword, which is answered with the names of the arguments": (
        UNKNOWN.format(call="hc.reduce(x, root=0)"),
        2,
        "ends the job; the arguments of hpccomm.reduce are array, dst, op, group, async_op, group_dst, tensor\n",
    ),
    "another unknown keyword": (
        UNKNOWN.format(call="hc.gather(x, root=0)"),
        2,
        "ends the job; the arguments of hpccomm.gather are array, gather_list, dst, group, async_op, group_dst\n",
    ),
    "a missing argument": (
        UNKNOWN.format(call="y = hc.all_gather_object(3)"),
        2,
        "ends the job; the arguments of hpccomm.all_gather_object are object_list, obj, group, async_op\n",
    ),
    "a wrong rank": (
        "import hpccomm as hc; hc.init_process_group(rank=0)",
        2,
        "rank is 0, but MPI says 1; leave it out, MPI knows (rank 1)\nhpccomm: ValueError on rank 1 ends the job",
    ),
    "a wrong option of init": (
        "from mpi4py import MPI; import hpccomm as hc; hc.init_process_group(timeout=MPI.COMM_WORLD.Get_rank())",
        2,
        "ValueError: timeout is 0; expected a positive timedelta or number of seconds (rank 0)\n"
        "hpccomm: ValueError on rank 0 ends the job",
    ),
}


@pytest.mark.parametrize("what", ENDS)
def test_what_one_rank_does_wrong_ends_the_job(what: str, tmp_path: Path) -> None:
    program, ranks, said = ENDS[what]
    result = run_program(program, tmp_path, ranks)
    assert result.returncode not in (0, 124)
    assert said in re.sub(r"\n\[rank \d\] +[~^]+(?=\n)", "", result.stderr)  # below each line since Python 3.13


EXITS = """
    import argparse, sys, hpccomm as hc
    with hc.init_process_group() as world:
        if world.rank in {ranks}:
            {exits}
        hc.barrier()
    """
PARSES = 'parser = argparse.ArgumentParser(); parser.add_argument("--n", type=int); parser.parse_args(["--n", "many"])'


@pytest.mark.parametrize(
    ("exits", "status", "said"),
    [
        ("sys.exit(7)", 7, "[rank 0] hpccomm: sys.exit(7) inside `with` of the world ends the job"),
        ("sys.exit('no input')", 1, "[rank 0] no input"),
        (PARSES, 2, "argument --n: invalid int value: 'many'"),
        ("sys.exit(130)", 130, "[rank 0] hpccomm: Ctrl-C ends the job"),
    ],
)
def test_an_exit_with_a_status_on_one_rank_ends_the_job(tmp_path: Path, exits: str, status: int, said: str) -> None:
    result = run_program(EXITS.format(ranks=[0], exits=exits), tmp_path, ranks=2)
    assert (result.returncode, said in result.stderr) == (status, True), result.stderr


def test_an_exit_without_a_status_ends_nothing(tmp_path: Path) -> None:
    forks = "import os; pid = os.fork(); pid or sys.exit(3); assert os.waitpid(pid, 0)[1] == 3 << 8"
    for exits in ("sys.exit()", "sys.exit(0)", forks):
        result = run_program(EXITS.format(ranks=[0, 1], exits=exits), tmp_path, ranks=2)
        assert (result.returncode, result.stderr) == (0, "")


def test_an_exception_that_c_code_prints_ends_nothing(tmp_path: Path) -> None:
    program = """
        import ctypes, hpccomm as hc
        with hc.init_process_group() as world:
            if world.rank == 1:
                ctypes.pythonapi.PyRun_SimpleString(b"{}[2]")
            hc.barrier()
            print("the end")
        """
    result = run_program(program, tmp_path, 2)
    assert (result.returncode, result.stdout.split("\n")) == (0, ["the end", "the end", ""])
    assert "KeyError: 2" in result.stderr
    assert "ends the job" not in result.stderr


def test_the_hook_can_be_turned_off_and_is_taken_away_by_destroy(tmp_path: Path) -> None:
    program = """
        import sys, hpccomm as hc
        before = sys.excepthook
        world = hc.init_process_group()
        sys.stdout.write(f"hook:{sys.excepthook is not before}\\n")
        hc.destroy_process_group()
        assert sys.excepthook is before
        """
    assert run_program(program, tmp_path, 2).stdout.split() == ["hook:True"] * 2
    off = run_program(program, tmp_path, 2, env={"HPCCOMM_ABORT_ON_EXCEPTION": "0"})
    assert off.stdout.split() == ["hook:False"] * 2


def test_a_program_that_forgets_to_destroy_ends_well(tmp_path: Path) -> None:
    program = """
        import numpy as np, hpccomm as hc
        hc.init_process_group()
        work = hc.all_reduce(np.ones(1000), async_op=True)
        print(f"{work.get_future().wait(30)[0]}\\n", end="")
        """
    result = run_program(program, tmp_path, 2)
    assert (result.returncode, result.stdout.split()) == (0, ["2.0", "2.0"]), result.stderr


def test_a_rank_that_has_ended_while_others_go_on_says_so(tmp_path: Path) -> None:
    file = tmp_path / "stderr of rank 0"
    file.touch()
    program = f"""
        import os, time, hpccomm as hc
        if hc.init_process_group().rank == 0:
            os.dup2(os.open({os.fspath(file)!r}, os.O_WRONLY), 2)
        else:
            while not os.path.getsize({os.fspath(file)!r}):
                time.sleep(0.05)
        """
    result = run_program(program, tmp_path, ranks=2)
    assert (result.returncode, result.stderr) == (0, "")
    (said,) = file.read_text().splitlines()
    assert said.startswith("hpccomm: rank 0 has come to the end of its program without destroy_process_group()")


def test_destroy_says_whom_it_waits_for(tmp_path: Path) -> None:
    program = f"""
        import pathlib, time, hpccomm as hc
        from hpccomm.core import ending
        said, tell = pathlib.Path({str(tmp_path / "said")!r}), ending.tell_verdict
        ending.tell_verdict = lambda lines: (tell(lines), said.touch())
        with hc.init_process_group() as world:
            while world.rank == 0 and not said.exists():
                time.sleep(0.05)
        """
    result = run_program(program, tmp_path, ranks=3)
    assert result.returncode == 0, result.stderr
    said, verdict = result.stderr.splitlines()
    assert said.startswith("hpccomm: rank 1 waits for rank 0, which has not come to destroy 'world'")
    assert "rank 0 never reached destroy of 'world': it is in the program at " in verdict


def test_a_barrier_does_not_meet_the_destroy_of_other_ranks(tmp_path: Path) -> None:
    outcome = tmp_path / "outcome"  # of what is printed mpiexec may lose the last when a rank aborts
    program = f"""
        import pathlib
        import hpccomm as hc
        world = hc.init_process_group()
        if world.rank != 0:
            world.destroy()
        work = hc.barrier(async_op=True)
        try:
            work.wait(3)
        except hc.DistTimeoutError:
            pathlib.Path({str(outcome)!r}).write_text("nobody has come")
        world.abort(7)
        """
    run_program(program, tmp_path, ranks=2)
    assert outcome.read_text() == "nobody has come"


def test_a_program_that_forgot_its_launcher_is_told_what_to_type(tmp_path: Path) -> None:
    ended, _ = alone(UNKNOWN.format(call="hc.send(x, dst=1)"), tmp_path)
    assert "its (global) ranks are 0; this job has one rank: start the program with mpiexec -n 4 " in ended.stderr
    ended, _ = alone("import hpccomm as hc; hc.init_process_group(world_size=3)", tmp_path)
    assert "world_size is 3, but MPI says 1; this job has one rank: start the program with mpiexec -n 3" in ended.stderr


def test_import_initialises_nothing(tmp_path: Path) -> None:
    program = """
        import sys, threading
        import hpccomm
        loaded = set(sys.modules)
        assert "mpi4py.MPI" not in loaded, "MPI_Init"
        assert not {"cupy", "torch", "scipy", "ml_dtypes", "mpi4py"} & loaded
        assert threading.active_count() == 1
        import mpi4py
        mpi4py.rc.initialize = False
        from mpi4py import MPI
        assert not MPI.Is_initialized()
        with hpccomm.init_process_group() as world:  # initialises MPI itself then
            assert MPI.Is_initialized()
        """
    result = run_program(program, tmp_path, 1)
    assert result.returncode == 0, result.stderr


STARTS = "import hpccomm as hc\nhc.init_process_group()\n"


def test_a_launcher_of_another_mpi_is_refused(tmp_path: Path) -> None:
    srun = {"SLURM_STEP_NUM_TASKS": "4"}  # as srun --mpi=none does it
    result, file = alone(STARTS, tmp_path, **srun)
    assert result.returncode == 1
    assert (
        "DistError: init_process_group: srun started 4 processes, but MPI says that this one is alone" in result.stderr
    )
    assert re.search(rf"`srun --mpi=(pmi2|pmix) \S*python\S* {file}`", result.stderr)
    of_its_own = "import hpccomm as hc\nfrom mpi4py import MPI\nhc.init_process_group(comm=MPI.COMM_SELF)\n"
    assert alone(of_its_own, tmp_path, **srun)[0].returncode == 0


def test_a_process_alone_in_a_slurm_job_is_warned_once(tmp_path: Path) -> None:
    program = """
        import hpccomm as hc
        for _ in range(2):
            with hc.init_process_group() as world:
                print(world.size)
        """
    result, _ = alone(program, tmp_path, SLURM_JOB_ID="7", SLURM_NTASKS="4")  # in a batch script, without srun
    assert (result.returncode, result.stdout.split()) == (0, ["1", "1"]), result.stderr
    assert result.stderr.count("hpccomm: this Slurm job has 4 tasks, but the program was started without srun") == 1


def test_torchrun_is_refused(tmp_path: Path) -> None:
    result, file = alone(STARTS, tmp_path, TORCHELASTIC_RUN_ID="none", WORLD_SIZE="2", RANK="0")
    assert result.returncode == 1
    assert "torchrun started 2 processes, but MPI says that this one is alone" in result.stderr
    assert f"`mpiexec -n 2 {sys.executable} {file}`" in result.stderr


def test_without_an_mpi_library_the_error_says_what_to_do(tmp_path: Path) -> None:
    program = """
        import hpccomm as hc
        assert not hc.is_mpi_available() and not hc.is_available() and not hc.is_backend_available("mpi")
        hc.init_process_group()
        """
    result, _ = alone(program, tmp_path, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert result.returncode == 1
    assert "DistBackendError: mpi4py can't load an MPI library" in result.stderr
    assert result.stderr.count("Traceback") == 1
    assert "pip install 'hpccomm[mpich]'" in result.stderr
    assert "module load" in result.stderr


def test_after_mpi_has_been_finalised(tmp_path: Path) -> None:
    program = """
        import hpccomm as hc
        from mpi4py import MPI
        MPI.Finalize()
        try:
            hc.init_process_group()
        except hc.DistBackendError as error:
            print(error)
        """
    assert "MPI has been finalised" in run_program(program, tmp_path, 1).stdout


TIMED_OUT = """
import numpy as np
import hpccomm as hc

with hc.init_process_group(timeout=60, on_timeout="raise") as world:
    group = hc.new_group(timeout=2)
    hc.all_reduce(np.ones(3), group=group)
    if world.rank == 0:
        work = {call}
        try:
            work.wait()
        except hc.DistTimeoutError:
            print("timed out", flush=True)
with hc.init_process_group() as world:
    x = np.ones(3)
    hc.all_reduce(x)
    print("again", x[0], flush=True)
"""


@pytest.mark.parametrize("call", ["hc.barrier(group, True)", "hc.all_reduce(np.ones(3), group=group, async_op=True)"])
def test_what_has_timed_out_is_given_up_when_all_ranks_destroy_the_group(call: str, tmp_path: Path) -> None:
    done = run_program(TIMED_OUT.format(call=call), tmp_path, ranks=2)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["again 2.0"] * 2 + ["timed out"]), done.stderr
