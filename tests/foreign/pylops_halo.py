"""PyLops-MPI's own tests of halos, with `hc.halo_exchange` in the place of its messages.

python -m tests.foreign.pylops_halo BIN [RANKS]...: in the virtual environment of `make test-foreign`. On a rank this
is a plugin of pytest.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..launch import ROOT, clean_environment

done = 0  # exchanges


def main() -> None:
    """Run the tests on these numbers of ranks."""
    place = Path(sys.argv[1]).absolute()
    (suite,) = (ROOT / "build" / "foreign").glob("pylops_mpi-*/tests/test_halo.py")
    plugins = ["-p", __spec__.name, "-p", "no:cacheprovider", "--noconftest"]
    command = [str(place / "python"), "-m", "mpi4py", "-m", "pytest", "--with-mpi", "-q", *plugins, str(suite)]
    runs = [
        subprocess.run(
            [str(ROOT / "tools" / "run-mpi"), str(place), ranks, *command],
            cwd=ROOT,
            env={**clean_environment(), "TIME_LIMIT": "200"},
            check=False,
        )
        for ranks in sys.argv[2:] or ("2", "4")
    ]
    sys.exit(any(run.returncode for run in runs))


def exchange_along_axis(operator: Any, module: Any, array: Any, axis: int, **options: Any) -> None:
    """Exchange along all axes at the first one, as MPIHalo does with one after the other.

    Its blocks have no ghosts at the border; ours have the same on every rank.
    """
    global done
    import hpccomm as hc

    if axis:
        return
    group = hc.ProcessGroup.on(operator.cart_comm)
    own = np.reshape(operator.halo, (-1, 2))
    widths = np.max(group.comm.allgather(own), axis=0)  # type: ignore[union-attr]
    with_all = np.zeros(tuple(operator.local_dims + widths.sum(axis=1)), array.dtype)
    inside = tuple(slice(low, low + size) for (low, _), size in zip(widths, operator.local_dims))
    core = tuple(slice(low, low + size) for (low, _), size in zip(own, operator.local_dims))
    with_all[inside] = array[core]
    hc.halo_exchange(with_all, group, widths.tolist())
    done += 1
    there = (slice(at[0] - low, size - at[1] + high) for at, (low, high), size in zip(widths, own, with_all.shape))
    array[...] = with_all[tuple(there)]


def pytest_configure(config: pytest.Config) -> None:
    """Take the place of its messages."""
    from pylops_mpi.basicoperators.Halo import MPIHalo

    MPIHalo._exchange_along_axis = exchange_along_axis


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where hpccomm has done nothing."""
    if not done:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


if __name__ == "__main__":
    main()
