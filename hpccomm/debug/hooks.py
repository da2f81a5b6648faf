"""Hooks for every group of the process: a check for NaN, a log of all operations, ranges for profilers."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import warnings
from typing import Any

import numpy as np

from ..core.hooks import Hook, Operation, RemovableHandle
from ..errors import DistError, HpccommWarning, on_rank
from .groups_seen import everywhere
from .records import arrays_in, record_of_operation
from .sources import SOURCES

BLUE = 0xFF0072B2  # the colour of ranges
LOGGER = logging.getLogger("hpccomm.operations")


def register_hook(hook: Hook) -> RemovableHandle:
    """Register a hook on every group of this rank, including groups made later.

    Under ``hpccomm run``, the hook also sees the calls of mpi4py's communicators. Their `group` is the communicator; a
    non-blocking operation ends for the hook when the call that begins it returns.

    Parameters
    ----------
    hook : object
        An object with the methods `begin` and `end` of :class:`hpccomm.Hook`.

    Returns
    -------
    RemovableHandle
        Its ``remove()``, or the end of a ``with`` block, removes the hook.

    Examples
    --------
    >>> import hpccomm.debug
    >>> class Names:
    ...     def begin(self, operation):
    ...         print(operation.group.name, operation.name)
    ...     def end(self, operation):
    ...         pass
    >>> with hpccomm.debug.register_hook(Names()):
    ...     hc.barrier()
    ...     with hc.new_group(group_desc="mine") as group:
    ...         hc.barrier(group)
    world barrier
    mine barrier
    """
    handles = [everywhere(lambda group: hook), *(source.register_hook(hook) for source in SOURCES)]

    def remove() -> None:
        for each in handles:
            each.remove()

    return RemovableHandle(remove)


# -- NaN and infinity ------------------------------------------------------------------------------------------


def check_numerics(action: str = "raise") -> RemovableHandle:
    """Check the arrays that every operation of this rank sends and receives for NaN and infinity.

    Every array is read before and after its operation, so use it for debugging only. With arrays on a GPU, the host
    waits for the GPU.

    Parameters
    ----------
    action : str
        ``"raise"``: raise DistError. For a bad input it is raised before anything is sent, on this rank only; the
        other ranks wait until the exception ends the job. ``"warn"``: issue an HpccommWarning, and continue.

    Returns
    -------
    RemovableHandle

    Raises
    ------
    ValueError
        `action` has another value.

    Notes
    -----
    The thread that notices an asynchronous operation's completion checks its results. It has no caller to raise an
    exception to, so it logs the error to the logger ``"hpccomm"``.

    Examples
    --------
    >>> import hpccomm.debug
    >>> x = np.array([1.0, np.nan, np.inf])
    >>> with hpccomm.debug.check_numerics():
    ...     hc.all_reduce(x)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    hpccomm.errors.DistError: all_reduce #1 of 'world' (24 B float64): array before it: nan at [1], 2 of 3 elements ...
    """
    if action not in ("raise", "warn"):
        raise ValueError(f"check_numerics: action is {action!r}; expected 'raise' or 'warn'")
    return register_hook(_CheckNumerics(action))


class _CheckNumerics:
    def __init__(self, action: str) -> None:
        self._action = action

    def begin(self, operation: Operation) -> None:
        is_root = operation.peer == operation.group.rank
        name = operation.name.lower()
        if not re.match("i?recv", name) and (is_root or not re.match("broadcast|i?bcast", name)):
            is_in_place = type(operation.arguments.get("sendbuf")).__name__ == "InPlaceType"  # mpi4py's
            self._look(operation, "before", OUTPUTS - {"recvbuf"} if is_in_place else OUTPUTS)

    def end(self, operation: Operation) -> None:
        if operation.error is None and not (operation.described and operation.async_op):  # else it has no result yet
            self._look(operation, "after", INPUTS)

    def _look(self, operation: Operation, when: str, not_at: set[str]) -> None:
        for name, value in operation.arguments.items():
            if is_halo := operation.name.startswith("halo_exchange") and name == "arrays":
                axes, widths = operation.arguments["axes"], operation.arguments["width"]
                value = [_without_ghosts(*each, widths) for each in zip(value, axes)]
            for place, array in enumerate(arrays_in(value)):
                bad = None if name in not_at else first_bad(array)
                if bad is not None:
                    label = f"{name}[{place}]" if isinstance(value, list) else name
                    label += " without its ghosts" * is_halo
                    message = f"{_in_words(operation)}: {label} {when} it: {bad} are not finite{on_rank()}"
                    if self._action == "raise":
                        raise DistError(message)
                    warnings.warn(message, HpccommWarning, stacklevel=7)


def _without_ghosts(array: Any, axes: Any, widths: Any) -> Any:
    """Return the own cells of a block: its ghosts are outputs, and at open borders nobody fills them."""
    cells = [slice(None)] * array.ndim
    for axis, (low, high) in zip(axes, widths):
        cells[axis] = slice(low, array.shape[axis] - high)
    return array[tuple(cells)]


OUTPUTS = {"output", "outputs", "output_lists", "calls", "recvbuf"}  # not checked before the operation
INPUTS = {"inputs", "sendbuf"}  # not checked after the operation, which does not change them


def first_bad(array: Any) -> str | None:
    """Return an array's first value that is not finite, with its index, as text; None if all are finite."""
    if array.dtype.kind not in "fc" and array.dtype.name != "bfloat16":
        return None
    bad = ~np.isfinite(array)  # also for CuPy's arrays
    count = int(bad.sum())
    if not count:
        return None
    index = tuple(int(each) for each in np.unravel_index(int(bad.argmax()), bad.shape))
    return f"{array[index]} at [{', '.join(map(str, index))}], {count} of {array.size} elements"


