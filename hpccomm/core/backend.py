"""Backend: the class that a transport subclasses; FastPath: a short way round the checks, for small operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..errors import UnsupportedOperationError, on_rank
from .work import JoinedWork, Work

if TYPE_CHECKING:
    from .options import BackendOptions
    from .persistent_work import PersistentWork
    from .reduce_op import ReduceOp

T = TypeVar("T")
Pieces: TypeAlias = list[tuple[int, Any]]  # a rank, and a part of an array, that goes there or comes from there


class FastPath:
    """Blocking operations on NumPy arrays in the ordinary case, for a backend whose calls take about a microsecond.

    The group asks here before it checks anything. A method does the whole operation and returns True (a receive: the
    rank the message came from; an asynchronous operation: its Work), or does nothing and returns False (None): then the
    operation goes through the checks to the backend. This class leaves all of them to the backend; a group asks it
    while the real one steps aside.
    """

    is_open = False  # not in this class
    node_part = 0  # bytes that a rank may put into memory of the node at once; 0 while it has none with others
    dispatcher: Any
    count = 0  # collectives done; they are numbered with all others
    messages = 0  # messages done, likewise
    passed_collectives = passed_messages = 0  # those that did not take it: the dispatcher's numbers
    place = 0  # in the ring of the compiled extension, where that remembers the last operations

    def attach(self, dispatcher: Any) -> None:
        """Belong to a group's dispatcher: it identifies errors, and follows what is in flight."""
        self.dispatcher = dispatcher

    def _not_done(self, *_: Any, **__: Any) -> bool:
        return False

    def _no_sender(self, *_: Any, **__: Any) -> int | None:
        return None

    def _no_work(self, *_: Any, **__: Any) -> Work | None:
        return None

    def batch(self, messages: Any, kind: type, irecv: Any) -> list[Work] | None:
        """Begin the messages of a list of P2POp of the world; or return None."""
        return None

    def all_to_all_sparse(self, arrays: Any, names: Sequence[int] | None) -> dict[int, Any] | None:
        """Do an exchange of arrays by `names` of ranks (None: their numbers), and return what has come; or None."""
        return None

    def node_all_to_all_sparse(self, arrays: Any, received: dict[int, Any], names: Sequence[int]) -> bool:
        """Do it with arguments that have gone through the checks, in memory of the node; return whether it has."""
        return False

    # each takes the arguments of Backend's method, without `async_op`
    broadcast = all_reduce = reduce = all_gather_single = reduce_scatter_single = all_to_all_single = _not_done
    barrier = send = scan = exscan = all_gather = gather = scatter = reduce_scatter = all_to_all = _not_done
    all_reduce_coalesced = broadcast_coalesced = all_gather_coalesced = _not_done
    all_gather_single_coalesced = reduce_scatter_single_coalesced = _not_done
    recv = sendrecv = _no_sender
    ibroadcast = iall_reduce = ibarrier = isend = irecv = _no_work


class GPUFastPath:
    """Operations on GPU arrays in the ordinary case; the group asks here where the fast path of the host has not.

    A method does the whole operation and returns True, or its Work with `async_op`; or it does nothing and returns
    False. This class leaves all of them to the backend.
    """

    dispatcher: Any

    def attach(self, dispatcher: Any) -> None:
        """Belong to a group's dispatcher, which counts the operations."""
        self.dispatcher = dispatcher

    def _not_done(self, *_: Any) -> Any:
        return False

    # each takes the arguments of Backend's method
    broadcast = all_reduce = reduce = all_gather_single = reduce_scatter_single = send = recv = sendrecv = _not_done


