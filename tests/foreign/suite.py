"""Run the tests and programs of others with and without `hpccomm run`: python -m tests.foreign.suite BIN... (--help).

The outcomes are kept in docs/mpi4py-programs.json, a row for each program and MPI; the table of
docs/how-to/mpi4py-programs.md is made from it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from ..launch import ROOT, clean_environment
from .programs import FAULT, PROGRAMS, Program, folder_of

SEEN, TABLE = ROOT / "docs" / "mpi4py-programs.json", ROOT / "docs" / "how-to" / "mpi4py-programs.txt"
OWN_SUITE = "mpi4py"
KNOWN = {  # of mpi4py's own tests
    "test_objmodel.TestObjModel.testCAPI": "a communicator that C makes is of mpi4py's own class, which is not the "
    "subclass of COMM_WORLD",
}
Row = dict[str, Any]


def main() -> None:
    """Run the chosen programs, print a line for each, keep it, and write the table; status 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bin", type=Path, nargs="*", help="the bin of a virtual environment with the packages")
    parser.add_argument("--only", nargs="*", help="names of programs", metavar="NAME")
    parser.add_argument("--ranks", nargs="*", type=int, help="numbers of ranks for mpi4py's own tests (default: 2)")
    parser.add_argument("--sources", type=Path, default=ROOT / "build" / "foreign", help="the unpacked sdists")
    arguments = parser.parse_args()
    rows = {(row["program"], row["mpi"]): row for row in (json.loads(SEEN.read_text()) if SEEN.exists() else [])}
    differs = False
    for each in arguments.bin:
        job = Job(each.absolute(), arguments.sources.absolute())
        here = [program.name for program in PROGRAMS if program.is_debians == job.is_debians]
        names = arguments.only or [*here, *([] if job.is_debians else [OWN_SUITE])]
        for name in names:
            program = next((program for program in PROGRAMS if program.name == name), None)
            for ranks in (arguments.ranks or [2]) if program is None else [0]:
                before = rows.get((name, job.mpi))
                row = job.mpi4pys_own(ranks, before) if program is None else job.row(program)
                rows[name, job.mpi] = row
                differs |= not row["is_right"]
                write([rows[key] for key in sorted(rows)])
    sys.exit(differs)


def write(rows: list[Row]) -> None:
    """Keep the outcomes, and write the table."""
    SEEN.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    TABLE.write_text(as_table(rows), encoding="utf-8")