# -- a log -----------------------------------------------------------------------------------------------------


def log_operations(logger: logging.Logger | str | None = None, level: int = logging.INFO) -> RemovableHandle:
    """Log a line for every operation of this rank when it completes.

    Parameters
    ----------
    logger : logging.Logger or str, optional
        Or the name of a file, to which lines are appended; ``{rank}`` in it becomes the global
        rank. Default: the logger ``"hpccomm.operations"``.
    level : int
        The level of the lines.

    Returns
    -------
    RemovableHandle

    Examples
    --------
    >>> import hpccomm.debug, logging, sys
    >>> logger = logging.getLogger("example")
    >>> logger.setLevel(logging.INFO)
    >>> logger.addHandler(logging.StreamHandler(sys.stdout))
    >>> with hpccomm.debug.log_operations(logger):
    ...     hc.all_reduce(np.ones(1000))  # doctest: +ELLIPSIS
    rank 0: all_reduce #1 of 'world' (7.812 KiB float64), SUM, ... us, ok
    """
    return register_hook(_Log(logger, level))


class _Log:
    def __init__(self, logger: logging.Logger | str | None, level: int) -> None:
        self._file = os.path.abspath(logger) if isinstance(logger, str) else None
        self._logger = logger if isinstance(logger, logging.Logger) else LOGGER
        self._level = level

    def begin(self, operation: Operation) -> None:
        pass

    def end(self, operation: Operation) -> None:
        rank, op, peer = operation.rank, operation.op, operation.peer
        facts = [_in_words(operation)]
        facts += [] if op is None else [str(getattr(op, "name", op))]
        facts += [] if peer is None else [f"peer {peer}"]
        facts += ["async"] if operation.async_op else []
        facts.append(f"{1e6 * (operation.duration or 0.0):.1f} us")
        facts.append("ok" if operation.error is None else repr(operation.error))
        line = f"rank {rank}: {', '.join(facts)}"
        if self._file is None:
            self._logger.log(self._level, line)
            return
        with open(self._file.replace("{rank}", str(rank)), "a", encoding="utf-8") as file:
            file.write(line + "\n")


# -- profilers ---------------------------------------------------------------------------------------------------


def nvtx_ranges() -> RemovableHandle:
    """Mark every operation of this rank as a range for NVIDIA's profilers (NVTX), with CuPy or the package nvtx.

    A range begins with its operation, and ends when the operation's completion is noticed.

    Returns
    -------
    RemovableHandle

    Raises
    ------
    ImportError
        Neither package is installed.

    Examples
    --------
    >>> import hpccomm.debug
    >>> try:
    ...     with hpccomm.debug.nvtx_ranges() as handle:
    ...         hc.barrier()  # in Nsight Systems: a range "barrier #1 of 'world'"
    ... except ImportError:  # neither CuPy nor nvtx is installed here
    ...     hc.barrier()
    >>> hc.GroupMember.WORLD.sequence_number
    1
    """
    return register_hook(_Ranges(*_nvtx()))


class _Ranges:
    def __init__(self, start: Any, end: Any) -> None:
        self._start, self._end = start, end
        self._open: dict[Operation, Any] = {}

    def begin(self, operation: Operation) -> None:
        self._open[operation] = self._start(_in_words(operation))

    def end(self, operation: Operation) -> None:
        self._end(self._open.pop(operation))


def _nvtx() -> tuple[Any, Any]:
    """Return functions that start and end a range; another thread may end it."""
    with contextlib.suppress(ImportError):
        nvtx = importlib.import_module("nvtx")
        return nvtx.start_range, nvtx.end_range
    with contextlib.suppress(ImportError):
        cupys = importlib.import_module("cupy.cuda.nvtx")
        if cupys.available:
            return lambda message: cupys.RangeStart(message, BLUE), cupys.RangeEnd
    raise ImportError("nvtx_ranges needs the package nvtx: pip install nvtx")


def _in_words(operation: Operation) -> str:
    return operation.described or str(record_of_operation(operation))
