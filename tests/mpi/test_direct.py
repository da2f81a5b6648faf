"""Copies straight between the arrays of two ranks, of parts that are too small for that otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.mpi import direct, shared_memory
from hpccomm.mpi.node_exchange import is_compiled
from hpccomm.mpi.shared_memory import Window

from ..launch import launch
from ..test_halos import LAYOUTS, Field, check
from ..test_layouts import laid_out, tiles
from .test_process_memory import a_rank_that_refuses

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()

pytestmark = pytest.mark.skipif(not is_compiled(), reason="without the compiled part, all are messages")


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[hc.ProcessGroup]:
    with hc.init_process_group() as group:
        yield group


@pytest.fixture(autouse=True)
def agreements(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What exchanges have agreed on, with every part large enough to be copied."""
    for name in ("MAPPED_BYTES", "RUN_BYTES", "MAPPED_RUN_BYTES"):
        monkeypatch.setattr(direct, name, 1)
    seen: list[Any] = []
    agree = direct.DirectCopies.agree

    def spy(copies: direct.DirectCopies, *parts: Any) -> Any:
        seen.append(agree(copies, *parts))
        return seen[-1]

    monkeypatch.setattr(direct.DirectCopies, "agree", spy)
    return seen


def of_any_size(group: Any) -> Any:
    group.tuning = group.tuning._replace(direct_bytes=1)  # before the first operation makes the backend
    return group


def ring(name: str = "x") -> Any:
    return of_any_size(hc.new_grid(0, periodic=True, names=(name,)))


def pids(agreements: list[Any]) -> set[bool]:
    """Whether the copies of this rank are those of another process."""
    copies = (copy for both in agreements for each in both for numbers in each.values() for copy in numbers.values())
    return {copy.pid != 0 for copy in copies}


def in_node_memory(grid: Any, array: np.ndarray) -> np.ndarray:
    """The array in a node-shared one, which has the same size on all ranks."""
    nbytes = MPI.COMM_WORLD.allreduce(array.nbytes, MPI.MAX)
    memory = hc.empty_shared(nbytes, np.uint8, group=grid)[: array.nbytes]
    moved = memory.view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(("dims", "periodic"), LAYOUTS)
def test_random_blocks(dims: Any, periodic: Any, is_shared: bool, agreements: list[Any]) -> None:
    rng = np.random.default_rng([SIZE, *dims, *periodic])
    with hc.new_grid(dims, periodic) as grid:
        of_any_size(grid)
        widths = [(int(low), int(high)) for low, high in rng.integers(1, 4, (grid.ndim, 2))]
        axes = rng.permutation(grid.ndim + int(rng.integers(2)))[: grid.ndim].tolist()
        fields = [Field(rng, grid, widths, axes) for _ in range(2)]
        blocks = [field.block() for field in fields]
        if is_shared:
            blocks = [in_node_memory(grid, block) for block in blocks]
        with hc.halo_exchange_init(blocks, grid, widths, axes) as halo:
            for turn in range(4):
                for block, field in zip(blocks, fields):
                    block[...] = field.block()
                halo.start()
                while turn % 2 and not halo.is_completed():
                    pass
                halo.wait()
                check(blocks, [field.exchanged(True) for field in fields])
    others = SIZE > 1 and hc.get_node_count() == 1
    if others and all(periodic):
        assert pids(agreements) <= {not is_shared, False}  # to itself a rank copies in its own memory
        assert (not is_shared) in pids(agreements)


@pytest.mark.parametrize("seed", range(4))
def test_random_boxes(seed: int, agreements: list[Any]) -> None:
    rng = np.random.default_rng([SIZE, seed])
    with hc.new_group() as group:
        of_any_size(group)
        shape = rng.integers(4, 9, 3).tolist()
        whole = rng.integers(0, 100, (2, *shape)).astype("f4")
        have, want = tiles(rng, shape, SIZE), tiles(rng, shape, SIZE)
        mine = np.random.default_rng([seed, RANK])  # layouts of each rank's own
        input = laid_out(mine, whole[(..., *have[RANK])].shape, "f4")
        expected = whole[(..., *want[RANK])]
        output = laid_out(mine, expected.shape, "f4")
        with hc.redistribute_init(output, input, want[RANK], have[RANK], group=group) as again:
            for step in range(1, 4):
                input[...] = step * whole[(..., *have[RANK])]
                output[...] = 0
                again.start()
                again.wait()
                np.testing.assert_array_equal(output, step * expected)
    assert agreements


@pytest.mark.parametrize("shift", [1, 3, 6, 9])
def test_what_a_rank_overwrites_is_packed(shift: int) -> None:
    n = 6 * SIZE
    whole, memory = np.arange(n), np.zeros(10, int)
    here = slice(6 * RANK, 6 * RANK + 6)
    start = min(here.start + shift, n)
    there = slice(start, min(start + 6, n))  # of this rank and the next ones
    input, output = memory[:6], memory[4:][: there.stop - there.start]
    with hc.new_group() as group:
        of_any_size(group)
        with hc.redistribute_init(output, input, there, here, group=group) as again:
            for turn in range(4):
                input[...] = whole[here] + turn
                again.start()
                again.wait()
                assert output.tolist() == (whole[there] + turn).tolist()


