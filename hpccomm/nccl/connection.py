"""Connection: a group's NCCL communicator, its stream, and the order between that stream and the program's.

The rule, for every operation:

1. The communicator's stream waits for what the program's current stream has been given so far.
2. Packing, NCCL's calls and unpacking go on the communicator's stream.
3. The current stream waits for all that: at once, or, of an asynchronous operation, in ``Work.wait()``.

The host waits for nothing.
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
from .launch import Launch
from .watchdog import Watchdog

LONGEST_ABORT = 5.0  # seconds


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
        self._before = runtime.create_event(device)
        self._after = runtime.create_event(device)
        self._events: list[int] = []  # not in use
        self._batch: list[tuple[Launch, CudaWork]] | None = None
        self._watchdog = Watchdog(comm, self.fail)

    def launch(self) -> Launch:
        """Begin an operation: what follows on the stream waits for the current stream."""
        if self.runtime.current_device() != self.device:  # the default stream has the same address on every GPU
            with on_device(self.runtime, self.device):
                return self.launch()
        self.raise_failure()
        if self._batch is None:
            self.runtime.record(self._before, self.runtime.current_stream(self.device))
            self.runtime.wait(self.stream, self._before)
        return Launch(self.nccl, self.runtime, self.comm, self.device, self.stream)

    def end(self, launch: Launch, async_op: bool, arrays: Any) -> Work | None:
        """Make NCCL's calls; a Work waits for them, or the current stream does."""
        if self.runtime.current_device() != self.device:
            with on_device(self.runtime, self.device):
                return self.end(launch, async_op, arrays)
        launch.make_calls()
        if async_op:
            work = CudaWork(self.runtime, self.device, self._events, lambda: self.ended_by, self._wait_blocks)
            launch.alive.append(arrays)
            if self._batch is None:
                self._mark_end(launch, work)
            else:
                self._batch.append((launch, work))
            return work
        launch.unpack()
        self.runtime.record(self._after, self.stream)
        self.runtime.wait(self.runtime.current_stream(self.device), self._after)
        if self._wait_blocks:
            self.runtime.synchronize_event(self._after)
            self.raise_failure()
        return None

    def _mark_end(self, launch: Launch, work: CudaWork) -> None:
        launch.unpack()
        event = self._events.pop() if self._events else self.runtime.create_event(self.device)
        self.runtime.record(event, self.stream)
        work.launched(event, launch.alive)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Launch the asynchronous operations of the block as one group call of NCCL; `launch` has been called."""
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
        """Block the host until the stream has done everything."""
        self.runtime.synchronize_stream(self.stream)
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
        if may_abort:
            within(LONGEST_ABORT, self._abort_communicator)
        self.ended_by = self.failure  # from now on nothing of NCCL uses the memory of Works

    def _abort_communicator(self) -> None:
        self.runtime.use_device(self.device)  # of this thread, so that NCCL does not touch GPU 0
        self.comm.abort()

    def abort(self) -> None:
        """Abort everything in flight, within seconds and without the other ranks."""
        self._watchdog.stop()
        if self.failure is None:
            self.fail("nothing: the program has aborted the group")

    def destroy(self, timeout: float) -> None:
        """Finish what is in flight and free everything; every rank of the group calls it."""
        self._watchdog.stop()
        if self.failure is None and not within(timeout, self._destroy_communicator):
            self.fail("no end of what is in flight")
            raise DistTimeoutError(
                f"NCCL's communicator could not be destroyed within {timeout:g} s, and was given up. Has every rank "
                f"destroyed the group?{here()}"
            )
        for event in (self._before, self._after, *self._events):
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
