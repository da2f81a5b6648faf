"""The plugin together with other plugins of pytest: what these write and draw, the order of tests, reruns, subtests."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import coverage
import pytest

from ..launch import launch  # noqa: F401  # tests/conftest.py: this file starts jobs
from .suites import Together, outcomes, run, start, write

pytestmark = pytest.mark.serial

# -- what plugins write, rank 0 writes ------------------------------------------------------------------

# Two plugins: one shuffles tests by a seed that is the default value of its option, one draws its seed like
# pytest-randomly. The latter writes, like pytest-html.
PLUGINS = """
import random
def pytest_addoption(parser):
    parser.addoption("--shuffle-seed", default=random.SystemRandom().random())
    parser.addoption("--randomly-seed", default="default")
    parser.addoption("--html", dest="htmlpath")
def pytest_configure(config):
    if config.option.randomly_seed == "default":
        config.option.randomly_seed = random.SystemRandom().random()
def pytest_collection_modifyitems(config, items):
    random.Random(config.option.shuffle_seed).shuffle(items)
def pytest_sessionfinish(session):
    if session.config.option.htmlpath:
        with open(session.config.option.htmlpath, "a") as file:
            file.write("written\\n")
"""
WRITES = """
    import logging
    def test_that_logs(request):
        logging.getLogger().warning(f"I am {RANK}")
        request.config.cache.set("rank", RANK)
    def test_that_fails():
        assert RANK != 1
    def test_folder(tmp_path):
        (tmp_path / "x").write_text(str(RANK))
    @pytest.mark.parametrize("option", ["shuffle_seed", "randomly_seed"])
    def test_seed(request, option):
        assert len(set(MPI.COMM_WORLD.allgather(request.config.getoption(option)))) == 1
    """


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which plugins have written, in a job of three ranks."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "suite").mkdir()
    (folder / "suite" / "conftest.py").write_text(PLUGINS)
    (folder / "temporary").mkdir()
    (folder / "temporary" / "of an earlier run").touch()
    write(WRITES, folder / "suite" / "test_writes.py")
    files = {"junitxml": "junit.xml", "report-log": "log.json", "html": "x.html", "log-file": "log.txt"}
    options = [*(f"--{option}={folder / file}" for option, file in files.items()), "-p", "cacheprovider"]
    options += [f"--basetemp={folder / 'temporary'}", "-o", f"cache_dir={folder / 'cache'}"]
    ended = start(folder / "suite", 3, *options)
    assert outcomes(ended) == {"passed": 4, "failed": 1}, ended.stdout + ended.stderr
    return folder


def junit_has_each_test_once(folder: Path) -> bool:
    (suite,) = ElementTree.parse(folder / "junit.xml").getroot()
    return suite.attrib["tests"] == "5" and suite.attrib["failures"] == "1" and len(suite) == 5


def report_log_has_each_report_once(folder: Path) -> bool:
    lines = [json.loads(line) for line in (folder / "log.json").read_text().splitlines()]
    reports = [(line["nodeid"], line["when"]) for line in lines if line["$report_type"] == "TestReport"]
    return len(reports) == len(set(reports)) == 15


def html_is_written_once(folder: Path) -> bool:
    return (folder / "x.html").read_text() == "written\n"


def log_is_that_of_rank_0(folder: Path) -> bool:
    return re.findall(r"I am \d", (folder / "log.txt").read_text()) == ["I am 0"]


def cache_is_that_of_rank_0(folder: Path) -> bool:
    values = folder / "cache" / "v"
    (failed,) = json.loads((values / "cache" / "lastfailed").read_text())
    return bool(json.loads((values / "rank").read_text()) == 0 and failed.endswith("test_that_fails"))


def each_rank_has_a_temporary_folder(folder: Path) -> bool:
    found = {file.parts[-3]: file.read_text() for file in (folder / "temporary").glob("rank-*/test_folder0/x")}
    return found == {"rank-0": "0", "rank-1": "1", "rank-2": "2"}


@pytest.mark.parametrize(
    "is_right",
    [
        junit_has_each_test_once,
        report_log_has_each_report_once,
        html_is_written_once,
        log_is_that_of_rank_0,
        cache_is_that_of_rank_0,
        each_rank_has_a_temporary_folder,
    ],
)
def test_rank_0_writes_what_plugins_write(written: Path, is_right: Callable[[Path], bool]) -> None:
    assert is_right(written)


HELPER = """
def side(rank):
    if rank == 0:
        return "left"
    elif rank == 1:
        return "right"
    return "top"
