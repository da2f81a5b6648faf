"""Exchange: each rank sends a statement to rank 0, which compares them and sends the outcome to each rank.

Unlike in an all_gather, rank 0 knows the missing ranks, and a late rank gets the outcome instead of waiting alone.
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..job import mpi_library
from .timeouts import pause, pauses

if TYPE_CHECKING:
    from mpi4py import MPI

HEAD = struct.Struct("qqd")  # the number of the exchange, the kind of the message, the sender's time limit
STATEMENT, GIVES_UP, IS_HERE = 0, 1, 2  # to rank 0
FINE, DIFFERS, TIMED_OUT, ARE_YOU_HERE = 0, 1, 2, 3  # from rank 0

Statement = dict[str, Any]
Outcome = tuple[int, str]


class Exchange:
    """The exchanges on one communicator, with hpccomm's own tag; all ranks take part in each.

    No call blocks in MPI: ranks probe for messages, with pauses. Exchanges are numbered, so that a late rank finds the
    outcome of its own exchange and not that of another. A rank whose time is up notifies rank 0, which then ends the
    exchange for all; if rank 0 itself does not come, each rank ends it alone. So a late rank 0 asks whether they have:
    there is no bound on the time that a message takes, even within a node.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        from ..job.tags import MONITORED_BARRIER  # loads MPI

        self._comm, self._mpi, self._tag = comm, mpi_library.load(), MONITORED_BARRIER
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._number = 0
        self.is_waiting = False
        self._ended = -math.inf  # the time of the last outcome, if it reached all ranks
        self._statements: dict[int, dict[int, Statement]] = {}  # by exchange and rank; other ranks may be ahead
        self._limits: dict[int, float] = {}  # the shortest time limit of an exchange
        self._here: set[int] = set()  # ranks that have answered ARE_YOU_HERE
        self._given_up: set[int] = set()  # exchanges
        self._sends: list[tuple[MPI.Request, bytes]] = []

    def __call__(
        self,
        statement: Statement,
        timeout: float,
        judge: Callable[[list[Statement]], str],
        late: Callable[[dict[int, Statement], list[int]], str],
    ) -> Outcome:
        """Return the outcome: FINE, DIFFERS with the text of ``judge(statements)``, or TIMED_OUT with that of `late`.

        ``late(came, missing)`` gets the statements that have come, and the missing ranks (none: this rank was late).
        """
        self._number += 1
        deadline = time.monotonic() + timeout
        self.is_waiting = True
        try:
            if self._rank:
                return self._ask(statement, deadline, timeout, late)
            return self._collect(statement, deadline, timeout, judge, late)
        finally:
            self.is_waiting = False

    def _collect(self, own: Statement, deadline: float, timeout: float, judge: Any, late: Any) -> Outcome:
        number, others = self._number, set(range(1, self._size))
        came = {0: own, **self._statements.get(number, {})}
        self._statements[number], self._here, asked = came, set(), False
        for message in self._messages(self._mpi.ANY_SOURCE):
            if message is not None:
                self._take_in(*message)
            elif number in self._given_up or time.monotonic() > deadline:
                break
            elif len(came) == self._size and not asked:
                shortest = min(timeout, self._limits.get(number, timeout))
                if time.monotonic() - self._ended < shortest:  # nobody can have waited for so long
                    break
                asked = True
                for rank in others:
                    self._send(rank, ARE_YOU_HERE, "", timeout)
            elif self._here == others:
                break
        del self._statements[number]
        self._limits.pop(number, None)
        missing = [rank for rank in range(self._size) if rank not in came]
        if missing or number in self._given_up or (asked and self._here != others):
            outcome = TIMED_OUT, late(came, missing)
            self._ended = -math.inf  # other ranks may have ended the next exchange, too
        else:
            text = judge([came[rank] for rank in range(self._size)])
            outcome = (DIFFERS if text else FINE), text
            self._ended = time.monotonic()
        self._given_up.discard(number)
        for rank in others:
            self._send(rank, *outcome, timeout)
        return outcome

    def _take_in(self, source: int, number: int, kind: int, timeout: float, text: str) -> None:
        if number < self._number:  # from a late rank, which has been sent its outcome
            return
        if kind == GIVES_UP:
            self._given_up.add(number)
        elif kind == IS_HERE:
            self._here.add(source)
        else:
            self._limits[number] = min(timeout, self._limits.get(number, timeout))
            self._statements.setdefault(number, {})[source] = json.loads(text)

    def _ask(self, statement: Statement, deadline: float, timeout: float, late: Any) -> Outcome:
        self._send(0, STATEMENT, json.dumps(statement), timeout)
        gives_up = False
        for message in self._messages(0):
            if message is not None:
                _, number, kind, _, text = message
                if number != self._number:
                    continue
                if kind != ARE_YOU_HERE:
                    return kind, text
                self._send(0, IS_HERE, "", timeout)
                deadline = time.monotonic() + timeout
            elif time.monotonic() > deadline:
                if gives_up:
                    return TIMED_OUT, late({self._rank: statement}, [0])
                self._send(0, GIVES_UP, "", timeout)
                gives_up, deadline = True, deadline + max(1.0, 0.1 * timeout)
        raise AssertionError("there is always another look")

    def _messages(self, source: int) -> Iterator[tuple[int, int, int, float, str] | None]:
        """Yield messages (sender, number, kind, time limit, text), or None if there is none now."""
        status, looks = self._mpi.Status(), pauses()
        while True:
            message = self._comm.Improbe(source, self._tag, status)
            if message is None:
                yield None
                pause(next(looks))
                continue
            data = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv([data, self._mpi.BYTE])
            yield status.Get_source(), *HEAD.unpack_from(data), data[HEAD.size :].decode()

    def _send(self, rank: int, kind: int, text: str, timeout: float) -> None:
        self._sends = [each for each in self._sends if not each[0].Test()]
        data = HEAD.pack(self._number, kind, timeout) + text.encode()
        self._sends.append((self._comm.Isend([data, self._mpi.BYTE], rank, self._tag), data))
