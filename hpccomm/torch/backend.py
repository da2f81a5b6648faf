"""HPCCommBackend: c10d's calls, handed to a ProcessGroup of the same ranks, which checks them and does the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Backend
from torch._C._distributed_c10d import ReduceOp as C10DReduceOp

from ..core.group import ProcessGroup
from ..core.reduce_op import ReduceOp
from ..core.work import CompletedWork, Work
from .work import PendingWork

NAME = "hpccomm"
SUM = C10DReduceOp.SUM
ALIVE: set[HPCCommBackend] = set()  # torch keeps the half in C++ only, which would do nothing without this one


class HPCCommBackend(Backend):
    """One group's backend; `group` is hpccomm's, on an MPI communicator of the same ranks.

    Tensors of contiguous host memory are handed on as they are. Every rule, of dtypes, layouts and reductions, is
    hpccomm's.
    """

    # torch asks for them by these names; its own answers would ask again
    supports_coalescing = supports_splitting = supports_shrinking = False
    supports_time_estimate = supports_reconfigure = supports_window = False

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.rank, group.size)
        self.group = group
        ALIVE.add(self)

    # -- one tensor ------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Any], opts: Any) -> PendingWork | None:
        (tensor,) = tensors
        if tensor.is_sparse:
            return self.allreduce_sparse(tensors, opts)
        return ended(self.group.all_reduce(seen(tensor), op_of(opts), opts.asyncOp), tensors)

    def allreduce_sparse(self, tensors: list[Any], opts: Any) -> PendingWork | None:
        (tensor,) = tensors
        matrix = _as_scipy(tensor)
        self.group.all_reduce(matrix, op_of(opts))
        tensor.copy_(_as_torch(matrix, tensor))
        return ended(CompletedWork() if opts.asyncOp else None, tensors)

    def broadcast(self, tensors: list[Any], opts: Any) -> PendingWork | None:
        array = seen(tensors[opts.rootTensor])
        return ended(self.group.broadcast(array, opts.rootRank, opts.asyncOp), tensors)

    def reduce(self, tensors: list[Any], opts: Any) -> PendingWork | None:
        array = seen(tensors[opts.rootTensor])
        return ended(self.group.reduce(array, opts.rootRank, op_of(opts), opts.asyncOp), tensors)

    # -- one tensor from or to each rank -----------------------------------------------------------

    def allgather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any) -> PendingWork | None:
        return ended(self.group.all_gather(all_seen(outputs[0]), seen(inputs[0]), opts.asyncOp), outputs)

    def all_gather_single(self, output: Any, input: Any, opts: Any) -> PendingWork | None:
        work = self.group.all_gather_single(flat(output), flat(input), opts.asyncOp)
        return ended(work, [output])

    def gather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any) -> PendingWork | None:
        to = all_seen(outputs[0]) if outputs else None
        return ended(self.group.gather(seen(inputs[0]), to, opts.rootRank, opts.asyncOp), outputs)

    def scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any) -> PendingWork | None:
        parts = all_seen(inputs[0]) if inputs else None
        return ended(self.group.scatter(seen(outputs[0]), parts, opts.rootRank, opts.asyncOp), outputs)

    def reduce_scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any) -> PendingWork | None:
        work = self.group.reduce_scatter(seen(outputs[0]), all_seen(inputs[0]), op_of(opts), opts.asyncOp)
        return ended(work, outputs)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> PendingWork | None:
        work = self.group.reduce_scatter_single(flat(output), flat(input), op_of(opts), opts.asyncOp)
        return ended(work, [output])

    def alltoall(self, outputs: list[Any], inputs: list[Any], opts: Any) -> PendingWork | None:
        return ended(self.group.all_to_all(all_seen(outputs), all_seen(inputs), opts.asyncOp), outputs)

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: list[int], input_splits: list[int], opts: Any
    ) -> PendingWork | None:
        splits = output_splits or None, input_splits or None
        return ended(self.group.all_to_all_single(seen(output), seen(input), *splits, opts.asyncOp), [output])

    # -- many tensors ------------------------------------------------------------------------------

    def allreduce_coalesced(self, tensors: list[Any], opts: Any) -> PendingWork | None:
        return ended(self.group.all_reduce_coalesced(all_seen(tensors), op_of(opts), opts.asyncOp), tensors)

    def allgather_coalesced(self, outputs: list[list[Any]], inputs: list[Any], opts: Any) -> PendingWork | None:
        lists = [all_seen(each) for each in outputs]
        return ended(self.group.all_gather_coalesced(lists, all_seen(inputs), opts.asyncOp), outputs)

    def all_gather_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any) -> PendingWork | None:
        arrays = [flat(each) for each in outputs], [flat(each) for each in inputs]
        return ended(self.group.all_gather_single_coalesced(*arrays, opts.asyncOp), outputs)

    def reduce_scatter_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any) -> PendingWork | None:
        arrays = [flat(each) for each in outputs], [flat(each) for each in inputs]
        work = self.group.reduce_scatter_single_coalesced(*arrays, op_of(opts), opts.asyncOp)
        return ended(work, outputs)

    # -- messages ----------------------------------------------------------------------------------

    def send(self, tensors: list[Any], dst: int, tag: int) -> PendingWork | None:
        return ended(self.group.send(seen(tensors[0]), dst, tag, async_op=True), tensors)

    def recv(self, tensors: list[Any], src: int, tag: int) -> PendingWork | None:
        return ended(self.group.recv(seen(tensors[0]), src, tag, async_op=True), tensors)

    def recv_anysource(self, tensors: list[Any], tag: int) -> PendingWork | None:
        return ended(self.group.recv(seen(tensors[0]), None, tag, async_op=True), tensors)

    # -- the rest ----------------------------------------------------------------------------------

    def barrier(self, opts: Any) -> PendingWork | None:
        return ended(self.group.barrier(opts.asyncOp), [])

    def getBackendName(self) -> str:
        return NAME

    def _get_sequence_number_for_group(self) -> int:
        return self.group.sequence_number

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: hpccomm counts alike on every rank from the beginning."""

    def shutdown(self) -> None:
        self.group.destroy()
        ALIVE.discard(self)

    def abort(self) -> None:
        for backend in list(self.group._backends.values()):
            backend.abort()


