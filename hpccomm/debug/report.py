"""The report: what each rank of the job is doing, one small file for each in one folder; and how ranks ask for it.

A rank that wants the reports of all writes a file "ask" into the folder and sends SIGUSR2 to the processes of its node.
On other nodes one rank looks for that file. Nothing here calls MPI: it has to work where MPI hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.work import WorkStatus
from ..errors import DistError
from . import stacks
from .attach import groups
from .records import key_of

VERSION = 1
ASK = "ask"
END = "end at "  # what is asked then is to end
VERDICT = "verdict.txt"
YOUNG = 3.0  # seconds in which a question that has been asked stands for the next one
STALE = 10.0  # seconds after which a verdict is one of an earlier hang
LOST = 60.0  # seconds after which a rank that was to give one is not waited for


class Reporter:
    """Writes the reports of this process, and asks for those of others.

    Attributes
    ----------
    rank, size : int
        In MPI.COMM_WORLD.
    folder : Path
        Where the files are; it is made when the first is written.
    processes : dict of int to int
        The processes of the ranks of this node.
    """

    def __init__(self, rank: int, size: int, folder: str | Path, processes: Mapping[int, int] | None = None) -> None:
        self.rank = rank
        self.size = size
        self.folder = Path(folder)
        self.processes = dict(processes or {})
        self.is_listening = False  # whether SIGUSR2 is ours
        self._answered = ""

    # -- this rank -------------------------------------------------------------------------------------------

    def state(self, reason: str, seconds: Mapping[Any, float] | None = None) -> dict[str, Any]:
        """Return what this process is doing; `seconds` says how long, by the keys of `stacks.operations`."""
        seconds = seconds or {}
        me = threading.get_ident()
        operations, left, seen = [], False, set()
        for doing in stacks.operations():
            if doing.record.name == "leave":
                left = True
                continue
            seen.add((doing.record.group, doing.record.number, doing.record.name))
            known = {"seconds": seconds.get(doing.key, 0.0), "waits": True}
            operations.append({**doing.record.as_dict(), **known})
        for group in groups():
            for work in works_in_flight(group):
                record = stacks.of_work(work)
                if (record.group, record.number, record.name) not in seen:
                    key = (id(work), record.number)
                    if key in seconds:  # the program asks for it, or has a Future
                        record = stacks.asked_for(work).record
                    known = {"seconds": seconds.get(key, 0.0), "waits": key in seconds}
                    operations.append({**record.as_dict(), **known})
        return {
            "version": VERSION,
            "rank": self.rank,
            "size": self.size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "reason": reason,
            "program": stacks.of_the_program(),
            "left": left,
            "operations": operations,
            "groups": {key_of(group): _group(group) for group in groups()},
            "neighbours": self._neighbours(),
            "threads": stacks.all_stacks(without=me if me != threading.main_thread().ident else 0),
        }

    def write(self, reason: str, seconds: Mapping[Any, float] | None = None, answers: str = "") -> Path:
        """Write this rank's report and return its file."""
        said = self.state(reason, seconds)
        said["answers"] = answers
        return self._put(f"rank{self.rank}.json", json.dumps(said, indent=1))

    def answer(self, seconds: Mapping[Any, float]) -> None:
        """Write this rank's report, and pass the question on if it came from outside of the job."""
        token = self.question()
        if not token or (token == self._answered and not self._is_young()):
            token = self.ask()
        if token.startswith(END):
            return
        if token != self._answered:
            self._answered = token
            self.write("asked", seconds, token)
            if int(token.split()[0]) not in self.processes:  # no signal comes from another node
                self._signal()

    # -- the others ------------------------------------------------------------------------------------------

    def ask(self) -> str:
        """Ask all ranks for their reports; return what their answers will say that they answer."""
        return self._ask(f"{self.rank} {secrets.token_hex(8)}")

    def end_in(self, seconds: float) -> float:
        """Tell the other ranks to end, all at the time that is returned (seconds since the epoch)."""
        when = time.time() + seconds
        with contextlib.suppress(OSError):
            self._answered = self._ask(f"{END}{when}")
        return when

    def time_of_end(self) -> float | None:
        """Return when this rank has been told to end."""
        said = self.question()
        return float(said.removeprefix(END)) if said.startswith(END) else None

    def _ask(self, token: str) -> str:
        self._put(ASK, token)
        self._signal()
        return token

    def _signal(self) -> None:
        """Let the processes of this node look for the question."""
        for rank, pid in self.processes.items():
            if rank != self.rank and self.is_listening:
                with contextlib.suppress(OSError):  # it is gone
                    os.kill(pid, signal.SIGUSR2)

    def question(self) -> str:
        """Return what was asked last; "" if nothing was."""
        with contextlib.suppress(OSError):
            return (self.folder / ASK).read_text()
        return ""

    def is_asked(self) -> bool:
        """Whether there is a question that this rank has not answered."""
        return self.question() not in ("", self._answered)

    def collect(self, token: str, patience: float) -> list[dict[str, Any]]:
        """Return the reports that answer a question, after all ranks have, or `patience` seconds."""
        deadline = time.monotonic() + patience
        while True:
            reports = [each for each in read(self.folder) if each.get("answers") == token]
            gone = sum(state in ("dead", "stopped") for state in self._neighbours().values())
            if len(reports) + gone >= self.size or time.monotonic() > deadline:
                return reports
            time.sleep(0.05)

    def is_alone(self) -> bool:
        """Whether all ranks are on this node."""
        return len(self.processes) >= self.size

    def claim(self) -> bool:
        """Whether it falls to this rank to give the verdict: the first that wants to does."""
        self._make_folder()
        file = self.folder / VERDICT
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime > (STALE if self.has_concluded() else LOST):  # of an earlier hang
                file.unlink()
        try:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        return True

    def conclusion(self) -> str:
        """Return the verdict in the folder, "" without one."""
        with contextlib.suppress(OSError):
            return (self.folder / VERDICT).read_text(encoding="utf-8").strip()
        return ""

    def has_concluded(self) -> bool:
        """Whether the rank that has claimed the verdict has given it."""
        with contextlib.suppress(OSError):
            return (self.folder / VERDICT).stat().st_size > 0
        return False

    def conclude(self, text: str) -> None:
        """Write the verdict into the folder."""
        self._put(VERDICT, text + "\n")

    def _is_young(self) -> bool:
        with contextlib.suppress(OSError):
            return time.time() - (self.folder / ASK).stat().st_mtime < YOUNG
        return False

    def _neighbours(self) -> dict[str, str]:
        return {str(rank): process_state(pid) for rank, pid in self.processes.items() if rank != self.rank}

    def _put(self, name: str, text: str) -> Path:
        """Write a file that nobody sees half written."""
        self._make_folder()
        part = self.folder / f".{name}.{self.rank}"
        part.write_text(text, encoding="utf-8")
        return part.replace(self.folder / name)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK):
                raise PermissionError(f"{self.folder} can't be written to")
        except OSError:
            own = Path(tempfile.gettempdir()) / f"{self.folder.name}-{os.getuid()}"
            own.mkdir(mode=0o700, exist_ok=True)
            if own.stat().st_uid != os.getuid():  # what is asked in it is obeyed
                raise
            self.folder = own


