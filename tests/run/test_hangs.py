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

from ..launch import NO_THREAD_AT_THE_END, WATCHED, launch, run_program

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
    "the first reduction of objects, by a function": (  # for which mpi4py duplicates the communicator
        "time.sleep(1000)",
        "comm.allreduce(1, op=max)",
        r"rank 1 never reached allreduce #5 of 'COMM_WORLD'.*: " + AT + r"<module>, in time.sleep\(1000\)",
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
    command = (*shell, sys.executable, *WATCHED, *options, program, tmp_path / "lock")
    return launch(ranks, *command, env=environment)


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
    finished = run_program(program, tmp_path, 3, by=(*WATCHED, *limits, "--debug-dir", tmp_path / "reports"))
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
    by = (*WATCHED, "--timeout", "2", "--debug-dir", tmp_path / "reports")
    finished = run_program(program, tmp_path, 3, by=by)
    closes = r"rank 1 is at \S+program.py:9 in close, in mpi.MPI_Barrier\(ctypes.c_void_p\(comm.handle\)\)"
    assert re.search(closes + ", on KeyError: 'density'", finished.stderr), finished.stderr
    assert "ranks 0, 2 are at " in finished.stderr


def test_the_place_in_code_of_the_command_line(tmp_path: Path) -> None:
    code = "import time; from mpi4py import MPI\nMPI.COMM_WORLD.rank or time.sleep(1000)\nMPI.COMM_WORLD.Barrier()"
    options = ("--timeout", "3", "--debug-dir", tmp_path)
    finished = launch(2, sys.executable, *WATCHED, *options, "-c", code)
    never = "rank 0 never reached Barrier #1 of 'COMM_WORLD': it is in the program at <string>:2 in <module>, "
    assert f"{never}in time.sleep(1000)" in finished.stderr, finished.stderr
    assert "rank 1 waits at <string>:3" in finished.stderr, finished.stderr


def test_a_dead_rank_ends_the_job(tmp_path: Path) -> None:
    finished = hang(tmp_path, 3, "os.kill(os.getpid(), signal.SIGKILL)", "pass")
    assert finished.returncode not in (0, 124), finished.stderr  # the launcher has seen it
    assert re.search(r"(?i)signal:? ?9|killed", finished.stdout + finished.stderr), finished.stderr


@pytest.mark.skipif("MPICH" not in MPI.Get_library_version(), reason="Open MPI's launcher always ends the job")
def test_a_dead_rank_where_the_launcher_lets_the_others_live(tmp_path: Path) -> None:
    shell = ("sh", "-c", 'trap : USR1; "$@"; exit $?', "sh")  # docs/how-to/dead-ranks.md
    died = "os.kill(os.getpid(), signal.SIGKILL)"
    finished = hang(tmp_path, 3, died, "pass", *shell, MPIEXEC_ARGS="-disable-auto-cleanup")
    assert re.search(NEVER + "its process is gone", finished.stderr), finished.stderr


# Rank 0 goes on when the verdict is there, so the time limit of a second may pass on a machine as loaded as you like.
TOLD = """
    import ctypes, pathlib, sys, time
    import numpy as np
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    x, y = np.ones(4), np.empty(4)
    def until_told(words):
        while not any(words in file.read_text() for file in pathlib.Path(sys.argv[1]).glob("*/verdict*.txt")):
            time.sleep(0.01)
    """


def told(tmp_path: Path, program: str, *options: str, ranks: int = 3) -> subprocess.CompletedProcess[str]:
    """Run a program with a time limit of which the user has said no more than HPCCOMM_TIMEOUT."""
    program, reports = textwrap.dedent(TOLD) + textwrap.dedent(program), tmp_path / "reports"
    by = (*WATCHED, "--debug-dir", reports, *options)
    return run_program(program, tmp_path, ranks, reports, by=by, env={"HPCCOMM_TIMEOUT": "1"})


def test_a_slow_rank_is_only_told_of(tmp_path: Path) -> None:
    """Of a rank that works alone for longer than the limit: in a collective, a receive, a wait, and at the end."""
    program = """
        def slow(words):
            if rank == 0:
                until_told(words)
        slow("rank 0 never reached bcast #1 of 'COMM_WORLD'")
        assert comm.bcast("x") == "x"
        slow("rank 0 never reached Allreduce #2 of 'COMM_WORLD'")
        comm.Allreduce(x, y)
        slow("rank 0 has not answered recv #1 of 'COMM_WORLD'")
        comm.send(1, 1) if rank == 0 else comm.recv(source=0) if rank == 1 else None
        slow("rank 0 has not answered Irecv #")
        comm.Send(x, 1) if rank == 0 else comm.Irecv(y, source=0).Wait() if rank == 1 else None
        print("the end", flush=True)
        slow("ranks 1-2 wait at the end of the program for rank 0: it is in the program at ")
        """
    finished = told(tmp_path, program, "--accelerate")
    assert (finished.returncode, finished.stdout) == (0, 3 * "the end\n"), finished.stderr
    said = "hpccomm: the job goes on, because a rank may only be slow: hpccomm run --timeout SECONDS ends it"
    assert finished.stderr.count(said) >= 5
    assert "the job ends" not in finished.stderr


DEADLOCKS = {
    "two receives": ("comm.recv(source=1 - rank) if rank < 2 else comm.Barrier()", "ranks 0-1 wait for each other"),
    "another communicator": ("other = comm.Dup(); (comm if rank else other).Barrier()", "in Barrier #1 of 'Dup #1 of"),
    "one has ended": ("rank and comm.Barrier()", "rank 0 never reached Barrier #1 of 'COMM_WORLD': it has come to"),
    "one has been slow before": (
        "rank or until_told('rank 0 never reached Barrier #1'); rank and comm.Barrier(); comm.recv(source=1)",
        "rank 0 is in recv #1 of 'COMM_WORLD'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DEADLOCKS)
def test_where_every_rank_waits_the_job_ends(case: str, tmp_path: Path) -> None:
    body, said = DEADLOCKS[case]
    finished = told(tmp_path, body + "\n")
    assert finished.returncode in (124, 9), finished.stderr  # MPICH's mpiexec, of what it has killed
    assert said in finished.stderr
    assert "hpccomm: the job ends with status 124 (every rank waits)" in finished.stderr
    assert "hpccomm: hpccomm run --timeout SECONDS allows more time" in finished.stderr


POLLED = {
    "Iprobe": "while not comm.Iprobe(source=MPI.ANY_SOURCE): time.sleep(0.001)",
    "iprobe": "while not any(comm.iprobe(source=each) for each in (1, 2)): time.sleep(0.001)",
    "improbe": "while (message := comm.improbe(source=1)) is None: pass",
    "Test": "request = comm.Irecv(y, source=1)\n    while not request.Test(): time.sleep(0.001)",
    "Testall": "requests = [comm.Irecv(y, 1)]\n    while not MPI.Request.Testall(requests): pass",
}
RECEIVED = {"improbe": "message.recv()", "Test": "", "Testall": ""}


def test_behind_a_rank_that_polls_is_the_culprit(tmp_path: Path) -> None:
    """Rank 0 polls for what rank 1 is to send, and rank 2 waits for rank 0: one communicator for each way to poll."""
    program, names = "", []
    for number, (how, polls) in enumerate(POLLED.items(), 1):
        name = f"{'Irecv #1' if 'est' in how else how} of 'Dup #{number} of COMM_WORLD'"
        names.append(name)
        program += (
            f"comm = MPI.COMM_WORLD.Dup()\nif rank == 0:\n    {polls}\n"
            f"    {RECEIVED.get(how, 'comm.recv(source=1)')}\n    comm.send(1, 2)\n"
            f'elif rank == 1:\n    until_told("rank 1 has not answered {name}")\n'
            f"    comm.{'Send(x, 0)' if 'est' in how else 'send(1, 0)'}\n"
            "else:\n    comm.recv(source=0)\n"
        )
    finished = told(tmp_path, program + "print('the end', flush=True)\n")
    assert (finished.returncode, finished.stdout) == (0, 3 * "the end\n"), finished.stderr
    for name in names:
        line = next(line for line in finished.stderr.splitlines() if f"rank 1 has not answered {name}" in line)
        assert re.search(r": it is in the program at .*; rank 0 asks for it again and again at \S+:\d+$", line)


@pytest.mark.parametrize("hangs", ["time.sleep(1000)", "any(iter(int, 1))", "MPI.COMM_SELF.recv(source=0)"])
def test_who_hangs_after_the_last_collective_is_named(hangs: str, tmp_path: Path) -> None:
    program = f"{NO_THREAD_AT_THE_END}comm.Barrier()\nif rank == 1:\n    {hangs}\n"
    finished = told(tmp_path, program, "--timeout", "2", ranks=4)
    assert finished.returncode in (124, 9), finished.stderr
    assert re.search(r"rank 1\b.* (at|in) .*program.py:16", finished.stderr), finished.stderr
    assert "the job ends with status 124 (--on-timeout abort)" in finished.stderr
