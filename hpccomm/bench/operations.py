"""The benchmarks: the arrays of each operation, and NumPy's result.

`size` is defined as in nccl-tests: the bytes of a call's larger array, such as the whole gathered array.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from .registry import Arrays, Case, benchmark

FEWEST_PIECES, MOST_PIECES, PIECE_BYTES = 16, 1000, 1000  # arrays in one coalesced call


def _share(ranks: int) -> float:
    """Return the share of the array that crosses each rank's link: all except the rank's own part."""
    return (ranks - 1) / ranks


# -- collectives -------------------------------------------------------------------------------------


def _in_place(case: Case, expected: Callable[[], Any] | None) -> Arrays:
    """Return one array with the rank's values; the result replaces them."""
    return Arrays(receive=case.array(case.count), given=lambda: case.values(case.rank, case.count), expected=expected)


def _list(case: Case) -> list[Any]:
    """Return an array for each rank."""
    return [case.array(case.part) for _ in range(case.ranks)]


@benchmark("all_reduce", mpi="Allreduce", busbw=lambda n: 2 * _share(n))
def all_reduce(case: Case) -> Arrays:
    """Reduce an array over all ranks, in place."""
    return _in_place(case, lambda: case.reduced(case.count))


@benchmark("reduce", mpi="Reduce")
def reduce(case: Case) -> Arrays:
    """Reduce an array over all ranks, in place on one rank."""
    return _in_place(case, (lambda: case.reduced(case.count)) if case.rank == case.root else None)


@benchmark("broadcast", mpi="Bcast")
def broadcast(case: Case) -> Arrays:
    """Copy one rank's array to all ranks."""
    arrays = _in_place(case, lambda: case.values(case.root, case.count))
    return arrays if case.rank == case.root else replace(arrays, given=None)


@benchmark("all_gather_single", mpi="Allgather", busbw=_share, shared=True)
def all_gather_single(case: Case) -> Arrays:
    """Collect every rank's array in one array, on all ranks."""
    return Arrays(
        send=case.array(case.part),
        receive=case.array(case.ranks, case.part),
        given=lambda: case.values(case.rank, case.part),
        expected=lambda: np.concatenate([case.values(rank, case.part) for rank in range(case.ranks)]),
    )


@benchmark("all_gather", busbw=_share, shared=True)
def all_gather(case: Case) -> Arrays:
    """Collect every rank's array in a list of arrays, on all ranks."""
    return replace(all_gather_single(case), receive=_list(case))


@benchmark("reduce_scatter_single", mpi="Reduce_scatter_block", busbw=_share, shared=True)
def reduce_scatter_single(case: Case) -> Arrays:
    """Reduce an array and scatter the result in equal parts."""
    return Arrays(
        send=case.array(case.ranks, case.part),
        receive=case.array(case.part),
        given=lambda: case.values(case.rank, case.count),
        expected=lambda: case.mine(case.reduced(case.count)),
    )


@benchmark("reduce_scatter", busbw=_share, shared=True)
def reduce_scatter(case: Case) -> Arrays:
    """Reduce a list of arrays; each rank gets one of the results."""
    return replace(reduce_scatter_single(case), send=_list(case))


@benchmark("all_to_all_single", mpi="Alltoall", busbw=_share, shared=True)
def all_to_all_single(case: Case) -> Arrays:
    """Send a part of an array to each rank and receive one from each."""
    return Arrays(
        send=case.array(case.ranks, case.part),
        receive=case.array(case.ranks, case.part),
        given=lambda: case.values(case.rank, case.count),
        expected=lambda: np.concatenate([case.mine(case.values(rank, case.count)) for rank in range(case.ranks)]),
    )


@benchmark("all_to_all", busbw=_share, shared=True)
def all_to_all(case: Case) -> Arrays:
    """Send one array of a list to each rank and receive one from each."""
    return replace(all_to_all_single(case), send=_list(case), receive=_list(case))


@benchmark("gather", busbw=_share, shared=True)
def gather(case: Case) -> Arrays:
    """Collect every rank's array in a list of arrays, on one rank."""
    arrays = all_gather(case)
    return arrays if case.rank == case.root else replace(arrays, receive=None, expected=None)


@benchmark("scatter", busbw=_share, shared=True)
def scatter(case: Case) -> Arrays:
    """Distribute one rank's list of arrays, one array to each rank."""
    is_root = case.rank == case.root
    return Arrays(
        send=_list(case) if is_root else [],
        receive=case.array(case.part),
        given=(lambda: case.values(case.root, case.count)) if is_root else None,
        expected=lambda: case.mine(case.values(case.root, case.count)),
    )


@benchmark("scan", mpi="Scan")
def scan(case: Case) -> Arrays:
    """Reduce the arrays of ranks 0 to r, on rank r, in place."""
    return _in_place(case, lambda: case.reduced(case.count, range(case.rank + 1)))


@benchmark("exscan", mpi="Exscan")
def exscan(case: Case) -> Arrays:
    """Reduce the arrays of ranks 0 to r-1, on rank r, in place."""
    return _in_place(case, (lambda: case.reduced(case.count, range(case.rank))) if case.rank else None)


