"""``hpccomm slurm``: print a batch script for a program, with the options that this machine's Slurm and MPI need.

The script goes to stdout, messages go to stderr; ``--submit`` passes the script to sbatch instead.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .. import __version__
from ..process.alone import family
from .slurm_machine import Job, Machine, SilentError, ask, malformed, misfits, output, remarks

TEMPLATE = """\
#!/bin/bash
# Made by hpccomm {version}.
{directives}

set -euo pipefail
{environment}
# What the job runs on, as its ranks see it.
{launch} hpccomm info

{start} {program}
"""


class Environment(NamedTuple):
    """The setup in the script before the program's start."""

    modules: tuple[str, ...] = ()
    activate: str = ""  # a line of bash
    variables: Mapping[str, str] = {}
    has_threads: bool = False
    launcher: str = "srun"


class Launch(NamedTuple):
    """The launcher, ``"srun"`` or ``"mpirun"``, its command, and the reason for the choice."""

    launcher: str
    command: str
    why: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, under sbatch's names."""
    parser.usage = "hpccomm slurm [options] -- program [arguments]"
    parser.description = (
        "Write a batch script that starts a program on several ranks under Slurm, or submit it. The script goes to "
        "stdout, remarks to stderr. The job replaces $SLURM_... in the program's arguments."
    )
    parser.epilog = (
        "examples:\n"
        "  hpccomm slurm --nodes 2 --ntasks-per-node 4 --time 30 -- python program.py\n"
        "  hpccomm slurm --ntasks 8 --submit -- python program.py"
    )
    size = parser.add_argument_group("size, as for sbatch")
    size.add_argument("--nodes", "-N", type=int, metavar="N")
    size.add_argument("--ntasks", "-n", type=int, metavar="N", help="ranks in all")
    size.add_argument("--ntasks-per-node", type=int, metavar="N", help="ranks on each node")
    size.add_argument("--cpus-per-task", "-c", type=int, metavar="N", help="and OMP_NUM_THREADS")
    size.add_argument("--gpus-per-task", type=int, metavar="N")
    size.add_argument("--mem", metavar="SIZE", help="memory of each node, such as 16G")
    size.add_argument("--time", "-t", metavar="TIME", help="limit: minutes, hours:minutes:seconds, days-hours, ...")
    job = parser.add_argument_group("job, as for sbatch")
    job.add_argument("--partition", "-p")
    job.add_argument("--account", "-A")
    job.add_argument("--job-name", "-J", metavar="NAME", help="default: the program's name")
    job.add_argument("--output", "-o", metavar="FILE", help="default: NAME-JOB.out")
    job.add_argument("--array", "-a", metavar="LIST", help="one job for each number; $SLURM_ARRAY_TASK_ID is it")
    job.add_argument("--dependency", "-d", metavar="TYPE:JOB", help="such as afterok:123")
    job.add_argument("--requeue", action="store_true", help="start again after preemption or a node's failure")
    job.add_argument("--signal", metavar="SIGNAL@SECONDS", help="to the ranks, before the end: USR1@120")
    job.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="any other: --sbatch=--qos=high")
    how = parser.add_argument_group("how")
    how.add_argument("--launcher", choices=("srun", "mpirun"), help="default: srun, where it can start this MPI")
    how.add_argument("--mpi", metavar="TYPE", help="srun's --mpi, instead of the one that this MPI needs")
    how.add_argument(
        "--module", action="append", metavar="NAME", help="to load; may be repeated (default: the loaded ones)"
    )
    how.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable; may be repeated")
    how.add_argument("--submit", action="store_true", help="submit the script, and print the job's number")
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Print or submit the script; return 2 for a user's mistake, otherwise sbatch's status or 0."""
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    job = Job(**{name: getattr(arguments, name) for name in Job._fields})
    errors = [*malformed(job), *_wrong_words(arguments), *wrong_program(program)]
    if job.array is None and any("SLURM_ARRAY_" in word for word in program):
        errors.append("the program's arguments name $SLURM_ARRAY_..., which only jobs with --array have")
    if arguments.submit and shutil.which("sbatch") is None:
        errors.append("--submit: there is no sbatch here; without it the script is printed")
    notes: list[str] = []
    if not errors:
        machine = ask()
        notes += [*machine.unknown, *remarks(job), *doubtful_python(program)]
        errors += misfits(job, machine)
    if errors:
        return _give_up(errors)
    library = _mpi()
    launch = choose_launch(job, library, machine, arguments.launcher, arguments.mpi)
    modules = arguments.module or list(filter(None, os.environ.get("LOADEDMODULES", "").split(":")))
    notes += [launch.why, *_other_mpis(modules, library)]
    if launch.launcher == "srun" and re.match("R?BR?:", job.signal or ""):
        return _give_up(
            [f"--signal {job.signal}: it would end the batch script, and srun's ranks with it; leave B: out"]
        )
    if job.gpus_per_task is not None and launch.launcher == "mpirun" and job.tasks_per_node is None:
        return _give_up(
            ["--gpus-per-task with mpirun: say how many ranks a node has, by --nodes and --ntasks-per-node"]
        )
    variables = transport(library, launch.launcher) | dict(each.split("=", 1) for each in arguments.env)
    has_threads = "OMP_NUM_THREADS" not in variables
    environment = Environment(tuple(modules), activation(), variables, has_threads, launch.launcher)
    directives = [*_directives(job, arguments, launch.launcher, program), *arguments.sbatch]
    start = f"exec {launch.command}" if job.signal is not None and launch.launcher == "mpirun" else launch.command
    text = script(directives, environment, launch.command, start, program)
    for note in notes:
        print(f"hpccomm slurm: {note}", file=sys.stderr)
    if not arguments.submit:
        print(text, end="")
        return 0
    sys.stderr.flush()
    return subprocess.run(["sbatch", "--parsable"], input=text, text=True, check=False).returncode


def transport(library: str, launcher: str) -> dict[str, str]:
    """Return the environment variables that an MPI needs under srun.

    With UCX, MPICH's wheel publishes an address of 4 KB for each rank. Slurm's pmi2 sometimes misreads it ("value not
    properly terminated in client request"), and the job hangs when it starts. With libfabric, addresses have 64 bytes.
    """
    return {"MPIR_CVAR_CH4_NETMOD": "ofi"} if launcher == "srun" and "ch4:ucx ofi" in library else {}


def _give_up(errors: Sequence[str]) -> int:
    for error in errors:
        print(f"hpccomm slurm: error: {error}", file=sys.stderr)
    return 2


# -- the script --------------------------------------------------------------------------------------


def script(directives: Sequence[str], environment: Environment, launch: str, start: str, program: Sequence[str]) -> str:
    """Return the batch script; `launch` starts ``hpccomm info``, and `start` the program."""
    return TEMPLATE.format(
        version=__version__,
        directives="\n".join(f"#SBATCH {directive}" for directive in directives),
        environment="".join(f"{line}\n" for line in _set_up(environment)),
        launch=launch,
        start=start,
        program=" ".join(map(quote, program)),
    )


def _set_up(environment: Environment) -> Iterator[str]:
    if environment.modules:
        yield "set +u  # the scripts of modules use variables that are not set"
        yield f"module load {' '.join(map(shlex.quote, environment.modules))}"
        yield "set -u"
    if environment.activate:
        yield "# shellcheck source=/dev/null"
        yield environment.activate
    if environment.has_threads:
        yield 'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"'
    if environment.launcher == "srun":  # srun(1): since 22.05 it does not inherit --cpus-per-task from sbatch
        yield 'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"'
    for name, value in environment.variables.items():
        yield f"export {name}={quote(value)}"


def _directives(job: Job, arguments: argparse.Namespace, launcher: str, program: Sequence[str]) -> Iterator[str]:
    """Yield the options for sbatch."""
    by_srun, per_node = launcher == "srun", job.gpus_per_task and job.gpus_per_task * (job.tasks_per_node or 1)
    to_shell = "" if by_srun or ":" in (job.signal or "") else "B:"  # mpiexec replaces the shell and forwards signals
    options = {
        "job-name": arguments.job_name or job_name(program),
        "output": arguments.output or ("%x-%A_%a.out" if job.array else "%x-%j.out"),
        "nodes": job.nodes,
        "ntasks": job.tasks,  # required by --gpus-per-task
        "ntasks-per-node": job.tasks_per_node,  # without it, Slurm may place 4 tasks on 2 nodes as 3 and 1
        "cpus-per-task": job.cpus_per_task or 1,
        "gpus-per-task": job.gpus_per_task if by_srun else None,
        "gpus-per-node": None if by_srun else per_node,  # with gpus-per-task, mpirun's daemon would get the GPUs
        **{name: getattr(arguments, name) for name in ("mem", "time", "partition", "account", "array", "dependency")},
        "requeue": arguments.requeue or None,
        "signal": job.signal and to_shell + job.signal,
    }
    for name, value in options.items():
        if value is not None:
            yield f"--{name}" if value is True else f"--{name}={value}"


def quote(word: str) -> str:
    """Quote a word for bash, but leave Slurm's variables in it: ``$SLURM_ARRAY_TASK_ID``."""
    parts = re.split(r"(\$SLURM_\w+|\$\{SLURM_\w+\})", word)
    quoted = [f'"{part}"' if i % 2 else shlex.quote(part) if part else "" for i, part in enumerate(parts)]
    return "".join(quoted) or "''"


def job_name(program: Sequence[str]) -> str:
    """Return the name of the script or module that Python runs, or the program's name."""
    is_python = Path(program[0]).name.startswith("python")
    script = next((word for word in program[1:] if is_python and not word.startswith("-")), program[0])
    return re.sub(r"[^\w.+-]", "_", Path(script).stem) or "hpccomm"


def activation(prefix: str = sys.prefix, base_prefix: str = sys.base_prefix) -> str:
    """Return the line of bash that activates the current Python: its virtual environment or its folder."""
    activate = Path(prefix) / "bin" / "activate"
    if prefix != base_prefix and activate.exists():
        return f"source {shlex.quote(str(activate))}"
    if prefix in ("/usr", "/usr/local"):
        return ""
    return f'export PATH={shlex.quote(str(Path(prefix) / "bin"))}:"$PATH"'


# -- the launcher ------------------------------------------------------------------------------------


def choose_launch(job: Job, library: str, machine: Machine, launcher: str | None, mpi: str | None) -> Launch:
    """Return the launcher and its reason; `library` is MPI_Get_library_version, or "" without an MPI."""
    found = family(library)
    name = "MPI (mpi4py finds none here)" if not library else found.name if found else library.split(",")[0].strip()
    wanted = mpi or (found.srun_type if found else None)
    types = ", ".join(machine.types or ())
    is_listed = machine.types is None or wanted in machine.types
    there = "" if machine.types is None else f" ({types})"
    binds = found is not None and found.name == "Open MPI" and (job.cpus_per_task or 1) > 1
    mpiexec = "mpiexec --bind-to none" if binds else "mpiexec"  # Open MPI would bind all threads of a rank to one core
    if launcher == "mpirun":
        return Launch("mpirun", mpiexec, f"started by mpiexec, as you said; the MPI is {name}")
    if wanted is None and launcher == "srun":
        return Launch("srun", "srun", f"srun with the site's default --mpi: which one {name} needs is not known{there}")
    if wanted is None:
        why = f"which --mpi of srun {name} needs is not known{there}; --mpi=TYPE says"
    elif is_listed or launcher or mpi:
        doubt = "" if is_listed else f", which srun here does not list{there}"
        command = f"srun --mpi={shlex.quote(wanted)}"
        return Launch("srun", command, f"started by srun --mpi={wanted}, for {name}{doubt}")
    else:
        why = f"{name} needs srun --mpi={wanted}, and srun here has {types}"
    return Launch("mpirun", mpiexec, f"started by mpiexec: {why}")


def _mpi() -> str:
    """Return MPI_Get_library_version, read in another process: some MPIs can't start on login nodes."""
    try:
        return output(sys.executable, "-m", "mpi4py", "--mpi-lib-version")
    except SilentError:
        return ""


def _other_mpis(modules: Sequence[str], library: str) -> Iterator[str]:
    """Yield a remark for each module of an MPI other than the program's."""
    if (found := family(library)) is None:
        return
    own, *names = ("".join(filter(str.isalpha, name.lower())) for name in (found.name, *modules))
    for module, name in zip(modules, names):
        if own not in name and re.search("openmpi|mpich|mvapich|impi|intelmpi", name):
            yield f"--module {module}: the program uses the MPI of this environment's mpi4py, which is {found.name}"


# -- mistakes ----------------------------------------------------------------------------------------


def _wrong_words(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield a message for each option that can't be in an #SBATCH line or an export."""
    for option in ("partition", "account", "job_name", "output"):
        value = getattr(arguments, option)
        if value is not None and re.search(r"[\s\"'#\\]", value):
            yield f"--{option.replace('_', '-')} is {value!r}: no spaces, quotes, # or backslashes, please"
    if arguments.launcher == "mpirun" and arguments.mpi is not None:
        yield f"--mpi is {arguments.mpi!r}, and is for srun; leave it out with --launcher mpirun"
    for option in arguments.sbatch:
        if not option.startswith("-") or "\n" in option:
            yield f"--sbatch is {option!r}; expected an option of sbatch: --sbatch=--qos=high"
    for variable in arguments.env:
        if not re.fullmatch(r"[A-Za-z_]\w*=.*", variable, re.DOTALL):
            yield f"--env is {variable!r}; expected NAME=VALUE"


def wrong_program(program: Sequence[str]) -> Iterator[str]:
    """Yield the reasons why the program can't be started."""
    if not program:
        yield "no program: hpccomm slurm [options] -- python program.py [arguments]"
        return
    first, file = program[0], Path(program[0])
    if re.fullmatch(r"srun|mpirun|mpiexec(\.\w+)?", file.name):
        yield f"leave {first} out, the script starts the ranks: hpccomm slurm ... -- python program.py"
        return
    if shutil.which(first) is None and not (Path(sys.prefix) / "bin" / first).exists():
        if file.suffix == ".py" and file.exists():
            yield f"{first} can't be executed; start it with python: hpccomm slurm ... -- python {shlex.join(program)}"
        elif first.startswith("-"):
            yield f"hpccomm slurm has no option {first}; what follows -- is the program"
        else:
            yield f"there is no program {first} here"
    script = program[1] if file.name.startswith("python") and len(program) > 1 else ""
    if script.endswith(".py") and "$" not in script and not Path(script).exists():
        yield f"there is no file {script} in {os.getcwd()}"


def doubtful_python(program: Sequence[str]) -> Iterator[str]:
    """Yield a remark if the program's Python is not the one that hpccomm is installed in."""
    first = program[0]
    if not Path(first).name.startswith("python") or "/" not in first:
        return  # the activated environment's python
    if Path(first).absolute().parent != Path(sys.executable).absolute().parent:
        yield f"{first} is not the Python in which hpccomm is installed ({sys.executable})"
