"""The measurements of docs/reference/benchmarks.md that ``hpccomm bench`` does not make. They need a clone.

``mpiexec -n 2 python -m benchmarks.halo -b 64 -e 16M -f 16``, in the folder above this one. They measure and print with
:mod:`hpccomm.bench`.

Modules:

============  =============================================================================
halo          a step of halo exchange, compared with hand-written code
redistribute  a change of layouts, compared with hand-written code
sparse        an exchange with ranks that do not expect it, compared with hand-written code
accelerate    mpi4py's reductions under ``hpccomm run --accelerate``, compared with mpi4py
checkpoint    the time that a program is blocked by a checkpoint, and the checkpoint's total time
overlap       the share of an asynchronous operation that is hidden by computing
startup       the start-up time of a program
beside        the tables of the first four
study         the command line of all
============  =============================================================================
"""
