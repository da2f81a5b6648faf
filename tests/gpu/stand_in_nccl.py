"""The stand-in's NCCL: its calls, sent as messages of MPI on communicators of their own."""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from hpccomm.cuda.time_limit import TimeLimit
from hpccomm.errors import DistBackendError

from . import stand_in_calls
from .stand_in_gpu import (
    IS_NUMPY,
    MACHINE,
    MEMORY,
    RUBBISH,
    TYPES,
    WORLD,
    Message,
    bytes_at,
    extent_at,
)

SUM, PROD, MAX, MIN, AVG = range(5)
REDUCE = {SUM: np.add, PROD: np.multiply, MAX: np.maximum, MIN: np.minimum, AVG: np.add}


class NCCLError(Exception):
    """An error of the imitated NCCL."""


def group_start() -> None:
    """Begin a group of calls, of whichever communicator."""
    MACHINE.calls.append("group_start")
    MACHINE.depth += 1


def group_end() -> Communicator | None:
    """Run the calls of a group; return the communicator whose they are."""
    MACHINE.calls.append("group_end")
    MACHINE.depth -= 1
    calls, MACHINE.grouped = MACHINE.grouped, []
    if not calls:
        return None
    comm: Communicator = calls[0][0].__self__
    comm.begin(comm._run(calls))
    return comm


class NCCL:
    """The NCCL half of the provider."""

    bindings = "the stand-in"

    @property
    def has_all_to_all(self) -> bool:
        return MACHINE.has_all_to_all

    def version(self) -> int:
        return MACHINE.version

    def unique_id(self) -> str:
        fail()
        return tempfile.mkdtemp(prefix="hpccomm-nccl-")

    def connect(self, size: int, unique_id: str, rank: int, time_limit: TimeLimit | None) -> Communicator:
        fail()
        MACHINE.calls.append("connect" if time_limit is None else "connect, not blocking")
        made = Communicator(blocks=time_limit is None, time_limit=time_limit)
        made.begin(made.find_together(size, unique_id, rank))
        return made

    def allocate(self, nbytes: int) -> int:
        fail()
        MACHINE.calls.append("allocate")
        MACHINE.initialises()
        memory = MEMORY.allocate(nbytes)
        memory[:] = RUBBISH
        start = MEMORY.address_of(memory)
        MACHINE.symmetric[start] = memory
        return start

    def free(self, memory: int) -> None:
        MACHINE.calls.append("free")
        freed = MACHINE.symmetric.pop(memory)
        end = memory + freed.nbytes
        MACHINE.host_uses("the freeing of memory", writes=((memory, end),))()
        MACHINE._freed.add(memory, end, freed)

    def functions_for_c(self) -> dict[str, int]:
        return of_this_version(stand_in_calls.nccl(HANDLES.__getitem__, group_start, group_end))

    def error(self, code: int) -> Exception:
        return stand_in_calls.raised()

    def explain(self, error: Exception) -> str | None:
        return str(error) if isinstance(error, NCCLError) else None


def of_this_version(functions: dict[str, int]) -> dict[str, int]:
    """Return the functions that the stand-in has now."""
    return {name: each for name, each in functions.items() if name != "ncclAlltoAll" or MACHINE.has_all_to_all}


def fail() -> None:
    if MACHINE.failures:
        raise MACHINE.failures.pop(0)


Job = Iterator[None]
MESSAGES = "_send", "_recv"
TREE_BYTES = 1 << 10


def _in_a_thread(job: Job) -> Job:
    """Go on with a job when it has been asked for twice: NCCL has a thread for it, and answers before its end."""
    yield
    yield
    yield from job


def _meeting(function: str, arguments: tuple[int, ...]) -> tuple[str, int]:
    """Return the connections that a call needs: their purpose, and the ranks.

    Each algorithm of collectives has connections of its own, made when NCCL chooses it first (`initAlgoChannels` in its
    src/enqueue.cc). Which algorithm it is for which size is made up here.
    """
    if function in MESSAGES:
        return function, arguments[-2]
    if function == "_all_reduce" and arguments[2] * TYPES[arguments[3]].itemsize <= TREE_BYTES:
        return "trees", 0
    return "rings", 0


HANDLES: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


