"""What `import hpccomm` loads, and what completion shows of it."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import hpccomm as hc

from .launch import clean_environment, launch

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
    assert sorted(shown) == sorted([*hc.__all__, "checkpoint", "debug"] + ["world"] * hc.is_initialized())
    assert [name for name in shown if isinstance(getattr(hc, name), types.ModuleType)] == ["checkpoint", "debug"]
    assert dir(hc.checkpoint) == sorted(hc.checkpoint.__all__)
    assert dir(hc.debug) == sorted(hc.debug.__all__)


def test_type_checkers_see_the_public_names() -> None:
    stub = Path(hc.__file__).with_suffix(".pyi").read_text()
    seen = re.findall(r"^(?:from \S+ import \w+ as )?(\w+)(?: = \w+)?$", stub, re.M)
    assert sorted(seen) == sorted([*hc.__all__, "checkpoint", "debug"])


def test_names_that_are_imported_later_are_those_of_their_modules() -> None:
    for name, module in hc.LATER.items():
        assert getattr(hc, name) is getattr(importlib.import_module(f"hpccomm.{module}"), name)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = hc.no_such_name


def test_no_name_that_is_imported_later_is_hidden_by_a_module_of_that_name() -> None:
    modules = {path.stem for path in Path(hc.__file__).parent.iterdir()}
    assert not modules & set(hc.LATER)


# Slow to import, or of many files; nothing of it is needed for a first operation.
NOT_AT_THE_START = {
    *("argparse", "asyncio", "base64", "bisect", "bz2", "concurrent.futures", "cupy", "dataclasses", "email", "fcntl"),
    *("hashlib", "hmac", "importlib.metadata", "importlib.resources", "ipaddress", "json", "logging", "lzma"),
    *("multiprocessing", "pathlib", "queue", "random", "scipy", "secrets", "shlex", "shutil", "socket", "subprocess"),
    *("sysconfig", "tempfile", "termios", "torch", "traceback", "urllib.parse", "zipfile"),
}


def test_a_first_operation_imports_little(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, numpy as np\n"
        "from mpi4py import MPI\n"
        "x, before = np.ones(4), set(sys.modules)\n"
        "MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)\n"
        "import hpccomm as hc\n"
        "from hpccomm.debug import start\n"
        "start.LONGEST_PERIOD = 1000.0  # the watchdog imports its part later\n"
        "hc.init_process_group()\n"
        "hc.all_reduce(x)\n"
        "if MPI.COMM_WORLD.Get_rank() == 1:  # rank 0 opens the socket of the store\n"
        "    print(*sorted(set(sys.modules) - before))\n"
    )
    finished = launch(2, sys.executable, program, timeout=100)
    assert finished.returncode == 0, finished.stderr
    loaded = finished.stdout.split()
    assert sorted(NOT_AT_THE_START & set(loaded)) == []
    assert "hpccomm.mpi.backend" in loaded
