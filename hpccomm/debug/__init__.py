"""When things go wrong: watchdog, report, flight recorder, mismatch check."""

from __future__ import annotations

from .recorder import record, recorded
from .records import Record
from .report import dump
from .trace_file import dump_trace
from .verdict import Verdict, verdict

__all__ = ["Record", "Verdict", "dump", "dump_trace", "record", "recorded", "verdict"]
