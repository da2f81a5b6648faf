"""What programs for mpi4py write: nobody as a peer, waiting for several requests, MPI's operations, Cartesian grids."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.core.mpi4py_names import OF_ARRAYS, OF_OBJECTS, OF_TORCH, OTHERS

pytestmark = pytest.mark.usefixtures("process_group")

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
AFTER, BEFORE = (RANK + 1) % SIZE, (RANK - 1) % SIZE
NOBODY = MPI.PROC_NULL


def mine() -> Any:
    return np.full(2, RANK + 1.0)


# -- MPI.PROC_NULL -----------------------------------------------------------------------------------


def test_messages_to_and_from_nobody_do_nothing(process_group: hc.ProcessGroup) -> None:
    x = mine()
    before = process_group.message_number
    hc.send(x, NOBODY)
    assert hc.recv(x, NOBODY) == NOBODY
    sending, receiving = hc.isend(x, NOBODY), hc.irecv(x, NOBODY, tag=3)
    assert sending is not None
    assert receiving is not None
    hc.wait_all([sending, receiving])
    assert receiving.source_rank() == NOBODY
    assert hc.sendrecv(x, NOBODY, x, NOBODY) == NOBODY
    works = hc.batch_isend_irecv([hc.P2POp(hc.isend, x, NOBODY), hc.P2POp(hc.irecv, x, NOBODY)])
    hc.wait_all(works)
    assert works[1].source_rank() == NOBODY
    with hc.send_init(x, NOBODY) as send, hc.recv_init(x, NOBODY) as receive:
        for _ in range(2):
            send.start()
            receive.start()
            assert send.wait()
            assert receive.wait()
    assert (x == mine()).all()
    assert process_group.message_number == before


@pytest.mark.parametrize("async_op", [False, True])
def test_sendrecv_at_the_ends_of_a_line(async_op: bool) -> None:
    right = RANK + 1 if RANK + 1 < SIZE else NOBODY
    left = RANK - 1 if RANK > 0 else NOBODY
    x = np.full(2, -1.0)
    outcome = hc.sendrecv(mine(), right, x, left, async_op=async_op)
    if isinstance(outcome, hc.Work):
        assert outcome.wait()
    else:
        assert outcome == left
    assert (x == (RANK if RANK > 0 else -1)).all()


def test_a_halo_exchange_on_a_grid_without_an_if() -> None:
    grid = MPI.COMM_WORLD.Create_cart([SIZE], periods=[False])
    with hc.ProcessGroup.from_comm(grid) as line:
        left, right = grid.Shift(0, 1)
        halo = np.full((2, 1), -1.0)
        hc.wait_all(
            hc.batch_isend_irecv(
                [
                    hc.P2POp(hc.irecv, halo[0], left, line, tag=1),
                    hc.P2POp(hc.irecv, halo[1], right, line, tag=2),
                    hc.P2POp(hc.isend, np.array([1.0 * RANK]), right, line, tag=1),
                    hc.P2POp(hc.isend, np.array([1.0 * RANK]), left, line, tag=2),
                ]
            )
        )
        assert halo[0, 0] == (RANK - 1 if RANK > 0 else -1)
        assert halo[1, 0] == (RANK + 1 if RANK + 1 < SIZE else -1)
    grid.Free()


@pytest.mark.parametrize(
    "call",
    [
        lambda: hc.broadcast(mine(), NOBODY),
        lambda: hc.reduce(mine(), NOBODY),
        lambda: hc.send_object_list([1], NOBODY),
        lambda: hc.isend(mine(), group_dst=NOBODY),
        lambda: hc.recv(mine(), group_src=NOBODY),
        lambda: hc.get_group_rank(None, NOBODY),
    ],
)
def test_nobody_is_no_rank(call: Any) -> None:
    with pytest.raises(ValueError, match=str(NOBODY)):
        call()


# -- several Works -----------------------------------------------------------------------------------


def test_wait_all() -> None:
    x, y = np.zeros(2), mine()
    works = [hc.irecv(x, BEFORE), None, hc.isend(mine(), AFTER), hc.all_reduce(y, async_op=True)]
    hc.wait_all(works)
    assert all(work.is_completed() for work in works if work is not None)
    assert (x == BEFORE + 1).all()
    assert (y == SIZE * (SIZE + 1) / 2).all()
    hc.wait_all([])
    many = deque(hc.irecv(np.zeros(1), BEFORE, tag=i) for i in range(600))
    many += [hc.isend(np.zeros(1), AFTER, tag=i) for i in range(600)]
    hc.wait_all(many)  # type: ignore[arg-type]
    assert all(work.is_completed() for work in many)
    strided = hc.irecv(np.zeros((2, 2))[:, 0], BEFORE)
    hc.wait_all(iter([strided, hc.isend(mine(), AFTER)]))  # type: ignore[arg-type]
    assert strided.is_completed()


def test_wait_all_raises_the_error_of_a_persistent_operation() -> None:
    with hc.recv_init(np.zeros(3), hc.get_rank()) as receive:
        receive.start()
        hc.isend(np.zeros(1), hc.get_rank()).wait()
        with pytest.raises(hc.DistBackendError, match="the message has 8 bytes, but the array 24"):
            hc.wait_all([receive])  # type: ignore[list-item]


def test_wait_all_waits_for_the_others_where_one_has_failed() -> None:
    class Failing(hc.Work):
        def poll(self) -> bool:
            raise hc.DistBackendError("lost")

    x = np.zeros(2)
    receiving = hc.irecv(x, BEFORE)
    hc.isend(mine(), AFTER)
    with pytest.raises(hc.DistBackendError, match="lost"):
        hc.wait_all([Failing(), receiving])
    assert (x == BEFORE + 1).all()


def test_wait_any_gives_one_after_the_other() -> None:
    parts = [np.zeros(2) for _ in range(3)]
    works: list[Any] = [hc.irecv(part, BEFORE, tag=tag) for tag, part in enumerate(parts)]
    order = []
    for tag in (2, 0, 1):
        hc.barrier()
        hc.isend(mine(), AFTER, tag=tag)
        order.append(hc.wait_any(works))
        works[order[-1]] = None
    assert order == [2, 0, 1]
    assert hc.wait_any(works) == hc.wait_any([]) == -1
    assert (np.stack(parts) == BEFORE + 1).all()


def test_the_time_is_up() -> None:
    work = hc.irecv(np.zeros(2), BEFORE, tag=9)
    with pytest.raises(hc.DistTimeoutError, match="wait_any: none of 1 operations is done in time"):
        hc.wait_any([None, work], timeout=0.01)
    with pytest.raises(hc.DistTimeoutError, match=r"recv #\d+: not done after"):
        hc.wait_all([work], timeout=0.01)
    with pytest.raises(TypeError, match="wait_all: timeout is 'x'"):
        hc.wait_all([work], timeout="x")  # type: ignore[arg-type]
    hc.barrier()
    sent = hc.isend(mine(), AFTER, tag=9)
    hc.wait_all([work, sent], timeout=60)


# -- operations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MAXLOC", "MINLOC"])
def test_operations_on_pairs_are_refused_by_name(name: str) -> None:
    x = mine()
    instead = {"MAXLOC": "argmax", "MINLOC": "argmin"}[name]
    with pytest.raises(TypeError, match=rf"all_reduce: op is MPI\.{name}, which .* np\.{instead}"):
        hc.all_reduce(x, getattr(MPI, name))
    assert (x == mine()).all()


# -- communicators -----------------------------------------------------------------------------------


def test_a_group_on_a_row_of_a_cartesian_grid(process_group: hc.ProcessGroup) -> None:
    grid = MPI.COMM_WORLD.Create_cart([1, SIZE], periods=[True, False])
    row = grid.Sub([False, True])
    group = hc.new_group(comm=row)
    x = mine()
    hc.all_reduce(x, group=group)
    assert (x == SIZE * (SIZE + 1) / 2).all()
    hc.destroy_process_group(group)
    row.Free()
    grid.Free()


# -- what hpccomm does not have, beside it -----------------------------------------------------------


def test_parts_of_one_file_by_mpi_io(process_group: hc.ProcessGroup, mpi_tmp_path: Path) -> None:
    part = np.full(RANK + 1, float(RANK))  # of another length on each rank

    offset = np.array([part.nbytes])
    hc.exscan(offset)  # the bytes of the ranks before this one; the first keeps its own
    comm = process_group.comm.Dup()
    file = MPI.File.Open(comm, str(mpi_tmp_path / "parts.bin"), MPI.MODE_CREATE | MPI.MODE_WRONLY)
    file.Write_at_all(offset[0] if process_group.rank else 0, part)
    file.Close()

    hc.barrier()
    expected = np.concatenate([np.full(rank + 1, float(rank)) for rank in range(SIZE)])
    assert (np.fromfile(mpi_tmp_path / "parts.bin") == expected).all()
    comm.Free()


def test_a_window_beside_collectives(process_group: hc.ProcessGroup) -> None:
    comm = process_group.comm.Dup()
    memory = np.zeros(1)
    window = MPI.Win.Create(memory, comm=comm)
    window.Fence()
    window.Accumulate(np.array([RANK + 1.0]), AFTER)  # no call on the other side
    window.Fence()
    assert memory[0] == BEFORE + 1
    hc.all_reduce(memory)
    assert memory[0] == SIZE * (SIZE + 1) / 2
    window.Free()
    comm.Free()


@pytest.mark.parametrize(
    ("name", "ours"),
    {
        "bcast": r"broadcast_object_list\(\[object\], src\) for objects, broadcast\(array, src\) for arrays",
        "Bcast": r"broadcast\(array, src\)",
        "Allreduce": r"all_reduce\(array, op\)",
        "Iallreduce": r"all_reduce\(array, op\) with async_op=True",
        "ibarrier": r"barrier\(\) with async_op=True",
        "Allreduce_init": r"all_reduce_init\(\.\.\.\)",
        "Get_rank": r"get_rank\(\), or rank of a group",
        "Split": r"split_group\(color=color, key=key\)",
        "Waitall": r"wait_all\(works\)",
        "wait": "the method wait of a Work",
        "COMM_WORLD": r"world, which is there after init_process_group\(\)",
    }.items(),
)
def test_names_of_mpi4py_say_what_they_are_here(name: str, ours: str, process_group: hc.ProcessGroup) -> None:
    for thing, what in ((hc, "module 'hpccomm'"), (process_group, "'ProcessGroup' object")):
        with pytest.raises(
            AttributeError, match=f"^{what} has no attribute '{name}'; mpi4py's {name} is {ours}.* here$"
        ):
            getattr(thing, name)
        assert not hasattr(thing, name)


def test_names_of_nobody_are_an_ordinary_error(process_group: hc.ProcessGroup) -> None:
    for thing in (hc, process_group):
        with pytest.raises(AttributeError, match=r"has no attribute 'all_red'$"):
            thing.all_red  # noqa: B018
    assert not hasattr(hc.ProcessGroup, "__getattr__")  # it would slow down every attribute


def test_what_names_of_mpi4py_are_here_is_there() -> None:
    said = {*OF_ARRAYS.values(), *OF_OBJECTS.values(), *OTHERS.values(), *OF_TORCH.values()}
    names = {name for text in said for name in re.findall(r"([a-z_0-9]+)\(", text)} - {"abort", "perf_counter"}
    assert names
    for name in names:
        assert hasattr(hc, name), name
    for name in (*OF_ARRAYS, *OF_OBJECTS):
        assert hasattr(MPI.Cartcomm, name.capitalize()) or hasattr(MPI.Cartcomm, name), name
    for name, ours in OF_TORCH.items():
        with pytest.raises(AttributeError, match=re.escape(f"; torch.distributed's {name} is {ours} here")):
            getattr(hc, name)
    with pytest.raises(AttributeError, match=r"'Grid' object has no attribute 'mesh_dim_names'; .* is names of a Grid"):
        hc.new_grid((0,)).mesh_dim_names  # noqa: B018