class Configured:
    """A communicator whose collectives take an ncclCollConfig_t."""

    def __init__(self, comm: Communicator, settings: Mapping[str, Any]) -> None:
        self._comm = comm
        self._settings = dict(settings)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._comm, name)
        if name not in ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all"):
            return function

        def call(*arguments: int) -> None:
            MACHINE.calls.append(f"configured {self._settings}")
            function(*arguments)

        return call


class Communicator:
    """ncclComm_t, on an MPI communicator.

    NCCL connects ranks when they need it: in the first collective of each algorithm, and in the first message of each
    two and direction. Until the others are there that blocks the host; or, where the communicator does not block, is in
    progress: a job, which goes on when somebody asks.
    """

    comm: MPI.Intracomm

    def __init__(self, blocks: bool, time_limit: TimeLimit | None = None) -> None:
        self.blocks = blocks
        self.time_limit = time_limit  # None: somebody else asks
        self.state = "in use"
        self.is_finalized = False
        self.job: Job | None = None
        self.met: set[tuple[str, int]] = set()  # the rank, and the purpose
        self.posted: list[Message] = []  # of the group that is being run
        self.uses: list[tuple[str, int, int, bool]] = []  # in that group: call, start, end, whether it writes
        self.streams: set[int] = set()  # that it has been used on
        self.windows: dict[int, tuple[int, int]] = {}  # start and end

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return one of NCCL's calls: `_all_reduce` does it, now or at the end of the group."""
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._call, name, getattr(self, "_" + name))

    def configured(self, settings: Mapping[str, Any]) -> Configured:
        if MACHINE.version < 23100:
            raise DistBackendError("this version of NCCL does not have ncclAllReduceConfig; install a newer one")
        return Configured(self, settings)

    def _use(self) -> None:
        assert self.state == "in use", f"the communicator has been {self.state}"
        assert self.job is None, "the last call is in progress"

    def begin(self, job: Job) -> None:
        """Do a job: to its end, or as far as it goes now."""
        self.job = job if self.blocks else _in_a_thread(job)
        while self.is_in_progress() and self.blocks:
            time.sleep(1e-4)
        if self.time_limit is not None:
            self.time_limit.wait_while(self.is_in_progress)

    def is_in_progress(self) -> bool:
        """Go on with the job; say whether it is still not done."""
        if self.job is not None:
            try:
                next(self.job)
            except StopIteration:
                self.job = None
        return self.job is not None

    def find_together(self, size: int, unique_id: str, rank: int) -> Job:
        """Make the communicator: the ranks meet by files in a folder of the id's name, as NCCL's by sockets."""
        me = Path(unique_id, f"{rank}.tmp")
        me.write_text(str(WORLD.Get_rank()))
        me.rename(Path(unique_id, str(rank)))
        while len(list(Path(unique_id).glob("*[0-9]"))) < size:
            yield
        ranks = [int(Path(unique_id, str(r)).read_text()) for r in range(size)]
        self.comm = WORLD.Create_group(WORLD.Get_group().Incl(ranks), tag=7)
        if rank == 0:
            shutil.rmtree(unique_id)

    def group_start(self) -> None:
        self._use()
        group_start()

    def group_end(self) -> None:
        group_end()

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> None:
        fail()
        self._use()
        MACHINE.calls.append(name)
        self.streams.add(arguments[-1])
        if MACHINE.depth:
            MACHINE.grouped.append((function, arguments))
        else:
            self.begin(self._run([(function, arguments)]))

    def _run(self, calls: list[tuple[Any, ...]]) -> Job:
        """Run the calls of one group: collectives in their order, messages all at once."""
        assert len(calls) <= 2048, "NCCL takes 2048 calls in a group"
        requests = []
        for function, arguments in calls:
            assert function.__self__ is self, "a group has the calls of one communicator"
            meeting = _meeting(function.__name__, arguments)
            if meeting not in self.met:
                self.met.add(meeting)
                requests.append(self._meet(*meeting))
        while not MPI.Request.Testall(requests):
            yield
        if not calls or not MACHINE.captures(calls[0][1][-1], partial(self._launch, calls)):
            self._launch(calls)

    def _launch(self, calls: list[tuple[Any, ...]]) -> None:
        self.uses = []
        for function, arguments in calls:
            function(*arguments)
        with MACHINE.lock:
            MACHINE.messages += self.posted
            self.posted = []
            if IS_NUMPY:  # whose arrays tell nobody that they are read
                for clock in MACHINE.streams.values():
                    MACHINE._receive(clock)

    def _runs(self, stream: int, what: str, read: Any = None, written: Any = None, in_place: int | None = None) -> None:
        """Note the memory that a call uses; NCCL does the calls of one group in any order, and all at once.

        Those of a collective may overlap if the input is the output, or begins `in_place` bytes behind its start.
        """
        MACHINE.runs(stream, what, (read,) if read else (), (written,) if written else ())
        mine = [(what, *each, each is written) for each in (read, written) if each and each[0] < each[1]]
        if len(mine) == 2 and in_place is not None and read[0] == written[0] + in_place:
            mine = [(what, min(read[0], written[0]), max(read[1], written[1]), True)]
        for number, (_, start, end, writes) in enumerate(mine):
            for other, low, high, is_write in (*self.uses, *mine[:number]):
                if start < high and low < end and (writes or is_write):
                    MACHINE.finds(f"{what} and {other} of the same group use the same memory")
        self.uses += mine

    def _meet(self, what: str, peer: int) -> MPI.Request:
        if what not in MESSAGES:
            return self.comm.Ibarrier()
        nothing = np.empty(0, np.uint8)
        return self.comm.Issend(nothing, peer, tag=1) if what == "_send" else self.comm.Irecv(nothing, peer, tag=1)

    def _reduced(self, send: int, count: int, datatype: int, op: int) -> np.ndarray:
        dtype = TYPES[datatype]
        everybody = np.empty((self.comm.Get_size(), count), dtype)
        self.comm.Allgather(bytes_at(send, count, datatype).copy(), everybody.view(np.uint8))
        wide = np.float32 if dtype.itemsize == 2 else dtype
        result = REDUCE[op].reduce(everybody.astype(wide), axis=0)
        return (result / self.comm.Get_size() if op == AVG else result).astype(wide).astype(dtype)

    def _all_reduce(self, send: int, recv: int, count: int, datatype: int, op: int, stream: int) -> None:
        result = self._reduced(send, count, datatype, op)
        self._put(stream, "all_reduce", send, count, recv, result, datatype, 0)

    def _reduce(self, send: int, recv: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        result = self._reduced(send, count, datatype, op)
        if self.comm.Get_rank() == root:
            self._put(stream, "reduce", send, count, recv, result, datatype, 0)
        else:
            self._runs(stream, "reduce", extent_at(send, count, datatype))

    def _reduce_scatter(self, send: int, recv: int, count: int, datatype: int, op: int, stream: int) -> None:
        size, rank = self.comm.Get_size(), self.comm.Get_rank()
        result = self._reduced(send, count * size, datatype, op).reshape(size, count)[rank]
        self._put(stream, "reduce_scatter", send, count * size, recv, result, datatype, -rank * result.nbytes)

    def _broadcast(self, send: int, recv: int, count: int, datatype: int, root: int, stream: int) -> None:
        is_root = self.comm.Get_rank() == root
        data = (
            bytes_at(send, count, datatype).copy() if is_root else np.empty(count * TYPES[datatype].itemsize, np.uint8)
        )
        self.comm.Bcast(data, root)
        if is_root:
            self._put(stream, "broadcast", send, count, recv, data, datatype, 0)
        else:
            self._runs(stream, "broadcast", written=extent_at(recv, count, datatype))
            bytes_at(recv, count, datatype)[:] = data

    def _all_gather(self, send: int, recv: int, count: int, datatype: int, stream: int) -> None:
        result = np.empty(count * self.comm.Get_size(), TYPES[datatype])
        self.comm.Allgather(bytes_at(send, count, datatype).copy(), result.view(np.uint8))
        mine = self.comm.Get_rank() * count * result.itemsize
        self._put(stream, "all_gather", send, count, recv, result, datatype, mine)

    def _all_to_all(self, send: int, recv: int, count: int, datatype: int, stream: int) -> None:
        total = count * self.comm.Get_size()
        result = np.empty(total, TYPES[datatype])
        self.comm.Alltoall(bytes_at(send, total, datatype).copy(), result.view(np.uint8))
        self._put(stream, "all_to_all", send, total, recv, result, datatype)

    def _put(
        self,
        stream: int,
        what: str,
        send: int,
        count: int,
        recv: int,
        result: np.ndarray,
        datatype: int,
        in_place: int | None = None,
    ) -> None:
        written = result.nbytes // TYPES[datatype].itemsize
        self._runs(stream, what, extent_at(send, count, datatype), extent_at(recv, written, datatype), in_place)
        bytes_at(recv, written, datatype)[:] = result.view(np.uint8)

    def _send(self, send: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._runs(stream, "send", extent_at(send, count, datatype))
        data = bytes_at(send, count, datatype).copy()
        request = self.comm.Issend(data, peer)  # as a kernel, which ends when the other rank has it
        self._is_on_its_way(stream, request, lambda: None)

    def _recv(self, recv: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._runs(stream, "recv", written=extent_at(recv, count, datatype))
        data = np.empty(count * TYPES[datatype].itemsize, np.uint8)
        request = self.comm.Irecv(data, peer)

        def deliver() -> None:
            bytes_at(recv, count, datatype)[:] = data

        self._is_on_its_way(stream, request, deliver)

    def _is_on_its_way(self, stream: int, request: MPI.Request, deliver: Callable[[], None]) -> None:
        clock, stream = MACHINE.clock(stream), MACHINE.launched.get(stream, stream)
        self.posted.append(Message(self, stream, clock[stream], request, deliver))

    @property
    def handle(self) -> int:
        HANDLES[id(self)] = self
        return id(self)

    def finish(self, code: int) -> None:
        raise AssertionError(f"the stand-in's functions for C return at the end of a call, and no {code}")

    def register_window(self, memory: int, nbytes: int) -> int:
        made: list[int] = []
        self.begin(self.register(memory, nbytes, made))
        return made[0]

    def register(self, memory: int, nbytes: int, made: list[int]) -> Job:
        """Give memory of NCCL's a window, or none where the machine has no symmetric memory."""
        fail()
        MACHINE.calls.append("register_window")
        assert nbytes <= MACHINE.symmetric[memory].nbytes
        yield from self._everybody()
        made.append(next(MACHINE.numbers) if MACHINE.has_symmetric else 0)
        if made[0]:
            self.windows[made[0]] = memory, memory + nbytes

    def deregister_window(self, window: int) -> None:
        self._use()
        MACHINE.calls.append("deregister_window")
        MACHINE.host_uses("the end of a window", writes=(self.windows.pop(window),))()

    def split(self, color: int, key: int, time_limit: TimeLimit | None) -> Communicator | None:
        made = Communicator(blocks=time_limit is None, time_limit=time_limit)
        self.begin(self.halve(color, key, made))
        return None if color < 0 else made

    def halve(self, color: int, key: int, made: Communicator) -> Job:
        """Make a communicator of the ranks with this color."""
        fail()
        MACHINE.calls.append("split")
        used = self.streams - MACHINE.programs
        in_flight = [each.what for each in MACHINE.accesses if each.stream in used and not MACHINE.host_knows(each)]
        assert not in_flight, f"the communicator is split while in flight: {in_flight}"
        yield from self._everybody()
        made.comm = self.comm.Split(MPI.UNDEFINED if color < 0 else color, key)

    def _everybody(self) -> Job:
        everybody = self.comm.Ibarrier()
        while not everybody.Test():
            yield

    def async_error(self) -> str | None:
        assert self.state == "in use", f"the communicator has been {self.state}"
        return MACHINE.async_error

    def abort(self) -> None:
        assert self.state == "in use", f"the communicator has been {self.state}"
        MACHINE.calls.append("abort")
        self._end("aborted")

    def _end(self, state: str) -> None:
        """End all calls in flight."""
        with MACHINE.lock:
            MACHINE.accesses.clear()
            MACHINE.messages = [each for each in MACHINE.messages if each.comm is not self]
        self.state, self.job = state, None

    def destroy(self) -> None:
        self._use()
        MACHINE.calls.append("destroy")
        self.begin(self.finalize())
        self.free()

    def finalize(self) -> Job:
        """Wait until all calls in flight have ended on every rank."""
        while MACHINE.held or not all(each.request.Test() for each in MACHINE.messages if each.comm is self):
            yield
        yield from self._everybody()
        with MACHINE.lock:
            for message in [each for each in MACHINE.messages if each.comm is self]:
                message.deliver()
                MACHINE.messages.remove(message)

    def free(self) -> None:
        """End it, when nothing is in flight."""
        assert not self.windows, "destroyed with memory that is registered"
        self.state = "destroyed"
        self.comm.Free()
