"""What /proc says of the processes of this node (proc(5))."""

from __future__ import annotations

from contextlib import suppress

ENDED = "hpccomm-ended"  # the name of a process at the end of its program; 15 characters at most


def say_that_it_ends() -> None:
    """Give this process a name by which others of this node see that its program has ended."""
    with suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(ENDED)


def of_process(pid: int | str) -> tuple[str, list[str]]:
    """Return a process's name, and the fields of its ``stat`` from its state on; OSError where there is none."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        before, _, after = file.read().rpartition(")")
    return before.partition("(")[2], after.split()
