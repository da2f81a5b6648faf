"""Operations: every operation of a group, in three steps: the fast path, the checks, the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
from numpy import ndarray

from ..errors import on_rank
from . import calls, generated
from .annotations import Array, Slices, SplitSizes
from .arrays import is_sparse
from .calls import Call
from .generated import GeneratedOperations
from .late import REDISTRIBUTION, REPRODUCIBLE_SUM, late
from .reduce_op import SUM, ReduceOp, ReduceOpLike
from .registry import OBJECTS
from .timeouts import time_to_wait
from .work import Work, asynchronous_method

if TYPE_CHECKING:
    from .persistent_work import PersistentWork


class Operations(GeneratedOperations):
    """The operations of :class:`ProcessGroup`, which gives them the dispatcher.

    `root`, `dst` and `src` are ranks of the group. A fast path does small operations in the ordinary case; the
    dispatcher passes all others, after the checks, to the backend of their arrays' device. A tool writes most of the
    methods (`generated`).
    """

    def any_device(self) -> str:
        """Return the device whose backend does operations without arrays: the host, if the group has a host backend."""
        devices = self.config.device_map
        return "cpu" if "cpu" in devices else next(iter(devices))

    # -- collectives -----------------------------------------------------------------------------

    @asynchronous_method
    def all_reduce(self, array: Array, op: ReduceOpLike = SUM, async_op: bool = False) -> Work | None:
        """See :func:`hpccomm.all_reduce`."""
        if async_op:
            if (work := self.dispatcher.fast.iall_reduce(array, op)) is not None:
                return work
        elif self.dispatcher.fast.all_reduce(array, op):
            return None
        if type(array) is not ndarray and is_sparse(array):
            from . import sparse

            call, step = sparse.all_reduce(self, self.dispatcher.backends, array, op, async_op)
            return self.dispatcher.run(call, async_op, step)
        call = generated.all_reduce(self, array, op)
        if call.arguments[-1] is ReduceOp.REPRODUCIBLE_SUM:  # checked here too, to save all others a call
            return self._reduce(call, async_op)
        return self.dispatcher.run(call, async_op)

    def _reduce(self, call: Call, async_op: bool) -> Work | None:
        step = None
        if call.arguments[-1] is ReduceOp.REPRODUCIBLE_SUM:
            step = partial(late(REPRODUCIBLE_SUM), self, call, async_op)
        return self.dispatcher.run(call, async_op, step)

    @asynchronous_method
    def all_to_all_single(
        self,
        output: Array,
        input: Array,
        output_split_sizes: SplitSizes = None,
        input_split_sizes: SplitSizes = None,
        async_op: bool = False,
    ) -> Work | None:
        """See :func:`hpccomm.all_to_all_single`."""
        if output_split_sizes is input_split_sizes is None:
            if async_op:
                if (work := self.dispatcher.fast.iall_to_all_single(output, input)) is not None:
                    return work
            elif self.dispatcher.fast.all_to_all_single(output, input):
                return None
        sizes = output_split_sizes, input_split_sizes
        return self.dispatcher.run(calls.all_to_all_single(self, output, input, *sizes), async_op)

    @asynchronous_method
    def barrier(self, async_op: bool = False) -> Work | None:
        """See :func:`hpccomm.barrier`."""
        if async_op:
            if (work := self.dispatcher.fast.ibarrier()) is not None:
                return work
        elif self.dispatcher.fast.barrier():
            return None
        return self.dispatcher.run(Call(("barrier", self.any_device(), None, ())), async_op)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """See :func:`hpccomm.monitored_barrier`."""
        seconds = time_to_wait("monitored_barrier", self.timeout if timeout is None else timeout)
        self._step("monitored_barrier", self.any_device(), seconds, bool(wait_all_ranks))

    # -- messages --------------------------------------------------------------------------------

    @asynchronous_method
    def recv(self, array: Array, src: int | None = None, tag: int = 0, async_op: bool = False) -> int | Work:
        """See :func:`hpccomm.recv` and :func:`hpccomm.irecv`; returns the sender's *group* rank, or a Work."""
        if async_op:
            if (work := self.dispatcher.fast.irecv(array, src, tag)) is not None:
                return work
        elif (sender := self.dispatcher.fast.recv(array, src, tag)) is not None:
            return sender
        call = generated.recv(self, array, src, tag, is_blocking=not async_op)
        return self.dispatcher.run(call, async_op)  # type: ignore[return-value]

    def isend(self, array: Array, dst: int, tag: int = 0) -> Work:
        """See :func:`hpccomm.isend`."""
        return self.send(array, dst, tag, async_op=True)

    def irecv(self, array: Array, src: int | None = None, tag: int = 0) -> Work:
        """See :func:`hpccomm.irecv`."""
        return self.recv(array, src, tag, async_op=True)

    @asynchronous_method
    def sendrecv(
        self, array: Array, dst: int, output: Array, src: int | None = None, tag: int = 0, recv_tag: int | None = None,
        async_op: bool = False,
    ) -> int | Work:  # fmt: skip
        """See :func:`hpccomm.sendrecv`; returns the sender's *group* rank, or a Work."""
        if async_op:
            if (work := self.dispatcher.fast.isendrecv(array, dst, output, src, tag, recv_tag)) is not None:
                return work
        elif (sender := self.dispatcher.fast.sendrecv(array, dst, output, src, tag, recv_tag)) is not None:
            return sender
        call = calls.sendrecv(self, array, dst, output, src, tag, recv_tag)
        return self.dispatcher.run(call, async_op)  # type: ignore[return-value]

    # -- layouts ---------------------------------------------------------------------------------

    @asynchronous_method
    def redistribute(
        self, output: Array, input: Array, output_box: Slices, input_box: Slices, async_op: bool = False
    ) -> Work | None:
        """See :func:`hpccomm.redistribute`."""
        plan = late(REDISTRIBUTION)("redistribute", self, output, input, output_box, input_box)
        return cast("Work | None", plan.begin(async_op))

    def redistribute_init(self, output: Array, input: Array, output_box: Slices, input_box: Slices) -> PersistentWork:
        """See :func:`hpccomm.redistribute_init`."""
        plan = late(REDISTRIBUTION)("redistribute_init", self, output, input, output_box, input_box)
        return cast("PersistentWork", plan.set_up())

    @asynchronous_method
    def exchange_sparse(
        self,
        arrays: Mapping[int, Array | tuple[Array, ...]],
        async_op: bool = False,
        names: Sequence[int] | None = None,
    ) -> Any:
        """See :func:`hpccomm.exchange_sparse`; ranks are group ranks, or their `names`."""
        if not async_op and (came := self.dispatcher.fast.exchange_sparse(arrays, names)) is not None:
            return came
        if names is not None and isinstance(arrays, Mapping):
            arrays = {self.peer("exchange_sparse", "a receiver", dst, None): each for dst, each in arrays.items()}
        given, received = calls.sparse_messages(self, arrays), dict[int, Any]()
        ranks = range(self.size) if names is None else names
        step = partial(self._exchange_sparse, given, received, ranks, async_op or self.dispatcher.timeout is not None)
        work = self.dispatcher.run(Call(("exchange_sparse", OBJECTS, received, (given,))), async_op, step)
        if not async_op:
            return received
        return _looked_after(work)

    def _exchange_sparse(
        self, given: dict[int, Any], received: dict[int, Any], names: Sequence[int], is_async: bool
    ) -> Work | None:
        has_node = not is_async and self.config.device_map.get("cpu") == "mpi"  # the same on all ranks
        if has_node and self.dispatcher.backends["cpu"].fast_path.node_exchange_sparse(given, received, names):
            return None
        transport: Any = self.dispatcher.backends[OBJECTS]
        work: Work | None = transport.exchange_sparse(given, received, names, is_async)
        return work

    # -- Python objects --------------------------------------------------------------------------

    @asynchronous_method
    def all_gather_object(self, object_list: list[Any], obj: Any, async_op: bool = False) -> Work | None:
        """See :func:`hpccomm.all_gather_object`."""
        name = "all_gather_object"
        calls.slots(self, name, "object_list", object_list)
        fill = partial(_fill, name, object_list)
        if async_op:
            return self._exchange((name, object_list, obj), dict.fromkeys(range(self.size), obj), fill)
        fill(self._step(name, OBJECTS, obj))
        return None

    @asynchronous_method
    def gather_object(
        self, obj: Any, object_gather_list: list[Any] | None = None, root: int = 0, async_op: bool = False
    ) -> Work | None:
        """See :func:`hpccomm.gather_object`."""
        name, root, gathered = "gather_object", calls.rank(self, "gather_object: root", root), object_gather_list
        if calls.has_list(self, name, "object_gather_list", gathered, "destination", root):
            calls.slots(self, name, "object_gather_list", gathered)
        slots = gathered if self.rank == root else None
        fill = partial(_fill, name, slots)
        if async_op:
            return self._exchange((name, slots, obj, root), {root: obj}, fill)
        fill(self._step(name, OBJECTS, obj, root))
        return None

    @asynchronous_method
    def broadcast_object_list(self, object_list: list[Any], root: int = 0, async_op: bool = False) -> Work | None:
        """See :func:`hpccomm.broadcast_object_list`."""
        name, root = "broadcast_object_list", calls.rank(self, "broadcast_object_list: root", root)
        objects = calls.objects(name, "object_list", object_list)
        slots = None if self.rank == root else object_list
        if async_op:
            sent = dict.fromkeys(range(self.size), objects) if self.rank == root else {}
            return self._exchange((name, object_list, objects, root), sent, lambda came: _fill(name, slots, *came))
        _fill(name, slots, self._step(name, OBJECTS, objects, root))
        return None

    @asynchronous_method
    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        root: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """See :func:`hpccomm.scatter_object_list`."""
        name, root = "scatter_object_list", calls.rank(self, "scatter_object_list: root", root)
        output = scatter_object_output_list
        if not calls.objects(name, "scatter_object_output_list", output):
            raise ValueError(f"{name}: scatter_object_output_list is empty; expected one slot{on_rank()}")
        objects = None
        if self.rank == root:  # c10d ignores the list on other ranks, and its programs pass one
            calls.has_list(self, name, "scatter_object_input_list", scatter_object_input_list, "source", root)
            calls.slots(self, name, "scatter_object_input_list", scatter_object_input_list, is_filled=False)
            objects = scatter_object_input_list
        if async_op:
            return self._exchange(
                (name, output, objects, root),
                dict(enumerate(objects or ())),
                lambda came: _fill(name, output, [*came, *output[1:]]),
            )
        _fill(name, output, [self._step(name, OBJECTS, objects, root), *output[1:]])
        return None

    @asynchronous_method
    def send_object_list(self, object_list: list[Any], dst: int, tag: int = 0, async_op: bool = False) -> Work | None:
        """See :func:`hpccomm.send_object_list`."""
        name = "send_object_list"
        objects = calls.objects(name, "object_list", object_list, is_filled=False)
        message = calls.object_message(self, name, "dst", dst, tag, async_op)
        transport: Any = self.dispatcher.backends[OBJECTS]
        send = transport.isend_object_list if async_op else transport.send_object_list
        call = Call((name, OBJECTS, object_list, (objects, *message)))
        return self.dispatcher.run(call, async_op, partial(send, objects, *message))

    @asynchronous_method
    def recv_object_list(
        self, object_list: list[Any], src: int | None = None, tag: int = 0, async_op: bool = False
    ) -> Any:
        """See :func:`hpccomm.recv_object_list`; returns the sender's *group* rank, or a Work."""
        name = "recv_object_list"
        calls.objects(name, "object_list", object_list)
        message = calls.object_message(self, name, "src", src, tag, async_op)
        if not async_op:
            objects, sender = self._step(name, OBJECTS, *message)
            _fill(name, object_list, objects)
            return sender
        transport: Any = self.dispatcher.backends[OBJECTS]
        step = partial(transport.irecv_object_list, partial(_fill, name, object_list), *message)
        return _looked_after(self.dispatcher.run(Call((name, OBJECTS, object_list, message)), True, step))

    # -- node-shared arrays ----------------------------------------------------------------------

    def empty_shared(self, shape: int | tuple[int, ...], dtype: Any = float) -> np.ndarray:
        """See :func:`hpccomm.empty_shared`."""
        array: np.ndarray = self._step("empty_shared", "cpu", *calls.new_array("empty_shared", shape, dtype))
        return array

    def empty_symmetric(self, shape: int | tuple[int, ...], dtype: Any = float) -> Any:
        """See :func:`hpccomm.empty_symmetric`."""
        return self._step("empty_symmetric", "cuda", *calls.new_array("empty_symmetric", shape, dtype))

    def peer_view(self, array: np.ndarray, rank: int) -> np.ndarray:
        """See :func:`hpccomm.peer_view`; `rank` is a group rank. It does not communicate and has no number."""
        view: np.ndarray = self.dispatcher.backends["cpu"].peer_view(array, calls.rank(self, "peer_view: rank", rank))
        return view

    def fence(self, array: np.ndarray) -> None:
        """See :func:`hpccomm.fence`."""
        self._step("fence", "cpu", array)

    def _step(self, name: str, device: str, *arguments: Any) -> Any:
        """Do an operation without an asynchronous form."""
        step = partial(getattr(self.dispatcher.backends[device], name), *arguments)
        return self.dispatcher.run(Call((name, device, None, arguments)), False, step)

    def _exchange(
        self, call: tuple[Any, ...], objects: dict[int, Any], fill: Callable[[list[Any]], None]
    ) -> Work | None:
        """Begin the asynchronous form of an object collective; `call` has its name, its result and its arguments."""
        name, result, *arguments = call
        transport: Any = self.dispatcher.backends[OBJECTS]
        step = partial(transport.exchange_objects, name, objects, fill)
        return self.dispatcher.run(Call((name, OBJECTS, result, tuple(arguments))), True, step)


