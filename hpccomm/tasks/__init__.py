"""A pool of ranks: rank 0 of a group hands out calls of functions, the others make them.

`pool.py` is what programs see, `scheduler.py` what rank 0 does, `worker.py` what the others do, and `messages.py`
what they send each other.
"""

from __future__ import annotations

from .pool import RankExecutor, executor

__all__ = ["RankExecutor", "executor"]
