"""mpi4py's API over hpccomm's transports: GPU arrays go to NCCL, large reductions through the node's memory.

>>> from mpi4py import MPI
>>> from hpccomm import mpi4py as hm
>>> comm = hm.Comm(MPI.COMM_SELF.Dup())
>>> comm.Free()
"""

from .communicator import Comm

__all__ = ["Comm"]
