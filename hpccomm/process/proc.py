"""What /proc says of the processes of this node (proc(5))."""

from __future__ import annotations

from pathlib import Path


def of_process(pid: int | str) -> tuple[str, list[str]]:
    """Return a process's name, and the fields of its ``stat`` from its state on; OSError where there is none."""
    before, _, after = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
    return before.partition("(")[2], after.split()
