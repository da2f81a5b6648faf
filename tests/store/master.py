"""A master in a process of its own, as tests start it: it prints its port, and ends with its input.

A number on its input lets it open so many files at once, and print how many; a negative one
lets it keep them, and 0 give back what it has kept.
"""

from __future__ import annotations

import contextlib
import json
import os
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
    kept = contextlib.ExitStack()
    for line in sys.stdin:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            opened = 0
            for _ in range(abs(int(line))):
                stack.enter_context(open(os.devnull, "rb"))
                opened += 1
            if int(line) < 0:
                kept.enter_context(stack.pop_all())
            elif opened == 0:
                kept.close()
        print(opened, flush=True)
    kept.close()
    master.close()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
