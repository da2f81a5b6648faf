"""`hpccomm run --detail` and `--accelerate`: what is done around the calls of watched communicators."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from ..launch import WATCHED, run_program

pytestmark = pytest.mark.serial

PROGRAM = """
    import array, sys, time
    import numpy as np
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    rows = np.random.default_rng(3).integers(0, 9, (size, 60_000)).astype(float)
    x, y = rows[rank].copy(), np.empty(60_000)
    half, copy, cart = comm.Split(rank % 2, -rank), comm.Dup(), comm.Create_cart([size])
    some = comm.Create_group(comm.Get_group().Incl([0, 1])) if rank < 2 else None
    """
# What is right although the ranks' arguments are not the same.
RIGHT = """
    comm.Bcast([y, MPI.DOUBLE] if rank else x, root=0)
    comm.Bcast([y, 30_000, MPI.Datatype.Create_contiguous(MPI.DOUBLE, 2).Commit()] if rank else x, root=0)
    comm.Bcast([x[: 20 * (rank + 1)], np.int64(5)])
    comm.Bcast([x, (5, rank)])
    comm.Allreduce([x, [4, 0]] if rank else x[:4], [y, 4])
    comm.Bcast(array.array("d", x[:9]) if rank else x[:9])
    assert comm.allreduce(rank, op=max) == size - 1
    comm.Gatherv(x[: 10 + rank], [np.empty(50), [10, 11, 12], None, MPI.DOUBLE] if rank == 0 else None)
    comm.Gather(x if rank else MPI.IN_PLACE, np.empty((size, 60_000)) if rank == 0 else None)
    comm.Reduce(x, y if rank == 1 else None, root=1)
    comm.bcast([rank], root=2)
    comm.alltoall(["any"] * (size - rank) + [1] * rank)
    request = comm.Iallreduce(x, y)
    half.Barrier()
    request.Wait()
    made, request = comm.Idup()
    request.Wait()
    made.Barrier()
    between = half.Create_intercomm(0, comm, 2 if rank % 2 else 1, tag=5)  # the last ranks are the first ones
    between.Bcast(x, root=(MPI.ROOT if rank == 2 else MPI.PROC_NULL) if rank % 2 == 0 else 0)
    between.Merge().Barrier()
    cart.Sub([True]).Barrier()
    if some is not None:
        some.Allreduce(x, y)
        some.Free()
    if rank == 0:
        comm.Send(x, dest=1)
    elif rank == 1:
        comm.Recv(y, source=0)
    for each in (made, half, cart, copy):
        each.Free()
    print("the end")
    """
DIFFERENCES = {
    "size": (
        "comm.Allreduce(x[:rank + 4], y[:rank + 4])",
        r"Allreduce #4 of 'COMM_WORLD': rank 0 calls Allreduce \(4 float64, SUM\) at \S+program.py:12, rank 1 calls "
        r"Allreduce \(5 float64, SUM\) at \S+program.py:12, rank 2 calls Allreduce \(6 float64, SUM\)",
    ),
    "op": (
        "comm.Allreduce(x, y, op=MPI.MAX if rank == 1 else MPI.SUM)",
        r"Allreduce #4 of 'COMM_WORLD': ranks 0, 2 call Allreduce \(60000 float64, SUM\) at .*, rank 1 calls Allreduce",
    ),
    "root": (
        "comm.bcast(1, root=rank)",
        r"bcast #4 of 'COMM_WORLD': rank 0 calls bcast \(root 0\) at .*, rank 1 calls",
    ),
    "operation": (
        "cart.Barrier() if rank else cart.Bcast(x)",
        r"collective #1 of 'Create_cart #3 of COMM_WORLD': rank 0 calls Bcast \(60000 float64, root 0\) at "
        r"\S+program.py:12, ranks 1-2 call Barrier at \S+program.py:12",
    ),
    "one is skipped": (
        "rank == 1 or copy.Barrier(); copy.Free()",
        r"collective of 'Dup #2 of COMM_WORLD': ranks 0, 2 call Barrier, #1 at .*, rank 1 calls Free, #1|"
        r"collective #1 of 'Dup #2 of COMM_WORLD': ranks 0, 2 call Barrier at \S+:12, rank 1 calls Free at \S+:12",
    ),
}
SUMS = """
    comm.Allreduce(x, y)
    assert (y == rows.sum(0)).all()
    comm.Allreduce(x.reshape(2, -1), [y, MPI.DOUBLE], op=MPI.MAX)
    assert (y == rows.max(0)).all()
    y[...] = x
    comm.Reduce(MPI.IN_PLACE if rank == 1 else y, y if rank == 1 else None, root=1)
    assert (y == (rows.sum(0) if rank == 1 else x)).all()
    comm.Scan(x, y)
    assert (y == rows[: rank + 1].sum(0)).all()
    comm.Exscan(x, y)
    assert rank == 0 or (y == rows[:rank].sum(0)).all()
    comm.Reduce_scatter_block(x, y[: 60_000 // size])
    assert (y[: 60_000 // size] == rows.sum(0).reshape(size, -1)[rank]).all()
    half.Allreduce(x, y)
    assert (y == rows[rank % 2 :: 2].sum(0)).all()
    half.Allreduce(x[:5], y[:5])
    assert (y == rows[rank % 2 :: 2].sum(0)).all()
    own = MPI.Op.Create(lambda a, b, of: np.frombuffer(b)[:].__iadd__(np.frombuffer(a)), commute=True)
    comm.Allreduce(x, y, op=own)
    assert (y == rows.sum(0)).all()
    MPI.COMM_SELF.Allreduce(x, y)
    assert (y == x).all()
    for each in (half, copy, cart):
        each.Free()
    """


def run(tmp_path: Path, calls: str, *options: str, **environment: str) -> tuple[int, str, str]:
    by = (*WATCHED, "--debug-dir", tmp_path / "reports", *options)
    program = textwrap.dedent(PROGRAM) + textwrap.dedent(calls)
    finished = run_program(program, tmp_path, 3, by=by, env=environment)
    return finished.returncode, finished.stdout, finished.stderr


def test_right_programs_are_not_refused(tmp_path: Path) -> None:
    status, output, errors = run(tmp_path, RIGHT, "--detail")
    assert (status, output) == (0, 3 * "the end\n"), errors


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_is_raised_on_every_rank_before_the_call(what: str, tmp_path: Path) -> None:
    call, said = DIFFERENCES[what]
    caught = f"try:\n    {call}\nexcept RuntimeError as error:\n    print(f'[{{rank}}] {{error}}', flush=True)\n"
    status, output, errors = run(tmp_path, caught + "comm.Barrier()\nprint('the end')\n", "--detail")
    assert status == 0, errors
    for rank in range(3):
        assert re.search(rf"\[{rank}\] ({said})", output), output
    assert output.count("the end") == 3


def test_who_does_not_come_to_the_comparison_has_a_verdict(tmp_path: Path) -> None:
    calls = "[comm.Bcast(x[:4]) for _ in range(9)]\nif rank != 1:\n    comm.Barrier()\nelse:\n    time.sleep(1000)\n"
    for option in ("--detail", "--trace"):
        status, _, errors = run(tmp_path, calls, "--timeout", "3", option)
        assert status == 124, errors
        assert "rank 1 never reached Barrier #13 of 'COMM_WORLD': it is in the program at " in errors
        assert "the ranks differ" not in errors


@pytest.mark.parametrize("options", [(), ("--detail", "--trace")])
def test_accelerated_reductions_are_right(options: tuple[str, ...], tmp_path: Path) -> None:
    status, _, errors = run(tmp_path, SUMS, "--accelerate", *options, HPCCOMM_DEBUG="" if options else "INFO")
    assert status == 0, errors
    if not options:  # it tells of each group, and of none for what MPI has done
        assert re.findall(r"made '(.*?)'", errors) == ["hpccomm run", "COMM_WORLD", "Split #1 of COMM_WORLD"]


@pytest.mark.parametrize(
    "call",
    [
        "comm.Allreduce(x, y)",
        "comm.Scan(x, y)",
        "hm.Comm(comm, accelerate=True).Allreduce(x, y)",
        "hc.ProcessGroup.from_comm(comm).all_reduce(x)",
        "hc.init_process_group(comm=comm)",
    ],
)
def test_no_group_calls_the_programs_functions_that_copy_attributes(call: str, tmp_path: Path) -> None:
    """A copy of a communicator would, in the middle of the call."""
    calls = f"""
    import hpccomm as hc
    from hpccomm import mpi4py as hm
    comm.Set_attr(MPI.Comm.Create_keyval(copy_fn=lambda *_: print("copied", flush=True)), 1)
    {call}
    print("the end", flush=True)
    """
    status, output, errors = run(tmp_path, calls, "--accelerate")
    assert (status, output) == (0, 3 * "the end\n"), errors


def test_what_mpi_does_not_take_and_hpccomm_does(tmp_path: Path) -> None:
    calls = """
    small = np.full(9, rank + 1, np.float16)
    comm.Allreduce(MPI.IN_PLACE, small)
    comm.Allreduce(x[::2], y[::2])
    assert (small == size * (size + 1) / 2).all() and (y[::2] == rows.sum(0)[::2]).all()
    """
    status, _, errors = run(tmp_path, calls, "--accelerate")
    assert status == 0, errors
    assert run(tmp_path, calls)[0] == 1


def test_a_hang_in_an_accelerated_reduction_has_a_verdict(tmp_path: Path) -> None:
    calls = "comm.Allreduce(x, y)\nif rank != 1:\n    comm.Allreduce(x, y)\nelse:\n    time.sleep(1000)\n"
    status, _, errors = run(tmp_path, calls, "--accelerate", "--timeout", "3")
    assert status == 124, errors
    assert re.search(r"rank 1 never reached (Allreduce #5|all_reduce #2) of 'COMM_WORLD'", errors), errors
