"""Copies of the ranks' files on other nodes: the nodes form a ring, and messages have a limited size."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..core.group import ProcessGroup
from . import files
from .together import Attempt, Steps, attempt

PIECE = 16 << 20  # bytes of a message; a rank has two in memory


def partners_of(nodes: Sequence[int]) -> list[int | None]:
    """Return, for each rank, the rank on the next node that holds a copy of its file; None if there is only one node.

    `nodes` has the node of each rank.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    ring = sorted(ranks_of)
    partners: list[int | None] = [None] * len(nodes)
    if len(ring) > 1:
        for node, following in zip(ring, ring[1:] + ring[:1]):
            for i, rank in enumerate(ranks_of[node]):
                partners[rank] = ranks_of[following][i % len(ranks_of[following])]
    return partners


class Copying:
    """This rank's share of the copying: it sends its file to its partner, and receives those of others.

    If a read or write between the messages fails, the messages continue without it, because other ranks wait for them;
    `sent` and `kept` hold the outcome.
    """

    def __init__(
        self,
        group: ProcessGroup,
        operation: str,
        partners: Sequence[Any],
        sizes: Sequence[int | None],
        path_of: Callable[[int], Path],
        verify: Callable[[int, Path], None],
    ) -> None:
        self._group = group
        self._operation = operation
        self._partners = partners
        self._sizes = [size or 0 for size in sizes]  # 0: this rank has no file to send
        self._path_of = path_of  # path of a rank's file, on any node
        self._verify = verify  # verifies the copy of a rank's file at a path
        self.sent = Attempt(None)
        self.kept = Attempt(None)
        self.sources = [rank for rank, partner in enumerate(partners) if partner == group.rank and self._sizes[rank]]

    def steps(self) -> Steps[None]:
        """Send and receive."""
        turns = self._turns()
        for turn in range(max(turns) + 1):
            source = self.sources[turn] if turn < len(self.sources) else None
            yield from self._take_turn(turns[self._group.rank] == turn, source)

    def _turns(self) -> list[int]:
        """Return the turn in which each rank sends, or -1; ranks with the same partner send one after another."""
        turns, before = [], Counter[int | None]()
        for partner, size in zip(self._partners, self._sizes):
            sends = partner is not None and size > 0
            turns.append(before[partner] if sends else -1)
            before[partner] += sends
        return turns

    def _take_turn(self, sends: bool, source: int | None) -> Steps[None]:
        me = self._group.rank
        mine, theirs = self._sizes[me] if sends else 0, self._sizes[source] if source is not None else 0
        path = self._path_of(me if source is None else source)
        temporary = files.temporary_of(path)
        buffers = [np.empty(min(PIECE, size), np.uint8) for size in (mine, theirs)]
        with ExitStack() as opened:
            opened.callback(_remove, temporary)
            reading = (
                self._read(lambda: opened.enter_context(files.open_unbuffered(self._path_of(me)))) if mine else None
            )
            writing = self._write(lambda: opened.enter_context(files.create(temporary))) if theirs else None
            for begin in range(0, max(mine, theirs), PIECE):
                outgoing, incoming = (each[: max(0, n - begin)] for each, n in zip(buffers, (mine, theirs)))
                works = []
                if outgoing.size:
                    self._read(partial(files.read_at, reading, begin, outgoing, self._path_of(me)))
                    works.append(self._group.isend(outgoing, self._partners[me]))
                if incoming.size:
                    works.append(self._group.irecv(incoming, source))
                yield from works
                if incoming.size:
                    self._write(partial(files.write_block, writing, incoming))
            if source is not None:
                self._write(partial(self._keep, writing, temporary, path, source))

    def _keep(self, file: Any, temporary: Path, path: Path, source: int) -> None:
        """Rename a received copy, if its checksums are right."""
        files.flush(file)
        self._verify(source, temporary)
        os.replace(temporary, path)
        files.fsync_folder(path.parent)

    def _read(self, act: Callable[[], Any]) -> Any:
        """Call `act` on this rank's file, unless a read failed before."""
        if self.sent.error is None:
            self.sent = attempt(self._operation, act)
        return self.sent.outcome

    def _write(self, act: Callable[[], Any]) -> Any:
        """Call `act` on a copy, unless a write failed before."""
        if self.kept.error is None:
            self.kept = attempt(self._operation, act)
        return self.kept.outcome


def _remove(path: Path) -> None:
    with suppress(OSError):
        os.unlink(path)
