"""Programs of their own: one without torch, one that asks for nothing of it, one that ends in the middle."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..launch import clean_environment, launch
from .conftest import why_not

pytestmark = pytest.mark.serial


def output_of(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()


def test_without_torch_the_error_says_what_to_install() -> None:
    said = output_of(
        """
import importlib.util
import hpccomm as hc

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
print(hc.is_backend_available("gloo"))
for backend in ("cpu:gloo", "gloo", "cpu:gloo,cuda:nccl"):
    try:
        hc.init_process_group(backend)
    except hc.DistBackendError as error:
        print(error)
"""
    )
    available, *errors = said.splitlines()
    assert available == "False"
    assert len(errors) == 3
    for error in errors:
        assert error == (
            "the 'gloo' backend, which serves cpu arrays, can't be loaded: gloo is a part of PyTorch, which is not "
            "installed: leave the backend's name out, which means MPI, or pip install 'hpccomm[gloo]' (rank 0)"
        )


def test_other_configurations_import_no_torch() -> None:
    said = output_of(
        """
import sys
import numpy as np, hpccomm as hc

with hc.init_process_group("cpu:mpi"):
    hc.all_reduce(np.ones(1))
    print("torch" in sys.modules, "gloo" in str(hc.core.registry.known_backends()))
"""
    )
    assert said == "False True"


PENDING = """
import numpy as np, hpccomm as hc

world = hc.init_process_group("cpu:mpi")
group = hc.new_group(backend="cpu:gloo")
work = hc.irecv(np.zeros(3), (world.rank + 1) % 2, group)
assert not work.is_completed()
print("the end", flush=True)
"""


def test_a_program_may_end_while_a_thread_waits_for_a_message() -> None:
    if why_not():
        pytest.skip("there is no gloo")
    done = launch(2, sys.executable, "-c", PENDING, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["the", "end"] * 2
