"""``hpccomm info``: list this machine's libraries and devices, with a reason and a remedy for each that is missing.

It initialises MPI; only ``--gpu`` makes it use a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from .. import __version__, native
from ..errors import DistBackendError
from ..process.alone import refusal, warning
from ..process.environment import Placement, Seen, disagreements, placement
from ..process.host_list import fold
from . import binding
from .main import is_first_process
from .tables import print_table

# A name, its value in words ("": not printed), and its value in JSON (default: the words; None: not in JSON).
Fact = tuple[str, str] | tuple[str, str, Any]
INSTALL_CUPY = "pip install 'hpccomm[cuda13]' (or [cuda12])"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`."""
    parser.description = "Show MPI, launcher and GPU configuration, and the reason for each part that is missing."
    parser.epilog = "examples:\n  hpccomm info --gpu\n  mpiexec -n 4 hpccomm info --json"
    parser.add_argument("--gpu", action="store_true", help="look at the GPUs as well, which makes a CUDA context")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the facts on the first process of a job; return 0."""
    facts = list(collect(arguments.gpu))
    if is_first_process():
        if arguments.json:
            print(json.dumps({name: said[-1] for name, *said in facts if said[-1] is not None}, indent=2))
        else:
            print_table([(f"{name:<15}", said[0]) for name, *said in facts if said[0]])
    return 0


def collect(gpu: bool = False) -> Iterator[Fact]:
    """Yield all facts; collective."""
    yield "hpccomm", __version__
    yield "Python", platform.python_version()
    yield ("C extension", f"no: {native.reason}") if native.fastpath is None else ("C extension", "yes", True)
    yield from ((package, importlib.metadata.version(package)) for package in ("numpy", "mpi4py"))
    yield from _mpi()
    place = placement()
    if place is None:
        yield "launcher", "none: this process was started by hand"
    else:
        yield "launcher", _in_words(place), {**place._asdict(), "launcher": place.launcher.name}
    yield "mpiexec", shutil.which("mpiexec") or "no: there is none on the PATH"
    yield from _cupy(gpu)


def _mpi() -> Iterator[Fact]:
    from ..job.mpi_library import load, path_of_library

    try:
        mpi = load()
    except DistBackendError as error:
        yield "MPI", f"no: {error}"
        return
    from ..job.cuda_aware import cuda_awareness
    from .machine import mpi_library

    levels = {mpi.THREAD_SINGLE: "single", mpi.THREAD_FUNNELED: "funneled", mpi.THREAD_SERIALIZED: "serialized"}
    yield "MPI", mpi_library(mpi.Get_library_version())
    yield "MPI standard", ".".join(map(str, mpi.Get_version()))
    yield "MPI library", path_of_library("libmpi") or "not known: only Linux tells"
    yield from _ranks(mpi)
    yield "thread level", levels.get(mpi.Query_thread(), "multiple")
    try:
        aware, reason = cuda_awareness()
    except ValueError as error:
        aware, reason = False, str(error)
    yield "CUDA-aware MPI", f"{'yes' if aware else 'no'}: {reason}"


def _ranks(mpi: Any) -> Iterator[Fact]:
    from ..job.mpi_library import number_nodes

    comm = mpi.COMM_WORLD
    nodes, _ = number_nodes(comm)
    rank, size = comm.Get_rank(), comm.Get_size()
    local_ranks = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    mine = Seen(rank, size, local_ranks.index(rank), len(local_ranks), placement())
    all_ranks: list[tuple[Seen, str]] = comm.allgather((mine, mpi.Get_processor_name()))
    bindings: list[binding.Binding] = comm.allgather(binding.of_this_rank(mpi.Get_processor_name(), nodes[rank]))
    yield "ranks", str(size), size
    hosts = [host for _, host in all_ranks]
    yield "nodes", describe_nodes(nodes, hosts), [hosts[nodes.index(node)] for node in sorted(set(nodes))]
    library = mpi.Get_library_version()
    differences = disagreements([seen for seen, _ in all_ranks])
    if alone := refusal(size, library):
        yield "placement", f"wrong: {alone}"
    elif alone := warning(size, library):
        yield "placement", alone
    elif differences:
        yield "placement", f"launcher and MPI differ, and hpccomm goes by MPI. {'; '.join(differences)}"
    elif mine.launchers is not None:
        yield "placement", "launcher and MPI agree"
    yield from ((*each, None) for each in binding.described(bindings))
    threads = (int(each.threads) if each.threads.isdigit() else None for each in bindings)
    yield "bindings", "", [{**each._asdict(), "threads": number} for each, number in zip(bindings, threads)]
    odd = binding.oddities(bindings)
    yield from (("odd", each, None) for each in odd)
    yield "odd", "", odd


def describe_nodes(nodes: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the number of nodes, their ranks and their names; `nodes` and `hosts` have one entry for each rank."""
    counts = [nodes.count(node) for node in sorted(set(nodes))]
    names = [hosts[nodes.index(node)] for node in sorted(set(nodes))]
    if len(counts) == 1:
        return f"1: {names[0]}"
    each = f"{counts[0]} rank{'s' * (counts[0] != 1)}"
    if len(set(counts)) > 1:
        each = f"{min(counts)} to {max(counts)} ranks"
    return f"{len(counts)}, {each} each: {fold(names)}"


def _in_words(place: Placement) -> str:
    """Describe the launcher's placement of this process."""
    said = [place.launcher.name]
    for name, number, count in (
        ("rank", place.rank, place.size),
        ("local rank", place.local_rank, place.local_size),
        ("node", place.node_rank, place.node_count),
    ):
        if number is not None:
            said.append(f"{name} {number}" + (f" of {count}" if count is not None else ""))
    if place.node_list:
        said.append(fold(place.node_list))
    return ", ".join(said)


def _cupy(gpu: bool) -> Iterator[Fact]:
    if importlib.util.find_spec("cupy") is None:
        yield "CuPy", f"no: it is not installed; for GPU arrays {INSTALL_CUPY}"
        yield "NCCL", "no: it comes with CuPy"
        yield "GPUs", "not to be seen without CuPy"
        return
    try:
        cupy = importlib.import_module("cupy")
    except Exception as error:  # importing CuPy can raise anything on a broken installation
        yield "CuPy", f"no: it can't be imported: {error}"
        return
    yield "CuPy", cupy.__version__
    yield "NCCL", _nccl()
    if gpu:
        yield _gpus(cupy)
    else:
        yield "GPUs", "not looked at; hpccomm info --gpu does"


def _nccl() -> str:
    from ..cuda import seam
    from ..job.mpi_library import path_of_library

    try:
        nccl = seam.nccl()
        version = nccl.version()  # 22703: 2.27.3 (nccl.h: major * 10000 + minor * 100 + patch, from 2.9 on)
    except Exception as error:  # ImportError says how to install NCCL; a broken library can raise anything
        return f"no: {error}"
    where = path_of_library("libnccl") or path_of_library("librccl")
    number = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return f"{number}, called by {nccl.bindings}" + (f", {where}" if where else "")


def _gpus(cupy: object) -> Fact:
    runtime = cupy.cuda.runtime  # type: ignore[attr-defined]
    try:
        count = runtime.getDeviceCount()
        names = [runtime.getDeviceProperties(device)["name"].decode() for device in range(count)]
    except Exception as error:  # CUDARuntimeError: no driver, no device
        return "GPUs", f"no: {error}"
    return "GPUs", ", ".join(names) or "no: the driver shows none", names
