"""Redistribution: random boxes of a global array, of which every rank knows what it should get."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.domains import cache
from hpccomm.domains.redistribution import Layouts

from .test_halos import Messages, texts_of_all

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
several = pytest.mark.mpi(min_size=2)
pytestmark = pytest.mark.usefixtures("process_group")

assert Messages.__name__  # which registers a backend


def tiles(rng: np.random.Generator, shape: list[int], parts: int) -> list[list[slice]]:
    """Cut an array into boxes at random; some are empty."""
    boxes = [[slice(0, n) for n in shape]]
    while len(boxes) < parts:
        box = boxes.pop(int(rng.integers(len(boxes))))
        axis = int(rng.integers(len(shape)))
        at = int(rng.integers(box[axis].start, box[axis].stop + 1))
        for piece in (slice(box[axis].start, at), slice(at, box[axis].stop)):
            boxes.append([*box[:axis], piece, *box[axis + 1 :]])
    return [boxes[i] for i in rng.permutation(parts)]


def grown(rng: np.random.Generator, shape: list[int], box: list[slice]) -> list[slice]:
    """The box with ghosts."""
    before, after = rng.integers(0, 3, (2, len(shape)))
    return [slice(max(0, s.start - b), min(n, s.stop + a)) for s, n, b, a in zip(box, shape, before, after)]


def laid_out(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An empty array of one of several layouts."""
    kind = int(rng.integers(3))
    if kind == 0:
        return np.zeros(shape, dtype)
    if kind == 1:
        return np.zeros(shape, dtype, order="F")
    return np.zeros([2 * n for n in shape], dtype)[tuple([slice(None, None, 2)] * len(shape))]


@pytest.mark.parametrize("backend", ["cpu:mpi", "cpu:messages"])
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_random_boxes(axes: int, seed: int, backend: str) -> None:
    rng = np.random.default_rng([SIZE, axes, seed])
    with hc.new_group(backend=backend) as group:
        shape = rng.integers(1, 9, axes).tolist()
        batch = tuple(rng.integers(1, 3, int(rng.integers(2))).tolist())
        dtype = rng.choice(np.array(["f8", "i2", "c8", "?"], object))
        whole = rng.integers(0, 100, (*batch, *shape)).astype(dtype)
        have, want = tiles(rng, shape, SIZE), tiles(rng, shape, SIZE)
        if seed % 2:
            have, want = ([grown(rng, shape, box) for box in boxes] for boxes in (have, want))
        mine, others = np.random.default_rng([seed, RANK]), tuple(have[RANK])
        input = laid_out(mine, whole[(..., *others)].shape, dtype)
        input[...] = whole[(..., *others)]
        expected = whole[(..., *want[RANK])]
        output = laid_out(mine, expected.shape, dtype)
        hc.redistribute(output, input, want[RANK], have[RANK], group=group)
        np.testing.assert_array_equal(output, expected)
        output[...] = 0
        work = hc.redistribute(output, input, want[RANK], have[RANK], group=group, async_op=True)
        assert work.result() is output
        np.testing.assert_array_equal(output, expected)
        with hc.redistribute_init(output, input, want[RANK], have[RANK], group=group) as again:
            for step in range(3):
                input[...] = whole[(..., *others)] if step % 2 else 0
                output[...] = 0
                again.start()
                again.wait()
                np.testing.assert_array_equal(output, expected if step % 2 else np.zeros_like(expected))


def test_a_batch_of_none_leaves_memory_alone() -> None:
    here, there = (slice(3 * rank, 3 * rank + 3) for rank in (RANK, (RANK + 1) % SIZE))
    had, memory = np.full((2, 6), 5.0), np.full((2, 6), 7.0)
    input, output = had[:0, ::2], memory[:0, ::2]
    hc.redistribute(output, input, there, here)
    with hc.redistribute_init(output, input, there, here) as again:
        for _ in range(3):
            again.start()
            again.wait()
    assert memory.tolist() == np.full((2, 6), 7.0).tolist()


