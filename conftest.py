"""For doctests: `hc`, `np` and a world group are there, as the examples assume."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import hpccomm as hc

collect_ignore_glob = [
    *("docs/conf.py", "docs/faster.py", "docs/cheat_sheet.py"),  # they need Sphinx and fpdf2
    *("hpccomm/*/cupy_*.py", "hpccomm/nccl/nccl4py_nccl.py"),  # they are imported where CuPy finds NCCL
    *("hpccomm/torch/*", "hpccomm/gloo/*"),  # and these where there is PyTorch
]


@pytest.fixture(autouse=True)
def _world_for_doctests(request: pytest.FixtureRequest) -> Iterator[None]:
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    request.getfixturevalue("doctest_namespace").update(hc=hc, np=np)
    hc.init_process_group()
    yield
    if hc.is_initialized():  # an example may have destroyed it
        hc.destroy_process_group()


@pytest.hookimpl(tryfirst=True)  # before pytest-mpi's, which skips what is marked mpi, or lies in a folder of that name
def pytest_collection_modifyitems(config: pytest.Config) -> None:
    """Let processes of pytest-xdist, which are a rank each, run the tests of MPI too."""
    if hasattr(config, "workerinput"):
        config.option.with_mpi = True
