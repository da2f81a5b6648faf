"""Dispatcher: pass each checked operation of a group to the backend of its arrays' device.

It numbers operations, calls hooks, translates the backends' errors, and keeps the Works in flight. Only the fast paths
call MPI or NCCL without it, and number their operations themselves. The watchdog reads `self` and `call` from frames of
`Dispatcher.run` (`debug/stacks.py`): a thread inside this function is in that operation.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeAlias

from ..errors import DistBackendError, DistError, UnsupportedOperationError, log_exception, on_rank
from ..native import gil_held, notes_of
from .backend import Backend, FastPath
from .backends import Destroyed, LazyBackends
from .calls import Call
from .checks import apart
from .joined_work import JoinedWork
from .operation_list import CALLED, MESSAGES, OPERATIONS, PEER_AND_TAG, TASK
from .overlap import read_and_written
from .reduce_op import ReduceOp
from .registry import OBJECTS
from .timeouts import as_seconds
from .work import CompletedWork, Work, WorkStatus
from .work_info import work_info

if TYPE_CHECKING:
    from .group import ProcessGroup
    from .hooks import Hook, Operation
    from .persistent_work import PersistentWork

REAP_ABOVE = 64  # Works in flight; with more, each new Work first drops completed ones
REAP_BYTES = 64 << 20  # array bytes of Works begun since the last `reap`; with more, each new Work also calls `reap`
REAP_ASKS = 8  # polls for each REAP_ABOVE Works in flight
REFERENCES = 3  # to a Work that the program has dropped: `in_flight`, a variable, and the call of getrefcount
STEPS_ASIDE = FastPath()
Recent: TypeAlias = tuple[int, str, Any, int]  # number, name with details, and dtype and bytes of its first array
MADE = itertools.count()  # numbers the dispatchers
# Each group's operations in flight, and persistent ones, which keep the group alive: MPI uses their arrays. No
# WeakKeyDictionary: its methods are Python functions.
_dispatchers: dict[weakref.ref[Dispatcher], tuple[dict[Work, None], list[PersistentWork]]] = {}
running_tasks: dict[int, tuple[ProcessGroup, int, Any, float]] = {}  # by thread: group, number, call, start time


class Check(Protocol):
    """The comparison of all ranks' calls: HPCCOMM_DEBUG=DETAIL."""

    @property
    def is_waiting(self) -> bool:
        """True while this rank waits in a comparison, which has its own time limit, for other ranks."""

    def set_up(self, call: Call) -> int:
        """Compare the set-up of a persistent operation; return its number, equal on all ranks."""

    def agree(self, name: str, *details: str) -> None:
        """Raise on every rank unless all ranks make this call (which is not an operation)."""

    def close(self) -> None:
        """Free its resources; collective."""


class Meter(Protocol):
    """An object that counts the bytes of all groups' operations."""

    def count(self, call: Call) -> None:
        """Count an operation that begins."""


