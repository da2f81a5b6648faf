"""`hpccomm run`: hangs of programs of mpi4py on 2 to 8 ranks, and what the verdict says of each."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from mpi4py import MPI

from hpccomm.native import gil_held

from ..launch import launch

pytestmark = pytest.mark.serial

PROGRAM = """
    import ctypes, fcntl, os, signal, sys, threading, time
    import numpy as np
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    x, y, big = np.ones(4), np.empty(4), np.ones(1 << 18)
    comm.Barrier()
    row = comm.Split(0)
    pair = comm.Split(rank // 2)  # rank 1 is in that of rank 0
    lock = open(sys.argv[1], "a")
    if rank == 1:
        fcntl.flock(lock, fcntl.LOCK_EX)
    comm.Barrier()
    if rank == 1:
        {one}
    else:
        {others}
    comm.Allreduce(x, y)  # the last line
    """
LAST = r"Allreduce #5 of 'COMM_WORLD' \(32 B float64\)"
GIL_IS_HELD = (
    "its process runs, and does not answer"
    if gil_held is None
    else r"Python has not run there for [\d.]+ s: the GIL is held in program.py:16 in <module>"
)
NEVER = rf"rank 1 never reached {LAST}: "
AT = r"it is in the program at \S+program.py:16 in "

CASES = {
    "a call is skipped": (
        "pass",
        "comm.Barrier()",
        r"the ranks differ in operation #5 of 'COMM_WORLD': .*rank 1 calls Allreduce \(4 float64, SUM\) at",
    ),
    "another operation": (
        "comm.Allgather(x, np.empty((size, 4)))",
        "comm.Allreduce(x, y)",
        r"the ranks differ in operation #5 of 'COMM_WORLD': .*rank 1 calls Allgather \(4 float64\) at",
    ),
    "another root": (
        "comm.Bcast(big, root=0)",
        "comm.Bcast(big, root=1)",
        r"the ranks differ in operation #5 of 'COMM_WORLD': .*rank 1 calls Bcast \(262144 float64, root 0\)",
    ),
    "another root, which lets others pass": (
        "comm.gather(1, root=size - 1)",
        "comm.gather(1, root=0)",
        r"the ranks differ in operation #5 of 'COMM_WORLD': .*rank 1 (calls|has called) gather \(root \d\)",
    ),
    "another communicator": (
        "row.Barrier()",
        "comm.Barrier()",
        r"rank 1 never reached Barrier #5 of 'COMM_WORLD': it is in Barrier #1 of 'Split #2 of COMM_WORLD'|"
        r"(?s:ranks 0-1 wait for each other:.*rank 0 is in Barrier #5 of 'COMM_WORLD'.*"
        r"rank 1 is in Barrier #1 of 'Split #2 of COMM_WORLD')",
    ),
    "a communicator of some": (
        "time.sleep(1000)",
        "pair.Barrier()",
        r"rank 1 never reached Barrier #1 of 'Split #3 of COMM_WORLD': " + AT + r"<module>, in time.sleep\(1000\)",
    ),
    "a receive without a partner": (
        "comm.Recv(y, source=0, tag=5)",
        "pass",
        r"rank 1 is in Recv #1 of 'COMM_WORLD' \(32 B float64\) with rank 0 of the group, tag 5",
    ),
    "a send without a partner": (
        "comm.Send(big, dest=0, tag=5)",
        "pass",
        r"rank 1 is in Send #1 of 'COMM_WORLD' \(2 MiB float64\) with rank 0 of the group, tag 5",
    ),
    "a wait for requests": (
        "requests = [comm.Irecv(y, source=0, tag=5)]; MPI.Request.Waitall(requests)",
        "time.sleep(1000)",
        r"rank 0 has not answered Irecv #1 of 'COMM_WORLD'.*: it is in the program at .*, in time.sleep",
    ),
    "a wait for one of several requests": (
        "a, b = comm.Irecv(y, source=0, tag=5), comm.Irecv(x, source=0, tag=6); b.Wait()",
        "time.sleep(1000)",
        r"rank 0 has not answered Irecv #2 of 'COMM_WORLD'.*: it is in the program at .*, in time.sleep",
    ),
    "a start of a persistent receive": (
        "r = comm.Recv_init(y, 0, 5); r.Start(); r.Wait(); r.Start(); MPI.Prequest.Waitall([r])",
        "comm.Send(x, 1, 5) if rank == 0 else 0; time.sleep(1000)",
        r"rank 0 has not answered Recv_init #2 of 'COMM_WORLD' \(32 B float64\): it is in the program at .*time.sleep",
    ),
    "an exception in a thread": (
        "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); time.sleep(1000)",
        "pass",
        NEVER + AT,
    ),
    "a lock of threads": ("lock = threading.Lock(); lock.acquire(); lock.acquire()", "pass", NEVER + AT),
    "its process is stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "pass", NEVER + "its process is stopped"),
    "a file's lock": (
        "pass",
        "fcntl.flock(lock, fcntl.LOCK_EX)",
        r"ranks? [\d, -]+ never reached " + LAST + r": (it|each) is in the program at \S+program.py:18 in <module>, in "
        r"fcntl.flock\(lock, fcntl.LOCK_EX\) .*; rank 1 waits at",
    ),
    "an endless loop of NumPy": ("[np.cos(x, x) for _ in iter(int, 1)]", "pass", NEVER + AT),
    "a call of C that does not end": ("max(iter(int, 1))", "pass", NEVER + GIL_IS_HELD),
    "inside a library of C that calls MPI": (  # as HDF5 and PETSc do
        "mpi = ctypes.CDLL(MPI.__file__); mpi.MPI_Barrier(ctypes.c_void_p(comm.handle))",
        "pass",
        NEVER + AT + r"<module>, in mpi.MPI_Barrier\(ctypes.c_void_p\(comm.handle\)\)",
    ),
    "all ranks inside a library of C": (
        "mpi = ctypes.CDLL(MPI.__file__); mpi.MPI_Barrier(ctypes.c_void_p(row.handle))",
        "mpi = ctypes.CDLL(MPI.__file__); mpi.MPI_Barrier(ctypes.c_void_p(comm.handle))",
        r"every rank has been in one call of C for [\d.]+ s, none of them in one of MPI's:(?s:.*)"
        r"rank 1 is at \S+program.py:16 in <module>, in mpi.MPI_Barrier\(ctypes.c_void_p\(row.handle\)\)",
    ),
    "input": ("os.dup2(os.pipe()[0], 0); input()", "pass", NEVER + AT + r"<module>, in input\(\)"),
    "its program has ended": ("sys.exit()", "pass", NEVER + "it has come to the end of its program without"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 5, 8))])
def test_the_verdict(ranks: int, case: str, tmp_path: Path) -> None:
    one, others, said = CASES[case]
    finished = hang(tmp_path, ranks, one, others)
    assert re.search(said, finished.stderr), finished.stderr
    assert "the job ends with status 124" in finished.stderr
    assert finished.returncode in (124, 9), finished.stderr  # MPICH's mpiexec, of what it has killed


def hang(
    tmp_path: Path, ranks: int, one: str, others: str, *shell: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the program in which rank 1 does something else than the others."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM.format(one=one, others=others)), encoding="utf-8")
    options = ("--timeout", "3", "--debug-dir", str(tmp_path / "reports"))
    command = (*shell, sys.executable, "-m", "hpccomm", "run", *options, program, tmp_path / "lock")
    return launch(ranks, *command, timeout=60, env=environment)


@pytest.mark.parametrize("limits", [("--timeout", "1"), ()])
def test_ranks_inside_a_library_of_c_while_another_moves(limits: tuple[str, ...], tmp_path: Path) -> None:
    program = """
        import ctypes, time
        from mpi4py import MPI
        comm, mpi = MPI.COMM_WORLD, ctypes.CDLL(MPI.__file__)
        begun = time.monotonic()
        while comm.Get_rank() == 0 and time.monotonic() < begun + 4:
            time.sleep(0.01)
        mpi.MPI_Barrier(ctypes.c_void_p(comm.handle))
        print("the end")
        """
    (tmp_path / "program.py").write_text(textwrap.dedent(program), encoding="utf-8")
    options = (*limits, "--debug-dir", tmp_path / "reports")
    finished = launch(3, sys.executable, "-m", "hpccomm", "run", *options, tmp_path / "program.py")
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, 3 * "the end\n", "")


def test_an_exception_inside_with_is_named(tmp_path: Path) -> None:
    program = """
        import ctypes
        from mpi4py import MPI
        comm, mpi = MPI.COMM_WORLD, ctypes.CDLL(MPI.__file__)
        all_ranks = comm.Dup()
        class File:
            def __enter__(self): pass
            def __exit__(self, *_): self.close()
            def close(self): mpi.MPI_Barrier(ctypes.c_void_p(comm.handle))
        with File():
            if comm.Get_rank() == 1:
                {}["density"]
            mpi.MPI_Barrier(ctypes.c_void_p(all_ranks.handle))
        """
    (tmp_path / "program.py").write_text(textwrap.dedent(program), encoding="utf-8")
    options = ("--timeout", "2", "--debug-dir", tmp_path / "reports")
    finished = launch(3, sys.executable, "-m", "hpccomm", "run", *options, tmp_path / "program.py")
    closes = r"rank 1 is at \S+program.py:9 in close, in mpi.MPI_Barrier\(ctypes.c_void_p\(comm.handle\)\)"
    assert re.search(closes + ", on KeyError: 'density'", finished.stderr), finished.stderr
    assert "ranks 0, 2 are at " in finished.stderr


def test_the_place_in_code_of_the_command_line(tmp_path: Path) -> None:
    code = "import time; from mpi4py import MPI\nMPI.COMM_WORLD.rank or time.sleep(1000)\nMPI.COMM_WORLD.Barrier()"
    options = ("--timeout", "3", "--debug-dir", tmp_path)
    finished = launch(2, sys.executable, "-m", "hpccomm", "run", *options, "-c", code)
    never = "rank 0 never reached Barrier #1 of 'COMM_WORLD': it is in the program at <string>:2 in <module>, "
    assert f"{never}in time.sleep(1000)" in finished.stderr, finished.stderr
    assert "rank 1 waits at <string>:3" in finished.stderr, finished.stderr


def test_a_dead_rank_ends_the_job(tmp_path: Path) -> None:
    finished = hang(tmp_path, 3, "os.kill(os.getpid(), signal.SIGKILL)", "pass")
    assert finished.returncode not in (0, 124), finished.stderr  # the launcher has seen it
    assert re.search(r"(?i)signal:? ?9|killed", finished.stdout + finished.stderr), finished.stderr


@pytest.mark.skipif("MPICH" not in MPI.Get_library_version(), reason="Open MPI's launcher always ends the job")
def test_a_dead_rank_where_the_launcher_lets_the_others_live(tmp_path: Path) -> None:
    shell = ("sh", "-c", 'trap : USR1; "$@"; exit $?', "sh")  # docs/guide/dead-ranks.md
    died = "os.kill(os.getpid(), signal.SIGKILL)"
    finished = hang(tmp_path, 3, died, "pass", *shell, MPIEXEC_ARGS="-disable-auto-cleanup")
    assert re.search(NEVER + "its process is gone", finished.stderr), finished.stderr
