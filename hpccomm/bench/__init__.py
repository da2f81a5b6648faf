"""``hpccomm bench``: time operations on this machine, and the same work in other libraries.

Modules:

=================== ========================================================================
registry            Benchmark, and the decorator that adds one
operations          the benchmarks: the arrays of each operation, and NumPy's result
contenders          the same work in hpccomm, raw mpi4py and NCCL, torch, and CuPy
measure             interleaved timing, the maximum over the ranks, the number of iterations
gpu                 arrays on GPUs, through the seam
session             runs and checks the benchmarks of one command
report, plot        the results as rows, tables, CSV, JSON and plots
studies.overhead    time that the Python layers add to calls and messages, in ns
studies.gpu_overhead  time that they add to NCCL's calls
studies.pairs       latency and bandwidth between every two ranks
studies.tune        the tuning table: sizes at which an operation changes its algorithm
command             the command line; the repository's folder benchmarks uses a part of it
=================== ========================================================================
"""

from .registry import BENCHMARKS, Arrays, Benchmark, Case, benchmark

__all__ = ["BENCHMARKS", "Arrays", "Benchmark", "Case", "benchmark"]
