"""The measurements of docs/benchmarks.md that ``hpccomm bench`` does not make; in a clone of the repository.

``mpiexec -n 2 python -m benchmarks.halo -b 64 -e 16M -f 16``, in the folder above this one. How they measure and print
is :mod:`hpccomm.bench`'s.

Modules:

============  =============================================================================
halo          a step of halo exchange, beside what programs write by hand
redistribute  a change of layouts, beside what programs write by hand
sparse        an exchange with ranks that do not know of it, beside what programs write by hand
accelerate    mpi4py's reductions under ``hpccomm run --accelerate``, beside mpi4py
checkpoint    how long a program stands still for a checkpoint, and how long it takes
overlap       the share of an asynchronous operation that hides behind computing
startup       what the start of a program takes
beside        the table of the first four
study         the command line of all
============  =============================================================================
"""
