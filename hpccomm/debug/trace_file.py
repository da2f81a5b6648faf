"""The recording of a rank as a file: written at the end, and when somebody asks for it."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.hooks import RemovableHandle
from . import clock
from . import recorder as recorders
from .records import Record

if TYPE_CHECKING:
    from ..core.group import ProcessGroup

VERSION = 1
SUFFIX = ".trace.json"
COLUMNS = [each.name for each in fields(Record)]


@dataclass
class GroupInfo:
    """A group, as one of its ranks knows it: members by rank in MPI.COMM_WORLD, and how much has been begun."""

    name: str
    ranks: tuple[int, ...]
    collectives: int = 0
    messages: int = 0


@dataclass
class Trace:
    """What the file of one rank says.

    Attributes
    ----------
    rank, size : int
        In MPI.COMM_WORLD.
    host : str
    pid : int
    groups : dict
        By key.
    records : list of Record
        In the order in which they began. Their times are those of rank 0's clock, where clocks have been compared.
    clock_error : float or None
        Seconds by which they may be wrong; None where clocks have not been compared.
    is_final : bool
        Whether the rank did nothing afterwards: the program has ended, or hangs.
    """

    rank: int
    size: int
    host: str = ""
    pid: int = 0
    groups: dict[str, GroupInfo] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    clock_error: float | None = None
    is_final: bool = True


class _Clocks:
    """How this process's clock differs from another's, at one time or two."""

    def __init__(self) -> None:
        self.size = 0  # of the group in which it was measured
        self.key = ""
        self.points: list[tuple[float, float]] = []  # (a reading, what to add to it)
        self.error = 0.0

    def measure(self, group: ProcessGroup, epoch: float) -> None:
        """Compare clocks with the first rank of the group; every rank of it calls this."""
        ahead, error = clock.offset(group.comm, lambda: epoch + recorders.now())
        self.points.append((epoch + recorders.now(), ahead))
        self.error = max(self.error, error)

    def corrected(self, reading: float) -> float:
        """Return a reading of this process's clock as one of the other's; between two points drift is even."""
        if not self.points or not reading:
            return reading
        (first, ahead), (last, later) = self.points[0], self.points[-1]
        share = (reading - first) / (last - first) if last > first else 0.0
        return reading + ahead + min(1.0, max(0.0, share)) * (later - ahead)


_clocks = _Clocks()
_process = (0, 1)  # rank and size in MPI.COMM_WORLD
_folder = ""
_recording: RemovableHandle | None = None


# -- what the settings ask for -------------------------------------------------------------------------------


def attach(group: ProcessGroup) -> None:
    """Take a new group of a program that is traced: the first one begins the recording."""
    global _recording, _folder, _clocks, _process
    settings = group.settings
    if _recording is None:
        _recording = recorders.record(settings.trace_size, stack=settings.trace == "stack")
        atexit.register(_at_exit)
    _folder = settings.debug_dir
    if group.comm is None:
        return
    _process = _rank_and_size()
    if not group.processes_known and group.size >= _clocks.size:
        pass


def detach(group: ProcessGroup) -> None:
    """See a group go; with the largest one the recording is written."""
