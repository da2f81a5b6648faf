"""nccl/intra_node.cu: its own text as C++, under ThreadSanitizer; and that what it needs is needed."""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .kernels import build

pytestmark = [pytest.mark.once, pytest.mark.skipif(not build.is_available(), reason=build.NEEDS)]

RUNS = [("one_shot", 2), ("one_shot", 4), ("two_shot", 3), ("two_shot", 4), ("cube_mesh", 8)]

# Something that is needed, taken away: what it is, the text without it, and who notices.
MUTANTS = {
    "the first meeting of one_shot": (
        "    if (number) meet(flags, rank, everybody, number);\n", "", "one_shot", 4,
    ),
    "the last meeting of one_shot": (
        "    if (number) meet(flags, rank, everybody, number + 1);\n", "", "one_shot", 4,
    ),
    "the first meeting of two_shot": (
        "    meet(flags, rank, everybody, number);\n    for (u64 i = first;", "    for (u64 i = first;", "two_shot", 4,
    ),
    "the second meeting of two_shot": (
        "    meet(flags, rank, everybody, number + 1);  //", "    //", "two_shot", 4,
    ),
    "the last meeting of two_shot": (
        "    meet(flags, rank, everybody, number + 2);\n", "", "two_shot", 4,
    ),
    "the first meeting of cube_mesh": (
        "    meet(flags, rank, linked, number);\n", "", "cube_mesh", 8,
    ),
    "the second meeting of cube_mesh": (
        "    meet(flags, rank, linked, number + 1);\n", "", "cube_mesh", 8,
    ),
    "the partner among those whom a rank of cube_mesh meets": (
        "0xfu << low | 1u << partner", "0xfu << low", "cube_mesh", 8,
    ),
    "the barrier before a meeting": (
        "    __syncthreads();\n    if (threadIdx.x < MAX_RANKS", "    if (threadIdx.x < MAX_RANKS", "two_shot", 4,
    ),
    "the barrier after a meeting": ("    }\n    __syncthreads();\n}\n", "    }\n}\n", "two_shot", 4),
    "release": (
        "store_release(theirs, number);", "__atomic_store_n(theirs, number, __ATOMIC_RELAXED);", "two_shot", 4,
    ),
    "acquire": (
        "seen = load_acquire(mine);", "sched_yield(), seen = __atomic_load_n(mine, __ATOMIC_RELAXED);", "two_shot", 4,
    ),
    "the word of its own that each block has": ("blockIdx.x * MAX_RANKS + ", "", "two_shot", 4),
    "the same places in each part for the blocks of one number": (
        "out[owner * part + i] = buffers[owner][owner * part + i];",
        "{ u64 j = part - 1 - i; if (owner * part + j < vectors) "
        "out[owner * part + j] = buffers[owner][owner * part + j]; }",
        "two_shot", 4,
    ),
}  # fmt: skip


def sanitized(kernels: str, folder: Path) -> Path:
    return build.compiled(kernels, "races.cpp", folder, "-O1", "-g", "-fsanitize=thread")


@pytest.fixture(scope="module")
def as_written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        program = sanitized(build.text(), tmp_path_factory.mktemp("races"))
    except subprocess.CalledProcessError as error:
        if "tsan" in error.stderr:
            pytest.skip("needs ThreadSanitizer")
        raise AssertionError(error.stderr) from error
    return program


def run(program: Path, kernel: str, ranks: int) -> str:
    """Return what is wrong: races, wrong values, a crash, or no end; nothing if all is well."""
    try:
        done = subprocess.run([program, kernel, str(ranks)], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return "no end"
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run with this kernel's address layout")
    if done.returncode == 0:
        return ""
    races = len(re.findall("WARNING: ThreadSanitizer", done.stderr))
    return f"{races} races, {done.stdout.strip() or 'no values'}, status {done.returncode}"


@pytest.mark.parametrize(("kernel", "ranks"), RUNS)
def test_no_race_and_no_wrong_value(as_written: Path, kernel: str, ranks: int) -> None:
    assert run(as_written, kernel, ranks) == ""


@pytest.fixture(scope="module")
def mutants(as_written: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The program without each of them, compiled on all cores."""
    kernels = build.text()

    def without(missing: str, folder: Path) -> Path:
        needed, instead, *_ = MUTANTS[missing]
        assert needed in kernels
        return sanitized(kernels.replace(needed, instead), folder)

    folders = [tmp_path_factory.mktemp("mutant") for _ in MUTANTS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(MUTANTS, pool.map(without, MUTANTS, folders)))


@pytest.mark.parametrize("missing", MUTANTS)
def test_without_what_it_needs_it_is_noticed(mutants: dict[str, Path], missing: str) -> None:
    _, _, kernel, ranks = MUTANTS[missing]
    assert run(mutants[missing], kernel, ranks) != ""
