"""The ranks of a group: convert between global ranks, group ranks and the arguments that name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np

from ..errors import on_rank
from ..job import mpi_library
from . import calls, checks
from .annotations import Integer
from .options import Membership

TO_NOBODY = frozenset({"send", "recv", "isend", "irecv", "sendrecv", "send_init", "recv_init"})  # may be MPI.PROC_NULL


class Members(Membership):
    """The members of a group, by group rank and by global rank."""

    def __init__(self, rank: int, size: int, **fields: Any) -> None:
        super().__init__(rank, size, **fields)
        self.group_ranks = dict(zip(self.ranks, range(size)))

    def group_rank(self, global_rank: Integer) -> int:
        """Return the group rank of a global rank; ValueError if it is not a member."""
        try:
            return self.group_ranks[checks.integer("global rank", global_rank)]
        except KeyError:
            raise ValueError(
                f"rank {global_rank} is not a member of {self!r}, whose ranks are {abridged(self.ranks)}{on_rank()}"
            ) from None

    def global_rank(self, group_rank: Integer) -> int:
        """Return the global rank of a group rank; ValueError if there is no such rank."""
        return self.ranks[calls.rank(self, "group rank", group_rank)]

    def peer(self, operation: str, argument: str, global_rank: Integer | None, group_rank: Integer | None) -> int:
        """Return the group rank given by ``src=`` (a global rank) or ``group_src=`` (a group rank).

        For messages it may be MPI.PROC_NULL, which is negative: nothing is sent or received.
        """
        if group_rank is None and type(global_rank) is int and global_rank in self.group_ranks:
            return self.group_ranks[global_rank]
        if global_rank is not None and group_rank is not None:
            raise ValueError(f"{operation}: both {argument} and group_{argument} are given; choose one{on_rank()}")
        if group_rank is not None:
            return calls.rank(self, f"{operation}: group_{argument}", group_rank)
        if global_rank is None:
            raise ValueError(f"{operation}: neither {argument} nor group_{argument} is given{on_rank()}")
        number = checks.integer(f"{operation}: {argument}", global_rank)
        if number in self.group_ranks:
            return self.group_ranks[number]
        hint = ""
        if operation in TO_NOBODY and self.comm is not None:
            mpi = mpi_library.load()
            if number == mpi.PROC_NULL:
                return number
            hint = " (MPI.ANY_SOURCE: leave src out)" if number == mpi.ANY_SOURCE and argument == "src" else ""
        from ..process.alone import start_more

        raise ValueError(
            f"{operation}: {argument} is {global_rank}, which is not in the group; "
            f"its (global) ranks are {abridged(self.ranks)}{hint or start_more()}{on_rank()}"
        )

    def root(self, operation: str, argument: str, global_rank: Integer | None, group_rank: Integer | None) -> int:
        """Return the same as `peer`; the group's first rank if neither is given."""
        if global_rank is None and group_rank is None:
            return 0
        return self.peer(operation, argument, global_rank, group_rank)

    def source(self, operation: str, global_rank: Integer | None, group_rank: Integer | None) -> int | None:
        """Return the same as `peer`; None (any rank) if neither is given."""
        if global_rank is None and group_rank is None:
            return None
        return self.peer(operation, "src", global_rank, group_rank)

    def plain_message(self, name: str, array: Any, peer: int | None, tag: int) -> calls.Call | None:
        """Return the Call of a "send" or "recv" if a few checks accept the ordinary case; otherwise None.

        `peer` is a *global* rank.
        """
        if (
            type(array) is np.ndarray
            and type(peer) is type(tag) is int
            and peer in self.group_ranks
            and 0 <= tag <= self.largest_tag
            and array.dtype in checks.movable
            and array.flags.writeable
        ):
            return calls.Call((name, "cpu", array, (array, self.group_ranks[peer], tag)))
        return None


def shortened(text: str) -> str:
    """Return the text for reports; of a long text (thousands of ranks), both ends and a checksum."""
    return text if len(text) <= 120 else f"{text[:80]} ... {text[-20:]}, checksum {crc32(text.encode()):08x}"


def abridged(ranks: Sequence[int]) -> str:
    """Return the ranks as text; of more than 16 ranks, the first eight and the last."""
    return ", ".join(map(str, ranks)) if len(ranks) <= 16 else f"{', '.join(map(str, ranks[:8]))} ... {ranks[-1]}"
