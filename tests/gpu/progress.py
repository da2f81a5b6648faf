"""A pytest plugin for tools/gpu-first: after a test that ended its process, a new one runs the tests that are left.

`GPU_FIRST_PROGRESS` names a file, to which rank 0 adds two lines for each test: `begun`, and `passed`, `skipped` or
`failed`; at last `ended`. A process does not run the tests that one before it has begun. After a failure each rank asks
its GPU for an error: an invalid access of a kernel ends the CUDA context, and every later call of CUDA in this process
fails. Then the process ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from hpccomm.cuda import seam
from hpccomm.process.printed import let_launcher_read

OUTCOMES = ("passed", "skipped", "failed")  # each overrules those before it


class Progress:
    """The outcomes of this process's tests, added to the file."""

    def __init__(self, config: pytest.Config, file: Path) -> None:
        self._config, self._file = config, file
        self._outcome = OUTCOMES[0]

    def _add(self, word: str, test: str) -> None:
        if MPI.COMM_WORLD.Get_rank() == 0:
            with open(self._file, "a", encoding="utf-8") as file:
                file.write(f"{word} {test}\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the tests that have been begun."""
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
        begun = {line.removeprefix("begun ") for line in lines}
        items[:] = [item for item in items if item.nodeid not in begun]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a test begins."""
        self._outcome = OUTCOMES[0]
        self._add("begun", nodeid)

    @pytest.hookimpl(trylast=True)  # after the terminal has shown the outcome
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a phase; after a failure, end the process if the CUDA context has died."""
        self._outcome = max(self._outcome, report.outcome, key=OUTCOMES.index)
        error = error_of_context() if report.failed else None
        if error is not None:
            self._add(self._outcome, report.nodeid)
            self._end(f"{report.longreprtext}\nthe CUDA context has died: {error}")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Note the outcome of a test."""
        self._add(self._outcome, nodeid)

    def pytest_sessionfinish(self) -> None:
        """Note that none is left."""
        self._add("ended", "all")

    def _end(self, message: str) -> None:
        """Print on the stderr that pytest does not capture, and end the process; that ends the other ranks."""
        capture = self._config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend(in_=True)
        print(f"\n{message}", file=sys.__stderr__, flush=True)
        let_launcher_read()
        os._exit(1)


def error_of_context() -> str | None:
    """Return the error that every call of CUDA gives in this process from now on, or None."""
    runtime = seam.runtime()
    try:
        runtime.synchronize_stream(0)
    except Exception as error:
        text = runtime.explain(error)
        return None if text is None or "StreamCapture" in text else text  # which ends with the capture
    return None


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin."""
    config.pluginmanager.register(Progress(config, Path(os.environ["GPU_FIRST_PROGRESS"])), "gpu-progress")