def ended(work: Work | None, result: Any) -> PendingWork | None:
    """Return c10d's Work of an operation in flight; None of a blocking one, which has ended."""
    return None if work is None else PendingWork(work, result)


def op_of(opts: Any) -> ReduceOp | str:
    """Return hpccomm's reduction, or the name of one that it does not have."""
    op = opts.reduceOp
    if op == SUM:  # which is quicker than to ask for the name
        return ReduceOp.SUM
    return getattr(ReduceOp, op.op.name, op.op.name)  # type: ignore[no-any-return]


def seen(tensor: Any) -> Any:
    """Return what hpccomm works on: NumPy's view where there is one without further ado, else the tensor."""
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError):  # it has a gradient, is bfloat16, on a GPU: hpccomm knows
        return tensor


def all_seen(tensors: Sequence[Any]) -> list[Any]:
    """Return what hpccomm works on, of each."""
    return [seen(tensor) for tensor in tensors]


def flat(tensor: Any) -> Any:
    """Return a tensor in one dimension: c10d compares numbers of elements only."""
    return seen(tensor.view(-1) if tensor.is_contiguous() else tensor)


def _as_scipy(tensor: Any) -> Any:
    from scipy import sparse

    entries = tensor.coalesce()
    return sparse.coo_array((entries.values().numpy(), entries.indices().numpy()), shape=tensor.shape)


def _as_torch(matrix: Any, like: Any) -> Any:
    import numpy as np

    coo = matrix.tocoo()
    indices = torch.from_numpy(np.vstack(coo.coords).astype(np.int64))
    return torch.sparse_coo_tensor(indices, torch.from_numpy(coo.data), like.shape)
