"""Clocks: how far a rank's is from that of the group's first rank, by messages back and forth."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

ROUNDS = 12  # of which the quickest counts
TAG = 0


def offset(comm: Any, now: Callable[[], float]) -> tuple[float, float]:
    """Return what to add to this rank's `now()` to get that of rank 0, and how wrong it may be, both in seconds.

    Every rank of `comm` calls it; rank 0 answers one rank after the other. The reading of rank 0 is taken to be made in
    the middle of the round, so the error is at most half of what the quickest round took.
    """
    reading = bytearray(8)
    if comm.Get_rank() == 0:
        for rank in range(1, comm.Get_size()):
            for _ in range(ROUNDS):
                comm.Recv(bytearray(8), rank, TAG)
                comm.Send(struct.pack("d", now()), rank, TAG)
        return 0.0, 0.0
    found = []
    for _ in range(ROUNDS):
        began = now()
        comm.Send(reading, 0, TAG)
        comm.Recv(reading, 0, TAG)
        ended = now()
        found.append(((ended - began) / 2, struct.unpack("d", reading)[0] - (began + ended) / 2))
    error, ahead = min(found)
    return ahead, error
