"""hpccomm debug: who is to blame for a job that hangs, from the reports of its ranks."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import report
from .verdict import verdict

PATIENCE = 10.0  # seconds for ranks to write their reports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hpccomm debug``."""
    parser.description = (
        "Say which rank of a job that hangs is to blame. Exits with 1 if it finds one, 2 without reports."
    )
    parser.add_argument("folder", nargs="?", help="the folder of the reports (HPCCOMM_DEBUG_DIR, or hpccomm-debug-*)")
    parser.add_argument(
        "--pid", type=int, help="ask the job of this process, a rank on this machine, for its reports first"
    )
    parser.add_argument("--job", help="ask this Slurm job for its reports first")
    parser.add_argument("--stacks", action="store_true", help="also show what each thread of each rank is in")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict; return 1 if it names a rank, 0 if nobody waits, 2 if there are no reports."""
    folder = Path(arguments.folder) if arguments.folder else None
    since, token = time.time(), ""
    if arguments.pid is not None:
        folder = folder or _folder_of(arguments.pid)
        os.kill(arguments.pid, signal.SIGUSR2)
    elif arguments.job is not None:
        folder = folder or _folder_of_job(arguments.job)
        since, token = 0.0, _ask(folder)
    else:
        since = 0.0
    folder = folder or _newest(Path.cwd())
    if folder is None:
        print("hpccomm debug: no folder given, and there is no hpccomm-debug-* here", file=sys.stderr)
        return 2
    reports = _wait_for(folder, since, token)
    if not reports:
        why = "no rank has answered" if since or token else "there are no reports of ranks"
        print(f"hpccomm debug: {why} in {folder}", file=sys.stderr)
        return 2
    _show(arguments, reports)
    return 1 if verdict(reports, reports[-1]["size"]).culprits else 0


def _show(arguments: argparse.Namespace, reports: list[dict[str, Any]]) -> None:
    size = reports[-1]["size"]
    found = verdict(reports, size)
    if arguments.json:
        print(json.dumps({"culprits": found.culprits, "lines": found.lines, "reports": len(reports), "size": size}))
        return
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(reports[-1]["time"]))
    print(f"{len(reports)} of {size} ranks, {when} ({', '.join(sorted({each['reason'] for each in reports}))}):")
    print("\n".join(found.lines))
    if arguments.stacks:
        for each in sorted(reports, key=lambda each: int(each["rank"])):
            print(f"\nrank {each['rank']}, process {each['pid']} on {each['host']}")
            for name, lines in each["threads"].items():
                print(f"  {name}")
                print("\n".join(f"    {line}" for line in lines))


def _wait_for(folder: Path, since: float, token: str = "") -> list[dict[str, Any]]:
    """Return the reports that belong together, written after `since` or as answers to `token`; wait for late ones."""
    deadline = time.monotonic() + PATIENCE
    while True:
        reports = [each for each in report.read(folder) if each["time"] >= since]
        reports = report.latest(each for each in reports if not token or each.get("answers") == token)
        if not (since or token) or time.monotonic() > deadline or (reports and len(reports) >= reports[-1]["size"]):
            return reports
        gone = {rank for each in reports for rank, state in each["neighbours"].items() if state != "running"}
        if reports and len(reports) + len(gone) >= reports[-1]["size"]:
            return reports
        time.sleep(0.1)


def _folder_of(pid: int) -> Path:
    """Return where a running process writes its reports."""
    said = ""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_bytes()
        variables = dict(line.split(b"=", 1) for line in text.split(b"\0") if b"=" in line)
        said = variables.get(b"HPCCOMM_DEBUG_DIR", b"").decode()
    where = Path(os.readlink(f"/proc/{pid}/cwd"))
    if said:
        return where / said
    deadline = time.monotonic() + PATIENCE
    os.kill(pid, signal.SIGUSR2)
    while time.monotonic() < deadline:
        for file in where.glob(f"{PREFIX}*/rank*.json"):
            with contextlib.suppress(OSError, ValueError):
                if file.name.count(".") == 1 and json.loads(file.read_text())["pid"] == pid:
                    return file.parent
        time.sleep(0.1)
    raise SystemExit(f"hpccomm debug: process {pid} has not answered; is it a rank that has called init_process_group?")


PREFIX = "hpccomm-debug-"


def _newest(where: Path) -> Path | None:
    folders = [each for each in where.glob(f"{PREFIX}*") if each.is_dir()]
    return max(folders, key=lambda each: each.stat().st_mtime, default=None)


def _ask(folder: Path) -> str:
    """Ask the ranks that look into the folder; return what their answers say that they answer.

    Not by `scancel --signal`: it misses ranks that mpirun has started in the batch script, and ends Open MPI's daemons
    on the other nodes, and with them the job.
    """
    asking = report.Reporter(-1, 0, folder)
    token = asking.ask()
    if asking.folder != folder:
        raise SystemExit(f"hpccomm debug --job: {folder} can't be written to")
    return token


def _folder_of_job(job: str) -> Path:
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=False).stdout
    for word in shown.split():
        if word.startswith("WorkDir="):
            return Path(word.removeprefix("WorkDir=")) / f"{PREFIX}{job.split('.')[0]}"
    raise SystemExit(f"hpccomm debug --job: scontrol knows no job {job}; give the folder of its reports")