@benchmark("barrier", mpi="Barrier", sized=False)
def barrier(case: Case) -> Arrays:
    """Wait for every rank."""
    return Arrays(receive=None)


# -- coalesced: many arrays in one call ----------------------------------------------------------------


def _pieces(case: Case, ranks: int = 1) -> list[int]:
    """Return the counts of 16 to 1000 arrays of about 1000 bytes; all counts are multiples of `ranks`."""
    pieces = max(FEWEST_PIECES, min(MOST_PIECES, case.nbytes // PIECE_BYTES))
    whole = case.count // ranks
    ends = [whole * i // pieces for i in range(pieces + 1)]
    return [(end - start) * ranks for start, end in itertools.pairwise(ends)]


def _ends(pieces: list[int]) -> list[int]:
    """Return the ends of all pieces except the last."""
    return list(itertools.accumulate(pieces[:-1]))


@benchmark("all_reduce_coalesced", busbw=lambda n: 2 * _share(n), kind="coalesced")
def all_reduce_coalesced(case: Case) -> Arrays:
    """All-reduce many arrays in one call."""
    return replace(all_reduce(case), receive=[case.array(count) for count in _pieces(case)])


@benchmark("broadcast_coalesced", kind="coalesced")
def broadcast_coalesced(case: Case) -> Arrays:
    """Broadcast many arrays in one call."""
    return replace(broadcast(case), receive=[case.array(count) for count in _pieces(case)])


@benchmark("all_gather_single_coalesced", busbw=_share, kind="coalesced", shared=True)
def all_gather_single_coalesced(case: Case) -> Arrays:
    """Gather many arrays, each in one array, on all ranks, in one call."""
    parts = [count // case.ranks for count in _pieces(case, case.ranks)]

    def expected() -> Any:
        values = np.stack([case.values(rank, case.part) for rank in range(case.ranks)])
        return np.concatenate([each.reshape(-1) for each in np.split(values, _ends(parts), axis=1)])

    send, receive = [case.array(part) for part in parts], [case.array(case.ranks, part) for part in parts]
    return replace(all_gather_single(case), send=send, receive=receive, expected=expected)


@benchmark("all_gather_coalesced", busbw=_share, kind="coalesced", shared=True)
def all_gather_coalesced(case: Case) -> Arrays:
    """Gather many arrays, each in a list of arrays, on all ranks, in one call."""
    parts = [count // case.ranks for count in _pieces(case, case.ranks)]
    send = [case.array(part) for part in parts]
    receive = [case.array(part) for _ in range(case.ranks) for part in parts]
    return replace(all_gather_single(case), send=send, receive=receive)


@benchmark("reduce_scatter_single_coalesced", busbw=_share, kind="coalesced", shared=True)
def reduce_scatter_single_coalesced(case: Case) -> Arrays:
    """Reduce many arrays and scatter each in equal parts, in one call."""
    pieces = _pieces(case, case.ranks)

    def expected() -> Any:
        reduced = np.split(case.reduced(case.count), _ends(pieces))
        return np.concatenate([each.reshape(case.ranks, -1)[case.rank] for each in reduced])

    send, receive = [case.array(count) for count in pieces], [case.array(count // case.ranks) for count in pieces]
    return replace(reduce_scatter_single(case), send=send, receive=receive, expected=expected)


# -- messages --------------------------------------------------------------------------------------------


def _to_peer(case: Case, window: int = 1) -> Arrays:
    """Return one array to send to the partner, and `window` arrays to receive; none without a partner."""
    peer = case.peer
    if peer is None:
        return Arrays(receive=None)
    return Arrays(
        send=case.array(case.count),
        receive=case.array(window, case.count),
        given=lambda: case.values(case.rank, case.count),
        expected=lambda: np.tile(case.values(peer, case.count), window),
    )


@benchmark("ping_pong", kind="message", least_ranks=2, transfers=lambda case: 2)
def ping_pong(case: Case) -> Arrays:
    """Send an array and receive one back; the time is for one way (osu_multi_lat)."""
    return _to_peer(case)


@benchmark("sendrecv", kind="message")
def sendrecv(case: Case) -> Arrays:
    """Send to the right neighbour and receive from the left one, all ranks at once."""
    arrays = _in_place(case, lambda: case.values(case.left, case.count))
    return replace(arrays, send=case.array(case.count))


@benchmark("bidirectional", kind="message", busbw=lambda n: 2.0, least_ranks=2, transfers=lambda case: case.window)
def bidirectional(case: Case) -> Arrays:
    """Send many arrays each way at once; busbw counts both directions (osu_bibw)."""
    return _to_peer(case, case.window)


@benchmark("message_rate", kind="message", least_ranks=2, transfers=lambda case: case.window, rate=True)
def message_rate(case: Case) -> Arrays:
    """Send many messages one way; messages per second of all pairs (osu_mbw_mr)."""
    arrays = _to_peer(case, case.window)
    return replace(arrays, expected=None) if case.rank < case.ranks // 2 else arrays  # the first half sends
