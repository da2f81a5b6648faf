"""A plugin of pytest that writes the outcome of each test of this rank into the file $OUTCOMES.RANK."""

from __future__ import annotations

import os
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    """Write the outcomes that count: the call's, and those of a set-up or tear-down that has not passed."""
    from mpi4py import MPI

    if report.when == "call" or report.outcome != "passed":
        name, outcome = report.nodeid.rpartition("/")[2].replace(" ", "_"), report.outcome
        with open(f"{os.environ['OUTCOMES']}.{MPI.COMM_WORLD.Get_rank()}", "a", encoding="utf-8") as file:
            print(name, outcome, report.when, file=file)
