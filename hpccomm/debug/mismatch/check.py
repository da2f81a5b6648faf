"""The mismatch check (``HPCCOMM_DEBUG=DETAIL``): before each operation the ranks compare what they are about to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...core.ending import SHORTEST_MEETING
from ...core.exchange import DIFFERS, TIMED_OUT
from ...core.hooks import Operation
from ...core.observers import who_is_late
from ...core.operation_list import MESSAGES
from ...core.timeouts import as_seconds
from ...errors import DistError, DistTimeoutError
from ...job import failures, mpi_library
from ..sizes import sizes_by_rank
from .comparison import Comparison
from .messages import MessageCheck
from .wording import call_in_words, caller, with_details

if TYPE_CHECKING:
    from ...core.calls import Call
    from ...core.group import ProcessGroup


def compare_calls(group: ProcessGroup) -> None:
    """Compare the calls of the ranks of a new group from now on; every rank of it calls this."""
    check = MismatchCheck(group)
    fields = [f"backend {group.config}", f"timeout {as_seconds(group.timeout):g} s", f"on_timeout {group.on_timeout}"]
    if group.device_id is not None:
        fields.append("a device_id")
    try:
        check.agree("making", *fields)
    except DistError:
        check.close()
        mpi_library.release(group.comm)
        raise
    group.dispatcher.check = check
    group.register_hook(check)


class MismatchCheck:
    """A hook that compares collectives in an exchange between all ranks, and messages by labels sent ahead of them."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        with failures.translating("making", group.comm):
            self._comm = mpi_library.private(group.comm.Dup(), group.comm)
        self._comparison = Comparison(self._comm, group)
        self._messages = MessageCheck(group, self._comm)
        self._set_up = 0  # persistent operations
        self._leaves = False

    @property
    def is_waiting(self) -> bool:
        """Whether this rank waits here, for others or for a message; such a wait ends by itself when the time is up."""
        return self._comparison.is_waiting or self._messages.is_waiting

    # -- what the group calls --------------------------------------------------------------------

    def begin(self, operation: Operation) -> None:
        """Raise on every rank if the ranks are about to do different operations; for a message, on the receiver."""
        if operation.name in MESSAGES:
            with failures.translating(operation.name, self._group.comm):
                self._messages.begin(operation)
            return
        timeout, sizes = operation.arguments.get("timeout"), sizes_by_rank(operation)
        self._compare(operation.name, call_in_words(operation), operation.sequence_number, sizes, timeout)

    def end(self, operation: Operation) -> None:
        """Compare a message that has come."""
        if operation.name in MESSAGES:
            self._messages.end(operation)

    def set_up(self, call: Call) -> int:
        """Compare the set-up of a persistent operation, and return its number: the same on every rank."""
        if call.name in MESSAGES:
            return 0
        operation = Operation(self._group, f"{call.name}_init", 0, call.device, False, call.named)
        self._compare(operation.name, call_in_words(operation), sizes=sizes_by_rank(operation))
        self._set_up += 1
        return self._set_up

    def agree(self, name: str, *details: str) -> None:
        """Compare a call that all ranks make, and that is no operation of the group."""
        if name != "destroy":
            self._compare(name, with_details(name, details))
        elif not self._leaves:
            self._compare(name, name, timeout=max(as_seconds(self._group.timeout), SHORTEST_MEETING))
            self._leaves = True  # what comes next is collective, also when it is tried again

    def close(self) -> None:
        """Free the communicator; every rank calls this."""
        mpi_library.free(self._comm, "", largest_tag=-1)  # what is left is of no interest to the program

    # -- collectives -----------------------------------------------------------------------------

    def _compare(
        self, name: str, words: str, number: int | None = None, sizes: Any = None, timeout: float | None = None
    ) -> None:
        group = self._group
        if group.size == 1:
            return
        count = group.sequence_number
        statement = {"name": name, "number": number, "count": count, "words": words, "where": caller(), "sizes": sizes}
        if timeout is None:
            timeout = as_seconds(group.timeout)
        with failures.translating(name, group.comm):
            outcome, text = self._comparison(statement, timeout)
        if outcome == TIMED_OUT:
            raise DistTimeoutError(f"{text}{who_is_late()}")
        if outcome == DIFFERS:
            highest, _, difference = text.partition(" ")
            dispatcher = group.dispatcher
            dispatcher.collectives += int(highest) - group.sequence_number
            dispatcher.fast_path.passed_collectives = dispatcher.collectives
            group.dispatcher.recent.clear()  # the program may go on
            raise DistError(difference)
