"""A job of two ranks that makes every call in which ranks wait for each other; rank 0 comes late to each.

It comes when the verdict names it, and the line where rank 1 waits. What nobody sees is printed at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from scipy import sparse

import hpccomm as hc
from hpccomm import checkpoint
from hpccomm.core.operation_list import MESSAGES
from hpccomm.debug import start
from hpccomm.debug.culprits import verdict

SECONDS = 30  # until a call counts as not seen
LARGE = 1 << 17  # elements: no MPI sends so much before it is received

x, small, large = np.ones(2), np.ones(4), np.ones(LARGE)
folder = Path(tempfile.gettempdir()) / "hpccomm-late-rank"  # nothing is written into it
ready: dict[str, Any] = {}  # what both ranks have set up in time


def work(array: Any = None) -> hc.Work:
    return hc.all_reduce(np.ones(2) if array is None else array, async_op=True)


def receive() -> hc.Work:
    return hc.irecv(np.empty(2), src=0)


def poll(is_there: Callable[[], bool], pause: float = 0.001) -> None:
    while not is_there():
        time.sleep(pause)


def has_ended(asked: hc.Work) -> bool:
    return asked.exception() is None and asked.is_success()


def has_left(asked: hc.Work) -> bool:
    return asked.status is not hc.WorkStatus.IN_FLIGHT


async def awaited() -> None:
    await work()


def grouped() -> None:
    with hc.coalescing():
        hc.all_reduce(x)
        hc.all_reduce(small)


def in_buckets() -> None:
    buckets = hc.GradientBuckets([x, small])
    for index in (1, 0):
        buckets.ready(index)
    buckets.wait()


def pool() -> None:
    with hc.executor():
        pass


def started(name: str) -> Any:
    ready[name].start()
    return ready[name]


def saved(_: Any = None) -> None:
    with contextlib.suppress(checkpoint.CheckpointError):  # there is none
        checkpoint.load(folder)


def answer(value: float = 1.0) -> None:
    hc.send(np.full(2, value), dst=1)


# What rank 1 calls, and rank 0 later. A method of a group that is a function of hpccomm as well is not there twice.
CALLS: dict[str, Callable[[], object]] = {
    "agree": lambda: hc.agree(True),
    "all_gather": lambda: hc.all_gather([x.copy(), x.copy()], x),
    "all_gather_coalesced": lambda: hc.all_gather_coalesced([[x.copy()], [x.copy()]], [x]),
    "all_gather_object": lambda: hc.all_gather_object([None, None], 1),
    "all_gather_object, async": lambda: hc.all_gather_object([None, None], 1, async_op=True).wait(),
    "all_gather_single": lambda: hc.all_gather_single(np.empty(4), x),
    "all_gather_single_coalesced": lambda: hc.all_gather_single_coalesced([np.empty(4)], [x]),
    "all_gather_single_init": lambda: hc.all_gather_single_init(np.empty(4), x).free() or hc.barrier(),
    "all_reduce": lambda: hc.all_reduce(x),
    "all_reduce, sparse": lambda: hc.all_reduce(sparse.eye_array(3).tocsr()),
    "all_reduce, strided": lambda: hc.all_reduce(large[::2]),
    "all_reduce, shared": lambda: hc.all_reduce(ready["shared"]),
    "all_reduce, large": lambda: hc.all_reduce(np.ones(2 << 20)),
    "all_reduce_coalesced": lambda: hc.all_reduce_coalesced([x, small]),
    "all_reduced": lambda: hc.all_reduced(1.0),
    "all_reduce_coalesced_init": lambda: hc.all_reduce_coalesced_init([x, small]).free() or hc.barrier(),
    "all_reduce_init": lambda: hc.all_reduce_init(x).free() or hc.barrier(),
    "all_reduce_init, first": lambda: hc.all_reduce_init(x, group=ready["first"]).free() or hc.barrier(),
    "all_to_all": lambda: hc.all_to_all([np.empty(1), np.empty(1)], [x[:1], x[1:]]),
    "all_to_all_single": lambda: hc.all_to_all_single(np.empty(2), x),
    "all_to_all_single_init": lambda: hc.all_to_all_single_init(np.empty(2), x).free() or hc.barrier(),
    "exchange_sparse": lambda: hc.exchange_sparse({0: x}),
    "barrier": lambda: hc.barrier(),
    "batch_isend_irecv": lambda: hc.wait_all(hc.batch_isend_irecv([hc.P2POp(hc.irecv, x, 0)])),
    "broadcast": lambda: hc.broadcast(x, src=0),
    "broadcast_coalesced": lambda: hc.broadcast_coalesced([x, small], src=0),
    "broadcast_init": lambda: hc.broadcast_init(x, src=0).free() or hc.barrier(),
    "broadcast_object_list": lambda: hc.broadcast_object_list([1], src=0),
    "checkpoint.load": saved,
    "coalescing": grouped,
    "collect_all": lambda: hc.collect_all([work().get_future()]).wait(),
    "empty_shared": lambda: hc.empty_shared(4),
    "executor": pool,
    "exscan": lambda: hc.exscan(x),
    "fence": lambda: hc.fence(ready["shared"]),
    "gather": lambda: hc.gather(x, [x.copy(), x.copy()] if hc.get_rank() == 1 else None, dst=1),
    "gather_object": lambda: hc.gather_object(1, [None, None] if hc.get_rank() == 1 else None, dst=1),
    "halo_accumulate": lambda: hc.halo_accumulate(small, ready["grid"]),
    "halo_accumulate_init": lambda: hc.halo_accumulate_init(small, ready["grid"]),
    "halo_exchange": lambda: hc.halo_exchange(small, ready["grid"]),
    "halo_exchange_init": lambda: hc.halo_exchange_init(small, ready["grid"]),
    "init_device_mesh": lambda: hc.init_device_mesh("cpu", (2,)),
    "monitored_barrier": lambda: hc.monitored_barrier(timeout=300),
    "new_grid": lambda: hc.new_grid((0, 0)),
    "new_group": lambda: hc.new_group(),
    "new_group, comm": lambda: hc.new_group(comm=MPI.COMM_WORLD),
    "new_subgroups": lambda: hc.new_subgroups(2),
    "new_subgroups_by_enumeration": lambda: hc.new_subgroups_by_enumeration([[0, 1]]),
    "recv": lambda: hc.recv(x, src=0),
    "recv_object_list": lambda: hc.recv_object_list([None], src=0),
    "reduce": lambda: hc.reduce(x, dst=1),
    "reduce_scatter": lambda: hc.reduce_scatter(x.copy(), [x, x]),
    "reduce_scatter_single": lambda: hc.reduce_scatter_single(np.empty(1), x),
    "reduce_scatter_single_coalesced": lambda: hc.reduce_scatter_single_coalesced([np.empty(1)], [x]),
    "reduce_scatter_single_init": lambda: hc.reduce_scatter_single_init(np.empty(1), x).free() or hc.barrier(),
    "redistribute": lambda: hc.redistribute(np.empty(2), x, slice(0, 2), slice(0, 2)),
    "redistribute_init": lambda: hc.redistribute_init(np.empty(2), x, slice(0, 2), slice(0, 2)),
    "reproducible_dot": lambda: hc.reproducible_dot(x, x),
    "reproducible_norm": lambda: hc.reproducible_norm(x),
    "reproducible_sum": lambda: hc.reproducible_sum(x),
    "scan": lambda: hc.scan(x),
    "scatter": lambda: hc.scatter(x, [x, x] if hc.get_rank() == 0 else None, src=0),
    "scatter_object_list": lambda: hc.scatter_object_list([None], [1, 2] if hc.get_rank() == 0 else None, src=0),
    "send": lambda: hc.send(large, dst=0),
    "sendrecv": lambda: hc.sendrecv(x, 1 - hc.get_rank(), x.copy(), 1 - hc.get_rank()),
    "split_group": lambda: hc.split_group(color=0),
    "wait_all": lambda: hc.wait_all([work()]),
    "wait_any": lambda: hc.wait_any([receive()]),
    "Future.then": lambda: work().get_future().then(lambda _: 1).wait(),
    "Future.wait": lambda: work().get_future().wait(),
    "Future.result": lambda: work().get_future().result(),
    "GradientBuckets.wait": in_buckets,
    "PersistentWork.free": lambda: started("coalesced").free(),
    "PersistentWork.is_completed": lambda: poll(started("receive").is_completed),
    "PersistentWork.run": lambda: ready["reduction"].run(),
    "PersistentWork.wait": lambda: started("reduction").wait(),
    "PersistentWork.wait, halo": lambda: started("halo").wait(),
    "PersistentWork.wait, large": lambda: started("large").wait(),
    "ProcessGroup.destroy": lambda: ready["group"].destroy(),
    "ProcessGroup.from_comm": lambda: hc.ProcessGroup.from_comm(MPI.COMM_WORLD),
    "Work, awaited": lambda: asyncio.run(awaited()),
    "Work, large": lambda: work(np.ones(2 << 20)).wait(),
    "Work.exception": lambda: poll(functools.partial(has_ended, work()), 0.05),
    "Work.is_completed": lambda: poll(work().is_completed, 0),
    "Work.is_success": lambda: poll(work().is_success),
    "Work.result": lambda: work().result(),
    "Work.source_rank": lambda: receive().source_rank(),
    "Work.status": lambda: poll(functools.partial(has_left, work()), 0.1),
    "Work.synchronize": lambda: work().synchronize(),
    "Work.wait": lambda: work().wait(),
    "destroy_process_group": lambda: hc.destroy_process_group(),
}
# What rank 0 calls where that is something else.
ANSWERS: dict[str, Callable[[], object]] = {
    "PersistentWork.is_completed": answer,
    "Work.source_rank": answer,
    "batch_isend_irecv": answer,
    "recv": answer,
    "recv_object_list": lambda: hc.send_object_list([1], dst=1),
    "send": lambda: hc.recv(np.empty(LARGE), src=1),
    "wait_any": answer,
}


def lines(call: Callable[[], object]) -> set[str]:
    codes = [call.__code__, *([poll.__code__] if "poll" in call.__code__.co_names else [])]
    return {f"{Path(__file__).name}:{line}" for code in codes for *_, line in code.co_lines() if line}


def is_seen(call: Callable[[], object]) -> str:
    """Return "" once the verdict names rank 0, and the line of `call` where rank 1 has been seen twice."""
    watchdog = start.current()
    assert watchdog is not None
    reports = watchdog._reports("asked")
    found = verdict(reports, 2)
    waits = [each for report in reports if report["rank"] == 1 for each in report["operations"] if each["waits"]]
    collectives = [each for each in waits if each["group_name"] == "world" and each["name"] not in MESSAGES]
    is_the_next = {each["number"] for each in collectives} <= {0, hc.GroupMember.WORLD.sequence_number + 1}
    said = [line for line in str(found).splitlines() if any(place in line for place in lines(call))]
    return (
        ""
        if found.culprits == [0] and is_the_next and said and any(each["seconds"] for each in waits)
        else f"{found} {waits}"
    )


def main() -> None:
    world = hc.init_process_group()
    start.LONGEST_PERIOD = 0.05
    ready["shared"] = hc.empty_shared(4)
    ready["group"] = hc.new_group()
    ready["first"] = hc.new_group()
    ready["grid"] = hc.new_grid(0, periodic=True)
    ready["halo"] = hc.halo_exchange_init(small.copy(), ready["grid"])
    ready["reduction"] = hc.all_reduce_init(x)
    ready["large"] = hc.all_reduce_init(large)
    ready["coalesced"] = hc.all_reduce_coalesced_init([x, small])
    ready["receive"] = hc.recv_init(x, src=0) if world.rank == 1 else None
    chosen = sys.argv[1:] or list(CALLS)
    unseen = {}
    for name in chosen:
        if world.rank == 0:
            give_up = time.monotonic() + SECONDS
            while (said := is_seen(CALLS[name])) and time.monotonic() < give_up:
                pass
            if said:
                unseen[name] = said
        ANSWERS.get(name, CALLS[name])() if world.rank == 0 else CALLS[name]()
    if world.rank == 0:
        print(json.dumps(unseen))


if __name__ == "__main__":
    main()