def test_a_cell_of_several_ranks_is_that_of_the_lowest() -> None:
    mine, all_of_it = np.full(5, RANK), np.full(5, -1)
    hc.redistribute(all_of_it, mine, slice(0, 5), slice(0, 5))
    assert all_of_it.tolist() == [0] * 5
    partly = np.full(2, RANK + 10)  # every rank has the last two cells, rank 0 all of them
    box = slice(0, 5) if RANK == 0 else slice(3, 5)
    hc.redistribute(all_of_it, mine if RANK == 0 else partly, slice(0, 5), box)
    assert all_of_it.tolist() == [0] * 5


@pytest.mark.parametrize("form", ["once", "async", "again"])
def test_arrays_may_share_memory(form: str) -> None:
    whole = np.arange(6 * SIZE)
    memory = np.zeros(9, int)
    input, output = memory[:6], memory[3:]
    input[...] = whole[6 * RANK : 6 * RANK + 6]
    other = (RANK + 1) % SIZE
    boxes = slice(6 * other, 6 * other + 6), slice(6 * RANK, 6 * RANK + 6)
    if form == "again":
        with hc.redistribute_init(output, input, *boxes) as again:
            again.start()
            again.wait()
    elif form == "async":
        hc.redistribute(output, input, *boxes, async_op=True).wait()
    else:
        hc.redistribute(output, input, *boxes)
    assert output.tolist() == whole[6 * other : 6 * other + 6].tolist()


def test_a_transpose_of_all_ranks() -> None:
    n = 3 * SIZE
    whole = np.arange(n * n).reshape(n, n)
    rows, columns = whole[hc.block_slice(n, SIZE, RANK)], np.empty((n, n // SIZE), int)
    hc.redistribute(
        columns, rows, (slice(0, n), hc.block_slice(n, SIZE, RANK)), (hc.block_slice(n, SIZE, RANK), slice(0, n))
    )
    np.testing.assert_array_equal(columns.T, whole.T[hc.block_slice(n, SIZE, RANK)])


def test_layouts_that_come_again() -> None:
    n = 6 * SIZE
    with hc.new_group() as group:
        for seed in [*range(cache.MOST + 2), 0, cache.MOST + 1, 1]:  # more than are kept
            rng = np.random.default_rng(seed)
            have, want = (rng.permutation(SIZE) for _ in range(2))
            input, output = np.arange(6) + 6 * have[RANK], np.empty(6, int)
            boxes = (slice(6 * int(each[RANK]), 6 * int(each[RANK]) + 6) for each in (want, have))
            hc.redistribute(output, input, *boxes, group=group)
            assert output.tolist() == np.arange(n)[6 * want[RANK] :][:6].tolist()


def test_kept_layouts_are_the_same_on_all_ranks_whatever_halos_they_have() -> None:
    with hc.new_grid(0) as grid:
        boxes = slice(2 * RANK, 2 * RANK + 2), slice(2 * RANK, 2 * RANK + 2)
        for cells in range(2, cache.MOST + 4):
            hc.redistribute(np.zeros(2), np.zeros(2), *boxes, group=grid)
            hc.halo_exchange(np.zeros(cells if RANK else 2), grid, width=0)  # of one shape, or of many
        seen = [0] * SIZE
        grid.all_gather_object(seen, grid.sequence_number)
        assert len(set(seen)) == 1


@pytest.mark.once
@pytest.mark.parametrize("n", [0, 1, 7, 24])
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_blocks_are_all_of_it(n: int, parts: int) -> None:
    blocks = [hc.block_slice(n, parts, index) for index in range(parts)]
    assert [i for block in blocks for i in range(n)[block]] == list(range(n))
    sizes = [block.stop - block.start for block in blocks]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.once
def test_sources_of_many_ranks_are_those_of_a_search_cell_by_cell() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        shape = rng.integers(2, 7, 2).tolist()
        have, want = (
            [tuple((s.start, s.stop) for s in grown(rng, shape, box)) for box in tiles(rng, shape, 9)] for _ in range(2)
        )
        have[4] = ((0, 0), (0, 0))
        layouts = Layouts(want, have)
        for rank in range(9):
            found = np.full(shape, -9)
            for source, ((a, b), (c, d)) in layouts.parts(rank):
                assert (found[a:b, c:d] == -9).all()  # each cell once
                found[a:b, c:d] = source
            for cell in np.ndindex(*shape):
                if all(a <= i < b for i, (a, b) in zip(cell, want[rank])):
                    owners = [r for r in range(9) if all(a <= i < b for i, (a, b) in zip(cell, have[r]))]
                    assert found[cell] == (owners[0] if owners else -1)
                else:
                    assert found[cell] == -9


# -- what does not fit -----------------------------------------------------------------------------------


def given(**changes: Any) -> Any:
    """A call, with other arguments on the last rank."""
    arguments: dict[str, Any] = {
        "output": np.zeros((2, 3)),
        "input": np.zeros((2, 3)),
        "output_box": (slice(2 * RANK, 2 * RANK + 2), slice(0, 3)),
        "input_box": (slice(2 * RANK, 2 * RANK + 2), slice(0, 3)),
    }
    return arguments | (changes if RANK == SIZE - 1 else {})


@pytest.mark.parametrize("call", [hc.redistribute, hc.redistribute_init])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output": np.zeros((3, 3))}, "which has shape (2, 3), but output has (3, 3)"),
        ({"input": np.zeros(3)}, f"input_box of rank {SIZE - 1} is [{2 * SIZE - 2}:{2 * SIZE}, 0:3]"),
        ({"input_box": (slice(2 * RANK, 2 * RANK + 2),)}, "which has shape (2,), but input has (2, 3)"),
        ({"output_box": (slice(-2, 0), slice(0, 3))}, f"output_box of rank {SIZE - 1} begins with a negative number"),
        (
            {"output_box": (slice(2 * SIZE - 1, 2 * SIZE + 1), slice(0, 3))},
            f"rank {SIZE - 1} wants cell ({2 * SIZE}, 0), and no rank's input_box has it",
        ),
    ],
)
def test_what_does_not_fit_is_one_error_on_all_ranks(call: Any, changes: dict[str, Any], words: str) -> None:
    texts = texts_of_all(lambda: call(**given(**changes)))
    assert all(text.startswith(call.__name__) and words in text for text in texts), texts


