"""The package's own tests, for several ranks."""

from __future__ import annotations

import numpy as np
import pytest

import hpccomm as hc


def test_a_sum() -> None:
    with hc.init_process_group("cpu:counting") as world:
        x = np.ones(3)
        hc.all_reduce(x)
        assert x.tolist() == [world.size] * 3
        work = hc.all_reduce(x, async_op=True)
        assert work is not None
        assert work.wait()


def test_what_it_does_not_have() -> None:
    with (
        hc.init_process_group("cpu:counting"),
        pytest.raises(hc.UnsupportedOperationError, match="broadcast: backend 'counting' does not have it"),
    ):
        hc.broadcast(np.ones(3), src=0)
