"""The watchdog: a thread that looks once a second at the calls that the program's threads are in.

A call that is on a stack in two successive looks has been in flight in between: operations record nothing and pay
nothing. The watchdog never calls MPI, so it works at every thread level, and while MPI hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import os
import select
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ..core.ending import SHORTEST_MEETING
from ..core.group import ProcessGroup
from ..core.options import DEFAULT_TIMEOUT
from ..core.timeouts import as_seconds, keeps_time
from ..core.work import Work
from ..errors import DistError
from ..process import settings, stderr
from ..process.printed import launchers_stderr, let_go_of_output, let_launcher_read
from ..process.proc import MAPPED_LATER, take_names_away
from ..process.stderr import tell, tell_verdict
from . import stacks
from .ctrl_c import PATIENCE_WITH_PYTHON, end_on_ctrl_c
from .culprits import Verdict, verdict
from .groups_seen import groups, key_of, works_in_flight
from .held import clock, identify_groups
from .report import Reporter
from .sources import SOURCES
from .stacks import CallInFlight
from .standing import Standing
from .start import LONGEST_PERIOD, Signals, current, period
from .trace.files import save
from .waiting import Wait
from .words import duration

WARN_AFTER = 60.0  # seconds; the earliest time of a warning
SHORTEST_START = 5.0  # seconds that making a world may take, even if its timeout is shorter
PATIENCE = 5.0  # seconds for the other ranks' reports
FOLDER_PERIOD = 3.0  # seconds between two looks for a question from another node, or from `hpccomm debug --job`
POLLED_WITHIN = 10.0  # seconds after its last poll for which an incomplete Work counts as polled
IF_ALL_WAIT = "abort if all wait"  # `on_timeout` of the groups of `hpccomm run`, unless the user sets it
PATIENCE_AFTER_SIGTERM = 0.5  # seconds for reports: launchers send SIGKILL a second later
JUDGES = 3  # ranks that ask for the others' places, one after the other, after they have been in a call of C for long
STATUS = 124  # the exit status of a job that is ended, like that of `timeout`


@dataclass
class _Observed:
    """A call that was seen, and the times of the first and the last look that saw it."""

    call: CallInFlight
    first: float
    last: float
    begun: dict[str, int]  # operations that the process had begun at the first look, by group key
    has_warned: bool = False
    has_timed_out: bool = False
    asks_again_at: float = math.inf  # set if the job continues because a rank may only be slow


class Watchdog:
    """The watchdog of this process."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self._seen: dict[Any, _Observed] = {}
        self._reported: set[str] = set()
        self.has_stopped = False
        self._thread = 0  # the identifier of its thread
        self._woken = 0  # number of times that it was woken to look into the folder
        self._looked_for_questions = time.monotonic()
        self._timeout_of_init = DEFAULT_TIMEOUT.total_seconds()
        with contextlib.suppress(ValueError):  # every rank raises it when ranks agree on the settings
            self._timeout_of_init = settings.read().timeout or self._timeout_of_init
        self._standing = Standing()
        self._asks_from = 0.0  # seconds in one call of C after which this rank asks for the others' places
        reporter.standstill = self._standing.seconds

    def run(self, signals: Signals) -> None:
        """Look at calls and answer questions until it is stopped."""
        self._thread = threading.get_ident()
        mailbox = self.reporter.mailbox
        mailbox.open()
        os.register_at_fork(after_in_child=mailbox.close)
        poll = select.poll()  # select.select takes no descriptor above 1023
        for file, _ in signals.pipes.values():
            poll.register(file, select.POLLIN)
        hears: bool | None = False  # None after the program has closed the mailbox's descriptor
        while not self.has_stopped:
            try:
                if hears not in (None, mailbox.is_open) and mailbox.fileno() >= 0:
                    hears = mailbox.is_open
                    if hears:
                        poll.register(mailbox.fileno(), select.POLLIN)
                    else:
                        poll.unregister(mailbox.fileno())
                    self._tell_of_strangers()
                events = dict(poll.poll(1000 * period()))
                for file in [file for file, event in events.items() if event & select.POLLNVAL]:
                    poll.unregister(file)  # the program has closed it
                    hears = None if file == mailbox.fileno() else hears
                came = {number: read for number, (read, _) in signals.pipes.items() if read in events}
                if signal.SIGINT in came:
                    os.read(came[signal.SIGINT], 1 << 16)
                    end_on_ctrl_c(self.reporter.rank, lambda where: self._tell_once(where, stream=stderr.uncaptured()))
                if signal.SIGTERM in came:
                    self._end_on_sigterm()
                self.look(clock())
                askers = mailbox.askers(time.monotonic())
                is_woken = bool(events) or mailbox.was_woken  # perhaps by a datagram that arrived after the poll
                self._woken += is_woken
                mailbox.was_woken = False
                if signal.SIGUSR2 in came:
                    os.read(came[signal.SIGUSR2], 1 << 16)
                    askers.append(b"")
                if askers:
                    self._ask_for(askers)
                elif (is_woken or self._looks_for_questions()) and self.reporter.is_asked():
                    self._answer()
            except Exception as error:  # the watchdog must not end before the program
                text = f"hpccomm: the watchdog of rank {self.reporter.rank} failed: {type(error).__name__}: {error}"
                if text not in self._reported:
                    self._reported.add(text)
                    tell(text)
                time.sleep(LONGEST_PERIOD)

    def _tell_of_strangers(self) -> None:
        """Report once that another user's datagrams have closed the mailbox for a while."""
        text = (
            f"hpccomm: rank {self.reporter.rank} does not answer `hpccomm debug --pid` for a minute: user "
            f"{self.reporter.mailbox.stranger} of this node sends it many datagrams; `hpccomm debug --job` works"
        )
        if self.reporter.mailbox.stranger is not None and text not in self._reported:
            self._reported.add(text)
            tell(text)

    def _ask_for(self, askers: list[bytes]) -> None:
        """Ask all ranks on behalf of processes outside the job, and send these processes the reports' folder."""
        if self.reporter.time_of_end() is None:
            token = self.reporter.ask(self.reporter.mailbox.counts)
            for asker in filter(None, askers):
                self.reporter.mailbox.answer(asker, self.reporter.folder.places[0], token)
        self._answer()

    def _answer(self) -> None:
        self.reporter.answer(self.elapsed())
        when = self.reporter.time_of_end()
        if when is not None:
            self.reporter.wake()  # ranks of another node get no datagram from the rank that ends the job
            save(self.reporter.folder.places[0])
            _end_at(when)

    def _looks_for_questions(self) -> bool:
        """Return whether to look now for a question from another node, which sends no datagram."""
        on_this_node = self.reporter.processes
        if self.reporter.mailbox.is_open and on_this_node and self.reporter.rank != min(on_this_node):
            return False
        if time.monotonic() - self._looked_for_questions < FOLDER_PERIOD:
            return False
        self._looked_for_questions = time.monotonic()
        return True

    # -- looking -----------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Look at the calls in flight; warn about calls that take too long, or end the job."""
        identify_groups()
        self.reporter.meter.look(now)
        for source in SOURCES:
            source.polls()
        begun = {key_of(group): group.sequence_number + group.message_number for group in groups()}
        for call in in_flight():
            observed = self._seen.get(call.key)
            # A program that polls and begins operations does not wait. (A group that is collected begins none.)
            goes_on = observed is not None and call.is_polled and not begun.items() <= observed.begun.items()
            if observed is None or goes_on:
                self._seen[call.key] = observed = _Observed(call, now, now, begun)
            observed.call, observed.last = call, now
        for key, observed in list(self._seen.items()):
            # Of a polled Work, a look sees only the polls since the look before.
            if observed.last != now and (now - observed.last > POLLED_WITHIN or not _is_in_flight(observed.call)):
                del self._seen[key]
        for observed in list(self._seen.values()):
            self._judge(observed, now)
        stands = self._standing.look(now)
        is_judge = self.reporter.size > 1 and self.reporter.rank < JUDGES
        if is_judge and all(_has_no_limit(each.call) for each in self._seen.values()):
            self._judge_standstill(stands)

    def _judge(self, observed: _Observed, now: float) -> None:
        call, elapsed = observed.call, now - observed.first
        if _has_no_limit(call):
            return
        limit = self._limit(call)
        if call.can_raise or stacks.is_in_mismatch_check(call.group):  # it ends by itself before that
            limit = 1.1 * max(limit, SHORTEST_MEETING) + 2 * PATIENCE
        if elapsed > limit and not observed.has_timed_out:
            observed.has_timed_out = True
            self._time_out(observed, elapsed)
        elif now > observed.asks_again_at:
            self._ask_again(observed, now)
        elif elapsed > max(WARN_AFTER, limit / 10) and not observed.has_warned and call.record.name != "leave":
            observed.has_warned = True
            tell(
                f"hpccomm: rank {self.reporter.rank}: {call.record} at {call.record.where} has been in flight for "
                f"{duration(elapsed)} (timeout {duration(limit)}); `hpccomm debug --pid {os.getpid()}` says who is late"
            )

    def _judge_standstill(self, stands: float) -> None:
        """End the job, or report, if every rank is in a call of C that hpccomm can't see into, for the time limit.

        A rank may compute there for longer, or wait for threads or processes that compute. So the job ends only under
        ``hpccomm run``, if the user wants the time limit to end it and no rank has further threads.
        """
        reporter = self.reporter
        watched = [SOURCES[0].group] if SOURCES else groups()
        limit = max((as_seconds(group.timeout) for group in watched), default=math.inf)
        if not SOURCES:
            limit = max(limit, WARN_AFTER)
        first = limit + 2 * PATIENCE * reporter.rank  # the next rank asks if this one can't
        if stands < first:
            self._asks_from = first
        if stands < self._asks_from:
            return
        found = verdict(reporter.reports("standstill", self.elapsed(), self._patience()), reporter.size)
        self._asks_from = stands + limit - found.standstill
        if found.standstill < limit or not reporter.claim(stands):
            return
        self._asks_from = math.inf
        ends = bool(SOURCES) and watched[0].on_timeout in ("abort", "raise") and not found.has_threads
        try:
            self._tell_end([*found.lines, self._where_reports_are()], watched[0], ends)
            reporter.conclude("\n".join(found.lines))
        finally:
            if ends:
                self._end()

    def _limit(self, call: CallInFlight) -> float:
        if call.group is None:
            return max(call.timeout or self._timeout_of_init, SHORTEST_START)
        limit = as_seconds(call.group.timeout)
        return limit if call.timeout is None else max(limit, call.timeout)

    def elapsed(self) -> dict[Any, float]:
        """Return the seconds since each call in flight was first seen, by the call's key."""
        now = clock()
        return {key: now - observed.first for key, observed in self._seen.items()}

    # -- the end -----------------------------------------------------------------------------------------

    def _time_out(self, observed: _Observed, elapsed: float) -> None:
        call, reporter = observed.call, self.reporter
        action = "abort" if call.group is None else call.group.on_timeout
        ends = action == "abort" or (action == "raise" and call.work is None and not call.can_raise)
        what = self._has_not_ended(call, elapsed)
        try:
            same = (each for each in stacks.calls_in_flight(exactly=True) if each.key[:2] == call.key[:2])
            what = self._has_not_ended(next(same, call), elapsed)
            overdue = min(elapsed, max(0.0, elapsed - self._limit(call)) + PATIENCE)  # earlier verdicts are others'
            if self._gives_the_verdict(overdue, more=2 * PATIENCE + FOLDER_PERIOD if ends else 0.0):
                with reporter.at_work():
                    found = verdict(self._reports("timeout"), reporter.size)
                    lines = [what, *found.lines, self._where_reports_are()]
                    ends = ends or (action == IF_ALL_WAIT and found.all_wait > self._limit(call) / 2)
                    if action == IF_ALL_WAIT and not ends:
                        observed.asks_again_at = clock() + self._limit(call)
                    if ends and _has_gone_on(call):
                        ends = False
                        lines.append("it has ended while the ranks were asked: the job goes on")
                    self._tell_end(lines, call.group, ends)  # first: the program waits for the file, and may then end
                    reporter.conclude("\n".join(found.lines))
            else:  # another rank gives the verdict; this rank, too, ends the job unless its own call has ended
                ends = ends and not _has_gone_on(call)
                if ends:
                    self._tell_end([what, *reporter.conclusion().splitlines()], call.group, ends)
        except OSError as error:
            self._tell_end([what, f"reports can't be written: {error}"], call.group, ends)
        except Exception as error:
            self._tell_end([what, f"there is no verdict: {type(error).__name__}: {error}"], call.group, ends)
        finally:
            if ends:
                self._end()

    def _has_not_ended(self, call: CallInFlight, elapsed: float) -> str:
        if call.record.name == "leave":
            return f"rank {self.reporter.rank} has waited at the end of its program for {duration(elapsed)}"
        after = f"has not ended within {duration(elapsed)} (rank {self.reporter.rank})"
        return f"{call.record} at {call.record.where} {after}"

    def _ask_again(self, observed: _Observed, now: float) -> None:
        """End the job if every rank waits by now; this rank has reported that one may only be slow."""
        limit = self._limit(observed.call)
        found = verdict(self._reports("timeout"), self.reporter.size)
        observed.asks_again_at = now + limit - found.all_wait
        if found.all_wait <= limit / 2 or not self.reporter.claim(found.all_wait) or _has_gone_on(observed.call):
            return
        try:
            self._tell_end([*found.lines, self._where_reports_are()], observed.call.group, ends=True)
            self.reporter.conclude("\n".join(found.lines))
        finally:
            self._end()

    def _where_reports_are(self) -> str:
        folder = self.reporter.folder.places[0]
        return f"the reports of the ranks are in {folder}; `hpccomm debug {folder}` shows this again"

    def _tell_end(self, lines: list[str], group: ProcessGroup | None, ends: bool) -> None:
        action = "abort" if group is None else group.on_timeout
        is_of_run = any(group is None or group.timeout == source.group.timeout for source in SOURCES)
        if ends:
            why = ", because a blocking call of MPI can't be interrupted" if action == "raise" else ""
            why = f"--on-timeout abort{why}" if is_of_run else f"on_timeout={action!r}{why}"
            why = "every rank waits" if action == IF_ALL_WAIT else why
            lines.append(f"the job ends with status {STATUS} ({why})")
            how = (
                "hpccomm run --timeout SECONDS"
                if is_of_run
                else "timeout= of the group, or HPCCOMM_TIMEOUT in seconds,"
            )
            lines.append(f"{how} allows more time")
        elif action == IF_ALL_WAIT:
            lines.append("the job goes on, because a rank may only be slow: hpccomm run --timeout SECONDS ends it")
        tell_verdict(lines, stderr.uncaptured() if ends else None)

    def inquire(self) -> Verdict:
        """Ask all ranks for their reports, write the verdict into the folder, and return it."""
        with self.reporter.at_work():
            found = verdict(self._reports("timeout"), self.reporter.size)
            self.reporter.conclude("\n".join(found.lines))
        return found

    def _reports(self, reason: str) -> list[dict[str, Any]]:
        return self.reporter.reports(reason, self.elapsed(), self._patience())

    def _patience(self) -> float:
        """Return the seconds within which all ranks that can answer do so."""
        all_are_on_this_node = len(self.reporter.processes) >= self.reporter.size
        return PATIENCE if all_are_on_this_node else PATIENCE + FOLDER_PERIOD

    def _gives_the_verdict(self, elapsed: float, more: float = 0.0) -> bool:
        """Return whether this rank must give the verdict; if not, wait for it, and `more` seconds for the end.

        It waits as long as the rank that makes the verdict lives and works; otherwise another rank takes over.
        """
        began, lost = time.monotonic(), 0
        while not self.reporter.claim(elapsed + time.monotonic() - began, lost):
            if self._wait_for_the_verdict(more):
                return False
            lost = self.reporter.claimed
        return True

    def _wait_for_the_verdict(self, more: float = 0.0, at_most: float = math.inf) -> bool:
        """Wait for a verdict, and `more` seconds; return False if its rank is lost, or after `at_most` seconds."""
        began, woken = time.monotonic(), self._woken
        reporter, wait = self.reporter, Wait(self.reporter.place(), began)
        while (outcome := wait.outcome(time.monotonic())) == "waits" and time.monotonic() < began + at_most:
            if threading.get_ident() == self._thread:  # other threads leave the datagrams to this one
                askers = reporter.mailbox.askers(time.monotonic())
                self._woken += reporter.mailbox.was_woken
                reporter.mailbox.was_woken = False
                if askers:
                    self._ask_for(askers)
            is_woken, woken = self._woken != woken, self._woken
            if wait.is_due(time.monotonic(), is_woken):
                if reporter.is_asked():
                    self._answer()
                if wait.saw(time.monotonic(), reporter.sign_of_life(), reporter.has_concluded(), more) and not is_woken:
                    reporter.wake()
            time.sleep(0.05)
        return outcome == "given"

    def who_is_late(self) -> str:
        """Return the verdict: this rank's, or that of another rank that claimed it before."""
        call = stacks.call_of_thread(threading.get_ident())
        elapsed = self.elapsed().get(None if call is None else call.key, LONGEST_PERIOD)
        if self._gives_the_verdict(min(PATIENCE, elapsed)):
            found = self.inquire()
            return "\n".join(found.lines) if found.culprits else ""
        return self.reporter.conclusion()

    def _end(self) -> NoReturn:
        """End the job: the launcher ends the other ranks after one has ended like this. MPI_Abort might hang.

        Ranks that can end by themselves do so at the same time. The launcher then returns their status, instead of that
        of processes that it has killed.
        """
        when = time.time()
        try:
            let_launcher_read()
            when = self.reporter.end_in(0.5)
            save(self.reporter.folder.places[0])
        finally:
            _end_at(when)

    def _tell_once(self, where: str, patience: float = PATIENCE, stream: TextIO | None = None) -> None:
        """Print this rank's place and the verdict, if this rank is the first to do so at the end of the job."""
        try:
            if not self.reporter.claim(2 * PATIENCE_WITH_PYTHON):
                self._wait_for_the_verdict(at_most=patience)
                return
            found = verdict(self.reporter.reports("the end", self.elapsed(), patience), self.reporter.size)
            tell("\n".join([where, *(f"hpccomm: {line}" for line in found.lines)]), stream)
            self.reporter.conclude("\n".join(found.lines))
        except OSError:  # no folder is writable
            tell(where, stream)

    def _tell_of_sigterm(self) -> None:
        waits = [each.call.record for each in self._seen.values() if not each.call.is_polled]
        if not waits:  # the others may wait for this rank
            self._wait_for_the_verdict(at_most=PATIENCE_AFTER_SIGTERM)
            return
        where = "at the end of its program" if waits[0].name == "leave" else f"in {waits[0]}"
        with launchers_stderr() as stream:
            where = f"hpccomm: rank {self.reporter.rank} is {where}; SIGTERM ends the job"
            self._tell_once(where, PATIENCE_AFTER_SIGTERM, stream)
        let_launcher_read()

    def _end_on_sigterm(self) -> None:
        """Leave a report on SIGTERM, and end as without a watchdog; under `hpccomm run`, also give a verdict.

        Open MPI's launcher sends SIGTERM after Ctrl-C, and also after a rank has died, which needs no verdict.
        """
        try:
            self.look(clock())
            if SOURCES and self.reporter.has_all_neighbours():
                self._tell_of_sigterm()
            if self._seen:
                self.reporter.write("SIGTERM", self.elapsed(), self.reporter.question())
            save(self.reporter.folder.places[0])
        except Exception as error:
            tell(f"hpccomm: rank {self.reporter.rank} leaves no report: {type(error).__name__}: {error}")
        finally:
            take_names_away(MAPPED_LATER)
            faulthandler.unregister(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)


