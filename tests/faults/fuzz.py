"""A random program: random operations on random groups, compared with NumPy.

    mpiexec -n 4 python tests/faults/fuzz.py --seed 7 --operations 200

From the seed all ranks draw the same program, which is legal: every member of a group makes the same calls in the same
order, and each message has its other end. The inputs of all ranks and NumPy's results follow from the seed, too.
On a difference it prints how to run the same again.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import hpccomm as hc
from hpccomm import native
from hpccomm.core.operation_list import OPERATIONS as SPECS
from tests.arrays import LAYOUTS, reductions_of, values
from tests.calls import CALLS, On
from tests.matrix.cases import OVERLAPS, in_one_memory

if native.fastpath is not None:
    from hpccomm.mpi import compiled

DTYPES = [np.dtype(code) for code in "?bBhHiIqQefdFD"]
SIZES = [0, 1, 2, 5, 100, 1000, 5000, 40_000]
LARGE = [140_000, 270_000, 1_100_000]  # past the thread and the segments, for some dtypes
SLOTS = [512 << 10, 16 << 10]  # bytes of a part of memory of the node, by the seed: larger arrays go in rounds
MOST_GROUPS = 5
MOST_IN_FLIGHT = 12
FORMS = ["ordinary", "ordinary", "async", "async", "persistent", "coalescing"]


@dataclass
class Call:
    """One call on one rank: the function, its arguments, and the expected result."""

    function: str
    arguments: list[Any]
    options: dict[str, Any] = field(default_factory=dict)
    outcomes: list[tuple[Any, Any]] = field(default_factory=list)  # the array, and its expected values


class Draw:
    """The random numbers of the program, which are the same on all ranks; and the arrays made from them."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def one(self, choices: Any) -> Any:
        """Return one of the choices."""
        return choices[int(self.random.integers(len(choices)))]

    def chance(self, probability: float) -> bool:
        """Return True so often."""
        return bool(self.random.random() < probability)

    def number(self, below: int) -> int:
        """Return a number from 0 on."""
        return int(self.random.integers(below))

    def shape(self, ranks: int = 1) -> tuple[int, ...]:
        """Return a shape; arrays of all ranks together are no larger than one of the large."""
        size = self.one(LARGE) if self.chance(0.04) else self.one(SIZES)
        size //= ranks
        kind = self.number(6)
        if kind == 0:
            return ()
        if kind == 1 and size > 3:
            return 2, size // 2
        return (size,)


