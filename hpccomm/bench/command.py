"""The command line of ``hpccomm bench``.

It has no progress bar: mpiexec forwards stdout and stderr independently, so waiting rows would get lost by Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import hpccomm as hc

from ..cli import machine
from ..cli.main import is_first_process, let_the_first_process_speak, nearest
from ..process.numbers import number, positive, seconds
from ..process.tuning import as_json
from . import gpu, plot, registry, report
from .contenders import CONTENDERS, GPU_CONTENDERS, OF_DEVICE
from .measure import Plan
from .registry import UFUNCS, Benchmark
from .report import Row

KINDS = {"collectives": "collective", "coalesced": "coalesced", "messages": "message"}
PAIRS = "Latency and bandwidth between every two ranks; slow pairs are named. Not together with others."
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
AGAINST = {"cpu": ["mpi4py"], "cuda": ["cuda:mpi", "nccl", "cupyx", "torch"]}  # by default
GPU_BATCH = 2e-3  # seconds of a batch: waiting for the GPU takes a negligible part of it
OK, WRONG, MISUSED = 0, 1, 2

DESCRIPTION = """\
Measure operations against mpi4py, CuPy's NCCL and torch, on all ranks of a job.
The contenders take turns within each size; a ratio below 1 means that hpccomm is faster.
On GPU arrays, time is until the GPU is done, host until the calls return.
"""
EXAMPLES = """\
examples:
  mpiexec -n 4 hpccomm bench all_reduce -b 8 -e 64M
  mpiexec -n 4 hpccomm bench collectives --check --json result.json
  mpiexec -n 4 hpccomm bench --device cuda
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("operations", nargs="*", metavar="OPERATION", help="default: all_reduce; also collectives, coalesced, "
        "messages, all; --list shows them")  # fmt: skip
    add("--list", action="store_true", help="show what can be measured, and end")
    add_sizes(parser)
    add_amounts(parser)
    add = parser.add_argument_group("what").add_argument
    add("-d", "--dtype", type=dtype, default="float32", metavar="NAME", help="default: float32")
    add("-o", "--op", choices=list(UFUNCS), default="sum", help="default: sum")
    add("--device", choices=list(AGAINST), default="cpu", help="where the arrays are (default: cpu); cuda: on each "
        "rank's GPU")  # fmt: skip
    add("-c", "--check", action="store_true", help="compare each result with NumPy's before it is timed; "
        "exit status 1 if one differs")  # fmt: skip
    add("--async", dest="async_op", action="store_true", help="start, and wait")
    add("--against", type=contenders, metavar="NAMES",
        help=f"{', '.join(CONTENDERS)}, with commas; or none (default: mpi4py). With --device cuda: "
        f"{', '.join(GPU_CONTENDERS)} (default: {','.join(AGAINST['cuda'])})")  # fmt: skip
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="FILE", help="write everything there as well")
    add("--csv", action="store_true", help="print CSV instead of tables, one line for each contender")
    add("--plot", metavar="FILE.png", help="draw time and bandwidth against size")
    add = parser.add_argument_group("other measurements").add_argument
    add("--overhead", action="store_true", help="what the Python layers add to each call, in ns; on 1 rank or 2. "
        "With --device cuda: the host's time beside CuPy's own call of NCCL")  # fmt: skip
    add("--tune", metavar="FILE", help="measure from which sizes on an operation is done in which way, "
        "and write what HPCCOMM_TUNING=FILE reads")  # fmt: skip


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sizes_of`."""
    add = parser.add_argument_group("sizes, in bytes; 64K, 4M, 1G are understood").add_argument
    add("-b", "--begin", type=size, default=8, metavar="SIZE", help="smallest (default: 8)")
    add("-e", "--end", type=size, default=64 << 20, metavar="SIZE", help="largest (default: 64M)")
    add("-f", "--factor", type=factor, default=4, metavar="N", help="between sizes (default: 4)")


def add_amounts(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan_of`."""
    add = parser.add_argument_group("how much").add_argument
    add("-n", "--iterations", type=positive, metavar="N", help="default: what the budget allows, 10 to 1000")
    add("-w", "--warmup", type=count, default=5, metavar="N", help="calls before timing (default: 5)")
    add("--budget", type=seconds, default=0.5, metavar="SECONDS", help="for each size (default: 0.5)")
    add("--batch", type=positive, metavar="N", help="calls timed together; default: as many as last 100 us")


def run(arguments: argparse.Namespace) -> int:
    """Run the requested measurements; return the exit status, the same on every rank."""
    benchmarks = registry.load()
    if arguments.list:
        return say("\n".join(_listed(benchmarks.values())))
    try:
        names = chosen(arguments.operations, benchmarks, arguments.device)
        problem = _problem(arguments)
    except ValueError as error:
        problem = str(error)
    if problem is not None:
        return say(f"hpccomm bench: {problem}", MISUSED)

    if arguments.against is None:
        arguments.against = AGAINST[arguments.device]
    study = "pairs" if names == ["pairs"] else _study(arguments)
    try:
        world = hc.init_process_group()
    except hc.DistBackendError as error:  # there is no MPI
        return say(f"hpccomm bench: {error}", MISUSED)
    with world:
        problem = _problem_of_job(arguments, world)
        if problem is not None:
            return say(f"hpccomm bench: {problem}", MISUSED)
        try:
            if study is not None:
                return _run_study(study, arguments, world)
            return _benchmarks(arguments, world, names)
        except KeyboardInterrupt:  # no traceback below the rows measured so far
            sys.exit(128 + signal.SIGINT)


# -- chosen measurements, and mistakes in options ------------------------------------------------------------


def chosen(names: Sequence[str], benchmarks: dict[str, Benchmark], device: str = "cpu") -> list[str]:
    """Return the names of the requested benchmarks, each once, in the order of the command line."""
    found: list[str] = []
    for name in names or ["all_reduce"]:
        if name == "all":
            found += benchmarks
        elif name in KINDS:
            found += [each.name for each in benchmarks.values() if each.kind == KINDS[name]]
        elif name == "pairs" and len(names) > 1:
            raise ValueError("pairs is measured alone: hpccomm bench pairs")
        elif name == "pairs" and device != "cpu":
            raise ValueError(f"pairs is not measured on GPU arrays; leave --device {device} out")
        elif name in benchmarks or name == "pairs":
            found.append(name)
        else:
            hint = nearest(name, [*benchmarks, *KINDS, "all", "pairs"])
            raise ValueError(f"there is no operation {name!r}{hint or '; hpccomm bench --list shows what there is'}")
    return list(dict.fromkeys(found))


def sizes_of(begin: int, end: int, step: int) -> list[int]:
    """Return begin, begin * step ..., and end."""
    if not 0 < begin <= end:
        raise ValueError(f"the sizes begin with {begin} and end with {end}; expected 0 < begin <= end")
    found = [begin]
    while found[-1] * step <= end:
        found.append(found[-1] * step)
    return found if found[-1] == end else [*found, end]


def _problem(arguments: argparse.Namespace) -> str | None:
    """Return the first mistake in the options that can be found without MPI, or None."""
    sizes_of(arguments.begin, arguments.end, arguments.factor)
    device = arguments.device
    for name in arguments.against or ():
        if name not in OF_DEVICE[device]:
            return f"--against {name}: with --device {device} there are {', '.join(OF_DEVICE[device])}"
    if device != "cpu" and arguments.tune:
        return f"--tune is for arrays of the host; leave --device {device} out"
    kind = "f" if arguments.dtype.name == "bfloat16" else arguments.dtype.kind
    if kind not in getattr(getattr(hc.ReduceOp, arguments.op.upper()), "kinds", kind):
        return f"--op {arguments.op} has no meaning for {arguments.dtype}"
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install 'hpccomm[cli]'"
    if arguments.plot and _study(arguments) is not None:
        return "--plot draws measured operations, not --overhead or --tune"
    return None


def _problem_of_job(arguments: argparse.Namespace, world: hc.ProcessGroup) -> str | None:
    """Take the GPUs; return the reason why this job can't run the measurements, the same on every rank, or None."""
    if arguments.overhead and world.size > 2:
        return f"--overhead is measured on 1 rank (calls) or 2 (messages); this job has {world.size}"
    if arguments.tune and world.size == 1:
        return "--tune needs at least 2 ranks"
    if "pairs" in arguments.operations and world.size == 1:
        return "pairs needs at least 2 ranks: mpiexec -n 2 hpccomm bench pairs"
    problem = plot.problem_of(arguments.plot) if arguments.plot and world.rank == 0 else None
    if world.rank == 0 and problem is None:  # fail now instead of after the measurements
        for file in filter(None, (arguments.json, arguments.plot, arguments.tune)):
            try:
                with open(file, "ab"):
                    pass
            except OSError as error:
                problem = f"{file}: {error.strerror}"
    assert world.comm is not None
    agreed: str | None = world.comm.bcast(problem)
    if agreed is None and arguments.device == "cuda" and (why := gpu.take(world.comm, world.ranks)):
        return f"--device cuda: {why}\nhpccomm info --gpu shows what is missing. Without a GPU: --device cpu"
    return agreed


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return the plan given by the options."""
    return Plan(arguments.iterations, arguments.warmup, arguments.budget, arguments.batch)


# -- benchmarks --------------------------------------------------------------------------------------------------


def _benchmarks(arguments: argparse.Namespace, world: hc.ProcessGroup, names: Sequence[str]) -> int:
    from .session import Session

    on_gpu, check, async_op = arguments.device == "cuda", arguments.check, arguments.async_op
    benchmarks = [registry.BENCHMARKS[name] for name in names]
    sizes = sizes_of(arguments.begin, arguments.end, arguments.factor)
    rows: list[Row] = []
    plan = replace(plan_of(arguments), batch_seconds=GPU_BATCH) if on_gpu else plan_of(arguments)
    with (
        gpu.own_stream() if on_gpu else contextlib.nullcontext(),
        Session(world, arguments.against, plan, arguments.device) as session,
    ):
        printer = Printer(world.rank == 0, arguments.csv)
        facts = machine.machine(world, tuple(session.contenders)) | (gpu.facts() if on_gpu else {})
        how = f"{arguments.dtype}, {'async' if async_op else 'blocking'}"
        what = "time: median of the iterations, each on the slowest rank; ratio: hpccomm / the other"
        if on_gpu:
            what += "\n# by the host's clock; time: until the GPU is done; host: until the calls have returned"
        printer.remark(f"# {machine.one_line(facts)}\n# {how}; {what}{machine.if_busy(facts['cores'])}")
        if world.size == 1:
            printer.remark(
                "# one rank sends nothing: these are the costs of calls. Communication: mpiexec -n 2 hpccomm bench"
            )
        if arguments.csv:
            printer.line(report.csv_line(None))
        runnable = [each for each in benchmarks if each.least_ranks <= world.size]
        for benchmark in runnable:
            table = report.Table(benchmark, [*session.contenders, *session.missing], check, on_gpu)
            printer.remark("\n" + table.head())
            for of_size in session.run(benchmark, sizes, arguments.dtype, arguments.op, check=check, async_op=async_op):
                rows += of_size
                printer.rows(table, of_size)
            printer.remark(table.summary())
        for benchmark in benchmarks:
            if benchmark not in runnable:
                printer.remark(f"# {benchmark.name}: needs at least {benchmark.least_ranks} ranks")
    if world.rank == 0:
        if arguments.json:
            _write_json(arguments, facts, rows)
        if arguments.plot:
            plot.plot(rows, arguments.plot, machine.one_line(facts))
    return WRONG if any(each.wrong for each in rows) else OK


# -- the other measurements: each returns its text and its part of the JSON ------------------------------------------


def _overhead(arguments: argparse.Namespace, world: hc.ProcessGroup, facts: dict[str, Any]) -> tuple[str, Any]:
    if arguments.device == "cuda":
        from .studies import gpu_overhead

        usual = gpu_overhead.PLAN
        plan = Plan(arguments.iterations or usual.iterations, arguments.warmup, batch=arguments.batch or usual.batch)
        added = gpu_overhead.overheads(world, plan)
        return gpu_overhead.table(added, world.size), [vars(each) | {"added_ns": each.added_ns} for each in added]
    from .studies import overhead

    usual = overhead.PLANS[world.size]
    found = overhead.overheads(
        world, replace(usual, iterations=arguments.iterations or usual.iterations, batch=arguments.batch)
    )
    look = overhead.watchdog_look()
    documents = [vars(each) | {name: getattr(each, name) for name in overhead.DERIVED} for each in found]
    documents.append({"operation": "a look of the watchdog", "seconds": look})
    return overhead.table(found, world.size, look), documents


def _tune(arguments: argparse.Namespace, world: hc.ProcessGroup, facts: dict[str, Any]) -> tuple[str, Any]:
    from .studies import tune

    table, text = tune.tune(world, plan_of(arguments))
    if world.rank == 0:
        Path(arguments.tune).write_text(as_json(table, facts), encoding="utf-8")
    entries = "\n".join(f"{name:<22} {value}" for name, value in table._asdict().items())
    how = f"export HPCCOMM_TUNING={shlex.quote(arguments.tune)}"
    return f"{text}\n\n{entries}\n\nTo use this table: {how}", table._asdict()


def _pairs(arguments: argparse.Namespace, world: hc.ProcessGroup, facts: dict[str, Any]) -> tuple[str, Any]:
    from .studies import pairs

    found = pairs.measured(world)
    if world.rank == 0 and arguments.plot:
        pairs.plot(found, world.size, arguments.plot)
    return pairs.text(found, world.size), [vars(pair) for pair in found]


STUDIES: dict[str, Callable[..., tuple[str, Any]]] = {  # by option, or by word
    "overhead": _overhead,
    "tune": _tune,
    "pairs": _pairs,
}


def _study(arguments: argparse.Namespace) -> str | None:
    """Return the name of the study that an option requests, or None."""
    return next((name for name in STUDIES if getattr(arguments, name, False)), None)


def _run_study(name: str, arguments: argparse.Namespace, world: hc.ProcessGroup) -> int:
    facts = machine.machine(world) | (gpu.facts() if arguments.device == "cuda" else {})
    head = f"# {machine.one_line(facts)}{machine.if_busy(facts['cores'])}"
    text, document = STUDIES[name](arguments, world, facts)
    if world.rank == 0:
        print(f"{head}\n\n{text}")
        if arguments.json:
            _write_json(arguments, facts, [], **{name: document})
    return OK


# -- output ----------------------------------------------------------------------------------------------------


class Printer:
    """Print tables or CSV line by line on rank 0, and nothing on other ranks."""

    def __init__(self, active: bool, csv: bool) -> None:
        self._active = active
        self._csv = csv

    def remark(self, text: str) -> None:
        """Print `text`, but not into CSV."""
        if not self._csv and text:
            self.line(text)

    def line(self, text: str) -> None:
        """Print and flush `text`, so that it is not lost if the job is ended."""
        if self._active:
            print(text, flush=True)

    def rows(self, table: report.Table, rows: Sequence[Row]) -> None:
        """Print the rows of one size."""
        text = table.line(rows)  # the table stores the rows for its summary
        for each in map(report.csv_line, rows) if self._csv else [text]:
            self.line(each)


def _listed(benchmarks: Any) -> list[str]:
    lines = []
    for word, kind in KINDS.items():
        lines += [f"{word}:", *(f"  {each.name:<32} {each.summary}" for each in benchmarks if each.kind == kind)]
    return [*lines, "others:", f"  {'pairs':<32} {PAIRS}"]


def _write_json(arguments: argparse.Namespace, facts: dict[str, Any], rows: Sequence[Row], **more: Any) -> None:
    """Write the results, and the options except file names, to the file of ``--json``."""
    kept = ("operations", "begin", "end", "factor", "iterations", "warmup", "budget", "batch", "op", "device", "check",
            "async_op", "against")  # fmt: skip
    options = {name: getattr(arguments, name) for name in kept} | {"dtype": arguments.dtype.name}
    Path(arguments.json).write_text(report.as_json(facts, options, rows, **more), encoding="utf-8")


def say(text: str, status: int = OK) -> int:
    """Print `text` on one rank, to stderr if `status` is not 0; return `status`."""
    if is_first_process():
        print(text, file=sys.stderr if status else sys.stdout, flush=True)
    elif status:
        let_the_first_process_speak()
    return status


# -- types of options; argparse reports their errors -------------------------------------------------------------


def size(text: str) -> int:
    """Return a number of bytes for a text such as 8, 64K, 4M or 1GB."""
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = number[-1:] if number[-1:] in ("k", "m", "g") else ""
    with contextlib.suppress(ValueError, OverflowError):
        return int(float(number[: len(number) - len(unit)]) * UNITS[unit])
    raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 8, 64K, 4M or 1G")


def dtype(text: str) -> np.dtype[Any]:
    """Return the numeric dtype of this name."""
    try:
        found = np.dtype(importlib.import_module("ml_dtypes").bfloat16 if text == "bfloat16" else text)
    except ImportError:
        raise argparse.ArgumentTypeError("bfloat16 needs ml_dtypes: pip install ml_dtypes") from None
    except TypeError:
        raise argparse.ArgumentTypeError(f"NumPy knows no dtype {text!r}") from None
    if found.kind not in "iufc" and text != "bfloat16":
        raise argparse.ArgumentTypeError(f"{text} is not a numeric dtype")
    return found


def contenders(text: str) -> list[str]:
    """Return the contenders listed in `text`."""
    names = [name.strip() for name in text.split(",") if name.strip() not in ("", "none", "hpccomm")]
    known = CONTENDERS | GPU_CONTENDERS
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"no contender is called {name!r}; there are {', '.join(known)}")
    return names


count = number("an integer of 0 or more", int, lambda found: found >= 0)
factor = number("an integer of 2 or more", int, lambda found: found > 1)
