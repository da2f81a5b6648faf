"""Slurm from a test: run, submit, wait, look. Everything has a deadline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mpi4py import MPI

from ..launch import ROOT, clean_environment, time_limit

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
BIN = Path(sys.executable).parent
NODES = ("node1", "node2")
IS_OPEN_MPI = MPI.get_vendor()[0] == "Open MPI"
MPI_TYPE, OTHER_TYPE = ("pmix", "pmi2") if IS_OPEN_MPI else ("pmi2", "pmix")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what a user's shell has who has activated the environment, and what a machine of few cores needs."""
    return {
        **clean_environment(),
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "VIRTUAL_ENV": str(BIN.parent),
        "OPENBLAS_NUM_THREADS": "1",
        "MPIR_CVAR_CH4_NETMOD": "ofi",  # slurm/setup.sh says why
        "OMPI_MCA_btl": "^ofi",
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PRTE_MCA_hwloc_default_binding_policy": "none",  # the CPUs that Slurm gives are not there
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **(more or {}),
    }


def run(
    *command: str | Path, timeout: float = 90, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a command on the head."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=time_limit(timeout),
        check=False,
    )


def srun(
    *command: str | Path, nodes: int = 2, on_each: int = 2, mpi: str = MPI_TYPE, timeout: float = 90, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a program on `on_each` ranks of each node."""
    shape = [f"--nodes={nodes}", f"--ntasks-per-node={on_each}", f"--mpi={mpi}"]
    return run("srun", *shape, "--kill-on-bad-exit=1", *command, timeout=timeout, cwd=cwd)


def succeeded(ended: subprocess.CompletedProcess[str]) -> str:
    """Return what a program printed that has to end well."""
    assert ended.returncode == 0, f"status {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def eventually(claim: Callable[[], object], timeout: float = 60, says: Callable[[], str] = lambda: "") -> None:
    """Wait until `claim` is true."""
    deadline = time.monotonic() + time_limit(timeout)
    while not claim():
        assert time.monotonic() < deadline, f"not within {timeout} s: {says()}"
        time.sleep(0.1)


class Job:
    """A job that has been submitted."""

    def __init__(self, number: str) -> None:
        self.number = number

    def field(self, name: str) -> str:
        """Return a field of ``scontrol show job``."""
        shown = succeeded(run("scontrol", "show", "job", self.number))
        found = re.search(rf"\b{name}=(\S*)", shown)
        assert found, shown
        return found[1]

    def state(self) -> str:
        return self.field("JobState")

    def output(self) -> str:
        """Return what the job has printed so far."""
        file = Path(self.field("StdOut"))
        return file.read_text(errors="replace") if file.exists() else ""

    def says(self, text: str, timeout: float = 60) -> None:
        """Wait until the job has printed `text`."""
        eventually(lambda: text in self.output(), timeout, lambda: f"{text!r} in\n{self.describe()}")

    def becomes(self, *states: str, timeout: float = 90) -> str:
        """Wait until the job is in one of `states`, and return which."""
        eventually(lambda: self.state() in states, timeout, self.describe)
        return self.state()

    def succeeds(self, timeout: float = 120) -> str:
        """Wait until the job has ended well, and return what it printed."""
        state = self.becomes(*ENDED, timeout=timeout)
        assert state == "COMPLETED", self.describe()
        return self.output()

    def describe(self) -> str:
        shown = run("scontrol", "show", "job", self.number)
        return f"{shown.stdout}{shown.stderr}\n{self.output()}"


def sbatch(*arguments: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> Job:
    """Submit a batch script with its arguments."""
    return Job(succeeded(run("sbatch", "--parsable", *arguments, cwd=cwd, env=env)).strip())


def processes(pattern: str) -> list[str]:
    """Return the processes of all nodes whose command line has `pattern`: the head sees them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if pattern in command and int(folder.name) != os.getpid():
            found.append(f"{folder.name} {command}")
    return found
