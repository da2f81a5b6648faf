"""Halos: random blocks of random grids against the whole array, which NumPy wraps around or cuts off."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.mpi.exchange import MOST_REPEATED, Memory

from .launch import launch, until

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
several = pytest.mark.mpi(min_size=2)

GHOST = 99
DTYPES = [np.float64, np.float32, np.int8, np.uint16, np.complex64, np.float16, np.bool_, ml_dtypes.bfloat16]


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[hc.ProcessGroup]:
    with hc.init_process_group() as group:
        yield group


class Field:
    """A global array that is cut along some of its axes, with the blocks that ranks have of it."""

    def __init__(self, rng: np.random.Generator, grid: hc.Grid, widths: list[tuple[int, int]], axes: list[int]) -> None:
        self.grid, self.widths, self.axes = grid, widths, axes
        shape = [int(rng.integers(1, 4)) for _ in range(max(axes) + 1)]
        self.cuts = []
        for axis, ranks, (low, high) in zip(axes, grid.dims, widths):
            sizes = rng.integers(max(low, high), max(low, high) + 4, ranks)
            self.cuts.append([0, *np.cumsum(sizes).tolist()])
            shape[axis] = self.cuts[-1][-1]
        self.dtype = np.dtype(rng.choice(np.array(DTYPES, object)))
        self.layout = int(rng.integers(4))
        self.whole = rng.integers(0, 50, shape)
        self.deposits = {rank: rng.integers(0, 4, self.shape(rank)) for rank in range(grid.size)}

    def bounds(self, rank: int) -> list[tuple[int, int]]:
        """The cells of a rank along each axis of the grid, with its ghosts."""
        places = zip(self.cuts, self.grid.coords_of(rank), self.widths)
        return [(cuts[at] - low, cuts[at + 1] + high) for cuts, at, (low, high) in places]

    def shape(self, rank: int) -> list[int]:
        shape = list(self.whole.shape)
        for axis, (start, stop) in zip(self.axes, self.bounds(rank)):
            shape[axis] = stop - start
        return shape

    def ghosts(self, rank: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Of each cell of a block: along how many axes it is a ghost, whether it has an owner, and where it is."""
        shape = self.shape(rank)
        along, is_there = np.zeros(shape, int), np.ones(shape, bool)
        places = [np.arange(size) for size in shape]
        for number, (axis, (start, stop), (low, high)) in enumerate(zip(self.axes, self.bounds(rank), self.widths)):
            cells, size = np.arange(start, stop), self.whole.shape[axis]
            view = [1] * len(shape)
            view[axis] = -1
            along += ((cells < start + low) | (cells >= stop - high)).astype(int).reshape(view)
            if not self.grid.periodic[number]:
                is_there &= ((cells >= 0) & (cells < size)).reshape(view)
            places[axis] = cells % max(size, 1)
        return along, is_there, places

    def array(self, values: np.ndarray) -> np.ndarray:
        """The values as an array of one of several layouts."""
        values = values.astype(self.dtype)
        if self.layout == 1:
            return np.asfortranarray(values)
        if self.layout == 2:
            wide = np.zeros([2 * size for size in values.shape], self.dtype)
            wide[tuple([slice(None, None, 2)] * values.ndim)] = values
            return wide[tuple([slice(None, None, 2)] * values.ndim)]
        if self.layout == 3:
            return values[::-1].copy()[::-1]
        return values

    def block(self) -> np.ndarray:
        along, _, places = self.ghosts(self.grid.rank)
        return self.array(np.where(along > 0, GHOST, self.whole[np.ix_(*places)]))

    def exchanged(self, corners: bool) -> np.ndarray:
        along, is_there, places = self.ghosts(self.grid.rank)
        known = is_there & (along <= (self.grid.ndim if corners else 1))
        return np.where(known, self.whole[np.ix_(*places)], GHOST).astype(self.dtype)

    def accumulated(self, corners: bool) -> np.ndarray:
        sums = np.zeros(self.whole.shape, int)
        for rank, deposit in self.deposits.items():
            along, is_there, places = self.ghosts(rank)
            is_sent = is_there & (along > 0) & (along <= (self.grid.ndim if corners else 1))
            where = np.broadcast_arrays(*np.ix_(*places))
            np.add.at(sums, tuple(each[is_sent] for each in where), deposit[is_sent])
        along, _, places = self.ghosts(self.grid.rank)
        mine = self.deposits[self.grid.rank]
        total = np.where(along > 0, mine, mine + sums[np.ix_(*places)])
        return total.astype(bool).astype(self.dtype) if self.dtype == bool else total.astype(self.dtype)