"""
ALL_LINES = {2, 3, 4, 5, 6, 7}


@pytest.mark.parametrize(
    ("options", "settings", "is_good"),
    [
        ([], "", True),
        (["--cov-append"], "", True),
        (["--cov-branch", "--cov-report=xml:{folder}/coverage.xml"], "", True),
        (["--cov-context=test"], "parallel = true", True),
        (["--cov-fail-under=100", "--deselect=test_suite.py::test_side"], "", False),
    ],
)
def test_lines_are_covered_that_any_rank_has_run(
    tmp_path: Path, options: list[str], settings: str, is_good: bool
) -> None:
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "settings").write_text(f"[run]\n{settings}\n")
    suite = """
        import helper, os, hpccomm as hc
        def test_moves(monkeypatch, tmp_path): os.chdir(tmp_path)
        def test_side(process_group): assert helper.side(RANK)
        """
    options = ["--cov=helper", f"--cov-config={tmp_path / 'settings'}", "--cov-report=term-missing", *options]
    options = [option.format(folder=tmp_path) for option in options]
    environ = {"COVERAGE_FILE": str(tmp_path / ".coverage"), "PYTHONPATH": str(tmp_path), "HPCCOMM_WATCHDOG": "0"}
    ended = run(suite, tmp_path, 3, *options, env=environ)
    assert (ended.returncode == 0) == is_good, ended.stdout + ended.stderr
    assert ended.returncode != 124
    assert ended.stdout.count("tests coverage") == 1
    found = coverage.CoverageData(str(tmp_path / ".coverage"))
    found.read()
    assert set(found.lines(str(tmp_path / "helper.py")) or []) == (ALL_LINES if is_good else {2})
    assert sorted(file.name for file in tmp_path.glob(".coverage*")) == [".coverage"]
    if settings == "" and is_good:
        assert re.search(r"helper\.py +6 .* 100%", ended.stdout)
    if "--cov-branch" in options:
        assert ElementTree.parse(tmp_path / "coverage.xml").getroot().attrib["branch-rate"] == "1"


# -- the order of tests -----------------------------------------------------------------------------------

ORDERS = {
    "shuffled": (
        "import random\ndef pytest_collection_modifyitems(items): random.SystemRandom().shuffle(items)",
        "@pytest.mark.parametrize('n', range(20))\ndef test_it(n): pass",
    ),
    "of a set": ("", "@pytest.mark.parametrize('n', {f'case {n}' for n in range(20)})\ndef test_it(n): pass"),
    "drawn": (
        "",
        "import random\n@pytest.mark.parametrize('n', random.sample(range(20), 20))\ndef test_it(n): pass",
    ),
    "turned round": (
        "import os\ndef pytest_collection_modifyitems(items):\n"
        "    from mpi4py import MPI\n    if MPI.COMM_WORLD.rank: items.reverse()",
        "def test_one(): pass\ndef test_two(): pass",
    ),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_for_another_order_on_another_rank_it_is_said_what_to_type(tmp_path: Path, kind: str) -> None:
    conftest, suite = ORDERS[kind]
    (tmp_path / "conftest.py").write_text(conftest)
    said = run(suite, tmp_path, 2).stderr
    assert "the order differs. At the first difference is" in said
    assert re.search(r"test_suite.py::test_\S+( \d+\])? on rank 0; test_suite.py::test_\S+( \d+\])? on rank 1", said)
    for advice in ("same seed", "-p no:NAME", "PYTHONHASHSEED=0 in front of mpiexec"):
        assert advice in said


# -- hypothesis -------------------------------------------------------------------------------------------

EXAMPLES = """
        import time
        import hpccomm as hc, numpy as np
        from hypothesis import assume, example, given, settings, strategies as st, target
        settings.register_profile("few", max_examples=15, database=None)
        settings.load_profile("few")
        numbers = given(n=st.integers(0, 1000))
        def compare(n):
            both = np.array([-n, n])
            hc.all_reduce(both, "max")
            assert -both[0] == both[1] == n
    """
SAME_EXAMPLES = """
        @numbers
        def test_plain(process_group, n): compare(n)
        @pytest.mark.parametrize("k", [1, 2])
        @numbers
        def test_parameters(process_group, k, n): compare(n)
        class TestMethods:
            @numbers
            def test_method(self, process_group, n): compare(n)
        @numbers
        def test_rejected_on_one(process_group, n):
            compare(n)
            assume(RANK != 1 or n % 2)
        @settings(deadline=1)
        @numbers
        def test_slow_on_one(process_group, n):
            compare(n)
            time.sleep(0.01 * (RANK == 1))
        @numbers
        def test_target_of_one(process_group, n):
            compare(n)
            target(float(n if RANK == 1 else -n))
        @given(data=st.data())
        def test_drawn_inside(process_group, data): compare(data.draw(st.integers(0, 1000)))
        @example(n=7)
        @numbers
        def test_given(process_group, n): compare(n)
        @settings(derandomize=True)
        @numbers
        def test_derandomized(process_group, n): compare(n)
        @numbers
        def test_skipped_on_one(process_group, n):
            compare(n)
            if RANK == 1 and n > 100: pytest.skip("too large")
    """
FAILING_EXAMPLES = """
        settings.register_profile("more", max_examples=50, database=None)
        settings.load_profile("more")
        @numbers
        def test_fails_on_one(process_group, n):
            compare(n)
            assert RANK != 1 or n < 10, "too large"
        @numbers
        def test_fails_differently(process_group, n):
            compare(n)
            if RANK == 1 and n >= 20: raise KeyError(n)
            if RANK == 2 and n >= 30: raise OSError(n)
        @numbers
        def test_fails_on_all(process_group, n):
            compare(n)
            assert n < 40, "much too large"
        @pytest.mark.xfail(raises=ZeroDivisionError)
        @numbers
        def test_expected(process_group, n):
            compare(n)
            1 // (RANK != 1 or n < 10)
        def test_after(process_group): hc.barrier()
    """


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Together:
    suites = {"same": EXAMPLES + SAME_EXAMPLES, "failing": EXAMPLES + FAILING_EXAMPLES}
    return Together(suites, tmp_path_factory.mktemp("examples"))


def test_all_ranks_draw_the_same_examples(examples: Together) -> None:
    assert examples.of("same") == ["PASSED"] * 10 + ["SKIPPED"], examples.stdout
    assert "SKIPPED (too large)" in examples.stdout


def test_the_seed_of_examples_is_printed(examples: Together) -> None:
    seeds = re.findall(r"all ranks draw the same, by --hypothesis-seed=(\d+)", examples.stdout)
    assert len(set(seeds)) == 1
    assert len(seeds) == 1 + 3  # at the beginning, and with each failure


def test_an_example_that_fails_on_one_rank_fails_on_all_which_find_the_same_simplest_one(examples: Together) -> None:
    assert examples.of("failing") == ["FAILED", "FAILED", "FAILED", "XFAIL", "PASSED"], examples.stdout
    for said in ("AssertionError: too large", "KeyError: 20", "AssertionError: much too large"):
        assert said in examples.stdout
    for simplest in ("n=10,", "n=20,", "n=40,"):
        assert simplest in examples.stdout
    shown = re.findall(r"failed on (ranks? [\d-]+) of 3", examples.stdout)
    assert shown == ["rank 1", "rank 1", "ranks 0-2"]


def test_an_example_that_fails_before_the_others_communicate_is_shown(tmp_path: Path) -> None:
    suite = """
        @numbers
        def test_it(process_group, n):
            assert RANK != 1 or n < 10
            compare(n)
        """
    ended = run(EXAMPLES + suite, tmp_path, 2, grace=1, env=reports_in(tmp_path))
    assert ended.returncode not in (0, 124)
    assert re.search(r"test_it \(example \d+\)\n.*n=\d+\n", ended.stderr), ended.stderr
    assert re.search(r"rank 0: at .*test_suite.py:\d+ in compare, in hc\.all_reduce", ended.stderr), ended.stderr


def reports_in(folder: Path) -> dict[str, str]:
    return {"HPCCOMM_DEBUG_DIR": str(folder / "reports")}


# -- reruns, subtests -------------------------------------------------------------------------------------

# A plugin that runs a test again, like pytest-rerunfailures: the errors decide, which it sees on each rank.
RERUNS = """
import pytest
from _pytest.runner import runtestprotocol
def pytest_configure(config):
    config.addinivalue_line("markers", "again: is run again after an error of these types")
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        item.errors.append({each.__name__ for each in type(call.excinfo.value).__mro__})
    return report
