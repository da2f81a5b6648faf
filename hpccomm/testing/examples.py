"""Property-based tests with hypothesis on several ranks: all draw the same examples and agree on each one's outcome.

A rank whose example fails looks for a simpler one. The other ranks must do the same, so an example that fails on one
rank fails on all. Nothing may depend on an example's run time, or on numbers of one rank.
"""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
import unittest
from collections.abc import Callable, Generator
from typing import Any

import pytest

from ..debug.words import ranks_in_words
from .others import HYPOTHESIS_SEED

PASSED, REJECTED, SKIPPED, FAILED = range(4)  # each overrules the ones before it
LONGEST_EXAMPLE = 500  # characters
Outcomes = Callable[[str, int, Callable[[], str] | None], list[int]]


class ExampleFailedError(Exception):
    """An example has failed on some ranks; on these, the error itself is the cause.

    All ranks raise it at one line: hypothesis takes an exception from another line for a different failure.
    """


class Examples:
    """A pytest plugin object; `outcomes` returns all ranks' outcomes."""

    def __init__(self, config: pytest.Config, outcomes: Outcomes) -> None:
        self._seed = config.stash.get(HYPOTHESIS_SEED, None)
        self._outcomes = outcomes
        self._item: Any = None  # the last test that uses hypothesis
        self._count = 0  # of its examples

    def pytest_report_collectionfinish(self, items: list[Any]) -> str:
        """Print the seed if any test uses hypothesis."""
        uses = any(getattr(getattr(item, "obj", None), "is_hypothesis_test", False) for item in items)
        return self._seed_in_words() if uses else ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before hypothesis reads the test's settings
    def pytest_runtest_call(self, item: Any) -> Generator[None, Any, Any]:
        """Prepare a test that uses hypothesis."""
        if "hypothesis" in sys.modules:
            from hypothesis import is_hypothesis_test

            core: Any = sys.modules["hypothesis.core"]
            if is_hypothesis_test(getattr(item, "obj", None)):
                if self._seed is not None:
                    core.global_force_seed = self._seed
                self._item, self._count = item, 0
                self._prepare(getattr(item.obj, "__func__", item.obj))
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Show the seed with a failed test."""
        report = yield
        if item is self._item and report.failed and self._seed is not None:
            report.sections.append(("Hypothesis", self._seed_in_words()))
        return report

    def _seed_in_words(self) -> str:
        return "" if self._seed is None else f"hypothesis: all ranks draw the same, by --hypothesis-seed={self._seed}"

    def _prepare(self, function: Any) -> None:
        """Make ranks agree on a test's examples, and switch off decisions by time or by one rank's numbers."""
        from hypothesis import HealthCheck, Phase, settings

        handle: Any = getattr(function, "hypothesis", None)  # a state machine has none
        test = getattr(handle, "inner_test", None)
        if test is None or hasattr(test, "agrees") or inspect.iscoroutinefunction(test):
            return
        old: Any = getattr(function, "_hypothesis_internal_use_settings", settings.default)
        function._hypothesis_internal_use_settings = settings(
            parent=old,
            deadline=None,
            suppress_health_check={HealthCheck.too_slow, *old.suppress_health_check},
            phases=[phase for phase in old.phases if phase is not Phase.target],
        )
        handle.inner_test = self._agreed(test)

    def _agreed(self, test: Callable[..., Any]) -> Callable[..., Any]:
        """Return the test with each example's outcome agreed on all ranks."""
        from hypothesis.errors import StopTest, UnsatisfiedAssumption

        @functools.wraps(test)
        def example(*args: Any, **given: Any) -> None:
            __tracebackhide__ = True
            own: Any = None
            mine = PASSED
            try:
                test(*args, **given)
            except (UnsatisfiedAssumption, StopTest) as error:
                own, mine = error, REJECTED
            except (pytest.skip.Exception, unittest.SkipTest) as error:
                own, mine = error, SKIPPED
            except (Exception, pytest.fail.Exception) as error:
                own, mine = error, FAILED
            self._count += 1
            failure = functools.partial(_failure, given, own) if mine == FAILED else None
            outcomes = self._outcomes(f"{self._item.nodeid} (example {self._count})", mine, failure)
            if max(outcomes) == FAILED:
                failed = [rank for rank, outcome in enumerate(outcomes) if outcome == FAILED]
                on_all = ExampleFailedError(f"an example has failed on {ranks_in_words(failed)} of {len(outcomes)}")
                on_all.__cause__ = own if mine == FAILED else None  # not "from", which would set its context, too
                raise on_all
            if max(outcomes) == SKIPPED > mine:
                own = pytest.skip.Exception("on another rank")
                own.is_of_another_rank = True
            elif max(outcomes) > mine:
                own = UnsatisfiedAssumption()
            if own is not None:
                raise own

        example.agrees = True  # type: ignore[attr-defined]
        return example


def unwrap(call: pytest.CallInfo[None]) -> None:
    """Replace ExampleFailedError by the example's own error, or by none if the example failed on other ranks only."""
    failure: Any = None if call.excinfo is None else call.excinfo.value
    if isinstance(failure, ExampleFailedError) or hasattr(failure, "is_of_another_rank"):
        error, call.excinfo = failure.__cause__, None
        if error is not None:
            error.__notes__ = getattr(failure, "__notes__", [])  # the simplest example, in hypothesis' words
            call.excinfo = pytest.ExceptionInfo.from_exception(error)


def _failure(given: dict[str, Any], error: BaseException | None) -> str:
    """Return the text of an example and its error."""
    example = ", ".join(f"{name}={value!r}" for name, value in given.items())[:LONGEST_EXAMPLE]
    return "\n".join([example, *traceback.format_exception(error)])
