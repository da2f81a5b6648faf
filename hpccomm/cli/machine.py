"""A description of the machine and its libraries, for comparing results: no host names, no paths."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
from datetime import UTC, datetime
from typing import Any

from .. import ProcessGroup, __version__
from ..api import ranks


def machine(group: ProcessGroup, contenders: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a description of the machine, the libraries and the job; collective."""
    from mpi4py import MPI

    has_torch = {"gloo", "torch", "torch-gloo", "torch-hpccomm"} & set(contenders)
    versions = {}
    for package in ("numpy", "mpi4py", *(["torch"] if has_torch else [])):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "hpccomm": __version__,
        **versions,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "mpi": mpi_library(MPI.Get_library_version()),
        "mpi_standard": ".".join(map(str, MPI.Get_version())),
        "ranks": group.size,
        "nodes": ranks.get_node_count(group),
        "cpus_per_rank": len(os.sched_getaffinity(0)),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "not set"),
    }


def mpi_library(version: str) -> str:
    """Return the MPI's name and version from MPI_Get_library_version's text, which may name the build host."""
    first = re.split(r"[\n,\0]", version.strip())[0]
    return re.sub(r"\s+", " ", first.replace(" Version:", "")).strip()


def cpu_model() -> str:
    """Return the processor's name."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(("model name", "Model", "cpu\t")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def one_line(facts: dict[str, Any]) -> str:
    """Return the description as one line, for the head of a table."""
    nodes, count = facts["nodes"], facts["ranks"]
    parts = [f"hpccomm {facts['hpccomm']}", f"{count} rank{'s' * (count != 1)} on {nodes} node{'s' * (nodes != 1)}"]
    parts.append(facts["mpi"])
    parts += [f"{name} {facts[name]}" for name in ("mpi4py", "numpy", "torch", "cupy", "nccl") if name in facts]
    parts += [facts["gpu"]] if "gpu" in facts else []
    binding = f"{facts['cpus_per_rank']} CPUs for rank 0, OMP_NUM_THREADS {facts['omp_num_threads']}"
    return ", ".join([*parts, f"{facts['cpu']} ({facts['cores']} cores; {binding})"])


def if_busy(cores: int) -> str:
    """Return a further line for the head of a table if far more programs want to run than this machine has cores."""
    load = os.getloadavg()[0]
    if load <= 2 * cores:
        return ""
    return f"\n# load average {load:.0f} on {cores} cores: other programs share them, so ratios may be wrong"
