"""Take away each wait in hpccomm's GPU code, one at a time, and see whether the tests of tests/gpu notice.

``python -m tests.gpu.removed_waits [PART_OF_A_NAME ...]`` prints for each the test that notices it, or UNNOTICED; the
exit status is 1 if there are any of these. First it runs the tests with everything in place: they have to pass.
On two cores each takes some 10 seconds, and all of them a quarter of an hour; one that goes unnoticed takes 4 minutes
more, in which all tests run. Without a wait for other ranks some tests do not end: those take `LONGEST`.

These are taken away: waits of streams and of the host, events recorded for them, barriers of MPI, references that keep
memory alive that a transport still uses, and the copies of inputs that outputs overlap. Locks are none of these.
`PROVIDERS` are left out: the stand-in runs in their place; `BINDINGS` runs only with CuPy's bindings of NCCL.
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
LONGEST = 90, 400  # seconds, for the tests that come first, and for all
ORDERS = {
    "wait", "wait_while", "record", "synchronize_stream", "synchronize_event", "synchronize", "join", "_follow",
    "_everybody_waits", "Barrier",
}  # fmt: skip
KEEPS = {"alive", "ABANDONED", "_in_flight"}
COMPILED = {  # pieces of the compiled path, and their replacements
    "code = self.follow(stream, current)": "pass",
    "code = code or of_cuda(self.to.wait(stream, <P>self.issuing.newest, 0))": "pass",
    "code = code or self.follow(stream, <P>before)": "pass",
    "code = of_cuda(self.to.record(event, stream))": "pass",
    "code = code or of_cuda(self.to.record(ends[i], own))": "pass",
    "or path.to.wait(current, <P>self._event, 0)": "",
    "self.kept[work._event] = storages(arrays), arrays": "self.kept[work._event] = None, ()",
    "if self._event == path.issuing.newest:": "if True:",
    "if <intptr_t>current == self.called_on:": "if True:",
    "code = of_cuda(launch(&self.to, self.kernels, packed, IS_RECEIVED, stream))": "pass",
    "arrays = arrays, memory": "pass",
    "and hc_is_sole(work):": ":",
    "rest._status, rest._notified, rest.was_asked = IN_FLIGHT, False, False": "pass",
}
WORKS = {"MPIWork", "ReceiveWork", "GPUWork", "GPUReceiveWork"}  # the last argument is kept
ENDS = {"end": 3, "_end": 3, "_run": 4}  # and so it is of these, which have so many
PROVIDERS = {"cupy_runtime.py", "cupy_nccl.py", "seam.py"}
BINDINGS = {"libnccl.py"}
FIRST = {  # the files of tests, or tests, that notice soonest; then come all others
    "cuda/packing.py": "test_streams test_checkpoint",
    "cuda/staged_backend.py": "test_staged",
    "cuda/work.py": "test_streams::test_an_operation_waits_for_the_stream_that_made_its_arrays "
    "test_streams::test_synchronize_and_wait_with_a_timeout_block_the_host "
    "test_streams::test_the_gpu_need_not_be_the_current_one test_life",
    "mpi/cuda_aware_backend.py": "test_staged",
    "native/gpu_path.pxi": "test_streams test_fast_path test_persistent",
    "native/gpu_works.pxi": "test_streams test_life",
    "nccl/async_errors.py": "test_life",
    "nccl/backend.py": "test_overlap test_streams::test_what_nccl_uses_is_kept_without_the_work test_time_limit",
    "nccl/connection.py": "test_streams test_life test_persistent",
    "nccl/intra_node.py": "test_intra_node",
    "nccl/libnccl.py": "test_time_limit",
    "nccl/persistent.py": "test_persistent test_life",
}


class Removal(NamedTuple):
    """A piece of a file, and its replacement."""

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


def compiled() -> Iterator[Removal]:
    """Find the pieces of the compiled path."""
    for piece, instead in COMPILED.items():
        for file in (ROOT / "hpccomm" / "native").glob("gpu*.pxi"):
            text = file.read_text()
            if piece in text:
                start = text.index(piece)
                yield Removal(file, 1 + text[:start].count("\n"), start, start + len(piece), piece, instead)


def build(folder: Path) -> None:
    """Compile the extension of the copy in a folder."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, env={**clean_environment(), "CFLAGS": "-O1"}, check=True, capture_output=True)


