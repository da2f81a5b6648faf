"""What keeps an array when its operation has ended: nothing. Each operation in each form, in groups of each kind."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
import hpccomm.debug
from hpccomm.core.operation_list import OF_GRIDS, OPERATIONS
from hpccomm.process.tuning import Tuning

from ..arrays import contiguous, strided
from ..launch import until
from .cases import GOOD, MESSAGES, NUMBERS, READ_ONLY, Good, bad_calls, function
from .test_matrix import Opposite, goes_to_itself, has_form

# -- operations, forms, layouts, groups ------------------------------------------------------------------


def halo(group: Any) -> Good:
    return Good(([np.ones((4, 4)), np.ones((4, 4))],), {"grid": group})


def to_some(group: Any) -> Good:
    return Good(({(group.rank + 1) % group.size: np.ones(3), group.rank: [np.ones(2), np.ones(9000)]},))


EVERY: dict[str, Callable[[Any], Good]] = GOOD | dict.fromkeys(sorted(OF_GRIDS), halo) | {"exchange_sparse": to_some}
ELSEWHERE = {
    "coalescing": "it is a form here",
    "empty_symmetric": "of GPUs: tests/gpu",
    # Their memory is the group's until it is destroyed, since MPI frees it collectively: tests/test_shared.py
    "empty_shared": "it is kept on purpose",
    "fence": "its array is one of those",
}

# Of each form, the one in tests/matrix/test_matrix.py that an operation has to have.
FORMS = {
    "ordinary": "ordinary",
    "coalescing": "coalescing",
    "coalescing, asynchronous": "coalescing",
    "batched": "batched",
    "wait": "async",
    "held": "async",
    "await": "async",
    "Future": "async",
    "callback": "async",
    "dropped": "async",
    "persistent": "persistent",
    "freed": "persistent",
}
LAYOUTS = {"contiguous": contiguous, "strided": strided, "half": lambda array: array.astype(np.float16)}
LARGE = Tuning(1, 1, 1, 1, 64, 0, 1, 1)  # as which it has every array
KINDS = ["small", "large", "hooked", "recorded"]


class Forgets:
    """A hook."""

    def begin(self, operation: hc.Operation) -> None:
        pass

    end = begin


@pytest.fixture(params=KINDS)
def group(request: pytest.FixtureRequest, process_group: hc.ProcessGroup) -> Iterator[Any]:
    with hc.new_grid((0,), True) as group:
        if request.param == "large":
            group.tuning = LARGE
        for _ in range(10):  # from here on it uses memory of the node, where it has some
            hc.barrier(group)
        hook = group.register_hook(Forgets()) if request.param == "hooked" else nullcontext()
        with hook, hpccomm.debug.record() if request.param == "recorded" else nullcontext():
            yield group


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """What only the collector of garbage frees has been kept: it comes by the number of objects, not by their size."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# -- arrays ----------------------------------------------------------------------------------------------


