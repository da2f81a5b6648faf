"""A worker: it runs the calls that rank 0 sends, until rank 0 stops it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpi4py import MPI
from mpi4py.util import pkl5

from ..core.timeouts import pause, pauses
from ..errors import on_rank
from .messages import TAG, Call, Failure, Outcome, Stop, failure_of

if TYPE_CHECKING:
    from ..core.group import ProcessGroup


class Worker:
    """A rank of `group` that serves rank 0 over the executor's communicator."""

    def __init__(self, group: ProcessGroup, comm: MPI.Intracomm) -> None:
        self._group = group
        self._comm = pkl5.Intracomm(comm)

    def serve(self, initializer: Callable[..., object] | None, initargs: Sequence[Any]) -> bool:
        """Call the initializer, then rank 0's calls, and answer each; return whether a rank has died."""
        if initializer is None:
            self._answer("", Outcome(None, None, 0.0))
        else:
            call = Call(initializer, initargs, {})
            self._answer(call, self._outcome(call))
            del call
        while True:
            self._wait_until(partial(self._comm.Iprobe, 0, TAG))
            try:
                received = self._comm.recv(None, 0, TAG)
            except (MPI.Exception, KeyboardInterrupt):
                raise
            except BaseException as error:  # from unpickling, for example of a module that calls sys.exit
                self._answer("a call", Outcome(None, self._not_loaded(error), 0.0))
                continue
            if isinstance(received, Stop):
                return received.has_lost
            call = Call(*received)
            del received
            self._answer(call, self._outcome(call))
            del call  # free the arrays before waiting

    def _outcome(self, call: Call) -> Outcome:
        began = time.perf_counter()
        try:
            result = self._group.dispatcher.run_task(call, call.make)
        except KeyboardInterrupt:  # the launcher sends Ctrl-C to every rank
            raise
        except BaseException as error:  # including sys.exit
            return Outcome(None, failure_of(error), time.perf_counter() - began)
        return Outcome(result, None, time.perf_counter() - began)

    def _answer(self, call: object, outcome: Outcome) -> None:
        try:
            request = self._comm.isend(tuple(outcome), 0, TAG)
        except MPI.Exception:
            raise
        except Exception as error:
            text = f"the result of {call}, a {type(outcome.result).__name__}, can't be pickled"
            substitute = TypeError(f"{text} ({type(error).__name__}: {error}){on_rank()}")
            substitute.__traceback__ = error.__traceback__
            request = self._comm.isend((None, failure_of(substitute), outcome.seconds), 0, TAG)
        self._wait_until(lambda: request.test()[0])

    def _wait_until(self, is_there: Callable[[], bool]) -> None:
        """Poll with growing pauses, which leave the core to others and let Ctrl-C through."""
        looks = pauses()
        while not is_there():
            pause(next(looks))

    def _not_loaded(self, error: BaseException) -> Failure:
        reason = f"{type(error).__name__}: {error}"
        rank = self._group.ranks[self._group.rank]
        substitute = TypeError(
            f"a call can't be made of its pickle on rank {rank} ({reason}); its function and the classes of its "
            f"arguments have to be defined on every rank, before `with hc.executor()`"
        )
        substitute.__traceback__ = error.__traceback__
        return failure_of(substitute)