def dump(reason: str = "asked by the program") -> Path:
    """Write what this rank is doing into its report, at any moment and from any thread; other ranks are not asked.

    Parameters
    ----------
    reason : str
        Why: it is shown by ``hpccomm debug``.

    Returns
    -------
    pathlib.Path
        The file, ``rank<N>.json`` in ``HPCCOMM_DEBUG_DIR`` (default: a folder ``hpccomm-debug-*`` in the working
        directory, made now); N is the rank in MPI.COMM_WORLD.

    Raises
    ------
    DistError
        Before init_process_group.

    Examples
    --------
    >>> import json, hpccomm.debug
    >>> file = hpccomm.debug.dump("an example")
    >>> file.name, json.loads(file.read_text())["reason"]
    ('rank0.json', 'an example')
    """
    from . import watchdog

    current = watchdog.reporter()
    if current is None:
        group = next(iter(groups()), None)
        if group is None:
            raise DistError("hpccomm.debug.dump: there is no process group: call hpccomm.init_process_group() first")
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        current = Reporter(comm.Get_rank(), comm.Get_size(), group.settings.debug_dir, group.processes)
    return current.write(reason, watchdog.seconds())


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the reports in a folder."""
    reports = []
    for file in sorted(folder.glob("rank*.json")):
        if file.name.count(".") == 1:
            with contextlib.suppress(OSError, ValueError):  # it is being replaced
                reports.append(json.loads(file.read_text(encoding="utf-8")))
    return [each for each in reports if each.get("version") == VERSION]


def latest(reports: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those that belong together: the answers to the last question, and what other ranks said at their end."""
    ordered = sorted(reports, key=lambda each: each["time"])
    asked = next((each["answers"] for each in reversed(ordered) if each.get("answers")), "")
    return [each for each in ordered if each.get("answers", "") in ("", asked)]


def works_in_flight(group: Any) -> list[Any]:
    """Return the Works that a group keeps, whatever other threads do meanwhile."""
    works: list[Any] = []
    for _ in range(10):
        try:
            works = list(group._in_flight)
            break
        except RuntimeError:  # it changed
            continue
    works += [each for each in list(group._persistent) if each._active]
    return [each for each in works if getattr(each, "_status", WorkStatus.IN_FLIGHT) is WorkStatus.IN_FLIGHT]


def process_state(pid: int) -> str:
    """Return whether a process of this node is "running", "stopped" or "dead"."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "dead" if os.path.isdir("/proc/self") else "running"
    except (OSError, IndexError):
        return "running"
    return {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}.get(letter, "running")


def _group(group: Any) -> dict[str, Any]:
    ranks: Sequence[int] = getattr(group, "_process_ranks", group.ranks)
    counts = {"collectives": group.sequence_number, "messages": group.message_number}
    return {"name": group.name, "ranks": list(ranks), **counts}
