"""Run PyTorch's own tests of torch.distributed, which its wheel carries, on the backend "hpccomm".

    python tests/torch/upstream.py BIN RANKS [TEST ...]     # BIN: the folder of mpiexec and python
    python tests/torch/upstream.py BIN RANKS --one-in 4 SEED  # one test in four, chosen by SEED
    python tests/torch/upstream.py BIN RANKS --write        # every test, and the list anew

The tests are those of DistributedTest._DistTestBase. They run one after the other in the processes of one mpiexec;
where one of them hangs or ends a process, it has failed, and another mpiexec goes on behind it. upstream.txt lists the
tests that are not applicable (they are not run), those that fail, and why; all others have to pass.

A test that PyTorch means for other backends only is applicable if its reason is nothing but their name.

VERBOSE=1 shows the tracebacks.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unittest
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PATIENCE = 60  # seconds for one test
PASSED, FAILED, NOT_APPLICABLE = "passed", "failed", "not applicable"
LIST = HERE / "upstream.txt"
NAMES_BACKENDS = re.compile(
    r"Test requires backend .*gloo|Only MPI supports|get_future is only|GLOO Batch|Only (Gloo|gloo) backend supports"
    r"|Only Nccl & Gloo backend support Dist|Only Gloo, Nccl and Mpi|Only Nccl supports (all_gather_v|reduce_scatter_v)"
)


# -- in the processes of mpiexec ---------------------------------------------------------------------


def cases() -> Any:
    """Return PyTorch's tests as a class of test cases, with hpccomm among the backends that they know."""
    from torch.testing._internal import common_distributed

    features = common_distributed.DistTestCases.backend_feature
    for feature in ("ddp", "subgroup", "plugin"):
        features[feature] = features[feature] | {"hpccomm"}
    from torch.testing._internal.distributed import distributed_test

    class Cases(common_distributed.MultiProcessTestCase, distributed_test.DistributedTest._DistTestBase):
        world_size = property(lambda self: os.environ["WORLD_SIZE"])
        init_method = "mpi://"

    from mpi4py import MPI

    folder = os.environ["TEMP_DIR"]  # of all ranks; theirs would be each one's own
    distributed_test.initialize_temp_directories()
    os.environ["TEMP_DIR"] = folder
    for name in ("barrier", "test_dir", "init_dir"):
        Path(folder, name).mkdir(exist_ok=True)
    distributed_test.Barrier.sync = lambda *_, **__: MPI.COMM_WORLD.Barrier()  # theirs is made of files, for one run
    return Cases, common_distributed.TEST_SKIPS


