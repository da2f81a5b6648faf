"""Agreement: the ranks of a pytest run compare tests and outcomes; if a rank does not arrive, the job ends."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import pickle
import sys
import time
import unittest
import zlib
from collections.abc import Callable, Generator
from typing import Any, TextIO

import numpy as np
import pytest
from mpi4py import MPI

from ..core.timeouts import pause, pauses
from ..debug import report as debug_report
from ..debug import watchdog
from ..debug.culprits import verdict
from ..debug.words import ranks_by_value, ranks_in_words
from ..process import stderr
from ..process.printed import let_launcher_read
from ..process.stderr import tell
from . import others
from .examples import Examples, unwrap

Failure = Callable[[], str] | None  # returns this rank's error as text
Packed = tuple[bytes, str, str]  # an error: its pickle, or b""; the name of its type; its text
PYTESTS_OWN = {kind.__name__: kind for kind in (pytest.skip.Exception, pytest.fail.Exception, pytest.xfail.Exception)}
OUTCOMES = ("passed", "skipped", "failed")  # each overrules the ones before it
LEAVES = -1  # instead of an outcome: this rank runs no more tests
LOOKS_AGAIN = 1.0  # seconds until ranks that were seen waiting are looked at again
LONGEST_SUMMARY = 30.0  # seconds that rank 0 may take to print its summary, regardless of --mpi-grace


class Agreement:
    """A pytest plugin object that keeps the ranks in step."""

    def __init__(self, config: pytest.Config, comm: MPI.Intracomm) -> None:
        self._comm = comm.Dup()
        self._rank = self._comm.Get_rank()
        self._grace: float = config.getoption("--mpi-grace")
        self._config = config
        self._nowhere: Any = None
        stderr.uncaptured = self._uncaptured
        self._not_collected: list[str] = []  # this rank's collection errors
        self._parts = 0  # of the running test: its subtests that have ended
        self._runs = False  # True during a test's call phase
        self._leaves = ""  # the reason, once the other ranks know that it leaves
        self._failed: list[str] = []  # errors, which pytest prints at its end, or this rank if it ends the job
        others.leave_files_to_rank_0(config, self._rank, lambda: self._wait(self._comm.Ibarrier(), None))
        config.pluginmanager.register(Examples(config, self.outcomes))
        if self._rank:  # other ranks print nothing
            reporters = config.pluginmanager
            reporter = reporters.getplugin("terminalreporter")
            if reporter is not None:
                reporters.unregister(reporter)
                self._nowhere = open(os.devnull, "w")  # noqa: SIM115
                reporters.register(type(reporter)(config, self._nowhere), "terminalreporter")

    # -- collection: the same tests on all ranks --------------------------------------------------

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keep the session: `shouldfail` says whether a failure ends it."""
        self._session = session

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep this rank's collection errors, for rank 0 to print."""
        if report.failed:
            self._not_collected.append(f"{report.nodeid}\n{report.longreprtext}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> Generator[None, Any, Any]:
        """Stop all ranks if one has collection errors, or if their lists of tests differ."""
        try:
            result = yield
        except BaseException as error:
            self._exchange([1, 0, 0], functools.partial("collection failed: {}".format, error))
            raise
        names = [item.nodeid for item in session.items]
        mine = [int(session.testsfailed > 0), len(names), _digest("\n".join(names))]
        everybody = self._exchange(mine, (lambda: "errors during collection") if mine[0] else None)
        if everybody[:, 0].any():
            session.testsfailed = session.testsfailed or 1
            self._show_errors_of_others(self._comm.gather("\n\n".join(self._not_collected)))
        elif not (everybody == everybody[0]).all():
            listing = self._comm.allgather(names)
            everywhere = set(listing[0]).intersection(*listing[1:])
            different = sorted(set().union(*listing) - everywhere) or [_other_order(listing)]
            raise pytest.UsageError(
                "the ranks collected different tests (" + ", ".join(str(count) for count in everybody[:, 1])
                + " on ranks 0, 1, ...). Not on all ranks: " + ", ".join(different[:5])
            )  # fmt: skip
        return result

    def _show_errors_of_others(self, errors: list[str] | None) -> None:
        """On rank 0, print collection errors that only other ranks have."""
        if errors is None:
            return
        writer = self._config.get_terminal_writer()
        for text, ranks in ranks_by_value(enumerate(errors)).items():
            if text and 0 not in ranks:
                writer.sep("_", f"errors during collection on {ranks_in_words(ranks)} of {len(errors)}")
                writer.line(text)

    # -- each phase of each test: one outcome ----------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        """Note that a test runs: reports made meanwhile belong to its subtests."""
        self._parts, self._runs = 0, True
        try:
            return (yield)
        finally:
            self._runs = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # the outermost, so xfail has been decided
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Give the report the outcome that all ranks agree on."""
        self._parts += self._runs
        where = f"{item.nodeid} ({f'subtest {self._parts}' if self._runs else call.when})"
        unwrap(call)
        judges = item.get_closest_marker("xfail") is not None  # each rank evaluates its own xfail
        is_own = judges or self._share_error(item, call, where)
        report = yield
        mine = OUTCOMES.index(report.outcome) if is_own else 0
        everybody = self.outcomes(where, mine, (lambda: report.longreprtext) if judges and report.failed else None)
        worst = max(everybody)
        if worst > 0:
            data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
            data["rank_text"] = report.longreprtext if report.failed else ""
            decisive = [rank for rank, outcome in enumerate(everybody) if outcome == worst]
            report = self._adopt(report, decisive, self._comm.allgather(data))
        return report

    def _share_error(self, item: pytest.Item, call: pytest.CallInfo[None], where: str) -> bool:
        """Copy the error of the first rank with the worst outcome to ranks with a better one; return False there.

        Each rank's plugins use this error to decide, for example, whether to rerun the test.
        """
        unittests = getattr(item, "_excinfo", None)  # a TestCase's errors, which pytest puts into the call later
        own = unittests[0] if unittests and call.excinfo is None else call.excinfo
        mine, how = 0, ""
        if own is not None:
            mine = 1 if isinstance(own.value, (pytest.skip.Exception, unittest.SkipTest)) else 2
            how = f" by {own.exconly().splitlines()[0]}"
        failure = (lambda: str(item.repr_failure(own))) if own and mine == 2 else None
        everybody = self.outcomes(where, mine, failure, how)
        worst = max(everybody)
        if worst == 0 or min(everybody) == worst:
            return True
        first = everybody.index(worst)
        sent = self._comm.bcast(_packed(own.value) if own and self._rank == first else None, root=first)
        if mine < worst:
            try:
                raise _unpacked(sent)
            except BaseException:
                call.excinfo = pytest.ExceptionInfo.from_current()
        return mine == worst

    def _adopt(self, report: pytest.TestReport, decisive: list[int], reports: list[Any]) -> pytest.TestReport:
        """Return the report of the first rank with the worst outcome, and name the other ranks that have it."""
        if self._rank not in decisive:
            rebuild = self._config.hook.pytest_report_from_serializable
            report = rebuild(config=self._config, data=reports[decisive[0]])
        if report.failed:
            texts = [data["rank_text"] if rank in decisive else "" for rank, data in enumerate(reports)]
            shown = self._rank if self._rank in decisive else decisive[0]
            crash = getattr(report.longrepr, "reprcrash", None)
            if crash is not None:  # the message in pytest's short summary
                crash.message = f"[rank {shown}] {crash.message}"
            for text, ranks in ranks_by_value(enumerate(texts)).items():
                if shown in ranks:
                    title = f"failed on {ranks_in_words(decisive)} of {len(reports)}; above: {ranks_in_words(ranks)}"
                    report.sections.insert(0, (title, ""))
                elif text:
                    report.sections.append((ranks_in_words(ranks), text))
            self._failed.append(f"\n{report.nodeid} ({report.when}): {report.sections[0][0]}\n{report.longreprtext}")
        return report

    @pytest.hookimpl(trylast=True)  # after pytest has decided whether to stop
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Under -x, end a test on all ranks after a subtest that failed on one."""
        if self._runs and report.failed and self._session.shouldfail:
            pytest.fail(f"{report.nodeid} ends with the subtest that has failed (-x)", pytrace=False)

    # -- the end: ranks stay until rank 0 has printed ---------------------------------------------

    @pytest.hookimpl(tryfirst=True)  # before fixtures are torn down, which may wait for other ranks
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """End the job, with the reason, if pytest ends on this rank only."""
        self._leave(excinfo.exconly())

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self, excrepr: object) -> None:
        """End the job, with pytest's traceback, if it fails on this rank only."""
        self._leave(f"pytest has failed:\n{excrepr}")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Wait for the other ranks: ``python -m mpi4py`` ends the job as soon as one exits with an error."""
        sys.stdout.flush()
        self._leave("its tests have ended")
        self._exchange([LEAVES, 0, 0], lambda: self._leaves)
        if self._rank:
            self._nowhere.close()

    # -- internal --------------------------------------------------------------------------------

    def outcomes(self, where: str, mine: int, failure: Failure, how: str = "") -> list[int]:
        """Return all ranks' outcomes of the test phase `where`; end the job if ranks are at different ones."""
        debug_report.ended = f"{where}{how}"
        everybody = self._exchange([mine, _digest(where), 0], failure)
        debug_report.ended = ""
        if (everybody[:, 1] != everybody[0, 1]).any():
            places = self._comm.allgather(where)
            self._end_job(
                "the ranks are out of step: " + ", ".join(f"rank {i} is at {at}" for i, at in enumerate(places))
            )
        return [int(outcome) for outcome in everybody[:, 0]]

    def _leave(self, why: str) -> None:
        """Tell the other ranks, once, that this rank runs no more tests."""
        if not self._leaves:
            self._leaves = why
            self._exchange([LEAVES, 0, 0], lambda: why)

    def _exchange(self, numbers: list[int], failure: Failure) -> Any:
        """Return the numbers of all ranks, one row each; `failure` returns this rank's error as text, if it has one.

        If some ranks leave pytest and others do not, the first of them ends the job.
        """
        mine = np.array(numbers, np.int64)
        everybody = np.empty((self._comm.Get_size(), len(numbers)), np.int64)
        grace = max(self._grace, LONGEST_SUMMARY) if numbers[0] == LEAVES else self._grace
        self._wait(self._comm.Iallgather(mine, everybody), failure, grace)
        leaving = np.flatnonzero(everybody[:, 0] == LEAVES).tolist()
        if 0 < len(leaving) < len(everybody):
            if self._rank == leaving[0]:
                self._end_job(f"leaves pytest, while other ranks go on: {self._leaves}")
            self._comm.Barrier()  # that rank does not come
        return everybody

    def _wait(self, request: MPI.Request, failure: Failure, grace: float | None = None) -> None:
        """Complete the request; after `grace` seconds, end the job if this rank has failed or others wait for it."""
        grace = self._grace if grace is None else grace
        began = time.monotonic()
        give_up, seen = began + grace, ""
        looks = pauses()
        while not request.Test():
            if time.monotonic() > give_up:
                reports = watchdog.reports()
                if failure is not None:
                    message = f"failed, and the other ranks did not arrive within {grace:g} s:\n"
                    what = [debug_report.ended] if debug_report.ended else []
                    self._end_job("\n".join([message, *what, failure(), "", *self._places(reports)]))
                last, seen = seen, self._end_job_if_waited_for(reports, seen)
                again = LOOKS_AGAIN if seen != last else max(grace, time.monotonic() - began)  # less and less often
                give_up = time.monotonic() + again
            pause(next(looks))

    def _end_job_if_waited_for(self, reports: list[dict[str, Any]], seen: str) -> str:
        """End the job if ranks wait inside a test for ranks that have ended it, including this one.

        Require the same waits as in the last call (`seen`): messages may be in flight. Return them for the next call.
        """
        found = verdict(reports, self._comm.Get_size())
        ended = {report["rank"] for report in reports if report["ended"]}
        if min(ended.intersection(found.culprits), default=-1) != self._rank:  # the lowest rank reports
            return ""
        waits = [
            (report["rank"], operation["name"], operation["number"], operation["group"])
            for report in sorted(reports, key=operator.itemgetter("rank"))
            for operation in report["operations"]
        ]
        if str(waits) == seen:
            message = f"has ended {debug_report.ended}, where others wait for it:"
            self._end_job("\n".join([message, "", *found.lines, "", *self._places(reports)]))
        return str(waits)

    def _places(self, reports: list[dict[str, Any]]) -> list[str]:
        """Return the other ranks' places in their programs; empty if the tests have made no world."""
        others = ((each["rank"], each["program"]) for each in reports if each["rank"] != self._rank)
        return [f"{ranks_in_words(ranks)}: at {place}" for place, ranks in ranks_by_value(others).items()]

    def _uncaptured(self) -> TextIO | None:
        """Return the stderr that pytest does not capture, for a rank that ends the job; print the errors of tests."""
        capture = self._config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend(in_=True)
        while self._failed:
            tell(self._failed.pop(0), sys.__stderr__)
        return sys.__stderr__

    def _end_job(self, message: str) -> None:
        """Print to the real stderr, even while pytest captures it, and end all ranks."""
        tell(f"\nhpccomm.testing: rank {self._rank}: {message}", self._uncaptured())
        let_launcher_read()
        self._comm.Abort(1)


