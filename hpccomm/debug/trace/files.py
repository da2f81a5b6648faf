"""A rank's recording as a file: written at exit and on demand."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...process.settings import Settings, folder_at_start
from ...process.stderr import tell
from ..folder import put, runs
from ..groups_seen import key_of
from ..records import Record
from ..words import LARGEST_JOB, as_ranges, from_ranges
from . import recorder as recorders
from .clock import Clocks

if TYPE_CHECKING:
    from ...core.group import ProcessGroup

VERSION = 2
SUFFIX = ".trace.json"
COLUMNS = [each.name for each in fields(Record)]


@dataclass
class GroupInfo:
    """One rank's view of a group: members by rank in MPI.COMM_WORLD, and numbers of begun operations."""

    name: str
    ranks: tuple[int, ...]
    collectives: int = 0
    messages: int = 0
    has_all_messages: bool = True  # False for a communicator: messages sent from C are not recorded


@dataclass
class Trace:
    """The recording of one rank, from its file."""

    rank: int  # in MPI.COMM_WORLD
    size: int
    host: str = ""
    pid: int = 0
    groups: dict[str, GroupInfo] = field(default_factory=dict)  # by key
    records: list[Record] = field(default_factory=list)  # in the order in which they began, on rank 0's clock
    clock_error: float | None = None  # seconds by which times may be wrong; None if clocks were not compared
    is_final: bool = True  # the program has ended or hangs: nothing follows


# -- recording from the start -------------------------------------------------------------------------------


class _Tracing:
    """The recording that HPCCOMM_TRACE started in this process."""

    def __init__(self, settings: Settings) -> None:
        self.folder = settings.debug_dir
        self.recorder = recorders.begin(settings.trace_size, settings.trace == "stack")
        self.clocks = Clocks()
        self.process = _process()
        self.written: Any = None  # the recorder's mark at the last write
        atexit.register(self.write)

    def write(self) -> None:
        """Write the recording if it has changed, and report its folder."""
        mark = self.recorder.mark()
        if mark == self.written:
            return
        self.written = mark
        try:
            folder = str(write_trace(self.folder).parent)
        except OSError as error:
            tell(f"hpccomm: the recording of rank {self.process[0]} can't be written: {error}")
            return
        if self.process[0] == 0:
            with contextlib.suppress(OSError):  # the working directory has been removed
                folder = min(os.path.relpath(folder), folder, key=len)
            tell(f"hpccomm: operations are recorded; to look at them: hpccomm trace {shlex.quote(folder)}")


_tracing: _Tracing | None = None


def attach(group: ProcessGroup) -> None:
    """Start recording with the first group, and compare clocks in the largest group of all its ranks; collective."""
    global _tracing
    if _tracing is None:
        _tracing = _Tracing(group.settings)
    if _is_true_of_all(group, group.size >= _tracing.clocks.size):
        _tracing.clocks = Clocks(key_of(group), group.size)
        _tracing.clocks.measure(group)


def detach(group: ProcessGroup, all_come: bool) -> None:
    """Write the recording before the largest group is destroyed; collective if `all_come`."""
    if _tracing is None:
        return
    if (traced := _tracing.recorder.groups.get(key_of(group))) is not None:
        traced.numbers()  # the last, which it keeps
    is_measured = _tracing.clocks.key == key_of(group)
    with contextlib.suppress(RuntimeError):  # from MPI, if a rank dies now
        if all_come and _is_true_of_all(group, is_measured):
            _tracing.clocks.measure(group)
    if is_measured:
        _tracing.write()


def _is_true_of_all(group: ProcessGroup, mine: bool) -> bool:
    """Ask all ranks of a group that is the world, or made from a communicator; return False for any other group."""
    return bool(group.processes) and (group.comm is None or all(group.comm.allgather(mine)))


# -- writing and reading -----------------------------------------------------------------------------------------


