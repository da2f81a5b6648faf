"""The tests of the gloo backend: where there is a PyTorch with gloo, of whatever version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hpccomm as hc
from hpccomm.core.late import late


def why_not() -> str | None:
    try:
        late("hpccomm.gloo:needs")()
    except ImportError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def process_group() -> Iterator[hc.ProcessGroup]:
    """A world whose host arrays go over gloo."""
    if reason := why_not():
        pytest.skip(reason)
    with hc.init_process_group("cpu:gloo") as group:
        yield group