def _other_order(listing: list[list[str]]) -> str:
    """Return a message about an order of tests that differs between ranks, with a remedy."""
    first = next(names for names in zip(*listing) if len(set(names)) > 1)
    apart = "; ".join(f"{name} on {ranks_in_words(ranks)}" for name, ranks in ranks_by_value(enumerate(first)).items())
    return (
        f"none: the order differs. At the first difference is {apart}. Give all ranks the same seed, by the option of "
        "the plugin that shuffles tests, or leave it out: -p no:NAME. Where tests are parametrized from a set, type "
        "PYTHONHASHSEED=0 in front of mpiexec, or sort the set"
    )


def _packed(error: BaseException) -> Packed:
    """Return an error in a form that other ranks can unpack."""
    pickled, text = b"", "its str() raises"
    with contextlib.suppress(Exception):  # the program's classes can raise anything
        text = str(error)
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
    return pickled, type(error).__name__, text


def _unpacked(sent: Packed) -> BaseException:
    """Return the error; if it can't be unpickled, return one with the same name and text."""
    pickled, name, text = sent
    try:
        error = pickle.loads(pickled)
        if isinstance(error, BaseException):
            return error
    except Exception:  # not pickled, or its class takes other arguments
        pass
    return PYTESTS_OWN.get(name, type(name, (Exception,), {}))(text)


def _digest(text: str) -> int:
    return zlib.crc32(text.encode(errors="surrogateescape"))
