"""Compare the collectives of watched communicators before they begin (``hpccomm run --detail``)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from ..core.exchange import DIFFERS, Statement
from ..debug.mismatch.comparison import Comparison
from ..debug.mismatch.wording import caller
from ..debug.mpi_calls import CALLS, DUPLICATING, FREEING, STARTS
from ..debug.records import Record, sides
from ..errors import DistError
from ..job.mpi_library import free, private
from .communicators import Seen, comparable, plain

FOR_EVER = 1e9  # seconds: the watchdog handles ranks that never arrive


class _Calls(Comparison):
    def are_alike(self, statements: list[Statement]) -> bool:
        """Return whether all ranks make the same call, as far as MPI requires it and the arguments show it."""
        records = {rank: Record(**each["record"]) for rank, each in enumerate(statements)}
        return len({record.number for record in records.values()}) == 1 and len(sides(records)) == 1


class ComparedCalls:
    """The comparisons of this process, for blocking collectives on intracommunicators."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Seen, Comparison] = weakref.WeakKeyDictionary()

    def begin(self, comm: Any, seen: Seen) -> None:
        """Compare the calls on a new communicator from now on; collective."""
        if comm.Get_size() > 1 and not comm.Is_inter():
            self._of[seen] = _Calls(
                private(plain(comm).Split(0, comm.Get_rank())), seen
            )  # Dup calls the program's code

    def comparing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return mpi4py's method behind a comparison; the call has been counted before."""
        if name in STARTS or name in DUPLICATING or name.endswith("_init") or CALLS[name].is_a_message:
            return call

        def compared(comm: Any, *arguments: Any) -> Any:
            seen = comm._seen
            comparison = self._of.pop(seen, None) if name in FREEING else self._of.get(seen)
            if comparison is not None:
                self._compare(comparison, comparable(comm, name, arguments, caller()))
                if name in FREEING:
                    free(comparison.comm, "", largest_tag=-1)
            return call(comm, *arguments)

        return update_wrapper(compared, call)

    def _compare(self, comparison: Comparison, record: Record) -> None:
        statement = {
            "name": record.name,
            "number": record.number,
            "count": record.number,
            "words": record.in_detail(),
            "where": record.where,
            "sizes": None,
            "record": record.as_dict(),
        }
        outcome, text = comparison(statement, FOR_EVER)
        if outcome == DIFFERS:
            raise DistError(text.partition(" ")[2])