def pytest_runtest_protocol(item, nextitem):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    types = {name for mark in item.iter_markers("again") for name in mark.args}
    for attempt in range(3):
        item.errors = []
        item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        again = attempt < 2 and item.errors and all(each & types for each in item.errors)
        for report in reports:
            if again and report.failed:
                report.outcome = "rerun"
            item.ihook.pytest_runtest_logreport(report=report)
        if not again:
            break
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
def pytest_report_teststatus(report):
    return ("rerun", "R", "RERUN") if report.outcome == "rerun" else None
"""
AGAIN = """
        import unittest
        import hpccomm as hc
        class OfThisSuite(Exception):
            def __init__(self, one, two): super().__init__(f"{one} {two}")
        SEEN = []
        def first(name):
            SEEN.append(name)
            return SEEN.count(name) == 1
        again = pytest.mark.again
        @again("AssertionError")
        def test_call(process_group):
            hc.barrier()
            assert not (first("call") and RANK == 1)
        @pytest.fixture
        def sets_up():
            if first("set-up") and RANK == 2: raise OSError("at first")
            yield
            if first("tear-down") and RANK == 0: raise OSError("at the end")
        @again("OSError")
        def test_fixture(process_group, sets_up):
            hc.barrier()
        @again("OSError")
        def test_another_error(process_group):
            hc.barrier()
            if RANK == 1: raise KeyError("not again")
        @again("Exception")
        def test_error_that_cannot_be_sent(process_group):
            hc.barrier()
            if first("sent") and RANK == 1: raise OfThisSuite(1, 2)
        class TestOfUnittest(unittest.TestCase):
            @again("AssertionError")
            def test_method(self):
                assert not (first("unittest") and RANK == 1)
        @again("AssertionError")
        def test_last_of_its_module(process_group):
            hc.barrier()
            assert not (first("last") and RANK == 0)
    """
SUBTESTS = """
        import unittest
        import hpccomm as hc
        def test_fixture(subtests, process_group):
            for n in range(3):
                with subtests.test("part", n=n):
                    hc.barrier()
                    assert n != 1 or RANK != 1
        def test_skip(subtests, process_group):
            with subtests.test("one"):
                hc.barrier()
                if RANK == 2: pytest.skip("here")
            hc.barrier()
        class TestOfUnittest(unittest.TestCase):
            def test_method(self):
                for n in range(3):
                    with self.subTest(n=n):
                        MPI.COMM_WORLD.barrier()
                        assert n != 1 or RANK != 1
        def test_after(process_group): hc.barrier()
    """


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Together:
    folder = tmp_path_factory.mktemp("parts")
    (folder / "conftest.py").write_text(RERUNS)
    return Together({"again": AGAIN, "subtests": SUBTESTS}, folder)


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("test_call", ["RERUN", "PASSED"]),
        ("test_fixture", ["RERUN", "RERUN", "PASSED"]),
        ("test_another_error", ["FAILED"]),
        ("test_error_that_cannot_be_sent", ["RERUN", "PASSED"]),
        ("TestOfUnittest::test_method", ["RERUN", "PASSED"]),
        ("test_last_of_its_module", ["RERUN", "PASSED"]),
    ],
)
def test_all_ranks_run_a_test_again(parts: Together, test: str, expected: list[str]) -> None:
    assert re.findall(rf"test_again\.py::{test} ([A-Z]+)", parts.stdout) == expected, parts.stdout


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("test_fixture", ["SUBPASSED[part] (n=0)", "SUBFAILED[part] (n=1)", "SUBPASSED[part] (n=2)", "FAILED"]),
        ("test_skip", ["SUBSKIPPED[one] (here)", "PASSED"]),
        ("TestOfUnittest::test_method - .rank 1.*", ["SUBFAILED(n=1)"]),  # pytest shows them at the end only
        ("test_after", ["PASSED"]),
    ],
)
def test_a_subtest_that_fails_on_one_rank_fails_on_all(parts: Together, test: str, expected: list[str]) -> None:
    during = re.findall(rf"test_subtests\.py::{test} ([A-Z].*?) +\[", parts.stdout)
    at_the_end = re.findall(rf"^(SUB\S+) .*test_subtests\.py::{test}$", parts.stdout, re.M)
    assert [*during, *at_the_end] == expected, parts.stdout


STOPPED = "stopping after 2 failures"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("with subtests.test(): assert RANK != 1", STOPPED),
        ("with subtests.test(): assert RANK == 1 and n < 1", STOPPED),
        ("with subtests.test(): assert n < 2", STOPPED),
        ("with subtests.test() if RANK or n < 2 else nullcontext(): pass", "the ranks are out of step: rank 0 is at"),
    ],
)
def test_after_a_subtest_that_fails_all_ranks_stop(tmp_path: Path, body: str, expected: str) -> None:
    suite = f"from contextlib import nullcontext\ndef test_it(subtests):\n  for n in range(3):\n    {body}\n"
    ended = run(suite, tmp_path, 2, "-x", grace=1)
    assert ended.returncode not in (0, 124)
    assert expected in ended.stdout + ended.stderr
