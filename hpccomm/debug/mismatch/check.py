"""The mismatch check (``HPCCOMM_DEBUG=DETAIL``): before each operation the ranks compare what they are about to do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...core.ending import SHORTEST_MEETING
from ...core.exchange import DIFFERS, TIMED_OUT, Exchange, Statement
from ...core.hooks import Operation
from ...core.observers import who_is_late
from ...core.operation_list import MESSAGES
from ...core.timeouts import as_seconds
from ...errors import DistError, DistTimeoutError
from ...job import failures, mpi_library
from ..records import sizes_by_rank, unequal_in_words, unequal_sizes
from ..words import ranks_by_value, ranks_in_words
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
    group.door.check = check
    group.register_hook(check)


class MismatchCheck:
    """A hook that compares collectives in an exchange between all ranks, and messages by labels sent ahead of them."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        with failures.translating("making", group.comm):
            self._comm = mpi_library.private(group.comm.Dup(), group.comm)
        self._exchange = Exchange(self._comm)
        self._messages = MessageCheck(group, self._comm)
        self._set_up = 0  # persistent operations
        self._leaves = False

    @property
    def is_waiting(self) -> bool:
        """Whether this rank waits here, for others or for a message; such a wait ends by itself when the time is up."""
        return self._exchange.is_waiting or self._messages.is_waiting

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
            outcome, text = self._exchange(statement, timeout, self._judge, partial(self._late, timeout))
        if outcome == TIMED_OUT:
            raise DistTimeoutError(f"{text}{who_is_late()}")
        if outcome == DIFFERS:
            highest, _, difference = text.partition(" ")
            door = group.door
            door.collectives += int(highest) - group.sequence_number
            door.fast_path.passed_collectives = door.collectives
            group.door.recent.clear()  # the program may go on
            raise DistError(difference)

    def _judge(self, statements: list[Statement]) -> str:
        """Return the difference between the statements of all ranks, "" if there is none.

        It begins with the number to count on from: one rank may have begun an operation, another have made a group.
        """
        difference = self._difference(statements)
        return difference and f"{max(each['count'] for each in statements)} {difference}"

    def _difference(self, statements: list[Statement]) -> str:
        first = statements[0]
        if any((each["number"], each["words"]) != (first["number"], first["words"]) for each in statements):
            return f"{self._head(statements)}: {self._who_calls_what(dict(enumerate(statements)))}"
        sizes = [each["sizes"] for each in statements]
        wrong = [] if first["sizes"] is None else unequal_sizes(sizes)
        if not wrong:
            return ""
        more = f" (and {len(wrong) - 1} more like it)" if len(wrong) > 1 else ""
        places = [each["where"] for each in statements]
        return f"{self._head(statements)}: {unequal_in_words(wrong[0], sizes, self._group.ranks, places)}{more}"

    def _head(self, statements: Sequence[Statement]) -> str:
        names, numbers = ({each[key] for each in statements} for key in ("name", "number"))
        name = names.pop() if len(names) == 1 else "collective"
        number = numbers.pop() if len(numbers) == 1 else None
        return f"{name}{'' if number is None else f' #{number}'} of {self._group.name!r}"

    def _who_calls_what(self, came: dict[int, Statement]) -> str:
        same_number = len({each["number"] for each in came.values()}) == 1

        def call(each: Statement) -> str:
            return str(each["words"]) + ("" if same_number or each["number"] is None else f", #{each['number']}")

        sides = []
        for words, ranks in ranks_by_value((rank, call(each)) for rank, each in came.items()).items():
            lines = list(dict.fromkeys(came[rank]["where"] for rank in ranks))
            at = ", ".join(lines[:3]) + (" ..." if len(lines) > 3 else "")
            verb = "call" if len(ranks) > 1 else "calls"
            sides.append(f"{ranks_in_words(self._group.ranks[rank] for rank in ranks)} {verb} {words} at {at}")
        return ", ".join(sides)

    def _late(self, timeout: float, came: dict[int, Statement], missing: list[int]) -> str:
        head, calls = self._head(list(came.values())), self._who_calls_what(came)
        if not missing:
            return f"{head}: rank {self._group.ranks[0]} came when others had waited for {timeout:g} s: {calls}"
        ranks = [self._group.ranks[rank] for rank in missing]
        have = "have" if len(ranks) > 1 else "has"
        return f"{head}: {ranks_in_words(ranks)} {have} not come within {timeout:g} s; {calls}"
