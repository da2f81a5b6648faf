"""Connection: a group's NCCL communicator, its stream, and the order of operations on its stream and the program's.

1. A blocking operation runs on the program's current stream, without an event (except in last_operation.py).
2. An asynchronous operation runs on the communicator's stream, which waits for earlier work on the current stream; the
   current stream waits for the operation in ``Work.wait()``.
3. If consecutive operations run on different streams, the second stream waits for the first.

The host never waits, once NCCL has connected the ranks.

NCCL itself makes each kernel of a communicator wait for the one before, on any stream ("NCCL adds CUDA events to
enforce that", NVIDIA/nccl#574; `deviceStream` in its src/enqueue.cc). Its user guide does not promise it: hence rule 3.
Rule 3 excludes streams that the program has made: they may have been destroyed before the next operation, and CUDA must
not be asked about them. NCCL alone orders those.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from .. import native
from ..core.timeouts import keeps_time
from ..core.work import Work
from ..cuda.seam import Communicator, Runtime, on_device
from ..cuda.time_limit import TimeLimit
from ..cuda.work import CudaWork
from ..errors import DistBackendError, DistTimeoutError, on_rank
from .async_errors import AsyncErrors
from .last_operation import LastOperation
from .plan import ISSUING, Plan, refuse_capture

T = TypeVar("T")
NO_STREAM, DEFAULT_STREAM = -1, 0  # the latter: of the current GPU
LONGEST_ABORT = 5.0  # seconds
# The GPUs with loaded kernels for unpacking. CUDA loads a kernel at its first launch, and may wait there until the GPU
# is idle (its programming guide, "Lazy Loading"): behind a receive the host would block, while the sender waits for
# this rank.
HAVE_KERNELS: set[int] = set()
ABANDONED: list[Any] = []  # arrays that NCCL may still use, because it could not be aborted


class Issuing:
    """The order of a communicator's operations; without the compiled extension, whose class has the same attributes."""

    def __init__(self) -> None:
        self.last_own = NO_STREAM  # of the last operation that was on the communicator's stream or the default one
        self.last = NO_STREAM  # of the last operation, which has waited for `last_own`; or one that has waited since
        self.newest = 0  # the event after the newest operation on the communicator's stream
        self.has_failed = False
        self.calling = threading.RLock()  # held during each call of the communicator


