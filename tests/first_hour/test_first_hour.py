"""Five people's first hour: what the pages show is what is printed, and what each of them writes runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ..launch import ROOT, clean_environment, launch

pytestmark = pytest.mark.serial

HERE = Path(__file__).resolve().parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAM = re.compile(r"^```python\n# (\w+\.py).*\n(?:.*\n)*?```$", re.M)
RUN = re.compile(r"^\$ (?:mpiexec -n (\d) )?python (\w+\.py)\n((?:(?!\$ |```).*\n)+)", re.M)
NOT_RUN = {
    "both.py": "it needs a GPU",
    "fail.py": "a traceback with paths",
    "halo.py": "times",
    "missing.py": "a time-out, whose seconds differ",
    "samples.py": "it hangs on purpose",
}


def shown() -> list[tuple[str, str, int, dict[str, str], str]]:
    """Every program of the pages whose output is shown: page, name, number of ranks, the page's programs, output."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        programs = {each[1]: each[0].partition("\n")[2].rpartition("\n")[0] for each in PROGRAM.finditer(text)}
        for ranks, name, output in RUN.findall(text):
            if name in programs and name not in NOT_RUN:
                found.append((page.name, name, int(ranks or 1), programs, output))
    return found


# -- a newcomer ------------------------------------------------------------------------------------------


def test_the_pages_have_programs() -> None:
    names = {name for _, name, *_ in shown()}
    assert {"mean.py", "quickstart.py", "ring.py", "offsets.py", "overlap.py", "heat_serial.py", "heat.py"} <= names
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(f"python {name}" in text for name in NOT_RUN)


@pytest.mark.parametrize(("page", "name", "ranks", "programs", "output"), shown())
def test_a_program_of_the_pages_prints_what_they_say(
    page: str, name: str, ranks: int, programs: dict[str, str], output: str, tmp_path: Path
) -> None:
    for each, program in programs.items():  # one may import another
        (tmp_path / each).write_text(program)
    ended = launch(ranks, sys.executable, tmp_path / name)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == sorted(output.splitlines())  # ranks may overtake each other


# -- users of torch.distributed and of mpi4py ------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_programs_for_torch_distributed(ranks: int) -> None:
    ended = launch(ranks, sys.executable, HERE / "torch_user.py")
    assert ended.returncode == 0, ended.stderr
    total = sum(range(1, ranks + 1))
    askers = sorted([*range(1, ranks)] * 2)
    assert ended.stdout.splitlines() == [
        "loss below 1e-4: True, w 3.00, b 1.00",
        *[f"sum by a ring: {total}, {10 * total}"] * 2,
        f"asked by {askers}, parameter {sum(askers)}",
        f"reports of {[*range(ranks)]}",
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_programs_beside_mpi4py(ranks: int, tmp_path: Path) -> None:
    ended = launch(ranks, sys.executable, HERE / "mpi_user.py", tmp_path / "parts.bin")
    assert ended.returncode == 0, ended.stderr
    sizes = np.arange(ranks) + 1
    assert sorted(ended.stdout.splitlines()) == [
        f"file: {np.repeat(np.arange(float(ranks)), sizes).tolist()}",
        "heat: right to 1e-6: True",
        f"parts: {sizes.sum()} values, the last rank's begin at {sizes[:-1].sum()}",
        f"window: {sum(range(ranks))}",
    ]


# -- a benchmarker ---------------------------------------------------------------------------------------


def test_a_first_benchmark(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    hpccomm = [sys.executable, "-m", "hpccomm"]
    ended = launch(2, *hpccomm, "bench", "all_reduce", "-b", "8", "-e", "96", "-n", "3", "-c", "--json", result)
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[0] for line in ended.stdout.splitlines() if re.match(r" +\d", line)] == ["8", "32", "96"]
    assert "# Avg bus bandwidth: " in ended.stdout
    assert re.search(r"CPUs? for rank 0.*OMP_NUM_THREADS", ended.stdout)
    assert json.loads(result.read_text())["machine"]["ranks"] == 2

    alone = launch(1, *hpccomm, "bench", "all_reduce", "-e", "8", "-n", "2")
    assert "one rank sends nothing" in alone.stdout
    assert "mpiexec -n 2 hpccomm bench" in alone.stdout

    told = launch(2, *hpccomm, "info")
    assert told.returncode == 0, told.stderr
    assert re.search(r"^ranks 0-1 .*CPU", told.stdout, re.M) or "\nrank 1 " in told.stdout


# -- the author of a library -----------------------------------------------------------------------------


def test_an_installed_backend_and_its_own_tests(tmp_path: Path) -> None:
    site = tmp_path / "site"
    shutil.copytree(HERE / "library_author", site)
    (site / "own_tests.py").rename(site / "test_counting.py")
    about = site / "counting-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[hpccomm.backends]\ncounting = counting:create\n")
    tests = ["-m", "mpi4py", "-m", "pytest", "--with-mpi", "-p", "no:cacheprovider", site / "test_counting.py"]
    ended = launch(2, sys.executable, *tests, env={"PYTHONPATH": str(site)})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 passed" in ended.stdout

    forgotten = launch(2, sys.executable, "-m", "pytest", site / "test_counting.py", env={"PYTHONPATH": str(site)})
    assert forgotten.returncode == 4
    assert "--with-mpi" in forgotten.stdout + forgotten.stderr

    alone = subprocess.run(
        [sys.executable, *tests],
        env={**clean_environment(), "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert alone.returncode == 0, alone.stdout + alone.stderr
