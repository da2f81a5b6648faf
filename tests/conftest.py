from __future__ import annotations

import importlib
import zlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--cases", type=int, default=0, metavar="N", help="run N cases of a test at most")
    parser.addoption("--reliability", metavar="FILE", help="add what tests/faults has seen to this file")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if any("tests/gpu/" in report.nodeid for report in terminalreporter.stats.get("passed", [])):
        terminalreporter.section("GPU arrays")
        terminalreporter.write_line(f"tests/gpu ran on {importlib.import_module('tests.gpu.gpus').mode()}")


def is_serial(item: pytest.Item) -> bool:
    return item.get_closest_marker("serial") is not None or item.get_closest_marker("once") is not None


def runs_elsewhere(item: pytest.Item) -> bool:
    """Whether a test runs with another number of ranks, or with another MPI."""
    once = item.get_closest_marker("once") is not None
    return (once and MPI.get_vendor()[0] != "MPICH") or (is_serial(item) and MPI.COMM_WORLD.Get_size() > 1)


def starts_jobs(item: pytest.Item) -> bool:
    names = vars(getattr(item, "module", object)).values()
    return any(getattr(value, "__module__", "") == "tests.launch" for value in names)


def sample(items: Sequence[pytest.Item], cases: int) -> set[pytest.Item]:
    """Return `cases` of the cases of each test: others on another number of ranks, but the same on all ranks.

    Of tests that are serial: all, except where each case starts a job.
    """
    by_test = defaultdict(list)
    for item in items:
        wholly = is_serial(item) and not starts_jobs(item)
        by_test[item.nodeid if wholly else item.nodeid.partition("[")[0]].append(item)
    size = MPI.COMM_WORLD.Get_size()

    def place(item: pytest.Item) -> int:
        return zlib.crc32(f"{item.nodeid} on {size}".encode())

    return {item for of_one_test in by_test.values() for item in sorted(of_one_test, key=place)[:cases]}


DESELECTED = pytest.StashKey[bool]()


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if not runs_elsewhere(item)]
    cases = config.getoption("--cases")
    kept = sample(here, cases) if cases else set(here)
    elsewhere = [item for item in items if item not in kept]
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item in kept]
        config.stash[DESELECTED] = True
    if hasattr(config, "workerinput"):  # of pytest-xdist: the files that take longest first
        items.sort(key=starts_jobs, reverse=True)
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs --slow"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    # `make test ARGS="-k report"` goes on to the next number of ranks
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.stash.get(DESELECTED, False):
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(scope="module")
def groups(process_group: hc.ProcessGroup) -> list[hc.ProcessGroup]:
    """The world, a group of two in reverse order, and a group of one: those that this rank is in."""
    last = process_group.size - 1
    made = [process_group, hc.new_group([last], group_desc="alone")]
    if last > 0:
        made.append(hc.new_group([last, 0], sort_ranks=False, group_desc="reversed"))
    return [group for group in made if isinstance(group, hc.ProcessGroup)]


@pytest.fixture
def random(process_group: hc.ProcessGroup) -> np.random.Generator:
    """The same random numbers on every rank."""
    return np.random.default_rng(7)
