"""HPCCommBackend: c10d's calls, handed to a ProcessGroup of the same ranks, which checks them and does the work."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch._C import _distributed_c10d

from ..core.group import ProcessGroup
from ..core.reduce_op import ReduceOp
from ..core.work import CompletedWork, Work
from ..errors import DistTimeoutError
from .start import DEVICES, NAME, subgroup
from .streams import is_on_gpu, on_torchs_stream
from .work import PendingGPUWork, PendingWork

c10d: Any = _distributed_c10d  # its stubs and its classes differ
SUM = c10d.ReduceOp.SUM
ALIVE: dict[ProcessGroup, list[Calls]] = {}  # torch keeps the half in C++ only, which would do nothing without this one


class Calls:
    """What torch calls, of a Backend and of a ProcessGroup alike, on `group`, hpccomm's.

    Tensors of contiguous host memory are handed on as they are. Every rule, of dtypes, layouts and reductions, is
    hpccomm's. Where the group's time-outs raise, each operation is asynchronous, also those that torch waits for: a
    blocking call of MPI can't be interrupted.
    """

    group: ProcessGroup
    _always_async: bool

    def _stands_on(self, group: ProcessGroup) -> None:
        self.group = group
        self._always_async = group.on_timeout == "raise"
        ALIVE.setdefault(group, []).append(self)

    # -- one tensor ------------------------------------------------------------------------------

    @on_torchs_stream
    def allreduce(self, tensors: list[Any], opts: Any) -> PendingWork | None:
        (tensor,) = tensors
        if tensor.is_sparse:
            return self.allreduce_sparse(tensors, opts)
        return ended(self.group.all_reduce(seen(tensor), op_of(opts), opts.asyncOp or self._always_async), tensors)

    @on_torchs_stream
    def allreduce_sparse(self, tensors: list[Any], opts: Any) -> PendingWork | None:
        (tensor,) = tensors
        matrix = _as_scipy(tensor)
        self.group.all_reduce(matrix, op_of(opts))
        tensor.copy_(_as_torch(matrix, tensor))
        return ended(CompletedWork() if opts.asyncOp else None, tensors)

    @on_torchs_stream
    def broadcast(self, tensors: list[Any], opts: Any) -> PendingWork | None:
        array = seen(tensors[opts.rootTensor])
        return ended(self.group.broadcast(array, opts.rootRank, opts.asyncOp or self._always_async), tensors)

    @on_torchs_stream
    def reduce(self, tensors: list[Any], opts: Any) -> PendingWork | None:
        array = seen(tensors[opts.rootTensor])
        return ended(self.group.reduce(array, opts.rootRank, op_of(opts), opts.asyncOp or self._always_async), tensors)

    # -- one tensor from or to each rank -----------------------------------------------------------

    @on_torchs_stream
    def allgather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any) -> PendingWork | None:
        return ended(
            self.group.all_gather(all_seen(outputs[0]), seen(inputs[0]), opts.asyncOp or self._always_async), outputs
        )

    @on_torchs_stream
    def all_gather_single(self, output: Any, input: Any, opts: Any) -> PendingWork | None:
        work = self.group.all_gather_single(flat(output), flat(input), opts.asyncOp or self._always_async)
        return ended(work, [output])

    @on_torchs_stream
    def gather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any) -> PendingWork | None:
        to = all_seen(outputs[0]) if outputs else None
        return ended(self.group.gather(seen(inputs[0]), to, opts.rootRank, opts.asyncOp or self._always_async), outputs)

    @on_torchs_stream
    def gather_single(self, output: Any, input: Any, opts: Any) -> PendingWork | None:
        to = None if output is None else list(seen(output).reshape(self.group.size, -1))
        work = self.group.gather(flat(input), to, opts.rootRank, opts.asyncOp or self._always_async)
        return ended(work, [output])

    @on_torchs_stream
    def scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any) -> PendingWork | None:
        parts = all_seen(inputs[0]) if inputs else None
        return ended(
            self.group.scatter(seen(outputs[0]), parts, opts.rootRank, opts.asyncOp or self._always_async), outputs
        )

    @on_torchs_stream
    def reduce_scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any) -> PendingWork | None:
        work = self.group.reduce_scatter(
            seen(outputs[0]), all_seen(inputs[0]), op_of(opts), opts.asyncOp or self._always_async
        )
        return ended(work, outputs)

    @on_torchs_stream
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> PendingWork | None:
        work = self.group.reduce_scatter_single(
            flat(output), flat(input), op_of(opts), opts.asyncOp or self._always_async
        )
        return ended(work, [output])

    @on_torchs_stream
    def alltoall(self, outputs: list[Any], inputs: list[Any], opts: Any) -> PendingWork | None:
        return ended(
            self.group.all_to_all(all_seen(outputs), all_seen(inputs), opts.asyncOp or self._always_async), outputs
        )

    @on_torchs_stream
    def all_to_all_single(
        self, output: Any, input: Any, output_splits: list[int], input_splits: list[int], opts: Any
    ) -> PendingWork | None:
        splits = output_splits or None, input_splits or None
        return ended(
            self.group.all_to_all_single(seen(output), seen(input), *splits, opts.asyncOp or self._always_async),
            [output],
        )

    # -- many tensors ------------------------------------------------------------------------------

    @on_torchs_stream
    def allreduce_coalesced(self, tensors: list[Any], opts: Any) -> PendingWork | None:
        return ended(
            self.group.all_reduce_coalesced(all_seen(tensors), op_of(opts), opts.asyncOp or self._always_async), tensors
        )

    @on_torchs_stream
    def allgather_coalesced(self, outputs: list[list[Any]], inputs: list[Any], opts: Any) -> PendingWork | None:
        lists = [all_seen(each) for each in outputs]
        return ended(
            self.group.all_gather_coalesced(lists, all_seen(inputs), opts.asyncOp or self._always_async), outputs
        )

    @on_torchs_stream
    def all_gather_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any) -> PendingWork | None:
        arrays = [flat(each) for each in outputs], [flat(each) for each in inputs]
        return ended(self.group.all_gather_single_coalesced(*arrays, opts.asyncOp or self._always_async), outputs)

    @on_torchs_stream
    def reduce_scatter_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any) -> PendingWork | None:
        arrays = [flat(each) for each in outputs], [flat(each) for each in inputs]
        work = self.group.reduce_scatter_single_coalesced(*arrays, op_of(opts), opts.asyncOp or self._always_async)
        return ended(work, outputs)

    # -- messages ----------------------------------------------------------------------------------

    @on_torchs_stream
    def send(self, tensors: list[Any], dst: int, tag: int) -> PendingWork | None:
        return ended(self.group.send(seen(tensors[0]), dst, tag, async_op=True), tensors)

    @on_torchs_stream
    def recv(self, tensors: list[Any], src: int, tag: int) -> PendingWork | None:
        return ended(self.group.recv(seen(tensors[0]), src, tag, async_op=True), tensors)

    @on_torchs_stream
    def recv_anysource(self, tensors: list[Any], tag: int) -> PendingWork | None:
        return ended(self.group.recv(seen(tensors[0]), None, tag, async_op=True), tensors)

    # -- the rest ----------------------------------------------------------------------------------

    def barrier(self, opts: Any) -> PendingWork | None:
        return ended(self.group.barrier(opts.asyncOp or self._always_async), [])

    def getBackendName(self) -> str:
        return NAME

    def _get_sequence_number_for_group(self) -> int:
        return self.group.sequence_number

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: hpccomm counts alike on every rank from the beginning."""

    def shutdown(self) -> None:
        """Destroy the group with the other ranks; let go of it without them if something never ends."""
        try:
            self.group.destroy()
        except DistTimeoutError as error:
            warnings.warn(f"{error}; the group is given up", RuntimeWarning, stacklevel=3)
            self.abort()
        ALIVE.pop(self.group, None)

    def abort(self) -> None:
        """Let go of the group without the other ranks: what is in flight ends with an error, except in MPI itself."""
        if not self.group.is_destroyed:
            for work in list(self.group.door.in_flight):
                with contextlib.suppress(Exception):  # only receives can be taken back
                    work.abort()
            self.group.give_up((), "has been aborted by torch.distributed; make it again")
        ALIVE.pop(self.group, None)


