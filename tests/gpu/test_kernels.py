"""The kernels as C++; those of cuda/intra_node.cu under ThreadSanitizer, also with planted defects; NVRTC."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpccomm.cuda import copies, cupy_runtime
from hpccomm.nccl import intra_node

from .kernels import build

pytestmark = pytest.mark.once
as_cpp = pytest.mark.skipif(not build.is_available(), reason=build.NEEDS)

RUNS = [("one_shot", 2), ("one_shot", 4), ("two_shot", 3), ("two_shot", 4), ("one_shot", 8)]

# A planted defect: the missing part, the text with it, the text without it, and the kernel and ranks that notice.
MUTANTS = {
    "the first meeting of one_shot": (
        "    if (memory.flags[RANK]) meet(memory, RANK, RANKS);\n    for", "    for", "one_shot", 4,
    ),
    "the last meeting of one_shot": (
        "    if (memory.flags[RANK]) meet(memory, RANK, RANKS);\n}", "}", "one_shot", 4,
    ),
    "the first meeting of two_shot": (
        "    meet(memory, RANK, RANKS);\n    for (u64 i = first; i < part && ",
        "    for (u64 i = first; i < part && ", "two_shot", 4,
    ),
    "the second meeting of two_shot": ("    meet(memory, RANK, RANKS);  //", "    //", "two_shot", 4),
    "the last meeting of two_shot": ("    }\n    meet(memory, RANK, RANKS);\n}", "    }\n}", "two_shot", 4),
    "the barrier before a meeting": (
        "    __syncthreads();\n    if (threadIdx.x < ranks", "    if (threadIdx.x < ranks", "two_shot", 4,
    ),
    "the barrier after a meeting": ("    }\n    __syncthreads();\n}\n", "    }\n}\n", "two_shot", 4),
    "release": (
        "store_release(theirs, number);", "__atomic_store_n(theirs, number, __ATOMIC_RELAXED);", "two_shot", 4,
    ),
    "acquire": (
        "seen = load_acquire(mine);", "sched_yield(), seen = __atomic_load_n(mine, __ATOMIC_RELAXED);", "two_shot", 4,
    ),
    "the count of the meetings, for the next call": ("++mine[1]", "mine[1] + 1", "one_shot", 4),
    "the difference of numbers, which pass by 0": ("(int)(seen - number) < 0", "seen < number", "one_shot", 4),
    "the words of its own that each block has": ("blockIdx.x * MAX_RANKS + ", "", "two_shot", 4),
    "the part of its own that each rank sums": (
        "memory.given[RANK][RANK * part + i] = sum<T, RANKS, RANK>(memory.given, RANK * part + i);",
        "memory.given[RANK][i] = sum<T, RANKS, RANK>(memory.given, i);", "two_shot", 4,
    ),
    "the owner of each part": ("read_now(memory.given[owner] +", "read_now(memory.given[RANK] +", "two_shot", 4),
    "the end of the last part": ("if (place < vectors) out[place]", "out[place]", "two_shot", 4),
    "the same places in each part for the blocks of one number": (
        "u64 place = owner * part + i;", "u64 place = owner * part + (part - 1 - i);", "two_shot", 4,
    ),
    "the vector of each rank, whichever is read first": (
        "vectors[(RANK + k) % RANKS] = read_now(", "vectors[k] = read_now(", "one_shot", 4,
    ),
}  # fmt: skip


TSAN = ["-O1", "-fsanitize=thread"]
ONE_IS_ENOUGH = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1:symbolize=0"}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """races.cpp, without a kernel."""
    try:
        return build.compiled("races.cpp", tmp_path_factory.mktemp("calls"), "-c", *TSAN)
    except subprocess.CalledProcessError as error:
        raise AssertionError(error.stderr) from error


@pytest.fixture(scope="module")
def programs(calls: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    """The program as it is for each of RUNS, and without each of MUTANTS, compiled on all cores."""
    kernels = build.text()
    todo: dict[Any, tuple[str, str, int]] = {run: (kernels, *run) for run in RUNS}
    for missing, (needed, instead, *run) in MUTANTS.items():
        assert needed in kernels, missing
        todo[missing] = (kernels.replace(needed, instead), *run)

    def program(text: str, kernel: str, ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("program")
        return build.compiled(
            "one_kernel.cpp", folder, f"-DKERNEL={kernel}", f"-DSIZE={ranks}", *TSAN, calls, kernels=text
        )

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return dict(zip(todo, pool.map(program, *zip(*todo.values()))))
    except subprocess.CalledProcessError as error:
        if "tsan" in error.stderr:
            pytest.skip("needs ThreadSanitizer")
        raise AssertionError(error.stderr) from error


def run(program: Path) -> str:
    """Return the failure: races, wrong values, a crash, or no end; "" if there is none."""
    try:
        done = subprocess.run([program], capture_output=True, text=True, timeout=20, check=False, env=ONE_IS_ENOUGH)
    except subprocess.TimeoutExpired:
        return "no end"
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run with this kernel's address layout")
    if done.returncode == 0:
        return ""
    race = "a race, " if "WARNING: ThreadSanitizer" in done.stderr else ""
    return f"{race}{done.stdout.strip() or 'no values'}, status {done.returncode}"


@as_cpp
@pytest.mark.parametrize(("kernel", "ranks"), RUNS)
def test_no_race_and_no_wrong_value(programs: dict[Any, Path], kernel: str, ranks: int) -> None:
    assert run(programs[kernel, ranks]) == ""


@as_cpp
@pytest.mark.parametrize("missing", MUTANTS)
def test_without_what_it_needs_it_is_noticed(programs: dict[Any, Path], missing: str) -> None:
    assert run(programs[missing]) != ""


# -- copies of many arrays -----------------------------------------------------------------------------


def on_host(values: np.ndarray) -> Any:
    """Return an object with the attributes of CuPy's arrays that `copies.prepared` uses."""
    names = ("shape", "strides", "size", "itemsize")
    data = SimpleNamespace(ptr=values.ctypes.data, device_id=0)
    return SimpleNamespace(**{name: getattr(values, name) for name in names}, data=data, values=values)


