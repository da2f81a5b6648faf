"""A pool of ranks: rank 0 of a group hands out function calls, and the other ranks run them.

`pool.py` is the public API, `scheduler.py` runs on rank 0, `worker.py` runs on the other ranks, and `messages.py`
defines their messages.
"""

from __future__ import annotations

from .pool import RankExecutor, executor

__all__ = ["RankExecutor", "executor"]
