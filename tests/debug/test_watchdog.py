"""The watchdog in jobs that hang: what is said, what is written, and what happens next."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.debug import stacks
from hpccomm.debug.report import Reporter, latest, process_state, read
from hpccomm.debug.start import Signals
from hpccomm.debug.watchdog import Watchdog, in_flight

from ..launch import ROOT, UNTIL_IN_MPI, clean_environment, mpiexec_folder, time_limit, until

pytestmark = pytest.mark.serial

# Rank 1 comes late: when there is a file "go".
LATE = """
    import sys, time, pathlib, numpy as np, hpccomm as hc
    folder = pathlib.Path(sys.argv[1])
    world = hc.init_process_group(timeout={timeout}, on_timeout={on_timeout!r})
    x = np.ones(3)
    def be_late():
        while not (folder / "go").exists():
            time.sleep(0.05)
    if world.rank == 1:
        be_late()
    {rest}
    """


def start(
    program: str, folder: Path, ranks: int = 2, options: tuple[str, ...] = (), **env: str
) -> subprocess.Popen[str]:
    file = folder / "program.py"
    file.write_text(textwrap.dedent(program), encoding="utf-8")
    environment = {
        **clean_environment(),
        "HPCCOMM_DEBUG_DIR": str(folder / "reports"),
        "TIME_LIMIT": str(time_limit(90)),
        **env,
    }
    command = [ROOT / "tools" / "run-mpi", mpiexec_folder(), str(ranks), sys.executable, file, folder, *options]
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **streams)


def verdict_of(folder: Path) -> str:
    files = folder.glob
    return until(lambda: "".join(each.read_text() for each in files("reports/run-*/verdict.txt")), "verdict") or ""


def finish(job: subprocess.Popen[str], folder: Path) -> tuple[str, str]:
    (folder / "go").touch()
    stdout, stderr = job.communicate(timeout=time_limit(100))
    assert job.returncode == 0, stderr
    return stdout, stderr


def test_warn_goes_on(tmp_path: Path) -> None:
    job = start(
        LATE.format(timeout=2, on_timeout="warn", rest="hc.all_reduce(x); print(f'{x.tolist()}\\n', end='')"), tmp_path
    )
    said = verdict_of(tmp_path)
    late = "rank 1 never reached all_reduce #1 of 'world' (24 B float64): it is in the program at program.py:"
    assert re.search(re.escape(late) + "[78] in be_late", said), said  # it sleeps, or looks for the file
    stdout, stderr = finish(job, tmp_path)
    assert stdout.split("\n")[:2] == ["[2.0, 2.0, 2.0]"] * 2
    assert stderr.count("has not ended within") == 1  # once, not every second
    assert "the job ends" not in stderr


def test_handlers_of_the_program_get_lines_and_the_verdict(tmp_path: Path) -> None:
    config = "import logging; logging.basicConfig(filename=sys.argv[1] + '/log', level='INFO')\n    world ="
    program = LATE.replace("world =", config).format(timeout=1, on_timeout="abort", rest="hc.all_reduce(x)")
    job = start(program, tmp_path, HPCCOMM_DEBUG="INFO")
    _, stderr = job.communicate(timeout=time_limit(100))
    lines = (tmp_path / "log").read_text()
    verdict = "rank 1 never reached all_reduce #1 of 'world'"
    assert job.returncode == 124
    assert lines.startswith("INFO:hpccomm:made 'world': ranks 0, 1 on 1 node, ")
    assert "ERROR:hpccomm:all_reduce #1 of 'world'" in lines
    assert verdict in lines
    assert "made" not in stderr
    assert f"hpccomm: {verdict}" in stderr


@pytest.mark.parametrize("on_timeout", ["warn", "raise"])
def test_a_second_hang_has_a_verdict_of_its_own(tmp_path: Path, on_timeout: str) -> None:
    program = """
        import sys, time, pathlib, numpy as np, hpccomm as hc
        folder = pathlib.Path(sys.argv[1])
        world = hc.init_process_group(timeout=2, on_timeout=sys.argv[2])
        for late, name in ((1, "verdict.txt"), (2, "verdict-2.txt")):
            while world.rank == late and not list(folder.glob(f"reports/run-*/{name}")):
                time.sleep(0.05)
            work, x = None, np.ones(3)
            if sys.argv[2] == "warn":
                hc.all_reduce(x)
            else:
                work = hc.all_reduce(x, async_op=True)
                try:
                    work.wait()
                except hc.DistTimeoutError as error:
                    print(f"rank {late} is late; {error}".replace("\\n", " ") + "\\n", end="", flush=True)
                    work.wait(60)
        """
    job = start(program, tmp_path, 3, options=(on_timeout,))
    stdout, stderr = job.communicate(timeout=time_limit(100))
    assert job.returncode == 0, stderr
    for late, name in ((1, "verdict.txt"), (2, "verdict-2.txt")):
        verdict = f"rank {late} never reached all_reduce #{late} of 'world'"
        assert verdict in next(tmp_path.glob(f"reports/run-*/{name}")).read_text()
        if on_timeout == "warn":
            assert verdict in stderr
        else:
            assert all(verdict in line for line in stdout.splitlines() if line.startswith(f"rank {late} is late"))
            assert f"rank {late} is late" in stdout


def test_raise_raises_in_wait_and_the_operation_can_still_end(tmp_path: Path) -> None:
    rest = """
    work = hc.all_reduce(x, async_op=True)
    try:
        work.wait()
    except hc.DistTimeoutError as error:
        print(f"raised {'rank 1 never reached all_reduce' in str(error)}\\n", end="")
    be_late()
    while not work.is_completed():
        pass
    print(f"{x.tolist()}\\n", end="")
    """
    job = start(LATE.format(timeout=2, on_timeout="raise", rest=rest), tmp_path)
    assert "rank 1 never reached all_reduce #1 of 'world'" in verdict_of(tmp_path)
    stdout, _ = finish(job, tmp_path)
    assert sorted(stdout.split("\n")) == ["", "[2.0, 2.0, 2.0]", "[2.0, 2.0, 2.0]", "raised True"]


def test_raise_ends_the_job_in_a_blocking_call(tmp_path: Path) -> None:
    job = start(LATE.format(timeout=2, on_timeout="raise", rest="hc.all_reduce(x)"), tmp_path)
    _, stderr = job.communicate(timeout=time_limit(100))
    assert job.returncode == 124
    assert (
        "the job ends with status 124 (on_timeout='raise', because a blocking call of MPI can't be interrupted)"
        in stderr
    )


def test_a_work_counts_while_the_program_asks_for_it(tmp_path: Path) -> None:
    rest = """
    work = hc.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    """
    job = start(LATE.format(timeout=2, on_timeout="abort", rest=rest), tmp_path)
    _, stderr = job.communicate(timeout=time_limit(100))
    assert job.returncode == 124
    assert "rank 1 never reached all_reduce #1 of 'world'" in stderr


def test_a_work_beside_which_the_program_computes_does_not_count(tmp_path: Path) -> None:
    program = """
        import pathlib, sys, time, numpy as np, hpccomm as hc
        world = hc.init_process_group(timeout=1)
        x = np.ones(3)
        receive = hc.irecv(x, src=1 - world.rank)
        time.sleep(4)
        (pathlib.Path(sys.argv[1]) / f"computed-{world.rank}").touch()
        while len(list(pathlib.Path(sys.argv[1]).glob("computed-*"))) < 2:
            time.sleep(0.01)  # nobody waits in MPI for one that has begun later
        hc.send(np.full(3, 7.0), dst=1 - world.rank)
        receive.wait()
        assert (x == 7).all()
        world.destroy()
        """
    job = start(program, tmp_path)
    _, stderr = job.communicate(timeout=time_limit(100))
    assert (job.returncode, stderr) == (0, "")
    assert not (tmp_path / "reports").exists()  # nothing to say


@pytest.mark.parametrize("rank", [0, 1])  # one at a time: the launcher ends the other as soon as one has ended
def test_ctrl_c_inside_mpi_shows_where_the_rank_is(tmp_path: Path, rank: int) -> None:
    program = f"""
        import os, signal, threading, numpy as np, hpccomm as hc
        def press():
            until_in_mpi()
            if world.rank == {rank}:
                os.kill(os.getpid(), signal.SIGINT)
        def exchange(x):
            hc.recv(x, src=1 - world.rank)
        world = hc.init_process_group()
        threading.Thread(target=press).start()
        exchange(np.ones(3))
        """
    job = start(UNTIL_IN_MPI + textwrap.dedent(program), tmp_path)
    _, stderr = job.communicate(timeout=time_limit(100))
    assert job.returncode not in (0, 124)
    assert f"[rank {rank}] Ctrl-C, inside MPI (most recent call last):" in stderr
    assert f"[rank {rank}]     hc.recv(x, src=1 - world.rank)" in stderr
    assert f"hpccomm: rank {rank} is in recv #1 of 'world' (24 B float64); Ctrl-C ends the job" in stderr


AT_THE_END = {
    "with hc.init_process_group() as world": "hpccomm: Ctrl-C ends the job; at the end of a `with` block, a rank waits",
    "world = hc.init_process_group()\nif world": "rank 1 never reached all_reduce #1 of 'world' (24 B float64): it has "
    "come to the end of its program",
}


@pytest.mark.parametrize(("block", "said"), AT_THE_END.items(), ids=["with block", "program"])
def test_ctrl_c_names_who_is_blocked_and_who_is_at_the_end(block: str, said: str, tmp_path: Path) -> None:
    program = """
        import os, pathlib, signal, sys, threading, time, numpy as np, hpccomm as hc
        from hpccomm.debug import stacks
        from hpccomm.core import ending
        from hpccomm.process import excepthook
        excepthook.PATIENCE = ending.LONELY = ending.LONGEST_GOODBYE = 30  # on a machine as loaded as you like
        folder, main = pathlib.Path(sys.argv[1]), threading.get_ident()
        def press():
            if world.rank == 0:
                until_in_mpi()
            while stacks.call_of_thread(main) is None:
                time.sleep(0.01)
            (folder / f"waits{world.rank}").touch()
            while world.rank == 0 and not (folder / "waits1").exists():
                time.sleep(0.01)
            for process in world.processes.values() if world.rank == 0 else ():
                os.kill(process, signal.SIGINT)
        BLOCK:
            threading.Thread(target=press, daemon=True).start()
            if world.rank == 0:
                hc.all_reduce(np.ones(3))
        """
    job = start(UNTIL_IN_MPI + textwrap.dedent(program).replace("BLOCK", block), tmp_path)
    _, stderr = job.communicate(timeout=time_limit(100))
    assert job.returncode not in (0, 124)
    assert "[rank 0]     hc.all_reduce(np.ones(3))" in stderr
    assert "hpccomm: rank 0 is in all_reduce #1 of 'world' (24 B float64); Ctrl-C ends the job" in stderr
    assert said in stderr
    assert "Exception ignored" not in stderr


def test_ctrl_c_ends_one_rank_that_waits_for_itself(tmp_path: Path) -> None:
    program = """
        import os, signal, threading, time, numpy as np, hpccomm as hc
        from hpccomm.debug import stacks
        main = threading.get_ident()
        def press():
            while stacks.call_of_thread(main) is None:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
        hc.init_process_group()
        receive = hc.irecv(np.ones(3), src=0)
        threading.Thread(target=press).start()
        receive.wait()
        """
    job = start(program, tmp_path, 1)
    _, stderr = job.communicate(timeout=time_limit(100))
    assert job.returncode not in (0, 124)
    assert "KeyboardInterrupt" in stderr or "rank 0 is in recv #1 of 'world' (24 B float64); Ctrl-C ends" in stderr


def test_the_end_of_a_program_has_no_time_limit(tmp_path: Path) -> None:
    program = """
        import sys, time, hpccomm as hc
        world = hc.init_process_group(timeout=1)
        if world.rank == 0:
            time.sleep(4)  # it writes its results, which takes longer than any operation
        """
    job = start(program, tmp_path)
    _, stderr = job.communicate(timeout=time_limit(100))
    assert (job.returncode, "has not ended" in stderr) == (0, False), stderr


def test_a_program_that_finalizes_mpi_itself(tmp_path: Path) -> None:
    program = """
        import hpccomm as hc
        from mpi4py import MPI
        hc.init_process_group()
        MPI.Finalize()
        """
    job = start(program, tmp_path)
    _, stderr = job.communicate(timeout=time_limit(100))
    assert "Traceback" not in stderr
    assert "Exception ignored" not in stderr


def test_an_exception_beside_a_library_s_group_is_named(tmp_path: Path) -> None:
    program = """
        import numpy as np, hpccomm as hc
        from mpi4py import MPI
        group = hc.ProcessGroup.from_comm(MPI.COMM_WORLD, timeout=2, name="mine")
        if group.rank == 1:
            raise ValueError("no such file")
        hc.all_reduce(np.ones(3), group=group)
        """
    job = start(program, tmp_path)
    _, stderr = job.communicate(timeout=time_limit(100))
    assert job.returncode not in (0, None)
    assert (
        "rank 1 never reached all_reduce #1 of 'mine' (24 B float64): "
        "it has come to the end of its program (ValueError: no such file) without that" in stderr
    ), stderr


@pytest.mark.parametrize("ranks", ["0", "01"])
def test_an_early_end_beside_a_library_s_group_is_named_and_leaves_no_report(ranks: str, tmp_path: Path) -> None:
    program = f"""
        import sys, numpy as np, hpccomm as hc
        from mpi4py import MPI
        group = hc.ProcessGroup.from_comm(MPI.COMM_WORLD, timeout=3, name="mine")
        if str(group.rank) in "{ranks}":
            hc.all_reduce(np.ones(3), group=group)
        """
    job = start(program, tmp_path)
    _, stderr = job.communicate(timeout=time_limit(100))
    if ranks == "01":
        assert job.returncode == 0, stderr
        assert not (tmp_path / "reports").exists()
    else:
        assert "rank 1 never reached all_reduce #1 of 'mine' (24 B float64): it has come to the end of its" in stderr


def test_no_time_limit_at_all(tmp_path: Path) -> None:
    program = """
        import hpccomm as hc
        with hc.init_process_group() as world:
            hc.barrier()
            print(world.timeout.days > 10**6)
        """
    job = start(program, tmp_path, HPCCOMM_TIMEOUT="inf")
    stdout, stderr = job.communicate(timeout=time_limit(100))
    assert (job.returncode, stdout.split()) == (0, ["True", "True"]), stderr


def test_ctrl_c_outside_of_mpi_is_a_keyboard_interrupt(tmp_path: Path) -> None:
    program = """
        import os, signal, sys, time, pathlib, hpccomm as hc
        world = hc.init_process_group()
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        except KeyboardInterrupt:
            time.sleep(2)  # the watchdog has nothing against it
            print("caught\\n", end="")
        hc.barrier()
        """
    job = start(program, tmp_path)
    stdout, stderr = job.communicate(timeout=time_limit(100))
    assert (job.returncode, stdout, stderr) == (0, "caught\n" * 2, "")


def test_a_question_does_not_kill_a_rank_that_is_ending(tmp_path: Path) -> None:
    program = """
        import atexit, re, signal
        from pathlib import Path
        def ignored():  # Python's last words
            mask = int(re.search("SigIgn:\\s*(\\w+)", Path("/proc/self/status").read_text())[1], 16)
            print(f"{bool(mask >> (signal.SIGUSR2 - 1) & 1)}\\n", end="")
        atexit.register(ignored)
        import hpccomm as hc
        hc.init_process_group()
        ignored()
        """
    job = start(program, tmp_path)
    stdout, stderr = job.communicate(timeout=time_limit(100))
    assert (job.returncode, sorted(stdout.split())) == (0, ["False", "False", "True", "True"]), stderr


def test_the_time_limit_of_a_call_is_longer_than_that_of_its_group(tmp_path: Path) -> None:
    program = """
        import time, numpy as np, hpccomm as hc
        world = hc.init_process_group(timeout=2)
        work = hc.irecv(np.ones(3), src=1 - world.rank)
        try:
            work.wait(timeout=5)
        except hc.DistTimeoutError:
            work.abort()
        hc.monitored_barrier(timeout=60)
        if world.rank == 1:
            time.sleep(4)
        hc.monitored_barrier(timeout=60)
        world.destroy()
        """
    job = start(program, tmp_path)
    _, stderr = job.communicate(timeout=time_limit(100))
    assert job.returncode == 0, stderr


def test_debug_pid_asks_and_the_job_goes_on(tmp_path: Path) -> None:
    rest = """
    if world.rank == 0:
        (folder / "pid").write_text(str(__import__("os").getpid()))
    hc.all_reduce(x)
    """
    job = start(LATE.format(timeout=300, on_timeout="abort", rest=rest), tmp_path, 3)
    file = tmp_path / "pid"
    pid = until(lambda: file.exists() and file.read_text(), "process")
    culprit = (
        "rank 1 never reached all_reduce #1 of 'world' (24 B float64): it is in the program at program.py:8 in be_late"
    )
    shown = until(lambda: culprit in (said := debug("--pid", str(pid), "--stacks")).stdout and said, culprit)
    assert shown
    assert "3 of 3 ranks" in shown.stdout
    assert "program.py:14 in <module>" in shown.stdout  # of --stacks
    again = debug("--pid", str(job.pid))  # at once, and not a rank, but what has started it
    assert (again.returncode, "3 of 3 ranks" in again.stdout) == (1, True), again.stderr
    tools = tmp_path / "tools"  # Slurm's
    tools.mkdir()
    said = f"JobId=77 JobName=x WorkDir=/evil\n   UserId=me(5)\n   WorkDir={tmp_path}\n"
    (tools / "scontrol").write_text(f"#!/bin/sh\nprintf '{said}'\n")
    (tools / "scontrol").chmod(0o755)
    (tmp_path / "hpccomm-debug-77").symlink_to(tmp_path / "reports")
    shown = debug("--job", "77", PATH=f"{tools}:{os.environ['PATH']}")
    assert (shown.returncode, "3 of 3 ranks" in shown.stdout) == (1, True), shown.stderr
    finish(job, tmp_path)
    again = debug(str(tmp_path / "reports"), "--json")
    assert (again.returncode, json.loads(again.stdout)["culprits"]) == (1, [1])


def test_debug_pid_lists_the_jobs_below_a_process_if_there_are_several(tmp_path: Path) -> None:
    program = LATE.format(timeout=300, on_timeout="abort", rest="hc.all_reduce(x)")
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
    jobs = [start(program, folder, ranks) for folder, ranks in zip(folders, (2, 3))]
    for job in jobs:
        until(lambda job=job: "ranks, " in debug("--pid", str(job.pid)).stdout, "answer of a rank")
    shown = debug("--pid", str(os.getpid()))
    assert (shown.returncode, shown.stdout) == (2, "")
    assert f"2 jobs run below process {os.getpid()}; choose one:" in shown.stderr
    commands = re.findall(r"hpccomm debug (--pid) (\d+)   # (\d) ranks here, .*(one|two)/program.py", shown.stderr)
    assert sorted(each[2:] for each in commands) == [("2", "one"), ("3", "two")]
    for *arguments, ranks, _ in commands:
        assert f"{ranks} of {ranks} ranks" in debug(*arguments).stdout
    for job, folder in zip(jobs, folders):
        finish(job, folder)


def debug(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpccomm", "debug", *arguments]
    environment = {**clean_environment(), **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.mark.once
def test_who_is_no_rank_is_asked_and_lives(tmp_path: Path) -> None:
    sleeps = subprocess.Popen(["sleep", "60"])
    shown = debug("--pid", str(sleeps.pid))
    assert (shown.returncode, sleeps.poll()) == (2, None)
    assert f"process {sleeps.pid} has no ranks that answer" in shown.stderr
    sleeps.kill()
    sleeps.wait()
    shown = debug("--pid", str(sleeps.pid))
    assert shown.stderr == f"hpccomm debug: there is no process {sleeps.pid} on this machine\n"


def test_debug_without_reports(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpccomm", "debug"]
    options: Any = {"cwd": tmp_path, "capture_output": True, "text": True, "env": clean_environment()}
    shown = subprocess.run(command, **options, check=False, timeout=60)
    assert shown.returncode == 2
    assert "no folder given, and there is no hpccomm-debug-* here" in shown.stderr
    for name in ("reports", "nothing"):  # the newest is empty
        (tmp_path / f"hpccomm-debug-{name}").mkdir()
    (tmp_path / "hpccomm-debug-reports" / "rank0.json").write_text("cut off")
    os.utime(tmp_path / "hpccomm-debug-reports", (1, 1))
    shown = subprocess.run(command, **options, check=False, timeout=60)
    assert shown.returncode == 2
    assert f"there are no reports of ranks in {tmp_path}/hpccomm-debug-reports" in shown.stderr


def test_a_signal_of_the_program_stays_the_program_s(tmp_path: Path) -> None:
    program = """
        import os, signal, hpccomm as hc
        seen = []
        signal.signal(signal.SIGUSR2, lambda *_: seen.append("mine"))
        with hc.init_process_group() as world:
            os.kill(os.getpid(), signal.SIGUSR2)
            hc.barrier()
        assert seen == ["mine"]
        """
    job = start(program, tmp_path)
    _, stderr = job.communicate(timeout=time_limit(100))
    assert job.returncode == 0, stderr


def test_an_exception_leaves_a_report_where_reports_are_kept(tmp_path: Path) -> None:
    program = """
        import hpccomm as hc
        world = hc.init_process_group()
        if world.rank == 1:
            raise KeyError("lost")
        hc.barrier()
        """
    job = start(program, tmp_path)
    job.communicate(timeout=time_limit(100))
    (folder,) = (tmp_path / "reports").iterdir()
    (report,) = [each for each in read(folder) if each["rank"] == 1]
    assert report["reason"] == "KeyError: 'lost'"


def test_bad_settings_are_refused_on_every_rank(tmp_path: Path) -> None:
    program = """
        import hpccomm as hc
        try:
            hc.init_process_group()
        except ValueError as error:
            print(f"{error}\\n", end="")
        """
    for name, value, expected in [
        ("HPCCOMM_TIMEOUT", "soon", "HPCCOMM_TIMEOUT is 'soon'; expected a positive number of seconds"),
        ("HPCCOMM_TIMEOUT", "-1", "HPCCOMM_TIMEOUT is '-1'; expected a positive number of seconds"),
        ("HPCCOMM_ON_TIMEOUT", "panic", "HPCCOMM_ON_TIMEOUT is 'panic'; expected abort, raise or warn"),
        ("HPCCOMM_DEBUG", "details", "HPCCOMM_DEBUG is 'details'; expected OFF, INFO or DETAIL"),
        ("HPCCOMM_ABORT_ON_EXCEPTION", "no", "HPCCOMM_ABORT_ON_EXCEPTION is 'no'; expected 1 or 0"),
    ]:
        job = start(program, tmp_path, **{name: value})
        stdout, stderr = job.communicate(timeout=time_limit(100))
        assert stdout.splitlines() == [expected] * 2, stderr


def test_arguments_are_checked(process_group: hc.ProcessGroup) -> None:
    with pytest.raises(ValueError, match="on_timeout is 'panic'; expected 'abort', 'raise' or 'warn'"):
        hc.new_group(on_timeout="panic")
    with pytest.raises(ValueError, match="timeout is 0; expected a positive"):
        hc.new_group(timeout=0)
    with hc.new_group(timeout=5, on_timeout="warn") as group, hc.split_group(group, 0) as child:  # type: ignore[union-attr]
        assert (child.timeout.total_seconds(), child.on_timeout) == (5, "warn")  # type: ignore[union-attr]


# -- pieces ------------------------------------------------------------------------------------------


@pytest.fixture
def in_another_thread(process_group: hc.ProcessGroup) -> Any:
    """Start a function in a thread, and return a function that looks at what that thread is in."""
    threads = []

    def begin(function: Any) -> Any:
        thread = threading.Thread(target=function)
        thread.start()
        threads.append(thread)

        def look(name: str) -> Any:
            found = [each for each in stacks.calls_in_flight() if each.record.name == name]
            return found[0] if found else None

        return look

    yield begin
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_what_is_seen_of_a_wait(process_group: hc.ProcessGroup, in_another_thread: Any) -> None:
    work = hc.irecv(np.zeros(3), src=hc.get_rank(), tag=9)
    look = in_another_thread(lambda: work.wait(timeout=50))
    call = until(lambda: look("recv"), "wait")
    assert (call.record.number, call.record.async_op, call.timeout) == (work.sequence_number, True, 50)
    assert call.work() is work
    assert call.record.where.startswith(("tests/debug/test_watchdog.py:", __file__))
    assert (call.record.dtype, call.record.nbytes, call.record.peer) == ("float64", 24, hc.get_rank())
    hc.isend(np.ones(3), dst=hc.get_rank(), tag=9).wait()


def test_nothing_in_flight_is_nothing_seen(process_group: hc.ProcessGroup) -> None:
    hc.all_reduce(np.ones(3))
    assert list(stacks.calls_in_flight()) == []


def test_the_watchdog_survives_its_own_failure_and_tells_of_it_once(
    process_group: hc.ProcessGroup, tmp_path: Path, capsys: Any
) -> None:
    watchdog = Watchdog(Reporter(0, 1, tmp_path))
    looks = threading.Semaphore(0)

    def broken(now: float) -> None:
        looks.release()
        raise RuntimeError("broken")

    watchdog.look = broken  # type: ignore[method-assign]
    watchdog.reporter.mailbox.open = lambda: None  # type: ignore[method-assign]  # it would outlive the test
    threading.Thread(target=watchdog.run, args=(Signals(),), daemon=True).start()
    for _ in range(3):
        assert looks.acquire(timeout=60)
    watchdog.look = lambda now: None  # type: ignore[method-assign]
    assert capsys.readouterr().err.count("the watchdog of rank 0 failed: RuntimeError: broken\n") == 1


def test_it_sleeps_between_its_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpccomm.debug.watchdog.period", lambda: 0.2)
    watchdog, looks = Watchdog(Reporter(0, 1, tmp_path)), threading.Semaphore(0)
    watchdog.look = lambda now: looks.release()  # type: ignore[method-assign]
    thread, began = threading.Thread(target=watchdog.run, args=(Signals(),), daemon=True), time.monotonic()
    thread.start()
    for _ in range(6):
        assert looks.acquire(timeout=60)
    assert time.monotonic() - began > 0.9
    assert watchdog.reporter.mailbox.is_open
    watchdog.has_stopped = True
    thread.join()
    watchdog.reporter.mailbox.close()


def test_reports_that_belong_together() -> None:
    old = {"rank": 0, "time": 1.0, "answers": "a"}
    new = [{"rank": rank, "time": 5.0 + rank, "answers": "b"} for rank in (0, 1)]
    ended = {"rank": 2, "time": 4.0, "answers": ""}
    assert [each["rank"] for each in latest([*new, old, ended])] == [2, 0, 1]


def test_the_state_of_a_process() -> None:
    assert process_state(os.getpid()) == "running"
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    until(lambda: process_state(child.pid) == "dead", "end")  # a zombie, until it is waited for
    child.wait()
    assert process_state(child.pid) == "dead"


def test_a_question_from_another_node(tmp_path: Path) -> None:
    here, there = {0: os.getpid()}, {1: os.getpid(), 2: os.getpid()}
    woken: list[int] = []

    class Woken:
        def wake(self, process: int) -> None:
            woken.append(process)

        is_open = True

    mailbox: Any = Woken()
    asks, answers = Reporter(0, 3, tmp_path, here), Watchdog(Reporter(1, 3, tmp_path, there))
    answers.reporter.mailbox = mailbox
    assert not answers._looks_for_questions()  # not yet again
    answers._looked_for_questions -= 100
    assert answers._looks_for_questions()
    assert not answers.reporter.is_asked()
    token = asks.ask()
    assert answers.reporter.is_asked()
    answers._answer()
    (report,) = asks.collect(token, 0)
    assert (report["rank"], report["reason"]) == (1, "asked")
    assert woken == [os.getpid()]  # rank 2 is told: it does not look into the folder itself
    assert not answers.reporter.is_asked()
    second = Watchdog(Reporter(2, 3, tmp_path, there))
    second.reporter.mailbox = mailbox
    second._looked_for_questions -= 100
    assert not second._looks_for_questions()


def test_info_says_which_groups_there_are(tmp_path: Path) -> None:
    program = """
        import hpccomm as hc
        with hc.init_process_group(timeout=60):
            hc.new_group(group_desc="mine")
        """
    job = start(program, tmp_path, HPCCOMM_DEBUG="INFO")
    _, stderr = job.communicate(timeout=time_limit(100))
    assert stderr.splitlines()[0].startswith("hpccomm: made 'world': ranks 0, 1 on 1 node, ")
    assert stderr.splitlines()[1].endswith("timeout 60 s, then abort")
    assert stderr.count("made 'mine'") == 1


def test_a_gpu_is_asked_whether_it_is_busy(process_group: hc.ProcessGroup) -> None:
    class OnTheGPU(hc.Work):
        progress = hc.Work.progress._replace(any_thread_may_poll=True)

        def poll(self) -> bool:
            return self.is_done

        is_done = False

    work = OnTheGPU()
    process_group.dispatcher.follow(work, "all_reduce", 1, np.ones(3))
    try:
        (call,) = in_flight()
        assert (call.record.name, call.record.nbytes, call.work()) == ("all_reduce", 24, work)
        work.is_done = True
        assert in_flight() == []
    finally:
        work.is_done = True
        work.wait()


def test_a_warning_after_a_tenth_of_the_time_and_once(
    process_group: hc.ProcessGroup, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = stacks.describe(process_group, "all_reduce", 7, {"array": np.ones(4)}, where="train.py:91")
    call = stacks.CallInFlight(("all_reduce", 7), record, process_group, None, None, False)
    monkeypatch.setattr(stacks, "calls_in_flight", lambda without=0, exactly=False: [call])
    watchdog = Watchdog(Reporter(3, 4, tmp_path))
    for second in (0, 100, 179, 181, 182):  # of 30 minutes
        watchdog.look(1000.0 + second)
        said = capsys.readouterr().err
        assert ("has been in flight" in said) == (second == 181), second
        if said:
            assert said.startswith(
                "hpccomm: rank 3: all_reduce #7 of 'world' (32 B float64) at train.py:91 has been in flight for "
                "3 min (timeout 30 min); `hpccomm debug --pid "
            )
    monkeypatch.setattr(stacks, "calls_in_flight", lambda without=0, exactly=False: [])
    watchdog.look(1183.0)
    monkeypatch.setattr(stacks, "calls_in_flight", lambda without=0, exactly=False: [call])
    watchdog.look(1300.0)  # the same again, after it had ended: from the beginning
    assert capsys.readouterr().err == ""


def test_the_job_ends_also_where_nothing_can_be_written(
    process_group: hc.ProcessGroup, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> bool:
        raise OSError(28, "No space left on device")

    record = stacks.describe(process_group, "all_reduce", 7, {"array": np.ones(4)}, where="train.py:91")
    call = stacks.CallInFlight(("all_reduce", 7), record, process_group, None, None, False)
    monkeypatch.setattr(stacks, "calls_in_flight", lambda without=0, exactly=False: [call])
    watchdog = Watchdog(Reporter(3, 4, tmp_path))
    ended: list[bool] = []
    monkeypatch.setattr(watchdog, "_end", lambda: ended.append(True))
    monkeypatch.setattr(watchdog.reporter, "claim", full)
    watchdog.look(0.0)
    watchdog.look(1801.0)
    said = capsys.readouterr().err
    assert "all_reduce #7 of 'world' (32 B float64) at train.py:91 has not ended within 30 min (rank 3)" in said
    assert "reports can't be written: [Errno 28] No space left on device" in said
    assert ended == [True]


@pytest.mark.parametrize("claims", [True, False], ids=["this rank asks", "another rank asks"])
@pytest.mark.parametrize("goes_on", [True, False], ids=["it goes on", "it stays"])
def test_a_call_that_ends_while_the_ranks_are_asked_ends_no_job(
    process_group: hc.ProcessGroup,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    claims: bool,
    goes_on: bool,
) -> None:
    record = stacks.describe(process_group, "all_reduce", 7, {"array": np.ones(4)}, where="train.py:91")
    in_flight = [stacks.CallInFlight(("all_reduce", 7), record, process_group, None, None, False)]
    monkeypatch.setattr(stacks, "calls_in_flight", lambda without=0, exactly=False: in_flight[:])
    watchdog = Watchdog(Reporter(3, 4, tmp_path))
    ended: list[bool] = []

    def asked(*_: Any, **__: Any) -> Any:
        if goes_on:
            in_flight.clear()
        return SimpleNamespace(lines=["rank 1 never reached it"])

    monkeypatch.setattr(watchdog, "_end", lambda: ended.append(True))
    monkeypatch.setattr(watchdog.reporter, "claim", lambda *_: claims)
    monkeypatch.setattr("hpccomm.debug.watchdog.verdict", asked)
    monkeypatch.setattr(watchdog, "_reports", lambda reason: [])
    monkeypatch.setattr(watchdog, "_wait_for_the_verdict", asked)
    watchdog.look(0.0)
    watchdog.look(1801.0)
    said = capsys.readouterr().err
    assert ended == ([] if goes_on else [True])
    assert ("the job goes on" in said) == (goes_on and claims)
    assert ("the job ends with status 124" in said) == (not goes_on)
    assert ("rank 1 never reached it" in said) == claims
