"""mpi4py's API over hpccomm's transports: GPU arrays use NCCL, large reductions use the node's shared memory.

>>> from mpi4py import MPI
>>> from hpccomm import mpi4py as hm
>>> comm = hm.Comm(MPI.COMM_SELF.Dup())
>>> comm.Free()
"""

from .communicator import Comm

__all__ = ["Comm"]