class Program:
    """The calls of one group, each as this rank makes it."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def contributions(self, group: hc.ProcessGroup, dtype: Any, shape: tuple[int, ...]) -> list[Any]:
        """Return the input of each rank of the group."""
        salt = self.draw.number(1 << 30)
        return [np.asarray(values(dtype, shape, rank, salt)) for rank in range(group.size)]

    def laid_out(self, array: Any, draw: Draw | None = None) -> Any:
        """Return the values in memory laid out at random; the same draw on all ranks, another layout on each."""
        draw = draw or self.draw
        first = draw.number(len(LAYOUTS))
        layout = LAYOUTS[(first + hc.get_rank() * draw.number(2)) % len(LAYOUTS)]
        return layout(array)

    def call(self, name: str, group: hc.ProcessGroup) -> Call:
        """Return a call of an operation; all ranks draw the same, except layouts."""
        draw = self.draw
        how = draw.one(OVERLAPS) if draw.chance(0.3) else None
        if name == "sendrecv":
            made = self.sendrecv(group)
        elif name == "barrier":
            made = Call("barrier", [])
        else:
            made = self.collective(name, group)
        if how:
            made.arguments, made.outcomes = in_one_memory(made.arguments, made.outcomes, how, group.rank)
        return made

    def collective(self, name: str, group: hc.ProcessGroup) -> Call:
        """Return a call of a collective."""
        draw = self.draw
        dtype = draw.one(DTYPES)
        op = draw.one([op for op in reductions_of(dtype) if "scan" not in name or op != "AVG"])  # of which it has one
        if "coalesced" in name:
            op = draw.one(["SUM", "PRODUCT"])
        shape = draw.shape(1 if name in ALIKE else group.size)
        on = On(group, dtype, shape, op, root=draw.number(group.size))
        on.stacked, on.uneven, on.salt = draw.chance(0.5), draw.chance(0.5), draw.number(1 << 30)
        on.several = [(draw.one(DTYPES), (draw.one(SIZES[:-1]) // 4,)) for _ in range(1 + draw.number(4))]
        layouts = Draw(draw.number(1 << 62))  # of its own, since ranks differ in how many arrays they have
        on.layout = lambda given: self.laid_out(given, layouts)
        good = CALLS[name](on)
        return Call(name, list(good.arguments), good.options, good.outcomes)

    def sendrecv(self, group: hc.ProcessGroup) -> Call:
        """Return a call of that name, round the ring."""
        step, tag = self.draw.number(group.size), self.draw.number(3)
        given = self.contributions(group, self.draw.one(DTYPES), self.draw.shape())
        to, source = (group.rank + step) % group.size, (group.rank - step) % group.size
        out = self.laid_out(np.zeros_like(given[0]))
        options = {"group_dst": to, "group_src": source, "tag": tag}
        return Call("sendrecv", [self.laid_out(given[group.rank]), None, out], options, [(out, given[source])])


OPERATIONS = [*CALLS, "sendrecv", "barrier"]
ALIKE = [name for name in CALLS if [each.name for each in SPECS[name].roles if each.is_array] == ["array"]]  # in place
COLLECTED = [name for name in CALLS if SPECS[name].is_collected]
PERSISTENT = [name for name in CALLS if SPECS[name].is_persistent]
OBJECTS = ["all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"]
MESSAGES = ["isend and irecv", "batch", "persistent messages", "objects by message", "asynchronous objects"]
OBJECT_TAG = 3  # and the next one: an array's receive would take objects that an earlier asynchronous receive expects


class Fuzz:
    """The run: its groups, and its operations in flight."""

    def __init__(self, seed: int, world: hc.ProcessGroup, log: bool) -> None:
        self.draw = Draw(seed)
        self.program = Program(self.draw)
        self.groups: list[Any] = [world]
        self.members = [list(range(world.size))]
        self.in_flight: list[tuple[Callable[[], object], Call | None, str]] = []
        self.world = world
        self.step = 0
        self.log = log

    # -- every step is drawn alike on all ranks; those outside of the group draw, and do nothing ---------------------

    def run(self, steps: int) -> None:
        """Do so many steps, and look at everything that has come out."""
        for self.step in range(steps):
            kind = self.draw.number(100)
            if kind < 6:
                self.make_or_destroy()
            elif kind < 12:
                self.wait_for_some()
            else:
                number = self.draw.number(len(self.groups))
                # each step has numbers of its own, so that ranks outside of the group need not draw them
                self.program.draw = Draw(self.draw.number(1 << 62))
                if self.world.rank in self.members[number]:
                    self.operation(self.groups[number])
            if len(self.in_flight) > MOST_IN_FLIGHT:
                self.wait_for_some()
        self.wait_for_all()

    def make_or_destroy(self) -> None:
        """Make a group, or destroy one; destroy finishes its operations in flight."""
        if len(self.groups) > 1 and (len(self.groups) == MOST_GROUPS or self.draw.chance(0.5)):
            number = 1 + self.draw.number(len(self.groups) - 1)
            self.say(f"destroy group {self.groups[number]!r}")
            group, _ = self.groups.pop(number), self.members.pop(number)
            hc.destroy_process_group(group)
            return
        ranks = self.draw.random.permutation(self.world.size)[: 1 + self.draw.number(self.world.size)].tolist()
        is_sorted = self.draw.chance(0.5)
        self.say(f"new group of {ranks}")
        self.groups.append(hc.new_group(ranks, sort_ranks=is_sorted))
        self.members.append(ranks)

    def operation(self, group: hc.ProcessGroup) -> None:
        """Do one operation, in one of its forms."""
        draw = self.program.draw
        kind = draw.number(100)
        if kind < 8:
            self.objects(draw.one(OBJECTS), group)
        elif kind < 22:
            self.messages(draw.one(MESSAGES), group)
        else:
            form = draw.one(FORMS)
            if form == "coalescing":
                self.coalescing(group)
                return
            name = draw.one(PERSISTENT if form == "persistent" else OPERATIONS)
            call = self.program.call(name, group)
            what = f"{form} {name} on {group.name}"
            self.say(what)
            {"ordinary": self.ordinary, "async": self.asynchronous, "persistent": self.persistent}[form](
                call, group, what
            )

    def ordinary(self, call: Call, group: hc.ProcessGroup, what: str) -> None:
        """The blocking call."""
        getattr(hc, call.function)(*call.arguments, **call.options, group=group)
        self.compare(call, what)

    def asynchronous(self, call: Call, group: hc.ProcessGroup, what: str) -> None:
        """The one that returns a Work: which is waited for later, by a Future, or never."""
        work = getattr(hc, call.function)(*call.arguments, **call.options, group=group, async_op=True)
        if self.program.draw.chance(0.3):
            future = work.get_future()
            self.in_flight.append((future.wait, call, what))
        elif self.program.draw.chance(0.2):
            call.outcomes.clear()  # the Work is dropped, and with it the arrays: the group keeps both
        else:
            self.in_flight.append((work.wait, call, what))

    def persistent(self, call: Call, group: hc.ProcessGroup, what: str) -> None:
        """Set it up, and start it a few times on the same values."""
        given = [each.copy() for each in arrays_of(call.arguments)]
        with getattr(hc, f"{call.function}_init")(*call.arguments, **call.options, group=group) as work:
            for _ in range(1 + self.program.draw.number(3)):
                for array, before in zip(arrays_of(call.arguments), given):
                    array[...] = before
                work.start()
                work.wait()
                self.compare(call, what)

    def coalescing(self, group: hc.ProcessGroup) -> None:
        """A block of some operations."""
        draw = self.program.draw
        calls = [self.program.call(draw.one(COLLECTED), group) for _ in range(1 + draw.number(4))]
        is_async = draw.chance(0.5)
        what = f"coalescing {[call.function for call in calls]} async_ops={is_async} on {group.name}"
        self.say(what)
        with hc.coalescing(group, async_ops=is_async) as block:
            for call in calls:
                getattr(hc, call.function)(*call.arguments, **call.options, group=group)
        together = Call("coalescing", [], {}, [each for call in calls for each in call.outcomes])
        if is_async:
            self.in_flight.append((block.wait, together, what))
        else:
            self.compare(together, what)

    def objects(self, name: str, group: hc.ProcessGroup) -> None:
        """A function of Python objects."""
        draw, n, me = self.program.draw, group.size, group.rank
        root, length = draw.number(n), draw.one([0, 3, 3000])
        given = [{"rank": rank, "text": "x" * length, "step": self.step} for rank in range(n)]
        self.say(f"{name} on {group.name}")
        slots: list[Any] = [None] * n
        if name == "all_gather_object":
            hc.all_gather_object(slots, given[me], group)
        elif name == "gather_object":
            hc.gather_object(given[me], slots if me == root else None, group=group, group_dst=root)
            slots = slots if me == root else given
        elif name == "broadcast_object_list":
            slots = list(given) if me == root else slots
            hc.broadcast_object_list(slots, group=group, group_src=root)
        else:
            mine: list[Any] = [None]
            hc.scatter_object_list(mine, given if me == root else None, group=group, group_src=root)
            slots = [*given[:me], *mine, *given[me + 1 :]]
        if slots != given:
            self.fail(f"{name} on {group.name}", slots, given)

    def messages(self, form: str, group: hc.ProcessGroup) -> None:
        """Some messages round the ring, of several tags; received in another order than sent, tag by tag."""
        draw, n, me = self.program.draw, group.size, group.rank
        step = draw.number(n)
        to, source = (me + step) % n, (me - step) % n
        what = f"{form} by {step} on {group.name}"
        self.say(what)
        if form == "objects by message":
            if step == 0:
                return
            slots: list[Any] = [None, None]
            tag = draw.one([0, OBJECT_TAG])
            for receives in (me % 2 == 1, me % 2 == 0) if n % 2 == 0 and step % 2 else ():
                if receives:
                    hc.recv_object_list(slots, group=group, group_src=source, tag=tag)
                else:
                    hc.send_object_list([me, self.step], group=group, group_dst=to, tag=tag)
            if slots not in ([source, self.step], [None, None]):
                self.fail(what, slots, [source, self.step])
            return
        if form == "asynchronous objects":
            self.asynchronous_objects(group, to, source, what)
            return
        count = 1 + draw.number(3)
        kinds = [(draw.one(DTYPES), draw.shape()) for _ in range(count)]
        given = [self.program.contributions(group, *kind) for kind in kinds]
        sent = [self.program.laid_out(each[me]) for each in given]
        out = [self.program.laid_out(np.zeros_like(each[me])) for each in given]
        call = Call(form, [sent], {}, [(array, each[source]) for array, each in zip(out, given)])
        order = draw.random.permutation(count).tolist()  # by tag, so that they do not overtake each other
        if form == "persistent messages":
            receives = [hc.recv_init(out[i], group=group, group_src=source, tag=i) for i in order]
            sends = [hc.send_init(sent[i], group=group, group_dst=to, tag=i) for i in range(count)]
            for work in (*receives, *sends):
                work.start()
            for work in (*sends, *receives):
                work.wait()
                work.free()
            self.compare(call, what)
        elif form == "batch":
            batch = [hc.P2POp(hc.irecv, out[i], group=group, group_peer=source, tag=i) for i in order]
            batch += [hc.P2POp(hc.isend, sent[i], group=group, group_peer=to, tag=i) for i in range(count)]
            works = hc.batch_isend_irecv(batch)
            self.in_flight.append((lambda: [work.wait() for work in works], call, what))
        else:
            works = [hc.isend(sent[i], group=group, group_dst=to, tag=i) for i in range(count)]
            works += [hc.irecv(out[i], group=group, group_src=source, tag=i) for i in order]
            works = [works[i] for i in draw.random.permutation(len(works))]
            self.in_flight.append((lambda: [work.wait() for work in works], call, what))

    def asynchronous_objects(self, group: hc.ProcessGroup, to: int, source: int, what: str) -> None:
        """Lists of objects, some with a large array; those of one tag come in the order in which they were sent."""
        draw = self.program.draw
        kinds = [(draw.one(DTYPES), draw.shape()) for _ in range(1 + draw.number(3))]
        given = [self.program.contributions(group, *kind) for kind in kinds]
        tags = [OBJECT_TAG + draw.number(2) for _ in kinds]
        slots: list[list[Any]] = [[None, None] for _ in kinds]
        order = sorted(range(len(kinds)), key=tags.__getitem__, reverse=draw.chance(0.5))
        begins_with_sends = draw.chance(0.5)
        works = []
        for sends in (begins_with_sends, not begins_with_sends):
            if sends:
                for tag, each in zip(tags, given):
                    objects = [self.step, each[group.rank].copy()]
                    works.append(hc.send_object_list(objects, group=group, group_dst=to, tag=tag, async_op=True))
                    objects[1][...] = 0  # the call has copied it
            else:
                for i in order:
                    call = {"group": group, "group_src": source, "tag": tags[i], "async_op": True}
                    works.append(hc.recv_object_list(slots[i], **call))
        works, step = [works[i] for i in draw.random.permutation(len(works))], self.step

        def wait() -> None:
            for work in works:
                work.wait()
            if any(slot[0] != step for slot in slots):
                self.fail(what, [slot[0] for slot in slots], step)
            self.compare(Call(what, [], {}, [(slot[1], each[source]) for slot, each in zip(slots, given)]), what)

        self.in_flight.append((wait, None, what))

    # -- looking -----------------------------------------------------------------------------------------------------

    def wait_for_some(self) -> None:
        """Wait for half of the operations in flight, in any order, which may differ between ranks."""
        order = np.random.default_rng([self.step, self.world.rank]).permutation(len(self.in_flight))
        chosen = set(order[: len(order) // 2].tolist())
        waiting = [self.in_flight[i] for i in order if i in chosen]
        self.in_flight = [each for i, each in enumerate(self.in_flight) if i not in chosen]
        for wait, call, what in waiting:
            wait()
            self.compare(call, what)

    def wait_for_all(self) -> None:
        """Wait for the rest."""
        while self.in_flight:
            wait, call, what = self.in_flight.pop()
            wait()
            self.compare(call, what)

    def compare(self, call: Call | None, what: str) -> None:
        """Compare the results with NumPy's."""
        for actual, expected in call.outcomes if call else ():
            same = actual.shape == expected.shape and actual.dtype == expected.dtype
            if not same or not np.array_equal(actual, expected):
                self.fail(what, actual, expected)

    def fail(self, what: str, actual: Any, expected: Any) -> None:
        """Describe the failure."""
        described = getattr(expected, "dtype", ""), getattr(expected, "shape", "")
        raise AssertionError(f"step {self.step}: {what} {described}: {actual!r} instead of {expected!r}")

    def say(self, what: str) -> None:
        """Print a step, if asked."""
        if self.log:
            print(f"{self.world.rank}: {self.step}: {what}", flush=True)


