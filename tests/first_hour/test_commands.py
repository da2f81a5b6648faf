"""Each command of the README, the tutorials and the how-to guides runs, or ELSEWHERE has a test or a reason."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..launch import IMITATED_GPU, ROOT, clean_environment, mpiexec_folder, time_limit
from .test_first_hour import PROGRAM, shown

pytestmark = pytest.mark.serial

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs/tutorials").glob("*.md")),
    *sorted((ROOT / "docs/how-to").glob("*.md")),
]
BLOCK = re.compile(r"^( *)```console\n((?:.*\n)*?)\1```$", re.M)
COMMAND = re.compile(r"^ *\$ ((?:.*\\\n)*.*?)(?: +# .*)?$", re.M)
ELSEWHERE = {
    r"(pip|conda|python3 -m venv) .*": "it installs from the network; tools/check-release tries installations",
    r"make (demo|test)": "it is longer than a test, and .ci/run has its parts",
    r"jupyter lab": "it needs a browser and packages of its own",
    r"(?s:(module|srun .*apptainer|docker) .*)": "it needs a cluster or a container engine",
    r".*LD_PRELOAD=.*": "it needs a library of PMPI",
    r".*py-spy .*": "py-spy is not among the tests' packages",
    r"srun hpccomm bench pairs .*": "tests/bench/studies/test_pairs.py",
    r".*--device cuda .*": "tests/gpu/test_bench.py",
    r".*--tune .*": "tests/bench/test_command.py",
    r".*-bind-to core .*": "tests/cli/test_binding.py",
    r".*-disable-auto-cleanup .*": "tests/faults/test_dead_ranks.py",
    r".*(--pdb|--debugpy) .*": "tests/run/test_debugger.py",
    r"hpccomm debug (--pid .*|FOLDER)": "tests/debug/test_watchdog.py",
    r"hpccomm top --pid .*": "tests/debug/test_top.py",
    r"hpccomm debug --job .*": "tests/cluster/test_ends.py",
    r"srun --mpi=pmix -n 64 python .*": "tests/cluster/test_launch.py",
    r"mpiexec (-hosts|--host) .*": "it needs hosts with ssh between them",
    r"hpccomm slurm .*": "tests/cli/test_slurm.py",
    r"sbatch .*": "tests/cluster/test_scripts.py",
    r"pytorch\.md: mpiexec .*": "tests/torch/test_start.py",
    r"hpccomm trace hpccomm-debug-[\d-]+|echo \$\?|.* --straggler .*": "tests/debug/test_trace.py",
    r"hpccomm trace hpccomm-debug-\* --summary .*": "tests/debug/test_trace.py",
    r".*samples\.py|hpccomm trace hpccomm-debug-\*": "tests/first_hour/test_commands.py",  # the last test
}
STATUS = {"python fail.py": 1, "pytest --with-mpi": 1, "2 python -m pytest": 4}
FILES = {  # which pages do not have
    "train.py": "import hpccomm as hc\nwith hc.init_process_group():\n    hc.all_reduced(1.0)\n",
    "program.py": "from mpi4py import MPI\nMPI.COMM_WORLD.barrier()\n",
}


def commands() -> list[tuple[Path, list[str]]]:
    """The commands of each block of a page."""
    found = []
    for page in PAGES:
        blocks = BLOCK.finditer(page.read_text(encoding="utf-8"))
        found += [(page, COMMAND.findall(block[2])) for block in blocks]
    return [(page, block) for page, block in found if block]


def fits(pattern: str, page: Path, command: str) -> bool:
    return any(re.fullmatch(pattern, each) for each in (command, f"{page.name}: {command}"))


def to_run() -> list[tuple[Path, list[str]]]:
    """The blocks without the commands that run elsewhere."""
    compared = {(page, name) for page, name, *_ in shown()}
    left = []
    for page, block in commands():
        rest = [each for each in block if not any(fits(pattern, page, each) for pattern in ELSEWHERE)]
        left.append((page, [each for each in rest if (page.name, each.split()[-1]) not in compared]))
    return [(page, rest) for page, rest in left if rest]


def prepared(folder: Path, page: Path) -> dict[str, str]:
    """Write the programs of a page and an mpiexec for this machine; return the environment of commands."""
    programs = {each[1]: each[0].partition("\n")[2] for each in PROGRAM.finditer(page.read_text(encoding="utf-8"))}
    for name, text in {**FILES, **programs}.items():
        (folder / name).write_text(text.removesuffix("```"))
    (folder / "jobs").symlink_to(ROOT / "jobs")
    (folder / "bin").mkdir()
    mpiexec = folder / "bin" / "mpiexec"
    mpiexec.write_text(f'#!/bin/sh\nranks=$2\nshift 2\nexec {ROOT}/tools/run-mpi {mpiexec_folder()} "$ranks" "$@"\n')
    mpiexec.chmod(0o755)
    paths = [mpiexec.parent, Path(sys.executable).parent, os.environ["PATH"]]
    path = os.environ.get("PYTHONPATH", str(ROOT))
    environment = {**clean_environment(), "PYTHONPATH": path, "PATH": os.pathsep.join(map(str, paths)), "USER": "me"}
    return environment | (IMITATED_GPU if page.name == "gpu.md" else {})


def on_this_machine(command: str) -> str:
    """Return a command for fewer ranks, either launcher, and the folder of this run."""
    command = command.replace("-n 64", "-n 2").replace("$PMI_RANK", "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}")
    return re.sub(r"hpccomm-debug-\d[\d-]+", "hpccomm-debug-*", command)


def run(command: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    limit = time_limit(120)
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**environment, "TIME_LIMIT": str(limit)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit + 30,
        check=False,
    )


def test_each_command_that_does_not_run_has_a_reason_or_a_test() -> None:
    every = [(page, each) for page, block in commands() for each in block]
    assert len(every) > 60
    for pattern, reason in ELSEWHERE.items():
        assert any(fits(pattern, *each) for each in every), f"no page has {pattern!r}"
        assert not reason.startswith("tests/") or (ROOT / reason).exists(), reason


@pytest.mark.parametrize(("page", "block"), to_run(), ids=lambda value: getattr(value, "name", None) or value[-1])
def test_the_commands_of_a_page_run(page: Path, block: list[str], tmp_path: Path) -> None:
    environment = prepared(tmp_path, page)
    for command in block:
        if command.startswith("export "):
            environment |= [command.removeprefix("export ").split("=")]
            continue
        ended = run(on_this_machine(command), tmp_path, environment)
        expected = next((status for text, status in STATUS.items() if text in command), 0)
        assert ended.returncode == expected, f"{command}\n{ended.stdout}\n{ended.stderr}"


def test_the_tutorial_on_hangs(tmp_path: Path) -> None:
    page = ROOT / "docs" / "tutorials" / "find-a-hang.md"
    environment = prepared(tmp_path, page)
    program = tmp_path / "samples.py"
    program.write_text(program.read_text().replace("timeout=10", f"timeout={time_limit(3):.0f}"))
    (without_trace,), _, (with_trace, trace), (fixed,) = (block for where, block in commands() if where == page)

    for command in (without_trace, with_trace):
        for older in tmp_path.glob("hpccomm-debug-*"):
            shutil.rmtree(older)
        hung = run(command, tmp_path, environment)
        assert hung.returncode == 124, hung.stderr
        assert "mean above 5: 8.0\n" in hung.stdout
        assert "rank 3 never reached all_reduce #4 of 'world' (16 B float64)" in hung.stderr
    named = run(trace, tmp_path, environment)
    assert named.returncode == 1
    assert named.stdout.startswith("15 operations of 4 of 4 ranks\nrank 3 never reached all_reduce #4 of 'world' ")

    lines = program.read_text().splitlines(keepends=True)
    program.write_text(re.sub(r"timeout=\d+", "timeout=300", "".join(lines[:7] + lines[9:])))
    ended = run(fixed, tmp_path, environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "mean above 7: 9.0"
