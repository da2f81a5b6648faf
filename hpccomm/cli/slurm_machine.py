"""Query Slurm for this machine's nodes and partitions, and check a job against them; used by ``hpccomm slurm``."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import NamedTuple

PATIENCE = 20  # seconds to wait for a command of Slurm
FORMAT = "%P|%a|%l|%D|%c|%m|%G"  # sinfo(1): partition, state, time limit; node count; CPUs, MB and gres of each node


class Nodes(NamedTuple):
    """Nodes of one kind in a partition: one line of sinfo."""

    partition: str
    is_default: bool
    is_up: bool
    minutes: float  # the partition's limit
    number: int
    cpus: int
    megabytes: int
    gpus: int


class Machine(NamedTuple):
    """Slurm's answers: a field is None if its command failed, and `unknown` has the reasons."""

    nodes: tuple[Nodes, ...] | None = None
    types: tuple[str, ...] | None = None  # of srun --mpi
    unknown: tuple[str, ...] = ()


class Job(NamedTuple):
    """The options of a job; None for options not given."""

    nodes: int | None = None
    ntasks: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    gpus_per_task: int | None = None
    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    array: str | None = None
    dependency: str | None = None
    signal: str | None = None

    @property
    def tasks(self) -> int:
        """The number of ranks."""
        return self.ntasks or (self.nodes or 1) * (self.ntasks_per_node or 1)

    @property
    def tasks_per_node(self) -> int | None:
        """The largest number of ranks on a node; None if Slurm may choose."""
        if self.ntasks_per_node is not None:
            return self.ntasks_per_node
        return None if self.nodes is None else -(-self.tasks // self.nodes)


# -- asking ------------------------------------------------------------------------------------------


class SilentError(Exception):
    """A command gave no answer; the exception's text is the reason."""


def ask() -> Machine:
    """Return the answers of sinfo and srun."""
    unknown = []
    nodes = types = None
    try:
        nodes = read_nodes(output("sinfo", "--noheader", "--exact", f"--format={FORMAT}"))
    except SilentError as error:
        unknown.append(f"{error}: partition, size and time are not checked")
    try:
        types = read_types(output("srun", "--mpi=list"))
    except SilentError as error:
        unknown.append(f"{error}: whether srun has the --mpi that the MPI library needs is not checked")
    return Machine(nodes, types, tuple(unknown))


def output(*command: str) -> str:
    """Return a command's output; it runs in ``/``, since ``python -m`` imports from the current folder first."""
    if shutil.which(command[0]) is None:
        raise SilentError(f"there is no {command[0]} here")
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd="/"
        )
    except subprocess.TimeoutExpired:
        raise SilentError(f"{command[0]} has not answered in {PATIENCE} seconds") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise SilentError(f"{command[0]} does not answer ({said})")
    return done.stdout or done.stderr  # srun --mpi=list prints to stderr


