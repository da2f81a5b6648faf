"""What the results were measured on: enough to compare them, nothing that says where."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
from datetime import datetime, timezone
from typing import Any

from .. import ProcessGroup, __version__, ranks


def machine(group: ProcessGroup, contenders: tuple[str, ...] = ()) -> dict[str, Any]:
    """Describe the machine, the libraries and the job; every rank calls it. No host names, no paths."""
    from mpi4py import MPI

    return {
        **host("mpi4py", *(["torch"] if {"gloo", "torch", "torch-gloo", "torch-hpccomm"} & set(contenders) else [])),
        "mpi": mpi_library(MPI.Get_library_version()),
        "mpi_standard": ".".join(map(str, MPI.Get_version())),
        "ranks": group.size,
        "nodes": ranks.get_node_count(group),
        "cpus_per_rank": len(os.sched_getaffinity(0)),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "not set"),
    }


def host(*packages: str) -> dict[str, Any]:
    """Describe the machine and the libraries, without MPI; of `packages` those that are installed."""
    found = {"numpy": importlib.metadata.version("numpy")}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "hpccomm": __version__,
        **found,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def mpi_library(version: str) -> str:
    """Return the name and version in what MPI_Get_library_version says, which may go on to name the build host."""
    first = re.split(r"[\n,\0]", version.strip())[0]
    return re.sub(r"\s+", " ", first.replace(" Version:", "")).strip()


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(("model name", "Model", "cpu\t")):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return the cores of this node that this job may use."""
    return os.cpu_count() or 1


def one_line(facts: dict[str, Any]) -> str:
    """Return the description as one line, for the head of a table."""
    parts = [f"hpccomm {facts['hpccomm']}"]
    if "ranks" in facts:
        nodes, count = facts["nodes"], facts["ranks"]
        parts += [f"{count} rank{'s' * (count != 1)} on {nodes} node{'s' * (nodes != 1)}", facts["mpi"]]
    parts += [
        f"{package} {facts[package]}" for package in ("mpi4py", "numpy", "torch", "cupy", "nccl") if package in facts
    ]
    parts += [facts["gpu"]] if "gpu" in facts else []
    binding = ""
    if "cpus_per_rank" in facts:
        binding = f"; {facts['cpus_per_rank']} CPUs for rank 0, OMP_NUM_THREADS {facts['omp_num_threads']}"
    return ", ".join([*parts, f"{facts['cpu']} ({facts['cores']} cores{binding})"])
