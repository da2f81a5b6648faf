"""The CPUs, threads and GPUs that each rank of a job may use, and remarks on bad bindings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..debug.words import ranks_by_value, ranks_in_words

THREADS = "OMP_NUM_THREADS"


class Binding(NamedTuple):
    """The CPUs, threads and GPUs of one rank."""

    host: str
    node: int
    cpus: tuple[int, ...]
    cores: int  # of the node
    threads: str = ""
    gpus: str | None = None  # CUDA_VISIBLE_DEVICES; None: not set

    def __str__(self) -> str:
        bound = f"all {self.cores} CPUs"
        if len(self.cpus) < self.cores:
            numbers = ranks_in_words(self.cpus).partition(" ")[2]  # 0-3, 8
            bound = f"CPUs {numbers} of {self.cores}"
        threads = f"{THREADS}={self.threads}" if self.threads else f"{THREADS} not set"
        gpus = "" if self.gpus is None else f", CUDA_VISIBLE_DEVICES={self.gpus}"
        return f"{self.host}: {bound}, {threads}{gpus}"


def of_this_rank(host: str, node: int, environ: Mapping[str, str] = os.environ) -> Binding:
    """Return the CPUs, threads and GPUs of this process."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    return Binding(host, node, cpus, os.cpu_count() or 1, environ.get(THREADS, ""), environ.get("CUDA_VISIBLE_DEVICES"))


def described(bindings: Sequence[Binding]) -> Iterator[tuple[str, str]]:
    """Yield each distinct binding as a pair of texts: the ranks that have it, and the binding."""
    for binding, ranks in ranks_by_value(enumerate(bindings)).items():
        yield ranks_in_words(ranks), str(binding)


def oddities(bindings: Sequence[Binding]) -> list[str]:
    """Return remarks on bindings that slow a job down, each with options to type."""
    said = []
    for node in sorted({binding.node for binding in bindings}):
        ranks = [rank for rank, binding in enumerate(bindings) if binding.node == node]
        there = [bindings[rank] for rank in ranks]
        usable = {cpu for binding in there for cpu in binding.cpus}
        if len(usable) < len(ranks):
            said.append(
                f"{ranks_in_words(ranks)} share {in_number(len(usable))} of {there[0].host}, and wait for each other: "
                "start fewer, or bind each to CPUs of its own (--bind-to core, srun --cpu-bind=cores)"
            )
        elif len(set(there)) > 1 and len(usable) < sum(len(binding.cpus) for binding in there):
            said.append(
                f"{ranks_in_words(ranks)} of {there[0].host} are bound to CPUs that overlap: --bind-to core, or "
                "srun --cpu-bind=cores"
            )
    for rank, binding in enumerate(bindings):
        if binding.threads.isdigit() and int(binding.threads) > len(binding.cpus):
            said.append(
                f"rank {rank} has {THREADS}={binding.threads}, and may use {in_number(len(binding.cpus))}: its threads "
                "wait for each other; --cpus-per-task of srun, or fewer threads"
            )
            break  # other ranks probably have the same setting
    if len({binding.threads for binding in bindings}) > 1:
        said.append(f"{THREADS} is not the same on all ranks: set it in the batch script, before srun or mpiexec")
    return said


def in_number(cpus: int) -> str:
    """Return ``1 CPU``, ``2 CPUs``."""
    return f"{cpus} CPU{'s' * (cpus != 1)}"
