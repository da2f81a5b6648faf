"""Every fault, each in a job of its own: the message arrives in time, and no process is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from ..launch import ROOT, clean_environment, mpiexec_folder, time_limit
from .cases import Case, cases
from .situations import situations

pytestmark = pytest.mark.serial

DEADLINE = time_limit(60.0)  # seconds; a job that takes that long has hung
SLOW_DEADLINE = time_limit(600.0)
AT_ONCE = 4  # jobs, which mostly wait
VERDICT = r"(hpccomm: )?(ranks? [-\d, ]+ (never reached|ha(s|ve) not answered|wait for each)|the ranks differ)"
# Not in a job's thread: pytest changes it for every test. Without coverage: it takes as long as the jobs, most of which
# end in ways that leave no measurement.
ENVIRONMENT = {name: value for name, value in clean_environment().items() if not name.startswith("COVERAGE_")}
CASES = {case.name: case for case in (*cases(), *situations())}
LIBRARY = "Open MPI" if "Open MPI" in MPI.Get_library_version() else "MPICH"


@dataclass
class Outcome:
    """How a job ended."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    orphans: list[int]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Outcome]]]:
    """The jobs of all the tests that are to run, a few at once."""
    wanted = [
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "callspec", None) and "name" in item.callspec.params and not item.get_closest_marker("skip")
    ]
    folder = tmp_path_factory.mktemp("faults")
    with ThreadPoolExecutor(AT_ONCE) as pool, ThreadPoolExecutor(1) as afterwards:
        jobs: dict[str, Future[Outcome]] = {}
        for name in sorted(filter(CASES.get, wanted), key=lambda name: CASES[name].is_busy):
            case, others = CASES[name], list(jobs.values())
            job = case, folder / str(len(jobs))
            jobs[name] = afterwards.submit(run_after, others, *job) if case.is_busy else pool.submit(run, *job)
        yield jobs


def run_after(others: list[Future[Outcome]], case: Case, folder: Path) -> Outcome:
    wait(others)
    return run(case, folder)


def run(case: Case, folder: Path) -> Outcome:
    folder.mkdir()
    marker = f"{os.getpid()}-{case.name}"
    environment = {
        **ENVIRONMENT,
        "HPCCOMM_TIMEOUT": str(case.timeout),
        "HPCCOMM_DEBUG_DIR": str(folder / "reports"),
        "FAULTS_CASE": marker,
        "TIME_LIMIT": str(deadline(case)),
        **case.env,
    }
    other = start(case, folder / "other.py", case.other, environment) if case.other else None
    if other is not None and not case.is_beside:
        other.communicate()
    began = time.monotonic()
    with start(case, folder / "program.py", case.body, environment) as job:
        try:
            stdout, stderr = job.communicate(timeout=deadline(case) + 30)
        except subprocess.TimeoutExpired:
            job.kill()
            stdout, stderr = job.communicate()
    seconds = time.monotonic() - began
    if other is not None:
        stderr += other.communicate()[1] if case.is_beside else ""
        assert other.returncode == 124, stderr
    return Outcome(job.returncode, stdout, stderr, seconds, _left(marker))


def start(case: Case, file: Path, body: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    file.write_text(case.program(body), encoding="utf-8")
    command = [ROOT / "tools" / "run-mpi", mpiexec_folder(), str(case.ranks), sys.executable, file]
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **streams)


def deadline(case: Case) -> float:
    return SLOW_DEADLINE if case.is_slow else DEADLINE


def _left(marker: str) -> list[int]:
    """Return the processes of a job that are still there, after they have had time to end; and end them."""
    deadline = time.monotonic() + 10
    while (found := _with(marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in found:
        os.kill(process, signal.SIGKILL)
    return found


def _with(marker: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"FAULTS_CASE={marker}".encode() in environment.split(b"\0"):
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * case.is_slow) for name, case in CASES.items()]
)
def test_what_the_user_sees(name: str, outcomes: dict[str, Future[Outcome]], request: pytest.FixtureRequest) -> None:
    case, outcome = CASES[name], outcomes[name].result()
    said = f"status {outcome.status} after {outcome.seconds:.1f} s\n{outcome.stdout}\n{outcome.stderr}"
    assert outcome.seconds < deadline(case), f"it hangs: {said}"
    assert case.status == "any" or (outcome.status == 0) == (case.status == "ok"), said
    assert re.search(case.said, outcome.stderr, re.DOTALL), f"nothing like {case.said!r} in {said}"
    assert not outcome.orphans, f"processes {outcome.orphans} are left: {said}"
    _note(request.config, case, outcome)


@pytest.mark.once
def test_the_page_of_the_documentation_has_every_case_and_is_what_its_generator_writes() -> None:
    check = [sys.executable, ROOT / "tools" / "write-reliability", "--check"]
    run = subprocess.run(check, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def _note(config: pytest.Config, case: Case, outcome: Outcome) -> None:
    """Keep a row for docs/reliability.md, where the run was asked to."""
    file = config.getoption("--reliability")
    if file:
        rows = json.loads(Path(file).read_text()) if Path(file).exists() else []
        row = {"fault": case.fault, "place": case.place, "mpi": LIBRARY, "seen": seen(outcome), "lost": case.lost}
        rows.append({**row, "status": outcome.status, "seconds": round(outcome.seconds, 1)})
        Path(file).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def seen(outcome: Outcome) -> str:
    """Return the lines of a job's output that describe the fault."""
    lines = [
        re.sub(r"^\[rank \d+\] ", "", line.strip(" =")) for line in f"{outcome.stderr}\n{outcome.stdout}".splitlines()
    ]
    verdict = [line.removeprefix("hpccomm: ") for line in lines if re.match(VERDICT, line)]
    errors = [line for line in lines if re.match(r"([\w.]+Error|KeyboardInterrupt|Ctrl-C)\b", line)]
    launcher = [line for line in lines if re.search(r"EXIT STRING|EXIT CODE|signal \d|Exit code", line)]
    chosen = errors[:1] + verdict[:1] or (launcher[-1:] if outcome.status else [])
    return "; ".join(re.sub(r"(/\S+/)?program\.py", "program.py", line) for line in chosen)
