"""`hpccomm run`: programs of mpi4py that hang, fail or end, as jobs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from hpccomm.debug.trace.files import read as read_traces
from hpccomm.process.environment import LAUNCHERS

from ..launch import ROOT, UNTIL_IN_MPI, WATCHED, clean_environment, launch, run_program

pytestmark = pytest.mark.serial

PROGRAM = """
    import sys, time, threading, os, signal
    import numpy as np
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    x, y = np.ones(1 << 17), np.empty(1 << 17)
    comm.Allreduce(x, y)
    row = comm.Split(0)
    if rank == 1:
        {one}
    else:
        {others}
    comm.Allreduce(x, y, op=MPI.MAX)  # the last line
    print("the end", y[0], sys.argv[1:])
    """


def watched(
    program: str, folder: Path, ranks: int, *arguments: str | Path, options: Sequence[str | Path] = (), **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program by `hpccomm run`."""
    return run_program(program, folder, ranks, *arguments, by=(*WATCHED, *options), **more)


def run(tmp_path: Path, one: str, others: str = "pass", seconds: int = 100) -> tuple[int, str, str]:
    options = ("--timeout", str(seconds), "--debug-dir", tmp_path / "reports")
    finished = watched(PROGRAM.format(one=one, others=others), tmp_path, 3, "--size", "3", options=options)
    return finished.returncode, finished.stdout, finished.stderr


def test_a_program_runs_as_before(tmp_path: Path) -> None:
    status, output, errors = run(tmp_path, "pass")
    assert (status, errors) == (0, "")
    assert output == 3 * "the end 1.0 ['--size', '3']\n"
    assert not (tmp_path / "reports").exists()


def test_an_exception_ends_the_job_with_one_traceback(tmp_path: Path) -> None:
    status, output, errors = run(tmp_path, "{}['a']")
    assert (status, output) == (1, "")
    lines = [line for line in errors.splitlines() if line.startswith("[rank 1]")]
    assert lines[0] == "[rank 1] Traceback (most recent call last):"
    assert lines[1].startswith(f'[rank 1]   File "{tmp_path}/program.py", line 11, in <module>')
    assert lines[-1] == "[rank 1] KeyError: 'a'"
    assert "hpccomm: KeyError on rank 1 ends the job" in errors


def test_an_exception_that_c_code_prints_ends_nothing(tmp_path: Path) -> None:
    printed = "import ctypes; ctypes.pythonapi.PyRun_SimpleString(b'{}[1]')"  # Cython's __dealloc__ does the same
    status, output, errors = run(tmp_path, printed)
    assert (status, output) == (0, 3 * "the end 1.0 ['--size', '3']\n")
    assert "KeyError: 1" in errors
    assert "ends the job" not in errors


PERSISTENT = """
import numpy as np
from mpi4py import MPI
from hpccomm import mpi4py as hm
comm = hm.Comm(MPI.COMM_WORLD)
output = np.zeros(1)
requests = [comm.Recv_init(output, 1 - comm.rank), comm.Send_init(np.ones(1), 1 - comm.rank)]
MPI.Prequest.Startall(requests)
print(*[type(each) is MPI.Prequest for each in requests], *[each.number for each in requests])
MPI.Request.Waitall(requests)
for each in requests:
    each.Free()
comm.process_group.destroy()
"""


def test_persistent_requests_of_hpccomm_mpi4py_are_of_the_class_prequest_and_counted(tmp_path: Path) -> None:
    options = ("--debug-dir", str(tmp_path), "-c", PERSISTENT)
    finished = launch(2, sys.executable, *WATCHED, *options)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, 2 * "True True 1 2\n", "")


HOOKED = """
    import numpy as np
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    x, y = np.ones(4), np.full(4, np.nan)
    comm.Allreduce(x, y)
    part = comm.Split(0)
    part.Bcast(y, root=size - 1)
    part.Free()
    request = comm.Irecv(y, (rank - 1) % size, tag=3)
    comm.Send(x, (rank + 1) % size, tag=3)
    request.Wait()
    comm.bcast({"a": rank})
    x[2] = np.inf if rank == 1 else 1
    comm.Allreduce(MPI.IN_PLACE, x)
    """


