"""HashStore: a store within one process."""

from __future__ import annotations

import threading
import time

from .store import DEFAULT_TIMEOUT, Store, Timeout, too_late
from .table import READS, Answer, Request, Table


class HashStore(Store):
    """A store in the memory of this process, for its threads.

    Parameters
    ----------
    timeout : timedelta or float (seconds), optional
        The time that operations wait. Default: 5 minutes.

    Examples
    --------
    >>> with hc.HashStore(timeout=0.1) as store:
    ...     store.get("missing key")
    Traceback (most recent call last):
        ...
    hpccomm.errors.DistTimeoutError: get: nobody has set 'missing key' within 0.1 s (rank 0)
    """

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._table = Table()
        self._changed = threading.Condition()

    def request(self, request: Request, timeout: float) -> Answer:
        """Return the answer to `request`, from this process's table."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while (answer := self._table.apply(request)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise too_late(request, timeout, self._table.missing(request) or request.keys[0])
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            if request.op not in READS:
                self._changed.notify_all()
        return answer

    def clone(self) -> HashStore:
        """Return another store of the same table."""
        other = HashStore(self.timeout)
        other._table, other._changed = self._table, self._changed
        return other

    def __repr__(self) -> str:
        return "HashStore()"
