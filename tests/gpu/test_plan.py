"""How many calls of NCCL go in one group, and where a long list of them may be cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpccomm.nccl import plan
from hpccomm.nccl.plan import Plan

pytestmark = pytest.mark.serial


class Groups:
    """An NCCL that notes which calls come in which group."""

    def __init__(self) -> None:
        self.groups: list[list[tuple[str, int]]] = []

    def group_start(self) -> None:
        self.groups.append([])

    def group_end(self) -> None: ...

    def call(self, name: str) -> Any:
        return lambda *arguments: self.groups[-1].append((name, arguments[-2]))


def message(size: int) -> Any:
    return SimpleNamespace(size=size, dtype="uint8", data=SimpleNamespace(ptr=0))


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Groups:
    monkeypatch.setattr(plan, "CALLS_PER_GROUP", 4)
    monkeypatch.setattr(plan, "moved_array", lambda array: (array.size, 0))
    return Groups()


def begun(nccl: Groups) -> Plan:
    comm = SimpleNamespace(
        send=nccl.call("send"),
        recv=nccl.call("recv"),
        broadcast=nccl.call("broadcast"),
        group_start=nccl.group_start,
        group_end=nccl.group_end,
    )
    return Plan(SimpleNamespace(), comm, 0, 0)  # type: ignore[arg-type]


def test_many_calls_go_in_several_groups(nccl: Groups) -> None:
    begin = begun(nccl)
    for peer in range(10):
        begin.send(message(1), peer)
    begin.run(0)
    assert [len(group) for group in nccl.groups] == [4, 4, 2]


@pytest.mark.parametrize("empty", [(), (0,), (0, 3), (1, 2, 3), tuple(range(8))])
def test_both_halves_of_a_step_are_in_one_group(nccl: Groups, empty: tuple[int, ...]) -> None:
    begin = begun(nccl)
    for step in range(8):
        begin.send(message(0 if step in empty else 1), step)
        begin.recv(message(1), step)
        begin.end_step()
    begin.run(0)
    calls = [call for group in nccl.groups for call in group]
    sends = [("send", step) for step in range(8) if step not in empty]
    assert sorted(calls) == sorted([*sends, *(("recv", step) for step in range(8))])
    for group in nccl.groups:
        assert len(group) <= 4
        assert all(("recv", step) in group for name, step in group if name == "send")
