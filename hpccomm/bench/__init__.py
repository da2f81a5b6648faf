"""``hpccomm bench``: the cost of operations on this machine, beside the same work done by other libraries.

Modules:

=================== ========================================================================
registry            Benchmark, and the decorator that adds one
operations          the benchmarks: the arrays of each, and NumPy's answer
contenders          the same work by hpccomm, by raw mpi4py and NCCL, by torch, by CuPy
measure             interleaved timing, the maximum over the ranks, the number of iterations
gpu                 arrays on GPUs, through the seam
session             the benchmarks of one command, one after the other; checks
report, plot        the results as rows, tables, CSV, JSON and pictures
studies.overhead    time that the Python layers add to calls and messages, in ns
studies.gpu_overhead  ... to NCCL's calls
studies.halo        a step of halo exchange, beside what programs write by hand
studies.redistribute  a change of layouts, likewise
studies.sparse      an exchange with ranks that do not know of it, likewise
studies.accelerate  mpi4py's reductions under `hpccomm run --accelerate`, beside mpi4py
studies.beside      the table of those four
studies.overlap     the share of an asynchronous operation that hides behind computing
studies.startup     time that the start of a program takes
studies.tune        the table of tuning: sizes at which an operation changes its algorithm
command             the command line
=================== ========================================================================
"""

from .registry import BENCHMARKS, Arrays, Benchmark, Case, benchmark

__all__ = ["BENCHMARKS", "Arrays", "Benchmark", "Case", "benchmark"]
