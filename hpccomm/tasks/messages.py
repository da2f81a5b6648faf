"""What rank 0 and its workers send each other: calls, and what has become of them.

Messages are pickled by mpi4py, large buffers (NumPy arrays) apart and without a copy (PEP 574). A worker answers calls
in the order in which they have come, so they need no numbers.
"""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpi4py.util import pkl5

from ..core import dispatcher
from ..errors import DistError, on_rank

TAG = 0
BELOW = f"{os.path.dirname(__file__)}{os.sep}", dispatcher.__file__  # a task's own function on a worker's stack
LONGEST_ARGUMENT = 30  # characters


class Stop(NamedTuple):
    """There is no further call."""

    has_lost: bool  # some rank has died: the communicator is not freed


@dataclass(frozen=True)
class Call:
    """A call that a worker is to make; no tuple, in which hooks would look for arrays."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def make(self) -> Any:
        """Return the result."""
        return self.fn(*self.args, **self.kwargs)

    def __str__(self) -> str:
        """Return ``f(3, ndarray)``; numbers and short texts as they are."""
        if self.fn is apply_to_each:
            fn, calls = self.args
            others = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
            return f"{Call(fn, calls[0], {})}{others}"
        shown = [_short(each) for each in self.args] + [f"{key}={_short(each)}" for key, each in self.kwargs.items()]
        return f"{getattr(self.fn, '__qualname__', type(self.fn).__name__)}({', '.join(shown)})"


def _short(argument: Any) -> str:
    if isinstance(argument, bool | int | float | complex | str | None):
        text = repr(argument)
        return text if len(text) <= LONGEST_ARGUMENT else f"{text[: LONGEST_ARGUMENT - 3]}..."
    return type(argument).__name__


def apply_to_each(fn: Callable[..., Any], calls: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the results of a chunk of calls."""
    return list(itertools.starmap(fn, calls))


class Outcome(NamedTuple):
    """What has become of a call."""

    result: Any
    failure: Failure | None
    seconds: float


class Failure(NamedTuple):
    """An exception on its way to rank 0."""

    pickled: bytes  # b"" if it can't be
    text: str
    traceback: str  # as Python prints it


class RemoteTraceback(Exception):
    """The cause of an exception that a worker has raised: its text is the traceback there."""


def failure_of(error: BaseException) -> Failure:
    """Return the failure for an exception; its traceback begins with the program's own function.

    It is tried here whether the exception can be made of its pickle: many can't, whose ``__init__`` takes other
    arguments than `Exception` has.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(BELOW):
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    try:
        pickled = pkl5.pickle.dumps(error)
        if type(pkl5.pickle.loads(pickled)) is not type(error):
            pickled = b""
    except Exception:  # of any code: __reduce__, __init__
        pickled = b""
    return Failure(bytes(pickled), traceback.format_exception_only(type(error), error)[-1].strip(), "".join(lines))


def error_of(failure: Failure, call: object, rank: int) -> BaseException:
    """Return the exception of a worker, whose cause shows where it comes from; `rank` is the worker's."""
    try:
        error = pkl5.pickle.loads(failure.pickled)
    except Exception:
        error = DistError(
            f"{call} on rank {rank} raised {failure.text}; the exception itself can't be pickled, so this one stands "
            f"for it{on_rank()}"
        )
    error.__cause__ = RemoteTraceback(f'\n"""\nrank {rank}, in {call}:\n{failure.traceback.rstrip()}\n"""')
    return error  # type: ignore[no-any-return]
