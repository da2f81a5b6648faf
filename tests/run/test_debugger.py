"""`hpccomm run --pdb` and `--debugpy`: a rank stops in a debugger, and the others wait for it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ..launch import ROOT, WATCHED, clean_environment, launch, mpiexec_folder, time_limit, until
from .test_run import watched

pytestmark = pytest.mark.serial

FAILS = """
    import numpy as np, hpccomm as hc
    def fail(numbers):
        if hc.get_rank() == 1:
            numbers["a"]
        hc.all_reduce(np.ones(3))
    with hc.init_process_group():
        fail({"b": 41})
    """
# It has the three functions of debugpy that are used. Its client is ready when it has connected.
DEBUGPY = """
    import socket
    server = socket.create_server(("127.0.0.1", 0))
    def listen(address):
        assert address == ("127.0.0.1", 0)
        return server.getsockname()
    def wait_for_client():
        print("client:", server.accept()[0].recv(100).decode(), flush=True)
    """


def start(program: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start two ranks; their stderr goes to the file ``stderr``."""
    (folder / "program.py").write_text(textwrap.dedent(program))
    command = [ROOT / "tools" / "run-mpi", mpiexec_folder(), "2", sys.executable, *WATCHED, *options, "program.py"]
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**clean_environment(), "TIME_LIMIT": str(time_limit(90)), "PYTHONPATH": path}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    with (folder / "stderr").open("w") as stderr:
        return subprocess.Popen(command, cwd=folder, env=environment, text=True, stderr=stderr, **streams)


def test_pdb_shows_the_frames_of_an_exception_and_the_job_ends_after_it(tmp_path: Path) -> None:
    job, stderr = start(FAILS, tmp_path, "--pdb", "0-1"), tmp_path / "stderr"
    found = until(lambda: re.search(r"type on .*?: (.* -m hpccomm\.run\.debugger .*)\n", stderr.read_text()), "socket")
    assert found
    assert "hpccomm: rank 1 stops in pdb: KeyError: 'a'" in stderr.read_text()
    path = Path(found[1].split()[-1])
    assert path.parent.stat().st_mode & 0o77 == 0  # of this user only
    commands = "p numbers['b'] + 1\nup\nquit\n"
    typed = subprocess.run(
        found[1].split(), input=commands, capture_output=True, text=True, cwd=ROOT, timeout=time_limit(60)
    )
    assert re.search(r"fail\(\)\n-> numbers\[\"a\"\]\n\(Pdb\) 42\n.*<module>\(\)\n", typed.stdout, re.S), typed
    job.communicate(timeout=time_limit(60))
    assert job.returncode == 1
    assert "[rank 1] KeyError: 'a'" in stderr.read_text()
    assert not path.parent.exists()


def test_debugpy_waits_for_a_client_at_a_free_port(tmp_path: Path) -> None:
    (tmp_path / "debugpy.py").write_text(textwrap.dedent(DEBUGPY))
    program = "import hpccomm as hc\nwith hc.init_process_group() as world:\n    print(world.rank, flush=True)\n"
    job, stderr = start(program, tmp_path, "--debugpy", "1"), tmp_path / "stderr"
    found = until(lambda: re.search(r"rank 1 waits .*debugpy at (127.*):(\d+) on", stderr.read_text()), "port")
    assert found
    with socket.create_connection((found[1], int(found[2]))) as client:
        client.send(b"hello")
        stdout, _ = job.communicate(timeout=time_limit(60))
    assert (job.returncode, sorted(stdout.splitlines())) == (0, ["0", "1", "client: hello"])


def test_without_debugpy_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['debugpy'] = None\n")
    finished = launch(1, sys.executable, *WATCHED, "--debugpy", "0", "x.py", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert finished.returncode == 2
    assert "error: --debugpy needs debugpy: pip install debugpy\n" in finished.stderr


@pytest.mark.parametrize(
    ("options", "expected"), [((), "2 abort"), (("--pdb", "0"), "86400 warn"), (("--timeout", "9"), "9 warn")]
)
def test_the_watchdog_does_not_end_a_job_with_a_debugger(
    options: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    program = """
        import hpccomm as hc
        with hc.init_process_group() as world:
            print(f"{world.timeout.total_seconds():g} {world.on_timeout}\\n", end="")
        """
    options = (*options, "--pdb", "1") if options else ()
    finished = watched(program, tmp_path, 2, options=options, env={"HPCCOMM_TIMEOUT": "2"}, status=0)
    assert finished.stdout == f"{expected}\n" * 2