def read_nodes(text: str) -> tuple[Nodes, ...]:
    """Parse sinfo's output in `FORMAT`; skip malformed lines."""
    found = []
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 7 or not all(re.match(r"\d", field) for field in fields[3:6]):
            continue
        name, state, limit, *numbers = fields[:6]
        count, cpus, megabytes = (int(re.sub(r"\D.*", "", number)) for number in numbers)  # "16+": at least
        gpus = sum(int(each) for each in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", fields[6]))
        found.append(
            Nodes(name.rstrip("*"), name.endswith("*"), state == "up", minutes(limit), count, cpus, megabytes, gpus)
        )
    return tuple(found)


def read_types(text: str) -> tuple[str, ...]:
    """Parse the output of ``srun --mpi=list``: one type a line, prefixed with "srun: " before Slurm 20.11."""
    words = [line.removeprefix("srun:").strip() for line in text.splitlines()]
    types = [word for word in words if re.fullmatch(r"[a-z]\w*", word)]
    for versions in re.findall(r"plugin versions available: (\S+)", text):
        types += versions.split(",")
    return tuple(types)


def minutes(limit: str) -> float:
    """Return a time limit in minutes; raise ValueError for forms that sbatch(1) does not list."""
    if limit.lower() in ("infinite", "unlimited", "-1"):
        return math.inf
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if found is None:
        raise ValueError(
            f"{limit!r} is no time: give minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
            f"days-hours:minutes or days-hours:minutes:seconds"
        )
    days, *parts = (int(each or 0) for each in found.groups())
    if found[1] is None and found[4] is None:
        parts = [0, *parts]  # neither days nor hours
    return days * 24 * 60 + parts[0] * 60 + parts[1] + parts[2] / 60


def megabytes(size: str) -> int:
    """Return a memory size in MB; raise ValueError for forms that sbatch(1) does not list."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", size, re.IGNORECASE)
    if found is None:
        raise ValueError(f"{size!r} is no size: give a number of MB, or one with K, M, G or T behind it")
    return int(found[1]) * int(1024 ** "KMGT".index(found[2].upper() or "M")) // 1024


# -- checking ----------------------------------------------------------------------------------------

FORMS = {  # sbatch(1)
    "array": (r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", "0-9, 1,3,5, 0-99:10 or 0-99%4 (4 at a time)"),
    "signal": (r"([RB]+:)?(\d+|(SIG)?[A-Z]+\d?)(@\d+)?", "USR1@120: the signal, and how many seconds before the end"),
    "dependency": (
        r"(singleton|after\w*:\d+(_\d+)?(\+\d+)?(:\d+(_\d+)?(\+\d+)?)*)([,?](singleton|after\w*:\d+[\d_+:]*))*",
        "afterok:JOB, afterany:JOB, afternotok:JOB, or singleton",
    ),
}


def malformed(job: Job) -> Iterator[str]:
    """Yield the mistakes in a job that no machine accepts."""
    for name in ("nodes", "ntasks", "ntasks_per_node", "cpus_per_task", "gpus_per_task"):
        if (value := getattr(job, name)) is not None and value < 1:
            yield f"--{name.replace('_', '-')} is {value}; expected 1 or more"
    for name, (form, expected) in FORMS.items():
        value = getattr(job, name)
        if value is not None and not re.fullmatch(form, value):
            yield f"--{name} is {value!r}; expected {expected}"
    for name, convert in (("time", minutes), ("mem", megabytes)):
        try:
            if getattr(job, name) is not None:
                convert(getattr(job, name))
        except ValueError as error:
            yield f"--{name}: {error}"
    if job.nodes and job.ntasks and job.ntasks < job.nodes:
        yield f"--ntasks is {job.ntasks}, fewer than the {job.nodes} nodes"
    elif job.nodes and job.ntasks and job.ntasks_per_node and job.ntasks > job.nodes * job.ntasks_per_node:
        yield (
            f"--ntasks is {job.ntasks}, but {job.nodes} nodes with at most {job.ntasks_per_node} tasks each have room "
            f"for {job.nodes * job.ntasks_per_node}; leave one of the three out"
        )


def misfits(job: Job, machine: Machine) -> Iterator[str]:
    """Yield the reasons why a well-formed job can't run on this machine, from Slurm's answers."""
    if machine.nodes is None:
        return
    names = list(dict.fromkeys(nodes.partition for nodes in machine.nodes))
    partition = job.partition or next((nodes.partition for nodes in machine.nodes if nodes.is_default), None)
    if partition is None:
        yield f"this machine has no default partition: give --partition, one of {', '.join(names)}"
        return
    wanted = partition.split(",")  # sbatch uses the partition that can start the job first
    for unknown in [name for name in wanted if name not in names]:
        yield f"there is no partition {unknown} here; there is {', '.join(names)}"
    kinds = [nodes for nodes in machine.nodes if nodes.partition in wanted]
    if not kinds or not set(wanted) <= set(names):
        return
    if not any(nodes.is_up for nodes in kinds):
        yield f"partition {partition} is down"
    if job.time is not None and minutes(job.time) > (longest := max(nodes.minutes for nodes in kinds)):
        yield f"--time is {job.time}, but partition {partition} allows {longest:g} minutes"
    yield from _too_large(job, partition, kinds)


def _too_large(job: Job, partition: str, kinds: Sequence[Nodes]) -> Iterator[str]:
    count, most = sum(nodes.number for nodes in kinds), max(nodes.cpus for nodes in kinds)
    here, each = job.tasks_per_node or 1, job.cpus_per_task or 1
    if job.nodes is not None and job.nodes > count:
        yield f"--nodes is {job.nodes}, but partition {partition} has {count}"
    if here * each > most:
        cpus = f"{here} tasks" if each == 1 else f"{here} task{'s' * (here != 1)} of {each} CPUs"
        yield f"{cpus} on a node need {here * each} CPUs, but the nodes of partition {partition} have {most}"
    elif job.tasks * each > (total := sum(nodes.number * nodes.cpus for nodes in kinds)):
        yield f"{job.tasks} tasks need {job.tasks * each} CPUs, but partition {partition} has {total}"
    if job.mem is not None and megabytes(job.mem) > (largest := max(nodes.megabytes for nodes in kinds)):
        yield f"--mem is {job.mem} for each node, but the nodes of partition {partition} have {largest} MB"
    if job.gpus_per_task is not None:
        gpus = max(nodes.gpus for nodes in kinds)
        if gpus == 0:
            yield f"--gpus-per-task is {job.gpus_per_task}, but partition {partition} has no GPUs (sinfo --format=%G)"
        elif (needed := here * job.gpus_per_task) > gpus:
            yield f"{here} tasks on a node need {needed} GPUs, but the nodes of partition {partition} have {gpus}"


def remarks(job: Job) -> Iterator[str]:
    """Yield remarks on options that are allowed but may be mistakes."""
    if job.time is None:
        yield "no --time: the partition's own limit holds; a short one lets the job start earlier"
    elif re.fullmatch(r"\d+:\d+", job.time):
        yield f"--time={job.time} is minutes:seconds; {job.time} hours are {job.time}:00"
    if job.nodes is None and job.ntasks is not None and job.ntasks > 1:
        yield "no --nodes: Slurm spreads the tasks as it likes"
    if job.nodes is not None and job.ntasks is None and job.ntasks_per_node is None:
        yield "one task on each node; --ntasks-per-node gives them more"
