"""What tools/test-times says of the tests that failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .launch import ROOT

pytestmark = pytest.mark.once


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def phase(nodeid: str, when: str, outcome: str = "passed", **more: Any) -> dict[str, Any]:
    """Return what pytest-reportlog writes of one phase of a test."""
    shown = {"nodeid": nodeid, "when": when, "outcome": outcome, "duration": 1.0, "start": 5.0, "stop": 6.0}
    return {"$report_type": "TestReport", **shown, "user_properties": [], **more}


def report(folder: Path, *rows: dict[str, Any], ended: bool = True) -> None:
    """Write the report of a run of pytest."""
    rows += ({"$report_type": "SessionFinish", "exitstatus": 0},) * ended
    (folder / "1.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "1.command").write_text("X=1 tools/run-tests .venv/bin 2\n")


WHOLE = [phase("test_a.py::test_good", when) for when in ("setup", "call", "teardown")]


def test_a_failed_test_is_named_with_its_command_and_error(tmp_path: Path) -> None:
    bad = [("setup", "passed"), ("call", "failed"), ("teardown", "passed")]
    error = {"reprcrash": {"path": "a.py", "lineno": 7, "message": "[rank 1] assert 1\n  more"}}
    report(tmp_path, *WHOLE, *(phase("test_a.py::test_bad[1 2]", *each, longrepr=error) for each in bad))
    said = tool("test-times", tmp_path, "--failed")
    assert said.returncode == 1
    alone = "1 failed. Alone:\n  X=1 tools/run-tests .venv/bin 2 'test_a.py::test_bad[1 2]'\n"
    assert said.stdout == f"{alone}    a.py:7: [rank 1] assert 1\n      more\n"


def test_a_test_in_which_a_run_was_ended_has_failed(tmp_path: Path) -> None:
    report(tmp_path, *WHOLE, phase("test_a.py::test_hangs", "setup"), ended=False)
    said = tool("test-times", tmp_path, "--failed")
    assert said.returncode == 1
    assert "  X=1 tools/run-tests .venv/bin 2 test_a.py::test_hangs\n" in said.stdout


@pytest.mark.parametrize("rows", [WHOLE, []])
def test_a_run_that_was_ended_between_two_tests_has_failed(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    report(tmp_path, *rows, ended=False)
    said = tool("test-times", tmp_path, "--failed")
    assert said.returncode == 1
    assert "X=1 tools/run-tests .venv/bin 2  # which was ended between two tests" in said.stdout


def test_where_nothing_failed_nothing_is_said(tmp_path: Path) -> None:
    report(tmp_path, *WHOLE)
    said = tool("test-times", tmp_path, "--failed")
    assert (said.returncode, said.stdout) == (0, "")


def test_times_by_run_file_and_test(tmp_path: Path) -> None:
    measured = [("jobs", 2), ("cpu", 4.5)]
    report(tmp_path, *WHOLE[:2], phase("test_a.py::test_good", "teardown", user_properties=measured))
    (tmp_path / "steps").write_text("7 make lint\n")
    said = tool("test-times", tmp_path).stdout.splitlines()
    assert "| make lint | 7 |" in said
    assert "| X=1 tools/run-tests .venv/bin 2 | 1 | 1 | 2 | 3.0 | 4.5 |" in said
    assert "| test_a.py | 1 | 2 | 3.0 | 4.5 |" in said
