"""What `import hpccomm` loads, and what completion shows of it."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import hpccomm as hc

from .launch import clean_environment

pytestmark = pytest.mark.serial


def in_a_new_process(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


@pytest.mark.parametrize("module", ["hpccomm", "pytest_hpccomm"])
def test_import_loads_no_mpi_and_nothing_slow(module: str) -> None:
    slow = {"mpi4py", "mpi4py.MPI", "cupy", "scipy", "asyncio", "importlib.metadata", "numpy.testing", "torch"}
    program = (
        f"import numpy, pytest, sys; before = set(sys.modules); import {module}; print(*set(sys.modules) - before)"
    )
    loaded = set(in_a_new_process(program).split())
    assert not loaded & slow


def test_the_pytest_plugin_loads_pytest_alone() -> None:
    program = "import pytest, sys; before = set(sys.modules); import pytest_hpccomm; print(*set(sys.modules) - before)"
    loaded = in_a_new_process(program).split()
    assert "pytest_hpccomm" in loaded
    assert not [name for name in loaded if name.partition(".")[0] in ("hpccomm", "numpy", "mpi4py")]


def test_completion_shows_what_is_public() -> None:
    shown = [name for name in dir(hc) if not name.startswith("_")]
    assert shown == sorted([*hc.__all__, "checkpoint"])
    assert [name for name in shown if isinstance(getattr(hc, name), types.ModuleType)] == ["checkpoint"]
