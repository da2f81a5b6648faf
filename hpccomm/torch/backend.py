"""HPCCommBackend and HPCCommProcessGroup: translate c10d's calls to an hpccomm ProcessGroup with the same ranks."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _distributed_c10d
from torch._C._autograd import _profiler_enabled as profiler_enabled

from ..core.group import ProcessGroup
from ..core.reduce_op import ReduceOp
from ..core.work import CompletedWork, Work
from ..errors import DistTimeoutError, HpccommWarning
from .arrays import as_array, as_arrays, as_flat_array, as_scipy, as_torch
from .dynamo import not_compiled
from .start import NAME, devices, subgroup, with_thread
from .streams import THERE_ARE_GPUS, gpu_of, on_torchs_stream
from .work import PendingGPUWork, PendingWork

c10d: Any = _distributed_c10d  # its stubs differ from its classes
SUM = c10d.ReduceOp.SUM
OPS = {op.value: getattr(ReduceOp, name, name) for name, op in c10d.ReduceOp.RedOpType.__members__.items()}
ALIVE: dict[ProcessGroup, list[Calls]] = {}  # torch keeps only the C++ object alive, but that needs this one


@not_compiled
class Calls:
    """The methods that torch calls on both a Backend and a ProcessGroup; `group` is hpccomm's.

    hpccomm checks dtypes, layouts and reductions. Every operation is asynchronous, even if torch waits for it: torch's
    own code (`Join`) makes the same call blocking on one rank and asynchronous on another, and MPI does not match a
    blocking call with a non-blocking one.
    """

    group: ProcessGroup

    def _adapt(self, group: ProcessGroup) -> None:
        self.group = group
        ALIVE.setdefault(group, []).append(self)

    # -- one tensor ------------------------------------------------------------------------------

    def _call(
        self, opts: Any, result: Any, operation: Callable[..., Work | None], *arguments: Any
    ) -> PendingWork | None:
        if opts.asyncOp:
            return started(result, operation, *arguments)
        if profiler_enabled():
            started(result, operation, *arguments).wait()
        else:
            operation(*arguments, True).wait()  # type: ignore[union-attr]  # it is asynchronous
        return None

    @on_torchs_stream
    def allreduce(self, tensors: list[Any], opts: Any) -> PendingWork | None:
        (tensor,) = tensors
        if tensor.is_sparse:
            return self.allreduce_sparse(tensors, opts)
        return self._call(opts, tensors, self.group.all_reduce, as_array(tensor), op_of(opts))

    @on_torchs_stream
    def allreduce_sparse(self, tensors: list[Any], opts: Any) -> PendingWork | None:
        (tensor,) = tensors
        matrix = as_scipy(tensor)
        self.group.all_reduce(matrix, op_of(opts))
        with torch.no_grad():
            tensor.copy_(as_torch(matrix, tensor))
        return pending(CompletedWork(), tensors) if opts.asyncOp else None

    @on_torchs_stream
    def broadcast(self, tensors: list[Any], opts: Any) -> PendingWork | None:
        return self._call(opts, tensors, self.group.broadcast, as_array(tensors[opts.rootTensor]), opts.rootRank)

    @on_torchs_stream
    def reduce(self, tensors: list[Any], opts: Any) -> PendingWork | None:
        array = as_array(tensors[opts.rootTensor])
        return self._call(opts, tensors, self.group.reduce, array, opts.rootRank, op_of(opts))

    # -- one tensor from or to each rank -----------------------------------------------------------

    @on_torchs_stream
    def allgather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any) -> PendingWork | None:
        return self._call(opts, outputs, self.group.all_gather, as_arrays(outputs[0]), as_array(inputs[0]))

    @on_torchs_stream
    def all_gather_single(self, output: Any, input: Any, opts: Any) -> PendingWork | None:
        return self._call(opts, [output], self.group.all_gather_single, as_flat_array(output), as_flat_array(input))

    @on_torchs_stream
    def gather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any) -> PendingWork | None:
        arrays = as_arrays(outputs[0]) if outputs else None
        return self._call(opts, outputs, self.group.gather, as_array(inputs[0]), arrays, opts.rootRank)

    @on_torchs_stream
    def gather_single(self, output: Any, input: Any, opts: Any) -> PendingWork | None:
        arrays = None
        if opts.rootRank == self.group.rank:  # torch gives other ranks an empty output
            arrays = as_arrays(output.view(self.group.size, -1 if output.numel() else 0).unbind())
        return self._call(opts, [output], self.group.gather, as_flat_array(input), arrays, opts.rootRank)

    @on_torchs_stream
    def scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any) -> PendingWork | None:
        arrays = as_arrays(inputs[0]) if inputs else None
        return self._call(opts, outputs, self.group.scatter, as_array(outputs[0]), arrays, opts.rootRank)

    @on_torchs_stream
    def reduce_scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any) -> PendingWork | None:
        arrays = as_array(outputs[0]), as_arrays(inputs[0])
        return self._call(opts, outputs, self.group.reduce_scatter, *arrays, op_of(opts))

    @on_torchs_stream
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> PendingWork | None:
        arrays = as_flat_array(output), as_flat_array(input)
        return self._call(opts, [output], self.group.reduce_scatter_single, *arrays, op_of(opts))

    @on_torchs_stream
    def alltoall(self, outputs: list[Any], inputs: list[Any], opts: Any) -> PendingWork | None:
        return self._call(opts, outputs, self.group.all_to_all, as_arrays(outputs), as_arrays(inputs))

    @on_torchs_stream
    def all_to_all_single(
        self, output: Any, input: Any, output_splits: list[int], input_splits: list[int], opts: Any
    ) -> PendingWork | None:
        arguments = as_array(output), as_array(input), output_splits or None, input_splits or None
        return self._call(opts, [output], self.group.all_to_all_single, *arguments)

    # -- many tensors ------------------------------------------------------------------------------

    @on_torchs_stream
    def allreduce_coalesced(self, tensors: list[Any], opts: Any) -> PendingWork | None:
        return self._call(opts, tensors, self.group.all_reduce_coalesced, as_arrays(tensors), op_of(opts))

    @on_torchs_stream
    def allgather_coalesced(self, outputs: list[list[Any]], inputs: list[Any], opts: Any) -> PendingWork | None:
        arrays = [as_arrays(each) for each in outputs], as_arrays(inputs)
        return self._call(opts, outputs, self.group.all_gather_coalesced, *arrays)

    @on_torchs_stream
    def all_gather_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any) -> PendingWork | None:
        arrays = [as_flat_array(each) for each in outputs], [as_flat_array(each) for each in inputs]
        return self._call(opts, outputs, self.group.all_gather_single_coalesced, *arrays)

    @on_torchs_stream
    def reduce_scatter_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any) -> PendingWork | None:
        arrays = [as_flat_array(each) for each in outputs], [as_flat_array(each) for each in inputs]
        return self._call(opts, outputs, self.group.reduce_scatter_single_coalesced, *arrays, op_of(opts))

    # -- messages ----------------------------------------------------------------------------------

    @on_torchs_stream
    def send(self, tensors: list[Any], dst: int, tag: int) -> PendingWork | None:
        return started(tensors, self.group.send, as_array(tensors[0]), dst, tag)

    @on_torchs_stream
    def recv(self, tensors: list[Any], src: int | None, tag: int) -> PendingWork | None:
        return started(tensors, self.group.recv, as_array(tensors[0]), src, tag)

    @on_torchs_stream
    def recv_anysource(self, tensors: list[Any], tag: int) -> PendingWork | None:
        return self.recv(tensors, None, tag)

    # -- the rest ----------------------------------------------------------------------------------

    def barrier(self, opts: Any) -> PendingWork | None:
        return self._call(opts, [], self.group.barrier)

    def getBackendName(self) -> str:
        return NAME

    def _get_sequence_number_for_group(self) -> int:
        return self.group.sequence_number

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: hpccomm's numbers are the same on every rank from the beginning."""

    def shutdown(self) -> None:
        """Destroy the group together with the other ranks; if that times out, abort it on this rank."""
        try:
            self.group.destroy()
        except DistTimeoutError as error:
            warnings.warn(f"{error}; the group is given up", HpccommWarning, stacklevel=3)
            self.abort()
        ALIVE.pop(self.group, None)

    def abort(self) -> None:
        """Give up the group without the other ranks; operations in flight fail, unless they are inside MPI."""
        if not self.group.is_destroyed:
            for work in list(self.group.dispatcher.in_flight):
                with contextlib.suppress(Exception):  # only receives can be cancelled
                    work.abort()
            self.group.give_up((), "has been aborted by torch.distributed; make it again")
        ALIVE.pop(self.group, None)


