"""Ask a running job for reports from outside, for ``hpccomm debug`` and ``hpccomm top``."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..process.proc import of_process
from . import mailbox, report
from .folder import put, read_text, runs
from .words import from_ranges

PATIENCE = 10.0  # seconds for ranks to write their reports
FIRST_LOOK = 1.5  # seconds after init_process_group until a rank answers questions
PREFIX = "hpccomm-debug-"
REPORTS = "rank*[0-9].json"
Runs = list[tuple[Path, list[dict[str, Any]]]]  # the folder and the reports of each run


class Refused(Exception):
    """The reason why there can be no reports."""


def add_arguments(parser: argparse.ArgumentParser, when: str = "") -> None:
    """Add the options that choose a job."""
    which = "the folder of the reports" if when else "with --job: the folder of its reports"
    parser.add_argument("folder", nargs="?", help=f"{which} (HPCCOMM_DEBUG_DIR, or hpccomm-debug-*)")
    parser.add_argument(
        "--pid", type=int, help=f"ask the job of this process of this machine{when}: a rank, or mpiexec above ranks"
    )
    parser.add_argument("--job", help=f"ask this Slurm job for its reports{when}")


def answers(arguments: argparse.Namespace, counts: bool = False) -> tuple[Path, Runs]:
    """Return the folder of the reports, and the reports; ask for new ones if the arguments choose a job.

    With `counts`, the ranks count the bytes of their operations for a while.
    """
    folder, token = _asked(arguments, counts)
    _act_for_the_owner_of(folder)
    found = _wait_for(folder, token)
    if arguments.pid is not None:
        _refuse_several_jobs(arguments, folder, found)
    if not found:
        raise Refused(f"{'no rank has answered' if token else 'there are no reports of ranks'} in {folder}")
    return folder, found


def _asked(arguments: argparse.Namespace, counts: bool) -> tuple[Path, str]:
    """Ask for reports if the arguments say so; return the reports' folder and the token of the answers, or ""."""
    folder = Path(arguments.folder) if arguments.folder else None
    if arguments.pid is not None:
        return ask_process(arguments.pid, counts)
    if arguments.job is not None:
        return _ask_in(folder or _folder_of_job(arguments.job), counts)
    folders = [each for each in Path.cwd().glob(f"{PREFIX}*") if each.is_dir()]
    folder = folder or max(folders, key=lambda each: (bool(runs(each, REPORTS)), each.stat().st_mtime), default=None)
    if folder is None:
        raise Refused(f"no folder given, and there is no {PREFIX}* here; give --pid PID, --job JOB or a folder")
    return folder, ""


def ask_process(process: int, counts: bool = False) -> tuple[Path, str]:
    """Ask a process, or its descendants if it is mpiexec or a shell."""
    if not Path(f"/proc/{process}").exists():
        raise Refused(f"there is no process {process} on this machine")
    give_up = time.monotonic() + FIRST_LOOK
    while True:
        found = _answer_of(process, counts)
        if found is not None:
            return found
        if time.monotonic() > give_up:
            break
        time.sleep(0.1)
    raise Refused(
        f"process {process} has no ranks that answer: has it called init_process_group? "
        "(with one rank, or HPCCOMM_WATCHDOG=0, nothing answers)"
    )


def _answer_of(process: int, counts: bool) -> tuple[Path, str] | None:
    """Return the first answer of a process and its descendants; None if none can be asked."""
    for each in (process, *_below(process)):
        try:
            found = mailbox.ask(each, PATIENCE, counts)
        except TimeoutError:
            raise Refused(
                f"process {each} is a rank, and has not answered within {PATIENCE:g} s: it may be stopped, or hold the "
                f"GIL in compiled code, or another user's datagrams keep it busy, which it tells on stderr; "
                f"`py-spy dump --pid {each}` shows where it is"
            ) from None
        except OSError:  # it has ended
            continue
        if found is not None:
            return found
    return None


