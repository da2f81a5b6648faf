"""One writer at a time: a lock in the folder during a save, with the name of its holder.

The lock is flock(2) on a file, not the file's existence: a killed process holds no lock. But some file systems keep
each node's locks apart (Lustre's ``localflock``), or have none, and NFS version 3 keeps a dead node's locks until the
node is back. So if locks don't work, or the file names a process of another node, the lock proves nothing: the save
then spares files that another process may be writing.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..process.settings import job_id
from .together import CheckpointError

NAME = ".saving"


class WriterLock:
    """The lock of a folder, held until `release`; CheckpointError if another process has it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file = -1
        self._mine = mine = writer()
        self._was_free = False
        with suppress(OSError):  # no locks here
            self._was_free = self._take(mine)
            os.truncate(self._file, 0)
            os.pwrite(self._file, json.dumps(mine).encode(), 0)

    def is_alone(self) -> bool:
        """Return True if certainly no other process writes to the folder: the file still names this process."""
        return self._was_free and _read(self._file) == self._mine

    def _take(self, mine: dict[str, Any]) -> bool:
        """Take the lock; return True if the file did not name a process of another node."""
        is_broken = False
        while True:
            try:
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except PermissionError:
                if not os.path.lexists(self._path):
                    raise
                raise CheckpointError(
                    f"another user is saving to {self._path.parent}; one job at a time may write to a folder. If that "
                    f"process is gone for certain, remove {self._path}"
                ) from None
            other = _read(file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file), os.stat(self._path)):  # else its holder has just removed it
                    self._file = file
                    return not is_broken and other.get("host", mine["host"]) == mine["host"]
            except BlockingIOError:
                if other.get("job") != mine["job"] or not mine["job"] or other["restarts"] >= mine["restarts"]:
                    what_to_do = f"If that process is gone for certain, remove {self._path}"
                    if all(other.get(key) == mine[key] for key in ("host", "pid")):
                        what_to_do = (
                            "It is this process, with another group: checkpoint.finish(group=...) ends its save"
                        )
                    raise CheckpointError(
                        f"{in_words(other)} is saving to {self._path.parent}, since {other.get('since', 'now')}; one "
                        f"job at a time may write to a folder. {what_to_do}"
                    ) from None
                # Slurm has restarted this job, so the holder has ended: the lock is that of a dead node or of a child
                os.unlink(self._path)
                is_broken = True
            except FileNotFoundError:
                pass
            except OSError:  # no locks here
                os.unlink(self._path)
                raise
            finally:
                if file != self._file:
                    os.close(file)

    def release(self) -> None:
        """Release the lock."""
        if self._file < 0:
            return
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._file), os.stat(self._path)):
                os.unlink(self._path)
        os.close(self._file)
        self._file = -1


def writer(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return this process's host and pid, its job, and the number of the job's restarts."""
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    return {
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "job": job_id(environ),
        "restarts": int(restarts) if restarts.isdecimal() else 0,
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def in_words(name: Mapping[str, Any]) -> str:
    """Return a writer's name as text."""
    job = f" of job {name['job']}" if name.get("job") else ""
    return f"process {name['pid']} on {name.get('host')}{job}" if "pid" in name else "another process"


def _read(file: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(file, 4096, 0))
        return {**found, "restarts": int(found["restarts"])}
    except (OSError, ValueError, KeyError, TypeError):  # it is being written, or not ours
        return {}