def _looked_after(work: Work | None) -> Work | None:
    """Return the Work; if other ranks may wait for its progress, let a thread poll it."""
    if work is not None and work.progress.needs_polling:
        from .progress import drive

        drive(work)
    return work


class NotLoaded:
    """The substitute for a received object that can't be unpickled."""

    sender = -1  # its group rank, set by the transport

    def __init__(self, error: Exception) -> None:
        self._error = error

    def raise_for(self, operation: str) -> NoReturn:
        """Raise the error that the program should see."""
        raise TypeError(
            f"{operation}: what rank {self.sender} of the group has sent can't be unpickled "
            f"({type(self._error).__name__}: {self._error}); its class has to be importable here and to have a "
            f"__reduce__ that makes it again, or send what it holds as arrays or a dict{on_rank()}"
        ) from self._error


def _fill(operation: str, slots: list[Any] | None, objects: list[Any] | NotLoaded) -> None:
    """Fill a list with the received objects; for one that can't be loaded, keep the old value and raise an error."""
    if slots is None:  # this rank receives nothing
        return
    if isinstance(objects, NotLoaded):
        objects.raise_for(operation)
    if len(slots) != len(objects):
        raise ValueError(
            f"{operation}: object_list has {len(slots)} slots, but {len(objects)} objects were sent{on_rank()}"
        )
    slots[:] = [slot if isinstance(each, NotLoaded) else each for slot, each in zip(slots, objects)]
    for each in objects:
        if isinstance(each, NotLoaded):
            each.raise_for(operation)
