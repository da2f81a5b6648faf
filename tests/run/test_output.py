"""`hpccomm run --log-dir` and `--only-ranks`: the output of each rank, also of C code and of child processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpccomm.native import gil_held

from .test_run import watched

pytestmark = pytest.mark.serial

PROGRAM = """
    import ctypes, os, subprocess, sys
    from mpi4py import MPI
    rank = MPI.COMM_WORLD.Get_rank()
    print("python", rank)
    print("error", rank, file=sys.stderr)
    libc = ctypes.CDLL(None)
    libc.printf(b"c %d\\n", rank)
    libc.fflush(None)
    subprocess.run(["echo", "child", str(rank)])
    """


def expected(rank: int) -> list[str]:
    return [f"c {rank}", f"child {rank}", f"python {rank}"]


def logs(folder: Path) -> dict[str, list[str]]:
    return {file.name: sorted(file.read_text().splitlines()) for file in folder.iterdir()}


def test_each_rank_writes_into_its_own_files(tmp_path: Path) -> None:
    finished = watched(PROGRAM, tmp_path, 2, options=("--log-dir", tmp_path / "new" / "logs"), status=0)
    assert (finished.stdout, finished.stderr) == ("", "")
    assert logs(tmp_path / "new" / "logs") == {
        "rank-0.out": expected(0),
        "rank-1.out": expected(1),
        "rank-0.err": ["error 0"],
        "rank-1.err": ["error 1"],
    }


@pytest.mark.parametrize("has_folder", [False, True])
def test_only_some_ranks_print(has_folder: bool, tmp_path: Path) -> None:
    folder = ("--log-dir", tmp_path / "logs") if has_folder else ()
    finished = watched(PROGRAM, tmp_path, 4, options=("--only-ranks", "0,2-3", *folder), status=0)
    assert sorted(finished.stdout.splitlines()) == sorted(expected(0) + expected(2) + expected(3))
    assert sorted(finished.stderr.splitlines()) == ["error 0", "error 2", "error 3"]
    if has_folder:
        assert logs(tmp_path / "logs") == {"rank-1.out": expected(1), "rank-1.err": ["error 1"]}


def test_the_verdict_and_a_traceback_are_on_the_terminal_and_in_the_log(tmp_path: Path) -> None:
    hang = """
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        comm.Barrier()
        print("before")
        comm.recv(source=1 - comm.Get_rank(), tag=5)
        """
    options = ("--timeout", "2", "--debug-dir", tmp_path / "reports", "--log-dir", tmp_path / "logs")
    finished = watched(hang, tmp_path, 2, options=options, status=124)
    assert finished.stdout == ""
    assert "the job ends with status 124" in finished.stderr
    written = logs(tmp_path / "logs")
    assert written["rank-0.out"] == written["rank-1.out"] == ["before"]
    assert any("the job ends with status 124" in line for name in written for line in written[name])

    raises = "from mpi4py import MPI\nif MPI.COMM_WORLD.Get_rank() == 1: {}['a']\nMPI.COMM_WORLD.Barrier()\n"
    finished = watched(raises, tmp_path, 2, options=("--only-ranks", "0", "--log-dir", tmp_path / "more"), status=1)
    assert "[rank 1] KeyError: 'a'" in finished.stderr
    assert "[rank 1] KeyError: 'a'" in logs(tmp_path / "more")["rank-1.err"]


@pytest.mark.skipif(gil_held is None, reason="without the compiled extension")
def test_the_report_of_a_call_that_holds_the_gil_is_on_the_terminal_and_in_the_log(tmp_path: Path) -> None:
    program = f"""
        import ctypes, os, threading, time, numpy as np, hpccomm as hc
        with hc.init_process_group(timeout=3) as world:
            other = threading.Thread(target=hc.recv, args=(np.ones(3), 1))
            if world.rank == 0:
                other.start()
                time.sleep(0.5)
                ctypes.PyDLL(None).system(b"for _ in $(seq 40); do sleep 0.2; done")
                other.join()
                os.mkdir({str(tmp_path / "joined")!r})
            else:
                time.sleep(1)
                hc.send(np.ones(3), 0)
                while not os.path.exists({str(tmp_path / "joined")!r}):
                    time.sleep(0.1)
        """
    finished = watched(program, tmp_path, 2, options=("--log-dir", tmp_path / "logs"), status=0)
    said = "rank 0: Python has not run for"
    assert said in finished.stderr
    assert any(said in line for line in logs(tmp_path / "logs")["rank-0.err"])


def test_a_folder_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finished = watched("", tmp_path, 1, options=("--log-dir", tmp_path / "file"), status=2)
    assert "error: argument --log-dir: " in finished.stderr
