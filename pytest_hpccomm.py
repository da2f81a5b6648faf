"""The pytest plugin: the ranks of ``mpiexec -n 4 python -m mpi4py -m pytest --with-mpi`` run their tests in step.

Built on pytest-mpi, whose ``--with-mpi`` switches it on and whose markers and fixtures work as they do there:

* rank 0 prints; the other ranks are silent;
* after the set-up, the call and the tear-down of each test the ranks agree on the outcome: a test that fails (or
  skips) on one rank does so on all, with that rank's traceback in the report, and the ranks stay in step;
* where a rank has failed, or has ended a test in which others wait for it, and the others do not arrive within
  ``--mpi-grace`` seconds, the job is ended;
* all ranks must collect the same tests, and an error of one rank's collection is shown;
* each rank has temporary directories (`tmp_path`) of its own;
* what other plugins write, rank 0 writes, and what they draw, all ranks draw alike (`hpccomm/testing/others.py`).

pytest imports this module wherever hpccomm is installed, so it stands outside the package, and imports no more than
pytest until it is switched on. Suites that don't use hpccomm are left alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hpccomm import ProcessGroup

DEFAULT_GRACE = 30.0  # seconds
IMPORTS = re.compile(r"""\b(?:import|from)\s+hpccomm\b|\bimportorskip\(\s*["']hpccomm\b""")


class AsTheyAre(PathFinder):
    """Finds the modules of hpccomm before pytest does, which rewrites the assertions of all that comes with a plugin.

    The watchdog's thread imports some, and two threads that parse at once make CPython 3.11 raise "AST constructor
    recursion depth mismatch" in one of them.
    """

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module of the package; leave others to others."""
        return super().find_spec(fullname, path, target) if fullname.startswith("hpccomm.") else None


sys.meta_path.insert(0, AsTheyAre)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --mpi-grace."""
    parser.getgroup("hpccomm").addoption(
        "--mpi-grace",
        type=float,
        default=DEFAULT_GRACE,
        metavar="SECONDS",
        help="how long a rank that has ended a test waits for the others before it ends the job, if it has failed, or "
        "if others wait for it in the test (default: %(default)s)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Prepare other plugins, which read their options when they are configured."""
    if not _is_on(config):
        return
    if config.getoption("numprocesses", None):
        raise pytest.UsageError(
            "-n of pytest-xdist starts processes of its own, which are no ranks: leave it out, or --with-mpi"
        )
    if _is_mpi_pytest():
        raise pytest.UsageError("mpi-pytest is installed over pytest-mpi: pip uninstall mpi-pytest pytest-mpi, "
                                "then pip install pytest-mpi")  # fmt: skip
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_size() > 1:
        from hpccomm.testing import others

        _own_temporary_directories(MPI.COMM_WORLD.Get_rank())
        others.prepare(config, MPI.COMM_WORLD)


@pytest.hookimpl(trylast=True)  # after the terminal reporter is there
def pytest_configure(config: pytest.Config) -> None:
    """Switch the agreement on, under --with-mpi (or --only-mpi) and on more than one rank."""
    if not _is_on(config):
        return
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_size() > 1:
        from hpccomm.testing.agreement import Agreement

        config.pluginmanager.register(Agreement(config, MPI.COMM_WORLD), "hpccomm-agreement")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to be one of several ranks that each run all tests of hpccomm, and print over each other.

    The tests of others are left alone, and so are those that mpi-pytest runs on several ranks.
    """
    if _is_on(session.config) or _is_mpi_pytest() or not (user := _user_of_hpccomm(session)):
        return
    from hpccomm.process.environment import launcher

    started_by = launcher(os.environ)
    size = os.environ.get(started_by.size, "1") if started_by is not None else "1"
    if size.isdigit() and int(size) > 1:
        install = "" if importlib.util.find_spec("pytest_mpi") else " (after pip install 'hpccomm[pytest]')"
        raise pytest.UsageError(
            f"this is one of {size} ranks, which would each run all tests on its own, and {user} uses hpccomm. To run "
            f"them together{install}: mpiexec -n {size} python -m mpi4py -m pytest --with-mpi. To have them so: "
            "-p no:hpccomm"
        )


def _is_on(config: pytest.Config) -> bool:
    return bool(config.getoption("--with-mpi", False) or config.getoption("--only-mpi", False))


def _is_mpi_pytest() -> bool:
    """Return whether pytest_mpi is not pytest-mpi, but mpi-pytest, which has the same import name."""
    return bool(importlib.util.find_spec("pytest_mpi") and importlib.util.find_spec("pytest_mpi.parallel_assert"))


def _user_of_hpccomm(session: pytest.Session) -> str:
    """Return a test that asks for the fixture below, or else a file of tests or conftest.py that imports hpccomm."""
    for item in session.items:
        info = getattr(item, "_fixtureinfo", None)
        fixtures = info.name2fixturedefs.get("process_group") if info else None
        if fixtures and fixtures[-1].func.__module__ == __name__:
            return item.nodeid
    if "hpccomm" in sys.modules:  # others may have imported it, too: PyTorch, to find its backends
        plugins = (getattr(each, "__file__", None) or "" for each in session.config.pluginmanager.get_plugins())
        files = {item.path for item in session.items}
        files.update(Path(each) for each in plugins if each.endswith("conftest.py"))
        for file in sorted(files):
            with contextlib.suppress(OSError):
                if IMPORTS.search(file.read_text(encoding="utf-8", errors="replace")):
                    return str(file)
    return ""


def _own_temporary_directories(rank: int) -> None:
    """Keep the ranks from racing for `tmp_path`: pytest numbers the directories of its runs, and removes old ones."""
    root = Path(os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir())
    own = root / f"pytest-{os.getuid()}-rank-{rank}"
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(own)


@pytest.fixture(scope="module")
def process_group() -> Iterator[ProcessGroup]:
    """Give the world group of hpccomm: initialised for the tests of one module, destroyed after them."""
    import hpccomm

    with hpccomm.init_process_group() as group:
        yield group
