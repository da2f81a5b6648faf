"""Comparison of all ranks' statements about the call that each is about to make, with a text of the differences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ...core.exchange import Exchange, Outcome, Statement
from ..sizes import unequal
from ..words import ranks_by_value, ranks_in_words

if TYPE_CHECKING:
    from mpi4py import MPI


class Members(Protocol):
    """A process group, or the facts about a communicator."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its members' ranks in messages."""


class Comparison:
    """The comparison of the calls of a group's ranks.

    A statement has a call's name, number, text and line, the number of collectives so far, and the sizes that
    `sizes_by_rank` returns.
    """

    def __init__(self, comm: MPI.Intracomm, members: Members) -> None:
        self.comm = comm  # used for comparisons only
        self._exchange = Exchange(comm)
        self._members = members

    @property
    def is_waiting(self) -> bool:
        """True while this rank waits for others here."""
        return self._exchange.is_waiting

    def __call__(self, statement: Statement, timeout: float) -> Outcome:
        """Return FINE, DIFFERS or TIMED_OUT, and a text with details; collective.

        The text of DIFFERS begins with the number from which all ranks continue to count: some ranks may have counted
        an operation, while others made a group.
        """
        return self._exchange(statement, timeout, self._judge, partial(self._late, timeout))

    def are_alike(self, statements: list[Statement]) -> bool:
        """Return whether the calls match, apart from sizes."""
        first = statements[0]
        return all((each["number"], each["words"]) == (first["number"], first["words"]) for each in statements)

    def _judge(self, statements: list[Statement]) -> str:
        difference = self._difference(statements)
        return difference and f"{max(each['count'] for each in statements)} {difference}"

    def _difference(self, statements: list[Statement]) -> str:
        if not self.are_alike(statements):
            return f"{self._head(statements)}: {self._who_calls_what(dict(enumerate(statements)))}"
        if statements[0]["sizes"] is None:
            return ""
        sizes, places = ([each[key] for each in statements] for key in ("sizes", "where"))
        _, words = unequal(sizes, self._members.ranks, places)
        return words and f"{self._head(statements)}: {words}"

    def _head(self, statements: Sequence[Statement]) -> str:
        names, numbers = ({each[key] for each in statements} for key in ("name", "number"))
        name = names.pop() if len(names) == 1 else "collective"
        number = numbers.pop() if len(numbers) == 1 else None
        return f"{name}{'' if number is None else f' #{number}'} of {self._members.name!r}"

    def _who_calls_what(self, came: dict[int, Statement]) -> str:
        same_number = len({each["number"] for each in came.values()}) == 1

        def call(each: Statement) -> str:
            return str(each["words"]) + ("" if same_number or each["number"] is None else f", #{each['number']}")

        sides = []
        for words, ranks in ranks_by_value((rank, call(each)) for rank, each in came.items()).items():
            lines = list(dict.fromkeys(came[rank]["where"] for rank in ranks))
            at = ", ".join(lines[:3]) + (" ..." if len(lines) > 3 else "")
            verb = "call" if len(ranks) > 1 else "calls"
            sides.append(f"{ranks_in_words(self._members.ranks[rank] for rank in ranks)} {verb} {words} at {at}")
        return ", ".join(sides)

    def _late(self, timeout: float, came: dict[int, Statement], missing: list[int]) -> str:
        members = self._members.ranks
        head, calls = self._head(list(came.values())), self._who_calls_what(came)
        if not missing:
            return f"{head}: rank {members[0]} came when others had waited for {timeout:g} s: {calls}"
        ranks = [members[rank] for rank in missing]
        have = "have" if len(ranks) > 1 else "has"
        return f"{head}: {ranks_in_words(ranks)} {have} not come within {timeout:g} s; {calls}"
