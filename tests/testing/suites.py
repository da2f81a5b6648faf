"""Small suites that are run on several ranks, and their outcomes."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from ..launch import launch


def write(suite: str, file: Path) -> None:
    file.write_text("import pytest\nfrom mpi4py import MPI\nRANK = MPI.COMM_WORLD.rank\n" + textwrap.dedent(suite))


def start(folder: Path, ranks: int, *options: str, grace: float = 30, **settings: Any) -> Any:
    """Run pytest on the folder's suites; a run that hangs ends after 60 s with status 124."""
    command = [sys.executable, "-m", "mpi4py", "-m", "pytest", "--with-mpi", f"--mpi-grace={grace}", "--color=no"]
    options = ("-p", "no:cacheprovider", f"--rootdir={folder}", "-c", "/dev/null", *options)
    return launch(ranks, *command, *options, folder, timeout=60, **settings)


def run(suite: str, folder: Path, ranks: int = 3, *options: str, grace: float = 30, **settings: Any) -> Any:
    """Run pytest on this suite."""
    write(suite, folder / "test_suite.py")
    return start(folder, ranks, *options, grace=grace, **settings)


def outcomes(result: Any) -> dict[str, int]:
    """The counts of pytest's last line."""
    lines = [line for line in result.stdout.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    assert len(lines) == 1, result.stdout + result.stderr  # rank 0 prints, and nobody else
    return {
        word.rstrip("s"): int(count)
        for count, word in re.findall(r"(\d+) (passed|failed|skipped|xfailed|xpassed|errors?)", lines[0])
    }


class Together:
    """What a job has said that has run several suites."""

    def __init__(self, suites: dict[str, str], folder: Path, *options: str, grace: float = 30) -> None:
        for name, suite in suites.items():
            write(suite, folder / f"test_{name}.py")
        self.result = start(
            folder,
            3,
            "-v",
            "-rfEs",
            *options,
            grace=grace,
            env={"COLUMNS": "300", "HPCCOMM_DEBUG_DIR": str(folder / "reports")},
        )
        self.stdout = self.result.stdout

    def of(self, suite: str) -> list[str]:
        """Return what -v says of each test, in order."""
        found: list[str] = re.findall(rf"test_{suite}\.py::\S+ ([A-Z]+)", self.stdout)
        return found
