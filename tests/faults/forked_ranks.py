"""Ranks that are forked processes, and talk through sockets: a job without MPI, which costs milliseconds to kill."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

import hpccomm as hc
from hpccomm.checkpoint.async_saving import AsyncSaves

ABORTED = 3  # the exit status of a rank that has lost another one


class ForkedRank(hc.ProcessGroup):
    """A group of such ranks, with the methods that saving and loading call; `nodes` has the node of each rank."""

    def __init__(self, rank: int, nodes: Sequence[int], sockets: dict[int, socket.socket]) -> None:
        super().__init__(rank, len(nodes), nodes=tuple(nodes))
        self._sockets = sockets
        self.attachments[AsyncSaves] = SimpleNamespace(own=self, finish=lambda: None)
        # on the object: those of the class would pass the dispatcher, to MPI
        here: Any = self
        here.all_gather_object = self._all_gather_object
        here.isend, here.irecv = self._isend, self._irecv
        here.exchange_sparse, here.all_reduce, here.broadcast = self._sparse, self._largest, self._broadcast

    def _send(self, peer: int, thing: object) -> None:
        data = pickle.dumps(thing)
        self._sockets[peer].sendall(struct.pack("q", len(data)) + data)

    def _receive(self, peer: int) -> Any:
        (length,) = struct.unpack("q", self._exactly(peer, 8))
        return pickle.loads(self._exactly(peer, length))

    def _exactly(self, peer: int, count: int) -> bytes:
        data = self._sockets[peer].recv(count, socket.MSG_WAITALL) if count else b""
        if len(data) < count:
            raise ConnectionResetError(f"rank {peer} is gone")
        return data

    def _all_gather_object(self, object_list: list[Any], obj: Any) -> None:
        for peer in self._sockets:
            self._send(peer, obj)
        object_list[:] = [obj if rank == self.rank else self._receive(rank) for rank in range(self.size)]

    def _gathered(self, obj: Any) -> list[Any]:
        objects: list[Any] = []
        self._all_gather_object(objects, obj)
        return objects

    def _isend(self, array: Any, dst: int) -> hc.Work:
        self._send(dst, array)
        return hc.CompletedWork()

    def _irecv(self, array: Any, src: int) -> hc.Work:
        array[...] = self._receive(src)
        return hc.CompletedWork()

    def _sparse(self, arrays: dict[int, Any]) -> dict[int, Any]:
        return {rank: each[self.rank] for rank, each in enumerate(self._gathered(arrays)) if self.rank in each}

    def _largest(self, array: Any, op: Any) -> None:
        assert op is hc.ReduceOp.MAX
        array[...] = np.max(self._gathered(array), axis=0)

    def _broadcast(self, array: Any, src: int) -> None:
        array[...] = self._gathered(array)[src]


def run(nodes: Sequence[int], program: Callable[[ForkedRank], Any]) -> list[Any]:
    """Run `program` on a rank for each of `nodes`; return the result of each: None for one that was killed.

    A rank that loses another one ends, and returns None, too.
    """
    count = len(nodes)
    pairs = {(a, b): socket.socketpair() for a in range(count) for b in range(a)}
    outcomes = []
    for rank in range(count):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            _be(ForkedRank(rank, nodes, _own_ends(rank, count, pairs)), program, write)
        os.close(write)
        outcomes.append((child, read))
    for pair in pairs.values():
        for end in pair:
            end.close()
    return [_outcome(child, read) for child, read in outcomes]


def _own_ends(rank: int, count: int, pairs: dict[tuple[int, int], Any]) -> dict[int, socket.socket]:
    """Return this rank's ends of the sockets, and close all others: so that the death of a rank is seen."""
    own = {
        other: pairs[max(rank, other), min(rank, other)][int(rank < other)] for other in range(count) if other != rank
    }
    for pair in pairs.values():
        for end in pair:
            if end not in own.values():
                end.close()
    return own


def _be(group: ForkedRank, program: Callable[[ForkedRank], Any], write: int) -> None:
    """Be a rank, to the end of this process."""
    status = 1
    os.fsync = lambda _: (
        None
    )  # a kill leaves the data that the operating system has, and waiting for the disk takes a minute
    try:
        with open(write, "wb") as pipe:
            pickle.dump(program(group), pipe)
        status = 0
    except (ConnectionError, hc.checkpoint.CheckpointError) as error:
        status = ABORTED if isinstance(error, ConnectionError) else 1
        if status == 1:
            os.write(2, f"rank {group.rank}: {error}\n".encode())
    finally:
        os._exit(status)


def _outcome(child: int, read: int) -> Any:
    with open(read, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, ABORTED, -signal.SIGKILL), f"a rank has ended with {code}"
    return pickle.loads(said) if code == 0 else None
