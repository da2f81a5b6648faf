"""nccl/libnccl.py over functions that answer as those of a real libnccl do."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from typing import Any

import pytest

import hpccomm as hc
from hpccomm.cuda.time_limit import TimeLimit
from hpccomm.nccl import libnccl

pytestmark = pytest.mark.once

CHILD = 0x1234


class Splitting:
    """ncclCommSplit and ncclCommWindowRegister of a communicator that does not block (NCCL 2.30.7).

    They answer ncclSuccess while it is in progress (src/init.cc, src/dev_runtime.cc); a thread sets the pointer, and
    then the communicator's state.
    """

    def __init__(self) -> None:
        self.state = 0
        self.may_end = threading.Event()
        self.threads: list[threading.Thread] = []
        self.memory: weakref.ref[Any]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def ncclCommWindowRegister(self, comm: Any, memory: int, nbytes: int, made: ctypes.c_void_p, flags: int) -> int:
        return self.ncclCommSplit(comm, nbytes, 0, made, None)

    def ncclCommSplit(self, comm: Any, color: int, key: int, made: ctypes.c_void_p, config: Any) -> int:
        self.state, self.memory, address = libnccl.IN_PROGRESS, weakref.ref(made), ctypes.addressof(made)

        def job() -> None:
            self.may_end.wait(10)
            if self.memory() is not None:  # NCCL, which has the address only, writes in any case
                ctypes.c_void_p.from_address(address).value = CHILD if color >= 0 else None
            self.state = 0

        self.threads.append(threading.Thread(target=job))
        self.threads[-1].start()
        return libnccl.SUCCESS

    def ncclCommGetAsyncError(self, comm: Any, error: ctypes.c_int) -> int:
        error.value = self.state
        self.may_end.set()
        return libnccl.SUCCESS


@pytest.mark.parametrize("color", [0, -1])
def test_a_split_that_does_not_block_waits_until_nccl_has_set_the_pointer(color: int) -> None:
    library: Any = Splitting()
    made = libnccl.Communicator(library, ctypes.c_void_p(1), TimeLimit(60)).split(color, 0, TimeLimit(60))
    library.threads[0].join()
    assert (None if made is None else made._comm.value) == (CHILD if color >= 0 else None)


@pytest.mark.parametrize("nbytes", [64, -1])
def test_a_window_is_waited_for_which_may_be_none(nbytes: int) -> None:
    """Of -1 byte this library makes none, as NCCL does where the GPUs have no symmetric memory."""
    library: Any = Splitting()
    window = libnccl.Communicator(library, ctypes.c_void_p(1), TimeLimit(60)).register_window(16, nbytes)
    library.threads[0].join()
    assert window == (CHILD if nbytes > 0 else 0)


def test_memory_that_nccl_still_writes_to_is_kept_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = Splitting()
    monkeypatch.setattr(library.may_end, "set", lambda: None)
    with pytest.raises(hc.DistTimeoutError):
        libnccl.Communicator(library, ctypes.c_void_p(1), TimeLimit(0)).split(0, 0, TimeLimit(60))
    gc.collect()
    assert library.memory() is not None
    monkeypatch.undo()
    library.may_end.set()
    library.threads[0].join()
    assert library.memory().value == CHILD
