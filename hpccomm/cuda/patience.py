"""Patience: how long NCCL may be in the middle of a call, where its communicators do not block."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import DistTimeoutError, here

SHORTEST_PAUSE, LONGEST_PAUSE = 10e-6, 1e-3  # seconds between two looks


class Patience:
    """The time limit of a group for each call of NCCL.

    Attributes
    ----------
    seconds : float
    failure : callable
        Returns the error that has ended the connection, or None: then nobody waits any longer.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.failure: Callable[[], Exception | None] = lambda: None

    def wait_while(self, is_in_progress: Callable[[], bool]) -> None:
        """Return when NCCL is done with a call.

        Raises
        ------
        DistTimeoutError
            It has not been within `seconds`.
        """
        deadline, pause = time.monotonic() + self.seconds, SHORTEST_PAUSE
        while is_in_progress():
            failure = self.failure()
            if failure is not None:
                raise failure
            if time.monotonic() >= deadline:
                raise DistTimeoutError(
                    f"NCCL has not connected the ranks within {self.seconds:g} s, which is the group's timeout. Has "
                    f"every rank made this call? The first collective of a group takes all its ranks, the first "
                    f"message of two ranks both{here()}"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
