"""Saving on two levels: always to the nodes' storage, with copies on other nodes; now and then to the shared folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core import checks
from ..core.group import ProcessGroup
from ..errors import on_rank
from . import files
from .destination import file_of
from .local import NOT_SHARED, NOTHING_HERE, LocalLevel, local_folder
from .partners import Copying, partners_of
from .together import CheckpointError, Steps, agreed, attempt


@dataclass
class Levels:
    """The local level of one checkpoint, as one rank saves it."""

    root: str | os.PathLike[str]
    partner: bool
    flush_every: int | None
    local: LocalLevel
    messages: Callable[[], ProcessGroup]  # the group for sending copies; the first call is collective
    is_drained: bool = False
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        group: ProcessGroup,
        folder: Path,
        local: str | os.PathLike[str] | None,
        partner: bool,
        flush_every: int | None,
        messages: Callable[[], ProcessGroup],
    ) -> Levels | None:
        """Return the levels of a save with these arguments; None without a local level."""
        if local is None:
            return None
        partners = partners_of(group.nodes) if partner else [None] * group.size
        there = tuple(group.local_ranks)
        level = LocalLevel(local_folder(local, folder), leader=there[0], partners=partners, own=there)
        return cls(local, bool(partner), flush_every, level, messages)

    def describe(self, rank: int, folder: Path) -> dict[str, Any]:
        """Check this rank's arguments, and return the facts that all ranks need; `folder` is the shared folder."""
        if self.flush_every is not None and checks.integer("flush_every", self.flush_every) < 1:
            raise ValueError(f"flush_every is {self.flush_every}; expected 1 or more, or None for never")
        return {
            "root": os.path.abspath(self.root),
            "partner": self.partner,
            "flush_every": self.flush_every,
            "drained": files.steps_in(folder) if rank == 0 else [],
            **(self.local.describe() if rank == self.local.leader else NOTHING_HERE),
        }

    def begin(self, operation: str, group: ProcessGroup, every: list[dict[str, Any]]) -> None:
        """Compare the descriptions of all ranks, and decide if this checkpoint goes to the shared folder, too."""
        for rank, each in enumerate(every):
            first = every[group.nodes.index(group.nodes[rank])]
            if each["root"] != first["root"]:
                raise ValueError(
                    f"{operation}: local is {each['root']!r} on rank {group.ranks[rank]}, and {first['root']!r} on "
                    f"another one of its node; {self.local.needs}{on_rank()}"
                )
        last, undrained = max(((each["last"], each["undrained"]) for each in every), key=lambda each: each[0])
        self.local.undrained = 1 if last in every[0]["drained"] else undrained + 1
        self.is_drained = self.flush_every is not None and self.local.undrained >= self.flush_every
        if self.partner and group.rank == 0 and set(self.local.partners) == {None}:
            self.warnings.append(
                f"{operation}: partner=True, but all ranks are on one node, so there are no copies on another one: if "
                f"it fails, what is not in the shared folder is lost. Start on several nodes, or give flush_every=1, "
                f"or partner=False if that is all right{on_rank()}"
            )

    def copy(
        self,
        group: ProcessGroup,
        operation: str,
        sizes: list[int | None],
        body: dict[str, Any],
        undo: Callable[[], None],
    ) -> Steps[None]:
        """Copy each rank's file to its partner, and verify the copies that this rank gets; `body` has the checksums."""
        local = self.local
        if set(local.partners) == {None}:
            return
        shards = files.shards_of_files(body)

        def verify(rank: int, path: Path) -> None:
            files.verify_file(path, shards[file_of(rank)], body["block"])

        copying = Copying(
            self.messages(), operation, local.partners, sizes, lambda rank: local.data / file_of(rank), verify
        )
        copying.kept = attempt(operation, lambda: self._refuse_shared(copying.sources))
        local.copies = copying.sources
        yield from copying.steps()
        for outcome in (copying.sent, copying.kept):  # if reading failed, the partner's copy is damaged
            yield from agreed(group, operation, outcome, undo)

    def _refuse_shared(self, sources: list[int]) -> None:
        for rank in sources:
            if (path := self.local.data / file_of(rank)).exists():
                raise CheckpointError(f"{path} is there, which another node has written: {NOT_SHARED}")
        if sources:
            files.make_folder(self.local.data)  # this rank may have written no file itself
