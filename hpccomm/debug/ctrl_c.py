"""Handle Ctrl-C while the main thread is inside MPI, where Python can't raise KeyboardInterrupt."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

from ..process.printed import let_launcher_read
from ..process.proc import MAPPED_LATER, take_names_away
from ..process.stderr import tell
from . import groups_seen, stacks

PATIENCE_WITH_PYTHON = 1.0  # seconds for Python to raise KeyboardInterrupt
MAIN_MODULE = os.path.join("hpccomm", "run", "main_module.py")


def end_on_ctrl_c(rank: int, say: Callable[[str], None] = tell) -> None:
    """End the job and print this rank's place if the main thread is inside MPI and does not raise KeyboardInterrupt."""
    main = threading.main_thread().ident or 0
    stuck_in = stacks.call_of_thread(main)
    time.sleep(PATIENCE_WITH_PYTHON)
    now = stacks.call_of_thread(main)
    if stuck_in is None or now is None or now.key != stuck_in.key or now.record.name == "leave":
        return
    lines = [f"[rank {rank}] Ctrl-C, inside MPI (most recent call last):"]
    entries = traceback.extract_stack(sys._current_frames()[main])
    begins = [place for place, entry in enumerate(entries) if entry.filename.endswith(MAIN_MODULE)][-1:]  # hpccomm run
    for entry in entries[sum(begins) :]:
        if not entry.filename.startswith((groups_seen.PACKAGE, "<frozen")):
            lines += [f"[rank {rank}] {line}" for line in "".join(traceback.format_list([entry])).rstrip().splitlines()]
    say("\n".join([*lines, f"hpccomm: rank {rank} is in {now.record}; Ctrl-C ends the job"]))
    let_launcher_read()
    take_names_away(MAPPED_LATER)
    os._exit(128 + signal.SIGINT)