class HPCCommBackend(Calls, c10d.Backend):
    """The backend of some devices of one of torch's groups, "cpu:hpccomm,cuda:nccl".

    torch.distributed's functions reach it through C++, and show the program a Work of which only `wait` and
    `get_future` are ours (torch 2.14: PyWorkHolder).
    """

    # torch asks for them by these names; its own answers would ask again
    supports_splitting = True
    supports_coalescing = supports_shrinking = False
    supports_time_estimate = supports_reconfigure = supports_window = False

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.rank, group.size)
        self._stands_on(group)

    @property
    def options(self) -> Any:
        """What split() is given for a group of some ranks, unless the program says otherwise."""
        return c10d.Backend.Options(NAME, self.group.timeout)

    def split(self, store: Any, ranks: list[int], options: Any) -> HPCCommBackend:
        """Return the backend of a group of some of this one's ranks."""
        name = options.group_name or f"{self.group.name}:{ranks}"
        return HPCCommBackend(subgroup(self.group.comm, ranks, name, options._timeout))


class HPCCommProcessGroup(Calls, c10d.ProcessGroup):
    """One of torch's groups, of which every device is hpccomm's.

    torch.distributed's functions call it without a detour through C++, and programs see Works with all they have.
    """

    def __init__(self, store: Any, group: ProcessGroup) -> None:
        super().__init__(store, group.rank, group.size)
        self._stands_on(group)
        backend = HPCCommBackend(group)  # that of each device, for who asks
        for device in DEVICES:
            self._register_backend(torch.device(device), c10d.ProcessGroup.BackendType.CUSTOM, backend)
        self._set_default_backend(c10d.ProcessGroup.BackendType.CUSTOM)


