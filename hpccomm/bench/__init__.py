"""``hpccomm bench``: what operations cost, here, beside the same work done by others.

Of each module one idea:

=================== ========================================================================
registry            what a benchmark is, and the decorator that adds one
operations          the benchmarks: the arrays of each, and NumPy's answer
contenders          the same work by hpccomm, by raw mpi4py and NCCL, by torch, by CuPy
measure             interleaved timing, the maximum over the ranks, how many iterations
gpu                 arrays on GPUs, through the seam
session             the benchmarks of one command, one after the other; checks
rows, report, plot  the results, as a table, CSV, JSON and pictures
studies.overhead    what the Python layers add to calls and messages, in ns
studies.gpu_overhead  ... to NCCL's calls
studies.overlap     the share of an asynchronous operation that hides behind computing
studies.startup     how long the start of a program takes
studies.tune        from which sizes on an operation is done in which way
command             the command line
=================== ========================================================================
"""

from .registry import BENCHMARKS, Arrays, Benchmark, Case, benchmark

__all__ = ["BENCHMARKS", "Arrays", "Benchmark", "Case", "benchmark"]
