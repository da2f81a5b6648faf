"""Connection: a group's NCCL communicator, its stream, and the order between that stream and the program's.

1. A blocking operation goes on the program's current stream, as a kernel of the program's would: packing, NCCL's calls
   and unpacking, with no event.
2. An asynchronous one goes on the communicator's stream. That waits for what the current stream has been given so far;
   the current stream waits for the operation in ``Work.wait()``.
3. Where an operation goes on another stream than the one before it, its stream waits for that one.

The host waits for nothing, once NCCL has connected the ranks.

NCCL itself lets each kernel of a communicator wait for the one before, on whatever stream that was ("NCCL adds CUDA
events to enforce that", NVIDIA/nccl#574; `deviceStream` in its src/enqueue.cc). Its user guide does not promise that,
so rule 3 makes sure, except for what is on streams that the program has made: it is left to NCCL, because by the time
of the next operation they may have been destroyed, and CUDA must not be asked about them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ..core.work import Work
from ..cuda.seam import Communicator, Runtime, on_device
from ..cuda.time_limit import TimeLimit
from ..cuda.work import CudaWork
from ..errors import DistBackendError, DistTimeoutError, here
from .async_errors import AsyncErrors
from .plan import ISSUING, Plan, refuse_capture

DEFAULT_STREAM = 0  # of whichever GPU is the current one
LONGEST_ABORT = 5.0  # seconds
ABANDONED: list[Any] = []  # what NCCL may still use, because it could not be aborted


class Connection:
    """The state of a group on one GPU; `comm` is a communicator of the seam."""

    def __init__(
        self, runtime: Runtime, comm: Communicator, device: int, wait_blocks: bool, time_limit: TimeLimit | None = None
    ) -> None:
        self.runtime = runtime
        self.comm = comm
        self.device = device
        self.stream = runtime.create_stream(device)
        self.failure: DistBackendError | None = None
        self.ended_by: DistBackendError | None = None  # the failure, once it has ended what was in flight
        self._lock = threading.Lock()
        self._is_being_destroyed = False
        self._wait_blocks = wait_blocks
        self._last: int | None = None  # of this stream and the default one, that which had an operation last
        self._used: int | None = None  # the stream of the last operation, which has waited for `_last`
        self._mark = runtime.create_event(device)
        self._events: list[int] = []  # not in use
        self._in_flight: dict[int, Any] = {}  # by the event that marks its end: what must be kept until then
        self._batch: list[tuple[tuple[Plan, Any], CudaWork]] | None = None
        if time_limit is not None:
            time_limit.failure = lambda: self.failure
        self._async_errors = AsyncErrors(self._look, self.fail)

    # -- operations ------------------------------------------------------------------------------

    def plan(self, async_op: bool) -> Plan:
        """Begin an operation: choose its stream."""
        self.raise_failure()
        is_elsewhere = self.runtime.current_device() != self.device
        if is_elsewhere:
            with on_device(self.runtime, self.device):
                stream = self._next_stream(async_op)
        else:
            stream = self._next_stream(async_op)
        plan = Plan(self.runtime, self.comm, self.device, stream)
        plan.is_elsewhere = is_elsewhere
        return plan

    def kept_plan(self) -> Plan:
        """Begin the plan of a persistent operation, for `start`."""
        self.raise_failure()
        plan = Plan(self.runtime, self.comm, self.device, self.stream)
        plan.is_kept = True
        return plan

    def keep(self, plan: Plan) -> None:
        """Make the memory of a kept plan usable on any stream: wait for its former use."""
        if plan.alive:
            with on_device(self.runtime, self.device):
                self.runtime.synchronize_stream(plan.stream)

    def start(self, plan: Plan, arrays: Any) -> Work | None:
        """Run a plan that is kept, and return its Work; while a CUDA graph is captured, put it in there."""
        self.raise_failure()
        with on_device(self.runtime, self.device):
            current = self.runtime.current_stream(self.device)
            is_captured = self.runtime.is_capturing(current)
            stream = current if is_captured else self._behind(current, async_op=True)
            return self._run(plan, stream, not is_captured, arrays)

    def _next_stream(self, async_op: bool) -> int:
        """Return the stream of the next operation, which has been made to wait for what comes before."""
        current = self.runtime.current_stream(self.device)
        if async_op:
            refuse_capture(self.runtime, current, "an asynchronous operation")
        return self._behind(current, async_op)

    def _behind(self, current: int, async_op: bool) -> int:
        stream = self.stream if async_op else current
        if self._batch is None:
            self._follow(stream, current)
            if self._last is not None and self._last != current and self._used != stream:
                if stream != DEFAULT_STREAM and self.runtime.is_capturing(stream):
                    return stream  # CUDA lets no graph wait for what is outside of it; NCCL sees to the order
                self._follow(stream, self._last)
            if async_op or stream == DEFAULT_STREAM:
                self._last = stream
            self._used = stream
        return stream

    def _follow(self, stream: int, earlier: int) -> None:
        """Make a stream wait for the work that an earlier one has been given so far."""
        if stream != earlier:
            self.runtime.record(self._mark, earlier)
            self.runtime.wait(stream, self._mark)

    def end(self, plan: Plan, async_op: bool, arrays: Any, host_waits: bool = False) -> Work | None:
        """Do what is planned; `host_waits`, of a blocking operation: also until that is done."""
        if plan.is_elsewhere:
            with on_device(self.runtime, self.device):
                return self._run(plan, plan.stream, async_op, arrays, host_waits)
        return self._run(plan, plan.stream, async_op, arrays, host_waits)

    def _run(self, plan: Plan, stream: int, async_op: bool, arrays: Any, host_waits: bool = False) -> Work | None:
        with ISSUING:
            self.raise_failure()  # the communicator is gone
            try:
                plan.run(stream)
            except DistTimeoutError as error:
                self._is_stuck(error)
        if async_op:
            work = CudaWork(self.runtime, self.device, self._let_go, lambda: self.ended_by, self._wait_blocks)
            in_use = plan, arrays
            if self._batch is None:
                self._mark_end(in_use, work)
            else:
                self._batch.append((in_use, work))
            return work
        plan.unpack(stream)
        if host_waits or (self._wait_blocks and not plan.is_kept):  # a kept one is being captured
            self.runtime.synchronize_stream(stream)
            self.raise_failure()
        return None

    @contextmanager
    def _issuing(self) -> Iterator[None]:
        """Call NCCL inside the block, where no other thread does."""
        with ISSUING:
            self.raise_failure()  # the communicator is gone
            try:
                yield
            except DistTimeoutError as error:
                self._is_stuck(error)

    def _is_stuck(self, error: DistTimeoutError) -> NoReturn:
        """Give the communicator up: it is in the middle of a call, and would take no other."""
        self.fail(f"no end of a call: {error}")
        raise error

    def _mark_end(self, in_use: tuple[Plan, Any], work: CudaWork) -> None:
        in_use[0].unpack(self.stream)
        event = self._events.pop() if self._events else self.runtime.create_event(self.device)
        self.runtime.record(event, self.stream)
        work.launched(event)
        self._in_flight[event] = in_use

    def _let_go(self, event: int) -> None:
        """Release the arrays in flight until an event, which may be used again; twice is once."""
        if self._in_flight.pop(event, None) is not None:
            self._events.append(event)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Launch the asynchronous operations of the block as one group call of NCCL; `plan` has been called."""
        with self._issuing():
            self._batch = []
            self.comm.group_start()
            try:
                yield
            finally:
                launched, self._batch = self._batch, None
                try:
                    self.comm.group_end()
                finally:
                    for in_use, work in launched:  # nothing of NCCL was on the stream before the end of the group
                        self._mark_end(in_use, work)

    def split(self, color: int, key: int, time_limit: TimeLimit | None) -> Communicator | None:
        """Split the communicator (ncclCommSplit); every rank of the group calls it."""
        with on_device(self.runtime, self.device):
            self.synchronize()  # NCCL wants nothing in flight
            with self._issuing():
                return self.comm.split(color, key, time_limit)

    def synchronize(self) -> None:
        """Block the host until the current stream and this one have done everything; the GPU is the current one."""
        self.runtime.synchronize_stream(self._next_stream(async_op=True))
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error of NCCL, if there is one; it ends everything on the stream."""
        if self.failure is not None:
            raise self.failure

    # -- life ------------------------------------------------------------------------------------

    def _look(self) -> str | None:
        """Return the text of NCCL's asynchronous error, if there is one and no thread is in the middle of a call."""
        if not ISSUING.acquire(blocking=False):
            return None
        try:
            return None if self.failure is not None else self.comm.async_error()  # it may have been aborted
        finally:
            ISSUING.release()

    def fail(self, reason: str) -> None:
        """Note the error of NCCL, and abort everything in flight, which would never complete."""
        with self._lock:
            self.failure = DistBackendError(
                f"NCCL reports {reason}; the group's operations on GPU arrays have been ended, and it takes no more"
                f"{here()}"
            )
            may_abort = not self._is_being_destroyed
        if may_abort and not self._has_aborted():
            ABANDONED.append(dict(self._in_flight))  # NCCL may still write there
        self.ended_by = self.failure  # Works end with it

    def _has_aborted(self) -> bool:
        """Abort the communicator, unless a thread stays inside NCCL: what that uses must not be freed."""
        if not ISSUING.acquire(timeout=LONGEST_ABORT):
            return False
        try:
            return within(LONGEST_ABORT, self._abort_communicator)
        except Exception:  # of CUDA: nothing is known of what is in flight
            return False
        finally:
            ISSUING.release()

    def _abort_communicator(self) -> None:
        self.runtime.use_device(self.device)  # of this thread, so that NCCL does not touch GPU 0
        self.comm.abort()

    def abort(self) -> None:
        """Abort everything in flight, within seconds and without the other ranks."""
        self._async_errors.stop()
        if self.failure is None:
            self.fail("nothing: the program has aborted the group")

    def destroy(self, timeout: float) -> None:
        """Finish what is in flight and free everything; every rank of the group calls it."""
        self._async_errors.stop()
        if self.failure is None and not within(timeout, self._destroy_communicator):
            self.fail("no end of what is in flight")
            raise DistTimeoutError(
                f"NCCL's communicator could not be destroyed within {timeout:g} s, and was given up. Has every rank "
                f"destroyed the group?{here()}"
            )
        for event in (self._mark, *self._events):
            self.runtime.destroy_event(event)
        self.runtime.destroy_stream(self.stream)

    def _destroy_communicator(self) -> None:
        self.runtime.use_device(self.device)
        self.runtime.synchronize_stream(self.stream)
        with self._lock:
            if self.failure is not None:  # it has been aborted meanwhile
                return
            self._is_being_destroyed = True
        self.comm.destroy()


def within(seconds: float, action: Callable[[], None]) -> bool:
    """Run `action` in a thread; return whether it ended in time, and raise what it raised."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            action()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="hpccomm-nccl-end", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return not thread.is_alive()
