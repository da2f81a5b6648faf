"""More than 2^31 elements. Slow, and needs 10 GiB: run with --slow, on 2 ranks."""

from __future__ import annotations

import os

import numpy as np
import pytest

import hpccomm as hc

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_group"),
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") < 12 << 30, reason="needs 12 GiB of free memory"
    ),
]

COUNT = 2**31 + 16


@pytest.fixture
def array(process_group: hc.ProcessGroup) -> np.ndarray:
    if process_group.size != 2:
        pytest.skip("on 2 ranks")
    array = np.zeros(COUNT, np.int8)
    array[[0, 2**31 - 1, 2**31, -1]] = [1, 2, 3, 4]
    array += process_group.rank
    return array


def check(array: np.ndarray, factor: int, offset: int) -> None:
    assert array[[0, 2**31 - 1, 2**31, -1]].tolist() == [factor * i + offset for i in (1, 2, 3, 4)]
    assert array[1000] == offset
    assert int(array.sum(dtype=np.int64)) == 10 * factor + COUNT * offset


def test_broadcast(array: np.ndarray) -> None:
    hc.broadcast(array, 1)
    check(array, 1, 1)


def test_all_reduce(array: np.ndarray) -> None:
    hc.all_reduce(array)
    check(array, 2, 1)


def test_send_and_recv(array: np.ndarray, process_group: hc.ProcessGroup) -> None:
    if process_group.rank == 0:
        hc.send(array, 1)
    else:
        assert hc.recv(array, 0) == 0
        check(array, 1, 0)


def test_all_gather_single(process_group: hc.ProcessGroup, array: np.ndarray) -> None:
    del array
    part = np.full(COUNT // 2, process_group.rank + 1, np.int8)
    output = np.zeros(COUNT, np.int8)
    hc.all_gather_single(output, part)
    assert (output[[0, COUNT // 2 - 1, COUNT // 2, -1]] == [1, 1, 2, 2]).all()
    assert int(output.sum(dtype=np.int64)) == 3 * (COUNT // 2)
