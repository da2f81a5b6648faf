"""HPCCOMM_DEBUG=DETAIL: every way in which rank 1 may differ is one error, the same on every rank, with both sides."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.core.operation_list import OPERATIONS
from hpccomm.debug.words import ranks_in_words
from tests.matrix.test_matrix import Opposite, every_form, perform

COMM = MPI.COMM_WORLD
SIZE = COMM.Get_size()
OTHERS = [rank for rank in range(SIZE) if rank != 1]
LINE = r"\S*test_mismatch\.py:\d+"

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks"),
]


def detailed(monkeypatch: pytest.MonkeyPatch) -> hc.ProcessGroup:
    """Make a group in which the ranks compare."""
    monkeypatch.setenv("HPCCOMM_DEBUG", "Detail")  # in any case
    return hc.ProcessGroup.from_comm(COMM, timeout=20, name="dp")


@contextlib.contextmanager
def short_limit(*groups: hc.ProcessGroup) -> Iterator[None]:
    """Wait for one second only in these groups, until all ranks have done so."""
    for group in groups:
        group.timeout = timedelta(seconds=1)
    yield
    COMM.Barrier()
    for group in groups:
        group.timeout = timedelta(seconds=20)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[hc.ProcessGroup]:
    made = detailed(monkeypatch)
    yield made
    made.destroy()


@pytest.fixture
def as_world(group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> hc.ProcessGroup:
    """The group, in the place of the world."""
    monkeypatch.setattr("hpccomm.api.world._world", group)
    return group


def texts_of_all(call: Callable[[], Any], error: type[Exception] = hc.DistError) -> list[str]:
    """Return what the call raises on every rank."""
    with pytest.raises(error) as caught:
        call()
    return COMM.allgather(str(caught.value))


def still_works(group: hc.ProcessGroup) -> None:
    x = np.ones(3)
    hc.all_reduce(x, group=group)
    assert x.tolist() == [SIZE] * 3


# -- rank 1 calls something else ---------------------------------------------------------------------


class Row(NamedTuple):
    """What a rank calls, the others' call in words, and rank 1's."""

    call: Callable[[hc.ProcessGroup, bool], Any]
    others: str
    one: str


ROWS: dict[str, Row] = {}


def row(name: str, others: str, one: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(call: Callable[..., Any]) -> Callable[..., Any]:
        ROWS[name] = Row(call, others, one)
        return call

    return add


def simple(name: str, others: str, one: str, call: Callable[[hc.ProcessGroup, bool], Any]) -> None:
    ROWS[name] = Row(call, others, one)


def a(count: int = 8, dtype: Any = float) -> Any:
    return np.ones(count, dtype)


ALL_REDUCE = "all_reduce (float64, 8 elements, SUM)"
LARGE = 1 << 20

simple("all_reduce size+", ALL_REDUCE, ALL_REDUCE.replace("8", "9"), lambda g, odd: hc.all_reduce(a(8 + odd), group=g))
simple("all_reduce size-", ALL_REDUCE, "all_reduce (float64, 1 element, SUM)",
       lambda g, odd: hc.all_reduce(a(1 if odd else 8), group=g))  # fmt: skip
simple("all_reduce dtype f4/f8", ALL_REDUCE, "all_reduce (float32, 8 elements, SUM)",
       lambda g, odd: hc.all_reduce(a(8, "f4" if odd else "f8"), group=g))  # fmt: skip
simple("all_reduce dtype i8/f8", ALL_REDUCE, "all_reduce (int64, 8 elements, SUM)",
       lambda g, odd: hc.all_reduce(a(8, "i8" if odd else "f8"), group=g))  # fmt: skip
simple("all_reduce op", ALL_REDUCE, "all_reduce (float64, 8 elements, MAX)",
       lambda g, odd: hc.all_reduce(a(), "max" if odd else "sum", group=g))  # fmt: skip
simple("all_reduce async", ALL_REDUCE, "all_reduce (float64, 8 elements, SUM, asynchronous)",
       lambda g, odd: hc.all_reduce(a(), group=g, async_op=odd))  # fmt: skip
simple("all_reduce vs barrier", ALL_REDUCE, "barrier at",
       lambda g, odd: hc.barrier(g) if odd else hc.all_reduce(a(), group=g))  # fmt: skip
simple("all_reduce vs broadcast", ALL_REDUCE, "broadcast (float64, 8 elements, root 0)",
       lambda g, odd: hc.broadcast(a(), 0, g) if odd else hc.all_reduce(a(), group=g))  # fmt: skip
simple("all_reduce vs reduce", ALL_REDUCE, "reduce (float64, 8 elements, SUM, root 0)",
       lambda g, odd: hc.reduce(a(), 0, group=g) if odd else hc.all_reduce(a(), group=g))  # fmt: skip
simple("all_reduce vs all_gather_object", ALL_REDUCE, "all_gather_object at",
       lambda g, odd: hc.all_gather_object([None] * SIZE, 1, g) if odd else hc.all_reduce(a(), group=g))  # fmt: skip
simple("broadcast root", "broadcast (float64, 8 elements, root 0)", "broadcast (float64, 8 elements, root 1)",
       lambda g, odd: hc.broadcast(a(), group=g, group_src=int(odd)))  # fmt: skip
simple("broadcast size+", "broadcast (float64, 8 elements, root 0)", "broadcast (float64, 9 elements, root 0)",
       lambda g, odd: hc.broadcast(a(8 + odd), 0, g))  # fmt: skip
simple("broadcast size-", "broadcast (float64, 8 elements, root 0)", "broadcast (float64, 7 elements, root 0)",
       lambda g, odd: hc.broadcast(a(8 - odd), 0, g))  # fmt: skip
simple("broadcast dtype i8/f8", "broadcast (float64, 8 elements, root 0)", "broadcast (int64, 8 elements, root 0)",
       lambda g, odd: hc.broadcast(a(8, "i8" if odd else "f8"), 0, g))  # fmt: skip
simple("broadcast dtype f4/f8", "broadcast (float64, 8 elements, root 0)", "broadcast (float32, 8 elements, root 0)",
       lambda g, odd: hc.broadcast(a(8, "f4" if odd else "f8"), 0, g))  # fmt: skip
simple("reduce root", "reduce (float64, 8 elements, SUM, root 0)", "reduce (float64, 8 elements, SUM, root 1)",
       lambda g, odd: hc.reduce(a(), group=g, group_dst=int(odd)))  # fmt: skip
simple("reduce size", "reduce (float64, 8 elements, SUM, root 0)", "reduce (float64, 9 elements, SUM, root 0)",
       lambda g, odd: hc.reduce(a(8 + odd), 0, group=g))  # fmt: skip
simple("scan size", "scan (float64, 8 elements, SUM)", "scan (float64, 9 elements, SUM)",
       lambda g, odd: hc.scan(a(8 + odd), group=g))  # fmt: skip
simple("float16 vs float32", "all_reduce (float16, 8 elements, SUM)", "all_reduce (float32, 8 elements, SUM)",
       lambda g, odd: hc.all_reduce(a(8, "f4" if odd else "f2"), group=g))  # fmt: skip
simple("barrier vs monitored", "barrier at", "monitored_barrier at",
       lambda g, odd: hc.monitored_barrier(g) if odd else hc.barrier(g))  # fmt: skip
simple("objects: list length", "broadcast_object_list (2 objects, root 0)", "broadcast_object_list (3 objects, root 0)",
       lambda g, odd: hc.broadcast_object_list([None] * (2 + odd), group=g))  # fmt: skip
simple("large all_reduce size+", f"all_reduce (float64, {LARGE} elements", f"all_reduce (float64, {LARGE + 1} elements",
       lambda g, odd: hc.all_reduce(a(LARGE + odd), group=g))  # fmt: skip
simple("large async size+", f"all_reduce (float64, {LARGE} elements", f"all_reduce (float64, {LARGE + 1} elements",
       lambda g, odd: hc.all_reduce(a(LARGE + odd), group=g, async_op=True))  # fmt: skip
simple("async below/above 1 MiB", "all_reduce (float64, 8 elements, SUM, asynchronous)",
       f"all_reduce (float64, {LARGE} elements, SUM, asynchronous)",
       lambda g, odd: hc.all_reduce(a(LARGE if odd else 8), group=g, async_op=True))  # fmt: skip


@row("order of two ops", ALL_REDUCE, "all_reduce (float64, 8 elements, MAX)")
def _(group: hc.ProcessGroup, odd: bool) -> None:
    for op in ("max", "sum") if odd else ("sum", "max"):
        hc.all_reduce(a(), op, group=group)


@row("order of two kinds", ALL_REDUCE, "broadcast (float64, 8 elements, root 0)")
def _(group: hc.ProcessGroup, odd: bool) -> None:
    calls: list[Any] = [hc.all_reduce, hc.broadcast]
    for call in reversed(calls) if odd else calls:
        call(a(), **({} if call is hc.all_reduce else {"group_src": 0}), group=group)


@row("order of two async", "all_reduce (float64, 8 elements, SUM, a", "all_reduce (float64, 8 elements, MAX, a")
def _(group: hc.ProcessGroup, odd: bool) -> None:
    works = [hc.all_reduce(a(), op, group, async_op=True) for op in (("max", "sum") if odd else ("sum", "max"))]
    assert works


@row("gather root", "gather (float64, root 0)", "gather (float64, root 1)")
def _(group: hc.ProcessGroup, odd: bool) -> None:
    slots = [a() for _ in range(SIZE)] if odd or group.rank == 0 else None
    hc.gather(a(), slots, group=group, group_dst=int(odd))


@row("all_gather sizes", f"all_gather (float64: {SIZE} x 4 elements)", "all_gather (float64: 4, 5")
def _(group: hc.ProcessGroup, odd: bool) -> None:
    hc.all_gather([a(4 + (odd and rank == 1)) for rank in range(SIZE)], a(4 + odd), group=group)


@row("all_gather_single size", "all_gather_single (float64, 8 elements)", "all_gather_single (float64, 9 elements)")
def _(group: hc.ProcessGroup, odd: bool) -> None:
    hc.all_gather_single(a((8 + odd) * SIZE), a(8 + odd), group=group)


@row("splits on one rank", f"all_to_all_single (float64, {SIZE} e", "all_to_all_single (float64, split sizes)")
def _(group: hc.ProcessGroup, odd: bool) -> None:
    splits = [1] * SIZE if odd else None
    hc.all_to_all_single(a(SIZE), a(SIZE), splits, splits, group=group)


@row("reduce_scatter sizes", f"reduce_scatter (float64: {SIZE} x 4 elements, SUM)", "reduce_scatter (float64: 4, 5")
def _(group: hc.ProcessGroup, odd: bool) -> None:
    hc.reduce_scatter(a(4 + odd), [a(4 + (odd and rank == 1)) for rank in range(SIZE)], group=group)


@row("coalesced count", "all_reduce_coalesced (float64: 2 x 8 e", "all_reduce_coalesced (float64: 3 x 8 e")
def _(group: hc.ProcessGroup, odd: bool) -> None:
    hc.all_reduce_coalesced([a() for _ in range(2 + odd)], group=group)


@row("coalesced order of dtypes", "all_reduce_coalesced (float32: 8 elements; float64: 8 elements, SUM)",
     "all_reduce_coalesced (float64: 8 elements; float32: 8 elements, SUM)")  # fmt: skip
def _(group: hc.ProcessGroup, odd: bool) -> None:
    hc.all_reduce_coalesced([a(8, dtype) for dtype in (("f8", "f4") if odd else ("f4", "f8"))], group=group)


@row("coalescing vs plain", f"coalescing ({ALL_REDUCE} + {ALL_REDUCE})", ALL_REDUCE)
def _(group: hc.ProcessGroup, odd: bool) -> None:
    with contextlib.nullcontext() if odd else hc.coalescing(group):
        hc.all_reduce(a(), group=group)
        hc.all_reduce(a(), group=group)


PREMUL = "all_reduce (float64, 8 elements, PREMUL_SUM)"


@row("coalescing grouping (PREMUL)", f"coalescing ({PREMUL} + {PREMUL})", f"coalescing ({PREMUL}, {PREMUL})")
def _(group: hc.ProcessGroup, odd: bool) -> None:
    factor = hc.ReduceOp.PREMUL_SUM(2.0)
    with hc.coalescing(group):
        hc.all_reduce(a(), factor, group=group)
        hc.all_reduce(a(), hc.ReduceOp.PREMUL_SUM(2.0) if odd else factor, group=group)


@row("persistent vs plain", "all_reduce_init (float64, 8 elements, SUM)", ALL_REDUCE)
def _(group: hc.ProcessGroup, odd: bool) -> None:
    if odd:
        hc.all_reduce(a(), group=group)
    else:
        hc.all_reduce_init(a(), group=group)


@row(
    "persistent order",
    "all_reduce_start (float64, 8 elements, SUM, set up as number 1)",
    ALL_REDUCE.replace("reduce", "reduce_start")[:-1] + ", set up as number 2)",
)
def _(group: hc.ProcessGroup, odd: bool) -> None:
    works = [hc.all_reduce_init(a(), group=group) for _ in range(2)]  # alike: only their numbers tell
    works[odd].start()


@row("shared size", "all_reduce (float64, 8 elements, SUM)", "all_reduce (float64, 7 elements, SUM)")
def _(group: hc.ProcessGroup, odd: bool) -> None:
    hc.all_reduce(hc.empty_shared(8, group=group)[odd:], group=group)


@row("shared op", "all_reduce (float64, 8 elements, SUM)", "all_reduce (float64, 8 elements, MAX)")
def _(group: hc.ProcessGroup, odd: bool) -> None:
    hc.all_reduce(hc.empty_shared(8, group=group), "max" if odd else "sum", group=group)


@row("shared small/large", "all_reduce (float64, 8 elements, SUM)", f"all_reduce (float64, {LARGE} elements, SUM)")
def _(group: hc.ProcessGroup, odd: bool) -> None:
    hc.all_reduce(hc.empty_shared(LARGE, group=group)[: LARGE if odd else 8], group=group)


@row("shared vs async", "all_reduce (float64, 8 elements, SUM)", "all_reduce (float64, 8 elements, SUM, asynchronous)")
def _(group: hc.ProcessGroup, odd: bool) -> None:
    hc.all_reduce(hc.empty_shared(8, group=group), group=group, async_op=odd)


@row("empty_shared differs", "empty_shared (float64)", "empty_shared (float32)")
def _(group: hc.ProcessGroup, odd: bool) -> None:
    hc.empty_shared(8, "f4" if odd else "f8", group=group)


def sparse(n: int = 4, dtype: Any = float) -> Any:
    return pytest.importorskip("scipy.sparse").csr_array(np.eye(n, dtype=dtype))


simple("sparse shapes", "all_reduce_sparse (float64, 4 x 4)", "all_reduce_sparse (float64, 5 x 5)",
       lambda g, odd: hc.all_reduce(sparse(4 + odd), group=g))  # fmt: skip
simple("sparse dtype", "all_reduce_sparse (float64, 4 x 4)", "all_reduce_sparse (float32, 4 x 4)",
       lambda g, odd: hc.all_reduce(sparse(4, "f4" if odd else "f8"), group=g))  # fmt: skip
simple("sparse vs dense", "all_reduce_sparse (float64, 4 x 4)", "all_reduce (float64, 16 elements, SUM)",
       lambda g, odd: hc.all_reduce(a(16) if odd else sparse(), group=g))  # fmt: skip
simple("destroy on one rank", ALL_REDUCE, "destroy at",
       lambda g, odd: g.destroy() if odd else hc.all_reduce(a(), group=g))  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rank_1_calls_something_else(name: str, group: hc.ProcessGroup) -> None:
    call, others, one = ROWS[name]
    texts = texts_of_all(lambda: call(group, group.rank == 1))
    assert len(set(texts)) == 1, texts
    for ranks, words in ((OTHERS, others), ([1], one)):
        sentence = f"{ranks_in_words(ranks)} call{'s' * (len(ranks) == 1)} {'' if '(' in words else words}"
        assert sentence in texts[0]
        assert words in texts[0]
    assert re.search(r" of 'dp': ", texts[0])
    assert len(re.findall(" at " + LINE, texts[0])) == 2
    still_works(group)


HALOS: dict[str, tuple[dict[str, Any], str, str]] = {
    "width": ({"width": 2}, "(float64, width ((1, 1),))", "(float64, width ((2, 2),))"),
    "corners": ({"corners": False}, "(float64, width ((1, 1),))", "(float64, width ((1, 1),), faces)"),
    "dtype": ({"arrays": a(8).astype("f4")}, "(float64, width ((1, 1),))", "(float32, width ((1, 1),))"),
    "arrays": ({"arrays": [a(8), a(8)]}, "(float64, width ((1, 1),))", "(float64, float64, width ((1, 1),))"),
}


@pytest.mark.parametrize("call", [hc.halo_exchange, hc.halo_accumulate])
@pytest.mark.parametrize("name", HALOS)
def test_rank_1_exchanges_another_halo(name: str, call: Any, group: hc.ProcessGroup) -> None:
    changes, others, one = HALOS[name]
    with hc.new_grid(0, periodic=True, group=group) as grid:
        arguments = {"arrays": a(8), **(changes if grid.rank == 1 else {})}
        texts = texts_of_all(lambda: call(grid=grid, **arguments))
        assert len(set(texts)) == 1, texts
        assert f"{call.__name__} {others} at" in texts[0]
        assert f"rank 1 calls {call.__name__} {one} at" in texts[0]
        still_works(grid)


# -- what one rank sends is not what another expects -------------------------------------------------


def gathers(group: hc.ProcessGroup, expected: int) -> None:
    slots = [a(expected if rank == 1 else 8) for rank in range(SIZE)] if group.rank == 0 else None
    hc.gather(a(), slots, group=group, group_dst=0)


def scatters(group: hc.ProcessGroup, sent: int) -> None:
    given = [a(sent if rank == 1 else 8) for rank in range(SIZE)] if group.rank == 0 else None
    hc.scatter(a(), given, group=group, group_src=0)


def exchanges(group: hc.ProcessGroup) -> None:
    sent = [a(9 if (group.rank, rank) == (0, 1) else 8) for rank in range(SIZE)]
    hc.all_to_all([a() for _ in range(SIZE)], sent, group=group)


def exchanges_parts(group: hc.ProcessGroup) -> None:
    sent = [9 if (group.rank, rank) == (0, 1) else 8 for rank in range(SIZE)]
    received = [8] * SIZE
    hc.all_to_all_single(a(sum(received)), a(sum(sent)), received, sent, group=group)


SIZES: dict[str, tuple[Callable[[hc.ProcessGroup], None], str]] = {
    "gather list too large": (lambda group: gathers(group, 9), "1 sends 8 elements to rank 0 at X, which expects 9"),
    "gather list too small": (lambda group: gathers(group, 7), "1 sends 8 elements to rank 0 at X, which expects 7"),
    "scatter too large": (lambda group: scatters(group, 9), "0 sends 9 elements to rank 1 at X, which expects 8"),
    "scatter too small": (lambda group: scatters(group, 7), "0 sends 7 elements to rank 1 at X, which expects 8"),
    "all_to_all size": (exchanges, "0 sends 9 elements to rank 1 at X, which expects 8"),
    "all_to_all_single splits": (exchanges_parts, "0 sends 9 elements to rank 1 at X, which expects 8"),
}


@pytest.mark.parametrize("name", SIZES)
def test_one_rank_sends_what_another_does_not_expect(name: str, group: hc.ProcessGroup) -> None:
    call, expected = SIZES[name]
    texts = texts_of_all(lambda: call(group))
    assert len(set(texts)) == 1, texts
    operation = re.match(r"\w+", name).group()  # type: ignore[union-attr]
    said = re.sub(LINE, "X", texts[0])
    assert said == f"{operation} #1 of 'dp': rank {expected} at X"
    still_works(group)


def test_unequal_sizes_that_fit_are_legal(group: hc.ProcessGroup) -> None:
    sizes = [rank + 1 for rank in range(SIZE)]
    out = [a(size) for size in sizes]
    hc.all_gather(out, np.full(sizes[group.rank], float(group.rank)), group=group)
    assert [each.tolist() for each in out] == [[rank] * (rank + 1) for rank in range(SIZE)]
    sent = a(sum(sizes))
    received = a(SIZE * sizes[group.rank])
    hc.all_to_all_single(received, sent, [sizes[group.rank]] * SIZE, sizes, group=group)
    hc.all_reduce(a(), hc.ReduceOp.PREMUL_SUM(float(group.rank)), group=group)  # every rank its own factor
    still_works(group)


# -- what is no operation of a group -----------------------------------------------------------------


def test_new_group_lists(as_world: hc.ProcessGroup) -> None:
    ranks = [0, 1] if as_world.rank != 1 else [1]
    texts = texts_of_all(lambda: hc.new_group(ranks))
    assert len(set(texts)) == 1, texts
    assert "new_group of 'dp': " in texts[0]
    assert "call" in texts[0]
    assert "new_group (ranks 0, 1, backend" in texts[0]
    assert "rank 1 calls new_group (ranks 1, backend" in texts[0]
    still_works(as_world)


def test_new_group_order(as_world: hc.ProcessGroup) -> None:
    lists = [[0, 1], [1, 0]] if as_world.rank != 1 else [[1, 0], [0, 1]]
    texts = texts_of_all(lambda: [hc.new_group(ranks, sort_ranks=False) for ranks in lists])
    assert len(set(texts)) == 1, texts
    assert "rank 1 calls new_group (ranks 1, 0, backend" in texts[0]
    still_works(as_world)


def test_new_group_backends_and_timeouts(as_world: hc.ProcessGroup) -> None:
    texts = texts_of_all(lambda: hc.new_group(timeout=30 + as_world.rank))
    assert len(set(texts)) == 1, texts
    assert "rank 1 calls making (backend cpu:mpi,cuda:nccl, timeout 31 s, on_timeout abort)" in texts[0]
    still_works(as_world)


def test_new_grid(as_world: hc.ProcessGroup) -> None:
    texts = texts_of_all(lambda: hc.new_grid(as_world.size, periodic=as_world.rank == 1))
    assert len(set(texts)) == 1, texts
    assert f"rank 1 calls new_grid (dims ({as_world.size},), periodic (True,), names None" in texts[0]
    still_works(as_world)


def test_split_group_against_barrier(as_world: hc.ProcessGroup) -> None:
    texts = texts_of_all(lambda: hc.barrier() if as_world.rank == 1 else hc.split_group(color=0))
    assert len(set(texts)) == 1, texts
    assert "rank 1 calls barrier" in texts[0]
    assert "split_group at " in texts[0]
    assert hc.split_group(color=as_world.rank % 2, key=-as_world.rank).size >= 1  # which may differ


def test_destroy_world_on_one_rank(as_world: hc.ProcessGroup) -> None:
    assert hc.new_group().size == SIZE  # it would be destroyed first
    x = np.ones(8)
    texts = texts_of_all(lambda: hc.destroy_process_group() if as_world.rank == 1 else hc.all_reduce(x))
    assert len(set(texts)) == 1, texts
    assert "rank 1 calls destroy at " in texts[0]
    assert ALL_REDUCE in texts[0]
    still_works(as_world)


# -- messages ----------------------------------------------------------------------------------------


def receives(group: hc.ProcessGroup, send: Callable[[], Any], receive: Callable[[], Any]) -> str:
    """Let rank 0 send and rank 1 receive, which raises; return its text."""
    text = ""
    if group.rank == 0:
        send()
    elif group.rank == 1:
        with pytest.raises(hc.DistError) as caught:
            receive()
        text = re.sub(LINE, "X", str(caught.value))
    return str(COMM.bcast(text, 1))


MESSAGES: dict[str, tuple[Any, Any, str, str]] = {
    "send/recv size-": (a(4), a(8), "float64, 4 elements", "float64, 8 elements"),
    "send/recv size+": (a(8), a(4), "float64, 8 elements", "float64, 4 elements"),
    "send/recv dtype": (a(8), a(8, "i8"), "float64, 8 elements", "int64, 8 elements"),
    "large": (a(LARGE), a(8), f"float64, {LARGE} elements", "float64, 8 elements"),
}


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("source", [0, None], ids=["from 0", "from any"])
def test_a_message_that_does_not_fit(name: str, source: int | None, group: hc.ProcessGroup) -> None:
    sent, into, sender, receiver = MESSAGES[name]
    text = receives(
        group,
        lambda: hc.send(sent, group=group, group_dst=1, tag=3),
        lambda: hc.recv(into, group=group, group_src=source, tag=3),
    )
    assert text == f"recv #1 of 'dp': rank 0 sends {sender} by send #1 at X, rank 1 receives {receiver} at X (tag 3)"
    x = np.full(4, 7.0) if group.rank == 0 else np.zeros(4)  # the next message is not the one that was refused
    if group.rank == 0:
        hc.send(x, group=group, group_dst=1, tag=3)
    elif group.rank == 1:
        hc.recv(x, group=group, group_src=source, tag=3)
        assert x.tolist() == [7.0] * 4
    still_works(group)


def started(group: hc.ProcessGroup, array: Any) -> None:
    with hc.recv_init(array, group=group, group_src=0) as work:
        work.start()
        work.wait()


FORMS: dict[str, Callable[[hc.ProcessGroup, Any], Any]] = {
    "irecv": lambda group, into: hc.irecv(into, group=group, group_src=0).wait(),
    "batch": lambda group, into: hc.batch_isend_irecv([hc.P2POp(hc.irecv, into, group=group, group_peer=0)])[0].wait(),
    "persistent": started,
    "sendrecv": lambda group, into: hc.sendrecv(a(1), 0, into, 0, group=group, tag=9, recv_tag=0),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["send/recv size-", "send/recv size+", "send/recv dtype"])
def test_every_form_of_a_receive_compares(name: str, form: str, group: hc.ProcessGroup) -> None:
    sent, into, sender, receiver = MESSAGES[name]
    text = receives(group, lambda: hc.send(sent, group=group, group_dst=1), lambda: FORMS[form](group, into.copy()))
    assert f"rank 0 sends {sender} by send #1 at X, rank 1 receives {receiver} at X (tag 0)" in text
    if form == "sendrecv" and group.rank == 0:
        hc.recv(a(1), group=group, group_src=1, tag=9)
    still_works(group)


def test_receives_waited_for_out_of_order(group: hc.ProcessGroup) -> None:
    if group.rank == 0:
        for n in (1, 2, 3):
            hc.send(np.full(n, float(n)), group=group, group_dst=1)
    elif group.rank == 1:
        arrays = [a(1), a(2), a(3, "f4")]
        works = [hc.irecv(array, group=group, group_src=0) for array in arrays]
        with pytest.raises(hc.DistError, match=r"rank 0 sends float64, 3 elements .* receives float32, 3 elements"):
            works[2].wait()
        assert works[1].wait()
        assert works[0].wait()
        assert arrays[1].tolist() == [2.0, 2.0]
    still_works(group)


def test_a_receive_from_any_rank_before_one_from_its_sender(group: hc.ProcessGroup) -> None:
    if group.rank:
        hc.send(np.full(1, float(group.rank)), group=group, group_dst=0)
        hc.send(np.full(group.rank, 5.0), group=group, group_dst=0)  # as many as the first message says
    else:
        for _ in range(1, SIZE):
            count = a(1)
            sender = hc.recv(count, group=group)
            hc.recv(a(int(count[0])), src=sender, group=group)
    still_works(group)


def test_asynchronous_receives_from_any_rank_are_left_alone(group: hc.ProcessGroup) -> None:
    if group.rank == 0:
        works = [hc.irecv(a(), group=group) for _ in range(1, SIZE)]
        assert all(work.wait() for work in works)
        hc.barrier(group)
        for rank in range(1, SIZE):
            hc.recv(a(3), group=group, group_src=rank)
    else:
        hc.send(a(), group=group, group_dst=0)
        hc.barrier(group)
        hc.send(a(3), group=group, group_dst=0)
    still_works(group)


def test_a_receive_that_is_taken_back(group: hc.ProcessGroup) -> None:
    if group.rank == 1:
        work = hc.irecv(a(5), group=group, group_src=0)
        work.abort()
    hc.barrier(group)
    if group.rank == 0:
        hc.send(a(6), group=group, group_dst=1)
    elif group.rank == 1:
        hc.recv(a(6), group=group, group_src=0)
    still_works(group)


def test_both_send_first(group: hc.ProcessGroup) -> None:  # legal, if they are small
    if group.rank < 2:
        hc.send(a(), group=group, group_dst=1 - group.rank)
        hc.recv(a(), group=group, group_src=1 - group.rank)
    still_works(group)


def passes(
    sends: bool,
    is_array: bool,
    tag: int,
    value: int,
    group: hc.ProcessGroup,
    source: int | None = 0,
    later: bool = False,
) -> Callable[[], None]:
    """Send a value from rank 0 to rank 1, or receive it, as an array or an object; return what waits."""
    sent: Any = np.full(2, float(value)) if is_array else [value]
    into: Any = np.zeros(2) if is_array else [None]
    if sends:
        came: Any = (group.send if is_array else group.send_object_list)(sent, 1, tag, later)
    else:
        came = (group.recv if is_array else group.recv_object_list)(into, source, tag, later)

    def end() -> None:
        if later:
            came.wait()
        assert sends or list(into) == list(sent)

    return end


ORDERS = {  # arrays ("a") and objects ("o") with their tags, as rank 0 sends and as rank 1 receives them
    "array, object": ("a1 o1", "o1 a1"),
    "object, array": ("o1 a1", "a1 o1"),
    "the same order": ("a0 o0 a0 o0", "a0 o0 a0 o0"),
    "all objects first": ("a2 a2 o2 o2", "o2 o2 a2 a2"),
    "two tags": ("a1 o2 a2 o1", "o1 a2 o2 a1"),
    "by turns": ("o4 a4 a3 o3 a4", "a4 o3 a4 o4 a3"),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("later", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("source", [0, None], ids=["from 0", "from any"])
def test_arrays_and_objects_with_one_tag(
    order: str, later: tuple[bool, bool], source: int | None, group: hc.ProcessGroup
) -> None:
    if group.rank < 2:
        kinds: dict[str, int] = {}
        works = []
        for kind in ORDERS[order][group.rank].split():
            kinds[kind] = kinds.get(kind, 0) + 1  # the value says which of its kind it is
            value = 100 * kinds[kind] + 10 * (kind[0] == "a") + int(kind[1])
            arguments = group.rank == 0, kind[0] == "a", int(kind[1]), value, group, source, later[group.rank]
            works.append(passes(*arguments))
        for wait in works:
            wait()
    still_works(group)


def test_objects_from_any_rank_while_an_earlier_receive_waits(group: hc.ProcessGroup) -> None:
    first, received = [None], []
    if group.rank == 1:
        work = hc.recv_object_list(first, group=group, group_src=0, tag=1, async_op=True)
    elif group.rank == 0:
        hc.send_object_list(["first"], group=group, group_dst=1, tag=1)
    COMM.Barrier()
    if group.rank == 1:
        for _ in range(SIZE - 2):  # although what rank 0 has sent has been there for longer
            into = [None]
            received.append((hc.recv_object_list(into, group=group, tag=1), into[0]))
        assert work.wait()
        assert first == ["first"]
        assert sorted(received) == [(rank, rank) for rank in range(2, SIZE)]
    elif group.rank > 1:
        hc.send_object_list([group.rank], group=group, group_dst=1, tag=1)
    still_works(group)


# -- somebody does not come --------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [0, 1])
def test_one_skips_a_call(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    group = detailed(monkeypatch)
    with short_limit(group):
        if group.rank == missing:
            COMM.Barrier()  # the others have given up
        with pytest.raises(hc.DistTimeoutError) as caught:
            hc.all_reduce(a(), group=group)
        if group.rank != missing:
            COMM.Barrier()
            assert f"all_reduce #1 of 'dp': rank {missing} has not come within 1 s; " in str(caught.value)
    assert re.search(rf"calls? {re.escape(ALL_REDUCE)} at {LINE}", str(caught.value))
    still_works(group)
    group.destroy()


def test_two_groups_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = detailed(monkeypatch), detailed(monkeypatch)
    order = (second, first) if first.rank == 1 else (first, second)
    with short_limit(first, second):
        for group in order:
            with pytest.raises(hc.DistTimeoutError, match=r"all_reduce #1 of 'dp': ranks? \d"):
                hc.all_reduce(a(), group=group)
            COMM.Barrier()
    for group in (first, second):
        still_works(group)
        group.destroy()


OTHER_TAGS = {  # the objects or arrays sent and their tag, and those expected and their tag, with the tags in words
    "arrays": (True, 6, "6", True, 5, "5"),
    "objects": (False, 6, "6 of objects", False, 5, "5 of objects"),
    "an array for objects": (True, 3, "3", False, 3, "3 of objects"),
    "objects for an array": (False, 3, "3 of objects", True, 3, "3"),
}


@pytest.mark.parametrize("name", OTHER_TAGS)
@pytest.mark.parametrize("source", [0, None], ids=["from 0", "from any"])
def test_a_message_with_another_tag(name: str, source: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    is_array, tag, in_words, expects_array, other, expected = OTHER_TAGS[name]
    group = detailed(monkeypatch)
    if group.rank == 0:
        passes(True, is_array, tag, 7, group)
    elif group.rank == 1:
        group.timeout = timedelta(seconds=1)
        with pytest.raises(hc.DistTimeoutError) as caught:
            passes(False, expects_array, other, 7, group, source)
        group.timeout = timedelta(seconds=20)
        call, sender = "recv" if expects_array else "recv_object_list", "any rank" if source is None else "rank 0"
        assert f"{call} #1 of 'dp': no message from {sender} with tag {expected} within 1 s" in str(caught.value)
        assert f"a message of rank 0 with tag {in_words} is waiting" in str(caught.value)
        passes(False, is_array, tag, 7, group)
    still_works(group)
    group.destroy()


# -- what is right -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def for_all(process_group: hc.ProcessGroup) -> Iterator[hc.ProcessGroup]:
    with pytest.MonkeyPatch.context() as patch:
        made = detailed(patch)
    yield made
    made.destroy()


@every_form
def test_every_operation_in_every_form_is_let_pass(name: str, form: str, for_all: hc.ProcessGroup) -> None:
    if form == "coalescing" and not OPERATIONS[name].is_collected:
        return
    opposite = Opposite(name, for_all)
    perform(name, form, for_all)
    opposite.finish()
    still_works(for_all)


# -- the setting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["OFF", "INFO"])
def test_otherwise_nothing_is_compared(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCCOMM_DEBUG", value)
    with hc.ProcessGroup.from_comm(COMM) as group:
        assert group.dispatcher.check is None
        assert not group.dispatcher.hooks
        still_works(group)


def test_any_other_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCCOMM_DEBUG", "details")
    with pytest.raises(ValueError, match="HPCCOMM_DEBUG is 'details'; expected OFF, INFO or DETAIL"):
        hc.ProcessGroup.from_comm(COMM)
