"""Copies between processes where the kernel refuses; tests/mpi/test_direct.py has those that it allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.core.overlap import address_of
from hpccomm.mpi import process_memory


def refuse(*arguments: Any) -> int:
    return -1


def a_rank_that_refuses(name: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = process_memory.system_call
    if hc.get_rank() == rank:
        monkeypatch.setattr(process_memory, "system_call", lambda call: refuse if call == name else found(call))


@pytest.mark.serial
def test_a_system_without_such_calls_is_one_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = process_memory.system_call("process_vm_that_does_not_exist")
    monkeypatch.setattr(process_memory, "system_call", lambda name: missing)
    assert not process_memory.can_access(1, address_of(np.zeros(1)), 1)
