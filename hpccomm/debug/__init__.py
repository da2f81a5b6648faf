"""When things go wrong: watchdog, report, flight recorder, mismatch check."""

from __future__ import annotations

from .report import dump
from .verdict import Verdict, verdict

__all__ = ["Verdict", "dump", "verdict"]
