"""The tests of hpccomm inside PyTorch: where there is a PyTorch whose backends may be written in Python (2.14)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpccomm.torch import is_available

HERE = Path(__file__).parent

if not is_available():
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let PyTorch's own warnings be warnings."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="package", autouse=True)
def _process_group() -> Iterator[None]:
    import torch.distributed as dist

    import hpccomm.torch

    hpccomm.torch.init_process_group()
    yield
    dist.destroy_process_group()