@pytest.mark.once
@pytest.mark.skipif("MPICH" not in MPI.Get_library_version(), reason="only MPICH can pretend")
def test_on_two_pretended_nodes() -> None:
    suite = ["tests/mpi/test_direct.py", "-k", "random or overwrites or something_else"]
    command = [sys.executable, "-m", "mpi4py", "-m", "pytest", "--with-mpi", "-q", "-p", "no:cacheprovider", *suite]
    ended = launch(4, *command, env={"MPIR_CVAR_NUM_CLIQUES": "2"}, timeout=170)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"


@pytest.mark.mpi(min_size=2)
def test_nobody_waits_for_a_rank_that_does_something_else() -> None:
    with ring("x") as first, ring("y") as second:
        blocks = [np.full(4, RANK + 10 * number) for number in range(2)]
        halos = [hc.halo_exchange_init(block, grid) for block, grid in zip(blocks, (first, second))]
        before, after = first.shift(0)
        for turn in range(5):
            for block in blocks:
                block[1:-1] += turn
            for halo in halos:
                halo.start()
            if turn % 2 and RANK:  # rank 0 is done with both before the others look
                hc.barrier()
            for halo in halos if RANK % 2 else halos[::-1]:
                halo.wait()
            if turn % 2 and not RANK:
                hc.barrier()
            for number, block in enumerate(blocks):
                assert [block[0], block[-1]] == [each + 10 * number + sum(range(turn + 1)) for each in (before, after)]


@pytest.mark.parametrize("name", ["process_vm_readv", "process_vm_writev"])
def test_where_the_kernel_refuses_only_a_rank_itself_copies(
    name: str, agreements: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_rank_that_refuses(name, 0, monkeypatch)
    with hc.new_grid((0, 1), periodic=True) as grid:
        of_any_size(grid)
        block = np.full((4, 4), RANK)
        with hc.halo_exchange_init(block, grid) as halo:
            halo.start()
            halo.wait()
        before, after = grid.shift(0)
        assert block.tolist() == [[before] * 4, [RANK] * 4, [RANK] * 4, [after] * 4]
    assert pids(agreements) == {False}


@pytest.mark.mpi(min_size=3)
def test_memory_that_a_partner_has_not_mapped(agreements: list[Any]) -> None:
    with hc.new_group([0, 1]) as two, hc.new_group() as group:
        of_any_size(group)
        block = np.full(4, RANK) if RANK > 1 else hc.empty_shared(4, int, group=two)
        ghosts = np.empty(4, int)
        block[...] = RANK
        want, have = (slice(4 * rank, 4 * rank + 4) for rank in ((RANK + 1) % SIZE, RANK))
        with hc.redistribute_init(ghosts, block, want, have, group=group) as again:
            again.start()
            again.wait()
        assert ghosts.tolist() == [(RANK + 1) % SIZE] * 4


@pytest.mark.mpi(min_size=2)
def test_a_copy_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = 2**22 + 1  # above the largest number of a process
    monkeypatch.setattr(direct, "processes_of", lambda comm: [nobody] * comm.size)
    with ring() as grid:
        halo = hc.halo_exchange_init(np.full(4, RANK), grid)
        halo.start()
        with pytest.raises(hc.DistBackendError, match=r"memories of two ranks failed \(No such process\).*\(rank"):
            halo.wait()


def test_more_exchanges_than_there_may_be_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    with ring() as grid:
        blocks = [np.full(4, 10 * RANK + number) for number in range(6)]
        monkeypatch.setattr(shared_memory, "MOST_WINDOWS", Window.alive + 2)
        halos = [hc.halo_exchange_init(block, grid) for block in blocks]
        for halo in halos:
            halo.start()
        for halo in halos:
            halo.wait()
        before, after = grid.shift(0)
        assert [[block[0], block[-1]] for block in blocks] == [[10 * before + n, 10 * after + n] for n in range(6)]
        assert Window.alive == shared_memory.MOST_WINDOWS
        if grid.size > 1:
            with pytest.raises(MemoryError, match=r"this process has \d+ windows already; destroy groups"):
                hc.empty_shared(3, group=grid)


@pytest.mark.parametrize("axes", [33, 64])
def test_parts_with_too_many_gaps_are_refused(axes: int) -> None:
    _pieces = pytest.importorskip("hpccomm.native._pieces")
    strides = tuple(4**axis for axis in range(1, axes + 1))
    with pytest.raises(ValueError, match=f"has {axes} axes with gaps between them; at most 32"):
        _pieces.Pieces([(0, (2,) * axes, 1, strides[::-1], strides[::-1], (0, 0))], [], [], 0)