def in_flight() -> list[CallInFlight]:
    """Return the calls that the program waits in, and the calls for Works that it polls."""
    found = {call.key: call for call in stacks.calls_in_flight(without=threading.get_ident())}
    for work in works_in_flight():
        if _was_asked(work) or getattr(work, "is_driven", False) or _gpu_is_busy(work):
            call = stacks.polled_call(work, stacks.line_in_program())
            found.setdefault(call.key, call)
    return list(found.values())


def _end_at(when: float) -> NoReturn:
    """End this process at a time (seconds since the epoch, within the next second), to the millisecond.

    It waits with the GIL held: a program that computes would let this thread continue some milliseconds late. The other
    threads, which may wait in MPI without a pause, get the lowest priority. The launcher kills a rank that is late, and
    MPICH's (hydra's pmip.c) may then return 9 for the job.
    """
    let_go_of_output()
    take_names_away(MAPPED_LATER)
    for thread in map(int, os.listdir("/proc/self/task")):
        if thread != threading.get_native_id():
            with contextlib.suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, thread, 19)
    ctypes.PyDLL(None).usleep(int(1e6 * max(0.0, min(when - time.time(), 0.999))))
    os._exit(STATUS)


def _has_no_limit(call: CallInFlight) -> bool:
    """Return True for waits as a spare, for a task, or (except under `hpccomm run`) at the end of the program.

    The other ranks may compute for hours.
    """
    if call.record.name == "leave":
        return all(source.group is not call.group for source in SOURCES)
    return call.record.name == "spare" or call.record.is_awaited