def test_a_log_of_its_calls(tmp_path: Path) -> None:
    for ranks in (1, 3):
        finished = watched(HOOKED, tmp_path, ranks, options=("--log", tmp_path / f"{ranks}-{{rank}}.log"))
        assert (finished.returncode, finished.stderr) == (0, "")
        for rank in range(ranks):
            lines = (tmp_path / f"{ranks}-{rank}.log").read_text(encoding="utf-8").splitlines()
            assert [re.sub(r"[\d.]+ us", "T", line) for line in lines] == [
                f"rank {rank}: {line}, T, ok"
                for line in (
                    "Allreduce #1 of 'COMM_WORLD' (32 B float64), SUM",
                    "Split #2 of 'COMM_WORLD'",
                    f"Bcast #1 of 'Split #2 of COMM_WORLD' (32 B float64), peer {ranks - 1}",
                    "Free #2 of 'Split #2 of COMM_WORLD'",
                    f"Irecv #1 of 'COMM_WORLD' (32 B float64), peer {(rank - 1) % ranks}, async",
                    f"Send #2 of 'COMM_WORLD' (32 B float64), peer {(rank + 1) % ranks}",
                    "bcast #3 of 'COMM_WORLD', peer 0",
                    "Allreduce #4 of 'COMM_WORLD' (32 B float64), SUM",
                )
            ]


def test_hooks_that_it_does_not_know_of(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import hpccomm.debug\n"
        "class Names:\n"
        "    def begin(self, call): print(call.name, call.group.size, call.op, call.nbytes, flush=True)\n"
        "    def end(self, call): pass\n"
        "def names(): hpccomm.debug.register_hook(Names())\n"
    )
    hooks = ("--hook", "mine:names", "--hook", "hpccomm.debug:check_numerics")
    finished = watched(HOOKED, tmp_path, 3, options=hooks)
    assert finished.returncode != 0
    found = "Allreduce #4 of 'COMM_WORLD' (32 B float64): recvbuf before it: inf at [2], 1 of 4 elements are not finite"
    assert f"[rank 1] hpccomm.errors.DistError: {found}" in finished.stderr
    said = finished.stdout.splitlines()
    assert (said.count("Allreduce 3 SUM 64"), said.count("Bcast 3 None 32"), said.count("Irecv 3 None 32")) == (3, 3, 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--hook", "there_is_none:f"), "argument --hook there_is_none:f: No module named 'there_is_none'"),
        (("--hook", "hpccomm.debug:f"), "argument --hook hpccomm.debug:f: module 'hpccomm.debug' has no attribute 'f'"),
        (("--only-ranks", "2-3"), "argument --only-ranks: there is no rank 2; the job has 2 ranks"),
        (("--pdb", "7"), "argument --pdb: there is no rank 7; the job has 2 ranks"),
        (("--log", "/"), "argument --log: / is a folder; expected a file"),
    ],
)
def test_an_option_that_names_nothing_of_the_job(options: tuple[str, str], said: str, tmp_path: Path) -> None:
    finished = watched("from mpi4py import MPI\nprint('began')", tmp_path, 2, options=options)
    assert finished.returncode not in (0, 124)
    assert said in finished.stderr
    assert "Traceback" not in finished.stderr
    assert "began" not in finished.stdout


@pytest.mark.parametrize("chained", ["", "before(*error)"])
def test_the_programs_own_hook_prints_and_the_job_ends(chained: str, tmp_path: Path) -> None:
    hook = f"before, sys.excepthook = sys.excepthook, lambda *error: (print('mine:', error[1]), {chained})"
    status, output, errors = run(tmp_path, f"{hook}; {{}}['a']")
    assert (status, output) == (1, "mine: 'a'\n"), errors
    assert "hpccomm: KeyError on rank 1 ends the job" in errors
    assert ("[rank 1] KeyError: 'a'" in errors) is bool(chained)


