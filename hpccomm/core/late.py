"""The table of all modules that hpccomm imports by a name in text: transports, CUDA, subcommands, features."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

MPI = "hpccomm.mpi:create"
OBJECT_TRANSPORT = "hpccomm.mpi.objects:ObjectTransport"
NCCL = "hpccomm.nccl.backend:NCCLBackend"
NCCL_NEEDS = "hpccomm.cuda.seam:nccl"
GLOO = "hpccomm.gloo.backend:GlooBackend"
GLOO_NEEDS = "hpccomm.gloo:needs"
GPU_RUNTIME = "hpccomm.cuda.seam:runtime"
ON_THE_HOST = "hpccomm.cuda.packing:on_the_host"
REPRODUCIBLE_SUM = "hpccomm.exact.elements:reduce"
GRID_ON = "hpccomm.domains.grids:on_cartesian"
REDISTRIBUTION = "hpccomm.domains.redistribution:checked"
FROM_THE_HOST = "hpccomm.cuda.packing:from_the_host"
SPARSE_SUMS_ON_GPUS = "hpccomm.cuda.sparse:all_reduce"
CUDA_PROVIDER = "hpccomm.cuda.cupy_runtime:Runtime"
NCCL_PROVIDER = "hpccomm.nccl.providers:NCCL"
RUN = "hpccomm.run.command"
INFO = "hpccomm.cli.info"
TRACE = "hpccomm.debug.trace.command"
DEBUG = "hpccomm.debug.command"
TOP = "hpccomm.debug.top"
SLURM = "hpccomm.cli.slurm"
CHECKPOINT = "hpccomm.cli.checkpoint"
BENCH = "hpccomm.bench.command"


def late(name: str) -> Any:
    """Import a module; return the attribute of ``"module:attribute"``, or the module itself.

    >>> late("math:floor")(2.5)
    2
    """
    path, _, attribute = name.partition(":")
    module = importlib.import_module(path)
    return getattr(module, attribute) if attribute else module


def package() -> ModuleType:
    """Return the package hpccomm, from which lower layers read the public functions."""
    return sys.modules["hpccomm"]


def attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package (PEP 562) that imports attributes at their first use.

    `modules` has the submodule that defines each attribute.
    """

    def imported(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{modules[name]}")
        found = vars(sys.modules[package])[name] = getattr(module, name)
        return found

    return imported