class Connection:
    """A group's communicator on one GPU."""

    def __init__(
        self, runtime: Runtime, comm: Communicator, device: int, wait_blocks: bool, time_limit: TimeLimit | None
    ) -> None:
        self.runtime = runtime
        self.comm = comm
        self.device = device
        self.stream = runtime.create_stream(device)
        self.failure: DistBackendError | None = None
        self.ended_by: DistBackendError | None = None  # the failure, once operations in flight have ended with it
        self.why_ended = partial(getattr, self, "ended_by")  # no Python function: each Work calls it in every poll
        self._lock = threading.Lock()
        self._is_being_destroyed = False
        self.wait_blocks = wait_blocks
        self.issuing: Any = Issuing() if native.fastpath is None else native.fastpath.Issuing(ISSUING)
        self.last = LastOperation(runtime, device, self.why_ended)
        self._called_on: int | None = None  # the current stream at the last call
        self.order = runtime.create_event(device)
        self.events: list[int] = []  # free for reuse
        self.in_flight: dict[int, Any] = {}  # plan and arrays, by the event after which they may be freed
        self._batch: list[tuple[Plan, Any, CudaWork]] | None = None
        self._windows: list[int] = []
        if time_limit is not None:
            time_limit.failure = lambda: self.failure
        if device not in HAVE_KERNELS:
            with on_device(runtime, device):
                runtime.load_copies(device, self.stream)
            HAVE_KERNELS.add(device)
        self._async_errors = AsyncErrors(self._look, self.fail)

    # -- operations ------------------------------------------------------------------------------

    def plan(self, async_op: bool) -> Plan:
        """Return an empty plan on the stream of the next operation."""
        self.raise_failure()
        is_here = self.runtime.current_device() == self.device
        stream = self._on_its_gpu(is_here, self._next_stream, async_op)
        return Plan(self.runtime, self.comm, self.device, stream, is_here)

    def persistent_plan(self) -> Plan:
        """Return an empty plan of a persistent operation, for `start`."""
        self.raise_failure()
        plan = Plan(self.runtime, self.comm, self.device, self.stream)
        plan.is_persistent = True
        return plan

    def prepare(self, plan: Plan) -> None:
        """Block the host until any stream may use the temporary memory of a persistent plan."""
        if plan.alive:
            with on_device(self.runtime, self.device):
                self.runtime.synchronize_stream(plan.stream)

    def start(self, plan: Plan, arrays: Any) -> Work | None:
        """Run a persistent plan and return its Work; None if a CUDA graph captures it."""
        self.raise_failure()
        with on_device(self.runtime, self.device):
            current = self.runtime.current_stream(self.device)
            is_captured = self.runtime.is_capturing(current)
            stream = current if is_captured else self._ordered_stream(current, async_op=True)
            return self._run(plan, stream, not is_captured, arrays)

    def _next_stream(self, async_op: bool) -> int:
        """Return the stream of the next operation, after making it wait for earlier operations."""
        current = self.runtime.current_stream(self.device)
        if async_op:
            refuse_capture(self.runtime, current, "an asynchronous operation")
        return self._ordered_stream(current, async_op)

    def _ordered_stream(self, current: int, async_op: bool) -> int:
        stream = self.stream if async_op else current
        self._called_on = current
        if self._batch is None:
            if stream != current:
                self._follow(stream, current)
            issuing, last_own = self.issuing, self.issuing.last_own
            if last_own not in (NO_STREAM, current, stream) and issuing.last != stream:
                if stream != DEFAULT_STREAM and self.runtime.is_capturing(stream):
                    return stream  # a graph can't wait for work outside of it; NCCL keeps the order
                if last_own == self.stream and issuing.newest:
                    self.runtime.wait(stream, issuing.newest)
                else:
                    self._follow(stream, last_own)
            if async_op or stream == DEFAULT_STREAM:
                issuing.last_own = stream
            issuing.last = stream
        return stream

    def _follow(self, stream: int, earlier: int) -> None:
        """Make a stream wait for the work that is on another stream now."""
        self.runtime.record(self.order, earlier)
        self.runtime.wait(stream, self.order)

    def end(self, plan: Plan, async_op: bool, arrays: Any) -> Work | None:
        """Run a plan."""
        return self._on_its_gpu(plan.is_here, self._run, plan, plan.stream, async_op, arrays)

    def _on_its_gpu(self, is_here: bool, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function with the connection's GPU as the current one; `is_here` says that it is already."""
        if is_here:
            return function(*arguments)
        with on_device(self.runtime, self.device):
            return function(*arguments)

    def _run(self, plan: Plan, stream: int, async_op: bool, arrays: Any) -> Work | None:
        while async_op and len(self.events) <= len(self._batch or ()):  # before anything is in flight
            self.events.append(self.runtime.create_event(self.device))
        self._issue(plan.run, (stream,))
        if async_op:
            if self._batch is None:
                return self._work(self._end_event(plan, arrays))
            work = self._work()
            self._batch.append((plan, arrays, work))
            return work
        plan.unpack(stream)
        if self.wait_blocks and not self.runtime.is_capturing(stream):
            self.wait_for(stream)
        return None

    def _issue(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        """Call a function that calls NCCL, while no other thread does."""
        with ISSUING, self.issuing.calling:
            if self.failure is not None:  # the communicator is gone
                raise self.failure
            try:
                return function(*arguments)
            except DistTimeoutError as error:
                self.give_up_call(error)
                raise

    def _work(self, event: int = 0) -> CudaWork:
        work = CudaWork(
            self.runtime, self.device, self._release, self.why_ended, self.wait_blocks, event, self.in_flight
        )
        work.called_on = self._called_on
        return work

    @keeps_time  # ncclCommAbort may take a second, beyond the time limit
    def give_up_call(self, error: DistTimeoutError) -> None:
        """Give up the communicator: it can't take another call during an unfinished one."""
        self.fail(f"no end of a call: {error}")

    def _end_event(self, plan: Plan | None, arrays: Any, stream: int | None = None) -> int:
        """Record and return an event after an operation, on `stream` or the connection's; keep its arrays until it."""
        if plan is not None:
            plan.unpack(self.stream)
        event = self.events.pop() if self.events else self.runtime.create_event(self.device)
        self.runtime.record(event, self.stream if stream is None else stream)
        if stream is None:
            self.issuing.newest = event
        self.in_flight[event] = plan, arrays
        return event

    def _release(self, event: int) -> None:
        """Release an event and the arrays in flight until it; a second call does nothing."""
        if self.in_flight.pop(event, None) is not None:
            self.events.append(event)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Launch the asynchronous operations of the block as one NCCL group, after one call of `plan`."""
        with ISSUING, self.issuing.calling:
            self._issue(self.comm.group_start, ())
            self._batch = []
            try:
                yield
            finally:
                launched, self._batch = self._batch, None
                try:
                    self.comm.group_end()
                except DistTimeoutError as error:
                    self.give_up_call(error)
                    raise
                finally:
                    for each, arrays, work in launched:  # before the end of the group, nothing is on the stream
                        work.launched(self._end_event(each, arrays))

    def wait_for(self, stream: int) -> None:
        """Block the host until everything on the stream is done; host operations in flight make progress meanwhile."""
        with on_device(self.runtime, self.device):
            self._work(self._end_event(None, (), stream)).synchronize()

    def prepare_split(self) -> None:
        """Block the host until no operation is in flight, as ncclCommSplit requires."""
        self.raise_failure()
        with on_device(self.runtime, self.device):
            self.wait_for(self._next_stream(async_op=True))

    def split(self, color: int, key: int, time_limit: TimeLimit | None) -> Communicator | None:
        """Split the communicator (ncclCommSplit); every rank of the group calls it, after `prepare_split`."""
        with on_device(self.runtime, self.device):
            return self._issue(self.comm.split, (color, key, time_limit))

    def register_window(self, memory: int, nbytes: int) -> None:
        """Register symmetric memory for the life of the connection; every rank of the group calls it, on its GPU."""
        if window := self._issue(self.comm.register_window, (memory, nbytes)):
            self._windows.append(window)

    def raise_failure(self) -> None:
        """Raise the NCCL error that has ended all operations, if there is one."""
        if self.failure is not None:
            raise self.failure

    # -- life ------------------------------------------------------------------------------------

    def _look(self) -> str | None:
        """Return the text of NCCL's asynchronous error, if any; None while a thread is in a call of the communicator.

        ncclCommGetAsyncError may complete a call of a non-blocking communicator, and only one thread may do that.
        """
        if not self.issuing.calling.acquire(blocking=False):
            return None
        try:
            return None if self.failure is not None else self.comm.async_error()  # it may have been aborted
        finally:
            self.issuing.calling.release()

    def fail(self, reason: str) -> None:
        """Set the NCCL error, and abort the operations in flight, which would never complete."""
        with self._lock:
            self.failure = DistBackendError(
                f"NCCL reports {reason}; the group's operations on GPU arrays have been ended, and it takes no more"
                f"{on_rank()}"
            )
            self.issuing.has_failed = True
            may_abort = not self._is_being_destroyed
        if may_abort and not self._has_aborted():
            ABANDONED.append(dict(self.in_flight))  # NCCL may still write to them
        self.ended_by = self.failure  # Works end with it

    def _has_aborted(self) -> bool:
        """Abort the communicator; return False if a thread is stuck in NCCL, so that nothing may be freed."""
        if not self.issuing.calling.acquire(timeout=LONGEST_ABORT):
            return False
        try:
            return within(LONGEST_ABORT, self._abort_communicator)
        except Exception:  # of CUDA: the state of operations in flight is unknown
            return False
        finally:
            self.issuing.calling.release()

    def _abort_communicator(self) -> None:
        self.runtime.use_device(self.device)  # in this thread: otherwise NCCL would use GPU 0
        self.comm.abort()

    def abort(self) -> None:
        """Abort all operations in flight, within seconds and without the other ranks."""
        self._async_errors.stop()
        if self.failure is None:
            self.fail("nothing: the program has aborted the group")

    def destroy(self, timeout: float) -> None:
        """Complete the operations in flight and free everything; every rank of the group calls it."""
        self._async_errors.stop()
        current = self.runtime.current_stream(self.device)  # of this thread
        if self.failure is None and not within(timeout, partial(self._destroy_communicator, current)):
            self.fail("no end of what is in flight")
            raise DistTimeoutError(
                f"NCCL's communicator could not be destroyed within {timeout:g} s, and was given up. Has every rank "
                f"destroyed the group?{on_rank()}"
            )
        self.last.close()
        with on_device(self.runtime, self.device):
            for event in (self.order, *self.events):
                self.runtime.destroy_event(event)
            self.runtime.destroy_stream(self.stream)

    def _destroy_communicator(self, current: int) -> None:
        with on_device(self.runtime, self.device):
            for stream in (self.stream, current) if self._windows else (self.stream,):
                self.runtime.synchronize_stream(stream)
        with self._lock:
            if self.failure is not None:  # it has been aborted meanwhile
                return
            self._is_being_destroyed = True
        for window in self._windows:
            self.comm.deregister_window(window)
        self.comm.destroy()


def within(seconds: float, action: Callable[[], None]) -> bool:
    """Run `action` in a thread; return True if it has ended in time, and raise its error."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            action()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="hpccomm-nccl-end", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread starts while Python 3.12 exits
        run()
    else:
        thread.join(seconds)
    if errors:
        raise errors[0]
    return not thread.is_alive()
