"""mpi4py's own tests on this rank, the outcome of each as a line: mpi4py_suite.py FOLDER FILES [PATTERN...].

FOLDER is the `test` of mpi4py's sources; of the rank r the outcomes are appended to FILES.r. Tests whose names match a
pattern (as -x of mpi4py's own runner has it) are left out, and so are the files that spawn processes.
"""

from __future__ import annotations

import os
import sys
import unittest
from typing import Any

SPAWNING = r"^(test_spawn|test_dynproc)"


class Outcomes(unittest.TextTestResult):
    """Writes a line when a test begins, and when it ends: a job that dies shows in which test."""

    file: Any

    def startTest(self, test: unittest.TestCase) -> None:
        """Write its name."""
        super().startTest(test)
        self.outcome = "passed"
        print(test.id(), end=" ", file=self.file, flush=True)

    def stopTest(self, test: unittest.TestCase) -> None:
        """Write its outcome."""
        super().stopTest(test)
        print(self.outcome, file=self.file, flush=True)

    def addFailure(self, test: Any, err: Any) -> None:
        """Keep it."""
        super().addFailure(test, err)
        self.outcome = f"failed: {err[0].__name__}"

    def addError(self, test: Any, err: Any) -> None:
        """Keep it; outside of a test it has a line of its own."""
        super().addError(test, err)
        self.outcome = f"error: {err[0].__name__}"
        if not isinstance(test, unittest.TestCase):
            print(test.id(), self.outcome, file=self.file, flush=True)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        """Keep it where it is none that has passed."""
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.outcome = f"failed: {err[0].__name__}"

    def addSkip(self, test: Any, reason: str) -> None:
        """Keep it; a class that is left out whole has a line of its own."""
        super().addSkip(test, reason)
        self.outcome = f"skipped: {reason}"
        if not isinstance(test, unittest.TestCase):
            print(test.id(), self.outcome, file=self.file, flush=True)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        """Keep it."""
        super().addExpectedFailure(test, err)
        self.outcome = "failed as expected"

    def addUnexpectedSuccess(self, test: Any) -> None:
        """Keep it."""
        super().addUnexpectedSuccess(test)
        self.outcome = "passed unexpectedly"


def main() -> None:
    """Run them."""
    folder, files, *patterns = sys.argv[1:]
    sys.path.insert(0, folder)
    os.chdir(folder)
    import main as program
    from mpi4py import MPI

    left_out = [word for pattern in patterns for word in ("-x", pattern)]
    with open(f"{files}.{MPI.COMM_WORLD.Get_rank()}", "w", encoding="utf-8") as Outcomes.file:
        program.TestProgram(
            module=None,
            argv=["mpi4py", "-q", "-e", SPAWNING, *left_out],
            testRunner=unittest.TextTestRunner(resultclass=Outcomes, verbosity=0),
            exit=False,
        )


if __name__ == "__main__":
    main()
