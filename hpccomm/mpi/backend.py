"""MPIBackend: every operation on host arrays, each a few lines around one call of mpi4py.

A non-blocking MPI call returns a request, and `done` makes a Work of it. A blocking call returns None, and `done`
completes the operation. Large asynchronous collectives are blocking calls in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from ..core.backend import Backend, Pieces
from ..core.options import BackendOptions
from ..core.overlap import all_unaliased
from ..core.reduce_op import ReduceOp
from ..core.timeouts import MAIN
from ..core.work import Work, both
from ..errors import on_rank
from ..job import failures, mpi_library, tags
from . import reductions
from .datatypes import LARGEST_COUNT, accumulation_dtype, as_bytes, message, parts
from .fast_path import KEPT_BYTES, RUN_BYTES, MPIFastPath, make_fast_path
from .layout import (
    APART_BYTES,
    Finish,
    apart,
    by_dtype,
    nbytes_of,
    packed_any,
    recv_buffer,
    send_buffer,
    size_of,
    unaliased,
    unpack_columns,
    unpack_into,
    unpacked,
    unpacked_any,
)
from .works import (
    MPIWork,
    MPIWorks,
    ReceiveWork,
    SendReceiveWork,
    all_done,
    as_backend_error,
    done,
    joined,
    received,
    wait_for_all,
)

if TYPE_CHECKING:
    from ..core.exchange import Exchange
    from ..core.persistent_work import PersistentWork
    from .coalesced import Coalesced
    from .communication_thread import CommunicationThread
    from .exchange import Memory, RepeatedExchange
    from .node_exchange import NodeExchanges
    from .node_persistent import NodePersistent
    from .shared_memory import SharedArrays, Window

IN_PLACE = MPI.IN_PLACE
THREAD_MULTIPLE = mpi_library.any_thread_may_call()


class MPIBackend(Backend):
    """Host arrays over MPI."""

    name = "mpi"

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options.rank, options.size)
        if options.comm is None:
            raise TypeError(f"the mpi backend needs a group with an MPI communicator{on_rank()}")
        self._options = options
        self.comm = options.comm
        self._tuning = options.tuning._replace(segment_bytes=min(options.tuning.segment_bytes, LARGEST_COUNT))
        self.segment_bytes = self._tuning.segment_bytes
        self._run_bytes = min(RUN_BYTES, self.segment_bytes)
        self._windows: dict[int, Window] = {}  # of the node-shared arrays
        self.thread_bytes = options.tuning.thread_bytes if THREAD_MULTIPLE else 2**63
        self.fast_path: MPIFastPath = make_fast_path(options.comm, self._windows, self._tuning, self.thread_bytes)
        self._has_node = type(self.fast_path) is not MPIFastPath  # only the compiled one works within a node

    # -- optional parts, made by the first operation that needs them -----------------------------

    @cached_property
    def _shared(self) -> SharedArrays:
        from .shared_memory import SharedArrays

        return SharedArrays(self.comm, self._options.tuning, self._windows)

    @cached_property
    def _thread(self) -> CommunicationThread:
        from .communication_thread import CommunicationThread

        return CommunicationThread(self.comm, partial(of_the_thread, type(self), self._options))

    @cached_property
    def _coalesced(self) -> Coalesced:
        from .coalesced import Coalesced

        return Coalesced(self._run_bytes)

    @cached_property
    def _exchange_memory(self) -> Memory:
        from .exchange import Memory

        return Memory()

    @cached_property
    def node_persistent(self) -> NodePersistent | None:
        if not self._has_node:
            return None
        from .node_persistent import NodePersistent

        return NodePersistent(self.fast_path)  # type: ignore[arg-type]

    def _exchanges_in_nodes(self) -> NodeExchanges | None:
        """Return the exchanges within nodes; None if a rank of the group lacks the compiled extension for them."""
        # No cached_property: up to Python 3.11 all groups share its lock, and this waits for other ranks.
        if "_node_exchanges" not in vars(self):
            from .node_exchange import NodeExchanges, is_compiled
            from .shared_memory import on_all

            has_all = on_all(self.comm, is_compiled() and self._options.tuning.node_bytes > 0)
            self._node_exchanges = NodeExchanges(self.comm, self._options.tuning) if has_all else None
        return self._node_exchanges

    @cached_property
    def _meetings(self) -> Exchange:
        from ..core.exchange import Exchange

        return Exchange(self.comm)

    # -- one array -------------------------------------------------------------------------------

    def broadcast(self, array: Any, root: int, async_op: bool) -> Work | None:
        if async_op and array.nbytes >= self.thread_bytes:
            return self._thread.launch("broadcast", array, root)
        buffer, finish = (send_buffer(array), None) if root == self.rank else recv_buffer(array)
        if self._has_node and not async_op and self.fast_path.node_broadcast(buffer, root):
            return done(None, finish)
        call = self.comm.Ibcast if async_op else self.comm.Bcast
        return done(call(message(buffer), root), finish, buffer)

    def _is_narrow(self, array: Any, op: ReduceOp, nbytes: int) -> bool:
        """Return whether memory of the node reduces `nbytes` bytes of two-byte floats; all ranks get one answer."""
        return (
            self._has_node
            and accumulation_dtype(array.dtype).itemsize > 2  # the extension learns bfloat16 there
            and self.fast_path.reduces_narrow(array, op, nbytes)
        )

    def all_reduce(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        if async_op:
            if array.nbytes >= self.thread_bytes:
                return self._thread.launch("all_reduce", array, op)
        elif self._windows and self._shared.reduces("all_reduce", array, op):
            return None
        elif array.itemsize == 2 and self._is_narrow(array, op, array.nbytes):
            buffer, finish = reductions.narrow(array)
            self.fast_path.node_all_reduce(buffer, op)
            return done(None, finish)
        buffer, how, finish = reductions.in_place(array, op, self.size)
        call = self.comm.Iallreduce if async_op else self.comm.Allreduce
        if self._has_node and not async_op and self.fast_path.node_all_reduce(buffer, how.reduces):
            return done(None, finish)
        if buffer.nbytes <= self.segment_bytes:
            return done(call(IN_PLACE, (buffer, how.datatype), how.op), finish, buffer)
        pieces = self._segments(buffer)
        return all_done([call(IN_PLACE, (piece, how.datatype), how.op) for piece in pieces], finish, buffer)

    def reduce(self, array: Any, root: int, op: ReduceOp, async_op: bool) -> Work | None:
        if async_op:
            if array.nbytes >= self.thread_bytes:
                return self._thread.launch("reduce", array, root, op)
        elif self._windows and self._shared.reduces("reduce", array, op, root):
            return None
        elif array.itemsize == 2 and self._is_narrow(array, op, array.nbytes):
            return self._reduce_narrow("reduce", array, op, self.rank == root, root)
        buffer, how, finish = reductions.in_place(array, op, self.size)
        if self.rank != root:
            finish = None
        if not async_op and self.fast_path.node_reduce("reduce", buffer, how.reduces, root):
            return done(None, finish)
        call, pieces = self.comm.Ireduce if async_op else self.comm.Reduce, self._segments(buffer)
        if self.rank == root:
            requests = [call(IN_PLACE, (piece, how.datatype), how.op, root) for piece in pieces]
        else:
            requests = [call((piece, how.datatype), None, how.op, root) for piece in pieces]
        return all_done(requests, finish, buffer)

    def _reduce_narrow(self, name: str, array: Any, op: ReduceOp, has_result: bool, root: int = 0) -> Work | None:
        """Do a reduce, scan or exscan of a half precision in memory of the node."""
        buffer, finish = reductions.narrow(array)
        self.fast_path.node_reduce(name, buffer, op, root)
        return done(None, finish if has_result else None)

    def scan(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        return self._scan("scan", array, op, True, async_op)

    def exscan(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        return self._scan("exscan", array, op, self.rank > 0, async_op)

    def _scan(self, name: str, array: Any, op: ReduceOp, has_result: bool, async_op: bool) -> Work | None:
        if async_op and array.nbytes >= self.thread_bytes:
            return self._thread.launch(name, array, op)
        if not async_op and array.itemsize == 2 and self._is_narrow(array, op, array.nbytes):
            return self._reduce_narrow(name, array, op, has_result)
        buffer, how, finish = reductions.in_place(array, op, self.size)
        if not has_result:
            finish = None
        if not async_op and self.fast_path.node_reduce(name, buffer, how.reduces, 0):
            return done(None, finish)
        call = getattr(self.comm, f"I{name}" if async_op else name.capitalize())
        pieces = self._segments(buffer)
        # MPI leaves the receive buffer of rank 0 in an exscan undefined, so rank 0 uses a separate one.
        given = [IN_PLACE if has_result else (piece, how.datatype) for piece in pieces]
        into = pieces if has_result else self._segments(np.empty_like(buffer))
        pairs = zip(given, into, strict=True)
        requests = [call(each, (piece, how.datatype), how.op) for each, piece in pairs]
        return all_done(requests, finish, buffer, into)

    def _moved_in_node(self, name: str, inputs: list[Any], outputs: list[Any], root: int = 0) -> bool:
        """Move arrays of any layout in memory of the node; return False, on every rank, if MPI has to."""
        if not self.fast_path.is_node_open():
            return False
        buffers = [recv_buffer(output) for output in outputs]
        if name == "all_gather":
            inputs = all_unaliased(inputs, outputs)
        if not self.fast_path.node_move(name, list(map(send_buffer, inputs)), [each for each, _ in buffers], root):
            return False
        for _, finish in buffers:
            done(None, finish)
        return True

    def _segments(self, buffer: Any) -> Sequence[Any]:
        if buffer.nbytes <= self.segment_bytes:
            return (buffer,)
        from .segments import segments

        return segments(buffer, self.segment_bytes)

    # -- one array from or to each rank ----------------------------------------------------------

    def all_gather_single(self, output: Any, array: Any, async_op: bool) -> Work | None:
        if async_op and output.nbytes >= self.thread_bytes:
            return self._thread.launch("all_gather_single", output, array)
        buffer, finish = recv_buffer(output)
        call = self.comm.Iallgather if async_op else self.comm.Allgather
        sent = unaliased(array, output)
        if self._has_node and not async_op and self.fast_path.node_all_gather(buffer, sent):
            return done(None, finish)
        return done(call(message(sent), message(buffer)), finish, sent, buffer)

    def all_gather(self, outputs: list[Any], array: Any, async_op: bool) -> Work | None:
        if not async_op and self._moved_in_node("all_gather", [array], outputs):
            return None
        call = self.comm.Iallgatherv if async_op else self.comm.Allgatherv
        sent = send_buffer(array)
        if self.fast_path.node_part and outputs[0].nbytes >= APART_BYTES:
            return self._pairwise(all_unaliased([sent], outputs) * self.size, outputs, None, async_op)
        if (where := apart(outputs)) is not None:
            (sent,) = all_unaliased([sent], outputs)
            return done(call(message(sent), where), None, sent, outputs)
        flat, counts, finish = unpacked(outputs)
        return done(call(message(sent), parts(flat, counts)), finish, sent, flat)

    def gather(self, array: Any, outputs: list[Any] | None, root: int, async_op: bool) -> Work | None:
        if not async_op and self._moved_in_node("gather", [array], outputs or [], root):
            return None
        sends = [array if rank == root else None for rank in range(self.size)]
        return self._pairwise(sends, outputs or [None] * self.size, None, async_op)

    def scatter(self, output: Any, inputs: list[Any] | None, root: int, async_op: bool) -> Work | None:
        if not async_op and self._moved_in_node("scatter", inputs or [], [output], root):
            return None
        receives = [output if rank == root else None for rank in range(self.size)]
        return self._pairwise(inputs or [None] * self.size, receives, None, async_op)

    def reduce_scatter_single(self, output: Any, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        if async_op:
            if array.nbytes >= self.thread_bytes:
                return self._thread.launch("reduce_scatter_single", output, array, op)
        elif self._windows and self._shared.reduces("reduce_scatter_single", array, op, 0, output):
            return None
        elif array.itemsize == 2 and self._is_narrow(array, op, array.nbytes):
            buffer, finish = recv_buffer(output)
            self.fast_path.node_reduce_scatter(buffer, unaliased(array, output), op)
            return done(None, finish)
        sent, how = unaliased(reductions.reduction_input(array, op), output), reductions.plan(op, array.dtype)
        buffer, finish = reductions.reduction_output(output, op, self.size)
        if self._has_node and not async_op and self.fast_path.node_reduce_scatter(buffer, sent, how.reduces):
            return done(None, finish)
        if async_op or sent.nbytes <= self._tuning.reduce_scatter_bytes:
            call = self.comm.Ireduce_scatter_block if async_op else self.comm.Reduce_scatter_block
            return done(call((sent, how.datatype), (buffer, how.datatype), how.op), finish, sent, buffer)
        self._reduce_scatter_columns(buffer, sent.reshape(self.size, -1), how)
        return done(None, finish)

    def reduce_scatter(self, output: Any, inputs: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        if not async_op and output.itemsize == 2 and self._is_narrow(output, op, sum(map(nbytes_of, inputs))):
            buffer, finish = recv_buffer(output)
            self.fast_path.node_reduce_scatter_list(buffer, all_unaliased(list(map(send_buffer, inputs)), [buffer]), op)
            return done(None, finish)
        how, sent = reductions.plan(op, output.dtype), [reductions.reduction_input(array, op) for array in inputs]
        buffer, finish = reductions.reduction_output(output, op, self.size)
        sent = all_unaliased(sent, [buffer])
        if not async_op and self.fast_path.node_reduce_scatter_list(buffer, sent, how.reduces):
            return done(None, finish)
        counts = list(map(size_of, sent))
        is_even = len(set(counts)) == 1
        if is_even and not async_op:
            self._reduce_scatter_columns(buffer, sent, how)
            return done(None, finish)
        flat = np.concatenate(sent, axis=None)
        both_ends = (flat, how.datatype), (buffer, how.datatype)
        if is_even:
            return done(self.comm.Ireduce_scatter_block(*both_ends, how.op), finish, flat, buffer)
        call = self.comm.Ireduce_scatter if async_op else self.comm.Reduce_scatter
        return done(call(*both_ends, counts, how.op), finish, flat, buffer)

    def _reduce_scatter_columns(self, buffer: Any, sent: Sequence[Any], how: reductions.Plan) -> None:
        """Reduce arrays of equal size, one for each rank, in packed pieces."""
        from .segments import columns

        packed = self._coalesced.memory(min(self.segment_bytes, self.size * buffer.nbytes))
        for piece, target in columns(sent, buffer, packed):
            self.comm.Reduce_scatter_block((piece, how.datatype), (target, how.datatype), how.op)

    def all_to_all(self, outputs: list[Any], inputs: list[Any], async_op: bool) -> Work | None:
        if not async_op and self._moved_in_node("all_to_all", inputs, outputs):
            return None
        return self._pairwise(inputs, outputs, None, async_op)

    def all_to_all_single(
        self, output: Any, array: Any, output_counts: list[int] | None, input_counts: list[int] | None, async_op: bool
    ) -> Work | None:
        if async_op and input_counts is None and output.nbytes >= self.thread_bytes:
            return self._thread.launch("all_to_all_single", output, array, None, None)
        buffer, finish = recv_buffer(output)
        sent = unaliased(array, output)
        # None selects MPI_Alltoall on all ranks. Equal counts do not: ranks could disagree on them.
        if output_counts is None or input_counts is None:
            if self._has_node and not async_op and self.fast_path.node_all_to_all(buffer, sent):
                return done(None, finish)
            call = self.comm.Ialltoall if async_op else self.comm.Alltoall  # MPICH's Alltoallv is slower
            return done(call(message(sent), message(buffer)), finish, sent, buffer)
        call = self.comm.Ialltoallv if async_op else self.comm.Alltoallv
        return done(call(parts(sent, input_counts), parts(buffer, output_counts)), finish, sent, buffer)

    def _pairwise(self, sends: Sequence[Any], receives: Sequence[Any], finish: Finish, async_op: bool) -> Work | None:
        """Send ``sends[r]`` to each rank r and receive ``receives[r]`` from it, where they are not None.

        MPI libraries do the same for gatherv, scatterv and alltoallv, but this needs no copies into one array.
        """
        buffers: dict[int, Any] = {}
        for rank, output in enumerate(receives):
            if output is not None:
                buffers[rank], unpack = recv_buffer(output)
                finish = both(unpack, finish)
        peers = [rank for rank, array in enumerate(sends) if array is not None]
        # copies of arrays that are also received into: an early peer's data may arrive before they are sent
        sent = [*map(send_buffer, all_unaliased([sends[rank] for rank in peers], [*buffers.values()]))]
        own, mine = buffers.get(self.rank), None if sends[self.rank] is None else sent[peers.index(self.rank)]
        is_copied = own is not None and mine is not None and own.nbytes == mine.nbytes  # no message to itself
        others = [rank for rank in buffers if not is_copied or rank != self.rank]
        requests = [self.comm.Irecv(message(buffers[rank]), rank, tags.PAIRWISE) for rank in others]
        for rank, array in zip(peers, sent, strict=True):
            if not is_copied or rank != self.rank:
                requests.append(self.comm.Isend(message(array), rank, tags.PAIRWISE))
        if is_copied:
            as_bytes(own)[...] = as_bytes(mine)
        if async_op:
            return MPIWorks(requests, finish, (buffers, sent))
        wait_for_all(requests)
        return done(None, finish)

    def exchange(self, sends: Pieces, receives: Pieces, adds: bool, async_op: bool) -> Work | None:
        from .exchange import exchange

        return exchange(self.comm, sends, receives, adds, self._exchange_memory, async_op)

    def repeated_exchange(self, sends: Pieces, receives: Pieces, adds: bool) -> RepeatedExchange | None:
        from .exchange import MOST_REPEATED, RepeatedExchange

        is_small = sum(part.nbytes for _, part in (*sends, *receives)) <= MOST_REPEATED
        return RepeatedExchange(self.comm, sends, receives, adds) if is_small else None

    # -- many arrays in one message --------------------------------------------------------------

    def all_reduce_coalesced(self, arrays: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        if async_op and self._is_large(arrays):
            return self._thread.launch("all_reduce_coalesced", arrays, op)
        if not async_op:
            self._coalesced.in_runs(self.all_reduce, arrays, op, True, True)
            return None
        works: list[Work | None] = []
        finish: Finish = None
        for (same,) in by_dtype(arrays):
            flat = np.concatenate(same, axis=None)
            works.append(self.all_reduce(flat, op, True))
            finish = both(finish, partial(unpack_into, flat, same))
        return joined(works, finish)

    def _is_large(self, arrays: list[Any]) -> bool:
        return bool(sum(array.nbytes for array in arrays) >= self.thread_bytes)

    def broadcast_coalesced(self, arrays: list[Any], root: int, async_op: bool) -> Work | None:
        if async_op and self._is_large(arrays):
            return self._thread.launch("broadcast_coalesced", arrays, root)
        is_root = root == self.rank
        if not async_op:
            self._coalesced.in_runs(self.broadcast, arrays, root, is_root, not is_root)
            return None
        flat, finish = (packed_any(arrays), None) if is_root else unpacked_any(arrays)
        return joined([self.broadcast(flat, root, True)], finish)

    def all_gather_coalesced(self, output_lists: list[list[Any]], arrays: list[Any], async_op: bool) -> Work | None:
        outputs = [output for of_rank in output_lists for output in of_rank]
        if async_op:
            flat, finish = unpacked_any(outputs)
            return joined([self.all_gather(_cut(flat, output_lists), packed_any(arrays), True)], finish)
        from .segments import runs_of_lists

        runs = list(runs_of_lists(output_lists, self.fast_path.node_part or KEPT_BYTES // self.size))
        if len(runs) > 1:
            arrays = all_unaliased(arrays, outputs)
        for run in runs:
            targets = [of_rank[run] for of_rank in output_lists]
            if len(targets[0]) == 1:
                self.all_gather([target for (target,) in targets], arrays[run][0], False)
                continue
            received, sent = [each for of_rank in targets for each in of_rank], arrays[run]
            nbytes = sum(map(nbytes_of, received))
            memory = self._coalesced.memory(nbytes + sum(map(nbytes_of, sent)))
            flat, finish = unpacked_any(received, memory[:nbytes])
            self.all_gather(_cut(flat, targets), packed_any(sent, memory[nbytes:]), False)
            finish()
        return None

    def all_gather_single_coalesced(self, outputs: list[Any], arrays: list[Any], async_op: bool) -> Work | None:
        if async_op and self._is_large(outputs):
            return self._thread.launch("all_gather_single_coalesced", outputs, arrays)
        works: list[Work | None] = []
        finish: Finish = None
        for into, run in self._runs(outputs, arrays, async_op):
            mine = packed_any(run)
            gathered = np.empty((self.size, mine.size), mine.dtype)
            works.append(self.all_gather_single(gathered, mine, async_op))
            finish = both(finish, partial(unpack_columns, gathered, into))  # after all inputs have been read
        return joined(works, finish)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Any], arrays: list[Any], op: ReduceOp, async_op: bool
    ) -> Work | None:
        if async_op and self._is_large(arrays):
            return self._thread.launch("reduce_scatter_single_coalesced", outputs, arrays, op)
        works: list[Work | None] = []
        finish: Finish = None
        for same, into in by_dtype(arrays, outputs):
            for run, targets in self._runs(same, into, async_op):
                rows = np.concatenate([array.reshape(self.size, -1) for array in run], axis=1)
                flat, _, unpack = unpacked(targets)
                works.append(self.reduce_scatter_single(flat, rows, op, async_op))
                finish = both(finish, unpack)
        return joined(works, finish)

    def _runs(self, larger: list[Any], smaller: list[Any], async_op: bool) -> list[tuple[list[Any], list[Any]]]:
        """Return runs of neighbours, cut by the bytes of `larger` as in the compiled extension."""
        if async_op or sum(map(nbytes_of, larger)) <= self._run_bytes:
            return [(larger, smaller)]
        from .segments import runs

        cut, start = [], 0
        for run, _ in runs(larger, self._run_bytes, nbytes_of):
            cut.append((run, smaller[start : start + len(run)]))
            start += len(run)
        return cut

    # -- point to point --------------------------------------------------------------------------

    def send(self, array: Any, dst: int, tag: int, async_op: bool) -> Work | None:
        sent = send_buffer(array)
        if not async_op and get_ident() == MAIN:
            self.comm.Send(message(sent), dst, tag)
            return None
        work = MPIWork(self.comm.Isend(message(sent), dst, tag), None, (sent,))
        return work if async_op else work.receive()

    def recv(self, array: Any, src: int | None, tag: int, async_op: bool) -> Work | int:
        buffer, finish = recv_buffer(array)
        source = MPI.ANY_SOURCE if src is None else src
        if async_op or get_ident() != MAIN:
            work = ReceiveWork(self.comm.Irecv(message(buffer), source, tag), buffer.nbytes, finish, (buffer,))
            return work if async_op else work.receive()
        status = MPI.Status()
        self.comm.Recv(message(buffer), source, tag, status)
        return received("recv", status, buffer, finish)

    def sendrecv(
        self, array: Any, dst: int, output: Any, src: int | None, tag: int, recv_tag: int, async_op: bool
    ) -> Work | int:
        buffer, finish = recv_buffer(output)
        sent = unaliased(array, output)
        source = MPI.ANY_SOURCE if src is None else src
        if async_op or get_ident() != MAIN:
            receive = self.comm.Irecv(message(buffer), source, recv_tag)
            send = self.comm.Isend(message(sent), dst, tag)
            work = SendReceiveWork([receive, send], [buffer.nbytes], finish, sent, buffer)
            return work if async_op else work.receive()
        status = MPI.Status()
        self.comm.Sendrecv(message(sent), dst, tag, message(buffer), source, recv_tag, status)
        return received("sendrecv", status, buffer, finish)

    # -- the rest --------------------------------------------------------------------------------

    def barrier(self, async_op: bool) -> Work | None:
        if self._has_node and not async_op and self.fast_path.node_barrier():
            return None
        return done(self.comm.Ibarrier() if async_op else self.comm.Barrier(), None)

    def monitored_barrier(self, timeout: float, wait_all_ranks: bool) -> None:
        from .monitored_barrier import monitored_barrier

        monitored_barrier(self._meetings, self._options.ranks, timeout, wait_all_ranks)

    def persistent(self, operation: str, *arguments: Any) -> PersistentWork:
        from . import coalesced, persistent

        if operation == "all_reduce_coalesced":
            return coalesced.set_up(self, *arguments)
        if operation == "exchange":
            if (exchanges := self._exchanges_in_nodes()) is not None:
                return exchanges.set_up(*arguments)
            from .exchange import set_up

            return set_up(self.comm, *arguments)
        return persistent.set_up(self, operation, arguments)

    def empty_shared(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._shared.empty_shared(shape, dtype)

    def peer_view(self, array: Any, rank: int) -> Any:
        return self._shared.peer_view(array, rank)

    def fence(self, array: Any) -> None:
        self._shared.fence(array)

    def close(self) -> None:
        for name in ("_thread", "_shared", "node_persistent", "_node_exchanges"):
            if vars(self).get(name) is not None:
                getattr(self, name).close()
        self.fast_path.close_node()

    def leave(self) -> None:
        if "_thread" in vars(self):
            self._thread.leave()

    def abort(self) -> None:
        if "_thread" in vars(self):
            self._thread.abort()

    def translate_error(self, operation: str, error: Exception) -> Exception:
        return as_backend_error(operation, error, self.comm)


def of_the_thread(make: type[MPIBackend], options: BackendOptions, comm: MPI.Intracomm) -> MPIBackend:
    """Return the backend of a communication thread; `make` is its class."""
    options = options._replace(comm=comm)
    if failures.is_on():  # with it, Open MPI 5.0 ended jobs after a rank's death: "Send error after request freed"
        tuning = options.tuning._replace(node_bytes=0)
        options = options._replace(settings=options.settings._replace(tuning=tuning))
    made = make(options)
    made.fast_path.is_in_thread, made.fast_path.tries = True, False
    return made


def _cut(flat: Any, lists: list[list[Any]]) -> list[Any]:
    """Split a flat array into the values of each list of arrays."""
    ends = np.cumsum([sum(map(nbytes_of, each)) // flat.itemsize for each in lists])
    return np.split(flat, ends[:-1])
