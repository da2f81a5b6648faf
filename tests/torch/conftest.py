"""The tests of hpccomm inside PyTorch: where there is a PyTorch whose backends may be written in Python (2.14)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpccomm.torch import is_available

if not is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="package", autouse=True)
def _process_group() -> Iterator[None]:
    import torch.distributed as dist

    import hpccomm.torch

    hpccomm.torch.init_process_group()
    yield
    dist.destroy_process_group()