class Job:
    """The programs in one virtual environment."""

    def __init__(self, folder: Path, sources: Path) -> None:
        self.bin, self.sources = folder, sources
        facts = "import mpi4py.MPI as M, sysconfig; print(sysconfig.get_path('purelib')); print(M.get_vendor()[0])"
        facts += "; print('.'.join(map(str, M.get_vendor()[1][:2]))); print('Debian' in M.Get_library_version())"
        self.installed, self.mpi, version, is_debians = self._python(facts)
        self.is_debians = is_debians == "True"
        if self.is_debians:
            self.mpi = f"{self.mpi} {version} of Debian"

    def _python(self, code: str) -> list[str]:
        said = subprocess.run([self.bin / "python", "-c", code], capture_output=True, text=True, check=True)
        return said.stdout.splitlines()

    def version(self, package: str) -> str:
        """Return the version of an installed package."""
        if self.is_debians:  # whose h5py is there twice, and has another name
            return self._python(f"import {package}; print({package}.__version__)")[0]
        return self._python(f"import importlib.metadata as m; print(m.version({package!r}))")[0]

    def run(
        self,
        ranks: int,
        *command: object,
        watched: bool,
        seconds: float = 600,
        folder: str = ".",
        outcomes: str = "",
        options: tuple[str, ...] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on so many ranks, under `hpccomm run` with these options, or as it is."""
        how = ("-m", "hpccomm", "run", "--timeout", "300" if outcomes else "5", *options) if watched else ()
        own = {"TIME_LIMIT": str(seconds), "OUTCOMES": outcomes, "PYTHONPATH": str(ROOT), "HPCCOMM_DEBUG_DIR": folder}
        words = [
            str(each) for each in (ROOT / "tools" / "run-mpi", self.bin, ranks, self.bin / "python", *how, *command)
        ]
        return subprocess.run(
            list(words),
            cwd=folder,
            env={**clean_environment(), **own},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )

    def row(self, program: Program) -> Row:
        """Return the outcomes of a program: its tests, its output, its ends."""
        package = program.name.split(".")[0]
        row: Row = {"program": program.name, "version": self.version(package), "mpi": self.mpi, "tests": {}}
        with tempfile.TemporaryDirectory() as folder:
            wrong = [each for ranks in program.ranks for each in self._tests(program, ranks, folder, row)]
            file = Path(folder) / "program.py"
            file.write_text(FAULT + textwrap.dedent(program.program), encoding="utf-8")
            ranks = max(3, *program.ranks)  # the worker of a pool of two is polled
            plain, watched = (self.run(ranks, file, watched=how, seconds=120, folder=folder) for how in (False, True))
            if not printed(plain) or printed(plain) != printed(watched):
                wrong.append(
                    f"its program: {plain.stdout}{plain.stderr[-1000:]}{watched.stdout}{watched.stderr[-1000:]}"
                )
            raises = self.run(ranks, file, "raises", watched=True, seconds=120, folder=folder)
            if raises.returncode == 124 or not re.search(program.end, raises.stderr + raises.stdout):
                wrong.append(f"one raises: {raises.returncode} {raises.stderr[-2000:]}")
            row["verdict"] = self._verdict(program, ranks, file, wrong) if program.verdict else ""
        return self._reported(row, wrong)

    def _verdict(self, program: Program, ranks: int, file: Path, wrong: list[str]) -> str:
        """Return the message if rank 1 never comes back."""
        waits = self.run(ranks, file, "waits", watched=True, seconds=120, folder=str(file.parent))
        said = re.search(rf"hpccomm: (.*(?:{program.verdict})[^;\n]*)", waits.stderr)
        if waits.returncode not in (124, 9) or said is None:
            wrong.append(f"one waits: {waits.returncode} {waits.stderr[-2000:]}")
        return re.sub(r"\S*/(?=[\w.]+:\d)", "", said[1]) if said else ""

    def _tests(self, program: Program, ranks: int, folder: str, row: Row) -> list[str]:
        """Run its tests with and without `hpccomm run`; return the differences, test by test."""
        if not program.tests:
            return []
        place = folder_of(program, Path(self.installed), self.sources)
        if program.is_script:
            ends = [[self.run(ranks, place / each, watched=how, outcomes="-").returncode for each in program.tests]
                    for how in (False, True)]  # fmt: skip
            row["tests"][str(ranks)] = [sum(not status for status in each) for each in ends]
            return [] if ends[0] == ends[1] else [f"statuses on {ranks} ranks: {ends}"]
        files = [place / each for each in program.tests]
        options = [
            "-p",
            "tests.foreign.outcomes",
            "-p",
            "no:cacheprovider",
            "--with-mpi",
            "-q",
            "--continue-on-collection-errors",
        ]
        options += program.options
        seen = []
        for how in (False, True):
            outcomes = f"{folder}/{'with' if how else 'without'}-{ranks}"
            self.run(ranks, "-m", "pytest", *options, *files, watched=how, folder=folder, outcomes=outcomes)
            seen.append(read(outcomes, ranks))
        return compared(*seen, ranks, row)

    def mpi4pys_own(self, ranks: int, before: Row | None) -> Row:
        """Return the outcomes of mpi4py's own tests on so many ranks, and the earlier outcomes on other numbers."""
        version = self.version("mpi4py")
        tests = dict(before["tests"]) if before and before["version"] == version else {}
        others_differ = before is not None and bool(tests.keys() - {str(ranks)}) and not before["is_right"]
        row: Row = {"program": OWN_SUITE, "version": version, "mpi": self.mpi, "tests": tests}
        place, script = self.sources / f"mpi4py-{version}" / "test", ROOT / "tests" / "foreign" / "mpi4py_suite.py"
        with tempfile.TemporaryDirectory() as folder:
            seen = []
            for how in (None, (), ("--accelerate",), ("--detail",)):
                outcomes = f"{folder}/{len(seen)}"
                self.run(
                    ranks, script, place, outcomes, watched=how is not None, options=how or (),
                    seconds=900, folder=folder, outcomes=outcomes,
                )  # fmt: skip
                seen.append(read(outcomes, ranks))
            without, *with_it = seen
            wrong = [
                f"{each}{options}"
                for options, outcome in reversed(list(zip(("", " --accelerate", " --detail"), with_it, strict=True)))
                for each in compared(without, outcome, ranks, row)
            ]
        return self._reported(row, wrong + ["on other numbers of ranks"] * others_differ)

    def _reported(self, row: Row, wrong: list[str]) -> Row:
        row["is_right"] = not wrong
        print("ok   " if row["is_right"] else "WRONG", row["program"], row["version"], row["mpi"], row["tests"])
        for each in wrong:
            print(f"      {each}")
        print(f"      {row['verdict']}" if row.get("verdict") else "", flush=True)
        return row


def printed(finished: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines that the ranks have printed, without those of MPICH's launcher."""
    return sorted(finished.stdout.partition("\n\n=====")[0].splitlines())


def read(outcomes: str, ranks: int) -> dict[tuple[int, str], str]:
    """Return the outcome of each test on each rank."""
    found: dict[tuple[int, str], str] = {}
    for rank in range(ranks):
        file = Path(f"{outcomes}.{rank}")
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            name, _, outcome = line.partition(" ")
            found[rank, name] = outcome or "has not ended"
    return found


def compared(
    without: dict[tuple[int, str], str], with_it: dict[tuple[int, str], str], ranks: int, row: Row
) -> list[str]:
    """Return the tests whose outcomes differ; into the row go how many have passed without and with `hpccomm run`."""
    passed = [sum(outcome.startswith("passed") for outcome in seen.values()) for seen in (without, with_it)]
    row["tests"][str(ranks)] = passed
    different = [key for key in sorted(without.keys() | with_it.keys()) if without.get(key) != with_it.get(key)]
    unknown = [key for key in different if key[1] not in KNOWN]
    names = Counter(name for _, name in unknown)
    wrong = [f"{name} on {ranks} ranks: {without.get((rank, name))}, with hpccomm run {with_it.get((rank, name))}"
             for rank, name in unknown if names.pop(name, 0)]  # fmt: skip
    return wrong if without else [f"no test has been run on {ranks} ranks"]


def as_table(rows: list[Row]) -> str:
    """Return the table of the documentation."""
    lines = [
        "| program | MPI | tests on ranks: passed without, with | where rank 1 never comes back |",
        "|---|---|---|---|",
    ]
    for row in rows:
        tests = "; ".join(f"{ranks}: {one}, {other}" for ranks, (one, other) in sorted(row["tests"].items()))
        verdict = f"`{row['verdict']}`" if row.get("verdict") else ""
        wrong = "" if row["is_right"] else " (**differs**)"
        lines.append(f"| {row['program']} {row['version']} | {row['mpi']} | {tests}{wrong} | {verdict} |")
    return "\n".join(lines) + "\n"


def unpack(folder: Path) -> None:
    """Unpack the sdists in a folder."""
    for file in folder.glob("*.tar.gz"):
        with tarfile.open(file) as archive:
            archive.extractall(folder, [each for each in archive if "/.claude/" not in each.name], filter="data")


if __name__ == "__main__":
    if sys.argv[1:2] == ["unpack"]:
        unpack(Path(sys.argv[2]))
    else:
        main()
