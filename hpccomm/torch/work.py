"""c10d's Work and Future, around those of hpccomm."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work as C10DWork

from ..core.work import Work


class DoneWork(C10DWork):
    """An operation that has ended well before its call returned."""

    def __init__(self, result: Any, source: int | None = None) -> None:
        super().__init__()
        self._result = result
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True: nothing is left to wait for."""
        return True

    def synchronize(self) -> None:
        """Return: nothing is left to wait for."""

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> BaseException | None:
        """Return None."""
        return None

    def result(self) -> Any:
        """Return the tensors that were written."""
        return self._result

    def _source_rank(self) -> int:
        return self.source_rank()

    def source_rank(self) -> int:
        """Return the group's rank that a message came from."""
        if self._source is None:
            raise RuntimeError("only a receive has a source rank")
        return self._source

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a Future that has the result."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


class PendingWork(DoneWork):
    """An operation in flight; `work` is hpccomm's."""

    def __init__(self, work: Work, result: Any) -> None:
        super().__init__(result)
        self._work = work
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is done; c10d gives no time-out, or zero, where the group's is meant."""
        return self._work.wait(timeout or None)

    def synchronize(self) -> None:
        """Block until the operation is done."""
        self._work.synchronize()

    def is_completed(self) -> bool:
        """Say whether the operation has ended, well or not."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Say whether the operation has ended well."""
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        """Return what has ended the operation, or None."""
        return self._work.exception()

    def result(self) -> Any:
        """Wait, and return the tensors that were written."""
        self._work.wait()
        return self._result

    def source_rank(self) -> int:
        """Wait, and return the group's rank that the message came from."""
        self._work.wait()
        self._source = self._work._source
        return super().source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a Future that hpccomm's progress thread completes.

        For C++, which DDP waits in, an error is only what a callback of `then` raises.
        """
        if self._future is None:
            ended: torch.futures.Future[Any] = torch.futures.Future()
            self._future = ended.then(self._value)
            self._work.get_future().add_done_callback(lambda _: ended.set_result(None))
        return self._future

    def _value(self, _: object) -> Any:
        error = self._work.exception()
        if error is not None:
            raise error
        return self._result