class Dispatcher:
    """Dispatch the operations of one group."""

    meter: ClassVar[Meter | None] = None  # set while `hpccomm top` asks

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.backends: dict[str, Backend] = LazyBackends(self)  # by device
        self.fast = self.fast_path = STEPS_ASIDE  # the one to call now; the host backend's own
        self.gpu_fast_path: FastPath | None = None  # a GPU backend's own
        self.hooks: tuple[Hook, ...] = ()
        self.check: Check | None = None
        self.block: Block | None = None  # the active coalescing() block
        self.collectives = self.messages = 0  # operations that did not take the fast path
        self.recent: deque[Recent] = deque(maxlen=8)  # for reports: the last collectives and set-ups, without fast ones
        self.last_sent: deque[tuple[str, int, int]] = deque(maxlen=8)  # for reports: names, ranks and tags of messages
        self.in_flight: dict[Work, None] = {}  # oldest first
        self.unasked_bytes = 0  # array bytes of Works begun since the last `reap`
        self.failed: list[Work] = []
        self.persistent: list[PersistentWork] = []  # not yet freed
        limit = as_seconds(group.timeout)
        self.timeout = limit if group.on_timeout == "raise" else None
        self.notes = notes_of(group.name, limit, group.on_timeout)
        self.made = next(MADE)  # orders groups of the same ranks equally on all of them
        _dispatchers[weakref.ref(self, _dispatchers.pop)] = self.in_flight, self.persistent

    # -- operations ------------------------------------------------------------------------------

    def run(
        self,
        call: Call,
        async_op: bool,
        step: Callable[[], Any] | None = None,
        persistent: PersistentWork | None = None,
    ) -> Work | None:
        """Do an operation with checked arguments; return its Work or the transport's result.

        It calls the backend's method of the operation's name; or `step`, if the operation is more than one backend call
        or the start of a `persistent` one.
        """
        name, device, result, arguments = call
        if self.block is not None and self.block.is_of_this_thread():
            self.block.collect(call, async_op)
            return None
        backend = self.backends[device]
        peer_and_tag: tuple[Any, ...] = ()
        if name in MESSAGES:
            self.messages = self.fast_path.passed_messages = self.messages + 1
            number = self.messages + self.fast_path.messages
            if name in PEER_AND_TAG:
                peer_and_tag = PEER_AND_TAG[name](arguments)
                if not name.startswith("recv"):
                    self.last_sent.append((name, *peer_and_tag))
        else:
            self.collectives = self.fast_path.passed_collectives = self.collectives + 1
            number = self.collectives + self.fast_path.count
            first = arguments[0] if arguments else None
            if type(first) is list and first:
                first = first[0]
            self.recent.append((number, name, getattr(first, "dtype", ""), getattr(first, "nbytes", 0)))
        if (meter := self.meter) is not None:
            meter.count(call)
        operation = self._begin(call, number, async_op, persistent) if self.hooks else None
        function, given = (getattr(backend, name), (*arguments, async_op)) if step is None else (step, ())
        try:
            if async_op or gil_held is None:
                outcome: Any = function(*given)
            else:
                outcome = self.notes.during(name, number, function, given)
        except Exception as error:
            error = self.translated(backend, CALLED.get((name, async_op), name), number, error)
            if operation is not None:
                operation.end(error)
            raise error
        if persistent is not None and outcome is None:
            persistent.operation = operation
        elif async_op or isinstance(outcome, Work):
            work = outcome if isinstance(outcome, Work) else CompletedWork()
            work.operation = operation
            self.follow(work, name, number, result, *peer_and_tag)
            if async_op or persistent is not None:
                return work
            if work.progress.enforces_timeout:  # the transport ends the operation
                work.info = work.info._replace(timeout=None)
            work.wait()  # the backend has only asynchronous operations
            return work.source  # type: ignore[return-value]  # after a receive: the sender's rank
        elif operation is not None:
            operation.outcome = outcome
            operation.end()
        return outcome  # type: ignore[no-any-return]

    def follow(
        self, work: Work, name: str, number: int, result: Any, peer: int | None = None, tag: int | None = None
    ) -> None:
        """Keep the Work of a new operation, and so its arrays, while it is in flight."""
        work.info = work_info((self, name, number, result, peer, self.timeout, tag))
        for array in result if type(result) is list else (result,):
            self.unasked_bytes += getattr(array, "nbytes", 0)
        many, large = len(self.in_flight) >= REAP_ABOVE, self.unasked_bytes >= REAP_BYTES
        try:  # `reap` first, which needn't poll a GPU for a Work that has just begun; its callbacks may raise
            if many or large or work.progress.is_released_at_once:
                self.unasked_bytes = 0
                self.reap()
        finally:
            self.in_flight[work] = None

    def set_up(self, call: Call, step: Callable[[], PersistentWork] | None = None) -> PersistentWork:
        """Set up the persistent form of an operation with checked arguments, by its backend or by `step`."""
        name, device, _, arguments = call
        if self.block is not None and self.block.is_of_this_thread():
            raise DistError(f"not inside a coalescing() block{on_rank()}", f"{name}_init")
        backend = self.backends[device]
        number = 0 if self.check is None else self.check.set_up(call)
        if name not in MESSAGES:
            self.recent.append((self.number_of(name), f"{name}_init", "", 0))
        try:
            work = backend.persistent(name, *arguments) if step is None else step()
        except Exception as error:
            error = self.translated(backend, f"{name}_init", 0, error)
            raise error
        work.belong_to(self, call, number)
        self.persistent.append(work)
        return work

    def start(self, work: PersistentWork) -> None:
        """Start a persistent operation; each start has its own number."""
        self.refuse_in_block(work.call.name)
        self.run(work.call, False, work.begin, work)

    def refuse_in_block(self, name: str) -> None:
        """Raise the error for an operation that can't be collected, if this thread has an open block."""
        if self.block is not None and self.block.is_of_this_thread():
            self.block.refuse(name)

    def run_task(self, task: Any, step: Callable[[], Any]) -> Any:
        """Make a call that an executor has sent to this rank; return its result or raise its error.

        `task` describes the call; records contain its text.
        """
        self.messages = self.fast_path.passed_messages = self.messages + 1
        number = self.messages + self.fast_path.messages
        operation = self._begin(Call((TASK.name, OBJECTS, None, (task,))), number, False, None) if self.hooks else None
        running_tasks[threading.get_ident()] = self.group, number, task, time.monotonic()
        try:
            outcome = step()
        except BaseException as error:  # also SystemExit: the executor reports it
            if operation is not None:
                operation.end(error)
            raise
        finally:
            running_tasks.pop(threading.get_ident(), None)
        if operation is not None:
            operation.outcome = outcome
            operation.end()
        return outcome

    def open_block(self, async_ops: bool) -> Block:
        """Return a new block, which collects this thread's operations from now on."""
        if isinstance(self.backends, Destroyed):
            raise DistError(f"coalescing: the process group {self.group.name!r} has been destroyed{on_rank()}")
        if self.block is not None:
            raise ValueError(f"coalescing: this group is collecting already; blocks don't nest{on_rank()}")
        self.block = Block(self, async_ops)
        self.choose_fast_path()
        return self.block

    def close_block(self) -> None:
        """Stop collecting."""
        self.block = None
        self.choose_fast_path()

    # -- errors ----------------------------------------------------------------------------------

    def identify(self, error: Exception, operation: str, number: int) -> None:
        """Add the operation, its number and the group to a transport's error."""
        if isinstance(error, DistBackendError):
            error.identify(operation, number, self.group.name)
        elif isinstance(error, UnsupportedOperationError):
            error.operation = operation  # the called one; the missing one may be a part of it

    def identify_fast(self, error: Exception, name: str) -> Exception:
        """Call `identify` for the operation that the fast path has just counted; return the error."""
        self.identify(error, name, self.number_of(name))
        return error

    def number_of(self, name: str) -> int:
        """Return the number of messages begun so far if `name` is a message, otherwise that of collectives."""
        if name in MESSAGES:
            return self.messages + self.fast_path.messages
        return self.collectives + self.fast_path.count

    def translated(self, backend: Backend, called: str, number: int, error: Exception) -> Exception:
        """Return the backend's translation of an operation's error."""
        translated = backend.translate_error(called, error)
        self.identify(translated, called, number)
        if translated is not error:
            translated.__cause__ = error
        return translated

    # -- operations in flight --------------------------------------------------------------------

    def ended(self, work: Work, status: WorkStatus) -> None:
        """Note the end of a Work that has failed or has hooks; the Work calls this method once."""
        operation = work.operation
        if operation is not None:
            operation.outcome = work.source
            try:
                operation.end(work.error)
            except BaseException as error:  # this may be any thread
                is_main = threading.current_thread() is threading.main_thread()
                if is_main and not isinstance(error, Exception):
                    raise
                log_exception("a hook of %r raised at the end of %r", self.group, work)
            if operation.error is not None and operation.error is not work.error:
                work.fail(operation.error)
                status = WorkStatus.FAILED
            work.duration, work.operation = operation.duration, None  # frees the arguments
        if status is WorkStatus.FAILED:
            self.failed = [*(each for each in self.failed if not each.error_was_seen), work]

    def reap(self) -> None:
        """Drop completed Works, oldest first, up to the first that is in flight or has a Future's callback.

        Some transports make progress only when polled, unless the program calls other operations of theirs: so the more
        Works are in flight, the more often this method polls. It polls a Work that the program still holds only once,
        because the program will wait for it.
        """
        for _ in range(max(1, len(self.in_flight) // REAP_ABOVE * REAP_ASKS)):
            while True:
                try:
                    oldest = next(iter(self.in_flight))
                except (StopIteration, RuntimeError):  # none left, or another thread has just dropped one
                    return
                if oldest.is_driven:  # the progress thread polls it, and keeps the callbacks in order
                    return
                if not oldest.has_ended():
                    if sys.getrefcount(oldest) > REFERENCES:
                        return
                    break
                self.in_flight.pop(oldest, None)

    # -- hooks -----------------------------------------------------------------------------------

    def _begin(self, call: Call, number: int, async_op: bool, persistent: PersistentWork | None) -> Operation:
        from .hooks import Operation

        name, device, _, _ = call
        operation = Operation(self.group, name, number, device, async_op, call.named, self.hooks, persistent)
        operation.begin()
        if isinstance(self.backends, Destroyed):  # a hook has destroyed the group
            error = DistError(self.backends.refusal)
            operation.end(error)
            raise error
        return operation

    def add_hook(self, hook: Hook) -> None:
        """Call `hook` for every operation from now on."""
        self.hooks = (*self.hooks, hook)
        self.choose_fast_path()

    def remove_hook(self, hook: Hook) -> None:
        """Stop calling `hook`."""
        self.hooks = tuple(each for each in self.hooks if each is not hook)
        self.choose_fast_path()

    def take_fast_path(self, fast_path: FastPath) -> None:
        """Use the fast path of a new backend."""
        self.fast_path = fast_path
        if fast_path.is_open:
            fast_path.attach(self)
        self.choose_fast_path()

    def take_gpu_fast_path(self, fast_path: FastPath | None) -> None:
        """Use the fast path of a new backend, if it has one for GPU arrays."""
        if fast_path is not None:
            self.gpu_fast_path = fast_path
            fast_path.attach(self)
            self.choose_fast_path()

    def choose_fast_path(self) -> None:
        """Set `fast`: an empty one while there are hooks or an active block, and after destroy.

        A hook's method `follows`, if it has one, returns whether the hook sees the fast path's operations by itself;
        none sees those on GPU arrays.
        """
        is_open = self.block is None and not isinstance(self.backends, Destroyed)
        is_known = all(hasattr(hook, "follows") and hook.follows(self.fast_path) for hook in self.hooks)
        gpu = self.gpu_fast_path
        if gpu is not None:
            gpu.is_in_use = is_open and not self.hooks
        fast = self.fast_path if is_open and is_known else STEPS_ASIDE
        self.fast = fast.with_gpu(gpu if gpu is not None and gpu.is_in_use else None)

    def leave_to_the_parent(self) -> None:
        """Refuse all operations in a forked process: MPI's connections belong to its parent."""
        self.close("is that of the process which this one was forked from; call it there")
        error = DistError(f"the process that has called it is another one: this one was forked from it{on_rank()}")
        for work in self.in_flight:
            work.fail(error)
        for persistent in self.persistent:
            persistent.leave_to_the_parent(error)
        self.in_flight.clear()

    def close(self, refusal: str = "has been destroyed; make another one") -> None:
        """Refuse all operations from now on."""
        self.backends = Destroyed(self.group, refusal)
        self.choose_fast_path()


class Block:
    """The operations that a coalescing() block has collected from its thread; they start together at its end."""

    def __init__(self, dispatcher: Dispatcher, async_ops: bool) -> None:
        self._dispatcher = dispatcher
        self._async_ops = async_ops
        self._thread = threading.get_ident()
        self._calls: list[Call] = []
        self.work: Work | None = None  # with `async_ops`: one Work for all operations

    def is_of_this_thread(self) -> bool:
        """Return True in the thread that opened the block."""
        return threading.get_ident() == self._thread

    def collect(self, call: Call, async_op: bool) -> None:
        """Add an operation with checked arguments."""
        name = call.name
        if not (name in OPERATIONS and OPERATIONS[name].is_collected):
            self.refuse(name)
        if ReduceOp.REPRODUCIBLE_SUM is call.arguments[-1]:
            raise UnsupportedOperationError(
                f"no reproducible sum in a coalescing() block; call it outside{on_rank()}", name
            )
        if async_op:
            raise ValueError(
                f"{name}: inside coalescing(), leave async_op out; use coalescing(async_ops=True){on_rank()}"
            )
        self._calls.append(call)

    def refuse(self, name: str) -> NoReturn:
        """Raise the error for an operation that can't be collected."""
        takes = ", ".join(spec.name for spec in OPERATIONS.values() if spec.is_collected)
        raise UnsupportedOperationError(
            f"can't be collected in a coalescing() block, which takes {takes}; call it outside{on_rank()}", name
        )

    def leave(self) -> None:
        """Do the collected operations as one."""
        if self._calls:
            self._check()
            described = [(call.name, call.arguments) for call in self._calls]
            call = Call(("coalescing", self._calls[0].device, None, (described,)))
            self.work = self._dispatcher.run(call, self._async_ops, self._send)
            self._calls = []  # the program may keep the block for its Work

    def _check(self) -> None:
        """Raise if operations that start together share memory that one writes; broadcasts write the same values."""
        kinds = [(key[0], list(same)) for key, same in groupby(self._calls, key=_kind)]
        for name, calls in [("call", self._calls)] if self._async_ops else kinds:
            if name == "broadcast":
                continue
            written = [call.arguments[0] for call in calls]
            apart("coalescing", name, written, "use two blocks")
            read = [call.arguments[_places(call.name)[0][-1]] for call in calls]
            if (places := read_and_written(read, written)) is not None:
                one, other = (f"{name}[{i}]" for i in places)
                raise ValueError(
                    f"coalescing: {one} reads memory that {other} writes, and they start together; use two blocks"
                    f"{on_rank()}"
                )

    def _send(self) -> Work | None:
        """Do the collected operations, neighbours of one kind together; return one Work for all."""
        works = []
        for (name, device, shared), same in groupby(self._calls, key=_kind):
            arguments = [call.arguments for call in same]
            columns = [[each[i] for each in arguments] for i in _places(name)[0]]
            backend = self._dispatcher.backends[device]
            try:
                work = getattr(backend, f"{name}_coalesced")(*columns, *shared, self._async_ops)
            except Exception as error:
                translated = backend.translate_error(f"{name}_coalesced", error)
                raise translated from (None if translated is error else error)
            if work is not None:
                works.append(work)
        return JoinedWork(works) if len(works) > 1 else works[0] if works else None


def batch(messages: Sequence[tuple[Dispatcher, Call]]) -> list[Work]:
    """Start messages of one or more groups, receives first; return their Works.

    Messages of one GPU backend are launched together. A backend may wait for the other end of a first message, so all
    ranks process their groups in the same order.
    """
    works: list[Any] = [None] * len(messages)
    receives: list[int] = []
    sends: list[int] = []
    is_on_host = True
    for i, (dispatcher, call) in enumerate(messages):
        name, device, _, _ = call
        (receives if name == "recv" else sends).append(i)
        if device != "cpu":
            is_on_host = False
        if device not in dispatcher.backends:
            dispatcher.backends[device]  # makes it now; raises if the group is destroyed or has no such backend
    if is_on_host:
        for i in receives + sends:
            dispatcher, (name, _, array, (_, peer, tag)) = messages[i]
            works[i] = getattr(dispatcher.group, name)(array, peer, tag, True)  # may take the fast path
        return works
    of_backend: dict[Backend, list[int]] = {}
    on_host: list[int] = []
    for i in receives + sends:
        dispatcher, call = messages[i]
        if call.device == "cpu":
            on_host.append(i)
        else:
            of_backend.setdefault(dispatcher.backends[call.device], []).append(i)
    for backend, together in of_backend.items():
        backend.check_batch([messages[i][1].arguments for i in together])
    for i in on_host:
        works[i] = messages[i][0].run(messages[i][1], True)
    for backend, together in sorted(of_backend.items(), key=lambda item: _order_of(messages[item[1][0]][0])):
        with backend.batch([messages[i][1].arguments[0] for i in together]):
            for i in together:
                works[i] = messages[i][0].run(messages[i][1], True)
    return works


def all_dispatchers() -> list[Dispatcher]:
    """Return the dispatchers of all groups of this process."""
    living = [each() for each in list(_dispatchers)]  # another thread may make a group meanwhile
    return [each for each in living if each is not None]


def _order_of(dispatcher: Dispatcher) -> tuple[tuple[int, ...], int]:
    """Return a sort key that orders any two groups equally on all ranks that are members of both."""
    return dispatcher.group.ranks, dispatcher.made


def _in_a_forked_process() -> None:
    for dispatcher in all_dispatchers():
        dispatcher.leave_to_the_parent()


os.register_at_fork(after_in_child=_in_a_forked_process)


@functools.cache
def _places(name: str) -> tuple[list[int], list[int]]:
    """Return the indices of an operation's arguments that are arrays, and of the others (op, root)."""
    roles = list(enumerate(OPERATIONS[name].roles))
    return [i for i, role in roles if role.is_array], [i for i, role in roles if not role.is_array]


def _kind(call: Call) -> tuple[str, str, list[Any]]:
    """Return the operation, the device, and the op or root: neighbours with equal keys start together."""
    name, device, _, arguments = call
    return name, device, [arguments[i] for i in _places(name)[1]]