def without(node: ast.AST, text: str) -> str | None:
    """Return the replacement of a piece that orders something; None if it is none of these."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name), args=arguments)) if {
            name,
            *map(name_of, arguments),
        } & ORDERS:
            return "pass"
        case ast.Return(value=ast.Call(func=ast.Attribute(attr=name))) if name in ORDERS:
            return "return True"
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="append", value=kept))) if name_of(kept) in KEEPS:
            return "pass"
        case ast.Assign(targets=[ast.Subscript(value=kept) as target]) if name_of(kept) in KEEPS:
            return f"{source(target, text)} = ()"
        case ast.Call(func=ast.Attribute(attr="unaliased", value=plan), args=[arrays, _]):
            return f"list(map({source(plan, text)}.send_buffer, {source(arrays, text)}))"
        case ast.Call(func=ast.Name(id=name) as made, args=[*others, _]) if name in WORKS:
            return called(made, others, text)
        case ast.Call(func=ast.Attribute(attr=name) as made, args=[*others, _], keywords=[]) if ENDS.get(
            name
        ) == 1 + len(others):
            return called(made, others, text)
    return None


def called(function: ast.expr, arguments: list[ast.expr], text: str) -> str:
    """Return the text of a call with None as its last argument."""
    return f"{source(function, text)}({', '.join(source(each, text) for each in arguments)}, None)"


def name_of(node: ast.expr) -> str:
    """Return the last name of an expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def place(node: ast.AST, text: str) -> tuple[int, int]:
    """Return the place of a piece."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def source(node: ast.AST, text: str) -> str:
    """Return the text of a piece."""
    start, end = place(node, text)
    return text[start:end]


def noticed(folder: Path, tests: list[str], longest: int, on_bindings: bool = False) -> str | None:
    """Run tests of the copy in a folder; say which fails first, None if none does."""
    done = subprocess.run(
        [
            *(ROOT / "tools" / "run-mpi", mpiexec_folder(), str(RANKS)),
            *(sys.executable, "-m", "mpi4py", "-m", "pytest", "--with-mpi", "--color=no", "-x", "-v", "--tb=line"),
            *("-p", "no:cacheprovider", "-k", "not very_many", *tests),
        ],
        cwd=folder,
        env={
            **clean_environment(),
            "PYTHONPATH": str(folder),
            "TIME_LIMIT": str(longest),
            "GPU_TESTS_ON": "bindings" if on_bindings else "",
        },
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


def tried(removal: Removal, folder: Path) -> str | None:
    """Return the test that notices that a piece is missing in the copy in a folder."""
    text = removal.file.read_text()
    copy = folder / removal.file.relative_to(ROOT)
    copy.write_text(text[: removal.start] + removal.instead + text[removal.end :])
    if copy.suffix == ".pxi":
        build(folder)
    on_bindings = removal.file.name in BINDINGS
    try:
        first = first_tests(removal)
        return (first and noticed(folder, first, LONGEST[0], on_bindings)) or noticed(
            folder, [test for test in all_tests() if test not in first], LONGEST[1], on_bindings
        )
    finally:
        copy.write_text(text)  # the next one is compiled anew


def first_tests(removal: Removal) -> list[str]:
    """Return the tests that come first, as pytest names them."""
    tests = FIRST.get(str(removal.file.relative_to(ROOT / "hpccomm")), "").split()
    return [f"tests/gpu/{file}.py{colons}{test}" for file, colons, test in (each.partition("::") for each in tests)]


def all_tests() -> list[str]:
    """Return the files of all tests."""
    return sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("tests/gpu/test_*.py"))


def main(names: list[str]) -> int:
    """Print the table; `names` are parts of the names of those to try."""
    everything = sorted([*removals(), *compiled()])
    chosen = [each for each in everything if not names or any(name in each.name for name in names)]
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="hpccomm-removed-") as made:
        folder = Path(made)
        for name in ("hpccomm", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        files = ("conftest.py", "pytest_hpccomm.py", "setup.cfg", "pyproject.toml", "setup.py", "README.md")
        for name in (*files, "tools", "jobs"):
            (folder / name).symlink_to(ROOT / name)
        for on_bindings in (False, True):
            used = {
                test for each in chosen if (each.file.name in BINDINGS) is on_bindings for test in first_tests(each)
            }
            fails = used and noticed(folder, sorted(used), LONGEST[1], on_bindings)
            if fails:
                sys.exit(f"with everything in place: {fails}")
        for removal in chosen:
            who = tried(removal, folder)
            unnoticed += who is None
            print(f"{removal.name}\n    {who or 'UNNOTICED'}", flush=True)
    print(f"{len(chosen)} taken away, {len(chosen) - unnoticed} noticed")
    return unnoticed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
