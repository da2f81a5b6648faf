"""Tests of others over hpccomm: halos of PyLops-MPI by `halo_exchange`, transfers of mpi4py-fft by `redistribute`.

python -m tests.foreign.exchanges BIN [RANKS...]: in the virtual environment of `make test-foreign`. This file is a
plugin of pytest, too: it replaces the functions that their tests call. Only `pencil.py` of mpi4py-fft is used: no FFTW.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..launch import ROOT

TESTS = {"pylops_mpi": "test_halo.py", "mpi4py_fft": "test_pencil.py"}
SEEN: Counter[str] = Counter()  # hpccomm's operations


def main() -> None:
    """Run the tests, and print a line for each; status 1 where one fails, or hpccomm has done nothing."""
    from .suite import Job

    job = Job(Path(sys.argv[1]).absolute(), ROOT / "build" / "foreign")
    fails = False
    for package, file in TESTS.items():
        tests = next(job.sources.glob(f"{package}-*/tests/{file}"))
        for ranks in map(int, sys.argv[2:] or ("2", "3", "4")):
            options = ["--with-mpi", "-q", "--color=no", "--noconftest", "-p", "no:cacheprovider"]
            with tempfile.TemporaryDirectory() as folder:
                plugin = "-p", "tests.foreign.exchanges"
                ended = job.run(ranks, "-m", "pytest", *options, *plugin, tests, watched=False, folder=folder)
            said = re.findall(r"\d+ passed|by hpccomm: .*", ended.stdout)
            is_right = ended.returncode == 0 and len(said) == 2
            word = "ok   " if is_right else "WRONG"
            print(word, tests.parent.parent.name, f"on {ranks} ranks:", ", ".join(said[::-1]), flush=True)
            if not is_right:
                print(ended.stdout, ended.stderr, file=sys.stderr)
            fails |= not is_right
    sys.exit(fails)


def pytest_configure(config: Any) -> None:
    """Replace the functions that the tests call."""
    folder = Path(config.args[0]).parent.parent
    if folder.name.startswith("pylops_mpi"):
        replace_halos()
    else:
        replace_transfers(folder / "mpi4py_fft")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the number of hpccomm's operations."""
    if SEEN:
        terminalreporter.write_line(f"by hpccomm: {dict(SEEN)}")


def replace_halos() -> None:
    """Let PyLops-MPI's MPIHalo fill all ghosts at once, where it goes from axis to axis."""
    from mpi4py import MPI
    from pylops_mpi.basicoperators.Halo import MPIHalo

    import hpccomm as hc

    def exchange(self: Any, ncp: Any, arr: Any, axis: int, before: int, after: int, engine: str) -> None:
        if axis > 0:
            return
        mine = np.reshape(self.halo, (-1, 2))
        widths = np.empty_like(mine)
        self.cart_comm.Allreduce(mine, widths, MPI.MAX)  # it has none at a border, where hpccomm leaves them alone
        starts = widths[:, 0] - mine[:, 0]
        where = tuple(slice(start, start + size) for start, size in zip(starts, arr.shape))
        block = np.zeros(np.add(self.local_dims, widths.sum(axis=1)), arr.dtype)
        block[where] = arr
        with hc.ProcessGroup.from_comm(self.cart_comm) as grid:
            hc.halo_exchange(block, grid, widths)
        arr[...] = block[where]
        SEEN["halo_exchange"] += 1

    MPIHalo._exchange_along_axis = exchange


def replace_transfers(folder: Path) -> None:
    """Let mpi4py-fft's pencils have transfers by hpccomm, with the results of its own."""
    from mpi4py import MPI

    package = ModuleType("mpi4py_fft")
    package.__path__ = [str(folder)]
    sys.modules["mpi4py_fft"] = package
    from mpi4py_fft import pencil

    import hpccomm as hc

    groups: dict[tuple[int, ...], hc.ProcessGroup] = {}  # by their ranks in the world

    def group_of(comm: Any) -> hc.ProcessGroup:
        own, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
        ranks = tuple(MPI.Group.Translate_ranks(own, range(own.size), world))
        if ranks not in groups:
            groups[ranks] = hc.ProcessGroup.from_comm(comm)
        return groups[ranks]

    class Transfer(pencil.Transfer):  # type: ignore[misc]
        def __init__(self, comm: Any, shape: Any, *others: Any) -> None:
            super().__init__(comm, shape, *others)
            self.group = group_of(comm)
            self.box_a, self.box_b = (
                tuple(slice(0, n) if axis != cut else self.part(n) for axis, n in enumerate(shape))
                for cut in (self.axisB, self.axisA)
            )

        def part(self, n: int) -> slice:
            size, start = pencil._blockdist(n, self.group.size, self.group.rank)
            return slice(start, start + size)

        def forward(self, arrayA: Any, arrayB: Any) -> None:
            expected = np.empty_like(arrayB)
            super().forward(arrayA, expected)
            with hc.redistribute_init(arrayB, arrayA, self.box_b, self.box_a, group=self.group) as work:
                work.start()
                work.wait()
            np.testing.assert_array_equal(arrayB, expected)
            SEEN["redistribute_init"] += 1

        def backward(self, arrayB: Any, arrayA: Any) -> None:
            expected = np.empty_like(arrayA)
            super().backward(arrayB, expected)
            hc.redistribute(arrayA, arrayB, self.box_a, self.box_b, group=self.group)
            np.testing.assert_array_equal(arrayA, expected)
            SEEN["redistribute"] += 1

    pencil.Transfer = Transfer


if __name__ == "__main__":
    main()