def write_trace(folder: str | Path, is_final: bool = True) -> Path:
    """Write this process's recording into a folder, from any thread, and return the file.

    `is_final` is False if the program continues: ranks that are a little behind are then not to blame. Raise OSError if
    the file can't be written.
    """
    recorder = recorders.recorder()
    rank, size = _process()
    clocks = Clocks() if _tracing is None else _tracing.clocks
    records = [] if recorder is None else recorder.records()
    traced = {} if recorder is None else dict(recorder.groups)
    groups = {
        key: asdict(GroupInfo(each.name, (), *each.numbers(), each.has_all_messages)) | {"ranks": as_ranges(each.ranks)}
        for key, each in traced.items()
    }
    document = {
        "version": VERSION,
        "rank": rank,
        "size": size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "is_final": is_final,
        "clock": {"ahead": clocks.points[0][1] if clocks.points else None, "error": clocks.error},
        "groups": groups,
        "columns": COLUMNS,
        "records": [[getattr(record, name) for name in COLUMNS] for record in map(clocks.corrected, records)],
    }
    folder = Path(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return put(folder, f"rank{rank}{SUFFIX}", json.dumps(document, separators=(",", ":")))


def save(folder: str | Path, is_final: bool = True) -> Path | None:
    """Write the recording when the process ends, or may soon; return None if there is none or it can't be written."""
    recorder = recorders.recorder()
    if recorder is None or not recorder.records():
        return None
    with contextlib.suppress(OSError):
        return write_trace(folder, is_final)
    return None


def dump_trace(folder: str | Path | None = None) -> Path:
    """Write this rank's recording so far; call it on each rank whose recording you want.

    Parameters
    ----------
    folder : str or Path, optional
        Default: ``HPCCOMM_DEBUG_DIR``, or a folder ``hpccomm-debug-*`` in the working directory.

    Returns
    -------
    pathlib.Path
        The file, ``rank<N>.trace.json``; N is the rank in MPI.COMM_WORLD. ``hpccomm trace FOLDER`` reads it.

    Raises
    ------
    OSError
        The file can't be written.

    Examples
    --------
    >>> import hpccomm.debug, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with hpccomm.debug.record():
    ...         hc.barrier()
    ...     print(hpccomm.debug.dump_trace(folder).name)
    rank0.trace.json
    """
    if folder is None:
        folder = folder_at_start() if _tracing is None else _tracing.folder
    return write_trace(folder, is_final=False)


def read(folder: str | Path) -> list[Trace]:
    """Return the recordings of the last run in a folder, by rank; raise ValueError if a file is not a recording."""
    traces, alike = [], {}  # maps texts to tuples: equal tuples share memory
    for file in next(reversed(runs(Path(folder), f"rank*{SUFFIX}")), Path(folder)).glob(f"rank*{SUFFIX}"):
        try:
            said = json.loads(file.read_text(encoding="utf-8"))
            if said["version"] != VERSION:
                raise ValueError(f"it has version {said['version']}, this hpccomm reads {VERSION}")
            records = [Record(**dict(zip(said["columns"], row))) for row in said["records"]]
            groups = {}
            for key, each in said["groups"].items():
                if (ranges := str(each["ranks"])) not in alike:
                    alike[ranges] = tuple(from_ranges(each["ranks"], most=LARGEST_JOB))
                groups[key] = GroupInfo(**{**each, "ranks": alike[ranges]})
            fields = {name: said[name] for name in ("rank", "size", "host", "pid", "is_final")}
            traces.append(Trace(**fields, groups=groups, records=records, clock_error=said["clock"]["error"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is no recording: {error}") from error
    sizes = sorted({trace.size for trace in traces})
    if len(sizes) > 1:
        words = " and ".join(map(str, sizes))
        raise ValueError(f"{folder} has recordings of jobs of {words} ranks: give each run a folder of its own")
    return sorted(traces, key=lambda trace: trace.rank)


def groups_in(traces: Iterable[Trace]) -> dict[str, GroupInfo]:
    """Return the groups in all recordings, by key."""
    return {key: group for trace in traces for key, group in trace.groups.items()}


def _process() -> tuple[int, int]:
    """Return the rank and the size of MPI.COMM_WORLD; (0, 1) if MPI is not initialised."""
    if _tracing is not None:
        return _tracing.process
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return 0, 1
    return mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
