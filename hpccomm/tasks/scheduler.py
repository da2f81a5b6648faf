"""The scheduler: rank 0's part of a pool. It hands out tasks, collects results, and detects late or dead workers.

It runs in a thread of its own, which calls MPI. Without MPI_THREAD_MULTIPLE it runs while the program waits for a
result.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from mpi4py import MPI
from mpi4py.util import pkl5

from ..core.timeouts import as_seconds, pause, pauses
from ..core.wakes import Bell, Event
from ..errors import DistBackendError, DistTimeoutError, RankFailedError, log_exception, on_rank
from ..job import failures, mpi_library
from .messages import TAG, Call, Outcome, Stop, error_of
from .task import Task, TaskFuture

if TYPE_CHECKING:
    from ..core.group import ProcessGroup

QUICK = 0.01  # seconds: workers with shorter tasks get one task in advance, to hide the latency of messages
DEATHS = 2  # of workers in one task: then the task fails
PAUSE = 0.1  # seconds between checks for late workers
LONGEST_GOODBYE = 5.0  # seconds to wait for the thread at exit


class Served:
    """Rank 0's state of one worker."""

    def __init__(self, rank: int) -> None:
        self.rank = rank  # in the group
        self.sent: deque[tuple[Task, Any]] = deque()  # each with its send request; the worker runs the first
        self.since = time.monotonic()  # start of the first task
        self.is_ready = False  # the initializer has returned
        self.is_quick = False
        self.was_reported = False  # as late
        self.is_late = False  # its task has failed with a timeout, and nobody waits for it


