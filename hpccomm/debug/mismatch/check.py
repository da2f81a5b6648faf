"""The mismatch check (``HPCCOMM_DEBUG=DETAIL``): ranks compare each operation before it begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...core.ending import SHORTEST_MEETING
from ...core.exchange import DIFFERS, TIMED_OUT
from ...core.hooks import Operation
from ...core.observers import who_is_late
from ...core.operation_list import MESSAGES
from ...core.timeouts import as_seconds
from ...errors import DistError, DistTimeoutError, RankFailedError
from ...job import failures, mpi_library
from ..sizes import sizes_by_rank
from .comparison import Comparison
from .messages import MessageCheck
from .wording import call_in_words, caller, with_details

if TYPE_CHECKING:
    from ...core.calls import Call
    from ...core.group import ProcessGroup


def compare_calls(group: ProcessGroup) -> None:
    """Compare the calls on a new group from now on; collective."""
    check = MismatchCheck(group)
    fields = [f"backend {group.config}", f"timeout {as_seconds(group.timeout):g} s", f"on_timeout {group.on_timeout}"]
    if group.device_id is not None:
        fields.append("a device_id")
    try:
        check.agree("making", *fields)
    except DistError as error:
        if not isinstance(error, RankFailedError):  # after a death nothing is freed
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
        self._set_up = 0  # number of persistent operations
        self._leaves = False

    @property
    def is_waiting(self) -> bool:
        """True while this rank waits in the check; such a wait has a time limit of its own."""
        return self._comparison.is_waiting or self._messages.is_waiting

    # -- the group's interface ---------------------------------------------------------------------

    def begin(self, operation: Operation) -> None:
        """Raise on every rank if the ranks' operations differ; for a message, raise on the receiver."""
        if operation.name in MESSAGES:
            with failures.translating(operation.name, self._group.comm):
                self._messages.begin(operation)
            return
        timeout, sizes = operation.arguments.get("timeout"), sizes_by_rank(operation)
        self._compare(operation.name, call_in_words(operation), operation.sequence_number, sizes, timeout)

    def end(self, operation: Operation) -> None:
        """Compare the label of a completed message."""
        if operation.name in MESSAGES:
            self._messages.end(operation)

    def set_up(self, call: Call) -> int:
        """Compare the set-up of a persistent operation; return its number, which is the same on every rank."""
        if call.name in MESSAGES:
            return 0
        operation = Operation(self._group, f"{call.name}_init", 0, call.device, False, call.named)
        self._compare(operation.name, call_in_words(operation), sizes=sizes_by_rank(operation))
        self._set_up += 1
        return self._set_up

    def agree(self, name: str, *details: str) -> None:
        """Compare a collective call that is not an operation of the group."""
        if name != "destroy":
            self._compare(name, with_details(name, details))
        elif not self._leaves:
            self._compare(name, name, timeout=max(as_seconds(self._group.timeout), SHORTEST_MEETING))
            self._leaves = True  # the rest of destroy is collective, also in a retry

    def close(self) -> None:
        """Free the communicator; collective."""
        mpi_library.free(self._comm, "", largest_tag=-1)  # unreceived labels do not matter

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
            group.dispatcher.recent.clear()  # the program may continue
            raise DistError(difference)