def _has_gone_on(call: CallInFlight) -> bool:
    """Return whether a call has ended since it was seen."""
    others = stacks.calls_in_flight(without=threading.get_ident())
    return not _is_in_flight(call) and all(each.key != call.key for each in others)


def _is_in_flight(call: CallInFlight) -> bool:
    """Return whether the Work of a call has not completed."""
    work = None if call.work is None else call.work()
    return work is not None and work in works_in_flight()


def _was_asked(work: Any) -> bool:
    """Return whether the program has polled a Work since the last look."""
    asked, work.was_asked = work.was_asked, False
    return bool(asked)


def _gpu_is_busy(work: Any) -> bool:
    """Return whether a GPU's Work has an event that has not passed. Polling it does not call MPI, so any thread may."""
    if not (isinstance(work, Work) and work.progress.any_thread_may_poll):
        return False
    try:
        return not work.poll()
    except Exception:  # the thread that waits for it gets the error, too
        return False


# -- the one of this process ---------------------------------------------------------------------------------


@keeps_time
def who_is_late() -> str:
    """Ask all ranks for their reports and return the verdict, or "" if it names no rank; takes a few seconds.

    The program's own threads call it after they have waited too long, before they raise.
    """
    watchdog = current()
    try:
        return "" if watchdog is None else watchdog.who_is_late()
    except OSError:  # no folder is writable
        return ""


