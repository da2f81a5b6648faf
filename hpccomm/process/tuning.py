"""Tuning: the message sizes that select an operation's algorithm.

``hpccomm bench --tune FILE`` measures a machine and writes its table; ``HPCCOMM_TUNING=FILE`` makes programs use it.
The ranks of a job must select the same algorithms, so all use rank 0's table.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

SMALLEST_CHUNK_BYTES = 64
NEVER = 1 << 62  # as a threshold
CAN_BE_NONE = ("node_bytes",)  # an upper limit, which may be 0


class Tuning(NamedTuple):
    """The table of docs/how-to/benchmarking.md, in bytes. The defaults were measured on 2 ranks of one node."""

    segment_bytes: int = 2 << 20  # mpi/segments.py
    reduce_scatter_bytes: int = 32 << 20  # a blocking reduce_scatter_single splits a larger input
    thread_bytes: int = 1 << 20  # mpi/communication_thread.py
    shared_bytes: int = 1 << 20  # mpi/shared_memory.py
    shared_chunk_bytes: int = 512 << 10  # mpi/shared_memory.py: should fit in a core's cache
    node_bytes: int = 4 << 20  # all parts together: native/node.h
    node_reduction_bytes: int = 1 << 30  # reductions: native/node.h
    direct_bytes: int = 8 << 10  # mpi/direct.py


def tuning(environ: Mapping[str, str] = os.environ) -> Tuning:
    """Return the table of the file ``HPCCOMM_TUNING``; ``HPCCOMM_SEGMENT_BYTES`` overrides its `segment_bytes`.

    ValueError names the malformed variable and the reason.
    """
    chosen: dict[str, Any] = {}
    file = environ.get("HPCCOMM_TUNING")
    if file:
        chosen = _read(file)
    if environ.get("HPCCOMM_SEGMENT_BYTES"):
        chosen["segment_bytes"] = _number("HPCCOMM_SEGMENT_BYTES", environ["HPCCOMM_SEGMENT_BYTES"])
    return Tuning(**chosen)


def as_json(table: Tuning, measured: Mapping[str, Any]) -> str:
    """Return the text of a tuning file; `measured` has the machine and the MPI library."""
    import json

    return json.dumps({**table._asdict(), "measured": measured}, indent=2) + "\n"


def _read(file: str) -> dict[str, int]:
    try:
        import json

        with open(file, encoding="utf-8") as stream:
            document = json.load(stream)
    except (OSError, ValueError) as error:
        raise ValueError(f"HPCCOMM_TUNING={file}: {error}; `hpccomm bench --tune FILE` writes such a file") from error
    names = Tuning._fields
    if not isinstance(document, dict):
        raise ValueError(f"HPCCOMM_TUNING={file}: expected an object with {', '.join(names)}")
    document.pop("measured", None)
    for name in document.keys() - set(names):
        raise ValueError(f"HPCCOMM_TUNING={file}: nothing is called {name!r}; there are {', '.join(names)}")
    numbers = {
        name: _number(f"HPCCOMM_TUNING={file}: {name}", value, 0 if name in CAN_BE_NONE else 1)
        for name, value in document.items()
    }
    if numbers.get("shared_chunk_bytes", SMALLEST_CHUNK_BYTES) < SMALLEST_CHUNK_BYTES:
        raise ValueError(f"HPCCOMM_TUNING={file}: shared_chunk_bytes is below {SMALLEST_CHUNK_BYTES}, a cache line")
    return numbers


def _number(what: str, value: Any, least: int = 1) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if number < least or isinstance(value, float):
        raise ValueError(f"{what} is {value!r}; expected a number of bytes, {least} or more")
    return number