def laid_out(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Return an array of random layout: gaps of any bytes, axes that go backwards or are in another order."""
    rng = np.random.default_rng(seed)
    grain = int(rng.choice([1, 2, 4, 8, 16]))  # addresses and strides are multiples of it
    strides, pitch = [0] * len(shape), np.dtype(dtype).itemsize
    for axis in rng.permutation(len(shape)):
        pitch = pitch if rng.integers(2) else -(-(pitch + int(rng.integers(0, 3)) * grain) // grain) * grain
        strides[axis], pitch = pitch, pitch * max(shape[axis], 1)
    start = 16 + int(rng.integers(0, 4)) * grain
    memory = rng.integers(0, 256, start + pitch + 16, np.uint8)
    memory = memory[-memory.ctypes.data % 16 :]
    whole = np.ndarray(shape, f"V{np.dtype(dtype).itemsize}", memory, start, strides)
    return whole[(*(slice(None, None, int(rng.choice([-1, 1]))) for _ in shape), ...)]


SHAPES = [(2,) * 9, (), (5,), (3, 4), (2, 3, 4), (2, 1, 3, 2), (0, 3), (7, 2), (2, 3, 1, 2, 3, 2), (2,) * 8]


def run_on_the_host(launches: list[copies.Copies]) -> None:
    for kernel, _, (blocks, count), table in launches:
        assert table.nbytes <= 4096, "a kernel's arguments"
        build.copying().copies(*kernel, ctypes.c_void_p(table.ctypes.data), blocks, count, 8)


def check_copies(shapes: list[tuple[int, ...]], dtype: str, seed: int) -> list[copies.Copies]:
    pairs = [[on_host(laid_out(shape, dtype, seed + 2 * i + way)) for way in (0, 1)] for i, shape in enumerate(shapes)]
    expected = [source.values.copy() for _, source in pairs]
    launches = copies.prepared([(target, source) for target, source in pairs])
    run_on_the_host(launches)
    for (target, _), values in zip(pairs, expected):
        assert target.values.tobytes() == values.tobytes()
    return launches


@as_cpp
@pytest.mark.parametrize("dtype", ["i1", "f2", "S6", "f4", "c8", "S12", "c16"])
def test_arrays_of_any_layout_and_alignment_are_copied(dtype: str) -> None:
    launches = check_copies(8 * SHAPES, dtype, seed=1000)
    assert {each.kernel for each in launches} <= set(copies.KERNELS)
    assert len({each.kernel.unit for each in launches}) > (np.dtype(dtype).itemsize > 1)
    assert {each.kernel.axes for each in launches} == {copies.FEW, copies.MANY}


@as_cpp
def test_copies_too_large_for_the_kernel_are_made_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MOST_UNITS", 5)
    check_copies(4 * SHAPES, "f8", seed=0)


@as_cpp
def test_a_misaligned_access_is_noticed() -> None:
    """Without this, the tests above could not fail."""
    program = (
        "import ctypes, numpy as np\n"
        "from hpccomm.cuda import copies\n"
        "from tests.gpu.kernels import build\n"
        "at = np.zeros(8).ctypes.data\n"
        "kernel = copies.Kernel(8, copies.FEW, 1)\n"
        "table = copies.table_of(kernel, [(at, at + 33, [(2, 8, 8)])])\n"
        "build.copying().copies(*kernel, ctypes.c_void_p(table.ctypes.data), 1, 1, 2)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode != 0
    assert "misaligned address" in ended.stderr


@as_cpp
def test_one_copy_of_few_axes_has_a_table_of_its_size() -> None:
    for seed in range(20):
        (launch,) = check_copies([(3, 4)], "f4", seed)
        assert (launch.kernel.copies, launch.table.nbytes) == (1, copies.COPY[copies.FEW].size)


def test_an_array_of_many_axes_is_one_copy() -> None:
    target, source = (np.zeros((2,) * 20, "f4").transpose(order) for order in (range(20), range(19, -1, -1)))
    assert [each.blocks[1] for each in copies.prepared([(on_host(target), on_host(source))])] == [1]


def test_many_small_arrays_take_few_launches_and_the_largest_units() -> None:
    pairs = [(on_host(np.zeros((4, 6), "f4")[:, :4]), on_host(np.zeros((4, 4), "f4"))) for _ in range(40)]
    launches = copies.prepared(pairs)
    assert [each.blocks[1] for each in launches if each.kernel.unit == 8] == [32, 8]  # rows of 16 bytes, 24 bytes apart


# -- NVRTC -------------------------------------------------------------------------------------------


def ptx(source: Path, names: list[str], architecture: int) -> dict[str, str]:
    """Return the PTX of kernels."""
    from cupy.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except Exception as error:
        pytest.skip(f"needs NVRTC: {error}")
    program = nvrtc.createProgram(source.read_text(), source.name, (), ())
    for name in names:
        nvrtc.addNameExpression(program, name)
    nvrtc.compileProgram(program, (f"--gpu-architecture=compute_{architecture}", "--std=c++17"))
    _, *texts = nvrtc.getPTX(program).decode().split(".entry ")
    found = {text[: text.index("(")]: text for text in texts}
    return {name: found[nvrtc.getLoweredName(program, name)] for name in names}


INTRA_NODE, COPIES = (Path(copies.__file__).with_name(f"{name}.cu") for name in ("intra_node", "copies"))


@pytest.mark.parametrize("architecture", [75, 90, 120])
def test_the_kernels_compile(architecture: int) -> None:
    assert len(ptx(INTRA_NODE, cupy_runtime.instances(8, 4), architecture)) == 6
    made = ptx(COPIES, [f"copy<{each.unit}, {each.axes}, {each.copies}>" for each in copies.KERNELS], architecture)
    assert len(made) == 15
    assert not any(".local" in text for text in made.values())  # no copy of the table in each thread


@pytest.mark.parametrize(("ranks", "rank"), [(2, 1), (5, 0), (8, 3)])
def test_what_is_read_from_all_ranks_is_under_way_at_once(ranks: int, rank: int) -> None:
    """The reads of a loop come before its first addition and its first write; and nothing is kept in local memory."""
    for name, text in ptx(INTRA_NODE, cupy_runtime.instances(ranks, rank), 90).items():
        kernel = name.partition("<")[0]
        steps = re.findall(r"ld\.global\.v4|add(?:\.rn)?\.f32|st\.global\.v4|bar\.sync", text)
        in_a_row = [(step.split(".")[0], len(list(same))) for step, same in itertools.groupby(steps)]
        reads = [count for step, count in in_a_row if step == "ld"]
        assert reads == {"one_shot": [ranks], "two_shot": [ranks, ranks]}[kernel], name
        assert f".maxntid {intra_node.THREADS}" in text
        assert ".local" not in text