@several
def test_what_differs_between_ranks_is_one_error_on_all_ranks() -> None:
    for changes in (
        {"output": np.zeros((2, 3), "f4"), "input": np.zeros((2, 3), "f4")},
        {"output": np.zeros((4, 2, 3)), "input": np.zeros((4, 2, 3))},
    ):
        texts = texts_of_all(lambda changes=changes: hc.redistribute(**given(**changes)))  # type: ignore[misc]
        assert all(f"rank {SIZE - 1} has boxes of 2 axes, float" in text for text in texts), texts


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"output_box": (slice(0, 2, 2), slice(0, 3))}, TypeError, "expected slices with a start and a stop"),
        ({"output_box": (slice(0, None), slice(0, 3))}, TypeError, "expected slices with a start and a stop"),
        ({"input_box": (0, slice(0, 3))}, TypeError, "input_box has 0; expected slices"),
        ({"input_box": (slice(0.5, 2), slice(0, 3))}, TypeError, "a start of input_box is 0.5; expected an integer"),
        ({"input": np.zeros((2, 3), "f4")}, TypeError, "output is float64, but input is float32"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = given() | changes
    with pytest.raises(error, match=words):
        hc.redistribute(**arguments)
    with pytest.raises(ValueError, match=r"block_slice\(n, parts, index\): n is 4, parts 2, index 3; expected 0 <="):
        hc.block_slice(4, 2, 3)


def test_the_same_again_on_some_ranks_only() -> None:
    cells = np.arange(6 * SIZE)
    own = hc.block_slice(cells.size, SIZE, RANK)
    reversed_, first = hc.block_slice(cells.size, SIZE, SIZE - 1 - RANK), slice(0, 1)
    with hc.new_group() as group:
        for odd in (None, None, 0, 0, SIZE - 1, None, 0, None):  # the rank that wants something else
            wanted = first if odd == RANK else reversed_
            output = np.full(wanted.stop - wanted.start, -1)
            hc.redistribute(output, cells[own].copy(), wanted, own, group)
            np.testing.assert_array_equal(output, cells[wanted])
            with pytest.raises(ValueError, match=r"wants cell"):
                hc.redistribute(output, cells[own].copy(), slice(10**6, 10**6 + output.size), own, group)
