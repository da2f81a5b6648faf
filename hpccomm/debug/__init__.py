"""When things go wrong: watchdog, report, flight recorder, mismatch check."""

from __future__ import annotations

from .dump import dump
from .hooks import check_numerics, log_operations, nvtx_ranges, register_hook
from .records import Record
from .trace.files import dump_trace
from .trace.recorder import record, recorded
from .verdict import Verdict, verdict

__all__ = [
    "Record",
    "Verdict",
    "check_numerics",
    "dump",
    "dump_trace",
    "log_operations",
    "nvtx_ranges",
    "record",
    "recorded",
    "register_hook",
    "verdict",
]
