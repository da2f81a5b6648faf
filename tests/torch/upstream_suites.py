"""Run PyTorch's own tests of DTensor, FSDP, pipelines and checkpoints on the backends "hpccomm" and "gloo".

    python tests/torch/upstream_suites.py BIN RANKS FOLDER [FILE ...]     # BIN: the folder of mpiexec and python

FOLDER is test/distributed of PyTorch's repository, at the version that is installed: these files are not in its wheel.
FILE is a path in it; without one, all those that upstream_suites.txt names for so many ranks. Each FILE runs on each
backend in an mpiexec of its own; where a test hangs or ends a process, it has failed, and another mpiexec goes on
behind it. A test is to have the outcome that it has on gloo: passed, skipped or failed.

Each rank does the work of a process that PyTorch's test cases start themselves (`MultiProcessTestCase._run`,
`MultiProcContinuousTest._worker_loop`). Test cases of threads or of one process are left out, and those for another
number of ranks.

    --backend gloo|hpccomm|both    which of them (both)
    --no-gpus-needed               tell FSDP's tests that there are enough GPUs: without, they skip themselves
    --write                        the list anew, for these files; reasons that are there stay

VERBOSE=1 shows the tracebacks, PATIENCE=60 is the number of seconds for one test.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import os
import queue
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import upstream
from upstream import FAILED, PASSED, ROOT, report

SKIPPED, LEFT_OUT = "skipped", "left out"
BACKENDS = ("gloo", "hpccomm")
LIST = Path(__file__).with_suffix(".txt")
NEIGHBOURS = 15  # seconds for the other ranks to end a test that has failed on this one
upstream.PATIENCE = int(os.environ.get("PATIENCE", upstream.PATIENCE))
Found = dict[str, tuple[str, str]]  # the outcome of each test, and why


# -- in the processes of mpiexec ---------------------------------------------------------------------


def serve_gloos_groups() -> None:
    """Make hpccomm the backend of every group that a test makes with gloo, or without a name."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    import hpccomm.torch

    hpccomm.torch.register()

    def instead(backend: Any) -> Any:
        return "hpccomm" if backend in (None, "gloo", "cpu:gloo", "cpu:gloo,cuda:nccl") else backend

    begin, new_group = c10d.init_process_group, c10d.new_group

    @functools.wraps(begin)
    def init_process_group(backend: Any = None, *arguments: Any, **options: Any) -> None:
        begin(instead(backend), *arguments, **options)

    @functools.wraps(new_group)
    def new(ranks: Any = None, timeout: Any = None, backend: Any = None, *arguments: Any, **options: Any) -> Any:
        return new_group(ranks, timeout, backend and instead(backend), *arguments, **options)

    for module in (dist, c10d):
        module.init_process_group, module.new_group = init_process_group, new  # type: ignore[attr-defined]


def tests_of(path: Path) -> dict[str, Any]:
    """Return the test cases of a file, by the names of their tests."""
    import torch
    from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase

    if os.environ.get("GPUS"):
        torch.accelerator.device_count = lambda: int(os.environ["GPUS"])
    sys.path[:0] = [str(path.parent), str(path.parent.parent)]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == path.stem]
    return {
        f"{each.__name__}.{name}": each
        for each in classes
        if issubclass(each, MultiProcContinuousTest | MultiProcessTestCase)
        for name in dir(each)
        if name.startswith("test") and callable(getattr(each, name))
    }


def outcome_of(case: Any, name: str, rank: int, size: int, file: str) -> tuple[str, str]:
    """Run one test on this rank; return its outcome, and why."""
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS

    if reason := refusal(case, name, size):
        return reason
    said: list[str] = []
    try:
        said += as_worker(case, name, rank, size, file)
    except SystemExit as ended:
        skips = {each.exit_code: each.message for each in TEST_SKIPS.values()}
        if ended.code in skips:
            return SKIPPED, skips[ended.code]
        said.append(ended.args[1] if len(ended.args) > 1 else f"sys.exit({ended.code})")
    except BaseException:
        said.append(traceback.format_exc())
    finally:
        if not said and dist.is_initialized():
            dist.destroy_process_group()
    if said and said[0].startswith(SKIPPED):
        return SKIPPED, said[0].removeprefix(SKIPPED)
    return (FAILED, said[0]) if said else (PASSED, "")


