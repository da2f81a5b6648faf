"""The plugin, proved on small failing suites that mpiexec runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpccomm.testing import agreement

from ..launch import clean_environment, launch, time_limit
from .suites import Together, outcomes, run

pytestmark = pytest.mark.serial


# Suites that one job of three ranks runs, one after the other: those in which something fails, and those in which
# nothing does.
FAILING = {
    "one_rank": """
        def test_fails_on_rank_1():
            assert RANK != 1, "not here"
        def test_communicates():
            assert MPI.COMM_WORLD.allreduce(1) == 3
        """,
    "unprintable": """
        class Bad(Exception):
            def __str__(self): raise AttributeError("not yet")
        def test_fails_on_rank_1():
            if RANK == 1: raise Bad
        def test_communicates():
            assert MPI.COMM_WORLD.allreduce(1) == 3
        """,
    "equal": "def test_it():\n    if RANK: raise KeyError('not the first')",
    "every_rank": "def test_it(): assert RANK == 5, f'I am {RANK}'",
    "expected": """
        @pytest.mark.xfail
        def test_fails_on_one(): assert RANK
        @pytest.mark.xfail
        def test_passes(): pass
        @pytest.mark.xfail(strict=True)
        def test_passes_strictly_on_some(): assert RANK != 1
        """,
    **{
        phase: f"""
        @pytest.fixture
        def thing():
            if {phase!r} == "setup" and RANK == 2:
                raise OSError("no disk")
            yield 1
            if {phase!r} == "teardown" and RANK == 2:
                raise OSError("no space")
        def test_with_it(thing):
            MPI.COMM_WORLD.barrier()   # no rank gets here when the set-up fails on one
        def test_after():
            MPI.COMM_WORLD.barrier()
        """
        for phase in ("setup", "teardown")
    },
}
PASSING = {
    "silent": "def test_one(): pass\ndef test_two(): pass\n",
    "skips": """
        @pytest.fixture
        def only_two():
            if RANK == 1:
                pytest.skip("not on rank 1")
        def test_with_it(only_two):
            MPI.COMM_WORLD.barrier()
        def test_inside():
            if RANK == 0:
                pytest.skip("not on rank 0")
        """,
    "slow": """
        import time
        import hpccomm as hc, numpy as np
        def test_slow():
            if RANK == 0: time.sleep(2)
        def test_another_rank_waits_for_the_slow_one(process_group):
            if RANK == 0: time.sleep(3)
            if RANK == 0: hc.send(np.ones(1), dst=1)
            if RANK == 1: hc.recv(np.ones(1), src=0)
        """,
    "marks": """
        @pytest.mark.mpi(min_size=4)
        def test_four(): pass
        @pytest.mark.mpi_skip
        def test_serial(): pass
        def test_shared_folder(mpi_tmp_path):
            (mpi_tmp_path / str(RANK)).write_text("x")
            MPI.COMM_WORLD.barrier()
            assert len(list(mpi_tmp_path.iterdir())) == 3
        """,
    "group": """
        import hpccomm as hc, numpy as np
        def test_sum(process_group):
            x = np.ones(1)
            hc.all_reduce(x)
            assert x[0] == process_group.size == 3
        def test_still_there(process_group):
            assert hc.is_initialized()
        """,
    "folders": """
        def test_it(tmp_path):
            places = MPI.COMM_WORLD.allgather(str(tmp_path))
            assert len(set(places)) == 3
            assert [f"-rank-{rank}/" in place for rank, place in enumerate(places)] == [True] * 3
        """,
}


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Together:
    return Together(FAILING, tmp_path_factory.mktemp("failing"))


@pytest.fixture(scope="module")
def passing(tmp_path_factory: pytest.TempPathFactory) -> Together:
    return Together(PASSING, tmp_path_factory.mktemp("passing"), grace=0.2)  # nobody fails, so nobody hurries


def test_rank_0_prints_and_the_others_are_silent(passing: Together) -> None:
    assert passing.result.returncode == 0, passing.stdout
    assert passing.of("silent") == ["PASSED", "PASSED"]
    assert passing.stdout.count("test session starts") == 1
    assert outcomes(passing.result) == {"passed": 8, "skipped": 4}


def test_a_failure_on_one_rank_fails_on_all_and_the_ranks_stay_in_step(failing: Together) -> None:
    assert failing.result.returncode not in (0, 124)
    assert failing.of("one_rank") == ["FAILED", "PASSED"]
    assert "AssertionError: not here" in failing.stdout  # rank 1's traceback, printed by rank 0
    assert "failed on rank 1 of 3; above: rank 1" in failing.stdout
    assert re.search(
        r"^FAILED .*test_fails_on_rank_1 - \[rank 1\] AssertionError: not here", failing.stdout, re.MULTILINE
    )


def test_an_exception_that_has_no_text_fails_its_test_only(failing: Together) -> None:
    assert failing.of("unprintable") == ["FAILED", "PASSED"]


def test_a_tests_path_may_be_no_utf_8() -> None:
    assert agreement._digest(os.fsdecode(b"t\xff")) != agreement._digest("t")


def test_equal_tracebacks_are_printed_once(failing: Together) -> None:
    assert "failed on ranks 1-2 of 3; above: ranks 1-2" in failing.stdout
    assert failing.stdout.count("E       KeyError: 'not the first'") == 1


def test_every_failing_rank_is_named_with_its_own_traceback(failing: Together) -> None:
    assert failing.of("every_rank") == ["FAILED"]
    assert "failed on ranks 0-2 of 3; above: rank 0" in failing.stdout
    for rank in range(3):
        assert f"AssertionError: I am {rank}" in failing.stdout


@pytest.mark.parametrize(
    ("phase", "expected", "said"),
    [("setup", ["ERROR", "PASSED"], "no disk"), ("teardown", ["PASSED", "ERROR", "PASSED"], "no space")],
)
def test_a_fixture_that_fails_on_one_rank_fails_on_all(
    failing: Together, phase: str, expected: list[str], said: str
) -> None:
    assert failing.of(phase) == expected
    assert f"OSError: {said}" in failing.stdout


def test_a_skip_on_one_rank_skips_on_all(passing: Together) -> None:
    assert passing.of("skips") == ["SKIPPED", "SKIPPED"]
    assert "not on rank 1" in passing.stdout
    assert "not on rank 0" in passing.stdout


def test_expected_failures_are_agreed_on_too(failing: Together) -> None:
    assert failing.of("expected") == ["XFAIL", "XPASS", "FAILED"]
    assert outcomes(failing.result) == {"failed": 5, "passed": 5, "xfailed": 1, "xpassed": 1, "error": 2}


def test_slow_ranks_are_not_taken_for_lost_ones(passing: Together) -> None:
    assert passing.of("slow") == ["PASSED", "PASSED"]


def test_pytest_mpis_marks_and_fixtures_work(passing: Together) -> None:
    assert passing.of("marks") == ["SKIPPED", "SKIPPED", "PASSED"]


def test_the_process_group_fixture_lives_as_long_as_the_module(passing: Together) -> None:
    assert passing.of("group") == ["PASSED", "PASSED"]


def test_each_rank_has_temporary_directories_of_its_own(passing: Together) -> None:
    assert passing.of("folders") == ["PASSED"], passing.stdout


def test_it_is_said_where_the_others_wait(tmp_path: Path) -> None:
    suite = """
        import hpccomm as hc
        hc.init_process_group()
        def test_deadlock():
            assert RANK != 1
            hc.barrier() if RANK == 0 else MPI.COMM_WORLD.recv()
        """
    result = run(suite, tmp_path, grace=1, env={"HPCCOMM_DEBUG_DIR": str(tmp_path / "reports")})
    assert result.returncode not in (0, 124)
    assert (
        "rank 1: failed, and the other ranks did not arrive within 1 s:\n\ntest_suite.py::test_deadlock"
        in result.stderr
    )
    for rank, call in ((0, r", in hc\.barrier\(\)"), (2, r", in MPI\.COMM_WORLD\.recv\(\)")):
        place = rf"^rank {rank}: at .*test_suite.py:9 in test_deadlock{call}$"
        assert re.search(place, result.stderr, re.M), result.stderr


@pytest.mark.parametrize(
    "call",
    [
        "hc.broadcast(np.ones(3), src=0)",
        "hc.barrier()",
        "hc.recv(np.ones(1), src=0)",
        "hc.all_reduce(np.ones(3), async_op=True).wait()",
        "group.barrier()",
        "hc.broadcast(np.ones(1 << 20), src=2)",
    ],
)
def test_a_rank_that_has_passed_does_not_wait_for_one_that_waits_for_it(tmp_path: Path, call: str) -> None:
    suite = f"""
        import hpccomm as hc, numpy as np
        def test_raises(process_group):
            group = hc.new_group([0, 1])
            with pytest.raises(ValueError):
                if RANK != 1: raise ValueError("only here")
                {call}
        def test_after(process_group): pass
        """
    result = run(suite, tmp_path, grace=1, env={"HPCCOMM_DEBUG_DIR": str(tmp_path / "reports")})
    assert result.returncode not in (0, 124)
    said = result.stderr
    assert re.search(r"rank [02]: has ended test_suite.py::test_raises \(call\), where others wait for it:", said), said
    assert said.count("where others wait for it") == 1
    assert re.search(r"(it|each) has ended test_suite.py::test_raises", said), said
    assert re.search(r"^rank 1: at .*test_suite.py:10 in test_raises, in ", said, re.M), said


@pytest.mark.parametrize("fixture", ["", "process_group"])
@pytest.mark.parametrize(
    ("leave", "why"),
    [
        ("pytest.exit('enough', 7)", "Exit: enough"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("item.config.hook.pytest_runtest_logstart = None", "TypeError: 'NoneType' object is not callable"),
    ],
)
def test_a_rank_that_leaves_pytest_says_why(tmp_path: Path, leave: str, why: str, fixture: str) -> None:
    suite = f"""
        def test_before({fixture}): pass
        def test_leaves({"request, " if "item" in leave else ""}{fixture}):
            if RANK == 1: {leave.replace("item", "request")}
        def test_after({fixture}): pass
        """
    result = run(suite, tmp_path, grace=9, env={"HPCCOMM_DEBUG_DIR": str(tmp_path / "reports")})
    assert result.returncode not in (0, 124)
    assert re.search(r"rank 1: leaves pytest, while other ranks go on: ", result.stderr), result.stderr
    assert why in result.stderr


@pytest.mark.parametrize(
    ("end", "how"),
    [("None", ""), ("pytest.skip('no GPU')", " by Skipped: no GPU"), ("1 / 0", " by ZeroDivisionError: division by ")],
)
def test_a_verdict_is_seen_although_pytest_captures_with_the_tests_errors(tmp_path: Path, end: str, how: str) -> None:
    suite = f"""
        import hpccomm as hc
        hc.init_process_group(timeout=3)
        def test_before(): assert RANK == 1, "on rank 0"
        def test_hangs(): hc.barrier() if RANK == 0 else {end}
        """
    result = run(suite, tmp_path, 2, env={"HPCCOMM_DEBUG_DIR": str(tmp_path / "reports")})
    assert result.returncode == 124, result.stdout + result.stderr
    verdict = f"rank 1 never reached barrier #1 of 'world': it has ended test_suite.py::test_hangs (call){how}"
    assert verdict in result.stderr
    assert len(re.findall("^E +AssertionError: on rank 0", result.stderr, re.M)) == 1
    assert "hpccomm: the job ends with status 124" in result.stderr


def test_a_collection_error_on_one_rank_stops_all(tmp_path: Path) -> None:
    result = run("assert RANK != 2, 'import fails here'\ndef test_one(): MPI.COMM_WORLD.barrier()", tmp_path)
    assert result.returncode not in (0, 124)
    assert "passed" not in result.stdout


def test_an_error_of_one_ranks_collection_is_shown(tmp_path: Path) -> None:
    result = run("if RANK == 2: import no_such_module\ndef test_it(): pass", tmp_path)
    assert result.returncode not in (0, 124)
    assert "errors during collection on rank 2 of 3" in result.stdout
    assert "ModuleNotFoundError: No module named 'no_such_module'" in result.stdout


def as_one_of_two_ranks(folder: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run pytest as a process that mpiexec may have started, with two plugins: MPI is not needed to refuse it."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    options = ("-q", "-c", "/dev/null", "-p", "no:cacheprovider", "-p", "pytest_mpi", "-p", "pytest_hpccomm")
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    environ = clean_environment() | {"OMPI_COMM_WORLD_SIZE": "2", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([str(folder / "site"), environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=time_limit(60), check=False
    )


TEST = "def test_it(): pass\n"
WITH_FIXTURE = "def test_it(process_group): pass\n"
OWN_FIXTURE = "import pytest\n@pytest.fixture\ndef process_group(): pass\n"
MPI_PYTEST = {"site/pytest_mpi/__init__.py": "", "site/pytest_mpi/parallel_assert.py": ""}


@pytest.mark.parametrize(
    "files",
    [
        {"test_it.py": WITH_FIXTURE},
        {"test_it.py": "import pytest\n@pytest.fixture\ndef more(process_group): pass\ndef test_it(more): pass\n"},
        {"test_it.py": f"import hpccomm as hc\n{TEST}"},
        {"test_it.py": f"from hpccomm.debug import Verdict\n{TEST}"},
        {"test_it.py": f"import pytest\nhc = pytest.importorskip('hpccomm')\n{TEST}"},
        {"test_it.py": TEST, "conftest.py": "import hpccomm"},
        {"test_it.py": TEST, "test_other.py": f"import hpccomm\n{TEST}"},
    ],
)
def test_several_ranks_that_would_each_run_all_tests_of_hpccomm_are_refused(
    tmp_path: Path, files: dict[str, str]
) -> None:
    ended = as_one_of_two_ranks(tmp_path, files)
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR, ended.stdout + ended.stderr
    assert "mpiexec -n 2 python -m mpi4py -m pytest --with-mpi" in ended.stderr
    assert " uses hpccomm. To run them together" in ended.stderr


@pytest.mark.parametrize(
    "files",
    [
        {"test_it.py": TEST},
        {"test_it.py": OWN_FIXTURE + WITH_FIXTURE},
        {"test_it.py": WITH_FIXTURE, "conftest.py": OWN_FIXTURE},
        {"test_it.py": f"import library\n{TEST}", "site/library.py": "import hpccomm"},  # as PyTorch does
        {"test_it.py": "import pytest\n@pytest.mark.mpi\ndef test_it(): pass\ndef test_other(): pass"},
        {"test_it.py": f"# It is said that hpccomm does this.\nhpccomm = 1\n{TEST}"},
        {"test_it.py": f"import hpccomm\n{TEST}"} | MPI_PYTEST,
    ],
)
def test_tests_that_know_nothing_of_hpccomm_are_left_alone(tmp_path: Path, files: dict[str, str]) -> None:
    ended = as_one_of_two_ranks(tmp_path, files)
    assert "1 passed" in ended.stdout, ended.stdout + ended.stderr
    assert "hpccomm" not in ended.stdout + ended.stderr


@pytest.mark.parametrize("options", [[], ["-p", "no:hpccomm"]])
def test_each_rank_runs_the_tests_of_others_by_itself(tmp_path: Path, options: list[str]) -> None:
    suite = "from mpi4py import MPI\ndef test_it(): assert MPI.COMM_WORLD.allreduce(1) == 2\n"
    (tmp_path / "test_it.py").write_text(suite + ("import hpccomm\n" if options else ""))
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "no:cacheprovider", tmp_path / "test_it.py"]
    ended = launch(2, *command, *options, timeout=60)
    assert ended.returncode == 0
    assert ended.stdout.count("1 passed") == 2


def test_xdist_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    result = run("def test_it(): pass", tmp_path, 2, "--numprocesses=2")
    assert result.returncode not in (0, 124)
    assert "which are no ranks: leave it out, or --with-mpi" in result.stderr


def test_different_tests_on_different_ranks_are_refused(tmp_path: Path) -> None:
    result = run("def test_one(): pass\nif RANK == 1:\n    def test_two(): pass\n", tmp_path)
    assert result.returncode not in (0, 124)
    assert "the ranks collected different tests (1, 2, 1 on ranks 0, 1, ...)" in result.stdout + result.stderr
    assert "test_suite.py::test_two" in result.stdout + result.stderr


def test_another_order_on_another_rank_is_refused(tmp_path: Path) -> None:
    suite = """
        @pytest.mark.parametrize("n", [1, 2] if RANK else [2, 1])
        def test_it(n): pass
        """
    result = run(suite, tmp_path)
    assert "the order differs" in result.stdout + result.stderr


def test_maxfail_stops_all_ranks_at_the_same_test(tmp_path: Path) -> None:
    suite = """
        def test_one(): assert RANK != 1
        def test_two(): MPI.COMM_WORLD.barrier()
        """
    result = run(suite, tmp_path, 3, "-x")
    assert outcomes(result) == {"failed": 1}


def test_without_with_mpi_and_on_one_rank_it_is_plain_pytest(tmp_path: Path) -> None:
    suite = "def test_one(): pass\ndef test_fails(): assert 0\n"
    assert outcomes(run(suite, tmp_path, 1)) == {"passed": 1, "failed": 1}
    file = tmp_path / "test_suite.py"
    result = launch(1, sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "no:cacheprovider", file)
    assert outcomes(result) == {"passed": 1, "failed": 1}


def test_mpi_pytest_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "site" / "pytest_mpi"  # what mpi-pytest would have installed
    package.mkdir(parents=True)
    (package / "parallel_assert.py").write_text("")
    (package / "__init__.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--with-mpi', action='store_true')\n"
    )
    result = run("def test_one(): pass", tmp_path, 1, env={"PYTHONPATH": str(tmp_path / "site")})
    assert result.returncode not in (0, 124)
    assert "mpi-pytest is installed over pytest-mpi: pip uninstall mpi-pytest pytest-mpi" in result.stderr


def test_hpccomm_is_imported_as_it_is(tmp_path: Path) -> None:
    suite = """
        def test_loaders():
            import hpccomm.debug.watchdog
            assert type(hpccomm.debug.watchdog.__loader__).__name__ == "SourceFileLoader"
            with pytest.raises(AssertionError, match="assert 1 == 2"):  # of tests they are still rewritten
                assert 1 == 2
        """
    result = run(suite, tmp_path, 1)
    assert outcomes(result) == {"passed": 1}, result.stdout
