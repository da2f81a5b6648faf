"""What /proc says of the processes of this node (proc(5))."""

from __future__ import annotations


def of_process(pid: int | str) -> tuple[str, list[str]]:
    """Return a process's name, and the fields of its ``stat`` from its state on; OSError where there is none."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        before, _, after = file.read().rpartition(")")
    return before.partition("(")[2], after.split()