def arrays_of(arguments: list[Any]) -> Iterator[Any]:
    """Return the arrays among arguments."""
    for argument in arguments:
        for each in argument if isinstance(argument, list) else [argument]:
            if isinstance(each, np.ndarray):
                yield each


def falsified(all_reduce: Any) -> Any:
    """Return an all_reduce with a mistake."""

    def wrong(array: Any, *arguments: Any, **options: Any) -> Any:
        work = all_reduce(array, *arguments, **options)
        if work is None and array.size:
            array.reshape(-1)[-1] += 1
        return work

    return wrong


def main() -> None:
    """Run one seed, or one after another until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from --seed on")
    parser.add_argument("--operations", type=int, default=200, help="of each seed")
    parser.add_argument("--log", action="store_true", help="print every step")
    parser.add_argument("--falsify", action="store_true", help="let all_reduce leave one element too large")
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*this rank is not in")
    if arguments.falsify:
        hc.all_reduce = falsified(hc.all_reduce)
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        if native.fastpath is not None:
            compiled.LARGEST_SLOT = SLOTS[seed % len(SLOTS)]
        world = hc.init_process_group()
        again = f"mpiexec -n {world.size} python {sys.argv[0]} --seed {seed} --operations {arguments.operations}"
        try:
            Fuzz(seed, world, arguments.log).run(arguments.operations)
            hc.destroy_process_group()
        except BaseException:
            print(f"seed {seed} fails on rank {world.rank}; again: {again}", file=sys.stderr, flush=True)
            raise
        if world.rank == 0:
            print(f"seed {seed}: {arguments.operations} operations are right", flush=True)


if __name__ == "__main__":
    main()