def _overloaded(name: str) -> Callable[..., Any]:
    """Let C++ sort out a call that is not as torch.distributed writes it: ``allreduce(tensor)``, without options."""
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


def ended(work: Work | None, result: Any) -> PendingWork | None:
    """Return c10d's Work of an operation in flight; None of a blocking one, which has ended."""
    if work is None:
        return None
    return PendingGPUWork(work, result) if is_on_gpu(result) else PendingWork(work, result)


def op_of(opts: Any) -> Any:
    """Return hpccomm's reduction, or the name of one that it does not have."""
    op = opts.reduceOp
    if op == SUM:  # which is quicker than to ask for the name
        return ReduceOp.SUM
    return getattr(ReduceOp, op.op.name, op.op.name)


def seen(tensor: Any) -> Any:
    """Return what hpccomm works on: NumPy's view where there is one without further ado, else the tensor."""
    try:
        # After tensor.numpy() the storage can't be resized any more, as FSDP1 does; DLPack forgets is_neg.
        if not tensor.is_neg() and (view := np.from_dlpack(tensor)).flags.writeable:  # NumPy 1's is read-only
            return view
    except (RuntimeError, TypeError, BufferError):  # it has a gradient, is bfloat16, on a GPU: hpccomm knows
        pass
    return tensor


def all_seen(tensors: Sequence[Any]) -> list[Any]:
    """Return what hpccomm works on, of each."""
    return [seen(tensor) for tensor in tensors]


def flat(tensor: Any) -> Any:
    """Return a tensor in one dimension: c10d compares numbers of elements only."""
    return seen(tensor.view(-1) if tensor.is_contiguous() else tensor)


def _as_scipy(tensor: Any) -> Any:
    """Return a sparse tensor as a matrix: a row for each place in its sparse dimensions, dense ones in the columns."""
    from scipy import sparse

    entries = tensor.coalesce()
    places, values = entries.indices().numpy(), entries.values().numpy()
    columns = int(np.prod(values.shape[1:]))
    shape = tensor.shape[: tensor.sparse_dim()]
    rows = np.repeat(np.ravel_multi_index(places, shape), columns)
    where = rows, np.tile(np.arange(columns), len(values))
    return sparse.coo_array((values.reshape(-1), where), shape=(int(np.prod(shape)), columns))


def _as_torch(matrix: Any, like: Any) -> Any:
    compressed = matrix.tocsr()
    (rows,) = np.nonzero(np.diff(compressed.indptr))
    dimensions = like.sparse_dim()
    places = np.array(np.unravel_index(rows, like.shape[:dimensions]), np.int64)
    values = compressed[rows].toarray().reshape(-1, *like.shape[dimensions:])
    return torch.sparse_coo_tensor(torch.from_numpy(places), torch.from_numpy(values), like.shape)
