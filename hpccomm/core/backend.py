"""Backend: the base class of transports; FastPath: small operations without the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..errors import UnsupportedOperationError, on_rank
from .generated_backend import GeneratedBackend
from .joined_work import JoinedWork
from .overlap import all_unaliased
from .work import Work

if TYPE_CHECKING:
    from .options import BackendOptions
    from .persistent_work import PersistentWork
    from .reduce_op import ReduceOp

T = TypeVar("T")
Pieces: TypeAlias = list[tuple[int, Any]]  # a rank, and the part of an array to send to it or receive from it


class FastPath:
    """Common operations on NumPy arrays, or on GPU arrays, for backends whose calls take about a microsecond.

    The group calls it before any checks. A method does the whole operation and returns True (a receive: the sender's
    rank; an asynchronous operation: its Work), or does nothing and returns False or None: then the operation goes
    through the checks to the backend. This class does nothing in all methods; a group uses it if its backend has no
    fast path, and while hooks or a coalescing() block need every operation.
    """

    is_open = False  # True in subclasses
    is_in_use = False  # of one for GPU arrays: the dispatcher's choice now
    node_part = 0  # bytes that a rank may put into node-shared memory at once; 0 without such memory
    dispatcher: Any
    count = 0  # collectives done by the fast path
    messages = 0  # messages done by the fast path
    passed_collectives = passed_messages = 0  # operations that did not take the fast path, as in the dispatcher
    place = 0  # identifies the group in the compiled extension's ring buffer of operations; 0: not recorded

    def attach(self, dispatcher: Any) -> None:
        """Set the group's dispatcher, which identifies errors and follows operations in flight."""
        self.dispatcher = dispatcher

    def open(self, connection: Any, device: str) -> None:
        """Accept the arrays of a GPU `device` from now on, if it can."""

    def with_gpu(self, gpu: FastPath | None) -> FastPath:
        """Return the path that does the operations of this one, and those of `gpu`, if there is one, on GPU arrays."""
        return gpu or self

    def decided(self) -> list[tuple[str, int, bool, int, int]]:
        """Return the size classes whose way has been chosen by timing: see native/trials.pxi."""
        return []

    def _not_done(self, *_: Any, **__: Any) -> bool:
        return False

    def _no_sender(self, *_: Any, **__: Any) -> int | None:
        return None

    def _no_work(self, *_: Any, **__: Any) -> Work | None:
        return None

    def batch(self, messages: Any, kind: type, irecv: Any) -> list[Work] | None:
        """Begin the messages of a list of P2POp of the world, or return None."""
        return None

    def exchange_sparse(self, arrays: Any, names: Sequence[int] | None) -> dict[int, Any] | None:
        """Exchange arrays; return the received ones, or None. `names` has the ranks' names (None: their numbers)."""
        return None

    def node_exchange_sparse(self, arrays: Any, received: dict[int, Any], names: Sequence[int]) -> bool:
        """Try to do it with checked arguments, in node-shared memory; return whether it was done."""
        return False

    # each takes the arguments of the method of Backend, without `async_op`
    broadcast = all_reduce = reduce = all_gather_single = reduce_scatter_single = all_to_all_single = _not_done
    barrier = send = scan = exscan = all_gather = gather = scatter = reduce_scatter = all_to_all = _not_done
    all_reduce_coalesced = broadcast_coalesced = all_gather_coalesced = _not_done
    all_gather_single_coalesced = reduce_scatter_single_coalesced = _not_done
    recv = sendrecv = _no_sender
    ibroadcast = iall_reduce = ibarrier = isend = irecv = _no_work
    ireduce = iall_gather_single = ireduce_scatter_single = iall_to_all_single = isendrecv = _no_work
    iall_reduce_coalesced = ibroadcast_coalesced = iall_gather_single_coalesced = _no_work
    ireduce_scatter_single_coalesced = _no_work


