"""Contender: the base class of all contenders, which implements the benchmarks of messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from ..registry import Arrays, Benchmark, Case

if TYPE_CHECKING:
    from mpi4py import MPI

    from ... import ProcessGroup

Call: TypeAlias = Callable[[], Any]
Method: TypeAlias = Callable[[Any, Case, Arrays, bool], Call]  # a contender's method for one benchmark


class Unsupported(Exception):
    """The contender can't do this operation, or not with this dtype or reduction."""


class Contender:
    """A library that does the work of the benchmarks; see the package's docstring."""

    name: ClassVar[str]
    own_arrays: ClassVar[bool] = False  # True: it needs other arrays than the other contenders
    # Raised before any communication for an unsupported operation, dtype or reduction.
    refusals: ClassVar[tuple[type[Exception], ...]] = (Unsupported, NotImplementedError, TypeError, ValueError)

    def __init__(self, group: ProcessGroup, comm: MPI.Intracomm) -> None:
        self.group = group
        self.comm = comm  # the contender's own, with the same ranks

    @classmethod
    def missing(cls) -> str | None:
        """Return the reason why the contender can't run here, or None."""
        return None

    def arrays(self, benchmark: Benchmark, case: Case) -> Arrays:
        """Return this contender's own arrays; only called if it does not share the others' arrays."""
        return benchmark.arrays(case)

    def release(self) -> None:
        """Release the arrays made by `arrays`; every rank calls it."""

    def close(self) -> None:
        """Release communicators and groups; every rank calls it."""

    def start(self, benchmark: Benchmark, case: Case, arrays: Arrays) -> Call:
        """Return a call that starts the operation and returns a handle for `wait` and `poll`."""
        return self._call(benchmark, case, arrays, True)

    def call(self, benchmark: Benchmark, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Return a call of the whole operation: a blocking call, or a start and a wait."""
        call = self._call(benchmark, case, arrays, async_op)
        if not async_op or benchmark.kind == "message":  # calls of messages include the wait
            return call
        wait = self.wait
        return lambda: wait(call())

    def _call(self, benchmark: Benchmark, case: Case, arrays: Arrays, async_op: bool) -> Call:
        method = getattr(self, benchmark.name, None)
        if method is None:
            raise Unsupported(f"{self.name} has no {benchmark.name}")
        made: Call = method(case, arrays, async_op)
        return made

    # -- messages --------------------------------------------------------------------------------------

    def wait(self, handle: Any) -> Any:
        """Wait for a started operation."""
        raise NotImplementedError

    def poll(self, handle: Any) -> bool:
        """Return True if the operation is done; the library may make progress in this call."""
        raise NotImplementedError

    def wait_all(self, handles: Iterable[Any]) -> None:
        """Wait for several operations."""
        for handle in handles:
            self.wait(handle)

    def sender(self, array: Any, peer: int, async_op: bool) -> Call:
        """Return a call that sends `array`, or starts to send it."""
        raise NotImplementedError

    def receiver(self, array: Any, peer: int, async_op: bool) -> Call:
        """Return a call that receives into `array`, or starts to receive."""
        raise NotImplementedError

    def together(self, starts: Sequence[Call]) -> Call:
        """Return a call that starts all of these messages and waits for them."""
        wait_all = self.wait_all
        return lambda: wait_all([start() for start in starts])

    def sendrecv(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Start a receive from the left neighbour and a send to the right one, and wait for both."""
        return self.together(
            [self.receiver(arrays.receive, case.left, True), self.sender(arrays.send, case.right, True)]
        )

    def ping_pong(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Send and receive, or receive and send; the lower rank of a pair sends first."""
        if case.peer is None:
            return idle
        send = self.sender(arrays.send, case.peer, async_op)
        receive = self.receiver(arrays.receive[0], case.peer, async_op)
        first, second = (send, receive) if case.rank < case.peer else (receive, send)
        wait = self.wait
        if async_op:
            return lambda: (wait(first()), wait(second()))
        return lambda: (first(), second())

    def bidirectional(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Start all receives, then all sends, and wait for all."""
        if case.peer is None:
            return idle
        starts = [self.receiver(array, case.peer, True) for array in arrays.receive]
        return self.together(starts + [self.sender(arrays.send, case.peer, True)] * case.window)

    def message_rate(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Start all sends or all receives, wait for them, and send one element back."""
        if case.peer is None:
            return idle
        wait_all = self.wait_all
        if case.rank < case.peer:
            starts = [self.sender(arrays.send, case.peer, True)] * case.window
            answer = self.receiver(arrays.receive[0][:1], case.peer, False)
        else:
            starts = [self.receiver(array, case.peer, True) for array in arrays.receive]
            answer = self.sender(arrays.send[:1], case.peer, False)

        def window() -> None:
            wait_all([start() for start in starts])
            answer()

        return window


def idle() -> None:
    """Do nothing: the call of a rank without a partner."""
