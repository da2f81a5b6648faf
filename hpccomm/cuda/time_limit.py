"""TimeLimit: the longest duration of a call of NCCL on a non-blocking communicator."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..core.timeouts import keeps_time, pause, pauses
from ..errors import DistTimeoutError, on_rank


class TimeLimit:
    """A group's time limit for each call of NCCL; `failure` returns the connection's error, or None."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.failure: Callable[[], Exception | None] = lambda: None

    @keeps_time
    def wait_while(self, is_in_progress: Callable[[], bool]) -> None:
        """Wait for the end of a call; raise the connection's failure, or DistTimeoutError after `seconds`."""
        deadline, looks = time.monotonic() + self.seconds, pauses()
        while is_in_progress():
            if (failure := self.failure()) is not None:
                raise failure
            if time.monotonic() >= deadline:
                raise DistTimeoutError(
                    f"NCCL has not connected the ranks within {self.seconds:g} s, which is the group's timeout. Has "
                    f"every rank made this call? The first collective of a group takes all its ranks, the first "
                    f"message of two ranks both{on_rank()}"
                )
            pause(next(looks))