@not_compiled
class HPCCommBackend(Calls, c10d.Backend):
    """The backend of some devices of a torch group, "cpu:hpccomm,cuda:nccl".

    torch.distributed calls it through C++, and wraps its Works: only `wait` and `get_future` reach hpccomm (torch 2.14:
    PyWorkHolder).
    """

    # torch reads these names; c10d.Backend's own properties would call back
    supports_splitting = True
    supports_coalescing = supports_shrinking = False
    supports_time_estimate = supports_reconfigure = supports_window = False

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.rank, group.size)
        self._adapt(group)

    @property
    def options(self) -> Any:
        """The options that torch passes to `split`, unless the program has its own."""
        return c10d.Backend.Options(NAME, self.group.timeout)

    def split(self, store: Any, ranks: list[int], options: Any) -> HPCCommBackend:
        """Return the backend of a new group of some of this group's ranks."""
        name = options.group_name or f"{self.group.name}:{ranks}"
        return HPCCommBackend(with_thread(subgroup(self.group.comm, ranks, name, options._timeout)))


class HPCCommProcessGroup(Calls, c10d.ProcessGroup):
    """A torch group whose devices are all served by hpccomm; torch.distributed calls it without C++ in between."""

    def __init__(self, store: Any, group: ProcessGroup) -> None:
        super().__init__(store, group.rank, group.size)
        self._adapt(group)
        backend = HPCCommBackend(group)  # for programs that ask for a device's backend
        for device in devices():
            self._register_backend(torch.device(device), c10d.ProcessGroup.BackendType.CUSTOM, backend)
        self._set_default_backend(c10d.ProcessGroup.BackendType.CUSTOM)


