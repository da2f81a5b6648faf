# cython: language_level=3, boundscheck=False, wraparound=False, binding=False, embedsignature=False
"""The compiled extension: the fast path of host arrays, and its Works.

A method does the whole operation if its arguments are the ordinary case. Otherwise it returns without having done
anything, and the operation goes through the checks to `MPIBackend`. Both call the same MPI functions, so ranks with and
without the extension match. The build needs no MPI: the functions come from the library that mpi4py has loaded. Handles
come from ``MPI._handleof`` and are passed as `uintptr_t`: of an int (MPICH) the callee reads the lower half of the
register, of a pointer (Open MPI) all of it (the C ABIs of x86-64 and AArch64).

No Python signal handler runs in here, so each operation that begins also ends and is noted.
"""

import threading

from hpccomm.errors import DistBackendError, on_rank

include "declarations.pxi"
include "mpi.pxi"
include "arrays.pxi"
include "ring.pxi"
include "path.pxi"
include "node.pxi"
include "trials.pxi"
include "collectives.pxi"
include "lists.pxi"
include "sparse.pxi"
include "messages.pxi"
include "works.pxi"
include "halves.pxi"
include "tensors.pxi"
include "gpu.pxi"
include "gpu_packing.pxi"
include "gpu_path.pxi"
include "gpu_works.pxi"