def outcome_of(name: str, test_cases: Any, skips: Any) -> tuple[str, str]:
    """Run one test on this rank; return its outcome, and why."""
    import torch.distributed as dist
    from torch.testing._internal.common_utils import set_rng_seed

    method = getattr(test_cases, name)
    if getattr(method, "__unittest_skip__", False) and not NAMES_BACKENDS.match(method.__unittest_skip_why__):
        return NOT_APPLICABLE, method.__unittest_skip_why__
    case = test_cases(name)
    case.rank = int(os.environ["RANK"])
    case.file_name = os.path.join(os.environ["TEMP_DIR"], "file")
    os.environ["HPCCOMM_ON_TIMEOUT"] = "raise" if "timeout" in name else "abort"
    dist.init_process_group("hpccomm", init_method="mpi://")
    set_rng_seed(0)  # in processes of its own each test begins with one seed
    try:
        getattr(case, name)()
    except unittest.SkipTest as skip:
        return NOT_APPLICABLE, str(skip)
    except SystemExit as ended:
        reasons = {each.exit_code: each.message for each in skips.values()}
        return (NOT_APPLICABLE, reasons[ended.code]) if ended.code in reasons else (FAILED, f"sys.exit({ended.code})")
    except BaseException:
        return FAILED, traceback.format_exc()
    else:
        return PASSED, ""
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def work(names: list[str]) -> None:
    """Run these tests, and report each on rank 0."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    os.environ |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "BACKEND": "hpccomm",
        "INIT_METHOD": "mpi://",
    }
    import hpccomm.torch

    hpccomm.torch.register()
    test_cases, skips = cases()
    for name in names:
        report("begins", name) if world.rank == 0 else None
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = world.gather(outcome_of(name, test_cases, skips))
        if world.rank == 0:
            failures = [f"rank {rank}: {why}" for rank, (outcome, why) in enumerate(found) if outcome == FAILED]
            if failures:
                report(FAILED, name, failures[0])
            else:
                report(*max((outcome, name, why) for outcome, why in found))


def report(outcome: str, name: str, why: str = "") -> None:
    """Tell the driver."""
    lines = [line for line in why.partition("To execute this test")[0].splitlines() if line.strip()]
    print(f"@@ {outcome} | {name} | {lines[-1] if lines else ''}", file=sys.__stdout__, flush=True)
    if os.environ.get("VERBOSE") and outcome == FAILED:
        print(why, file=sys.__stdout__, flush=True)


# -- the driver --------------------------------------------------------------------------------------


def run(bin_: str, ranks: str, names: list[str]) -> dict[str, tuple[str, str]]:
    """Run tests on some ranks; return (outcome, why) of each."""
    found: dict[str, tuple[str, str]] = {}
    while left := [name for name in names if name not in found]:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [ROOT / "tools" / "run-mpi", bin_, ranks, f"{bin_}/python", __file__, "--work", *left],
                cwd=ROOT,
                env={**os.environ, "TEMP_DIR": folder, "TIME_LIMIT": "3000", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            current = follow(process, found)
            errors.seek(0)
            said = errors.read()
        if current is not None:
            print(f"{current} has ended the job with status {process.returncode}:\n{said[-5000:]}", flush=True)
            found[current] = FAILED, "it has not ended, or has ended a process"
        elif process.returncode and not any(name in found for name in left):
            raise SystemExit("the tests can't be run")
    return found


def follow(process: subprocess.Popen[str], found: dict[str, tuple[str, str]]) -> str | None:
    """Take note of the reports; return the test that was running at the end."""
    current, last = None, time.monotonic()

    def watch() -> None:
        while process.poll() is None:
            if time.monotonic() - last > PATIENCE:
                process.terminate()
            time.sleep(1)

    threading.Thread(target=watch, daemon=True).start()
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith("@@ "):
            if os.environ.get("VERBOSE"):
                print(line, end="")
            continue
        outcome, name, why = line[3:].rstrip("\n").split(" | ", 2)
        last = time.monotonic()
        if outcome == "begins":
            current = name
        else:
            found[name], current = (outcome, why), None
            if outcome == FAILED:
                print(f"{name}: {why}", flush=True)
    process.wait()
    return current


def all_names(bin_: str) -> list[str]:
    """Return the names of all tests."""
    program = "import os; os.environ.update(BACKEND='gloo', WORLD_SIZE='2', TEMP_DIR='/tmp')\n"
    program += "from torch.testing._internal.distributed.distributed_test import DistributedTest as T\n"
    program += "print(*[name for name in dir(T._DistTestBase) if name.startswith('test_')])"
    listed = subprocess.run([f"{bin_}/python", "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    return listed.stdout.split()


def listed() -> dict[tuple[str, str], tuple[str, str]]:
    """Return (outcome, reason) of each (number of ranks, test) that need not pass."""
    rows = [line.split(" | ", 3) for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    return {(n, name): (outcome, why) for name, outcome, ranks, why in rows for n in ranks.split()}


def write(ranks: str, found: dict[str, tuple[str, str]]) -> None:
    """List the tests that have not passed on so many ranks; earlier reasons and "not applicable" stay."""
    old = listed()
    rows: dict[tuple[str, str, str], set[str]] = {}
    for (n, name), (outcome, why) in old.items():
        if n != ranks:
            rows.setdefault((name, outcome, why), set()).add(n)
    for name, (outcome, why) in found.items():
        if outcome != PASSED:
            known = [what for (_, test), what in old.items() if test == name and what[0] in (outcome, NOT_APPLICABLE)]
            rows.setdefault((name, *(known[0] if known else (outcome, why))), set()).add(ranks)
    head = [line for line in LIST.read_text().splitlines() if line.startswith("#")]
    lines = [
        f"{name} | {outcome} | {' '.join(sorted(on))} | {why}" for (name, outcome, why), on in sorted(rows.items())
    ]
    LIST.write_text("\n".join([*head, *lines, ""]))


def main() -> int:
    """Run the tests that are named, or all; say 1 if one that is not listed has not passed."""
    if sys.argv[1] == "--work":
        work(sys.argv[2:])
        return 0
    bin_, ranks, *names = sys.argv[1:]
    is_writing = names == ["--write"]
    one_in, seed = "1", ""
    if names[:1] == ["--one-in"]:
        _, one_in, seed = names
        names = []
    known = {name: what for (n, name), what in listed().items() if n == ranks}
    everything = [name for name in all_names(bin_) if zlib.crc32(f"{name} {seed}".encode()) % int(one_in) == 0]
    left_out = {} if is_writing or names else {name: what for name, what in known.items() if what[0] == NOT_APPLICABLE}
    asked = everything if is_writing else names or [name for name in everything if name not in left_out]
    found = {**left_out, **run(bin_, ranks, asked)}
    if is_writing:
        write(ranks, found)
    unexpected = [name for name, (outcome, _) in found.items() if outcome not in (PASSED, known.get(name, [""])[0])]
    for name in sorted(unexpected):
        print(f"not in {LIST.name}: {name}: {' | '.join(found[name])}")
    for name in sorted(name for name in known if found.get(name, [""])[0] == PASSED):
        print(f"passes now: {name}")
    counts = Counter(outcome for outcome, _ in found.values())
    sample = f", one test in {one_in} by seed {seed}" if seed else ""
    print(f"{ranks} ranks{sample}: {', '.join(f'{counts[each]} {each}' for each in (PASSED, FAILED, NOT_APPLICABLE))}")
    return int(bool(unexpected) and not is_writing)


if __name__ == "__main__":
    sys.exit(main())
