"""Copies between processes where the kernel refuses; tests/mpi/test_direct.py has those that it allows."""

from __future__ import annotations

import ctypes
import errno
from typing import Any

import pytest

import hpccomm as hc
from hpccomm.mpi import process_memory


def refuse(*arguments: Any) -> int:
    ctypes.set_errno(errno.EPERM)
    return -1


def a_rank_that_refuses(name: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = process_memory.system_call
    if hc.get_rank() == rank:
        monkeypatch.setattr(process_memory, "system_call", lambda call: refuse if call == name else found(call))


@pytest.mark.serial
def test_a_system_without_such_calls_is_one_that_refuses() -> None:
    transfer = process_memory.Transfer("process_vm_that_does_not_exist")
    with pytest.raises(OSError, match="not implemented") as refusal:
        transfer(1, 0, 0, 1)
    assert refusal.value.errno == errno.ENOSYS
