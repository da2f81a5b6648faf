# cython: language_level=3, boundscheck=False, wraparound=False, binding=False, embedsignature=False
"""The compiled extension: the fast path of host arrays, and its Works.

A method does the whole operation if its arguments are the ordinary case; for whatever is not it returns without having
done anything, and the operation goes through the checks to `MPIBackend`. Both call the same functions of MPI: a rank
with it meets one without. No MPI is needed to build it. The functions come from the library that mpi4py has
loaded; a handle is what ``MPI._handleof`` gives, passed as a `uintptr_t`: where it is an int (MPICH) the callee looks
at the lower half of the register, where it is a pointer (Open MPI) at all of it (the C ABIs of x86-64 and AArch64).

No signal handler of Python's runs in here: what is begun is ended and noted.
"""

include "declarations.pxi"
include "mpi.pxi"
include "arrays.pxi"
include "ring.pxi"
include "path.pxi"
include "node.pxi"
include "collectives.pxi"
include "lists.pxi"
include "sparse.pxi"
include "messages.pxi"
include "works.pxi"
include "halves.pxi"
include "tensors.pxi"
