"""Make every call of mpi4py with new arrays, and print which of them are kept when it has ended.

Run by tests/run/test_nothing_stays.py; the arguments are the number of elements, and the names of calls: of them alone.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from hpccomm.debug.mpi_calls import CALLS, DUPLICATING, LIKE, MAKING, OTHERS

# They have no array (of a message that is probed for, its receiver has), or make communicators.
WITHOUT = {*MAKING, *DUPLICATING, *OTHERS, "Barrier", "Ibarrier", "Barrier_init", "barrier"}
WITHOUT |= {"Probe", "Mprobe", "probe", "mprobe"}
PARTITIONED = {"Psend_init", "Precv_init"}  # requests as those of Send_init and Recv_init

N = int(sys.argv[1])
comm = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size], periods=[True])
rank, n = comm.rank, comm.size
left, right = (rank - 1) % n, (rank + 1) % n
seen: list[weakref.ref[Any]] = []


def one(parts: int = 1) -> Any:
    array = np.ones(parts * N)
    seen.append(weakref.ref(array))
    return array


def many() -> Any:
    return one(n)


def parted(parts: int) -> list[Any]:
    return [one(parts), [N] * parts]


def typed(parts: int) -> list[Any]:
    return [one(parts), [N] * parts, [8 * N * part for part in range(parts)], [MPI.DOUBLE] * parts]


BUFFERS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "Bcast": lambda: (one(),),
    "Gather": lambda: (one(), many()),
    "Gatherv": lambda: (one(), parted(n)),
    "Scatter": lambda: (many(), one()),
    "Scatterv": lambda: (parted(n), one()),
    "Allgather": lambda: (one(), many()),
    "Allgatherv": lambda: (one(), parted(n)),
    "Alltoall": lambda: (many(), many()),
    "Alltoallv": lambda: (parted(n), parted(n)),
    "Alltoallw": lambda: (typed(n), typed(n)),
    **dict.fromkeys(("Reduce", "Allreduce", "Scan", "Exscan"), lambda: (one(), one())),
    **dict.fromkeys(("Reduce_scatter", "Reduce_scatter_block"), lambda: (many(), one())),
    "Neighbor_allgather": lambda: (one(), one(2)),
    "Neighbor_allgatherv": lambda: (one(), parted(2)),
    "Neighbor_alltoall": lambda: (one(2), one(2)),
    "Neighbor_alltoallv": lambda: (parted(2), parted(2)),
    "Neighbor_alltoallw": lambda: (typed(2), typed(2)),
}
OBJECTS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("bcast", "gather", "allgather", "neighbor_allgather"), one),
    **dict.fromkeys(("reduce", "allreduce", "scan", "exscan"), one),
    **dict.fromkeys(("scatter", "alltoall"), lambda: [one() for _ in range(n)]),
    "neighbor_alltoall": lambda: [one(), one()],
}


def wait(*requests: Any) -> None:
    for each in requests:
        each.Wait()


def wait_all(*requests: Any) -> None:
    MPI.Request.Waitall(list(requests))


def test(*requests: Any) -> None:
    for each in requests:
        while not each.Test():
            pass


WAYS = {"Wait": wait, "Waitall": wait_all, "Test": test}


def found(result: Any) -> None:
    """Note the arrays that a call of objects has made."""
    for each in result if isinstance(result, list) else [result]:
        if isinstance(each, np.ndarray):
            seen.append(weakref.ref(each))


def started_and_persistent(name: str, begun: Callable[[], list[Any]]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the ways to end what `begun` returns: requests of which the first is the one of the call `name`."""
    for way, ended in WAYS.items():

        def go(ended: Callable[..., None] = ended) -> None:
            requests = begun()
            persistent = [each for each in requests if isinstance(each, MPI.Prequest)]
            for _ in range(2 if len(persistent) == len(requests) else 1):
                for each in persistent:
                    each.Start()
                ended(*requests)
            for each in persistent:
                each.Free()

        yield f"{name}, {way}", go


def collectives() -> Iterator[tuple[str, Callable[[], None]]]:
    for names in LIKE.values():
        for name in names.split():
            if name in WITHOUT:
                continue
            given = BUFFERS[name]
            yield name, lambda name=name, given=given: getattr(comm, name)(*given())
            for form in (f"I{name[0].lower()}{name[1:]}", f"{name}_init"):
                yield from started_and_persistent(form, lambda form=form, given=given: [getattr(comm, form)(*given())])
    for name, make in OBJECTS.items():
        yield name, lambda name=name, make=make: found(getattr(comm, name)(make()))


def messages() -> Iterator[tuple[str, Callable[[], None]]]:
    for name in ("Send", "Ssend", "Bsend", "Rsend"):

        def send(name: str = name) -> None:
            request = comm.Irecv(one(), left)
            comm.Barrier()
            getattr(comm, name)(one(), right)
            request.Wait()

        yield name, send
        forms = f"I{name.lower()}", f"{name}_init"
        for form in forms:
            receive = "Recv_init" if form.endswith("_init") else "Irecv"

            def begun(form: str = form, receive: str = receive) -> list[Any]:
                received = getattr(comm, receive)(one(), left)
                comm.Barrier()
                return [received, getattr(comm, form)(one(), right)]

            yield from started_and_persistent(form, begun)
    yield "Irecv, Recv", lambda: (comm.Isend(one(), right).Wait() if rank else comm.Recv(one(), left),
                                  comm.Recv(one(), left) if rank else comm.Send(one(), right))  # fmt: skip
    yield "Sendrecv", lambda: comm.Sendrecv(one(), right, 0, one(), left)
    yield "Sendrecv_replace", lambda: comm.Sendrecv_replace(one(), right, 0, left)
    yield from started_and_persistent("Isendrecv", lambda: [comm.Isendrecv(one(), right, 0, one(), left)])
    yield from started_and_persistent("Isendrecv_replace", lambda: [comm.Isendrecv_replace(one(), right, 0, left)])
    yield "sendrecv", lambda: found(comm.sendrecv(one(), right, source=left))
    for name in ("send", "ssend", "bsend", "isend", "issend", "ibsend"):

        def send_object(name: str = name) -> None:
            request = comm.irecv(2 * 8 * N + 10_000, left)
            sent = getattr(comm, name)(one(), right)
            found(request.wait())
            if sent is not None:
                sent.wait()

        yield f"{name}, irecv", send_object

    def receive_object() -> None:
        request = comm.isend(one(), right)
        found(comm.recv(source=left))
        request.wait()

    yield "recv", receive_object


def main() -> None:
    MPI.Attach_buffer(memory := bytearray(100 * 8 * N + 1_000_000))
    tried = WITHOUT | PARTITIONED | {"Recv_init"}  # with each of the sends
    gc.collect()
    gc.disable()
    for name, call in (*collectives(), *messages()):
        tried |= {*name.split(", ")}
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        for _ in range(2):
            seen.clear()
            try:
                call()
            except NotImplementedError:  # this MPI has not got it
                continue
            comm.Barrier()
            deadline = time.monotonic() + 5
            while any(each() is not None for each in seen) and time.monotonic() < deadline:
                time.sleep(0.01)  # the watchdog may just be looking
            kept = sum(each() is not None for each in seen)
            if kept:
                sys.exit(f"{name}: {kept} of {len(seen)} arrays are kept")
    MPI.Detach_buffer()
    del memory
    missing = sorted(name for name in CALLS.keys() - tried if hasattr(comm, name))
    print(f"not tried: {missing}", flush=True)


if __name__ == "__main__":
    main()
