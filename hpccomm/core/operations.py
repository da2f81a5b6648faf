"""Operations: every operation of a group, its arguments checked and sent on to the backend of its arrays' device."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from ..errors import here
from . import checks, sparse
from .arrays import Array, is_sparse
from .backend import Backend, DeviceMap
from .reduce_op import ReduceOp, ReduceOpLike
from .work import Work, as_seconds

SUM = ReduceOp.SUM


class Operations:
    """The operations of :class:`ProcessGroup`, which gives them their members, their backends and `_launched`."""

    rank: int
    size: int
    timeout: timedelta
    _backends: DeviceMap
    _sequence: int

    def _launched(self, operation: str, outcome: Any, result: Any, async_op: bool) -> Work | None:
        raise NotImplementedError

    def _any_backend(self) -> Backend:
        raise NotImplementedError

    # -- collectives -----------------------------------------------------------------------------

    def broadcast(self, array: Array, root: int = 0, async_op: bool = False) -> Work | None:
        """See :func:`hpccomm.broadcast`."""
        if not async_op and self._backends.fast.broadcast(array, root):
            self._sequence += 1
            return None
        check = checks.readable if root == self.rank else checks.writable
        device, view = check("broadcast", "array", array)
        return self._launched("broadcast", self._backends[device].broadcast(view, root, async_op), array, async_op)

    def all_reduce(self, array: Array, op: ReduceOpLike = SUM, async_op: bool = False) -> Work | None:
        """See :func:`hpccomm.all_reduce`."""
        if not async_op and self._backends.fast.all_reduce(array, op):
            self._sequence += 1
            return None
        if is_sparse(array):
            return sparse.all_reduce(self, array, op, async_op)
        device, view, reduce_op = checks.reducible("all_reduce", "array", array, op)
        work = self._backends[device].all_reduce(view, reduce_op, async_op)
        return self._launched("all_reduce", work, array, async_op)

    def reduce(self, array: Array, root: int = 0, op: ReduceOpLike = SUM, async_op: bool = False) -> Work | None:
        """See :func:`hpccomm.reduce`."""
        if not async_op and self._backends.fast.reduce(array, root, op):
            self._sequence += 1
            return None
        check = checks.writable if root == self.rank else checks.readable
        device, view, reduce_op = checks.reducible("reduce", "array", array, op, check)
        return self._launched("reduce", self._backends[device].reduce(view, root, reduce_op, async_op), array, async_op)

    def scan(self, array: Array, op: ReduceOpLike = SUM, async_op: bool = False) -> Work | None:
        """See :func:`hpccomm.scan`."""
        return self._scan("scan", array, op, async_op)

    def exscan(self, array: Array, op: ReduceOpLike = SUM, async_op: bool = False) -> Work | None:
        """See :func:`hpccomm.exscan`."""
        return self._scan("exscan", array, op, async_op)

    def _scan(self, operation: str, array: Array, op: ReduceOpLike, async_op: bool) -> Work | None:
        device, view, reduce_op = checks.reducible(operation, "array", array, op)
        if reduce_op is ReduceOp.AVG:
            raise ValueError(
                f"{operation}: AVG has no meaning for a prefix; use SUM and divide by the rank + 1{here()}"
            )
        return self._launched(
            operation, getattr(self._backends[device], operation)(view, reduce_op, async_op), array, async_op
        )

    def all_gather(self, output_list: Sequence[Array], array: Array, async_op: bool = False) -> Work | None:
        """See :func:`hpccomm.all_gather`."""
        device, view = checks.readable("all_gather", "array", array)
        device_out, outputs = checks.writable_list("all_gather", "output_list", output_list, self.size)
        self._check_parts("all_gather", "output_list", device_out, outputs, "array", device, view)
        return self._launched(
            "all_gather", self._backends[device].all_gather(outputs, view, async_op), output_list, async_op
        )

    def all_gather_single(self, output: Array, input: Array, async_op: bool = False) -> Work | None:
        """See :func:`hpccomm.all_gather_single`."""
        if not async_op and self._backends.fast.all_gather_single(output, input):
            self._sequence += 1
            return None
        device, out, view = checks.pair("all_gather_single", output, input)
        self._check_multiple("all_gather_single", "output", out, "input", view)
        return self._launched(
            "all_gather_single", self._backends[device].all_gather_single(out, view, async_op), output, async_op
        )

    def gather(
        self, array: Array, gather_list: Sequence[Array] | None = None, root: int = 0, async_op: bool = False
    ) -> Work | None:
        """See :func:`hpccomm.gather`."""
        device, view = checks.readable("gather", "array", array)
        outputs = None
        if self._has_list("gather", "gather_list", gather_list, "destination", root):
            device_out, outputs = checks.writable_list("gather", "gather_list", gather_list or (), self.size)
            self._check_parts("gather", "gather_list", device_out, outputs, "array", device, view)
        return self._launched(
            "gather", self._backends[device].gather(view, outputs, root, async_op), gather_list, async_op
        )

    def scatter(
        self, output: Array, scatter_list: Sequence[Array] | None = None, root: int = 0, async_op: bool = False
    ) -> Work | None:
        """See :func:`hpccomm.scatter`."""
        device, view = checks.writable("scatter", "output", output)
        inputs = None
        if self._has_list("scatter", "scatter_list", scatter_list, "source", root):
            device_in, inputs = checks.readable_list("scatter", "scatter_list", scatter_list or (), self.size)
            self._check_parts("scatter", "scatter_list", device_in, inputs, "output", device, view)
        return self._launched("scatter", self._backends[device].scatter(view, inputs, root, async_op), output, async_op)

    def reduce_scatter(
        self, output: Array, input_list: Sequence[Array], op: ReduceOpLike = SUM, async_op: bool = False
    ) -> Work | None:
        """See :func:`hpccomm.reduce_scatter`."""
        device, view = checks.writable("reduce_scatter", "output", output)
        device_in, inputs = checks.readable_list("reduce_scatter", "input_list", input_list, self.size)
        self._check_parts("reduce_scatter", "input_list", device_in, inputs, "output", device, view)
        reduce_op = checks.reduction("reduce_scatter", "output", view, op)
        return self._launched(
            "reduce_scatter", self._backends[device].reduce_scatter(view, inputs, reduce_op, async_op), output, async_op
        )

    def reduce_scatter_single(
        self, output: Array, input: Array, op: ReduceOpLike = SUM, async_op: bool = False
    ) -> Work | None:
        """See :func:`hpccomm.reduce_scatter_single`."""
        if not async_op and self._backends.fast.reduce_scatter_single(output, input, op):
            self._sequence += 1
            return None
        device, out, view = checks.pair("reduce_scatter_single", output, input)
        self._check_multiple("reduce_scatter_single", "input", view, "output", out)
        reduce_op = checks.reduction("reduce_scatter_single", "output", out, op)
        return self._launched(
            "reduce_scatter_single",
            self._backends[device].reduce_scatter_single(out, view, reduce_op, async_op),
            output,
            async_op,
        )

    def all_to_all(
        self, output_list: Sequence[Array], input_list: Sequence[Array], async_op: bool = False
    ) -> Work | None:
        """See :func:`hpccomm.all_to_all`."""
        device, outputs = checks.writable_list("all_to_all", "output_list", output_list, self.size)
        device_in, inputs = checks.readable_list("all_to_all", "input_list", input_list, self.size)
        names = f"output_list[{self.rank}] and input_list[{self.rank}]"
        mine, sent = outputs[self.rank], inputs[self.rank]
        checks.alike("all_to_all", device, mine, device_in, sent, names)
        checks.sizes(
            "all_to_all", mine.size == sent.size, f"{names} have {mine.size} and {sent.size} elements; expected as many"
        )
        return self._launched(
            "all_to_all", self._backends[device].all_to_all(outputs, inputs, async_op), output_list, async_op
        )

    def all_to_all_single(
        self,
        output: Array,
        input: Array,
        output_split_sizes: Sequence[int] | np.ndarray | None = None,
        input_split_sizes: Sequence[int] | np.ndarray | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """See :func:`hpccomm.all_to_all_single`."""
        equal_parts = not checks.has_splits(output_split_sizes) and not checks.has_splits(input_split_sizes)
        if equal_parts and not async_op and self._backends.fast.all_to_all_single(output, input):
            self._sequence += 1
            return None
        device, out, view = checks.pair("all_to_all_single", output, input)
        to_receive = checks.splits("all_to_all_single", "output", out, output_split_sizes, self.size)
        to_send = checks.splits("all_to_all_single", "input", view, input_split_sizes, self.size)
        checks.sizes(
            "all_to_all_single",
            to_receive[self.rank] == to_send[self.rank],
            f"this rank sends {to_send[self.rank]} elements to itself, but output has room for {to_receive[self.rank]}",
        )
        backend = self._backends[device]
        if equal_parts:
            outcome = backend.all_to_all_single(out, view, None, None, async_op)
        else:
            outcome = backend.all_to_all_single(out, view, to_receive, to_send, async_op)
        return self._launched("all_to_all_single", outcome, output, async_op)

    def barrier(self, async_op: bool = False) -> Work | None:
        """See :func:`hpccomm.barrier`."""
        return self._launched("barrier", self._any_backend().barrier(async_op), None, async_op)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """See :func:`hpccomm.monitored_barrier`."""
        seconds = as_seconds(self.timeout if timeout is None else timeout)
        if not seconds >= 0:
            raise ValueError(f"monitored_barrier: timeout is {timeout}; expected 0 or more seconds{here()}")
        self._any_backend().monitored_barrier(seconds, wait_all_ranks)
        self._launched("monitored_barrier", None, None, False)

    # -- coalesced: many arrays in one message ---------------------------------------------------

    def all_reduce_coalesced(
        self, arrays: Sequence[Array], op: ReduceOpLike = SUM, async_op: bool = False
    ) -> Work | None:
        """See :func:`hpccomm.all_reduce_coalesced`."""
        device, views = checks.array_list("all_reduce_coalesced", "arrays", arrays)
        reduce_op = checks.reductions("all_reduce_coalesced", "arrays", views, op)
        return self._launched(
            "all_reduce_coalesced",
            self._backends[device].all_reduce_coalesced(views, reduce_op, async_op),
            arrays,
            async_op,
        )

    def broadcast_coalesced(self, arrays: Sequence[Array], root: int = 0, async_op: bool = False) -> Work | None:
        """See :func:`hpccomm.broadcast_coalesced`."""
        check = checks.readable if root == self.rank else checks.writable
        device, views = checks.array_list("broadcast_coalesced", "arrays", arrays, check)
        return self._launched(
            "broadcast_coalesced", self._backends[device].broadcast_coalesced(views, root, async_op), arrays, async_op
        )

    def all_gather_coalesced(
        self, output_lists: Sequence[Sequence[Array]], arrays: Sequence[Array], async_op: bool = False
    ) -> Work | None:
        """See :func:`hpccomm.all_gather_coalesced`."""
        device, views = checks.array_list("all_gather_coalesced", "arrays", arrays, checks.readable)
        checks.sizes(
            "all_gather_coalesced",
            len(output_lists) == self.size and all(len(outputs) == len(views) for outputs in output_lists),
            f"output_lists must be {self.size} lists (one per rank) of {len(views)} arrays (one per input)",
        )
        outputs = []
        for rank, output_list in enumerate(output_lists):
            device_out, gathered = checks.array_list("all_gather_coalesced", f"output_lists[{rank}]", output_list)
            for i, (out, view) in enumerate(zip(gathered, views, strict=True)):
                names = f"output_lists[{rank}][{i}] and arrays[{i}]"
                checks.alike("all_gather_coalesced", device_out, out, device, view, names)
                fits = out.size == view.size or rank != self.rank
                checks.sizes(
                    "all_gather_coalesced", fits, f"{names} have {out.size} and {view.size} elements; expected as many"
                )
            outputs.append(gathered)
        return self._launched(
            "all_gather_coalesced",
            self._backends[device].all_gather_coalesced(outputs, views, async_op),
            output_lists,
            async_op,
        )

    def all_gather_single_coalesced(
        self, outputs: Sequence[Array], inputs: Sequence[Array], async_op: bool = False
    ) -> Work | None:
        """See :func:`hpccomm.all_gather_single_coalesced`."""
        device, outs, views = self._pairs("all_gather_single_coalesced", outputs, inputs, larger="outputs")
        return self._launched(
            "all_gather_single_coalesced",
            self._backends[device].all_gather_single_coalesced(outs, views, async_op),
            outputs,
            async_op,
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Array], inputs: Sequence[Array], op: ReduceOpLike = SUM, async_op: bool = False
    ) -> Work | None:
        """See :func:`hpccomm.reduce_scatter_single_coalesced`."""
        device, outs, views = self._pairs("reduce_scatter_single_coalesced", outputs, inputs, larger="inputs")
        reduce_op = checks.reductions("reduce_scatter_single_coalesced", "outputs", outs, op)
        return self._launched(
            "reduce_scatter_single_coalesced",
            self._backends[device].reduce_scatter_single_coalesced(outs, views, reduce_op, async_op),
            outputs,
            async_op,
        )

    def _pairs(
        self, operation: str, outputs: Sequence[Array], inputs: Sequence[Array], larger: str
    ) -> tuple[str, list[Any], list[Any]]:
        device, outs = checks.array_list(operation, "outputs", outputs)
        device_in, views = checks.array_list(operation, "inputs", inputs, checks.readable)
        checks.sizes(
            operation, len(outs) == len(views), f"there are {len(outs)} outputs and {len(views)} inputs; expected pairs"
        )
        large, small = (outs, views) if larger == "outputs" else (views, outs)
        if device == device_in == "cpu" and checks.pairs_fit(large, small, self.size):
            return device, outs, views
        for i, (out, view) in enumerate(zip(outs, views, strict=True)):
            checks.alike(operation, device, out, device_in, view, f"outputs[{i}] and inputs[{i}]")
            pair = (f"outputs[{i}]", out, f"inputs[{i}]", view)
            self._check_multiple(operation, *(pair if larger == "outputs" else pair[2:] + pair[:2]))
        return device, outs, views

    # -- point to point --------------------------------------------------------------------------

    def send(self, array: Array, dst: int, tag: int = 0, async_op: bool = False) -> Work | None:
        """See :func:`hpccomm.send` and :func:`hpccomm.isend`."""
        if not async_op and self._backends.fast.send(array, dst, tag):
            self._sequence += 1
            return None
        device, view = checks.readable("send", "array", array)
        self._check_peer("send", "dst", dst, async_op)
        return self._launched("send", self._backends[device].send(view, dst, tag, async_op), array, async_op)

    def recv(self, array: Array, src: int | None = None, tag: int = 0, async_op: bool = False) -> Any:
        """See :func:`hpccomm.recv` and :func:`hpccomm.irecv`; returns the sender's *group* rank, or a Work."""
        if not async_op and (sender := self._backends.fast.recv(array, src, tag)) is not None:
            self._sequence += 1
            return sender
        device, view = checks.writable("recv", "array", array)
        self._check_peer("recv", "src", src, async_op)
        return self._launched("recv", self._backends[device].recv(view, src, tag, async_op), array, async_op)

    def sendrecv(
        self, array: Array, dst: int, output: Array, src: int | None = None, tag: int = 0, recv_tag: int | None = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        """See :func:`hpccomm.sendrecv`; returns the sender's *group* rank, or a Work."""
        fast = self._backends.fast
        if not async_op and (sender := fast.sendrecv(array, dst, output, src, tag, recv_tag)) is not None:
            self._sequence += 1
            return sender
        device, view = checks.readable("sendrecv", "array", array)
        device_out, out = checks.writable("sendrecv", "output", output)
        if device != device_out:
            raise ValueError(
                f"sendrecv: array and output are on {device} and {device_out}; one call, one device{here()}"
            )
        recv_tag = tag if recv_tag is None else recv_tag
        return self._launched(
            "sendrecv", self._backends[device].sendrecv(view, dst, out, src, tag, recv_tag, async_op), output, async_op
        )

    # -- checks that need the group --------------------------------------------------------------

    def _has_list(self, operation: str, argument: str, arrays: Sequence[Array] | None, role: str, root: int) -> bool:
        """Whether this rank is the root, having checked that the list is given there and nowhere else."""
        if self.rank == root:
            if arrays is None:
                raise ValueError(f"{operation}: {argument} is missing, and this rank is the {role}{here()}")
            return True
        if arrays:
            raise ValueError(
                f"{operation}: {argument} is given, but this rank is not the {role}; pass it on that rank only{here()}"
            )
        return False

    def _check_parts(
        self, operation: str, argument: str, device: str, parts: list[Any], other: str, other_device: str, array: Any
    ) -> None:
        """Check that this rank's part of a list is as large as its single array."""
        names = f"{argument}[{self.rank}] and {other}"
        part = parts[self.rank]
        checks.alike(operation, device, part, other_device, array, names)
        checks.sizes(
            operation, part.size == array.size, f"{names} have {part.size} and {array.size} elements; expected as many"
        )

    def _check_multiple(self, operation: str, large_name: str, large: Any, small_name: str, small: Any) -> None:
        if large.size != self.size * small.size:
            raise ValueError(
                f"{operation}: {large_name} has {large.size} elements; expected {self.size * small.size}, "
                f"{self.size} ranks times the {small.size} of {small_name}{here()}"
            )

    def _check_peer(self, operation: str, argument: str, peer: int | None, async_op: bool) -> None:
        if peer == self.rank and not async_op:
            raise ValueError(
                f"{operation}: {argument} is this rank itself, which a blocking {operation} would wait for for ever; "
                f"use i{operation}, or sendrecv{here()}"
            )
