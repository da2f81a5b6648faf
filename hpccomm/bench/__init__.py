"""``hpccomm bench``: what operations cost, here, beside the same work done by others.

Of each module one idea:

=================== ========================================================================
registry            what a benchmark is, and the decorator that adds one
operations          the benchmarks: the arrays of each, and NumPy's answer
contenders          the same work by hpccomm, by raw mpi4py, by torch's gloo
measure             interleaved timing, the maximum over the ranks, how many iterations
session             the benchmarks of one command, one after the other; checks
rows, report, plot  the results, as a table, CSV, JSON and pictures
machine             what the results were measured on
overhead            what the Python layers add to a call, in ns, on one rank
overlap             the share of an asynchronous operation that hides behind computing
startup             how long the start of a program takes
model, fit, predict an alpha-beta-gamma model: fitted here, and drawn out to 65,536 ranks
command             the command line
=================== ========================================================================
"""

from .registry import BENCHMARKS, Arrays, Benchmark, Case, benchmark

__all__ = ["BENCHMARKS", "Arrays", "Benchmark", "Case", "benchmark"]