def test_a_status_of_a_forked_process_ends_that_one_only(tmp_path: Path) -> None:
    child = "atexit.register(os._exit, 4), sys.exit(3)"  # without MPI_Finalize, which is its parent's
    parent = "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)"
    fork = "import warnings; warnings.simplefilter('ignore'); pid = os.fork()"  # Python 3.12 warns: there are threads
    status, output, errors = run(tmp_path, f"import atexit; {fork}; pid or ({child}); {parent}")
    assert (status, errors) == (0, "")
    assert sorted(output.splitlines()) == ["4", *3 * ["the end 1.0 ['--size', '3']"]]


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("sys.exit()", 0), ("1 / 0", 1)])
def test_after_mpi_finalize_the_status_is_pythons(end: str, status: int, tmp_path: Path) -> None:
    """On one rank: of several the launcher may kill those that end last, and return 9."""
    program = f"import sys\nfrom mpi4py import MPI\nMPI.Finalize()\n{end}\n"
    finished = watched(program, tmp_path, 1, status=status)
    assert "MPI_Abort" not in finished.stderr


def test_a_status_of_one_rank_ends_the_job(tmp_path: Path) -> None:
    status, output, errors = run(tmp_path, "sys.exit(3)")
    assert (status, output) == (3, "")
    assert "[rank 1] hpccomm: sys.exit(3) ends the job" in errors


def test_ctrl_c_on_one_rank_ends_the_job(tmp_path: Path) -> None:
    status, output, errors = run(tmp_path, "signal.raise_signal(signal.SIGINT)")
    assert (status, output) == (1, "")
    lines = [line for line in errors.splitlines() if line.startswith("[rank 1]")]
    assert lines[0] == "[rank 1] Traceback (most recent call last):"
    assert "hpccomm: Ctrl-C ends the job" in errors


INTERRUPTED = """
    import os, signal, sys, threading, time
    import numpy as np
    from mpi4py import MPI
    main = threading.get_ident()
    def interrupt():
        while sys._current_frames()[main].f_code.co_name != "Allreduce":
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
    if MPI.COMM_WORLD.Get_rank() == 1:
        threading.Thread(target=interrupt).start()
        MPI.COMM_WORLD.Allreduce(np.ones(4), np.empty(4))
    time.sleep(1000)
    """


def test_ctrl_c_inside_mpi_ends_the_job(tmp_path: Path) -> None:
    finished = watched(INTERRUPTED, tmp_path, 2)
    assert finished.returncode not in (0, 124), finished.stderr
    assert "[rank 1] Ctrl-C, inside MPI (most recent call last):" in finished.stderr
    said = "hpccomm: rank 1 is in Allreduce #1 of 'COMM_WORLD' (32 B float64); Ctrl-C ends the job"
    assert said in finished.stderr


ENDS = {
    "it sleeps": ("time.sleep(1000)", r"it (has ended by KeyboardInterrupt at|is in the program at)"),
    "it sleeps, others wait for a request": ("time.sleep(1000)", r"it (has ended by KeyboardInterrupt at|is in the)"),
    "its program has ended": ("sys.exit()", "it has come to the end of its program"),
    "it waits for a lock": ("threading.Semaphore(0).acquire()", r"it (has ended by KeyboardInterrupt at|is in the)"),
    "it is in a call of C": (
        "ctypes.CDLL(MPI.__file__).MPI_Barrier(ctypes.c_void_p(row.handle))",
        "it is in the program",
    ),
}


@pytest.mark.skipif("MPICH" not in MPI.Get_library_version(), reason="Open MPI's launcher kills the ranks after 0.5 s")
@pytest.mark.parametrize("case", ENDS)
def test_ctrl_c_in_a_job_that_hangs_has_one_verdict(case: str, tmp_path: Path) -> None:
    body, said = ENDS[case]
    waits = "Ibarrier().Wait" if "request" in case else "Barrier"
    program = f"""
        import ctypes, os, pathlib, signal, sys, threading, time
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        row = comm.Split(0)
        def press():
            until_in_mpi()
            pathlib.Path(sys.argv[1]).mkdir(exist_ok=True)
            (pathlib.Path(sys.argv[1]) / f"waits{{comm.rank}}").touch()
            while comm.rank == 0 and not (pathlib.Path(sys.argv[1]) / "waits2").exists():
                time.sleep(0.05)
            for process in pids if comm.rank == 0 else ():
                os.kill(process, signal.SIGINT)
        pids = comm.allgather(os.getpid())
        if comm.rank == 1:
            {body}
        else:
            threading.Thread(target=press, daemon=True).start()
            comm.{waits}()
        """
    program = UNTIL_IN_MPI + textwrap.dedent(program)
    finished = watched(program, tmp_path, 3, tmp_path / "marks", options=("--debug-dir", tmp_path / "reports"))
    assert finished.returncode not in (0, 124), finished.stderr
    assert len(re.findall(r"rank 1 never reached I?[Bb]arrier #3 of 'COMM_WORLD': " + said, finished.stderr)) == 1
    assert finished.stderr.count("Ctrl-C, inside MPI") == 1
    ours = ("hpccomm/run", "hpccomm/debug", "hpccomm/cli", "bin/hpccomm", "<frozen")
    assert not any(each in finished.stderr for each in ours), finished.stderr


