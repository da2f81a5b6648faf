"""Where gloo is not, the error says what to install; and nothing of torch is imported before somebody asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..launch import clean_environment

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
            "installed: pip install 'hpccomm[gloo]'"
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
