"""Sparse: send arrays to ranks that do not expect them, compared with hand-written mpi4py code.

Each rank has an array for 1, 2, 4 ... of the ranks after it. The hand-written variants are an Alltoall of the sizes
followed by Isend and Irecv or by Alltoallv of packed arrays, and non-blocking consensus with Issend, Improbe and
Ibarrier. They know that the dtype is float64; like exchange_sparse, they don't know the senders and the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import hpccomm as hc
from hpccomm.bench.measure import Plan
from hpccomm.core.timeouts import pause

from . import beside, study
from .beside import Step

CELL = np.dtype(np.float64)


def steps(world: hc.ProcessGroup, sizes: Sequence[int], plan: Plan) -> Iterator[Step]:
    """Yield the times of each number of partners and size, on every rank."""
    assert world.comm is not None
    comm = world.comm.Dup()
    hand = ByHand(comm)
    for number in partners(world.size):
        for nbytes in sizes:
            arrays = outgoing(number, nbytes, world.size, world.rank)
            calls: dict[str, Callable[[], Any]] = {
                "hpccomm": partial(hc.exchange_sparse, arrays, world),
                **{name: partial(call, arrays) for name, call in hand.calls().items()},
            }
            nbytes_each = next(iter(arrays.values())).nbytes
            yield beside.step(f"partners: {number}", nbytes_each, calls, comm, plan)
    comm.Free()


def partners(ranks: int) -> list[int]:
    """Return the numbers of receivers to measure: 1, 2, 4 ..., and all other ranks."""
    return [*(1 << power for power in range((ranks - 2).bit_length())), ranks - 1]


def outgoing(number: int, nbytes: int, ranks: int, rank: int) -> dict[int, Any]:
    """Return a rank's messages: an array of about `nbytes` for each of the `number` ranks after it."""
    cells = max(1, nbytes // CELL.itemsize)
    return {(rank + step) % ranks: np.full(cells, 100 * rank + step, CELL) for step in range(1, number + 1)}


class ByHand:
    """Hand-written code for mpi4py; the methods have the arguments and results of exchange_sparse."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._tag = 1

    def calls(self) -> dict[str, Callable[[Mapping[int, Any]], dict[int, Any]]]:
        """Return the variants by name."""
        return {"isend": self.isend, "alltoallv": self.alltoallv, "consensus": self.consensus}

    def isend(self, arrays: Mapping[int, Any]) -> dict[int, Any]:
        """Send every rank the size of its message, and then the messages that are not empty."""
        _, counts = self._counts(arrays)
        received = {int(source): np.empty(counts[source], CELL) for source in counts.nonzero()[0]}
        requests = [self._comm.Irecv(array, source) for source, array in received.items()]
        requests += [self._comm.Isend(array, receiver) for receiver, array in arrays.items()]
        MPI.Request.Waitall(requests)
        return received

    def alltoallv(self, arrays: Mapping[int, Any]) -> dict[int, Any]:
        """Send every rank the size of its message, and exchange all messages in one call."""
        sizes, counts = self._counts(arrays)
        sent = np.concatenate([np.empty(0, CELL), *(arrays[rank] for rank in sorted(arrays))])
        received = np.empty(counts.sum(), CELL)
        self._comm.Alltoallv([sent, sizes], [received, counts])
        parts = np.split(received, counts.cumsum()[:-1])
        return {source: part for source, part in enumerate(parts) if part.size}

    def consensus(self, arrays: Mapping[int, Any]) -> dict[int, Any]:
        """Receive messages until all ranks are in a barrier; each enters it once its own messages are received."""
        comm, status, received = self._comm, MPI.Status(), dict[int, Any]()
        self._tag = 3 - self._tag  # others may begin the next exchange before this rank sees the end of the barrier
        requests = [comm.Issend(array, receiver, self._tag) for receiver, array in arrays.items()]
        barrier = None
        while barrier is None or not barrier.Test():
            message = comm.Improbe(MPI.ANY_SOURCE, self._tag, status)
            if message is None:
                pause(0)  # with more ranks than cores, a polling rank keeps other ranks from sending
            else:
                array = received[status.source] = np.empty(status.Get_count(MPI.DOUBLE), CELL)
                message.Recv(array)
            if barrier is None and MPI.Request.Testall(requests):
                barrier = comm.Ibarrier()
        return received

    def _counts(self, arrays: Mapping[int, Any]) -> tuple[Any, Any]:
        """Return the sizes of this rank's messages to and from each rank."""
        sizes, counts = np.zeros((2, self._comm.size), np.intc)
        for receiver, array in arrays.items():
            sizes[receiver] = array.size
        self._comm.Alltoall(sizes, counts)
        return sizes, counts


def text(found: Sequence[Step]) -> str:
    """Return the tables."""
    return beside.text("each rank sends an array to each of its partners", "array", found)


if __name__ == "__main__":
    study.main(__doc__, steps, text, least_ranks=2)