class Backend:
    """A transport for the arrays of one device; subclass it and override the operations it has.

    The group has checked every argument before it calls a backend: arrays are of this backend's device
    (host arrays come as ``numpy.ndarray``, possibly not contiguous), writable where they are written, their
    dtypes, sizes and list lengths fit, `op` suits the dtype, and `root`, `dst`, `src` are ranks of this group.

    With ``async_op=True`` an operation returns a :class:`Work` (or None, if it has completed already). With
    ``async_op=False`` it returns None after completion (or a Work, which the group waits for); a `recv` returns the
    rank the message came from.

    What is not overridden raises UnsupportedOperationError, but for two forms that are made of others: a coalesced
    operation is the plain one for each array, and a persistent one is an asynchronous one at each start.
    In :class:`BackendOverMPI` everything else is MPI's.

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
    exchange_tag = 0  # of the messages of `exchange`, where it is made of them
    fast_path = FastPath()  # of a backend of host arrays
    gpu_fast_path = GPUFastPath()  # of a backend of GPU arrays
    last_on_gpu: Work | None = None  # a blocking operation that a GPU may still be at, for the watchdog

    MPI, GLOO, NCCL = "mpi", "gloo", "nccl"  # c10d's names of backends

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @staticmethod
    def register_backend(
        name: str, func: Any, extended_api: bool = False, devices: str | Sequence[str] | None = None
    ) -> None:
        """Do what :func:`hpccomm.register_backend` does, with c10d's order of arguments."""
        from .registry import register_backend  # which knows what a backend is

        register_backend(name, func, devices=devices, extended_api=extended_api)

    def broadcast(self, array: Any, root: int, async_op: bool) -> Work | None:
        """Copy `array` of rank `root` into `array` of every rank."""
        raise self._lacks("broadcast")

    def all_reduce(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        """Reduce `array` over the ranks, in place."""
        raise self._lacks("all_reduce")

    def reduce(self, array: Any, root: int, op: ReduceOp, async_op: bool) -> Work | None:
        """Reduce `array` over the ranks, in place on rank `root`; the others only read theirs."""
        raise self._lacks("reduce")

    def scan(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        """Reduce `array` over ranks 0..this one, in place."""
        raise self._lacks("scan")

    def exscan(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        """Reduce `array` over the ranks before this one, in place; rank 0's stays as it is."""
        raise self._lacks("exscan")

    def all_gather(self, outputs: list[Any], array: Any, async_op: bool) -> Work | None:
        """Copy `array` of rank r into ``outputs[r]`` of every rank; sizes may differ between ranks."""
        raise self._lacks("all_gather")

    def all_gather_single(self, output: Any, array: Any, async_op: bool) -> Work | None:
        """Copy the `array` of every rank, in rank order, into `output`, which is `size` times as large."""
        raise self._lacks("all_gather_single")

    def gather(self, array: Any, outputs: list[Any] | None, root: int, async_op: bool) -> Work | None:
        """Copy `array` of rank r into ``outputs[r]`` of rank `root`; `outputs` is None elsewhere."""
        raise self._lacks("gather")

    def scatter(self, output: Any, inputs: list[Any] | None, root: int, async_op: bool) -> Work | None:
        """Copy ``inputs[r]`` of rank `root` into `output` of rank r; `inputs` is None elsewhere."""
        raise self._lacks("scatter")

    def reduce_scatter(self, output: Any, inputs: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        """Reduce ``inputs[r]`` over the ranks into `output` of rank r."""
        raise self._lacks("reduce_scatter")

    def reduce_scatter_single(self, output: Any, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        """Reduce the r-th equal part of `array` over the ranks into `output` of rank r."""
        raise self._lacks("reduce_scatter_single")

    def all_to_all(self, outputs: list[Any], inputs: list[Any], async_op: bool) -> Work | None:
        """Copy ``inputs[r]`` of rank s into ``outputs[s]`` of rank r."""
        raise self._lacks("all_to_all")

    def all_to_all_single(
        self, output: Any, array: Any, output_counts: list[int] | None, input_counts: list[int] | None, async_op: bool
    ) -> Work | None:
        """Send ``input_counts[r]`` elements of `array` to each rank r, in order; receive likewise into `output`.

        Both counts are None where the program gave no split sizes: then the parts are equal.
        """
        raise self._lacks("all_to_all_single")

    def all_reduce_coalesced(self, arrays: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        """Reduce each of `arrays` in place, all in one message per dtype."""
        return self._each("all_reduce_coalesced", zip(arrays), op, async_op)

    def broadcast_coalesced(self, arrays: list[Any], root: int, async_op: bool) -> Work | None:
        """Broadcast all of `arrays` in one message."""
        return self._each("broadcast_coalesced", zip(arrays), root, async_op)

    def all_gather_coalesced(self, output_lists: list[list[Any]], arrays: list[Any], async_op: bool) -> Work | None:
        """Copy ``arrays[i]`` of rank r into ``output_lists[r][i]`` of every rank, in one message."""
        from .overlap import all_unaliased

        sent = all_unaliased(arrays, list(chain(*output_lists)))
        return self._each("all_gather_coalesced", zip(map(list, zip(*output_lists)), sent), async_op)

    def all_gather_single_coalesced(self, outputs: list[Any], arrays: list[Any], async_op: bool) -> Work | None:
        """Do all_gather_single for each pair of `outputs` and `arrays`, in one message."""
        from .overlap import all_unaliased

        return self._each("all_gather_single_coalesced", zip(outputs, all_unaliased(arrays, outputs)), async_op)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Any], arrays: list[Any], op: ReduceOp, async_op: bool
    ) -> Work | None:
        """Do reduce_scatter_single for each pair of `outputs` and `arrays`, in one message per dtype."""
        from .overlap import all_unaliased

        pairs = zip(outputs, all_unaliased(arrays, outputs))
        return self._each("reduce_scatter_single_coalesced", pairs, op, async_op)

    def send(self, array: Any, dst: int, tag: int, async_op: bool) -> Work | None:
        """Send `array` to rank `dst`."""
        raise self._lacks("send")

    def recv(self, array: Any, src: int | None, tag: int, async_op: bool) -> Work | int | None:
        """Receive into `array` from rank `src` (None: from any); without `async_op` return the sender's rank."""
        raise self._lacks("recv")

    def exchange(self, sends: Pieces, receives: Pieces, adds: bool, async_op: bool) -> Work | None:
        """Send parts of arrays, of any layout, to ranks, and receive others, in the order of both lists for each pair.

        What is received is written, or with `adds` added, in the order of `receives`. Halos are exchanged so. Here it
        is made of messages.
        """
        from .pieces import by_messages

        return by_messages(self, sends, receives, adds)

    def repeated_exchange(self, sends: Pieces, receives: Pieces, adds: bool) -> Callable[[Pieces, Pieces], None] | None:
        """Return a function that does blocking exchanges of other parts of these shapes; None if it gains nothing.

        It keeps no part.
        """
        return None

    def sendrecv(
        self, array: Any, dst: int, output: Any, src: int | None, tag: int, recv_tag: int, async_op: bool
    ) -> Work | int | None:
        """Send `array` to `dst` and receive `output` from `src` at once; returns as `recv`."""
        raise self._lacks("sendrecv")

    def barrier(self, async_op: bool) -> Work | None:
        """Return when every rank has called it."""
        raise self._lacks("barrier")

    def empty_shared(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Make an array on each rank, in memory that the ranks of its node share."""
        raise self._lacks("empty_shared")

    def empty_symmetric(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Make an array on each rank, in memory of the GPU that NCCL has registered with those of the others."""
        raise self._is_not_nccl("empty_symmetric")

    @property
    def nccl_handle(self) -> int:
        """The address of the ncclComm_t."""
        raise self._is_not_nccl("nccl_handle")

    def nccl_config(self, settings: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Return a context in which collectives are called with an ncclCollConfig_t of these members."""
        raise self._is_not_nccl("nccl_config")

    def peer_view(self, array: Any, rank: int) -> Any:
        """Return a view of the part of the node-shared `array` on another rank of the node, without communication."""
        raise self._lacks("peer_view")

    def fence(self, array: Any) -> None:
        """Make the ranks' writes to the node-shared `array` visible to all of them."""
        raise self._lacks("fence")

    def monitored_barrier(self, timeout: float, wait_all_ranks: bool) -> None:
        """Return when every rank has called it, or raise DistTimeoutError naming those that have not."""
        raise self._lacks("monitored_barrier")

    def persistent(self, operation: str, *arguments: Any) -> PersistentWork:
        """Set up the operation of that name; `arguments` are those of its method, without `async_op`."""
        single = "send" if operation == "exchange" else operation.removesuffix("_coalesced")
        if not (self._has(operation) or self._has(single)):
            raise self._lacks(single)
        from .persistent_work import Repeated

        return Repeated(partial(getattr(self, operation), *arguments, True))

    def connect(self) -> Any:
        """Make the connections that the first operation would make; called by every rank (``device_id=``).

        With ``device_id="auto"``, return the number of this rank's GPU.
        """

    def connected_on(self) -> int | None:
        """Return the number of the GPU with which this rank is connected to the others; None where it is not."""
        return None

    def batch(self, arrays: list[Any]) -> AbstractContextManager[None]:
        """Return a context manager: the asynchronous sends and receives of these arrays inside it start together."""
        return nullcontext()

    def split(self, options: BackendOptions | None, color: int) -> Backend | None:
        """Return the backend of a group made of ranks of this one, or None to have it made when needed.

        Every rank of this group calls it; those that are in no new group with ``options=None``. The ranks with the same
        `color` are in the same new group.
        """
        return None

    def close(self) -> None:
        """Free what the backend holds; called once, by every rank, when its group is destroyed."""

    def leave(self) -> None:
        """End what is in flight at the end of a program that has not destroyed the group; every rank has got there."""

    def abort(self) -> None:
        """End what is in flight, without the other ranks, and within seconds: the job is about to end."""

    def translate_error(self, operation: str, error: Exception) -> Exception:
        """Return the error for the program in the place of `error`, which the transport has raised in `operation`."""
        return error

    def _has(self, operation: str) -> bool:
        """Return True if a subclass overrides the method."""
        return getattr(type(self), operation) is not getattr(Backend, operation)

    def _each(self, operation: str, columns: Iterable[tuple[Any, ...]], *arguments: Any) -> Work | None:
        """Do a coalesced operation by the plain one, for the arrays of each of `columns`."""
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
    """Do `step` at the end of an operation, now or as the last part of its Work; return the outcome."""
    if isinstance(outcome, Work):
        outcome.finish_with(step)
    else:
        step()
    return outcome