def shapes(size: int, axes: int) -> list[tuple[int, ...]]:
    if axes == 1:
        return [(size,)]
    return [(n, *rest) for n in range(1, size + 1) if size % n == 0 for rest in shapes(size // n, axes - 1)]


LAYOUTS = [
    (dims, periodic)
    for axes in (1, 2, 3)
    for dims in shapes(SIZE, axes)
    for periodic in product([False, True], repeat=axes)
]


@pytest.mark.parametrize("backend", ["cpu:mpi", "cpu:messages"])
@pytest.mark.parametrize(("dims", "periodic"), LAYOUTS)
def test_random_blocks(dims: tuple[int, ...], periodic: tuple[bool, ...], backend: str) -> None:
    rng = np.random.default_rng([SIZE, *dims, *periodic])
    with hc.new_grid(dims, periodic, backend=backend) as grid:
        for _ in range(3):
            widths = [(int(low), int(high)) for low, high in rng.integers(0, 4, (grid.ndim, 2))]
            axes = rng.permutation(grid.ndim + int(rng.integers(2)))[: grid.ndim].tolist()
            fields = [Field(rng, grid, widths, axes) for _ in range(rng.integers(1, 4))]
            corners = bool(rng.integers(2))
            options = {"width": widths, "axes": axes, "corners": corners}
            blocks = [field.block() for field in fields]
            hc.halo_exchange(blocks, grid, **options)
            check(blocks, [field.exchanged(corners) for field in fields])
            deposits = [field.array(field.deposits[grid.rank]) for field in fields]
            work = hc.halo_accumulate(deposits, grid, **options, async_op=True)
            blocks = [field.block() for field in fields]
            with hc.halo_exchange_init(blocks, grid, **options) as halo:
                for _ in range(3):
                    for block, field in zip(blocks, fields):
                        block[...] = field.block()
                    halo.start()
                    halo.wait()
                    check(blocks, [field.exchanged(corners) for field in fields])
            work.wait()
            assert all(one is other for one, other in zip(work.result(), deposits))
            check(deposits, [field.accumulated(corners) for field in fields])
            with hc.halo_accumulate_init(deposits, grid, **options) as deposit:
                for _ in range(2):
                    for array, field in zip(deposits, fields):
                        array[...] = field.deposits[grid.rank].astype(array.dtype)
                    deposit.start()
                    deposit.wait()
                    check(deposits, [field.accumulated(corners) for field in fields])


def faces(own: list[int], widths: list[tuple[int, int]], kind: MPI.Datatype) -> tuple[list[Any], list[Any]]:
    """Subarray types of the cells that go to each neighbour, and of the ghosts that come from it, in MPI's order."""
    shape = [low + cells + high for cells, (low, high) in zip(own, widths)]

    def face(axis: int, start: int, size: int) -> MPI.Datatype:
        sizes, starts = own.copy(), [low for low, _ in widths]
        sizes[axis], starts[axis] = size, start
        return kind.Create_subarray(shape, sizes, starts).Commit()

    sent, received = [], []
    for axis, (cells, (low, high)) in enumerate(zip(own, widths)):
        sent += [face(axis, low, high), face(axis, cells, low)]
        received += [face(axis, 0, low), face(axis, low + cells, high)]
    return sent, received


@pytest.mark.parametrize(("dims", "periodic"), [each for each in LAYOUTS if len(each[0]) > 1])
def test_faces_are_those_of_mpi_neighbourhood_collectives(dims: tuple[int, ...], periodic: tuple[bool, ...]) -> None:
    own, widths = [4, 3, 5][: len(dims)], [(1, 2), (2, 1), (3, 3)][: len(dims)]
    block = np.full([low + cells + high for cells, (low, high) in zip(own, widths)], GHOST, np.int32)
    inside = tuple(slice(low, low + cells) for cells, (low, _) in zip(own, widths))
    block[inside] = 1000 * (RANK + 1) + np.arange(block[inside].size).reshape(own)
    expected = block.copy()
    cart = MPI.COMM_WORLD.Create_cart(dims, periodic)
    sent, received = faces(own, widths, MPI.INT32_T)
    once, where = [1] * len(sent), [0] * len(sent)
    cart.Neighbor_alltoallw([block, once, where, sent], [expected, once, where, received])
    again = block.copy()
    with hc.ProcessGroup.from_comm(cart) as grid:
        assert isinstance(grid, hc.Grid)
        hc.halo_exchange(block, grid, widths, corners=False)
        with hc.halo_exchange_init(again, grid, widths, corners=False) as halo:
            halo.start()
            halo.wait()
    for array in (block, again):
        np.testing.assert_array_equal(array, expected)
    for each in (*sent, *received):
        each.Free()
    cart.Free()


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("form", ["once", "again"])
def test_staggered_fields_of_channels(form: str, periodic: bool) -> None:
    """Centres, and the faces between them: one more along an axis, unless they wrap around."""
    with hc.new_grid((0, 0), periodic) as grid:
        y, x = (hc.block_slice(5 * n, n, at) for n, at in zip(grid.dims, grid.coords))
        more = [int(not periodic and at == n - 1) for n, at in zip(grid.dims, grid.coords)]
        blocks, expected = [], []
        for channels, dtype, plus in ((2, "f4", (0, 0)), (3, "i2", (0, 1)), (1, "c16", (1, 0))):
            shape = [channels, *(5 * n + one * (not periodic) for n, one in zip(grid.dims, plus))]
            whole = (np.arange(np.prod(shape)) % 30000).reshape(shape).astype(dtype)
            stops = [s.stop + one * end for s, one, end in zip((y, x), plus, more)]
            wide = [(0, 0), (2, 2), (2, 2)]
            padded = np.pad(whole, wide, mode="wrap") if periodic else np.pad(whole, wide, constant_values=GHOST)
            expected.append(padded[:, y.start : stops[0] + 4, x.start : stops[1] + 4])
            block = np.full(expected[-1].shape, GHOST, dtype)
            block[:, 2:-2, 2:-2] = expected[-1][:, 2:-2, 2:-2]
            blocks.append(block)
        if form == "once":
            hc.halo_exchange(blocks, grid, width=2, axes=iter((1, 2)))  # type: ignore[arg-type]
        else:
            with hc.halo_exchange_init(blocks, grid, width=2, axes=map(int, (-2, -1))) as halo:  # type: ignore[arg-type]
                halo.start()
                halo.wait()
        check(blocks, expected)


@pytest.mark.parametrize("shape", [(3001,), (40, 77), (5, 1500)])
def test_large_faces_of_single_cells(shape: tuple[int, ...]) -> None:
    """They are copied in blocks of 8 KiB, along one axis of the array and along two that cannot be joined."""
    with hc.new_grid((SIZE,), periodic=True) as grid:
        whole = np.arange(float(np.prod(shape) * 4 * SIZE)).reshape(*shape, -1)
        around = np.pad(whole, [*([(0, 0)] * len(shape)), (1, 1)], mode="wrap")
        block = np.zeros([*(2 * n for n in shape), 6])[(slice(None, None, 2),) * len(shape)]
        with hc.halo_exchange_init(block, grid, width=1, axes=(-1,)) as halo:
            for sign in (1, -1, 2):
                expected = sign * around[..., 4 * grid.coords[0] :][..., :6]
                block[..., 1:-1] = expected[..., 1:-1]
                halo.start()
                halo.wait()
                np.testing.assert_array_equal(block, expected)


def test_a_width_of_nothing_changes_nothing() -> None:
    with hc.new_grid((0, 0), periodic=True) as grid:
        block = np.arange(12.0).reshape(3, 4) + RANK
        before = block.copy()
        for call in (hc.halo_exchange, hc.halo_accumulate):
            call(block, grid, width=0)
        for init in (hc.halo_exchange_init, hc.halo_accumulate_init):
            with init(block, grid, width=((0, 0), 0)) as halo:
                halo.start()
                assert halo.wait()
        np.testing.assert_array_equal(block, before)


@pytest.mark.parametrize("dtype", ["M8[s]", "S3", [("at", "f8"), ("number", "i4")]])
@pytest.mark.parametrize("accumulate", [hc.halo_accumulate, hc.halo_accumulate_init])
def test_what_has_no_sum_is_exchanged_and_not_accumulated(accumulate: Any, dtype: Any) -> None:
    with hc.new_grid((0,), periodic=True) as grid:
        block = np.zeros(4, dtype)
        block[1:-1] = np.arange(2 * RANK, 2 * RANK + 2)
        expected = block.copy()
        expected[[0, -1]] = np.array([2 * RANK - 1, 2 * RANK + 2]) % (2 * SIZE)
        with pytest.raises(TypeError, match=rf"{accumulate.__name__}: ReduceOp.SUM is not defined for arrays\[1\]'s"):
            accumulate([np.zeros(4), block], grid)
        hc.halo_exchange(block, grid)
        np.testing.assert_array_equal(block, expected)


# -- what does not fit ---------------------------------------------------------------------------------


def texts_of_all(call: Any) -> list[str]:
    """What the ranks' calls raise."""
    text = ""
    try:
        call()
    except (ValueError, TypeError) as error:
        text = str(error)
    return MPI.COMM_WORLD.allgather(text)


@several
@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (
            lambda: np.zeros((4, 4 + (RANK == 0))),
            {},
            "and have 3 and 2 cells of arrays[0] along axis 'x'; expect",
        ),
        (lambda: np.zeros((4, 4), int if RANK else float), {}, "the dtypes differ: rank 0 has ['float64'], rank 1"),
        (lambda: np.zeros((4, 4, 1 + RANK)), {}, "the other axes of arrays[0] have sizes (1,) on rank 0 and (2,)"),
        (lambda: [np.zeros((4, 4))] * (1 + RANK), {}, "the number of arrays differ: rank 0 has 1, rank 1 2"),
        (
            lambda: np.zeros((4, 4)),
            {"axes": (1, 0) if RANK == 1 else (0, 1)},
            "axes differ: rank 0 gives [(0, 1)], rank 1 [(1, 0)",
        ),
        (lambda: np.zeros((4, 4)), {"corners": RANK == 0}, "corners differ: rank 0 gives True, rank 1 False"),
        (lambda: np.zeros((5, 5)), {"width": 1 + (RANK == 1)}, "widths differ: rank 0 gives ((1, 1), (1, 1)), rank 1"),
    ],
)
def test_blocks_that_do_not_fit_are_one_error_on_all_ranks(make: Any, options: dict[str, Any], words: str) -> None:
    with hc.new_grid((SIZE, 1), names="yx") as grid:
        for init in (hc.halo_exchange_init, hc.halo_accumulate_init):
            texts = texts_of_all(lambda init=init: init(make(), grid, **options))  # type: ignore[misc]
            assert all(words in text for text in texts), texts
        hc.halo_exchange(np.zeros((4, 4)), grid)