def _overloaded(name: str) -> Callable[..., Any]:
    """Return a method that passes calls without options, such as ``allreduce(tensor)``, to C++'s overloads."""
    ours, theirs = getattr(Calls, name), getattr(c10d.ProcessGroup, name)

    def called(self: Any, *arguments: Any, **options: Any) -> Any:
        if arguments and type(arguments[-1]).__name__.endswith("Options"):
            return ours(self, *arguments)
        if not arguments and "opts" in options:
            return ours(self, **options)
        return theirs(self, *arguments, **options)

    return functools.wraps(ours)(called)


for each in ("allreduce", "broadcast", "reduce", "allgather", "gather", "scatter", "reduce_scatter", "barrier"):
    setattr(HPCCommProcessGroup, each, _overloaded(each))
not_compiled(HPCCommProcessGroup)


def started(result: Any, operation: Callable[..., Any], *arguments: Any) -> PendingWork:
    """Start an operation; torch.profiler shows it as an event, such as "hpccomm:all_reduce", until it is done."""
    if not profiler_enabled():
        return pending(operation(*arguments, True), result)
    with torch.profiler.record_function(f"{NAME}:{operation.__name__}") as event:
        work = pending(operation(*arguments, True), result)
        work.profiled = event._call_end_callbacks_on_future(work.get_future())  # instead of the end of `with`
    return work


def pending(work: Work, result: Any) -> PendingWork:
    """Return c10d's Work for an operation in flight."""
    device = gpu_of(result) if THERE_ARE_GPUS else None
    return PendingWork(work, result) if device is None else PendingGPUWork(work, result, device)


def op_of(opts: Any) -> Any:
    """Return hpccomm's reduction, or the name of an unknown one."""
    op = opts.reduceOp
    return ReduceOp.SUM if op == SUM else OPS[op.op.value]  # a comparison takes 0.1 us, a name 0.6 us
