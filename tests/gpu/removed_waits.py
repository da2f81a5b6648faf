"""Take away each wait in hpccomm's GPU code, one at a time, and see whether the tests of tests/gpu notice.

``python -m tests.gpu.removed_waits [PART_OF_A_NAME ...]`` prints a line for each: what notices it, or UNNOTICED; the
exit status is 1 if there are any of these. It takes a few minutes.

What is taken away: waits of streams and of the host, events recorded for them, barriers of MPI, what keeps memory
alive that a transport still uses, and the copies of inputs that outputs overlap. `PROVIDERS` are left out: the
stand-in runs in their place.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..launch import ROOT, clean_environment, mpiexec_folder

RANKS = 2
LONGEST = 240  # seconds, for all tests of one
ORDERS = {
    "wait", "record", "synchronize_stream", "synchronize_event", "synchronize", "_follow", "_everybody_waits",
    "Barrier",
}  # fmt: skip
KEEPS = {"alive", "ABANDONED", "_in_flight"}
WORKS = {"MPIWork", "ReceiveWork"}  # the last argument is kept
PROVIDERS = {"cupy_runtime.py", "cupy_nccl.py", "seam.py"}
TESTS = {
    "cuda/packing.py": "test_staged test_streams test_checkpoint",
    "cuda/staged_backend.py": "test_staged test_collectives",
    "cuda/work.py": "test_streams test_life",
    "mpi/cuda_aware_backend.py": "test_staged test_point_to_point test_collectives",
    "nccl/backend.py": "test_streams test_life test_collectives test_point_to_point",
    "nccl/bootstrap.py": "test_life",
    "nccl/connection.py": "test_streams test_life test_point_to_point test_intra_node",
    "nccl/intra_node.py": "test_intra_node",
}


class Removal(NamedTuple):
    """A piece of a file, and what stands there instead."""

    file: Path
    line: int
    start: int
    end: int
    piece: str
    instead: str

    @property
    def name(self) -> str:
        """How it is called in the table."""
        return f"{self.file.relative_to(ROOT / 'hpccomm')}:{self.line} {' '.join(self.piece.split())}"


def removals() -> Iterator[Removal]:
    """Find all, by the syntax tree."""
    package = ROOT / "hpccomm"
    for file in sorted([*package.glob("cuda/*.py"), *package.glob("nccl/*.py"), *package.glob("mpi/cuda_aware_*.py")]):
        if file.name not in PROVIDERS:
            text = file.read_text()
            for node in ast.walk(ast.parse(text)):
                instead = without(node, text)
                if instead is not None:
                    start, end = place(node, text)
                    yield Removal(file, node.lineno, start, end, text[start:end], instead)


def without(node: ast.AST, text: str) -> str | None:
    """Return what stands in the place of a piece that orders something without it; None if it is none of these."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in ORDERS:
            return "pass"
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="append", value=kept))) if name_of(kept) in KEEPS:
            return "pass"
        case ast.Assign(targets=[ast.Subscript(value=kept)]) if name_of(kept) in KEEPS:
            return "pass"
        case ast.Call(func=ast.Attribute(attr="apart", value=launch), args=[arrays, _]):
            return f"list(map({source(launch, text)}.reading, {source(arrays, text)}))"
        case ast.Call(func=ast.Name(id=name), args=[*others, _]) if name in WORKS:
            return f"{name}({', '.join(source(each, text) for each in others)}, None)"
    return None


def name_of(node: ast.expr) -> str:
    """Return the last name of an expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def place(node: ast.AST, text: str) -> tuple[int, int]:
    """Return where a piece is."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def source(node: ast.AST, text: str) -> str:
    """Return the text of a piece."""
    start, end = place(node, text)
    return text[start:end]


def noticed(removal: Removal, folder: Path) -> str | None:
    """Run the tests on a copy of the package without a piece; say which notices first, None if none does."""
    for name in ("hpccomm", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pytest_hpccomm.py", "setup.cfg", "pyproject.toml", "tools", "jobs"):
        (folder / name).symlink_to(ROOT / name)
    text = removal.file.read_text()
    copy = folder / removal.file.relative_to(ROOT)
    copy.write_text(text[: removal.start] + removal.instead + text[removal.end :])
    files = [f"tests/gpu/{name}.py" for name in TESTS[str(removal.file.relative_to(ROOT / "hpccomm"))].split()]
    done = subprocess.run(
        [
            *(ROOT / "tools" / "run-mpi", mpiexec_folder(), str(RANKS)),
            *(sys.executable, "-m", "mpi4py", "-m", "pytest", "--with-mpi", "--color=no", "-x", "-v", "--tb=line"),
            *("-p", "no:cacheprovider", "-k", "not very_many", *files),
        ],
        cwd=folder,
        env={**clean_environment(), "PYTHONPATH": str(folder), "TIME_LIMIT": str(LONGEST)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    first = re.search(r"^(?:FAILED|ERROR) \S*/(\S+)", done.stdout, re.MULTILINE)
    if first:
        return first[1]
    last = re.findall(r"^tests/gpu/(\S+::.*)", done.stdout, re.MULTILINE)
    return f"{last[-1] if last else 'nothing'}: {'no end' if done.returncode in (124, 137) else 'a crash'}"


def main(names: list[str]) -> int:
    """Print the table; `names` are parts of the names of those to try."""
    unnoticed = 0
    for removal in sorted(removals()):
        if not names or any(name in removal.name for name in names):
            with tempfile.TemporaryDirectory(prefix="hpccomm-removed-") as folder:
                who = noticed(removal, Path(folder))
            unnoticed += who is None
            print(f"{removal.name}\n    {who or 'UNNOTICED'}", flush=True)
    return unnoticed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
