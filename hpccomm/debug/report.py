"""Reports: each rank's small file in one folder, with the calls that it is in; and the questions that ask for them.

A rank that wants all reports writes a file "ask" into the folder, and wakes the processes of its node. On other nodes,
one rank polls for the file. Nothing here calls MPI, because MPI may be hanging.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core.group import ProcessGroup
from ..core.operation_list import MESSAGES, OPERATIONS
from ..process.proc import ENDED, of_process
from . import held, stacks
from .culprits import LEAST
from .folder import Folder, read_text
from .groups_seen import groups, key_of, made_at, ranks_of, works_in_flight
from .mailbox import Mailbox
from .meter import Meter, resident_bytes
from .mpi_calls import spec_of
from .records import Record, key_of_operation
from .reported import without_collector
from .ring import ring_records
from .sources import SOURCES
from .trace.files import save
from .waiting import LOST
from .words import LARGEST_JOB, as_ranges, ranks_by_value, tag_in_words

KEPT = 32  # fast-path collectives of each group in a report, and fast-path messages
MANY_RANGES = 64  # with more ranges of ranks in a group, at least so many of its members report them, not all
OTHER_CLOCK = 2.0  # seconds by which a file server's clock may be behind
ASK = "ask"
COUNTS = " counts"  # the end of a question that makes the ranks count bytes for a while
REPORT = re.compile(rf"rank\d+(\.json|\{held.SUFFIX})")  # names of reports; those of recordings have two dots
END = "end at "  # the beginning of a question that orders the end
LATEST_END = 2.0  # seconds after which an order to end is ignored
ended = ""  # the test that this rank has ended, while it waits for the others; set by the pytest plugin
BEAT = 2.0  # seconds between two signs of life of a rank that makes a verdict


class Reporter:
    """The writer of this process's reports, which also asks for other ranks' reports.

    It ignores questions from before `since` (seconds since the epoch; default: now).
    """

    def __init__(
        self,
        rank: int,
        size: int,
        folder: str | Path,
        processes: Mapping[int, int] | None = None,
        since: float | None = None,
    ) -> None:
        self.rank = rank  # in MPI.COMM_WORLD
        self.size = size
        self.processes = dict(processes or {})  # of this node's ranks
        self.mailbox = Mailbox()
        self.meter = Meter()
        self.standstill: Callable[[], float] = float  # seconds that the main thread has been in one call of C
        self._one_at_a_time = threading.RLock()  # a report must not replace the answer to a later question
        self._earlier: set[str] = set()  # questions from before this rank's last one
        self.claimed = 0  # the number of the last claimed verdict
        self._since = time.time() if since is None else since - OTHER_CLOCK
        self.move_to(folder)

    def move_to(self, folder: str | Path) -> None:
        """Use another folder from now on; ignore the questions in it from before `since`."""
        self.folder = Folder(folder)
        held.answer_in(self.folder.places)
        files = [place / ASK for place in (*self.folder.places, self.folder.places[0].parent)]
        self._answered: set[str] = set()
        for file, text in zip(files, self._questions()):
            if _time_of(file) < self._since:
                self._has_answered(text)

    def configure(self, folder: str, processes: Mapping[int, int]) -> None:
        """Set the folder that all ranks agreed on, and the processes of this node."""
        if Path(folder) not in self.folder.places:
            self.move_to(folder)
        self.processes.update(processes)

    def _has_answered(self, token: str) -> None:
        self._answered.add(token)
        held.know(token)

    # -- this rank -------------------------------------------------------------------------------------------

    def state(self, reason: str, elapsed: Mapping[Any, float] | None = None) -> dict[str, Any]:
        """Return this process's report; `elapsed` has the seconds in each call, by the call's key."""
        elapsed = elapsed or {}
        me = threading.get_ident()
        operations, left, spare, seen = [], False, False, set()

        def add(record: Record, seconds: float, waits: bool, polls: bool = False) -> None:
            operations.append({**record.as_dict(), "seconds": seconds, "waits": waits, "polls": polls})

        for call in stacks.calls_in_flight(exactly=True):
            if call.record.name == "leave":
                left = True
            elif call.record.name == "spare":
                spare = True
            else:
                seen.add(key_of_operation(call.record))
                add(call.record, elapsed.get(call.key, 0.0), waits=True)
        line, function = stacks.place_in_program()
        for work in works_in_flight():
            call = stacks.polled_call(work, line)
            if key_of_operation(call.record) not in seen:
                waits = call.key in elapsed  # the program polls it, or has its Future
                call.record.where = line if waits else ""
                add(call.record, elapsed.get(call.key, 0.0), waits)
        stands = self.standstill()
        begun = [each for source in SOURCES for each in source.in_flight() if key_of_operation(each) not in seen]
        polled = [each for each in begun if spec_of(each.name) is not OPERATIONS["send"]] or begun
        if seen or stands >= LEAST or not stacks.asks_again_and_again():
            polled = []
        for record in begun:
            record.where = line if record in polled else ""
            add(record, 0.0, waits=False, polls=record in polled)
        for record in (each for source in SOURCES for each in source.polls()):
            record.where = line
            add(record, 0.0, waits=False, polls=True)
        return {
            "version": held.VERSION,
            "rank": self.rank,
            "size": self.size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "reason": reason,
            "program": f"{line} in {function}" if line else "",
            "stands": stands,
            "has_threads": stacks.threads_of_the_program() != [threading.main_thread()],
            "left": left,
            "spare": spare,
            "ended": ended or stacks.exception_that_ends(),
            "operations": operations,
            "tasks": [{**record.as_dict(), "seconds": seconds} for record, seconds in stacks.tasks_in_flight()],
            "groups": {key_of(group): _group(group) for group in groups()}
            | {key: facts for source in SOURCES for key, facts in source.groups().items()},
            "neighbours": {state: as_ranges(ranks) for state, ranks in self._neighbours().items()},
            "memory": resident_bytes(),
            "bytes": self.meter.total(),
            "threads": stacks.all_stacks(without=me if me != threading.main_thread().ident else 0),
        }

    def write(
        self, reason: str, elapsed: Mapping[Any, float] | None = None, answers: str = "", has_left: bool = False
    ) -> Path:
        """Write this rank's report and return its file."""
        with self._one_at_a_time:
            report = self.state(reason, elapsed)
            report["answers"] = answers
            report["left"] = report["left"] or has_left
            if answers and not answers.endswith(COUNTS):  # another rank may end the job once it has the report
                save(self.folder.places[0], is_final=False)
            return self.folder.put(f"rank{self.rank}.json", json.dumps(report, separators=(",", ":")))

    def answer(self, elapsed: Mapping[Any, float]) -> None:
        """Write this rank's report; wake the node's other processes if the question came from another node."""
        with self._one_at_a_time:
            token = self.question()
            if not token or token.startswith(END):
                return
            self._has_answered(token)
            if token.endswith(COUNTS):
                self.meter.start()
            self.write("asked", elapsed, token)
        if token.split()[0] not in map(str, self.processes):
            self.wake()

    # -- the others ------------------------------------------------------------------------------------------

    def ask(self, counts: bool = False) -> str:
        """Ask all ranks for their reports; return the token that the answers will carry."""
        self._earlier = set(self._questions())
        return self._ask(f"{self.rank} {secrets.token_hex(8)}{COUNTS * counts}")

    def reports(self, reason: str, elapsed: Mapping[Any, float], patience: float) -> list[dict[str, Any]]:
        """Ask all ranks for their reports, write this rank's, and return those that arrive in time."""
        with self._one_at_a_time:
            token = self.ask()
            self._has_answered(token)
            self.write(reason, elapsed, token)
        return self.collect(token, patience)

    def end_in(self, seconds: float) -> float:
        """Order this run's other ranks to end; return the time at which all end (seconds since the epoch)."""
        when = time.time() + seconds
        with contextlib.suppress(OSError):
            self._answered.add(self._ask(f"{END}{when}"))
        return when

    def time_of_end(self) -> float | None:
        """Return the time at which this rank is ordered to end; None without an order that is due."""
        said = self.question()
        if not said.startswith(END):
            return None
        try:
            when = float(said.removeprefix(END))
        except ValueError:
            when = 0.0
        if abs(when - time.time()) <= LATEST_END:
            return when
        self._answered.add(said)
        return None

    def _ask(self, token: str) -> str:
        self.folder.put(ASK, token)
        self.wake()
        return token

    def wake(self, besides: Collection[int] = ()) -> None:
        """Wake the other processes of this node, except those of some ranks, to look for the question."""
        for rank, pid in self.processes.items():
            if rank != self.rank and rank not in besides:
                self.mailbox.wake(pid)

    def _questions(self) -> list[str]:
        """Return the questions in the run's folder, and `hpccomm debug`'s in its parent, which can't end the run."""
        *own, beside = (
            read_text(place / ASK, is_an_order=True) for place in (*self.folder.places, self.folder.places[0].parent)
        )
        return [*own, "" if beside.startswith(END) else beside]

    def question(self) -> str:
        """Return a question that this rank has not answered; "" if there is none."""
        return next((text for text in self._questions() if text and text not in self._answered), "")

    def is_asked(self) -> bool:
        """Return whether there is a question that this rank has not answered."""
        return self.question() != ""

    def collect(self, token: str, patience: float) -> list[dict[str, Any]]:
        """Return the reports that answer a question, once all ranks have answered or none has for `patience` seconds.

        Another rank's question may replace this one, since both use one file; answers to it are as new.
        """
        asked, look, answered, deadline = {token}, Look(), 0, time.monotonic() + patience
        while True:
            began = time.monotonic()
            asked.update(set(self._questions()) - self._earlier)
            found = [each for place in self.folder.places for each in look.into(place, asked)]
            reports = {each["rank"]: each for each in _one_of_each([each for each in found if _is_answer(each, asked)])}
            if answered < len(reports):
                answered, deadline = len(reports), began + patience  # a file system needs time for thousands of files
            gone = {rank for state, ranks in self._neighbours().items() if state != "running" for rank in ranks}
            if len(gone | reports.keys()) >= self.size or began > deadline:
                return list(reports.values())
            self.wake(besides=reports)  # their mailboxes may not have been open before
            time.sleep(max(0.05, time.monotonic() - began))

    def claim(self, seconds: float = 0.0, lost: int = 0) -> bool:
        """Return whether this rank is the first to claim the verdict in the last `seconds`.

        An earlier verdict is about another call, or no longer true. `lost` is the number of a claim that this rank gave
        up.
        """
        while self.folder.files(f".claim-{self.claimed + 1}"):
            self.claimed += 1
        if self.claimed not in (0, lost):
            now = self.folder.now()
            made, works = (
                max((file.lstat().st_mtime for file in self.folder.files(f".{name}-{self.claimed}")), default=0.0)
                for name in ("claim", "work")
            )
            if max(made, works) >= now - seconds and (self.has_concluded() or max(made, works) > now - LOST):
                return False
        self.claimed += 1
        return self.folder.create(f".claim-{self.claimed}")

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Leave signs of life for the ranks that wait for this rank's verdict."""
        ended, name = threading.Event(), f".work-{self.claimed}"

        def leave_signs() -> None:
            count = 0
            while not ended.is_set():
                count += 1
                with contextlib.suppress(OSError):
                    self.folder.put(name, str(count))
                ended.wait(BEAT)

        try:
            threading.Thread(target=leave_signs, name="hpccomm-verdict", daemon=True).start()
        except RuntimeError:  # no thread starts while Python 3.12 exits; one sign is enough for a minute
            self.folder.put(name, "1")
        try:
            yield
        finally:
            ended.set()

    def sign_of_life(self) -> str:
        """Return the last sign of life of the rank that claimed the verdict."""
        return self.folder.text(f".work-{self.claimed}")

    def place(self) -> int:
        """Return this rank's index among the ranks of its node that can wake it."""
        return sorted(self.processes).index(self.rank) if self.mailbox.is_open and self.rank in self.processes else 0

    def conclusion(self) -> str:
        """Return the last claimed verdict; "" until it is given."""
        return self.folder.text(self._verdict).strip()

    def has_concluded(self) -> bool:
        """Return whether the last claimed verdict has been given."""
        return bool(self.folder.files(self._verdict))

    def conclude(self, text: str) -> None:
        """Write the verdict into the folder, and wake the ranks of this node that wait for it."""
        self.folder.put(self._verdict, text + "\n")
        self.wake()

    def has_all_neighbours(self) -> bool:
        """Return whether no process of this node has ended."""
        return not {"dead", "ended"} & self._neighbours().keys()

    @property
    def _verdict(self) -> str:
        return "verdict.txt" if self.claimed < 2 else f"verdict-{self.claimed}.txt"

    def _neighbours(self) -> dict[str, list[int]]:
        """Return the ranks of this node by their processes' states."""
        return ranks_by_value((rank, process_state(self.processes[rank])) for rank in sorted(self.processes))


