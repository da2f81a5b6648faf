"""cuda/driver.py over a library with the names of libcuda's functions."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpccomm.cuda import driver

pytestmark = pytest.mark.once

# An event is an int that is not 0 once it has passed. A query waits for that, as for a lock of CUDA, 20 s at most.
SOURCE = """
#include <unistd.h>
int cuEventQuery(volatile int* event) {
    for (int i = 0; i < 20000 && !*event; i++) usleep(1000);
    return *event > 1 ? *event : *event ? 0 : 600;
}
static _Thread_local int mode;
int cuThreadExchangeStreamCaptureMode(int* given) { int before = mode; mode = *given; *given = before; return 0; }
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    source, path = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(SOURCE)
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", path, source], check=True, timeout=60)
    made = ctypes.CDLL(str(path))
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: made)
    driver.library.cache_clear()
    yield driver.library()
    driver.library.cache_clear()


@pytest.mark.usefixtures("library")
def test_other_threads_go_on_while_cuda_lets_a_query_wait() -> None:
    event = ctypes.c_int(0)
    passing = threading.Timer(0.05, lambda: setattr(event, "value", 1))
    passing.start()
    assert driver.event_status(ctypes.addressof(event)) == 0
    passing.join()


@pytest.mark.usefixtures("library")
def test_an_error_is_returned() -> None:
    event = ctypes.c_int(700)
    assert driver.event_status(ctypes.addressof(event)) == 700


def test_the_mode_for_captures_is_that_of_the_thread(library: ctypes.CDLL) -> None:
    assert driver.relax_captures() == 0
    before = ctypes.c_int(0)
    library.cuThreadExchangeStreamCaptureMode(before)
    assert before.value == driver.CAPTURE_MODE_RELAXED
