"""coalescing(): the operations of a block leave together, in as few messages as possible."""

from __future__ import annotations

from itertools import groupby
from types import TracebackType
from typing import Any

from .core.backend import Backend, DeviceMap
from .core.group import ProcessGroup
from .core.non_member import NonMember
from .core.reduce_op import ReduceOpLike
from .core.work import Work
from .errors import UnsupportedOperationError, here
from .world import member


class coalescing:
    """Collect the operations of a ``with`` block and send them together at its end.

    Inside the block, `all_reduce`, `broadcast`, `all_gather_single` and `reduce_scatter_single` on the group return
    None at once, and their arrays may not be touched before the block ends (with `async_ops`, before `wait()`). At
    the end of the block, operations of the same kind (with the same op or root) that follow one another go as one
    coalesced operation. Other operations on arrays of the group are refused inside the block, and so is
    ``async_op=True``; an exception in the block drops what was collected.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world.
    async_ops : bool
        False: the results are in place after the block. True: after `wait()`.

    Examples
    --------
    >>> a, b = np.ones(3), np.arange(4)
    >>> with hc.coalescing():
    ...     hc.all_reduce(a)
    ...     hc.all_reduce(b)
    >>> b  # on 4 ranks: array([ 0,  4,  8, 12])
    array([0, 1, 2, 3])
    >>> with hc.coalescing(async_ops=True) as pending:
    ...     hc.all_reduce(a, "max")
    >>> pending.wait()
    >>> a
    array([1., 1., 1.])
    """

    def __init__(self, group: ProcessGroup | NonMember | None = None, async_ops: bool = False) -> None:
        self._group = member(group)
        self._async_ops = async_ops
        self._works: list[Work] = []

    def __enter__(self) -> coalescing:
        if not isinstance(self._group, NonMember):
            if self._group._backends.collecting:
                raise ValueError(f"coalescing: this group is collecting already; blocks don't nest{here()}")
            self._collectors = _Collectors(self._group._backends)
            self._group._backends = self._collectors
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self._group, NonMember):
            return
        self._group._backends = self._collectors.backends
        if kind is not None:
            return
        for (device, operation, shared), calls in groupby(self._collectors.calls, key=lambda call: call[:3]):
            backend = self._group._backends[device]
            columns = [list(column) for column in zip(*(arrays for *_, arrays in calls), strict=True)]
            outcome = getattr(backend, operation + "_coalesced")(*columns, *shared, self._async_ops)
            work = self._group._launched(operation + "_coalesced", outcome, columns[0], self._async_ops)
            if work is not None:
                self._works.append(work)

    def wait(self) -> None:
        """Block until every result is in place."""
        for work in self._works:
            work.wait()


class _Collectors(DeviceMap):
    """The device map inside the block: every device has a collector in front of its backend."""

    collecting = True

    def __init__(self, backends: DeviceMap) -> None:
        self.backends = backends
        self.calls: list[tuple[str, str, tuple[Any, ...], tuple[Any, ...]]] = []

    def __missing__(self, device: str) -> Backend:
        self[device] = collector = _Collector(device, self.calls)
        return collector


class _Collector(Backend):
    """Notes (device, operation, arguments that all arrays share, arrays) instead of doing the operation."""

    name = "coalescing"

    def __init__(self, device: str, calls: list[tuple[str, str, tuple[Any, ...], tuple[Any, ...]]]) -> None:
        self._device = device
        self._calls = calls

    def _lacks(self, operation: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(
            f"{operation}: can't be collected in a coalescing() block, which takes all_reduce, broadcast, "
            f"all_gather_single and reduce_scatter_single; call it outside{here()}"
        )

    def _note(self, operation: str, shared: tuple[Any, ...], async_op: bool, *arrays: Any) -> None:
        if async_op:
            raise ValueError(
                f"{operation}: inside coalescing(), leave async_op out; use coalescing(async_ops=True){here()}"
            )
        self._calls.append((self._device, operation, shared, arrays))

    def broadcast(self, array: Any, root: int, async_op: bool) -> None:
        self._note("broadcast", (root,), async_op, array)

    def all_reduce(self, array: Any, op: ReduceOpLike, async_op: bool) -> None:
        self._note("all_reduce", (op,), async_op, array)

    def all_gather_single(self, output: Any, array: Any, async_op: bool) -> None:
        self._note("all_gather_single", (), async_op, output, array)

    def reduce_scatter_single(self, output: Any, array: Any, op: ReduceOpLike, async_op: bool) -> None:
        self._note("reduce_scatter_single", (op,), async_op, output, array)
