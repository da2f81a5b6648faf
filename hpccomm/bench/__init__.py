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
studies.pairs       latency and bandwidth between every two ranks
studies.tune        the table of tuning: sizes at which an operation changes its algorithm
command             the command line; that of the folder benchmarks of the repository uses a part of it
=================== ========================================================================
"""

from .registry import BENCHMARKS, Arrays, Benchmark, Case, benchmark

__all__ = ["BENCHMARKS", "Arrays", "Benchmark", "Case", "benchmark"]
