"""Messages between rank 0 and its workers: calls and their outcomes.

mpi4py pickles the messages; large buffers (NumPy arrays) travel separately, without a copy (PEP 574). A worker answers
calls in the order of their arrival, so calls need no numbers.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpi4py.util import pkl5

from ..core import dispatcher
from ..errors import DistError, on_rank

TAG = 0
BELOW = f"{os.path.dirname(__file__)}{os.sep}", dispatcher.__file__  # files skipped at the top of a worker's traceback
LONGEST_ARGUMENT = 30  # characters


class Stop(NamedTuple):
    """Tells a worker that no more calls follow."""

    has_lost: bool  # a rank has died: do not free the communicator


@dataclass(frozen=True)
class Call:
    """A call for a worker; not a tuple, because hooks search tuples for arrays."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def make(self) -> Any:
        """Make the call and return its result."""
        return self.fn(*self.args, **self.kwargs)

    def __str__(self) -> str:
        """Return text like ``f(3, ndarray)``, with numbers and short texts in full."""
        if self.fn is apply_to_each:
            fn, calls = self.args
            others = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
            return f"{Call(fn, calls[0], {})}{others}"
        shown = [_short(each) for each in self.args] + [f"{key}={_short(each)}" for key, each in self.kwargs.items()]
        return f"{getattr(self.fn, '__qualname__', type(self.fn).__name__)}({', '.join(shown)})"


def _short(argument: Any) -> str:
    with contextlib.suppress(Exception):  # a long int has no text
        if isinstance(argument, bool | int | float | complex | str | None):
            text = repr(argument)
            return text if len(text) <= LONGEST_ARGUMENT else f"{text[: LONGEST_ARGUMENT - 3]}..."
    return type(argument).__name__


def apply_to_each(fn: Callable[..., Any], calls: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the results of a chunk of calls."""
    return [fn(*each) for each in calls]  # not by itertools: StopIteration is an error of `fn`


class Outcome(NamedTuple):
    """The outcome of a call."""

    result: Any
    failure: Failure | None
    seconds: float


class Failure(NamedTuple):
    """A worker's exception in a message to rank 0."""

    pickled: bytes  # b"" if it can't be pickled
    text: str
    traceback: str  # as Python prints it


class RemoteTraceback(Exception):
    """The cause of an exception from a worker; its text is the worker's traceback."""


def failure_of(error: BaseException) -> Failure:
    """Return the failure for an exception; its traceback begins with the program's own function.

    The worker also tries to unpickle the exception: many classes can't be unpickled because their ``__init__`` takes
    other arguments than `Exception` has.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(BELOW):
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    try:
        pickled = pkl5.pickle.dumps(error)
        if type(pkl5.pickle.loads(pickled)) is not type(error):
            pickled = b""
    except Exception:  # __reduce__ and __init__ can raise anything
        pickled = b""
    summary: Any = traceback.TracebackException(type(error), error, None)
    summary.__notes__ = None
    return Failure(bytes(pickled), list(summary.format_exception_only())[-1].strip(), "".join(lines))


def error_of(failure: Failure, call: object, rank: int) -> BaseException:
    """Return a worker's exception, with the worker's traceback as its cause; `rank` is the worker's."""
    cause = RemoteTraceback(f'\n"""\nrank {rank}, in {call}:\n{failure.traceback.rstrip()}\n"""')
    try:
        error: BaseException = pkl5.pickle.loads(failure.pickled)
        error.__cause__ = cause
    except Exception:  # a frozen dataclass refuses the cause
        error = DistError(
            f"{call} on rank {rank} raised {failure.text}; the exception itself can't be passed on, so this one stands "
            f"for it{on_rank()}"
        )
        error.__cause__ = cause
    return error
