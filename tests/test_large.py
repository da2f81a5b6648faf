"""More than 2^31 elements. Slow, and needs 10 GiB: run with --slow, on 2 ranks."""

from __future__ import annotations

import os

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.mpi import sparse_exchange
from hpccomm.mpi.node_exchange import NodeExchange, is_compiled

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


@pytest.mark.parametrize("way", ["counted", "consensus"])
def test_exchange_sparse(
    way: str, array: np.ndarray, process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_exchange, "FEW", 0 if way == "consensus" else 2)
    received = hc.exchange_sparse({1: (array, array[:3])} if process_group.rank == 0 else {})
    assert list(received) == [0] * process_group.rank
    for whole, beginning in received.values():
        check(whole, 1, 0)
        assert beginning.tolist() == [1, 0, 0]


@pytest.mark.parametrize("form", ["once", "again"])
def test_redistribute(form: str, array: np.ndarray, process_group: hc.ProcessGroup) -> None:
    """All that rank 0 has goes to rank 1."""
    boxes = [slice(0, 0), slice(0, COUNT)]
    if process_group.rank == 0:
        output, given = np.empty(0, np.int8), array
    else:
        boxes, output, given = boxes[::-1], array, np.empty(0, np.int8)
    if form == "once":
        hc.redistribute(output, given, *boxes)
    else:
        with hc.redistribute_init(output, given, *boxes) as work:
            assert isinstance(work, NodeExchange) == is_compiled()
            work.start()
            work.wait()
    if process_group.rank == 1:
        check(array, 1, 0)
