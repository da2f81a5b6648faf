"""Every operation in every form on every kind of group, with good arguments and with each bad one.

What comes out is right, or there is one clear error on the rank that made the mistake, nothing is sent, and the next
operation works. Each is one operation at the dispatcher: one sequence number, one begin and one end.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.core import registry
from hpccomm.core.operation_list import OF_GRIDS, OF_SEVERAL, OPERATIONS
from hpccomm.mpi import create

from ..hooks import Noted
from .cases import (
    GOOD,
    MESSAGES,
    OVERLAPS,
    READ_ONLY,
    WITH_OUTPUTS,
    Good,
    bad_calls,
    everybody,
    function,
    in_one_memory,
)

NAMES = [name for name in OPERATIONS if name in GOOD]
SIZE = MPI.COMM_WORLD.Get_size()
FORMS = ["ordinary", "async", "persistent", "coalescing", "batched"]


def has_form(name: str, form: str) -> bool:
    """Whether the operation is there in this form."""
    spec = OPERATIONS[name]
    if form == "async":
        return spec.is_asynchronous
    if form == "persistent":
        return spec.is_persistent
    return form != "batched" or name in MESSAGES


EVERY = [(name, form) for name in NAMES for form in FORMS if has_form(name, form)]
every_form = pytest.mark.parametrize(("name", "form"), EVERY, ids=[f"{name}-{form}" for name, form in EVERY])


@pytest.fixture(params=["world", "sub-group", "custom backend"])
def group(request: pytest.FixtureRequest, process_group: hc.ProcessGroup) -> Iterator[Any]:
    """A group that this rank is in (None: it is not)."""
    if request.param == "world":
        yield process_group
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "REGISTRY", dict(registry.REGISTRY))
        hc.register_backend("relay", create, devices="cpu", extended_api=True)
        backwards = list(range(SIZE))[::-1][: max(1, SIZE - 1)]
        made = hc.new_group(
            backwards, backend="cpu:relay" if request.param == "custom backend" else None, sort_ranks=False
        )
        yield made if isinstance(made, hc.ProcessGroup) else None
        hc.destroy_process_group(made)


def perform(name: str, form: str, group: hc.ProcessGroup, fine: Good | None = None) -> None:
    """Make the good call and look at what comes out."""
    fine = fine or GOOD[name](group)
    options = dict(fine.options, group=group)
    if form == "ordinary":
        assert function(name, form)(*fine.arguments, **options) == fine.returns
    elif form == "async":
        if name not in MESSAGES:
            options["async_op"] = True
        work = function(name, form)(*fine.arguments, **options)
        assert isinstance(work, hc.Work)
        assert work.wait()
        if fine.returns is not None:
            assert work.source_rank() == fine.returns
    elif form == "persistent":
        with function(name, form)(*fine.arguments, **options) as work:
            work.start()
            assert work.wait()
    elif form == "coalescing":
        with hc.coalescing(group):
            assert function(name, form)(*fine.arguments, **options) is None
    else:
        peer = options["group_dst" if name == "send" else "group_src"]
        message = hc.P2POp(function(name, "async"), *fine.arguments, group=group, group_peer=peer)
        (work,) = hc.batch_isend_irecv([message])
        assert work.wait()
    for actual, expected in fine.outcomes:
        assert same(actual, expected), (name, form, actual, expected)


def same(actual: Any, expected: Any) -> bool:
    if isinstance(actual, list):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    if hasattr(actual, "toarray"):
        actual = actual.toarray()
    return np.array_equal(actual, expected) if isinstance(actual, np.ndarray) else bool(actual == expected)


class Opposite:
    """The other ends of a message that is tried alone."""

    def __init__(self, name: str, group: hc.ProcessGroup) -> None:
        self._works: list[Any] = []
        me, n = group.rank, group.size
        if name == "send":
            self._works.append(hc.irecv(np.zeros(4), group=group, group_src=(me - 1) % n))
        if name == "recv":
            self._works.append(hc.isend(everybody(group)[me], group=group, group_dst=(me + 1) % n))
        self._slots: list[Any] = [None]
        if name == "send_object_list" and n == 1:
            self._works.append(hc.recv_object_list(self._slots, group=group, async_op=True))
        self._name, self._group = name, group
        if name == "recv_object_list":
            sent = hc.send_object_list([me], group=group, group_dst=(me + 1) % n, async_op=n == 1)
            self._works += [] if sent is None else [sent]

    def finish(self) -> None:
        me, n = self._group.rank, self._group.size
        if self._name == "send_object_list" and n > 1:
            hc.recv_object_list(self._slots, group=self._group, group_src=(me - 1) % n)
        for work in self._works:
            work.wait()
        assert self._slots == [(me - 1) % n if self._name == "send_object_list" else None]


def goes_to_itself(name: str, form: str, group: hc.ProcessGroup) -> bool:
    """Whether the good call would be a blocking message to this rank itself, which is refused."""
    return (
        group.size == 1
        and form in ("ordinary", "coalescing")
        and name in ("send", "recv", "send_object_list", "recv_object_list")
    )


def still_works(group: hc.ProcessGroup) -> None:
    check = np.ones(1)
    hc.all_reduce(check, group=group)
    assert check[0] == group.size


def numbers(group: hc.ProcessGroup) -> tuple[int, int]:
    """How many collectives and how many messages there have been."""
    return group.sequence_number, group.message_number


@every_form
def test_a_good_call_is_right_and_one_operation(name: str, form: str, group: Any) -> None:
    if group is None or goes_to_itself(name, form, group):
        return
    note, opposite = Noted(), None
    gathers = 1 if name in OF_SEVERAL else 0
    refused = form == "coalescing" and not OPERATIONS[name].is_collected
    if gathers and not refused:  # the first time there is one more
        opposite = Opposite(name, group)
        perform(name, form, group)
        opposite.finish()
    for hooked in (False, True):  # the fast path, and past the hook
        opposite = None if refused else Opposite(name, group)
        before = numbers(group)
        with group.register_hook(note) if hooked else nullcontext():
            if refused:
                with pytest.raises((hc.UnsupportedOperationError, ValueError), match=r"be collected in a coalescing"):
                    perform(name, form, group)
                assert numbers(group) == before
                continue
            perform(name, form, group)
        is_a_message = OPERATIONS[name].is_a_message
        assert np.subtract(numbers(group), before).tolist() == [0 if is_a_message else 1 + gathers, is_a_message]
        opposite.finish()
    still_works(group)
    seen = {"coalescing": "coalescing", "persistent": f"{name}_start"}.get(form, name)
    assert [each.name for each in note.begun] == ([] if refused else ["all_gather_object"] * gathers + [seen])
    assert note.ended == note.begun
    for operation in note.begun[gathers:]:
        assert operation.error is None
        assert operation.async_op == (form in ("async", "batched"))
        assert set(operation.arguments) == set(OPERATIONS[seen.removesuffix("_start")].arguments)


every_overlap = pytest.mark.parametrize("how", OVERLAPS)


@every_overlap
@pytest.mark.parametrize(
    ("name", "form"),
    [
        each
        for each in EVERY
        if each[0] in WITH_OUTPUTS and (each[1] != "coalescing" or OPERATIONS[each[0]].is_collected)
    ],
)
def test_inputs_may_share_memory_with_outputs(name: str, form: str, how: str, group: Any) -> None:
    if group is None:
        return
    share_memory(name, form, how, group)


def share_memory(name: str, form: str, how: str, group: hc.ProcessGroup) -> None:
    """Make the good call with its arrays in one memory, on the fast path and past a hook; rank 0 is late each time."""
    for hooked in (False, True):
        fine = GOOD[name](group)
        arguments, fine.outcomes = in_one_memory(list(fine.arguments), fine.outcomes, how, group.rank)
        fine.arguments = tuple(arguments)
        hc.barrier(group)
        if group.rank == 0:
            for _ in range(200):  # until what the others send has come, if it comes alone
                group.comm.Iprobe()
                os.sched_yield()
        with group.register_hook(Noted()) if hooked else nullcontext():
            perform(name, form, group, fine)


@every_form
def test_a_rank_outside_the_group_does_nothing(name: str, form: str, process_group: hc.ProcessGroup) -> None:
    outside: Any = hc.NonMember((0,), "others")
    fine = GOOD[name](process_group)
    options = dict(fine.options, group=outside)
    if form == "coalescing":
        with warnings.catch_warnings(), hc.coalescing(outside):
            warnings.simplefilter("ignore", RuntimeWarning)
            assert function(name, form)(*fine.arguments, **options) is None
        return
    if form == "batched":
        with pytest.warns(RuntimeWarning, match="batch_isend_irecv: this rank is not in <NonMember of 'others'>"):
            (work,) = hc.batch_isend_irecv([hc.P2POp(function(name, "async"), *fine.arguments, 0, group=outside)])
        assert work.wait()
        return
    if form == "async" and name not in MESSAGES:
        options["async_op"] = True
    called = f"{name}_init" if form == "persistent" else name
    with pytest.warns(
        RuntimeWarning, match=f"{called.removesuffix('_sparse')}: this rank is not in <NonMember of 'others'>"
    ):
        outcome = function(name, form)(*fine.arguments, **options)
    if form == "ordinary":
        assert outcome is None
    elif form == "async":
        assert outcome.is_success()
    else:
        outcome.start()
        assert outcome.wait()


@every_form
def test_a_destroyed_group_refuses(name: str, form: str, process_group: hc.ProcessGroup) -> None:
    fine = GOOD[name](process_group)
    group = hc.new_group()
    assert isinstance(group, hc.ProcessGroup)
    group.destroy()
    options = dict(fine.options, group=group)
    if form == "async" and name not in MESSAGES:
        options["async_op"] = True
    if goes_to_itself(name, form, process_group):
        return
    with pytest.raises(hc.DistError, match="has been destroyed"):  # noqa: PT012
        if form == "batched":
            peer = options["group_dst" if name == "send" else "group_src"]
            message = hc.P2POp(function(name, "async"), *fine.arguments, group=group, group_peer=peer)
            hc.batch_isend_irecv([message])
        elif form == "coalescing":
            with hc.coalescing(group):
                function(name, form)(*fine.arguments, **options)
        else:
            function(name, form)(*fine.arguments, **options)


@every_form
def test_a_bad_argument_is_one_clear_error_and_nothing_is_sent(name: str, form: str, group: Any) -> None:
    if group is None or form == "coalescing":
        return
    untouched = READ_ONLY.copy()
    for what, arguments, given in bad_calls(name, group):
        options = dict(given, group=group)
        before, in_flight = numbers(group), len(group.dispatcher.in_flight)
        if form == "async" and name not in MESSAGES:
            options["async_op"] = True
        with pytest.raises((TypeError, ValueError)) as caught:  # noqa: PT012
            if form == "batched":
                receive = hc.P2POp(hc.irecv, np.zeros(4), group=group, group_peer=0)  # must not be left behind
                peer = options.pop("group_dst" if name == "send" else "group_src")
                other = options.pop("dst" if name == "send" else "src", None)
                message = hc.P2POp(function(name, "async"), *arguments, peer=other, group_peer=peer, **options)
                hc.batch_isend_irecv([receive, message])
            else:
                function(name, form)(*arguments, **options)
        text = str(caught.value)
        said = name.removesuffix("_sparse"), MESSAGES.get(name, name)
        assert text.startswith((*said, "batch_isend_irecv")), (what, text)
        assert f"(rank {hc.get_rank()})" in text, (what, text)
        assert (numbers(group), len(group.dispatcher.in_flight)) == (before, in_flight), what
    assert np.array_equal(untouched, READ_ONLY)
    still_works(group)


def test_the_list_of_operations_is_complete() -> None:
    untried = OPERATIONS.keys() - GOOD.keys()
    # a form of its own; tests/test_shared.py; tests/gpu; tests/test_halos.py; tests/test_sparse_exchange.py
    assert untried == {"coalescing", "empty_shared", "empty_symmetric", "fence", "exchange_sparse"} | OF_GRIDS
    above_the_group = {"all_reduce_sparse", "coalescing"} | OF_GRIDS
    for name in OPERATIONS.keys() - above_the_group:
        assert callable(getattr(hc, name)), name
        assert callable(getattr(hc.ProcessGroup, name)), name
        assert callable(getattr(hc.NonMember, name)), name
    for name, spec in OPERATIONS.items():
        assert hasattr(hc, f"{name}_init") == spec.is_persistent, name
        if name in OF_GRIDS:
            continue
        assert hasattr(hc.ProcessGroup, f"{name}_init") == spec.is_persistent, name
