"""An exchange's rank 0 that comes after the others have given up, with messages that MPI delivers late."""

from __future__ import annotations

from typing import Any

import pytest
from mpi4py import MPI

from hpccomm.core import exchange
from hpccomm.core.exchange import FINE, TIMED_OUT, Exchange

pytestmark = pytest.mark.once
LATE = 1000  # probes that find nothing


class Rank0:
    """A communicator on rank 0 of 2, whose probes return the given messages of rank 1, or nothing."""

    def __init__(self, *probes: bytes | None) -> None:
        self.probes, self.sent, self.taken = list(probes), [], b""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 2

    def Improbe(self, _: int, __: int, status: MPI.Status) -> Any:
        self.taken = self.probes.pop(0) if self.probes else None
        if self.taken is None:
            return None
        status.Set_elements(MPI.BYTE, len(self.taken))
        status.Set_source(1)
        return self

    def Recv(self, into: list[Any]) -> None:
        into[0][:] = self.taken

    def Isend(self, buffer: list[Any], rank: int, _: int) -> MPI.Request:
        number, kind, _ = exchange.HEAD.unpack_from(buffer[0])
        self.sent.append((rank, number, kind))
        return MPI.REQUEST_NULL


def message(number: int, kind: int, text: str = "") -> bytes:
    return exchange.HEAD.pack(number, kind, 1.0) + text.encode()


@pytest.mark.parametrize(
    ("answer", "expected"), [(exchange.GIVES_UP, TIMED_OUT), (exchange.IS_HERE, FINE)], ids=["left", "here"]
)
def test_a_late_rank_0_waits_until_it_knows_who_has_given_up(answer: int, expected: int) -> None:
    comm: Any = Rank0(message(1, exchange.STATEMENT, "{}"), *[None] * LATE, message(1, answer))
    outcome = Exchange(comm)({}, 60.0, lambda _: "", lambda _, missing: f"late {missing}")
    assert outcome == (expected, "late []" if expected else "")
    assert comm.sent == [(1, 1, exchange.ARE_YOU_HERE), (1, 1, expected)]


def test_one_that_follows_at_once_asks_nobody() -> None:
    comm: Any = Rank0(message(1, exchange.STATEMENT, "{}"), None, message(1, exchange.IS_HERE), None)
    calls = Exchange(comm)
    calls({}, 60.0, lambda _: "", lambda *_: "")
    comm.probes, comm.sent = [message(2, exchange.STATEMENT, "{}"), None], []
    assert calls({}, 60.0, lambda _: "", lambda *_: "")[0] == FINE
    assert comm.sent == [(1, 2, FINE)]
