"""coalescing(): send the operations of a block together, in as few messages as possible."""

from __future__ import annotations

from types import TracebackType

from ..core.dispatcher import Block
from ..core.non_member import Group, NonMember
from .world import member


class coalescing:
    """Collect the operations of a ``with`` block and send them together at its end.

    Inside the block, `all_reduce`, `broadcast`, `all_gather_single` and `reduce_scatter_single` on the group return
    None at once. Don't touch their arrays before the block ends (with `async_ops`, before `wait()` returns). At the
    end of the block, consecutive operations of the same kind (with the same op or root) run as one coalesced
    operation. The whole block counts as one operation, with one sequence number. Inside the block, other operations of
    the group raise. Operations in other threads are not collected. An exception in the block discards the collected
    operations.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world.
    async_ops : bool
        False: the results are in place after the block. True: they are in place after `wait()`.

    Raises
    ------
    ValueError
        The group already has an open block (blocks do not nest), an operation inside has ``async_op=True``, or of
        operations that start together one writes memory that another reads or writes.
    UnsupportedOperationError
        Another operation of the group is called inside the block.

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
        self._block: Block | None = None

    def __enter__(self) -> coalescing:
        if not isinstance(self._group, NonMember):
            self._block = self._group.dispatcher.open_block(self._async_ops)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._block is not None:
            self._group.dispatcher.close_block()
            if kind is None:
                self._block.leave()

    def wait(self) -> None:
        """Block until every result is in place.

        Returns
        -------
        None
        """
        if self._block is not None and self._block.work is not None:
            self._block.work.wait()