class Look:
    """Looks into folders for reports repeatedly; each version of a file is read once."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}  # by path: the file's stamp and its report

    @without_collector()
    def into(self, folder: Path, asked: Collection[str] = ()) -> list[dict[str, Any]]:
        """Return the reports in a folder; files that answer one of the questions `asked` are not read again."""
        entries: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError), os.scandir(folder) as found:
            entries = [each for each in found if REPORT.fullmatch(each.name)]
        for each in entries:
            stamp, said = self._read.get(each.path, (None, {}))
            if said.get("answers") not in asked:
                with contextlib.suppress(FileNotFoundError):
                    status = each.stat(follow_symlinks=False)
                    if stamp != (new := (status.st_ino, status.st_mtime_ns)):
                        self._read[each.path] = new, _report(Path(each.path))
        return [said for each in entries if (said := self._read.get(each.path, (None, {}))[1])]


def read(folder: Path, look: Look | None = None) -> list[dict[str, Any]]:
    """Return the reports in a run's folder."""
    return _one_of_each((look or Look()).into(folder))


def _one_of_each(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last report of each rank: Python may have answered after the thread that answers for it."""
    return list({each["rank"]: each for each in sorted(reports, key=lambda each: each["time"])}.values())


def _report(file: Path) -> dict[str, Any]:
    """Return the report in a rank's file; {} if there is none."""
    try:
        text = read_text(file)
        said = held.report(text) if file.suffix == held.SUFFIX else json.loads(text or "0")
        size = said["size"] if said["version"] == held.VERSION else 0
        return said if 0 <= said["rank"] < size <= LARGEST_JOB and said["time"] >= 0 else {}
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):  # forged, or of another version
        return {}