def refusal(case: Any, name: str, size: int) -> tuple[str, str] | None:
    """Return the outcome, and its reason, of a test that its process would not begin."""
    from torch.testing._internal.common_distributed import MultiProcContinuousTest

    for marked in (case, getattr(case, name)):
        if getattr(marked, "__unittest_skip__", False):
            return SKIPPED, marked.__unittest_skip_why__
    wanted = case.world_size.fget(object.__new__(case)) if isinstance(case.world_size, property) else case.world_size
    if issubclass(case, MultiProcContinuousTest) and wanted == -2:
        return None  # as many as there are devices
    return None if int(wanted) == size else (LEFT_OUT, f"it is for {wanted} ranks")


def as_worker(case: Any, name: str, rank: int, size: int, file: str) -> list[str]:
    """Do the work of PyTorch's own process of this rank; return its message to the process that started it."""
    import torch.multiprocessing
    from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase

    if issubclass(case, MultiProcContinuousTest):
        tasks: queue.Queue[str | None] = queue.Queue()
        completed: queue.Queue[Any] = queue.Queue()
        for task in (name, None):
            tasks.put(task)
        case._worker_loop(rank, size, file, tasks, completed)
        result = completed.get_nowait()
        reason = SKIPPED if type(result).__name__ == "SkipTest" else ""
        return [] if result == name else [f"{reason}{result}"]
    ours, theirs = torch.multiprocessing.Pipe()
    try:
        case._run(rank, name, file, theirs, **({"fake_pg": True} if getattr(case, "fake_pg", False) else {}))
    except SystemExit as ended:
        if ended.code != MultiProcessTestCase.TEST_ERROR_EXIT_CODE or not ours.poll():
            raise
        return [ours.recv()]
    return []


def work(backend: str, path: str, names: list[str]) -> None:
    """Run these tests of a file, or all, on a backend; report each."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    os.environ |= {
        "RANK": str(world.rank),
        "LOCAL_RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
    }
    if backend == "hpccomm":
        serve_gloos_groups()
    try:
        tests = tests_of(Path(path))
    except BaseException as error:
        report(FAILED, "the import", f"{type(error).__name__}: {error}") if world.rank == 0 else None
        return
    if world.rank == 0:
        print("@@ tests | " + " ".join(tests), flush=True)
    for number, name in enumerate(names or tests):
        report("begins", name) if world.rank == 0 else None
        file = os.path.join(os.environ["TEMP_DIR"], f"{number}")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            outcome, why = outcome_of(tests[name], name.partition(".")[2], world.rank, world.size, file)
        settle(world, name, outcome, why)


def settle(world: Any, name: str, outcome: str, why: str) -> None:
    """Report the ranks' outcomes; if the others hang behind a failure, end the job."""
    import torch.distributed

    met, end = world.Ibarrier(), time.monotonic() + NEIGHBOURS
    while not met.Test():
        if outcome == FAILED and time.monotonic() > end:
            report(FAILED, name, f"rank {world.rank}: {why}")
            time.sleep(1)  # for the report
            world.Abort(1)
        time.sleep(0.001)
    found = world.gather((outcome, why))
    if world.rank == 0:
        failures = [f"rank {rank}: {reason}" for rank, (each, reason) in enumerate(found) if each == FAILED]
        report(FAILED, name, failures[0]) if failures else report(found[0][0], name, found[0][1])
    failed = world.bcast(found and sum(each == FAILED for each, _ in found))
    if 0 < failed < world.size:
        time.sleep(1)
        world.Abort(1)  # leftovers of a failed test would disturb the next
    if failed and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# -- the driver --------------------------------------------------------------------------------------


