"""coalescing(): the operations of a block leave together, in as few messages as possible."""

from __future__ import annotations

import threading
from itertools import groupby
from types import TracebackType
from typing import Any

from .core.calls import Call
from .core.non_member import Group, NonMember
from .core.operation_list import OPERATIONS
from .core.work import JoinedWork, Work
from .errors import DistError, UnsupportedOperationError, here
from .world import member


class coalescing:
    """Collect the operations of a ``with`` block and send them together at its end.

    Inside the block, `all_reduce`, `broadcast`, `all_gather_single` and `reduce_scatter_single` on the group return
    None at once, and their arrays may not be touched before the block ends (with `async_ops`, before `wait()`). At
    the end of the block, operations of the same kind (with the same op or root) that follow one another go as one
    coalesced operation. The whole block is one operation, with one sequence number. Other operations of the group are
    refused inside the block, those of other threads are not collected; an exception in the block drops what was
    collected.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world.
    async_ops : bool
        False: the results are in place after the block. True: after `wait()`.

    Raises
    ------
    ValueError
        The group collects already (blocks do not nest), or an operation inside has ``async_op=True``.
    UnsupportedOperationError
        Another operation of the group.

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

    def __init__(self, group: Group | None = None, async_ops: bool = False) -> None:
        self._group = member(group)
        self._async_ops = async_ops
        self._work: Work | None = None

    def __enter__(self) -> coalescing:
        if not isinstance(self._group, NonMember):
            if self._group.is_destroyed:
                raise DistError(f"coalescing: the process group {self._group.name!r} has been destroyed{here()}")
            if self._group._block is not None:
                raise ValueError(f"coalescing: this group is collecting already; blocks don't nest{here()}")
            self._thread = threading.get_ident()
            self._calls: list[Call] = []
            self._set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self._group, NonMember):
            return
        self._set(None)
        if kind is None and self._calls:
            described = [(name, arguments) for name, _, _, arguments in self._calls]
            call = "coalescing", self._calls[0][1], None, (described,)
            self._work = self._group._run(call, self._async_ops, self._send)

    def _set(self, block: coalescing | None) -> None:
        self._group._block = block
        self._group._choose_fast_path()

    # -- what the door asks ----------------------------------------------------------------------

    def is_of_this_thread(self) -> bool:
        """Whether the block is one of the thread that asks."""
        return threading.get_ident() == self._thread

    def collect(self, call: Call, async_op: bool) -> None:
        """Put an operation, whose arguments have been checked, in the queue."""
        name = call[0]
        if not (name in OPERATIONS and OPERATIONS[name].is_collected):
            self.refuse(name)
        if async_op:
            raise ValueError(f"{name}: inside coalescing(), leave async_op out; use coalescing(async_ops=True){here()}")
        self._calls.append(call)

    def refuse(self, name: str) -> None:
        """Raise what an operation that can't be collected raises."""
        takes = ", ".join(spec.name for spec in OPERATIONS.values() if spec.is_collected)
        raise UnsupportedOperationError(
            f"{name}: can't be collected in a coalescing() block, which takes {takes}; call it outside{here()}"
        )

    def _send(self) -> Work | None:
        """Do what was collected, neighbours of a kind at once; one Work stands for all."""
        works = []
        for (name, device, shared), same in groupby(self._calls, key=_kind):
            columns = [list(column) for column in zip(*(_arrays(call) for call in same), strict=True)]
            backend = self._group._backends[device]
            try:
                work = getattr(backend, f"{name}_coalesced")(*columns, *shared, self._async_ops)
            except Exception as error:
                translated = backend.translate_error(f"{name}_coalesced", error)
                raise translated from (None if translated is error else error)
            if work is not None:
                work.op_type = f"{name}_coalesced"
                works.append(work)
        return JoinedWork(works) if works else None

    def wait(self) -> None:
        """Block until every result is in place.

        Returns
        -------
        None
        """
        if self._work is not None:
            self._work.wait()


def _arrays(call: Call) -> list[Any]:
    """Return the arrays of an operation."""
    name, _, _, arguments = call
    return [each for each, argument in zip(arguments, OPERATIONS[name].arguments) if argument in ("array", "output")]


def _kind(call: Call) -> tuple[str, str, tuple[Any, ...]]:
    """Return what neighbours have in common that leave together: the operation, the device, and the op or root."""
    name, device, _, arguments = call
    shared = zip(arguments, OPERATIONS[name].arguments)
    return name, device, tuple(each for each, argument in shared if argument in ("op", "root"))
