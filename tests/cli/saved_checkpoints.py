"""Save two checkpoints on all ranks: a program of the tests of ``hpccomm checkpoint``.

saved_checkpoints.py FOLDER
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

import hpccomm as hc

RANKS = 3
METADATA = {"rate": 0.1, "names": ["a", None]}
AXES = {"flow/velocity": 1}


def part(step: int, rank: int) -> dict[str, Any]:
    """What `rank` saves at a step, of lengths that differ."""
    random = np.random.default_rng([step, rank])
    return {
        "nothing": np.empty((0, 7), np.float32),  # not the last one: the last byte of a file is to be one of an array
        "flow/velocity": random.random((4, 2 + rank, 3)),
        "flow/is wet": random.random(rank) < 0.5,
        "weights": random.random((rank + 1, 2)).astype(ml_dtypes.bfloat16),
        "spins": random.integers(-8, 8, (5, 2)).astype(ml_dtypes.int4),
        "swapped": np.arange(rank + 2, dtype=">i4"),
        "waves": random.random(3) + 1j * random.random(3),
    }


REPLICATED = {
    "time": np.array(0.25),
    "words": np.array([["ab", "ü"], ["", "long one"]]),
    "when": np.array(["2026-01-01", "2026-02-03"], "M8[s]"),
}


if __name__ == "__main__":
    with hc.init_process_group() as world:
        for step in (10, 20):
            arrays = part(step, world.rank)
            hc.checkpoint.save(sys.argv[1], arrays, step, replicated=REPLICATED, metadata=METADATA, axis=AXES)