def laid_out(value: Any, layout: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    """The arguments with other arrays; the same one stays the same."""
    if isinstance(value, list | tuple):
        return type(value)(laid_out(each, layout, done) for each in value)
    if isinstance(value, dict):
        return {key: laid_out(each, layout, done) for key, each in value.items()}
    return done.setdefault(id(value), layout(value)) if isinstance(value, np.ndarray) else value


def watched(value: Any) -> list[weakref.ref[Any]]:
    """Weak references to the arrays that own the memory of what is in `value`."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [each for item in value for each in watched(item)]
    if hasattr(value, "indptr"):  # a sparse matrix
        return watched([value.data, value.indices, value.indptr])
    if not isinstance(value, np.ndarray):
        return []
    while isinstance(value.base, np.ndarray):
        value = value.base
    return [weakref.ref(value)]


class Walk:
    """The good call of an operation, in a form and a layout."""

    def __init__(self, name: str, form: str, layout: str, group: Any) -> None:
        self.name, self.form, self.group = name, form, group
        fine = EVERY[name](group)
        self.arguments = laid_out(fine.arguments, LAYOUTS[layout], {})
        self.options = fine.options if name in OF_GRIDS else {**fine.options, "group": group}
        self.arrays = watched(self.arguments)
        self.kept: Any = None  # on purpose, by the program

    def call(self, **options: Any) -> Any:
        return function(self.name, FORMS[self.form])(*self.arguments, **self.options, **options)

    def begun(self) -> Any:
        return self.call() if self.name in MESSAGES else self.call(async_op=True)

    def go(self) -> None:
        """Do the operation in its form; afterwards the program has nothing of it, or a Work."""
        group, form = self.group, self.form
        if form == "ordinary":
            self.arrays += watched(self.call())
        elif form.startswith("coalescing"):
            with hc.coalescing(group, async_ops=form != "coalescing") as pending:
                self.call()
            if form != "coalescing":
                pending.wait()
                self.kept = pending
        elif form == "batched":
            peer = self.options["group_dst" if self.name == "send" else "group_src"]
            message = hc.P2POp(function(self.name, "async"), *self.arguments, group=group, group_peer=peer)
            hc.batch_isend_irecv([message])[0].wait()
        elif FORMS[form] == "persistent":
            with self.call() as persistent:
                for _ in range(2 if self.name not in MESSAGES else 1):
                    persistent.start()
                    persistent.wait()
            if form == "freed":
                self.kept = persistent
                self.arrays = self._but(persistent.output)
        elif form in ("wait", "held"):
            work = self.begun()
            work.wait()
            self.arrays += watched(work.result())
            if form == "held":
                self.kept = work
                self.arrays = self._but(work.result())
        elif form == "await":
            self.arrays += watched(asyncio.run(self._awaited()))
        elif form == "Future":
            self.arrays += watched(self.begun().get_future().wait())
        elif form == "callback":
            called = threading.Event()
            future = self.begun().get_future().then(lambda _: called.set())
            assert called.wait(60)
            future.wait()
        else:
            self.begun()
        self.arguments = self.options = None

    async def _awaited(self) -> Any:
        return await self.begun()

    def _but(self, result: Any) -> list[weakref.ref[Any]]:
        """A Work has its result as long as the program has it."""
        results = {id(each()) for each in watched(result)}
        return [each for each in self.arrays if id(each()) not in results]

    def forgets_everything(self) -> bool:
        if self.form == "dropped":  # up to 64 MiB of these may be kept: the group looks when there are so many
            self.group.dispatcher.reap()
        return all(each() is None for each in self.arrays)


def test_every_operation_is_walked_over() -> None:
    assert OPERATIONS.keys() - EVERY.keys() == ELSEWHERE.keys()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("name", EVERY)
def test_no_array_stays_when_its_operation_has_ended(name: str, group: Any) -> None:
    forms = [form for form, needed in FORMS.items() if has_form(name, needed)]
    if not OPERATIONS[name].is_collected:
        forms = [form for form in forms if not form.startswith("coalescing")]
    for form in forms:
        if goes_to_itself(name, FORMS[form], group):
            continue
        for layout in LAYOUTS if name not in MESSAGES else ["contiguous", "strided"]:
            for turn in range(2):  # what is made at first may be kept for the next time
                walk, opposite = Walk(name, form, layout, group), Opposite(name, group)
                walk.go()
                opposite.finish()
                del opposite
                # the watchdog, in its thread, may just be looking at a Work
                until(walk.forgets_everything, f"end of the arrays of {name}, {form}, {layout}, turn {turn}", 10)


OF_THE_TESTS = [each() for each in watched([*NUMBERS, READ_ONLY])]  # which stay


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("name", GOOD)
def test_no_array_stays_when_its_operation_has_been_refused(name: str, process_group: hc.ProcessGroup) -> None:
    calls = bad_calls(name, process_group)
    while calls:
        what, arguments, options = calls.pop()
        arrays = [each for each in watched(arguments) if not any(each() is one for one in OF_THE_TESTS)]
        with pytest.raises((TypeError, ValueError)):
            function(name, "ordinary")(*arguments, **options)
        del arguments, options
        until(lambda: all(each() is None for each in arrays), f"end of the arrays of {name}: {what}", 10)  # noqa: B023
