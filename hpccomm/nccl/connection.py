"""Connection: a group's NCCL communicator, its stream, and the order between that stream and the program's.

1. A blocking operation goes on the program's current stream, as a kernel of the program's would: packing, NCCL's calls
   and unpacking, with no event.
2. An asynchronous one goes on the communicator's stream. That waits for what the current stream has been given so far;
   the current stream waits for the operation in ``Work.wait()``.
3. Where an operation goes on another stream than the one before it, its stream waits for that one.

The host waits for nothing.

NCCL itself lets each kernel of a communicator wait for the one before, on whatever stream that was ("NCCL adds CUDA
events to enforce that", NVIDIA/nccl#574; `deviceStream` in its src/enqueue.cc). Its user guide does not promise that,
so rule 3 makes sure, except for what is on streams that the program has made: it is left to NCCL, because by the time
of the next operation they may have been destroyed, and CUDA must not be asked about them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..core.work import Work
from ..cuda.seam import NCCL, Communicator, Runtime, on_device
from ..cuda.work import CudaWork
from ..errors import DistBackendError, DistTimeoutError, here
from .async_errors import AsyncErrors
from .launch import ISSUING, Launch, refuse_capture

DEFAULT_STREAM = 0  # of whichever GPU is the current one
LONGEST_ABORT = 5.0  # seconds
ABANDONED: list[Any] = []  # what NCCL may still use, because it could not be aborted


class Connection:
    """The state of a group on one GPU; `comm` is a communicator of the seam."""

    def __init__(self, nccl: NCCL, runtime: Runtime, comm: Communicator, device: int, wait_blocks: bool) -> None:
        self.nccl = nccl
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
        self._batch: list[tuple[Launch, CudaWork]] | None = None
        self._async_errors = AsyncErrors(comm, self.fail)

    def launch(self, async_op: bool) -> Launch:
        """Begin an operation: choose its stream."""
        self.raise_failure()
        is_elsewhere = self.runtime.current_device() != self.device
        if is_elsewhere:
            with on_device(self.runtime, self.device):
                stream = self._next_stream(async_op)
        else:
            stream = self._next_stream(async_op)
        return Launch(self.nccl, self.runtime, self.comm, self.device, stream, is_elsewhere)

    def _next_stream(self, async_op: bool) -> int:
        """Return the stream of the next operation, which has been made to wait for what comes before."""
        current = self.runtime.current_stream(self.device)
        if async_op:
            refuse_capture(self.runtime, current, "an asynchronous operation")
        stream = self.stream if async_op else current
        if self._batch is None:
            self._follow(stream, current)
            if self._last is not None and self._last != current and self._used != stream:
                if self.runtime.is_capturing(stream):
                    return stream  # a graph can't wait for what is not in it: NCCL does (NCCL_GRAPH_MIXING_SUPPORT)
                self._follow(stream, self._last)
            if async_op or stream == DEFAULT_STREAM:
                self._last = stream
            self._used = stream
        return stream

    def _follow(self, stream: int, earlier: int) -> None:
        """Let a stream wait for what an earlier one has been given so far."""
        if stream != earlier:
            self.runtime.record(self._mark, earlier)
            self.runtime.wait(stream, self._mark)

    def end(self, launch: Launch, async_op: bool, arrays: Any, host_waits: bool = False) -> Work | None:
        """Make NCCL's calls, and unpack; `host_waits`, of a blocking operation: also until that is done."""
        if launch.is_elsewhere:
            with on_device(self.runtime, self.device):
                return self._end(launch, async_op, arrays, host_waits)
        return self._end(launch, async_op, arrays, host_waits)

    def _end(self, launch: Launch, async_op: bool, arrays: Any, host_waits: bool) -> Work | None:
        with ISSUING:
            self.raise_failure()  # the communicator is gone
            launch.make_calls()
        if async_op:
            work = CudaWork(self.runtime, self.device, self._let_go, lambda: self.ended_by, self._wait_blocks)
            launch.alive.append(arrays)
            if self._batch is None:
                self._mark_end(launch, work)
            else:
                self._batch.append((launch, work))
            return work
        launch.unpack()
        if host_waits or self._wait_blocks:
            self.runtime.synchronize_stream(launch.stream)
            self.raise_failure()
        return None

    def _mark_end(self, launch: Launch, work: CudaWork) -> None:
        launch.unpack()
        event = self._events.pop() if self._events else self.runtime.create_event(self.device)
        self.runtime.record(event, self.stream)
        work.launched(event)
        self._in_flight[event] = launch.alive

    def _let_go(self, event: int) -> None:
        """Let go of what was in flight until an event, which may be used again."""
        self._in_flight.pop(event, None)
        self._events.append(event)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Launch the asynchronous operations of the block as one group call of NCCL; `launch` has been called."""
        with ISSUING:
            self._batch = []
            self.nccl.group_start()
            try:
                yield
            finally:
                launches, self._batch = self._batch, None
                try:
                    self.nccl.group_end()
                finally:
                    for launch, work in launches:  # nothing of NCCL was on the stream before the end of the group
                        self._mark_end(launch, work)

    def synchronize(self) -> None:
        """Block the host until the current stream and this one have done everything; the GPU is the current one."""
        self.runtime.synchronize_stream(self._next_stream(async_op=True))
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error of NCCL, if there is one; it ends everything on the stream."""
        if self.failure is not None:
            raise self.failure

    # -- life ------------------------------------------------------------------------------------

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
        """Abort the communicator, where no other thread is inside NCCL, or does not come out of it."""
        try:
            is_alone = ISSUING.acquire(timeout=LONGEST_ABORT)
            try:
                return within(LONGEST_ABORT, self._abort_communicator)
            finally:
                if is_alone:
                    ISSUING.release()
        except Exception:  # of CUDA: nothing is known of what is in flight
            return False

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