class Backend(GeneratedBackend):
    """A transport for the arrays of one device; subclass it and override the operations that it supports.

    The group checks every argument before it calls a backend: arrays are on this backend's device
    (host arrays are ``numpy.ndarray``, possibly not contiguous) and writable if they are written; their
    dtypes, sizes and list lengths fit; `op` suits the dtype; `root`, `dst`, `src` are ranks of this group.

    An operation with ``async_op=True`` returns a :class:`Work` (or None if it has already completed). One with
    ``async_op=False`` returns None after completion (or a Work, which the group waits for); a `recv` returns the
    sender's rank.

    Operations that are not overridden raise UnsupportedOperationError, except two forms: by default, a coalesced
    operation does the plain one for each array, and a persistent one starts an asynchronous one each time.
    :class:`BackendOverMPI` does all other operations by MPI.

    Examples
    --------
    >>> class Alone(hc.Backend):  # for groups of one rank: every array is its own sum
    ...     def all_reduce(self, array, op, async_op):
    ...         return hc.CompletedWork() if async_op else None
    >>> work = Alone(rank=0, size=1).all_reduce(np.ones(2), hc.ReduceOp.SUM, async_op=True)
    >>> work is not None and work.wait()
    True
    """

    name = "custom"
    exchange_tag = 0  # tag of the messages of the default `exchange`
    fast_path = FastPath()  # of a backend for host arrays
    gpu_fast_path: FastPath | None = None  # of a backend for GPU arrays
    last_on_gpu: Work | None = None  # for the watchdog: a blocking operation that may still be running on a GPU

    MPI, GLOO, NCCL = "mpi", "gloo", "nccl"  # c10d's names of backends

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @staticmethod
    def register_backend(
        name: str, func: Any, extended_api: bool = False, devices: str | Sequence[str] | None = None
    ) -> None:
        """Call :func:`hpccomm.register_backend`; the arguments are in c10d's order."""
        from .registry import register_backend

        register_backend(name, func, devices=devices, extended_api=extended_api)

    def all_reduce_coalesced(self, arrays: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        """Reduce each of `arrays` in place, in one message per dtype."""
        return self._each("all_reduce_coalesced", zip(arrays), op, async_op)

    def broadcast_coalesced(self, arrays: list[Any], root: int, async_op: bool) -> Work | None:
        """Broadcast all of `arrays` in one message."""
        return self._each("broadcast_coalesced", zip(arrays), root, async_op)

    def all_gather_coalesced(self, output_lists: list[list[Any]], arrays: list[Any], async_op: bool) -> Work | None:
        """Copy ``arrays[i]`` of rank r into ``output_lists[r][i]`` of every rank, in one message."""
        sent = all_unaliased(arrays, list(chain(*output_lists)))
        return self._each("all_gather_coalesced", zip(map(list, zip(*output_lists)), sent), async_op)

    def all_gather_single_coalesced(self, outputs: list[Any], arrays: list[Any], async_op: bool) -> Work | None:
        """Do all_gather_single for each pair of `outputs` and `arrays`, in one message."""
        return self._each("all_gather_single_coalesced", zip(outputs, all_unaliased(arrays, outputs)), async_op)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Any], arrays: list[Any], op: ReduceOp, async_op: bool
    ) -> Work | None:
        """Do reduce_scatter_single for each pair of `outputs` and `arrays`, in one message per dtype."""
        pairs = zip(outputs, all_unaliased(arrays, outputs))
        return self._each("reduce_scatter_single_coalesced", pairs, op, async_op)

    def exchange(self, sends: Pieces, receives: Pieces, adds: bool, async_op: bool) -> Work | None:
        """Send and receive parts of arrays, of any layout; the parts of each pair of ranks match in list order.

        Received parts are written, or added if `adds`, in the order of `receives`. Halo exchanges use it. This default
        uses `send` and `recv`.
        """
        from .pieces import by_messages

        return by_messages(self, sends, receives, adds)

    def repeated_exchange(self, sends: Pieces, receives: Pieces, adds: bool) -> Callable[[Pieces, Pieces], None] | None:
        """Return a function for blocking exchanges of other parts of equal shapes; None if it would not be faster.

        The function keeps no reference to the parts.
        """
        return None

    def empty_shared(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Make an array on each rank, in memory shared by the ranks of its node."""
        raise self._lacks("empty_shared")

    def empty_symmetric(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Make an array on each rank, in GPU memory that NCCL has registered as symmetric."""
        raise self._is_not_nccl("empty_symmetric")

    @property
    def nccl_handle(self) -> int:
        """The address of the ncclComm_t."""
        raise self._is_not_nccl("nccl_handle")

    def nccl_config(self, settings: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Return a context manager in which collectives use an ncclCollConfig_t with these members."""
        raise self._is_not_nccl("nccl_config")

    def peer_view(self, array: Any, rank: int) -> Any:
        """Return a view of another rank's part of the node-shared `array`, without communication."""
        raise self._lacks("peer_view")

    def fence(self, array: Any) -> None:
        """Make the ranks' writes to the node-shared `array` visible to all of them."""
        raise self._lacks("fence")

    def monitored_barrier(self, timeout: float, wait_all_ranks: bool) -> None:
        """Block until every rank has called it, or raise DistTimeoutError with the missing ranks."""
        raise self._lacks("monitored_barrier")

    def persistent(self, operation: str, *arguments: Any) -> PersistentWork:
        """Set up the persistent form of `operation`; `arguments` are those of its method, without `async_op`."""
        single = "send" if operation == "exchange" else operation.removesuffix("_coalesced")
        if not (self._has(operation) or self._has(single)):
            raise self._lacks(single)
        from .persistent_work import Repeated

        return Repeated(partial(getattr(self, operation), *arguments, True))

    def connect(self) -> Any:
        """Make the connections that the first operation would make; collective, for ``device_id=``.

        With ``device_id="auto"``, return the number of this rank's GPU.
        """

    def connected_on(self) -> int | None:
        """Return the number of the GPU that is connected to the other ranks' GPUs; None if there is no connection."""
        return None

    def check_batch(self, messages: list[tuple[Any, int | None, int]]) -> None:
        """Raise if one of these messages (array, peer, tag) can't start: no message of the batch has started yet."""

    def batch(self, arrays: list[Any]) -> AbstractContextManager[None]:
        """Return a context manager in which the asynchronous sends and receives of these arrays start together."""
        return nullcontext()

    def split(self, options: BackendOptions | None, color: int) -> Backend | None:
        """Return the backend of a new group of ranks of this group, or None: then it is made on demand.

        Collective over this group. Ranks with equal `color` are in one new group; ranks in no new group pass
        ``options=None``.
        """
        return None

    def close(self) -> None:
        """Free the backend's resources; called once, by every rank, when its group is destroyed."""

    def leave(self) -> None:
        """End operations in flight when all ranks have reached the program's end without destroying the group."""

    def abort(self) -> None:
        """End operations in flight within seconds, without the other ranks: the job is about to end."""

    def translate_error(self, operation: str, error: Exception) -> Exception:
        """Return the program's error for `error`, which the transport has raised in `operation`."""
        return error

    def _has(self, operation: str) -> bool:
        """Return True if a subclass overrides the method."""
        return getattr(type(self), operation) is not getattr(Backend, operation)

    def _each(self, operation: str, columns: Iterable[tuple[Any, ...]], *arguments: Any) -> Work | None:
        """Do the plain operation for the arrays of each of `columns`."""
        plain = getattr(self, operation.removesuffix("_coalesced"))
        works = [work for arrays in columns if (work := plain(*arrays, *arguments)) is not None]
        return JoinedWork(works) if works else None

    def _is_not_nccl(self, operation: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(
            f"backend {self.name!r} does not have it, NCCL has: make a group with "
            f"new_group(backend='cpu:mpi,cuda:nccl'){on_rank()}",
            operation,
        )

    def _lacks(self, operation: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(
            f"backend {self.name!r} does not have it ({type(self).__name__}.{operation} is not overridden); use a "
            f"group with another backend, for example new_group(backend='cpu:mpi'){on_rank()}",
            operation,
        )


def finished(outcome: T, step: Callable[[], None]) -> T:
    """Call `step` at the end of an operation, now or as the last part of its Work; return `outcome`."""
    if isinstance(outcome, Work):
        outcome.finish_with(step)
    else:
        step()
    return outcome
