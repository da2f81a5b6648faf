from __future__ import annotations

import numpy as np
import pytest

import hpccomm as hc

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.mpi(min_size=2)]


def test_it_names_the_missing_ranks_and_the_group_goes_on(process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    late = list(range(1, n))[-2:]  # one or two ranks do not come in time
    names = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))} "
    if me not in late:
        with pytest.raises(hc.DistTimeoutError, match=f"monitored_barrier: {names}ha.* not arrived after 2 s"):
            hc.monitored_barrier(timeout=2, wait_all_ranks=True)
    hc.barrier()
    if me in late:  # rank 0 has answered meanwhile
        with pytest.raises(hc.DistTimeoutError, match=names):
            hc.monitored_barrier(timeout=2, wait_all_ranks=True)
    hc.monitored_barrier(timeout=60)  # the late reports are not taken for this one's
    check = np.ones(1)
    hc.all_reduce(check)
    assert check[0] == n


def test_without_wait_all_ranks_the_first_is_enough(process_group: hc.ProcessGroup) -> None:
    if process_group.rank == 0:
        with pytest.raises(hc.DistTimeoutError, match=r"monitored_barrier: rank 1 has not arrived"):
            hc.monitored_barrier(timeout=0.1)
    hc.barrier()
    if process_group.rank:
        with pytest.raises(hc.DistTimeoutError, match="rank 1 has not arrived"):
            hc.monitored_barrier(timeout=0.1)
    hc.monitored_barrier(timeout=60)


def test_a_missing_rank_0_is_named(process_group: hc.ProcessGroup) -> None:
    if process_group.rank:
        with pytest.raises(hc.DistTimeoutError, match="rank 0 has not arrived"):
            hc.monitored_barrier(timeout=0.1)
    hc.barrier()
    if process_group.rank == 0:
        with pytest.raises(hc.DistTimeoutError, match="rank 0 has not arrived"):
            hc.monitored_barrier(timeout=10)  # the others' reports are there, and that they have given up
    hc.monitored_barrier(timeout=60)  # rank 0's late answer is not taken for this one's