def reports() -> list[dict[str, Any]]:
    """Ask all ranks for their reports and return those that arrive; [] before there is a world."""
    watchdog = current()
    try:
        return [] if watchdog is None else watchdog._reports("asked")
    except OSError:  # no folder is writable
        return []


def places() -> dict[int, str]:
    """Return the line and function that each rank is in, ``"train.py:88 in load"``; {} before there is a world."""
    return {each["rank"]: each["program"] for each in reports()}


def end_job(why: str) -> NoReturn:
    """End the job with status 124; print the reason, and the folder of the reports."""
    watchdog = current()
    lines = [why, f"the job ends with status {STATUS}"]
    if watchdog is None:
        tell_verdict(lines, stderr.uncaptured())
        _end_at(time.time())
    try:
        with contextlib.suppress(OSError):  # no folder is writable
            watchdog.inquire()
            lines.insert(1, watchdog._where_reports_are())
        tell_verdict(lines, stderr.uncaptured())
    finally:
        watchdog._end()


def dump(reason: str = "asked by the program") -> Path:
    """Write the report of this rank, at any moment and from any thread; other ranks are not asked.

    Parameters
    ----------
    reason : str
        The reason that ``hpccomm debug`` shows.

    Returns
    -------
    pathlib.Path
        The file, ``rank<N>.json`` in ``HPCCOMM_DEBUG_DIR`` (default: a folder ``hpccomm-debug-*`` in the working
        directory, made now); N is the rank in MPI.COMM_WORLD.

    Raises
    ------
    DistError
        Before init_process_group.

    Examples
    --------
    >>> import json, hpccomm.debug
    >>> file = hpccomm.debug.dump("an example")
    >>> file.name, json.loads(file.read_text())["reason"]
    ('rank0.json', 'an example')
    """
    watchdog = current()
    if watchdog is not None:
        return watchdog.reporter.write(reason, watchdog.elapsed())
    group = next(iter(groups()), None)
    if group is None:
        raise DistError("hpccomm.debug.dump: there is no process group: call hpccomm.init_process_group() first")
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    return Reporter(comm.Get_rank(), comm.Get_size(), group.settings.debug_dir, group.processes).write(reason)


def last_words(reason: str) -> None:
    """Write this rank's report and its recording, because the job is about to end."""
    save(dump(reason).parent)