RC = {
    "errors": ("errors='fatal'", "assert MPI.COMM_WORLD.Get_errhandler() == MPI.ERRORS_ARE_FATAL"),
    "threads": ("threads=False", "assert MPI.Query_thread() == MPI.THREAD_SINGLE"),
    "thread_level": ("thread_level='funneled'", "assert MPI.Query_thread() == MPI.THREAD_FUNNELED"),
    "initialize": (
        "initialize=False",
        "assert not MPI.Is_initialized(); assert MPI.Init_thread(MPI.THREAD_SERIALIZED) == MPI.THREAD_SERIALIZED; "
        "atexit.register(MPI.Finalize)",  # without which Open MPI's launcher complains
    ),
    "initialize and finalize": ("initialize=False, finalize=False", "MPI.Init(); atexit.register(MPI.Finalize)"),
    "nothing, but imported twice": ("", "del MPI; import mpi4py.MPI; from mpi4py import MPI"),
}


@pytest.mark.parametrize("what", RC)
def test_what_a_program_sets_in_mpi4py_rc_is_respected(what: str) -> None:
    given, check = RC[what]
    code = f"import atexit, mpi4py; mpi4py.rc({given}); from mpi4py import MPI; {check}\n"
    code += "print(MPI.COMM_WORLD.allreduce(1), type(MPI.COMM_WORLD) is MPI.Intracomm)"
    finished = launch(2, sys.executable, *WATCHED, "-c", code)
    assert (finished.returncode, finished.stdout) == (0, 2 * "2 False\n"), finished.stderr


@pytest.mark.parametrize(
    ("fails", "status", "said"),
    [
        ("{}['a']", 1, "KeyError: 'a'"),
        ("sys.exit(3)", 3, "[rank 1] hpccomm: sys.exit(3) ends the job"),
        ("import no_such_module", 1, "No module named 'no_such_module'"),
        ("import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; {}['b']", 1, "KeyError: 'b'"),
    ],
)
def test_who_fails_before_mpi_is_there_ends_those_that_wait_for_it(fails: str, status: int, said: str) -> None:
    names = [each.rank for each in LAUNCHERS]
    code = f"import os, sys\nif '1' in [os.environ.get(each) for each in {names}]:\n    {fails}\n"
    finished = launch(2, sys.executable, *WATCHED, "-c", code + "from mpi4py import MPI")
    killed = {9} if MPI.get_vendor()[0] == "MPICH" else set()  # hydra's, if it sees the rank that it has killed first
    assert finished.returncode in {status, *killed}, finished.stderr
    assert said in finished.stderr


@pytest.mark.parametrize("fails", ["import no_such_module", "{}['a']", "raise SystemExit('we stop')", "int('x')"])
def test_what_all_ranks_say_before_mpi_is_there_is_printed_once(fails: str) -> None:
    code = f"from hpccomm.process import together; together.QUIET = 60\n{fails}\nfrom mpi4py import MPI"
    finished = launch(3, sys.executable, *WATCHED, "-c", code)
    assert finished.returncode == 1
    assert "[ranks 0-2] " in finished.stderr
    assert not re.search(r"\[ranks? [0-2]\]", finished.stderr), finished.stderr
    assert finished.stderr.count("Traceback") == ("SystemExit" not in fails)


def alone(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=clean_environment(), check=False
    )