def _time_of(file: Path) -> float:
    try:
        return file.lstat().st_mtime
    except OSError:  # it has been removed
        return 0.0


def _is_answer(report: Mapping[str, Any], asked: set[str]) -> bool:
    """Return whether a report answers one of the questions, or is the last one of a program that has ended."""
    return report.get("answers") in asked or (report.get("left", False) and not report["answers"])


def latest(reports: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers to the last question, and the reports that other ranks left at their end."""
    ordered = sorted(reports, key=lambda each: each["time"])
    asked = next((each["answers"] for each in reversed(ordered) if each.get("answers")), "")
    return [each for each in ordered if each.get("answers", "") in ("", asked)]


def process_state(pid: int) -> str:
    """Return the state of a process of this node: "running", "ended" (its program), "stopped" or "dead"."""
    try:
        name, (letter, *_) = of_process(pid)
    except FileNotFoundError:
        return "dead" if os.path.isdir("/proc/self") else "running"
    except (OSError, ValueError):
        return "running"
    usual = "ended" if name == ENDED else "running"
    return {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}.get(letter, usual)


def _group(group: ProcessGroup) -> dict[str, Any]:
    counts = {"collectives": group.sequence_number, "messages": group.message_number}
    recent: list[list[Any]] = [
        [number, name, str(dtype), nbytes] for number, name, dtype, nbytes in group.dispatcher.recent.copy()
    ]
    fast = list(ring_records({group.dispatcher.fast_path.place: ("", "")}).values())
    recent += [
        [each.number, each.name, each.dtype, each.nbytes, each.count, each.op, each.peer, each.async_op]
        for each in [each for each in fast if each.name not in MESSAGES][-KEPT:]
    ]
    recent.sort(key=lambda each: each[0])
    messages: list[tuple[str, Any, Any]] = [*group.dispatcher.last_sent.copy()]
    messages += [(each.name, each.peer, each.tag) for each in fast if each.name in ("send", "sendrecv")][-KEPT:]
    sent = [[peer, tag_in_words(name, tag)] for name, peer, tag in messages]
    known = {"name": group.name, "made_at": made_at(group), **counts, "recent": recent, "sent": sent}
    ranges = as_ranges(ranks_of(group))
    if len(ranges) > MANY_RANGES and group.rank % (group.size // MANY_RANGES):
        return known  # members spread over the group list the ranks for the others
    return {**known, "ranks": ranges}
