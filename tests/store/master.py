"""A master in a process of its own, as tests start it: it prints its port, and ends with its input.

A number on its input lets it open so many files at once, and print how many; a negative one
lets it keep them. 0 leaves it no file to open, and the next 0 as many as before: at one moment,
not one after the other.
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
    for number in map(int, sys.stdin):
        opened = 0
        if number == 0:
            limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0 if limit else most, most))
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for _ in range(abs(number)):
                stack.enter_context(open(os.devnull, "rb"))
                opened += 1
            if number < 0:
                kept.enter_context(stack.pop_all())
        print(opened, flush=True)
    kept.close()
    master.close()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