@pytest.mark.parametrize("what", ["no such file", "a folder without a program", "a syntax error", "a link to nothing"])
def test_what_can_not_be_run_is_as_python_says(what: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    if what == "a folder without a program":
        program.mkdir()
    elif what == "a syntax error":
        program.write_text("print(")
    elif what == "a link to nothing":
        program.symlink_to(tmp_path / "nothing")
    plain, watched = alone(program), alone("-m", "hpccomm", "run", program)
    assert (watched.returncode, watched.stderr) == (plain.returncode, plain.stderr)
    assert plain.returncode != 0


def test_a_missing_file_on_several_ranks() -> None:
    finished = launch(2, sys.executable, *WATCHED, "/no/such/program.py")
    assert finished.returncode == 2
    assert "can't open file '/no/such/program.py': [Errno 2] No such file or directory" in finished.stderr


STREAMS = {
    "none": "sys.stdout = None",
    "closed": "sys.stdout.close()",
    "the file is closed": "os.close(1)",
    "without flush and fileno": "sys.stdout = types.SimpleNamespace(write=len)",
    "stderr too": "sys.stdout = sys.stderr = None",
    "without fileno": "sys.stdout = types.SimpleNamespace(write=len, flush=int)",
}


@pytest.mark.parametrize(("end", "status"), [("", 0), ("; sys.exit(3)", 3), ("; 1 / 0", 1)])
@pytest.mark.parametrize("what", STREAMS)
def test_whatever_becomes_of_the_streams_the_status_is_the_programs(what: str, end: str, status: int) -> None:
    code = f"import os, sys, types; from mpi4py import MPI; {STREAMS[what]}{end}"
    plain = alone("-c", code).returncode  # 120 where Python itself can't flush a stream
    assert plain in (status, 120)
    assert alone("-m", "hpccomm", "run", "-c", code).returncode in (status, plain)


def test_silent_ranks_of_a_job(tmp_path: Path) -> None:
    ways = [way for way in STREAMS.values() if "types" not in way]  # which Python ends with 120
    code = f"import os, sys; from mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\nif rank: exec({ways}[rank - 1])"
    finished = launch(1 + len(ways), sys.executable, *WATCHED, "-c", code)
    assert (finished.returncode, finished.stderr) == (0, "")


def test_modules_code_and_mistakes() -> None:
    command = (sys.executable, *WATCHED)
    code = "import sys; from mpi4py import MPI; print(sys.argv, MPI.COMM_WORLD.allreduce(1))"
    assert launch(2, *command, "-c", code, "-x").stdout == 2 * "['-c', '-x'] 2\n"
    finished = launch(2, *command, "-m", "mpi4py.bench", "helloworld", "-q")
    assert finished.returncode == 0, finished.stderr
    finished = launch(1, *command)
    assert finished.returncode == 2
    assert "there is no program" in finished.stderr


MAIN = """
    import atexit, os, sys
    from mpi4py import MPI
    class Result: pass
    def function(x: 1 + 1): pass
    os.chdir("/")
    print(__file__, sys.argv, sys.path[0], __name__, getattr(__spec__, "name", None), __package__)
    print(function.__annotations__)
    atexit.register(lambda: print(type((MPI.COMM_WORLD.gather(Result()) or [None])[0])))
    """


def test_the_module_main_is_as_python_makes_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file, whole = (Path(os.path.relpath(each, ROOT)) for each in (folder / "__main__.py", folder))
    file.write_text(textwrap.dedent(MAIN), encoding="utf-8")
    for words in ((file, "-c", "--timeout=x"), (whole, "1"), ("-c", textwrap.dedent(MAIN).replace("__file__, ", ""))):
        plain, watched = (launch(2, sys.executable, *how, *words) for how in ((), ("-m", "hpccomm", "run")))
        assert plain.stdout.count("Result") == 1, plain.stderr
        assert sorted(watched.stdout.splitlines()) == sorted(plain.stdout.splitlines())


def test_pytest_runs_where_warnings_are_errors(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text("from mpi4py import MPI\n\ndef test_one():\n    assert MPI.COMM_WORLD.allreduce(1) == 2\n")
    options = ("-m", "pytest", "-c", "/dev/null", "-W", "error", "-p", "no:cacheprovider", "-q", "--with-mpi")
    finished = launch(2, sys.executable, *WATCHED, *options, file)
    assert (finished.returncode, "1 passed" in finished.stdout) == (0, True), finished.stderr


def test_a_program_may_initialise_mpi_and_use_hpccomm(tmp_path: Path) -> None:
    program = """
        import mpi4py
        mpi4py.rc.initialize = False
        from mpi4py import MPI
        MPI.Init()
        import numpy as np, hpccomm as hc
        with hc.init_process_group():
            x = np.ones(3)
            hc.all_reduce(x)
            print(x, MPI.COMM_WORLD.allreduce(1))
        MPI.Finalize()
        """
    finished = watched(program, tmp_path, 2)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, 2 * "[2. 2. 2.] 2\n", "")


def test_without_a_watchdog_nothing_is_replaced() -> None:
    command = (sys.executable, *WATCHED, "-c")
    code = "from mpi4py import MPI; print(type(MPI.COMM_WORLD) is MPI.Intracomm)"
    assert launch(2, *command, code, env={"HPCCOMM_WATCHDOG": "0"}).stdout == 2 * "True\n"
    assert launch(2, *command, code).stdout == 2 * "False\n"


def test_a_recording_of_its_calls(tmp_path: Path) -> None:
    program = """
        import numpy as np
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        rank, size = comm.Get_rank(), comm.Get_size()
        x, y = np.ones(4), np.empty(4)
        row = comm.Split(0)
        row.Allreduce([x, MPI.DOUBLE] if rank else x, y, op=MPI.MAX)
        requests = [comm.Irecv(y, (rank - 1) % size), comm.Isend(x, (rank + 1) % size)]
        MPI.Request.Waitall(requests)
        comm.send(1, rank)  # taken by a message, which nobody sees
        while not (message := comm.improbe(rank)):
            pass
        message.recv()
        row.Free()
        receive = comm.Recv_init(y, rank, 5)
        receive.Start()
        comm.Send(x, rank, 5)
        receive.Wait()
        comm.Bcast(x, root=0)
        """
    folder = tmp_path / "recordings"
    watched(program, tmp_path, 2, options=("--trace", "--debug-dir", folder), status=0)
    traces = read_traces(next(folder.iterdir()))
    assert len(traces) == 2
    for trace in traces:
        calls = [(each.name, each.number, each.group_name) for each in trace.records]
        row = "Split #1 of COMM_WORLD"
        assert calls == [
            ("Split", 1, "COMM_WORLD"),
            ("Allreduce", 1, row),
            ("Irecv", 1, "COMM_WORLD"),
            ("Isend", 2, "COMM_WORLD"),
            ("send", 3, "COMM_WORLD"),
            ("Free", 2, row),
            ("Recv_init", 4, "COMM_WORLD"),
            ("Send", 5, "COMM_WORLD"),
            ("Bcast", 2, "COMM_WORLD"),
        ]
        assert all(each.state == "completed" and each.begin <= each.end for each in trace.records)
        assert [each.where.rpartition("/")[2] for each in trace.records[:3]] == [f"program.py:{n}" for n in (7, 8, 9)]
        start = next(each for each in trace.records if each.name == "Recv_init")
        assert (start.dtype, start.count, start.where.rpartition("/")[2]) == ("float64", 4, "program.py:17")
        assert trace.clock_error is not None
    finished = launch(1, sys.executable, "-m", "hpccomm", "trace", folder, "--summary")
    assert finished.returncode == 0, finished.stdout
    assert "18 operations of 2 of 2 ranks\nall ranks have made the same calls" in finished.stdout


def test_a_recording_names_the_call_that_differs(tmp_path: Path) -> None:
    code = """
import numpy as np
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank()
MPI.COMM_WORLD.Barrier()
MPI.COMM_WORLD.Allreduce(np.ones(4), np.empty(4), MPI.MAX if rank else MPI.SUM)
raise KeyError("the end")
"""
    command = (sys.executable, *WATCHED, "--debug-dir", tmp_path / "recordings", "-c", code)
    assert launch(2, *command, env={"HPCCOMM_TRACE": "1"}).returncode != 0
    finished = launch(1, sys.executable, "-m", "hpccomm", "trace", tmp_path / "recordings")
    assert finished.returncode == 1
    assert re.search(r"collective #2 of group 'COMM_WORLD' differs: .*Allreduce \(4 float64, MAX\)", finished.stdout)