def _refuse_several_jobs(arguments: argparse.Namespace, folder: Path, found: Runs) -> None:
    """Raise Refused, with a command for each job, if ranks of several jobs are below a process."""
    process: int = arguments.pid
    jobs, known = {folder: _processes(found)}, set(_processes(found))
    if process in known:  # a rank; a job below it is another matter
        return
    for each in _below(process):
        if each not in known:
            with contextlib.suppress(OSError):  # it has ended, or does not answer
                if (answer := mailbox.ask(each, PATIENCE)) is not None and answer[0] not in jobs:
                    jobs[answer[0]] = [each, *_processes(_wait_for(*answer))]
                    known.update(jobs[answer[0]])
    if len(jobs) > 1:
        commands = (
            f"  hpccomm {arguments.command} --pid {ranks[0]}   # {len(set(ranks))} ranks here, {_program(ranks[0])}"
            for ranks in jobs.values()
        )
        raise Refused("\n".join([f"{len(jobs)} jobs run below process {process}; choose one:", *commands]))


def _processes(found: Runs) -> list[int]:
    """Return the processes of the ranks of the last run on this machine."""
    here = socket.gethostname()
    return [each["pid"] for each in found[-1][1] if each["host"] == here] if found else []


def _program(process: int) -> str:
    """Return the command line of a process; "" if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return ""


def _below(process: int) -> Iterator[int]:
    """Yield the descendants of a process."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(of_process(entry.parent.name)[1][1])
        except (OSError, ValueError, IndexError):  # it has ended
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    pending = sorted(children.get(process, []))
    for each in pending:
        yield each
        pending += sorted(children.get(each, []))


def _ask_in(folder: Path, counts: bool) -> tuple[Path, str]:
    """Ask the ranks that look into a folder.

    `scancel --signal` would not do: it misses ranks that mpirun started in the batch script. It would also end Open
    MPI's daemons on the other nodes, and with them the job.
    """
    _act_for_the_owner_of(folder if folder.is_dir() else folder.parent)
    token = f"-1 {secrets.token_hex(8)}{report.COUNTS * counts}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        put(folder, report.ASK, token)
    except OSError as error:
        raise Refused(f"nobody can be asked in {folder}: {error}") from error
    return folder, token


def _act_for_the_owner_of(folder: Path) -> None:
    """As root, become the folder's owner: links in the folder can't lead to files that the owner may not write."""
    if os.geteuid() == 0 and (found := folder.stat()).st_uid != 0:
        os.setgroups([])
        os.setegid(found.st_gid)
        os.seteuid(found.st_uid)


def _folder_of_job(job: str) -> Path:
    command = ["scontrol", "show", "job", job]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    # Each WorkDir= begins a line; the job's name and comment, which the user chooses, can't begin one.
    places = [
        line.strip().removeprefix("WorkDir=") for line in ended.stdout.splitlines() if line.startswith("   WorkDir=")
    ]
    if len(places) != 1:
        raise Refused(f"scontrol shows no job {job}; give the folder of its reports. {ended.stderr.strip()}")
    return Path(places[0]) / f"{PREFIX}{job.split('.')[0]}"


def _wait_for(folder: Path, token: str) -> Runs:
    """Return the last reports of each run; with a `token`, wait for reports that answer it, or a later question.

    Another command's question may replace this one, since both use one file.
    """
    asked, deadline, look = {token}, time.monotonic() + PATIENCE, report.Look()
    while True:
        found, began = [], time.monotonic()
        asked.add(read_text(folder / report.ASK) or token)
        for each in runs(folder, REPORTS):
            reports = report.read(each, look)
            reports = [said for said in reports if said.get("answers") in asked] if token else report.latest(reports)
            if reports:
                found.append((each, reports))
        if not token or time.monotonic() > deadline or (found and all(_is_complete(said) for _, said in found)):
            return found
        time.sleep(max(0.1, time.monotonic() - began))


def _is_complete(reports: list[dict[str, Any]]) -> bool:
    size = int(reports[-1]["size"])
    gone = {
        rank
        for text in {repr(each["neighbours"]): each["neighbours"] for each in reports}.values()
        for state, ranks in text.items()
        for rank in (from_ranges(ranks, most=size) if state != "running" else ())
    }
    return len(gone.union(each["rank"] for each in reports)) >= size
