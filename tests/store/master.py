"""A master in a process of its own, as tests start it: it prints its port, and ends with its input."""

from __future__ import annotations

import json
import resource
import sys

from hpccomm.store.master import Master, listen
from hpccomm.store.server import Limits

KEY = b"what the honest know"


def main(files: int | None = None, **limits: float) -> None:
    """Serve; with at most `files` open files."""
    if files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    master = Master(listen("127.0.0.1", 0), KEY, Limits(**limits))  # type: ignore[arg-type]
    print(master.port, flush=True)
    sys.stdin.read()
    master.close()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
