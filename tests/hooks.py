"""A hook for tests."""

from __future__ import annotations

import hpccomm as hc


class Noted:
    """Keeps the operations that have begun, and those that have ended."""

    def __init__(self) -> None:
        self.begun: list[hc.Operation] = []
        self.ended: list[hc.Operation] = []

    def begin(self, operation: hc.Operation) -> None:
        self.begun.append(operation)

    def end(self, operation: hc.Operation) -> None:
        self.ended.append(operation)

    @property
    def names(self) -> list[str]:
        """The names of those that have begun."""
        return [each.name for each in self.begun]
