"""The fast path: blocking operations on small arrays that MPI can work on as they are.

For a few bytes MPI needs less than a microsecond, so that every look-up on the way to it counts. Each method asks in as
few of them as it can whether its arguments are the ordinary case, and makes one call of mpi4py: the same that
`MPIBackend` makes, because another rank may go the long way. For whatever is not ordinary it returns without having
done anything, and the operation goes through `checks` to `MPIBackend`.

``flags.carray`` is one look at four things: in C order, without gaps, aligned, writeable. Arrays that own their memory
(``base is None``) can't overlap. A dtype or an op that is not in the tables, or can't be looked up, is not ordinary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

from mpi4py import MPI
from numpy import ndarray

from ..core.backend import FastPath
from ..core.operation_list import MESSAGES
from ..core.work import Work
from ..errors import DistBackendError
from ..job.tags import LARGEST
from ..native import room
from ..process.tuning import Tuning
from .datatypes import DIRECT, TYPED
from .works import MPIWork, ReceiveWork, as_backend_error, check_length

IN_PLACE = MPI.IN_PLACE
# Of coalesced arrays: a run of this size stays in the cache while it is packed, reduced and unpacked.
RUN_BYTES = 1 << 20
KEPT_BYTES = 16 * RUN_BYTES  # of memory for them, at most; in the compiled room likewise
Status = MPI.Status


class MPIFastPath(FastPath):
    """The fast path of one group, for arrays of up to a segment's bytes (asynchronous ones: below `thread_bytes`).

    `windows` is empty until the program makes a node-shared array; then the checks take reductions of `shared_bytes`.
    """

    is_open = True
    is_in_thread = False  # the communication thread

    def _not_in_node(self, *_: Any) -> bool:
        return False

    # In memory of the node (`native/node.pxi`), which only the compiled path has; each returns True if it has done it
    node_broadcast = node_all_reduce = node_all_gather = node_reduce_scatter = node_barrier = _not_in_node
    is_node_open = node_all_to_all = node_move = node_reduce = node_reduce_scatter_list = _not_in_node

    def close_node(self) -> None:
        """Give its memory back; called once, by every rank, when the group is destroyed."""

    def __init__(self, comm: MPI.Intracomm, windows: dict[int, Any], tuning: Tuning, thread_bytes: int) -> None:
        self._comm = comm
        self._windows = windows
        self.shared_bytes = tuning.shared_bytes
        self._largest = tuning.segment_bytes
        self._largest_async = min(thread_bytes, self._largest + 1)
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()
        self._sent: deque[tuple[int, int]] = deque(maxlen=8)

    @property
    def last_sent(self) -> Collection[tuple[int, int]]:
        return self._sent.copy()

    def broadcast(self, array: Any, root: int) -> bool:
        if type(array) is not ndarray or array.nbytes > self._largest or not array.flags.carray:
            return False
        if type(root) is not int or not 0 <= root < self._size:
            return False
        try:
            self._comm.Bcast((array, TYPED[array.dtype]), root)
        except KeyError:
            return False
        except MPI.Exception as error:
            raise self._failed("broadcast", error) from error
        self.count += 1
        return True

    def all_reduce(self, array: Any, op: Any) -> bool:
        if type(array) is not ndarray or array.nbytes > self._largest or not array.flags.carray:
            return False
        if self._windows and array.nbytes >= self.shared_bytes:
            return False
        try:
            direct = DIRECT.get((op, array.dtype))
            if direct is None:
                return False
            datatype, mpi_op = direct
            self._comm.Allreduce(IN_PLACE, (array, datatype), mpi_op)
        except TypeError:  # an op that can't be looked up
            return False
        except MPI.Exception as error:
            raise self._failed("all_reduce", error) from error
        self.count += 1
        return True

    def reduce(self, array: Any, root: int, op: Any) -> bool:
        if type(array) is not ndarray or array.nbytes > self._largest or not array.flags.carray:
            return False
        if self._windows and array.nbytes >= self.shared_bytes:
            return False
        if type(root) is not int or not 0 <= root < self._size:
            return False
        try:
            direct = DIRECT.get((op, array.dtype))
            if direct is None:
                return False
            datatype, mpi_op = direct
            if self._rank == root:
                self._comm.Reduce(IN_PLACE, (array, datatype), mpi_op, root)
            else:
                self._comm.Reduce((array, datatype), None, mpi_op, root)
        except TypeError:  # an op that can't be looked up
            return False
        except MPI.Exception as error:
            raise self._failed("reduce", error) from error
        self.count += 1
        return True

    def all_gather_single(self, output: Any, array: Any) -> bool:
        if not _ordinary(output, array) or not self._largest >= output.nbytes == array.nbytes * self._size:
            return False
        try:
            datatype = TYPED[array.dtype]
            self._comm.Allgather((array, datatype), (output, datatype))
        except KeyError:
            return False
        except MPI.Exception as error:
            raise self._failed("all_gather_single", error) from error
        self.count += 1
        return True

    def reduce_scatter_single(self, output: Any, array: Any, op: Any) -> bool:
        if not _ordinary(output, array) or not self._largest >= array.nbytes == output.nbytes * self._size:
            return False
        if self._windows and array.nbytes >= self.shared_bytes:
            return False
        try:
            direct = DIRECT.get((op, array.dtype))
            if direct is None:
                return False
            datatype, mpi_op = direct
            self._comm.Reduce_scatter_block((array, datatype), (output, datatype), mpi_op)
        except TypeError:  # an op that can't be looked up
            return False
        except MPI.Exception as error:
            raise self._failed("reduce_scatter_single", error) from error
        self.count += 1
        return True

    def all_to_all_single(self, output: Any, array: Any) -> bool:
        if not _ordinary(output, array) or not self._largest >= output.nbytes == array.nbytes:
            return False
        if not (array.ndim and output.ndim) or array.shape[0] % self._size or output.shape[0] % self._size:
            return False
        try:
            datatype = TYPED[array.dtype]
            self._comm.Alltoall((array, datatype), (output, datatype))
        except KeyError:
            return False
        except MPI.Exception as error:
            raise self._failed("all_to_all_single", error) from error
        self.count += 1
        return True

    def barrier(self) -> bool:
        try:
            self._comm.Barrier()
        except MPI.Exception as error:
            raise self._failed("barrier", error) from error
        self.count += 1
        return True

    def send(self, array: Any, dst: int, tag: int) -> bool:
        if type(array) is not ndarray or array.nbytes > self._largest or not array.flags.carray:
            return False
        if dst == self._rank or not (type(dst) is type(tag) is int and 0 <= dst < self._size and 0 <= tag <= LARGEST):
            return False
        self._sent.append((dst, tag))
        try:
            self._comm.Send((array, TYPED[array.dtype]), dst, tag)
        except KeyError:
            return False
        except MPI.Exception as error:
            raise self._failed("send", error) from error
        self.messages += 1
        return True

    def recv(self, array: Any, src: int | None, tag: int) -> int | None:
        if type(array) is not ndarray or array.nbytes > self._largest or not array.flags.carray:
            return None
        if src == self._rank or not (type(src) is type(tag) is int and 0 <= src < self._size and 0 <= tag <= LARGEST):
            return None
        status = Status()
        try:
            self._comm.Recv((array, TYPED[array.dtype]), src, tag, status)
            self.messages += 1
            return check_length("recv", status, array.nbytes)
        except KeyError:
            return None
        except MPI.Exception as error:
            raise self._failed("recv", error) from error
        except DistBackendError as error:
            raise self.door.identify_fast(error, "recv") from None

    def sendrecv(
        self, array: Any, dst: int, output: Any, src: int | None, tag: int, recv_tag: int | None
    ) -> int | None:
        if not _ordinary(output, array) or output.nbytes > self._largest or array.nbytes > self._largest:
            return None
        if recv_tag is not None or not (type(dst) is type(src) is type(tag) is int and 0 <= tag <= LARGEST):
            return None
        if not (0 <= dst < self._size and 0 <= src < self._size):
            return None
        status = Status()
        self._sent.append((dst, tag))
        try:
            datatype = TYPED[array.dtype]
            self._comm.Sendrecv((array, datatype), dst, tag, (output, datatype), src, tag, status)
            self.messages += 1
            return check_length("sendrecv", status, output.nbytes)
        except KeyError:
            return None
        except MPI.Exception as error:
            raise self._failed("sendrecv", error) from error
        except DistBackendError as error:
            raise self.door.identify_fast(error, "sendrecv") from None

    def iall_reduce(self, array: Any, op: Any) -> Work | None:
        if type(array) is not ndarray or array.nbytes >= self._largest_async or not array.flags.carray:
            return None
        try:
            direct = DIRECT.get((op, array.dtype))
            if direct is None:
                return None
            datatype, mpi_op = direct
            request = self._comm.Iallreduce(IN_PLACE, (array, datatype), mpi_op)
        except TypeError:  # an op that can't be looked up
            return None
        except MPI.Exception as error:
            raise self._failed("all_reduce", error) from error
        self.count += 1
        work = MPIWork(request, None, array)
        self.door.follow(work, "all_reduce", array)
        return work

    def isend(self, array: Any, dst: int, tag: int) -> Work | None:
        if type(array) is not ndarray or not array.flags.carray or array.nbytes > self._largest:
            return None
        if not (type(dst) is type(tag) is int and 0 <= dst < self._size and 0 <= tag <= LARGEST):
            return None
        self._sent.append((dst, tag))
        try:
            request = self._comm.Isend((array, TYPED[array.dtype]), dst, tag)
        except KeyError:
            return None
        except MPI.Exception as error:
            raise self._failed("send", error) from error
        self.messages += 1
        work = MPIWork(request, None, array)
        self.door.follow(work, "send", array, dst, tag)
        return work

    def irecv(self, array: Any, src: int | None, tag: int) -> Work | None:
        if type(array) is not ndarray or not array.flags.carray or array.nbytes > self._largest:
            return None
        if not (type(src) is type(tag) is int and 0 <= src < self._size and 0 <= tag <= LARGEST):
            return None
        try:
            request = self._comm.Irecv((array, TYPED[array.dtype]), src, tag)
        except KeyError:
            return None
        except MPI.Exception as error:
            raise self._failed("recv", error) from error
        self.messages += 1
        work = ReceiveWork(request, array.nbytes, None, array)
        self.door.follow(work, "recv", array, src, tag)
        return work

    def _failed(self, name: str, error: Exception) -> Exception:
        """Count an operation that has failed, as the other ranks do, and return what the program should see."""
        if name in MESSAGES:
            self.messages += 1
        else:
            self.count += 1
        return self.door.identify_fast(as_backend_error(name, error, self._comm), name)


def make_fast_path(comm: MPI.Intracomm, windows: dict[int, Any], tuning: Tuning, thread_bytes: int) -> MPIFastPath:
    """Return the fast path of a group: the compiled one where there is one."""
    if room is None:
        return MPIFastPath(comm, windows, tuning, thread_bytes)
    from .compiled import CompiledFastPath

    return CompiledFastPath(comm, windows, tuning, thread_bytes)


def _ordinary(output: Any, array: Any) -> bool:
    """Return whether both arrays of a call are in the ordinary case and can't overlap; sizes are not compared."""
    return (
        type(output) is ndarray
        and type(array) is ndarray
        and output.base is None
        and array.base is None
        and output is not array
        and output.dtype is array.dtype
        and output.flags.carray
        and array.flags.carray
    )
