from __future__ import annotations

import gc
import importlib
import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--cases", type=int, default=0, metavar="N", help="run N cases at most of a test of ranks")
    parser.addoption("--jobs", type=int, default=0, metavar="N", help="and of a serial one that starts jobs")
    parser.addoption("--one-in", type=int, default=1, metavar="N", help="of what --cases and --jobs leave, one in N")
    parser.addoption("--one-job-in", type=int, metavar="N", help="another N for serial ones that start jobs")
    parser.addoption(
        "--seed", default=os.environ.get("SEED", ""), help="which ones: others with another (default: $SEED)"
    )
    parser.addoption("--reliability", metavar="FILE", help="add what tests/faults has seen to this file")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if any("tests/gpu/" in report.nodeid for report in terminalreporter.stats.get("passed", [])):
        terminalreporter.section("GPU arrays")
        terminalreporter.write_line(f"tests/gpu ran on {importlib.import_module('tests.gpu.gpus').mode()}")


class Measured:
    """Adds to a test's report how many jobs it started, and the seconds of CPU: tools/test-times shows them."""

    def __init__(self) -> None:
        self.jobs = 0
        sys.addaudithook(self._count_jobs)

    def _count_jobs(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            self.jobs += any(str(word).endswith(("/run-mpi", "/mpiexec", "/srun")) for word in arguments[1])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self.began = self.jobs, sum(os.times()[:4])
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        if call.when == "teardown":
            jobs, seconds = self.began
            item.user_properties += [("jobs", self.jobs - jobs), ("cpu", round(sum(os.times()[:4]) - seconds, 3))]
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before that of pytest-reportlog
def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "report_log", None):
        config.pluginmanager.register(Measured())


def is_serial(item: pytest.Item) -> bool:
    return item.get_closest_marker("serial") is not None or item.get_closest_marker("once") is not None


def runs_elsewhere(item: pytest.Item) -> bool:
    """Whether a test runs with another number of ranks, or with another MPI."""
    once = item.get_closest_marker("once") is not None
    return (once and MPI.get_vendor()[0] != "MPICH") or (is_serial(item) and MPI.COMM_WORLD.Get_size() > 1)


def starts_jobs(item: pytest.Item) -> bool:
    names = vars(getattr(item, "module", object)).values()
    return any(getattr(value, "__module__", "") == "tests.launch" for value in names)


def sample(items: Sequence[pytest.Item], config: pytest.Config) -> set[pytest.Item]:
    """Return the tests that the options leave: the same on all ranks, others on another number.

    What runs under a condition only is not left out, as it may run nowhere else: with one MPI, without a GPU.
    """
    cases, jobs, one_in, one_job_in = (config.getoption(name) for name in ("cases", "jobs", "one_in", "one_job_in"))
    where = f"{config.getoption('seed')} on {MPI.COMM_WORLD.Get_size()}"

    def number(item: pytest.Item) -> int:
        return zlib.crc32(f"{item.nodeid} {where}".encode())

    by_test = defaultdict(list)
    for item in items:
        by_test[item.nodeid.partition("[")[0]].append(item)
    kept: set[pytest.Item] = set()
    for of_one_test in by_test.values():
        is_job = is_serial(of_one_test[0]) and starts_jobs(of_one_test[0])
        most = jobs if is_job else 0 if is_serial(of_one_test[0]) else cases
        every = one_job_in or one_in if is_job else one_in
        chosen = sorted(of_one_test, key=number)[: most or None]
        kept.update(
            item for item in chosen if number(item) % every == 0 or item.get_closest_marker("skipif") is not None
        )
    return kept


DESELECTED = pytest.StashKey[bool]()


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if not runs_elsewhere(item)]
    kept = sample(here, config)
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


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # the collector of garbage would look at all tests, each time


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
def the_group_goes_on(process_group: hc.ProcessGroup) -> Iterator[None]:
    """After the test the world can be used: no rank has failed alone."""
    yield
    check = np.ones(1)
    hc.all_reduce(check)
    assert check[0] == process_group.size


@pytest.fixture
def random(process_group: hc.ProcessGroup) -> np.random.Generator:
    """The same random numbers on every rank."""
    return np.random.default_rng(7)
