"""hpccomm slurm: the script, what it says of a machine that is imitated, and what it says where there is no Slurm."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpccomm.cli import main as cli
from hpccomm.cli import slurm
from hpccomm.cli.slurm_machine import (
    Job,
    Machine,
    Nodes,
    malformed,
    megabytes,
    minutes,
    misfits,
    read_nodes,
    read_types,
)

pytestmark = pytest.mark.serial

BASH, SHELLCHECK = shutil.which("bash") or "/bin/bash", shutil.which("shellcheck")
MPICH, OPEN_MPI = "MPICH Version:      5.0.2\n", "Open MPI v5.0.11, package: ...\n"
SINFO = """\
short*|up|1:00:00|4|16|64000|(null)
long|up|2-00:00:00|4|16|64000|(null)
gpu|up|1-00:00:00|2|32|128000|gpu:a100:4(S:0-1)
gpu|up|1-00:00:00|1|64|256000|gpu:a100:4,gpu:h100:4
old|down|infinite|8|8+|16000+|(null)
"""
LIST = "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v3,pmix_v4\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, with a program, on a machine without Slurm whose MPI is MPICH."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "program.py").write_text("print()\n")
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    monkeypatch.delenv("LOADEDMODULES", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "_mpi", lambda: MPICH)
    return tmp_path


@pytest.fixture
def imitate(folder: Path) -> Callable[..., None]:
    """Make commands of Slurm, each of a line of sh."""

    def make(**commands: str) -> None:
        for name, text in commands.items():
            (folder / "tools" / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / "tools" / name).chmod(0o755)

    return make


@pytest.fixture
def cluster(imitate: Callable[..., None], folder: Path) -> None:
    (folder / "sinfo.txt").write_text(SINFO)
    (folder / "list.txt").write_text(LIST)
    imitate(
        sinfo=f'while read line; do echo "$line"; done < {folder}/sinfo.txt',
        srun=f'while read line; do echo "$line" >&2; done < {folder}/list.txt',  # where the real one writes it
        sbatch=f'echo "$@" > {folder}/said; while read line; do echo "$line"; done > {folder}/submitted; echo 77',
    )


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main(["slurm", *words])
    out, err = capsys.readouterr()
    return status, out, err


def check(script: str) -> None:
    """Have bash and, if there is one, shellcheck look at a script."""
    done = subprocess.run([BASH, "-n"], input=script, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if SHELLCHECK:
        done = subprocess.run([SHELLCHECK, "-"], input=script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout
    assert script.startswith("#!/bin/bash\n")
    assert "\nset -euo pipefail\n" in script


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


PROGRAM = ("--", "python", "program.py", "--steps", "3")


# -- the script --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cluster")
def test_a_script_for_two_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    status, script, said = run(
        capsys, "--nodes", "2", "--ntasks-per-node", "4", "--cpus-per-task=2", "--time", "30", *PROGRAM
    )
    assert status == 0
    check(script)
    assert directives(script) == [
        "--job-name=program",
        "--output=%x-%j.out",
        "--nodes=2",
        "--ntasks=8",
        "--ntasks-per-node=4",
        "--cpus-per-task=2",
        "--time=30",
    ]
    assert said == "hpccomm slurm: started by srun --mpi=pmi2, for MPICH\n"
    lines = script.splitlines()
    assert lines[-3:] == ["srun --mpi=pmi2 hpccomm info", "", "srun --mpi=pmi2 python program.py --steps 3"]
    assert 'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"' in lines
    assert 'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"' in lines


@pytest.mark.usefixtures("cluster")
def test_modules_that_are_loaded_now(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADEDMODULES", "gcc/13:cuda/13")
    assert "module load gcc/13 cuda/13" in run(capsys, "-n4", *PROGRAM)[1].splitlines()
    assert "module load hdf5" in run(capsys, "-n4", "--module=hdf5", *PROGRAM)[1].splitlines()


@pytest.mark.usefixtures("cluster")
def test_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    status, script, _ = run(
        capsys,
        *("-N2", "-n8", "--gpus-per-task=1", "--mem=16G", "-t", "1-12", "-p", "gpu", "-A", "physics", "-J", "fit"),
        *("--output=logs/%x.%j", "--array=0-9%2", "--dependency=afterok:12", "--requeue", "--signal=USR1@120"),
        *("--sbatch=--qos=high", "--sbatch=--exclusive", "--module=gcc/13", "--module=cuda"),
        *("--env=DATA=/a b/c", "--env=OMP_NUM_THREADS=1", "--env=OUT=$SLURM_JOB_ID.npz"),
        *("--", "python", "-u", "program.py", "--seed", "$SLURM_ARRAY_TASK_ID", "it's"),
    )
    assert status == 2  # gpu allows a day
    status, script, said = run(
        capsys,
        *("-N2", "-n8", "--gpus-per-task=1", "--mem=16G", "-t", "12:00:00", "-p", "gpu", "-A", "physics", "-J", "fit"),
        *("--output=logs/%x.%j", "--array=0-9%2", "--dependency=afterok:12", "--requeue", "--signal=USR1@120"),
        *("--sbatch=--qos=high", "--sbatch=--exclusive", "--module=gcc/13", "--module=cuda"),
        *("--env=DATA=/a b/c", "--env=OMP_NUM_THREADS=1", "--env=OUT=$SLURM_JOB_ID.npz"),
        *("--", "python", "-u", "program.py", "--seed", "$SLURM_ARRAY_TASK_ID", "it's"),
    )
    assert status == 0, said
    check(script)
    assert directives(script) == [
        *("--job-name=fit", "--output=logs/%x.%j", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4"),
        *("--cpus-per-task=1", "--gpus-per-task=1", "--mem=16G", "--time=12:00:00", "--partition=gpu"),
        *("--account=physics", "--array=0-9%2", "--dependency=afterok:12", "--requeue", "--signal=USR1@120"),
        *("--qos=high", "--exclusive"),
    ]
    lines = script.splitlines()
    assert lines.index("set +u  # the scripts of modules use variables that are not set") + 1 == lines.index(
        "module load gcc/13 cuda"
    )
    assert "export DATA='/a b/c'" in lines
    assert 'export OUT="$SLURM_JOB_ID".npz' in lines
    assert [line for line in lines if "OMP_NUM_THREADS=" in line] == ["export OMP_NUM_THREADS=1"]
    assert lines[-1] == """srun --mpi=pmi2 python -u program.py --seed "$SLURM_ARRAY_TASK_ID" 'it'"'"'s'"""


def test_the_script_runs_the_program(folder: Path, imitate: Callable[..., None]) -> None:
    imitate(srun='echo "srun $*"', hpccomm="exit 1")
    text = slurm.script(
        ["--ntasks=1"], slurm.Environment(variables={"A": "b c"}), "srun", "srun", ["echo", "$A", "x y"]
    )
    done = subprocess.run([BASH], input=text, text=True, capture_output=True, check=False, env={**os.environ})
    assert (done.stdout, done.stderr) == ("srun hpccomm info\nsrun echo $A x y\n", "")


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("plain", "plain"),
        ("", "''"),
        ("a b", "'a b'"),
        ("$HOME", "'$HOME'"),
        ("$SLURM_ARRAY_TASK_ID", '"$SLURM_ARRAY_TASK_ID"'),
        ("a b/${SLURM_JOB_ID}.npz", "'a b/'\"${SLURM_JOB_ID}\".npz"),
        ('"; rm x', "'\"; rm x'"),
    ],
)
def test_only_slurm_s_variables_are_left_to_the_job(word: str, quoted: str) -> None:
    assert slurm.quote(word) == quoted


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (["python", "jobs/heat 2d.py"], "heat_2d"),
        (["python3", "-u", "a.py"], "a"),
        (["python", "-m", "mpi4py", "a.py"], "mpi4py"),
        (["/opt/bin/solver.x", "a.py"], "solver"),
        (["python"], "python"),
    ],
)
def test_the_job_is_named_after_the_program(program: list[str], name: str) -> None:
    assert slurm.job_name(program) == name


def test_the_present_python_is_the_script_s(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    assert slurm.activation(str(tmp_path), str(tmp_path)) == f'export PATH={tmp_path}/bin:"$PATH"'  # conda's
    (tmp_path / "bin" / "activate").touch()
    assert slurm.activation(str(tmp_path), "/usr") == f"source {tmp_path}/bin/activate"
    assert slurm.activation("/usr", "/usr") == ""


# -- the launcher ------------------------------------------------------------------------------------


TYPES = Machine(types=("none", "pmi2"))


@pytest.mark.parametrize(
    ("library", "machine", "launcher", "mpi", "command", "why"),
    [
        (MPICH, TYPES, None, None, "srun --mpi=pmi2", "by srun --mpi=pmi2, for MPICH"),
        (MPICH, Machine(), None, None, "srun --mpi=pmi2", "by srun --mpi=pmi2, for MPICH"),
        (OPEN_MPI, Machine(), None, None, "srun --mpi=pmix", "by srun --mpi=pmix, for Open MPI"),
        (OPEN_MPI, TYPES, None, None, "mpiexec", "Open MPI needs srun --mpi=pmix, and srun here has none, pmi2"),
        (OPEN_MPI, TYPES, "srun", None, "srun --mpi=pmix", "which srun here does not list (none, pmi2)"),
        (OPEN_MPI, TYPES, None, "pmix_v4", "srun --mpi=pmix_v4", "which srun here does not list"),
        (MPICH, TYPES, "mpirun", None, "mpiexec", "by mpiexec, as you said; the MPI is MPICH"),
        ("", TYPES, None, None, "mpiexec", "MPI (mpi4py finds none here) needs is not known (none, pmi2)"),
        ("FUJITSU MPI 4", Machine(), "srun", None, "srun", "which one FUJITSU MPI 4 needs is not known"),
    ],
)
def test_how_the_ranks_are_started(
    library: str, machine: Machine, launcher: str | None, mpi: str | None, command: str, why: str
) -> None:
    launch = slurm.choose_launch(Job(), library, machine, launcher, mpi)
    assert launch.command == command
    assert launch.launcher == ("mpirun" if command == "mpiexec" else "srun")
    assert why in launch.why


def test_open_mpi_s_threads_get_cores() -> None:
    assert slurm.choose_launch(Job(cpus_per_task=4), OPEN_MPI, TYPES, None, None).command == "mpiexec --bind-to none"
    assert slurm.choose_launch(Job(cpus_per_task=4), MPICH, TYPES, "mpirun", None).command == "mpiexec"


@pytest.mark.usefixtures("cluster")
def test_mpirun_gets_gpus_and_signals_another_way(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--launcher=mpirun", "--time=1:00:00", "--signal=USR1@60", "-p", "gpu", "--gpus-per-task=2")
    status, script, _ = run(capsys, *options, "-N2", "--ntasks-per-node=2", *PROGRAM)
    assert status == 0
    check(script)
    assert "--gpus-per-node=4" in directives(script)
    assert "--signal=B:USR1@60" in directives(script)
    assert "SRUN_CPUS" not in script
    assert script.splitlines()[-3:] == ["mpiexec hpccomm info", "", "exec mpiexec python program.py --steps 3"]
    status, script, said = run(capsys, *options, "-n4", *PROGRAM)
    assert (status, script) == (2, "")
    assert "--gpus-per-task with mpirun: say how many ranks a node has" in said


def test_the_mpi_is_asked_of_another_process() -> None:
    assert slurm.family(slurm._mpi()) is not None


def test_an_mpi4py_in_the_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpi4py.py").write_text("open('was run', 'w'); raise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    assert slurm.family(slurm._mpi()) is not None
    assert not (tmp_path / "was run").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("owner", [os.geteuid(), 65534])
def test_only_an_own_environment_is_activated(tmp_path: Path, owner: int) -> None:
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"touch '{tmp_path}/activated'; exit 3\n")
    os.chown(activate, owner, -1)
    setup = Path(slurm.__file__).parents[2] / "slurm" / "setup.sh"
    command = [BASH, "-c", f"source '{setup}'"]
    ended = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
    is_own = owner == os.geteuid()
    assert ended.returncode == (3 if is_own else 1)
    assert (tmp_path / "activated").exists() == is_own
    assert is_own or "activate is missing, or not yours: activate your environment before sbatch" in ended.stderr


# -- what does not fit -------------------------------------------------------------------------------


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-p", "huge"], "there is no partition huge here; there is short, long, gpu, old"),
        (["-p", "short,huge"], "there is no partition huge here"),
        (["-p", "old"], "partition old is down"),
        (["--time", "2:00:00"], "--time is 2:00:00, but partition short allows 60 minutes"),
        (["--time", "UNLIMITED"], "--time is UNLIMITED, but partition short allows 60 minutes"),
        (["-N5"], "--nodes is 5, but partition short has 4"),
        (["-N2", "--ntasks-per-node=17"], "17 tasks on a node need 17 CPUs, but the nodes of partition short have 16"),
        (["-N2", "-n16", "-c3"], "8 tasks of 3 CPUs on a node need 24 CPUs, but the nodes of partition short have 16"),
        (["-c17"], "1 task of 17 CPUs on a node need 17 CPUs"),
        (["-n65"], "65 tasks need 65 CPUs, but partition short has 64"),
        (["--mem", "100G"], "--mem is 100G for each node, but the nodes of partition short have 64000 MB"),
        (["--gpus-per-task=1"], "--gpus-per-task is 1, but partition short has no GPUs"),
        (
            ["-N1", "-n9", "-p", "gpu", "--gpus-per-task=1"],
            "9 tasks on a node need 9 GPUs, but the nodes of partition gpu have 8",
        ),
        (["--time", "tomorrow"], "--time: 'tomorrow' is no time: give minutes, minutes:seconds, "),
        (["--mem", "lots"], "--mem: 'lots' is no size"),
        (["--nodes", "0"], "--nodes is 0; expected 1 or more"),
        (["--array", "all"], "--array is 'all'; expected 0-9, 1,3,5"),
        (["--signal", "B:USR1@120"], "--signal B:USR1@120: it would end the batch script, and srun's ranks with it"),
        (["--launcher=mpirun", "--mpi=pmix"], "--mpi is 'pmix', and is for srun; leave it out with --launcher mpirun"),
        (["--signal", "please"], "--signal is 'please'; expected USR1@120"),
        (["--dependency", "12"], "--dependency is '12'; expected afterok:JOB"),
        (["-N4", "-n2"], "--ntasks is 2, fewer than the 4 nodes"),
        (["-N2", "-n9", "--ntasks-per-node=4"], "2 nodes with at most 4 tasks each have room for 8"),
        (["-J", "my job"], "--job-name is 'my job': no spaces"),
        (["--env", "1=2"], "--env is '1=2'; expected NAME=VALUE"),
        (["--sbatch", "high"], "--sbatch is 'high'; expected an option of sbatch"),
    ],
)
def test_what_can_not_be(capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    status, script, errors = run(capsys, *options, *PROGRAM)
    assert (status, script) == (2, "")
    assert said in errors
    assert all(line.startswith("hpccomm slurm: error: ") for line in errors.splitlines())


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ([], "no program: hpccomm slurm [options] -- python program.py"),
        (["--"], "no program: hpccomm slurm [options] -- python program.py"),
        (
            ["--", "program.py"],
            "program.py can't be executed; start it with python: hpccomm slurm ... -- python program",
        ),
        (["--", "solver"], "there is no program solver here"),
        (["--", "--nodes", "2"], "hpccomm slurm has no option --nodes; what follows -- is the program"),
        (["--", "srun", "python", "program.py"], "leave srun out, the script starts the ranks: hpccomm slurm ... --"),
        (["--", "/usr/bin/mpiexec", "-n", "2", "python"], "leave /usr/bin/mpiexec out"),
        (["--", "python", "lost.py"], "there is no file lost.py in "),
        (["--", "python", "program.py", "$SLURM_ARRAY_TASK_ID"], "which only jobs with --array have"),
    ],
)
def test_programs_that_can_not_be(capsys: pytest.CaptureFixture[str], program: list[str], said: str) -> None:
    status, script, errors = run(capsys, *program)
    assert (status, script) == (2, "")
    assert said in errors


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no --time: the partition's own limit holds"),
        (["--time=2:30"], "--time=2:30 is minutes:seconds; 2:30 hours are 2:30:00"),
        (["-n4"], "no --nodes: Slurm spreads the tasks as it likes"),
        (["-N2"], "one task on each node"),
        (["-N2", "--module=openmpi/5"], "uses the MPI of this environment's mpi4py, which is MPICH"),
    ],
)
def test_what_may_not_have_been_meant(capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    status, script, remarks = run(capsys, *options, *PROGRAM)
    assert status == 0
    check(script)
    assert said in remarks


@pytest.mark.usefixtures("cluster")
def test_another_python_is_noticed(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    other = folder / "tools" / "python3"
    other.symlink_to(sys.executable)
    _, _, said = run(capsys, "--", str(other), "program.py")
    assert f"{other} is not the Python in which hpccomm is installed ({sys.executable})" in said
    assert "is not the Python" not in run(capsys, "--", sys.executable, "program.py")[2]
    assert "is not the Python" not in run(capsys, "--", "python3", "program.py")[2]


# -- the machine -------------------------------------------------------------------------------------


def test_without_slurm_the_script_is_printed_and_what_is_unknown_said(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    status, script, said = run(capsys, "-N99", "-p", "huge", "--time=1-0", *PROGRAM)
    assert status == 0
    check(script)
    assert "--partition=huge" in directives(script)
    assert "there is no sinfo here: partition, size and time are not checked" in said
    assert "there is no srun here: whether srun has the --mpi" in said
    status, script, said = run(capsys, "--submit", *PROGRAM)
    assert (status, script) == (2, "")
    assert "--submit: there is no sbatch here" in said


def test_a_slurm_that_does_not_answer(
    capsys: pytest.CaptureFixture[str], imitate: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpccomm.cli.slurm_machine.PATIENCE", 0.2)
    imitate(sinfo="echo first >&2; echo 'slurm_load_partitions: no route' >&2; exit 1", srun="exec /bin/sleep 60")
    status, script, said = run(capsys, *PROGRAM)
    assert status == 0
    check(script)
    assert "sinfo does not answer (slurm_load_partitions: no route): partition" in said
    assert "srun has not answered in 0.2 seconds" in said


def test_submitting(capfd: pytest.CaptureFixture[str], cluster: None, folder: Path) -> None:
    assert cli.main(["slurm", "--submit", "-N2", "--time=5", *PROGRAM]) == 0
    out, said = capfd.readouterr()
    assert out == "77\n"
    assert "started by srun" in said
    assert (folder / "said").read_text() == "--parsable\n"
    assert "#SBATCH --nodes=2\n" in (folder / "submitted").read_text()
    (folder / "tools" / "sbatch").write_text("#!/bin/sh\nexit 3\n")
    assert cli.main(["slurm", "--submit", "-N2", "--time=5", *PROGRAM]) == 3


def test_what_sinfo_prints_is_read() -> None:
    found = read_nodes(SINFO + "a line of something else\n")
    assert found[0] == Nodes("short", True, True, 60, 4, 16, 64000, 0)
    assert [nodes.gpus for nodes in found] == [0, 0, 4, 8, 0]
    assert found[-1] == Nodes("old", False, False, math.inf, 8, 8, 16000, 0)


def test_what_srun_prints_is_read() -> None:
    assert read_types(LIST) == ("none", "pmi2", "pmix", "pmix_v3", "pmix_v4")
    older = "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: openmpi\n"
    assert read_types(older) == ("none", "pmi2", "openmpi")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90),
        ("90:30", 90.5),
        ("1:30:00", 90),
        ("2-0", 2880),
        ("1-12:30", 2190),
        ("1-12:30:30", 2190.5),
        ("infinite", math.inf),
        ("UNLIMITED", math.inf),
    ],
)
def test_times(text: str, expected: float) -> None:
    assert minutes(text) == expected


def test_no_times_and_sizes() -> None:
    for text in ("", "1h", "1:2:3:4", "1-", "-5", "1-2-3", "1.5"):
        with pytest.raises(ValueError, match="is no time"):
            minutes(text)
    assert [megabytes(text) for text in ("100", "100M", "2G", "2g", "2GB", "1T", "2048K")] == [
        *(100, 100, 2048, 2048, 2048, 1048576, 2)
    ]
    with pytest.raises(ValueError, match="is no size"):
        megabytes("1.5G")


def test_a_machine_without_a_default_partition() -> None:
    machine = Machine(read_nodes(SINFO.replace("short*", "short")))
    (said,) = misfits(Job(), machine)
    assert said == "this machine has no default partition: give --partition, one of short, long, gpu, old"
    assert list(misfits(Job(partition="long", time="1-0"), machine)) == []
    assert list(misfits(Job(partition="short,long", time="1-0"), machine)) == []


@pytest.mark.parametrize(
    "job",
    [
        Job(array="0-9"),
        Job(array="1,3,5-7:2%4"),
        Job(signal="USR1@120"),
        Job(signal="B:SIGTERM@60"),
        Job(signal="10"),
        Job(dependency="afterok:12:13,afterany:14"),
        Job(dependency="afterok:12?singleton"),
        Job(dependency="aftercorr:12_3"),
        Job(dependency="after:12+5"),
        Job(nodes=2, ntasks=7, ntasks_per_node=4),
    ],
)
def test_forms_that_sbatch_knows(job: Job) -> None:
    assert list(malformed(job)) == []


@pytest.mark.parametrize(
    ("library", "launcher", "variables"),
    [
        ("MPICH Version: 5.0.2\nMPICH Device: ch4:ucx ofi", "srun", {"MPIR_CVAR_CH4_NETMOD": "ofi"}),
        ("MPICH Version: 5.0.2\nMPICH Device: ch4:ucx ofi", "mpirun", {}),
        ("MPICH Version: 4.2\nMPICH Device: ch4:ofi", "srun", {}),
        ("Open MPI v5.0.11", "srun", {}),
    ],
)
def test_mpich_with_ucx_under_srun_is_given_the_other_transport(
    library: str, launcher: str, variables: dict[str, str]
) -> None:
    assert slurm.transport(library, launcher) == variables