@several
def test_a_width_larger_than_a_block_is_one_error_on_all_ranks() -> None:
    with hc.new_grid((SIZE,), names="x") as grid:
        texts = texts_of_all(lambda: hc.halo_exchange_init(np.zeros(5 if RANK == 0 else 9), grid, width=2))
        assert all("along axis 'x' rank 0 has 1 cells of its own" in text for text in texts), texts


@several
def test_an_empty_block_beside_ghosts_is_one_error_on_all_ranks() -> None:
    with hc.new_grid((1, SIZE), periodic=True, names="yx") as grid:
        for empty, beside in enumerate([*range(1, SIZE), 0]):
            words = f"along axis 'x' rank {empty} has 0 cells of its own in arrays[1], and rank {beside} beside it 1"
            for init in (hc.halo_exchange_init, hc.halo_accumulate_init):
                blocks = [np.zeros((5, 5)), np.zeros((5, 5 if empty != RANK else 2))]
                texts = texts_of_all(lambda init=init, blocks=blocks: init(blocks, grid))  # type: ignore[misc]
                assert all(text.startswith(init.__name__) and words in text for text in texts), texts


@pytest.mark.parametrize(("shape", "axis"), [((2, 5), "y"), ((5, 2), "x")])
def test_without_init_the_rank_of_an_empty_block_says_so(shape: tuple[int, int], axis: str) -> None:
    with hc.new_grid((1, SIZE), periodic=True, names="yx") as grid:
        for call in (hc.halo_exchange, hc.halo_accumulate):
            with pytest.raises(ValueError, match=rf"{call.__name__}: along axis '{axis}' rank {RANK} has 0 cells"):
                call(np.zeros(shape), grid)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"grid": None}, TypeError, "expected a Grid, of hpccomm.new_grid"),
        ({"arrays": []}, ValueError, "arrays is empty"),
        ({"arrays": [1.0]}, TypeError, "arrays"),
        ({"arrays": np.zeros(4)}, ValueError, "axes are (0, 1), of an array with 1 dimension; expected 2"),
        ({"width": (1,)}, ValueError, "or one (or a pair) for each of 2 axes"),
        ({"width": (1, (1, 1, 1))}, ValueError, "expected a number, or (before, after), 0 or more"),
        ({"width": -1}, ValueError, "0 or more"),
        ({"width": 1.0}, TypeError, "expected an integer"),
        ({"width": 3}, ValueError, "has 4 cells along axis 0, fewer than its 3 + 3 ghosts"),
        ({"axes": (0, 0)}, ValueError, "axes are (0, 0)"),
        ({"axes": 0}, ValueError, "axes are (0,), of an array with 2 dimensions; expected 2"),
        ({"axes": (0, 2)}, ValueError, "expected 2 of them, one for each axis of the grid"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with hc.new_grid((SIZE, 1)) as grid:
        given: dict[str, Any] = {"arrays": np.zeros((4, 4)), "grid": grid, **arguments}
        for call in (hc.halo_exchange, hc.halo_accumulate, hc.halo_exchange_init, hc.halo_accumulate_init):
            with pytest.raises(error) as caught:
                call(**given)
            assert words in str(caught.value)
            assert str(caught.value).startswith(call.__name__)
        read_only = np.zeros((4, 4))
        read_only.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            hc.halo_exchange(read_only, grid)
    with pytest.raises(hc.DistError, match="has been destroyed"):
        hc.halo_exchange(np.zeros((4, 4)), grid)


# -- as every operation -----------------------------------------------------------------------------------


class Seen:
    def __init__(self) -> None:
        self.names: list[tuple[str, int, Any]] = []

    def begin(self, operation: hc.Operation) -> None:
        self.names.append((operation.name, operation.sequence_number, operation.arguments["width"]))

    def end(self, operation: hc.Operation) -> None:
        assert operation.error is None


def test_hooks_and_numbers() -> None:
    with hc.new_grid(0, periodic=True) as grid:
        x, seen = np.zeros(4), Seen()
        halo = hc.halo_exchange_init(x, grid)
        first = grid.sequence_number
        halo.start()
        halo.wait()
        assert grid.sequence_number == first + 1
        with grid.register_hook(seen):
            halo.start()
            halo.wait()
            hc.halo_accumulate(x, grid, async_op=True).wait()
        width = ((1, 1),)
        assert seen.names == [("halo_exchange_start", first + 2, width), ("halo_accumulate", first + 3, width)]
        with pytest.raises(hc.UnsupportedOperationError, match="coalescing"), hc.coalescing(grid):
            hc.halo_exchange(x, grid)


def test_exchanges_come_and_go() -> None:
    with hc.new_grid(0, periodic=True) as grid:
        blocks = [np.full(4, RANK + 10 * number) for number in range(6)]
        halos = [hc.halo_exchange_init(block, grid) for block in blocks]
        for halo in halos[::-1]:  # all in flight at once
            halo.start()
        for halo in halos:
            halo.wait()
        before, after = grid.shift(0)
        for number, block in enumerate(blocks):
            assert block.tolist() == [before + 10 * number, *[RANK + 10 * number] * 2, after + 10 * number]
        for halo in halos[1:]:
            halo.free()
        again = hc.halo_exchange_init(blocks[1], grid)  # in the place of those
        halos[0].start()
        again.start()
        again.wait()
        halos[0].wait()
        assert blocks[1].tolist() == [before + 10, RANK + 10, RANK + 10, after + 10]
        with pytest.raises(hc.DistError, match="freed"):
            halos[1].start()
        again.free()  # and halos[0] goes with the group
    with pytest.raises(hc.DistError, match=r"freed|destroyed"):
        again.start()


def test_blocks_without_cells_or_ghosts() -> None:
    with hc.new_grid((SIZE, 1), periodic=True) as grid:
        empty = np.zeros((0, 3))
        hc.halo_exchange(empty, grid, width=0)
        flat = np.arange(3.0).reshape(3, 1)
        with hc.halo_exchange_init([empty, flat], grid, width=0) as halo:
            halo.start()
            halo.wait()
        assert flat.ravel().tolist() == [0, 1, 2]


@several
def test_a_neighbour_without_cells_along_another_axis_is_noticed() -> None:
    with hc.new_grid(0, periodic=True) as grid:
        block = np.zeros((4, 3 * (RANK > 0)))
        with pytest.raises(hc.DistBackendError) if RANK in (0, 1, SIZE - 1) else contextlib.nullcontext():
            hc.halo_exchange(block, grid, width=1)


@several
def test_a_neighbour_that_is_late_is_a_time_out() -> None:
    with hc.new_grid(0, periodic=True) as grid:
        halo = hc.halo_exchange_init(np.zeros(4), grid)
        if RANK:
            halo.start()
        if 1 in (RANK, SIZE - 1) and RANK != 0:  # beside rank 0
            with pytest.raises(hc.DistTimeoutError, match=r"halo_exchange: not done after 0.3 s"):
                halo.wait(0.3)
            assert not halo.is_completed()
        MPI.COMM_WORLD.Barrier()
        if RANK == 0:
            halo.start()
        while not halo.is_completed():
            pass


def check(arrays: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for array, right in zip(arrays, expected):
        np.testing.assert_array_equal(array, right)


class Messages(hc.BackendOverMPI):
    """Has sends of its own, so that halos are made of messages."""

    def send(self, array: Any, dst: int, tag: int, async_op: bool) -> hc.Work | None:
        return super().send(array, dst, tag, async_op)


hc.register_backend("messages", Messages, devices="cpu", extended_api=True)


@pytest.mark.once
@pytest.mark.skipif("MPICH" not in MPI.Get_library_version(), reason="only MPICH can pretend")
def test_on_two_pretended_nodes() -> None:
    suite = [
        "tests/test_halos.py",
        "tests/test_layouts.py",
        "tests/test_grids.py",
        "-k",
        "random or come_and_go or late or transpose or one_order or beside_each_other or at_a_border",
        "--cases=24",
    ]
    command = [sys.executable, "-m", "mpi4py", "-m", "pytest", "--with-mpi", "-q", "-p", "no:cacheprovider", *suite]
    ended = launch(4, *command, env={"MPIR_CVAR_NUM_CLIQUES": "2"}, timeout=170)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"


def test_sums_have_one_order_however_they_are_waited_for() -> None:
    with hc.new_grid((0, 0), periodic=True) as grid:
        field, seen = np.zeros((3, 3)), []
        with hc.halo_accumulate_init(field, grid, corners=False) as again:
            for turn in range(8):
                field[...] = 0
                field[1, 1], field[2, 1], field[1, 2] = -1e16, 1e16, 1  # 0 or 1, as they are added
                again.start()
                while turn % 2 and not again.is_completed():
                    pass
                again.wait()
                seen.append(field[1, 1])
    assert set(seen) == {seen[0]}


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.skipif(SIZE < 2, reason="two ranks")
def test_a_message_that_is_too_short_is_noticed(async_op: bool) -> None:
    before, after = (RANK - 1) % SIZE, (RANK + 1) % SIZE
    with hc.new_group(on_timeout="raise") as group:
        ghosts = np.full(3, -1.0)
        exchange = group.dispatcher.backends["cpu"].exchange
        parts = [(after, np.ones(2))], [(before, ghosts)]
        with pytest.raises(hc.DistBackendError, match="the message has 16 bytes, but the array 24"):
            exchange(*parts, False, True).wait() if async_op else exchange(*parts, False, False)
        assert ghosts[2] == -1


def test_the_memory_of_messages_is_used_again_unless_mpi_may_still_write_there() -> None:
    memory = Memory()
    doubles, floats = np.dtype("f8"), np.dtype("f4")
    first = memory.begin()((2, 3), doubles)
    memory.end()
    second = memory.begin()((12,), floats)
    assert np.shares_memory(first, second)
    third = memory.begin()((2, 3), doubles)  # the second exchange has failed
    assert not np.shares_memory(first, third)
    memory.end()
    assert not np.shares_memory(third, memory.begin()((4,), doubles))


# -- the same exchange again ---------------------------------------------------------------------------


@pytest.mark.parametrize("who_repeats", ["all", "some"])
@pytest.mark.parametrize(("dims", "periodic"), [each for each in LAYOUTS if len(each[0]) < 3])
def test_exchanges_of_the_same_arrays(dims: tuple[int, ...], periodic: tuple[bool, ...], who_repeats: str) -> None:
    """On ranks that have other arrays each time, every one is a new exchange."""
    rng = np.random.default_rng([SIZE, *dims, *periodic])
    with hc.new_grid(dims, periodic) as grid:
        widths = [(int(low), int(high)) for low, high in rng.integers(0, 3, (grid.ndim, 2))]
        fields = [Field(rng, grid, widths, [*range(grid.ndim)]) for _ in range(2)]
        blocks, deposits = ([make(field) for field in fields] for make in (Field.block, own_deposits))
        for turn in range(4):
            if who_repeats == "some" and RANK % 2:
                blocks, deposits = ([field.array(each) for field, each in zip(fields, of)] for of in (blocks, deposits))
            for field, block, deposit in zip(fields, blocks, deposits):
                field.whole = (field.whole + turn) % 50
                block[...] = field.block()
                deposit[...] = own_deposits(field)
            for corners in (True, False):
                hc.halo_exchange(blocks, grid, widths, corners=corners)
                check(blocks, [field.exchanged(True) for field in fields])  # the corners stay
            hc.halo_accumulate(deposits, grid, widths)
            check(deposits, [field.accumulated(True) for field in fields])


def own_deposits(field: Field) -> np.ndarray:
    return field.array(field.deposits[RANK])


def exchange_and_check(array: np.ndarray, grid: hc.Grid) -> None:
    """On a ring, with cells of the value of their rank."""
    array[1:-1] = RANK
    array[[0, -1]] = GHOST
    hc.halo_exchange(array, grid)
    assert array[0].tolist() == [(RANK - 1) % SIZE] * array.shape[1]
    assert array[-1].tolist() == [(RANK + 1) % SIZE] * array.shape[1]


@pytest.mark.parametrize("columns", [1, 3])
def test_what_is_kept_for_the_next_time_keeps_no_array_and_no_grid(columns: int) -> None:
    with hc.new_grid((0,), True) as grid:
        array = np.zeros((4, columns))
        for _ in range(4):
            exchange_and_check(array, grid)
        dead = weakref.ref(array), weakref.ref(grid)
        del array
        assert dead[0]() is None
    del grid

    def is_gone() -> bool:
        gc.collect()
        return dead[1]() is None  # unless the watchdog is looking at all groups

    until(is_gone, "end of the grid")


def test_the_same_memory_as_another_array_and_other_sizes() -> None:
    memory = np.zeros(64)
    with hc.new_grid((0,), True) as grid:
        for shape in ((4, 3), (6, 2), (4, 3), (12, 1), (3, 4)) * 3:
            for dtype in ("f8", "i8", "f8"):
                exchange_and_check(memory[:12].view(dtype).reshape(shape), grid)
        backwards, wide = memory[:8].reshape(4, 2)[::-1], memory.reshape(8, 8)[:, ::2]
        for each in (backwards, wide) * 3:
            exchange_and_check(each, grid)
        for columns in (MOST_REPEATED // (4 * 8), MOST_REPEATED // (4 * 8) + 1, *range(1, 20)) * 2:
            exchange_and_check(np.zeros((4, columns)), grid)


def test_checks_are_made_again_where_something_has_changed() -> None:
    with hc.new_grid((0,), True) as grid:
        array = np.zeros((4, 2))
        for _ in range(3):
            exchange_and_check(array, grid)
        for width, error in ((1.0, TypeError), (-1, ValueError), ((1, 1, 1), ValueError)):
            with pytest.raises(error, match=r"^halo_exchange: "):
                hc.halo_exchange(array, grid, width)
        with pytest.raises(ValueError, match=r"^halo_exchange: axes are"):
            hc.halo_exchange(array, grid, axes=(2,))
        array.flags.writeable = False
        with pytest.raises(ValueError, match=r"arrays\[0\] is read-only"):
            hc.halo_exchange(array, grid)
        array.flags.writeable = True
        exchange_and_check(array, grid)


@pytest.mark.skipif(SIZE < 2, reason="two ranks")
def test_a_repeated_exchange_notices_a_message_that_is_too_short_or_too_long() -> None:
    before, after = (RANK - 1) % SIZE, (RANK + 1) % SIZE
    with hc.new_group(on_timeout="abort") as group:
        sent, ghosts = np.ones(3), np.zeros(3)
        backend = group.dispatcher.backends["cpu"]
        again = backend.repeated_exchange([(after, sent)], [(before, ghosts)], False)
        for size, words in ((2, "the message has 16 bytes, but the array 24"), (5, "MPI_ERR")):
            if RANK == 0:
                backend.exchange([(after, np.ones(size))], [(before, ghosts)], False, False)
            else:
                with pytest.raises(Exception, match=words) if RANK == 1 else nullcontext():
                    again([(after, sent)], [(before, ghosts)])
            sent += 1
            again([(after, sent)], [(before, ghosts)])
            assert ghosts.tolist() == sent.tolist()
