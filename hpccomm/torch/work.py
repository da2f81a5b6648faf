"""c10d's Work and Future around hpccomm's Work."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work as C10DWork

from ..core import progress
from ..core.work import Work
from .dynamo import not_compiled
from .streams import current_stream


@not_compiled
class PendingWork(C10DWork):
    """An operation in flight; `work` is hpccomm's Work."""

    _future: torch.futures.Future[Any] | None = None
    profiled: torch.futures.Future[Any] | None = None  # completes when its torch.profiler event has ended

    def __init__(self, work: Work, result: Any) -> None:
        super().__init__()
        self._work = work
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is done; without a time-out, or with zero, the group's timeout applies."""
        is_done = self._work.wait(timeout or None)
        if self.profiled is not None:  # another thread may be ending the event, and the profiler may be gone next
            self.profiled.wait()
        return is_done

    def synchronize(self) -> None:
        """Block until the operation is done."""
        self._work.synchronize()

    def is_completed(self) -> bool:
        """Return True once the operation has ended, successfully or not."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Return True if the operation has succeeded."""
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        """Return the operation's error, or None."""
        return self._work.exception()

    def result(self) -> Any:
        """Wait for the operation and return its outputs."""
        self.wait()
        return self._result

    def source_rank(self) -> int:
        """Wait for the message and return the sender's rank in the group."""
        self._work.wait()
        if self._work.source is None:
            raise RuntimeError("only a receive has a source rank")
        return self._work.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a Future that hpccomm's progress thread completes, unless the operation has ended already.

        It is made by `then`, because DDP waits in C++, which sees an error only if a callback of `then` raises it.
        """
        if self._future is None:
            ended: torch.futures.Future[Any] = torch.futures.Future(devices=self._devices())
            self._future = ended.then(self._value)
            self._work.add_done_callback(lambda _: ended.set_result(None))
            if progress.is_ahead_of(self._work) or not self._work.has_ended():
                progress.drive(self._work)
        return self._future

    def _value(self, _: object) -> Any:
        error = self._work.exception()
        if error is not None:
            raise error
        return self._result

    def _devices(self) -> list[int | str | torch.device]:
        return []


@not_compiled
class PendingGPUWork(PendingWork):
    """An operation on tensors of `device`; `wait` makes torch's current stream wait, as in torch's own NCCL backend."""

    def __init__(self, work: Work, result: Any, device: torch.device) -> None:
        super().__init__(work, result)
        self._device = device

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: D102
        with current_stream(self._device):
            return super().wait(timeout)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a Future; if `wait` does not block the host, it is complete at once, as in torch's own NCCL backend.

        It holds an event of a stream that waits for the operation; a stream that waits for the Future waits for it.
        """
        if self._future is None and self._work.waits_on_stream:
            ended: torch.futures.Future[Any] = torch.futures.Future(devices=self._devices())
            with torch.cuda.stream(torch.cuda.Stream(self._device)):
                with suppress(Exception):  # `_value` raises it
                    self.wait()
                ended.set_result(self._result)
            self._future = ended.then(self._value)
        return super().get_future()

    def _devices(self) -> list[int | str | torch.device]:
        return [self._device]
