"""mpi4py's own tests on GPU arrays over NCCL (python -m tests.gpu.mpi4pys_own FOLDER FILES, on any number of ranks).

`MPI.COMM_WORLD` and `MPI.COMM_SELF` are communicators of hpccomm.mpi4py. FOLDER is the `test` of mpi4py's sources. The
outcome of each test on the rank r is a line in FILES.r; the tests in `DIFFERENT` are expected not to pass.
"""

from __future__ import annotations

import sys
import unittest
from typing import Any

MODULES = ("test_cco_buf", "test_cco_nb_buf", "test_cco_pr_buf", "test_cco_vec", "test_cco_nb_vec", "test_p2p_buf")
OWN_DATATYPES = "A datatype that the program has made is refused: hpccomm sees its elements as those of an array."
ALLTOALLW = "Alltoallw is refused unless the MPI library is CUDA-aware: each of its parts has a datatype."
DIFFERENT = {
    "testBcastTypeIndexed": OWN_DATATYPES,
    "testAlltoallw": ALLTOALLW,
    "testAlltoallw2": ALLTOALLW,
}
LONGER = "The receive's array is longer than the message; over NCCL a message fills it."
MODES = "Ssend, Bsend, Rsend and their other forms are refused on the sender, whose partner would wait."
NOT_RUN = {  # they would wait forever
    "testSendrecv": LONGER,
    "testISendrecv": LONGER,
    "testSendRecv": MODES,
    "testPersistent": f"{LONGER} {MODES} And after Wait a persistent request of GPU arrays equals MPI.REQUEST_NULL.",
}


class Loader(unittest.TestLoader):
    """Finds all tests but those that would wait."""

    def getTestCaseNames(self, testCaseClass: type[unittest.TestCase]) -> list[str]:
        """Return their names."""
        return [name for name in super().getTestCaseNames(testCaseClass) if name not in NOT_RUN]


def array_class() -> Any:
    """Return the arrays of the tests: those of mpi4py's tests for NumPy, of the dtypes that CuPy has, on a GPU."""
    import cupy
    from arrayimpl import ArrayNumPy

    class ArrayOnGPU(ArrayNumPy):  # type: ignore[misc]
        backend = "a GPU"
        TypeMap = {code: datatype for code, datatype in ArrayNumPy.TypeMap.items() if code not in "gG"}

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.array = cupy.asarray(self.array)

    return ArrayOnGPU


def main() -> None:
    """Run them; status 1 where the stand-in has seen a race."""
    folder, files = sys.argv[1:]
    sys.path.insert(0, folder)
    from mpi4py import MPI

    from hpccomm import mpi4py as hm

    from ..foreign.mpi4py_suite import Outcomes
    from . import gpus

    if not gpus.is_real():
        from .stand_in import MACHINE  # which keeps the MPI.COMM_WORLD that it finds
    gpus.use_own()
    MPI.COMM_WORLD, MPI.COMM_SELF = (
        hm.Comm(comm.Dup(), config="cpu:mpi,cuda:nccl") for comm in (MPI.COMM_WORLD, MPI.COMM_SELF)
    )
    import arrayimpl

    arrayimpl.ArrayBackends[:] = [array_class()]
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
        comm.Bcast(arrayimpl.ArrayBackends[0](0, "i", 1).as_mpi())  # which connects: a message alone can't
    with open(f"{files}.{MPI.COMM_WORLD.Get_rank()}", "w", encoding="utf-8") as Outcomes.file:
        unittest.TextTestRunner(resultclass=Outcomes, verbosity=0).run(Loader().loadTestsFromNames(MODULES))
    MPI.COMM_WORLD.Free()
    MPI.COMM_SELF.Free()
    if not gpus.is_real() and MACHINE.races:
        sys.exit("\n".join(MACHINE.races))


if __name__ == "__main__":
    main()
