"""The doors of all groups."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import pytest

import hpccomm as hc
from hpccomm.core import door


def test_they_are_listed_while_another_thread_makes_a_group(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Another:
        """Of another thread's group."""

    another = Another()

    class Doors(WeakSet[Any]):
        def __iter__(self) -> Any:
            for each in super().__iter__():
                self.add(another)  # what the other thread does
                yield each

    monkeypatch.setattr(door, "_doors", Doors([process_group.door]))
    assert set(door.all_doors()) == {process_group.door, another}