def run(bin_: str, ranks: str, path: Path, backend: str) -> Found:
    """Run the tests of a file on a backend; return the outcome of each."""
    found: Found = {}
    names: list[str] = []
    while not names or any(name not in found for name in names):
        before = len(found)
        left = [name for name in names if name not in found]
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [ROOT / "tools" / "run-mpi", bin_, ranks, f"{bin_}/python", __file__, "--work", backend, path, *left],
                cwd=folder,
                env={**os.environ, "TEMP_DIR": folder, "TIME_LIMIT": "3000", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            assert process.stdout is not None
            first = process.stdout.readline()
            if not first.startswith("@@ tests | "):
                why = first.strip() or "no output"
                process.communicate()
                return {"the import": (FAILED, why.rpartition(" | ")[2])}
            names = names or first.split()[3:]
            current = upstream.follow(process, found)
            errors.seek(0)
            said = errors.read()
        if current is not None:
            if os.environ.get("VERBOSE"):
                print(f"{current} has ended the job with status {process.returncode}:\n{said[-5000:]}", flush=True)
            found[current] = FAILED, "it has not ended, or has ended a process"
        elif len(found) == before:
            break
    return found


def listed() -> tuple[dict[tuple[str, str], str], dict[tuple[str, str, str], str]]:
    """Return the row of each (file, number of ranks), and of each (file, number of ranks, test) that differs."""
    rows = (
        [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")] if LIST.exists() else []
    )
    fields = {row: [field.strip() for field in row.split(" | ")] for row in rows}
    files = {(f[0], f[1]): row for row, f in fields.items() if len(f) == 4}
    tests = {(f[0], f[1], f[2]): row for row, f in fields.items() if len(f) == 5}
    return files, tests


def counts(found: Found) -> str:
    """Return how many tests have passed, were skipped and have failed."""
    number = Counter(outcome for outcome, _ in found.values())
    return f"{number[PASSED]} / {number[SKIPPED]} / {number[FAILED]}"


def write(ranks: str, results: dict[str, dict[str, Found]]) -> None:
    """Write the list with these files' outcomes; reasons that are there stay."""
    files, tests = listed()
    tests = {key: row for key, row in tests.items() if key[0] not in results or key[1] != ranks}
    reasons = {key: row.rpartition(" | ")[2] for key, row in listed()[1].items()}
    for file, by_backend in results.items():
        gloo, ours = (by_backend[backend] for backend in BACKENDS)
        files[file, ranks] = f"{file} | {ranks} | {counts(gloo)} | {counts(ours)}"
        for name in differing(by_backend):
            reason = reasons.get((file, ranks, name), ours[name][1] if ours[name][0] == FAILED else gloo[name][1])
            outcomes = f"{gloo[name][0]}, {ours[name][0]}"
            tests[file, ranks, name] = f"{file} | {ranks} | {name} | {outcomes} | {reason}"
    head = [line for line in LIST.read_text().splitlines() if line.startswith("#")] if LIST.exists() else []
    rows = [files[key] for key in sorted(files)] + [tests[key] for key in sorted(tests)]
    LIST.write_text("\n".join([*head, *rows, ""]))


def differing(by_backend: dict[str, Found]) -> list[str]:
    """Return the tests whose outcome is not the same on both backends."""
    gloo, ours = (by_backend.get(backend, {}) for backend in BACKENDS)
    return sorted(name for name in gloo if name in ours and gloo[name][0] != ours[name][0])


def main() -> int:
    """Run the files that are named, or all of the list; say 1 if a test differs and is not listed."""
    if sys.argv[1] == "--work":
        work(sys.argv[2], sys.argv[3], sys.argv[4:])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bin")
    parser.add_argument("ranks")
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--backend", choices=[*BACKENDS, "both"], default="both")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--no-gpus-needed", action="store_true")
    asked = parser.parse_args()
    if asked.no_gpus_needed:
        os.environ["GPUS"] = asked.ranks
    bin_, folder = str(Path(asked.bin).absolute()), asked.folder.absolute()
    files, known = listed()
    results: dict[str, dict[str, Found]] = {}
    for file in asked.files or [file for file, ranks in files if ranks == asked.ranks]:
        results[file] = {}
        for backend in BACKENDS if asked.backend == "both" else [asked.backend]:
            results[file][backend] = run(bin_, asked.ranks, folder / file, backend)
            print(f"{file}, {asked.ranks} ranks, {backend}: {counts(results[file][backend])}", flush=True)
    unexpected = 0
    for file, by_backend in results.items():
        for name in differing(by_backend):
            gloo, ours = (" | ".join(by_backend[backend][name]) for backend in BACKENDS)
            is_known = (file, asked.ranks, name) in known
            unexpected += not is_known
            print(f"{'known' if is_known else 'differs'}: {file}: {name}\n  gloo: {gloo}\n  hpccomm: {ours}")
    if asked.write and asked.backend == "both":
        write(asked.ranks, results)
    return int(bool(unexpected) and not asked.write)


if __name__ == "__main__":
    sys.exit(main())
