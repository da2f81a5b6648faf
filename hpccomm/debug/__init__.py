"""Debugging tools: watchdog, reports, flight recorder, mismatch check, hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.late import attributes

if TYPE_CHECKING:
    from .culprits import Verdict, verdict
    from .hooks import check_numerics, log_operations, nvtx_ranges, register_hook
    from .metrics import opentelemetry_spans, write_metrics
    from .records import Record
    from .trace.files import dump_trace
    from .trace.recorder import record, recorded
    from .watchdog import dump

LATER = {  # as in hpccomm/__init__.py
    "Record": "records",
    "Verdict": "culprits",
    "check_numerics": "hooks",
    "dump": "watchdog",
    "dump_trace": "trace.files",
    "log_operations": "hooks",
    "nvtx_ranges": "hooks",
    "opentelemetry_spans": "metrics",
    "record": "trace.recorder",
    "recorded": "trace.recorder",
    "register_hook": "hooks",
    "verdict": "culprits",
    "write_metrics": "metrics",
}

__all__ = [
    "Record", "Verdict", "check_numerics", "dump", "dump_trace", "log_operations", "nvtx_ranges", "opentelemetry_spans",
    "record", "recorded", "register_hook", "verdict", "write_metrics",
]  # fmt: skip


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return __all__


if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, LATER)