class Scheduler:
    """The scheduler of an executor.

    `task_timeout` is in seconds. None: no limit; a task that takes longer than the group's `timeout` is only reported.
    """

    def __init__(self, group: ProcessGroup, comm: MPI.Intracomm, task_timeout: float | None) -> None:
        self._group = group
        self._raw = comm
        self._comm = pkl5.Intracomm(comm)
        self._task_timeout = task_timeout
        # A late worker would run its advance task when it returns, although another worker has run it.
        self._gives_in_advance = task_timeout is None or group.on_timeout != "raise"
        self._tasks: deque[Task] = deque()
        self._workers = {rank: Served(rank) for rank in range(1, group.size)}
        self._idle: deque[Served] = deque()
        self._stopping: list[tuple[int, Any]] = []
        self._clock = time.monotonic()
        self._is_closing = self._is_ending = False
        self._has_lost = False  # a worker: do not free the communicator
        self._broken: BaseException | None = None
        self._lock = threading.Lock()  # of the tasks and the flags
        self._looking = threading.Lock()
        self._news = Bell()
        self.is_over = Event()  # all workers but late ones have been released
        self.has_thread = mpi_library.any_thread_may_call()
        if self.has_thread:
            self._thread = threading.Thread(target=self._run, name="hpccomm-executor", daemon=True)
            self._thread.start()
            atexit.register(self._at_exit)  # before MPI_Finalize

    # -- the executor's interface --------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The number of living workers."""
        return len(self._workers)

    def submit(self, call: Call) -> TaskFuture:
        """Queue a call."""
        future = TaskFuture(self)
        with self._lock:
            if self._is_closing:
                raise RuntimeError(f"executor: cannot schedule new futures after shutdown{on_rank()}")
            if self._broken is not None:
                raise concurrent.futures.BrokenExecutor(str(self._broken)) from self._broken
            self._tasks.append(Task(self._group, call, future))
        self._news.ring()
        return future

    def close(self, cancels: bool) -> None:
        """Release the workers when all tasks are done; `cancels` cancels tasks that have not begun."""
        with self._lock:
            self._is_closing = True
        for task in list(self._tasks) if cancels else ():
            task.future.cancel()
        self._news.ring()

    def wait(self) -> None:
        """Wait until the workers have been released."""
        if self.has_thread:
            self.is_over.wait()
            return
        looks = pauses()
        while not self.is_over.is_set():
            if self.look():
                looks = pauses()
            pause(next(looks))

    def is_own_thread(self) -> bool:
        """Return whether the caller is the scheduler's thread, running a callback."""
        return self.has_thread and threading.current_thread() is self._thread

    def tasks_waited_for(self) -> list[Task]:
        """Return the running tasks, or else one queued task; the watchdog calls it for a thread in `wait`."""
        workers = [each for each in list(self._workers.values()) if not each.is_late]
        return [task for each in workers for task, _ in list(each.sent)] or list(self._tasks)[:1]

    # -- the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        looks = pauses()
        while not (self._has_ended() or self._is_ending):
            if self.look():
                looks = pauses()
            elif not self._is_waiting():
                if not self._has_ended():
                    self._news.wait()
            elif (seconds := next(looks)) == 0:
                pause(0)
            else:
                self._news.wait(seconds)
        self.is_over.set()
        atexit.unregister(self._at_exit)

    def _is_waiting(self) -> bool:
        """Return whether a message from or to a worker is outstanding."""
        return bool(self._stopping) or any(each.sent or not each.is_ready for each in self._workers.values())

    def _has_ended(self) -> bool:
        return self.is_over.is_set() and not self._workers and not self._stopping

    def _at_exit(self) -> None:
        if self._is_closing:  # the workers will be released soon
            self._thread.join()
        self._is_ending = True
        self._news.ring()
        self._thread.join(LONGEST_GOODBYE)

    def look(self) -> bool:
        """Receive outcomes and hand out tasks; return whether an outcome arrived."""
        if not self._looking.acquire(blocking=False):
            return False
        try:
            has_come = self._take()
            self._hand_out()
            now = time.monotonic()
            if now > self._clock + PAUSE:
                self._clock = now
                self._look_at_the_clock(now)
            self._release()
        except BaseException as error:
            if not self.has_thread and not isinstance(error, Exception):  # Ctrl-C
                raise
            self._break(error)  # otherwise the futures would never complete
            return False
        else:
            return has_come
        finally:
            self._looking.release()

    # -- tasks -------------------------------------------------------------------------------------------

    def _take(self) -> bool:
        """Receive the outcomes that have arrived."""
        status = MPI.Status()
        has_come = False
        while True:
            try:
                message = self._comm.improbe(MPI.ANY_SOURCE, TAG, status)
                if message is None:
                    return has_come
                outcome: Outcome | BaseException = Outcome(*message.recv())
            except MPI.Exception as error:
                self._bury_the_dead(error)
                continue
            except BaseException as error:  # from unpickling, for example of a module that calls sys.exit
                outcome = error
            has_come = True
            worker = self._workers.get(status.Get_source())
            if worker is not None:  # not removed by `_break`
                self._settle(worker, outcome)

    def _settle(self, worker: Served, outcome: Outcome | BaseException) -> None:
        rank = self._group.ranks[worker.rank]
        if not worker.is_ready:
            worker.is_ready = True
            failure = None if isinstance(outcome, BaseException) else outcome.failure
            if failure is not None:
                broken = concurrent.futures.BrokenExecutor(f"the initializer has failed on rank {rank}{on_rank()}")
                broken.__cause__ = error_of(failure, "the initializer", rank)
                self._break(broken)
        else:
            task, request = worker.sent.popleft()
            request.wait()
            worker.is_late = worker.was_reported = False
            worker.since = time.monotonic()
            if isinstance(outcome, BaseException):
                error = TypeError(f"the result of {task.call} can't be made of its pickle ({outcome!r}){on_rank()}")
                error.__cause__ = outcome
                task.fail(error)
            elif outcome.failure is not None:
                task.fail(error_of(outcome.failure, task.call, rank))
            else:
                worker.is_quick = outcome.seconds < QUICK
                task.succeed(outcome.result)
        self._supply(worker)

    def _hand_out(self) -> None:
        for _ in range(len(self._idle)):
            if not self._tasks:
                return
            self._supply(self._idle.popleft())

    def _supply(self, worker: Served) -> None:
        """Give a worker its next task, and one in advance if tasks are short and there are many."""
        many = len(self._tasks) > len(self._workers)
        wanted = 2 if worker.is_quick and many and self._gives_in_advance else 1
        while len(worker.sent) < wanted and worker.rank in self._workers and (task := self._next()) is not None:
            self._send(worker, task)
        if not worker.sent and worker.rank in self._workers:
            self._idle.append(worker)

    def _next(self) -> Task | None:
        while True:
            with self._lock:
                if not self._tasks:
                    return None
                task = self._tasks.popleft()
            if task.begin():
                return task

    def _send(self, worker: Served, task: Task) -> None:
        try:
            call = task.call
            request = self._comm.isend((call.fn, call.args, call.kwargs), worker.rank, TAG)
        except MPI.Exception as error:
            self._tasks.appendleft(task)
            self._bury_the_dead(error)
        except Exception as error:
            reason = TypeError(
                f"{task.call} can't be pickled ({type(error).__name__}: {error}); its function has to be defined at "
                f"the top of a module or of the program{on_rank()}"
            )
            reason.__cause__ = error
            task.fail(reason)
        else:
            if not worker.sent:
                worker.since = time.monotonic()
            worker.sent.append((task, request))
            task.worker = worker.rank

    # -- errors -------------------------------------------------------------------------------------------

    def _bury_the_dead(self, error: MPI.Exception) -> None:
        """Requeue the tasks of dead workers; raise `error` if it reports no death."""
        dead = [self._workers.pop(rank) for rank in failures.dead_members(self._raw) if rank in self._workers]
        if not dead and not failures.is_death(error):
            raise error
        self._has_lost = self._has_lost or bool(dead)
        for worker in dead:
            if worker in self._idle:
                self._idle.remove(worker)
            for task, request in reversed(worker.sent):
                failures.unsafe_buffers.append(request)
                self._tasks.appendleft(task)
                task.worker = None
            if worker.sent:
                self._blame(worker.sent[0][0], self._group.ranks[worker.rank])
            elif not worker.is_ready or not self._is_closing:
                self._tell(f"rank {self._group.ranks[worker.rank]} has died; the others go on")
        if not self._workers:
            text = f"executor: all ranks that could do a task have died{on_rank()}"
            raise RankFailedError(text, self._group.ranks[1:])

    def _blame(self, task: Task, rank: int) -> None:
        """Count a worker's death against its task; after `DEATHS` of them the task fails."""
        task.deaths += 1
        if task.deaths < DEATHS:
            self._tell(f"rank {rank} has died in the task {task.call}, which is given to another rank")
            return
        self._tasks.remove(task)
        text = f"{DEATHS} ranks have died in the task {task.call}, the last one was rank {rank}"
        task.fail(RankFailedError(f"{text}; it is given to no other{on_rank()}", (rank,)))

    def _break(self, error: BaseException) -> None:
        """Fail all queued and future tasks; if MPI has failed, also the tasks in flight."""
        if isinstance(error, MPI.Exception):
            error = DistBackendError(f"executor: MPI reports: {error.Get_error_string().strip()}{on_rank()}")
        elif not isinstance(error, concurrent.futures.BrokenExecutor | RankFailedError) and self._broken is None:
            log_exception("the scheduler of an executor raised")
        with self._lock:
            self._broken = self._broken or error
            waiting = list(self._tasks)
            self._tasks.clear()
        if isinstance(error, DistBackendError):  # includes RankFailedError: no worker is left
            waiting += [task for worker in self._workers.values() for task, _ in worker.sent]
            self._has_lost = True
            self._workers.clear()
            self._idle.clear()
            self._stopping.clear()
        for task in waiting:
            task.fail(error)

    def _look_at_the_clock(self, now: float) -> None:
        limit = self._task_timeout or as_seconds(self._group.timeout)
        for worker in list(self._workers.values()):
            if (worker.sent or not worker.is_ready) and now - worker.since > limit and not worker.was_reported:
                worker.was_reported = True
                self._time_out(worker, now - worker.since)

    def _time_out(self, worker: Served, seconds: float) -> None:
        """Report a late worker's place, and act on the group's `on_timeout`."""
        from ..debug.watchdog import end_job, places

        process = failures.ranks_in_the_job(self._raw)[worker.rank]
        task = worker.sent[0][0] if worker.sent else None
        what = "the initializer of the executor" if task is None else f"the task {task.call}"
        place = places().get(process) or "a place that is not known"
        text = f"rank {self._group.ranks[worker.rank]} has been in {what} for {seconds:.3g} s, at {place}"
        action = "" if self._task_timeout is None else self._group.on_timeout
        if action == "abort":
            end_job(f"{text}; task_timeout of the executor is {self._task_timeout:g} s")
        elif action == "raise" and task is not None:
            worker.is_late = True
            task.fail(DistTimeoutError(f"executor: {text}; task_timeout is {self._task_timeout:g} s{on_rank()}"))
        else:
            self._tell(f"{text}; task_timeout= of hc.executor ends such tasks" if not action else text)

    def _tell(self, text: str) -> None:
        from ..process.stderr import log

        log(f"executor: {text}")

    # -- the end -----------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Tell the workers to stop when no task is left; late workers get the message when they return."""
        with self._lock:
            is_done = self._is_closing and not self._tasks
        if not is_done or any((each.sent or not each.is_ready) and not each.is_late for each in self._workers.values()):
            return
        while self._idle:
            worker = self._idle.popleft()
            self._stopping.append((worker.rank, self._comm.isend(Stop(self._has_lost), worker.rank, TAG)))
            del self._workers[worker.rank]
        self._stopping = [each for each in self._stopping if not self._has_gone(*each)]
        if not self._stopping:
            if not self._workers and not self._has_lost:
                self._has_lost = True  # once
                self._raw.Free()
            self.is_over.set()

    def _has_gone(self, rank: int, request: Any) -> bool:
        try:
            return bool(request.test()[0])
        except MPI.Exception:
            self._has_lost = True
            if rank not in failures.dead_members(self._raw):
                raise
            failures.unsafe_buffers.append(request)
            return True
