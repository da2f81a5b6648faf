"""A GPU and an NCCL that need no GPU: the provider behind the seam (hpccomm/cuda/seam.py) of the tests on a CPU.

GPU memory is memory of the host to which the host has no access (device_memory.py), in real ``cupy.ndarray`` objects,
which can be made without a driver. NCCL's messages go over MPI, on communicators of their own. Everything is done at
once, when it is called; so that a missing wait is found all the same, every access to memory is noted with the stream
it is on, and two that are not ordered (by one stream, by an event that the other stream waits for, or by the host
having waited) are a race: `Machine.races` lists them, and the tests fail if there are any. This is the happens-before
relation, with a vector clock for each stream. The host's reads and writes of its own memory can't be seen. So data that
are copied to the host arrive when the host has waited for them, with rubbish there before; data that are copied from
the host must be unchanged, and still there, by then.

Work on a stream that is being captured is noted instead, and done when the graph is launched.
"""

from __future__ import annotations

import ctypes
import glob
import itertools
import os
import tempfile
import threading
import time
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from mpi4py import MPI

from hpccomm.cuda import copies
from hpccomm.cuda.seam import Kernel
from hpccomm.nccl.intra_node import MAX_RANKS

from . import stand_in_calls
from .device_memory import DeviceMemory, HostMemory, NotOfTheGPU
from .gpus import extent
from .kernels import build

WORLD = MPI.COMM_WORLD  # a program may put an hpccomm.mpi4py.Comm in its place
IS_NUMPY = issubclass(cupy.ndarray, np.ndarray)  # NumPy under CuPy's name, for the jobs
HOST = -1  # the number of the host among the streams, in the clocks
DEFAULT_STREAM = 0
OWN = 1  # the GPU of this process, where a test does not say otherwise: not the one on which every thread begins
RUBBISH = 0xA5
MEMORY = HostMemory() if IS_NUMPY else DeviceMemory()
MOST_FREED, MOST_FREED_BYTES = 100, 32 << 20
FEWER = 3, 8  # blocks and threads of a kernel: each of the latter is a thread

TYPES = [*map(np.dtype, ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", ml_dtypes.bfloat16))]
Clock = dict[int, int]


@dataclass
class Access:
    """One use of the memory from `start` to `end`."""

    start: int
    end: int
    stream: int
    time: int
    writes: bool
    what: str


@dataclass
class Message:
    """One end of a message: everything that follows on its stream comes when the message has come."""

    comm: Any  # a Communicator
    stream: int
    time: int
    request: MPI.Request
    deliver: Callable[[], None]


@dataclass
class Copy:
    """A copy to or from the host's memory, for which the host has not waited yet."""

    stream: int
    time: int
    memory: weakref.ref[np.ndarray]  # which has to be kept until then
    start: int
    values: bytes
    arrives: bool

    def is_before(self, clock: Clock) -> bool:
        """Return True if the owner of this clock knows that the copy is done."""
        return clock.get(self.stream, 0) >= self.time

    def end(self) -> str | None:
        """Let the host see the result; return the error, if there is one."""
        if self.memory() is None:
            return "host memory was dropped before the copy to or from it was done"
        memory = MPI.buffer.fromaddress(self.start, len(self.values))
        if self.arrives:
            memory[:] = self.values
        elif bytes(memory) != self.values:
            return "host memory was changed before the copy from it to the GPU was done"
        return None


@dataclass
class Event:
    device: int
    clock: Clock = field(default_factory=dict)
    graph: Graph | None = None  # in whose capture it was recorded last
    has_passed: bool = True  # as far as anybody knows; one that was never recorded has (cudaEventQuery)


class Graph:
    """A capture: the actions, and the order between the streams that are part of it."""

    def __init__(self, machine: Machine, origin: int) -> None:
        self._machine = machine
        self._origin = origin
        self._actions: list[Callable[[], Any]] = []
        self._passed: dict[int, Clock] = {}  # at each event: first while it is captured, then at every launch
        self._clocks: dict[int, Clock] = {}
        self._join(origin, {})

    def _join(self, stream: int, clock: Clock) -> None:
        """Make a stream part of the capture."""
        self._clocks[stream] = dict(clock)
        self._machine.capturing[stream] = self
        self.add(stream)

    def add(self, stream: int, *actions: Callable[[], Any]) -> None:
        """Add work that has been put on a stream."""
        self._clocks[stream][stream] = self._clocks[stream].get(stream, 0) + 1
        self._actions.extend(actions)

    def record(self, number: int, event: Event, stream: int) -> None:
        """Record an event in the graph."""
        event.graph = self
        self._passed[number] = dict(self._clocks[stream])
        self._actions.append(lambda: self._passed.update({number: dict(self._machine.clock(stream))}))

    def wait(self, stream: int, number: int) -> None:
        """Let a stream, which may be new to the capture, wait for an event of it."""
        if stream not in self._clocks:
            self._join(stream, self._passed[number])
        _merge(self._clocks[stream], self._passed[number])
        self._actions.append(lambda: _merge(self._machine.clock(stream), self._passed[number]))

    def end(self) -> None:
        """End the capture."""
        known = self._clocks[self._origin]
        for stream, clock in self._clocks.items():
            del self._machine.capturing[stream]
            if known.get(stream, 0) < clock[stream]:
                raise CUDAError("cudaErrorStreamCaptureUnjoined: the capture was not joined to the original stream")

    def launch(self, stream: int) -> None:
        """Do everything, behind the earlier work on a stream, and before the later work."""
        machine = self._machine
        with machine.lock:
            machine.launched = {each: next(machine.numbers) for each in self._clocks}
            machine.streams |= {number: dict(machine.streams[stream]) for number in machine.launched.values()}
            try:
                for action in self._actions:
                    action()
                _merge(machine.streams[stream], machine.clock(self._origin))
            finally:
                machine.launched = {}


class Freed:
    """The memory that was dropped last, kept so that nothing else is there."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[int, int, np.ndarray]] = deque()
        self._starts: list[int] = []  # sorted, and the ends; no two blocks overlap
        self._ends: list[int] = []
        self._bytes = 0

    def add(self, start: int, end: int, memory: np.ndarray) -> None:
        """Keep a block, and let go of the oldest ones."""
        self._blocks.append((start, end, memory))
        insort(self._starts, start)
        insort(self._ends, end)
        self._bytes += end - start
        while len(self._blocks) > MOST_FREED or self._bytes > MOST_FREED_BYTES:
            start, end, _ = self._blocks.popleft()
            self._starts.remove(start)
            self._ends.remove(end)
            self._bytes -= end - start

    def has_part_of(self, start: int, end: int) -> bool:
        """Say whether one of the blocks overlaps this range."""
        i = bisect_right(self._ends, start)
        return start < end and i < len(self._starts) and self._starts[i] < end


class Machine:
    """The state of the one imitated machine: its streams, its events, its memory."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.devices = 2
        self.identities: dict[int, str] = {}
        self._current_device = threading.local()  # CUDA has one for each thread, at first 0
        self.device = OWN  # as the program wants it, in this thread
        self.contexts: set[int] = set()  # the GPUs that this process has taken memory of
        self.numbers = itertools.count(1)
        self.streams: dict[int, Clock] = {DEFAULT_STREAM: {}}
        self.gpus_of_streams: dict[int, int] = {}
        self.programs: set[int] = set()  # the streams that the program has made
        self.host: Clock = {}
        self.events: dict[int, Event] = {}
        self.current = threading.local()
        self.accesses: list[Access] = []
        self.copies: list[Copy] = []
        self._races: list[str] = []
        # Memory and the stream that may use it again. Memory that hpccomm has allocated is not used again for a while,
        # so that a late use is seen.
        self._dropped: deque[tuple[int, int, int, np.ndarray | None]] = deque()
        self._freed = Freed()
        self.calls: list[str] = []  # the functions of the seam, in the order of their calls
        self.held = False
        self.capturing: dict[int, Graph] = {}  # by stream
        self.loaded: set[tuple[Any, ...]] = set()  # kernels of CuPy's
        self.relaxed = threading.local()  # the threads that may call CUDA while another one captures
        self.launched: dict[int, int] = {}  # while a graph is: for each stream of its capture, the one it is now
        self.version = 23000
        self.has_all_to_all = True
        self.has_symmetric = True
        self.symmetric: dict[int, np.ndarray] = {}  # memory of NCCL's, by its address
        self.failures: list[Exception] = []  # raised by the next calls of NCCL, one by one
        self.cuda_failures: list[Exception] = []  # and by those of CUDA that look for them
        self.async_error: str | None = None
        self.blind = False  # whether this process can't open the memory of others
        self.shared: dict[int, str] = {}  # the files of memory that processes share, by its addresses
        self.depth = 0  # of ncclGroupStart
        self.grouped: list[tuple[Any, ...]] = []
        self.messages: list[Message] = []  # that are on their way

    @property
    def device(self) -> int:
        """This thread's current GPU."""
        return getattr(self._current_device, "number", 0)

    @device.setter
    def device(self, device: int) -> None:
        self._current_device.number = device

    def initialises(self) -> None:
        """Note that a call needs the current GPU: this process has a context there from then on."""
        self.contexts.add(self.device)

    # -- order

    def runs(self, stream: int, what: str, reads: tuple[Any, ...] = (), writes: tuple[Any, ...] = ()) -> None:
        """Note that the stream now uses these (start, end) ranges of memory."""
        self.initialises()
        with self.lock:
            self._settle()
            self._note(stream, what, reads, writes)

    def clock(self, stream: int) -> Clock:
        """Return the clock of a stream."""
        return self.streams[self.launched.get(stream, stream)]

    def captures(self, stream: int, action: Callable[[], Any]) -> bool:
        """Return True if the stream is being captured, and note the action if so."""
        graph = self.capturing.get(stream)
        if graph is not None:
            graph.add(stream, action)
        return graph is not None

    def refuse_capturing(self, stream: int) -> None:
        """Raise if a stream is being captured, which has nothing to wait for, and does nothing now."""
        if stream in self.capturing:
            raise CUDAError("cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing")

    def _note(self, stream: int, what: str, reads: tuple[Any, ...], writes: tuple[Any, ...]) -> None:
        self.refuse_capturing(stream)
        clock = self.clock(stream)
        stream = self.launched.get(stream, stream)
        _merge(clock, self.host)  # the host launches it, with all that it knows
        self._receive(clock)
        clock[stream] = clock.get(stream, 0) + 1
        for ranges, is_write in ((reads, False), (writes, True)):
            for start, end in ranges:
                if start < end:
                    self._access(Access(start, end, stream, clock[stream], is_write, what), clock)
                if self._freed.has_part_of(start, end):
                    self._races.append(f"{what} on stream {stream} uses memory that has been dropped before the call")

    def _settle(self) -> None:
        """Take note of the memory that was dropped: a finaliser may run anywhere, also in the middle of noting."""
        self._end_copies(lambda copy: copy.memory() is None)
        while self._dropped:
            start, end, stream, kept = self._dropped.popleft()
            if stream in self.streams:
                on_their_way, self.messages = self.messages, []  # it need not have been reused yet
                self._note(stream, "the reuse of dropped memory", (), ((start, end),))
                self.messages = on_their_way
            self.accesses = [each for each in self.accesses if not (start <= each.start and each.end <= end)]
            if kept is not None and kept.size:
                self._freed.add(start, end, kept)

    @property
    def races(self) -> list[str]:
        """The races found up to now."""
        with self.lock:
            self._settle()
            return self._races

    def finds(self, race: str) -> None:
        """Note a race, which fails the test; all ranks go on alike."""
        with self.lock:
            self._races.append(race)

    @races.setter
    def races(self, races: list[str]) -> None:
        self._races = races

    def _access(self, access: Access, clock: Clock) -> None:
        start, end = access.start, access.end
        superseded = set()  # nothing can race with an access that is ordered before a write of all its memory
        for earlier in [each for each in self.accesses if each.start < end and start < each.end]:
            ordered = clock.get(earlier.stream, 0) >= earlier.time
            if not ordered and (access.writes or earlier.writes):
                self._races.append(
                    f"{access.what} on stream {access.stream} does not wait for {earlier.what} on stream "
                    f"{earlier.stream}, which uses the same memory"
                )
            if ordered and access.writes and start <= earlier.start and earlier.end <= end:
                superseded.add(id(earlier))
        if superseded:
            self.accesses = [each for each in self.accesses if id(each) not in superseded]
        self.accesses.append(access)

    def _receive(self, clock: Clock) -> None:
        """Wait for the messages that come before this clock."""
        for message in [each for each in self.messages if clock.get(each.stream, 0) >= each.time]:
            message.request.Wait()
            message.deliver()
            self.messages.remove(message)

    def has_received(self, clock: Clock) -> bool:
        """Say whether `host_waits` would not have to wait for a message."""
        with self.lock:
            return all(each.request.Test() for each in self.messages if clock.get(each.stream, 0) >= each.time)

    def host_waits(self, clock: Clock) -> None:
        """Let the host know all that has passed by this clock."""
        with self.lock:
            self._settle()
            self._receive(clock)
            _merge(self.host, clock)
            self._end_copies(lambda copy: copy.is_before(self.host))
            self.accesses = [each for each in self.accesses if not self.host_knows(each)]

    def host_knows(self, access: Access) -> bool:
        """Say whether the host has waited for an access."""
        return self.host.get(access.stream, 0) >= access.time

    # -- the host

    def copy_to_host(self, host: np.ndarray, source: int, stream: int) -> None:
        """Copy from the GPU: before the host has waited, its memory holds rubbish."""
        self.runs(stream, "a copy to the host", ((source, source + host.nbytes),), (host_extent(host),))
        self._begin_copy(host, bytes(on_gpu(source, host.nbytes)), stream, arrives=True)
        host.reshape(-1).view(np.uint8)[...] = RUBBISH

    def copy_from_host(self, target: int, host: np.ndarray, stream: int) -> None:
        """Copy to the GPU: the host must not change its memory before it has waited."""
        self.runs(stream, "a copy to the GPU", (host_extent(host),), ((target, target + host.nbytes),))
        self._begin_copy(host, b"", stream, arrives=False)
        on_gpu(target, host.nbytes)[:] = self.copies[-1].values

    def _begin_copy(self, host: np.ndarray, values: bytes, stream: int, arrives: bool) -> None:
        start, end = host_extent(host)
        with self.lock:
            clock = self.clock(stream)
            stream = self.launched.get(stream, stream)
            # The GPU has done all earlier work by now, and the host may not have waited for it.
            self._end_copies(
                lambda copy: copy.start < end and start < copy.start + len(copy.values) and copy.is_before(clock)
            )
            values = values if arrives else bytes(MPI.buffer.fromaddress(start, end - start))
            self.copies.append(Copy(stream, clock[stream], weakref.ref(_root(host)), start, values, arrives))

    def _end_copies(self, which: Callable[[Copy], bool]) -> None:
        if not self.copies:
            return
        ended = [copy for copy in self.copies if which(copy)]
        self.copies = [copy for copy in self.copies if not any(copy is each for each in ended)]
        self._races += filter(None, [copy.end() for copy in ended])

    def host_uses(self, what: str, reads: tuple[Any, ...] = (), writes: tuple[Any, ...] = ()) -> Callable[[], None]:
        """Note that the host now uses these ranges of the GPU's memory, until it calls the returned function."""
        with self.lock:
            self._settle()
            number = next(self.numbers)  # later work on a stream does not know of the end before the host does
            own = {number: 1}
            for ranges, is_write in ((reads, False), (writes, True)):
                for start, end in ranges:
                    if start < end:
                        self._access(Access(start, end, number, 1, is_write, what), self.host)

        def ends() -> None:
            with self.lock:
                self.host_waits(own)
                del self.host[number]  # nobody asks any more

        return ends

    # -- memory

    def array(self, values: np.ndarray, device: int, stream: int) -> Any:
        """Return a cupy.ndarray with the values, and the layout, of a NumPy array."""
        low, high = np.lib.array_utils.byte_bounds(_root(values))
        memory = MEMORY.allocate(high - low)
        memory[:] = np.frombuffer(MPI.buffer.fromaddress(low, high - low), np.uint8)
        self._watch(memory, stream)
        return self._array_in(memory, values, values.ctypes.data - low, device)

    def _array_in(self, memory: np.ndarray, like: np.ndarray, offset: int, device: int) -> Any:
        """Return a cupy.ndarray `like` a NumPy array, `offset` bytes behind the beginning of the memory."""
        block = cupy.cuda.UnownedMemory(MEMORY.address_of(memory), max(memory.nbytes, 1), memory, device_id=device)
        return cupy.ndarray(like.shape, like.dtype, cupy.cuda.MemoryPointer(block, offset), strides=like.strides)

    def allocated(self, shape: tuple[int, ...], dtype: Any, device: int, stream: int) -> Any:
        """Return an array whose memory, once dropped, may be used again by later work on `stream`."""
        self.refuse_capturing(stream)  # the next launch would find it in use
        _end_captures("memory is allocated")
        like = np.empty(shape, dtype)
        kept = MEMORY.allocate(like.nbytes)
        kept[:] = RUBBISH
        memory = np.frombuffer(memoryview(kept), np.uint8)
        self._watch(memory, stream, kept)
        start = MEMORY.address_of(kept)
        self.runs(stream, "what had the memory before", writes=((start, start + kept.nbytes),))
        return self._array_in(memory, like, 0, device)

    def _watch(self, memory: np.ndarray, stream: int, kept: np.ndarray | None = None) -> None:
        """Note when memory is dropped: from then on later work on `stream` may use it."""
        low = MEMORY.address_of(memory)
        weakref.finalize(memory, self._dropped.append, (low, low + memory.nbytes, stream, kept))


def _root(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _merge(clock: Clock, other: Clock) -> None:
    for stream, passed in other.items():
        if clock.get(stream, 0) < passed:
            clock[stream] = passed


MACHINE = Machine()


def as_numpy(array: Any) -> np.ndarray:
    """Return the values behind a cupy.ndarray, without any regard for streams."""
    low, high = extent(array)
    return np.ndarray(
        array.shape, array.dtype, on_gpu(low, high - low), array.data.ptr - low if array.size else 0, array.strides
    )


class CUDAError(Exception):
    """An error of the imitated CUDA."""


def on_gpu(address: int, nbytes: int) -> MPI.buffer:
    """Return memory of the GPU, as the stand-in may use it."""
    try:
        return MPI.buffer.fromaddress(MEMORY.on_host(address, nbytes) if nbytes else 0, nbytes)
    except NotOfTheGPU as error:
        raise CUDAError(str(error)) from error


def _check_default_stream(stream: int, device: int) -> None:
    """Raise if the default stream of one GPU is meant, and that of another one, the current one, would be taken."""
    if stream == DEFAULT_STREAM and device != MACHINE.device:
        raise CUDAError("cudaErrorInvalidResourceHandle: the default stream of another GPU")


def _fail_cuda() -> None:
    if MACHINE.cuda_failures:
        raise MACHINE.cuda_failures.pop(0)


def on_stream(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function, whose last argument is a stream, go into the graph while that is being captured."""

    @wraps(function)
    def called(*arguments: Any) -> None:
        if not MACHINE.captures(arguments[-1], partial(function, *arguments)):
            function(*arguments)

    return called


MISALIGNED = "cudaErrorMisalignedAddress"  # after which a real GPU answers every call so


def _load(operation: str, numbers: object, *arrays: Any) -> None:
    """Load a kernel of CuPy's, which reads and writes numbers where they may be.

    There is one for each operation, dtype, number of dimensions, and whether each array is contiguous (`CArray` in its
    _core/_kernel.pyx).
    """
    for each in arrays:
        steps = [stride for length, stride in zip(each.shape, each.strides) if length > 1]
        if any(at % each.itemsize for at in (each.data.ptr, *steps)):
            raise CUDAError(f"{MISALIGNED}: {operation} on {each.dtype} at {each.data.ptr:#x}, strides {each.strides}")
    layouts = tuple(bool(each.flags.c_contiguous) for each in arrays)
    strided = [each for each in arrays if not each.flags.c_contiguous]
    Runtime().load(operation, numbers, _dimensions_of(strided), layouts)


def _dimensions_of(strided: list[Any]) -> int:
    """Return how many dimensions are left of arrays of one shape when CuPy has joined those that it can join in all."""
    lengths = strided[0].shape if strided else ()
    axes = [axis for axis, length in enumerate(lengths) if length != 1]
    apart = [
        any(each.strides[outer] != lengths[axis] * each.strides[axis] for each in strided)
        for outer, axis in itertools.pairwise(axes)
    ]
    return 1 + sum(apart)


def _end_captures(what: str) -> None:
    """Note a call that ends the captures under way, PyTorch's for example, unless the thread may make it.

    CUDA's documentation of cudaThreadExchangeStreamCaptureMode, "potentially unsafe API calls".
    """
    if MACHINE.capturing and not hasattr(MACHINE.relaxed, "is_set"):
        MACHINE.finds(f"{what} while a thread captures, in its mode 'global': the capture is invalid")


def _refuse_captured(event: int) -> None:
    if MACHINE.events[event].graph is not None:
        raise CUDAError("cudaErrorCapturedEvent: operation not permitted on an event last recorded in a capture")


class Runtime:
    """The CUDA half of the provider."""

    def device_count(self) -> int:
        return MACHINE.devices

    def current_device(self) -> int:
        return MACHINE.device

    def use_device(self, device: int) -> None:
        if not 0 <= device < MACHINE.devices:
            raise CUDAError("cudaErrorInvalidDevice: invalid device ordinal")
        MACHINE.device = device
        MACHINE.initialises()  # since CUDA 12

    def identity(self, device: int) -> str:
        if not 0 <= device < MACHINE.devices:
            raise CUDAError("cudaErrorInvalidDevice: invalid device ordinal")
        return MACHINE.identities.get(device, f"GPU {device} of rank {WORLD.Get_rank()}")

    def create_stream(self, device: int) -> int:
        number = next(MACHINE.numbers)
        MACHINE.streams[number] = {}
        MACHINE.gpus_of_streams[number] = device
        return number

    def destroy_stream(self, stream: int) -> None:
        if MACHINE.gpus_of_streams.pop(stream) != MACHINE.device:  # CuPy's free_all_blocks: of the current GPU only
            MACHINE.finds("a stream is destroyed while another GPU is the current one: its memory is not freed")
        del MACHINE.streams[stream]

    def current_stream(self, device: int) -> int:
        return getattr(MACHINE.current, "stream", DEFAULT_STREAM)

    def is_capturing(self, stream: int) -> bool:
        return stream in MACHINE.capturing

    def synchronize_stream(self, stream: int) -> None:
        MACHINE.calls.append("synchronize_stream")
        MACHINE.initialises()
        MACHINE.refuse_capturing(stream)
        _end_captures("the host waits for a stream")
        while MACHINE.held:
            time.sleep(1e-3)
        MACHINE.host_waits(MACHINE.streams[stream])

    def create_event(self, device: int) -> int:
        number = next(MACHINE.numbers)
        MACHINE.events[number] = Event(device)
        return number

    def destroy_event(self, event: int) -> None:
        del MACHINE.events[event]

    def record(self, event: int, stream: int) -> None:
        _check_default_stream(stream, MACHINE.events[event].device)
        MACHINE.initialises()
        with MACHINE.lock:
            recorded, graph = MACHINE.events[event], MACHINE.capturing.get(stream)
            if graph is not None:
                return graph.record(event, recorded, stream)
            _merge(MACHINE.streams[stream], MACHINE.host)
            recorded.clock, recorded.graph, recorded.has_passed = dict(MACHINE.streams[stream]), None, False

    def wait(self, stream: int, event: int) -> None:
        MACHINE.initialises()
        with MACHINE.lock:
            MACHINE.calls.append("wait")
            recorded, graph = MACHINE.events[event], MACHINE.capturing.get(stream)
            if recorded.graph is not None and recorded.graph in MACHINE.capturing.values():
                if graph not in (None, recorded.graph):
                    raise CUDAError("cudaErrorStreamCaptureMerge: the event belongs to another capture")
                return recorded.graph.wait(stream, event)
            _refuse_captured(event)
            if graph is not None:
                raise CUDAError("cudaErrorStreamCaptureIsolation: dependency created on uncaptured work")
            _merge(MACHINE.streams[stream], recorded.clock)

    def addresses_for_c(self) -> tuple[int, int]:
        return 0, 0

    functions_for_c = stand_in_calls.cuda

    def copy_kernels(self, device: int) -> list[int]:
        return [n * unit for n in (1, stand_in_calls.MANY) for unit in copies.UNITS]

    def error(self, code: int) -> Exception:
        return stand_in_calls.raised()

    def relax_captures(self) -> None:
        MACHINE.relaxed.is_set = True

    def is_done(self, event: int) -> bool:
        MACHINE.initialises()
        _refuse_captured(event)
        _end_captures("an event is asked for")
        _fail_cuda()
        asked = MACHINE.events[event]
        if not asked.has_passed:
            if MACHINE.held or not MACHINE.has_received(asked.clock):
                return False
            MACHINE.host_waits(asked.clock)
            asked.has_passed = True
        return True

    def synchronize_event(self, event: int) -> None:
        MACHINE.calls.append("synchronize_event")
        MACHINE.initialises()
        _refuse_captured(event)
        _end_captures("the host waits for an event")
        _fail_cuda()
        while MACHINE.held:
            time.sleep(1e-3)
        MACHINE.host_waits(MACHINE.events[event].clock)

    def as_array(self, array: Any) -> Any:
        if isinstance(array, cupy.ndarray):
            return array
        raise TypeError("not an array of the stand-in")

    def empty(self, shape: tuple[int, ...], dtype: Any, device: int, stream: int) -> Any:
        return MACHINE.allocated(shape, dtype, device, stream)

    def view(self, memory: int, nbytes: int, shape: tuple[int, ...], dtype: Any, device: int, owner: Any) -> Any:
        unowned = cupy.cuda.UnownedMemory(memory, nbytes, owner, device_id=device)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(unowned, 0))

    @on_stream
    def copy(self, target: Any, source: Any, stream: int) -> None:
        assert target.dtype == source.dtype
        assert target.size == source.size
        _check_default_stream(stream, target.data.device_id)
        if target.flags.c_contiguous and source.flags.c_contiguous:
            self._copy(target, source, stream)
        else:
            self._copy_by_kernel(target, source, stream)

    def copies(self, pairs: Iterable[tuple[Any, Any]]) -> list[Callable[[int], None]]:
        return [partial(self._copy_by_kernel, *pair) for pair in pairs if pair[0].size]

    @on_stream
    def _copy_by_kernel(self, target: Any, source: Any, stream: int) -> None:
        if target.shape == source.shape:
            self.load("copies", copies.in_units(target, source)[0])
        self._copy(target, source, stream)

    @on_stream
    def _copy(self, target: Any, source: Any, stream: int) -> None:
        MACHINE.runs(stream, "a copy", (extent(source),), (extent(target),))
        if np.shares_memory(as_numpy(target), as_numpy(source)):
            MACHINE.finds("a copy reads memory that it writes")
        as_numpy(target)[...] = as_numpy(source).reshape(target.shape)

    def load(self, *kernel: Any) -> None:
        """Load a kernel, for which CUDA may wait until the GPU has nothing to do."""
        if kernel not in MACHINE.loaded and MACHINE.messages:
            MACHINE.finds(f"the kernel {kernel} is loaded behind a message that has not come")
        MACHINE.loaded.add(kernel)

    def load_copies(self, device: int, stream: int) -> None:
        MACHINE.loaded |= set(itertools.product(["copies"], copies.UNITS))

    def load_additions(self, dtype: Any, dimensions: int, device: int, stream: int) -> None:
        layouts = (False, True), (True, True)
        additions = set(itertools.product(["an addition"], [np.dtype(dtype)], range(1, dimensions + 1), layouts))
        if not additions <= MACHINE.loaded and MACHINE.messages:
            MACHINE.finds("the kernels of additions are loaded behind a message that has not come")
        MACHINE.loaded |= additions

    @on_stream
    def add(self, target: Any, source: Any, stream: int) -> None:
        _load("an addition", target.dtype, target, source)
        MACHINE.runs(stream, "an addition", (extent(source), extent(target)), (extent(target),))
        np.add(as_numpy(target), as_numpy(source), out=as_numpy(target))

    @on_stream
    def multiply(self, target: Any, source: Any, factor: Any, stream: int) -> None:
        _load("a multiplication", target.dtype, target, source)
        MACHINE.runs(stream, "a multiplication", (extent(source),), (extent(target),))
        np.multiply(as_numpy(source), target.dtype.type(factor), out=as_numpy(target))

    def sum_entries(self, matrix: Any, rows: Any, columns: Any, values: Any, device: int, stream: int) -> None:
        MACHINE.runs(stream, "a sum of entries", tuple(map(extent, (rows, columns, values))))
        matrix.assign(*map(as_numpy, (rows, columns, values)))
        self.synchronize_stream(stream)

    def pinned(self, nbytes: int) -> Any:
        _end_captures("page-locked memory is allocated")
        return np.full(nbytes, 0x5A, np.uint8)

    @on_stream
    def to_host(self, host: Any, array: Any, stream: int) -> None:
        MACHINE.calls.append("to_host")
        assert host.nbytes == array.nbytes
        MACHINE.copy_to_host(host, array.data.ptr, stream)

    @on_stream
    def to_device(self, array: Any, host: Any, stream: int) -> None:
        MACHINE.calls.append("to_device")
        assert host.nbytes == array.nbytes
        MACHINE.copy_from_host(array.data.ptr, host, stream)

    # IPC: memory that processes share is a file, and a handle is its name

    def allocate(self, nbytes: int, device: int) -> int:
        handle, name = tempfile.mkstemp(prefix="hpccomm-ipc-", dir="/dev/shm")
        os.truncate(handle, nbytes)
        os.close(handle)
        return self._mapped(name)

    def _mapped(self, name: str) -> int:
        with open(name, "r+b") as file:
            address = MEMORY.map(file.fileno(), os.path.getsize(name))
        MACHINE.shared[address] = name
        return address

    def _unmapped(self, memory: int) -> str:
        del MEMORY.mapped[memory]
        return MACHINE.shared.pop(memory)

    def free(self, memory: int) -> None:
        name = self._unmapped(memory)
        others = glob.glob(f"{name}.*")
        assert not others or "abort" in MACHINE.calls, "the memory is freed while another process has it open"
        os.unlink(name)

    def ipc_handle(self, memory: int) -> bytes:
        name = MACHINE.shared[memory]
        MACHINE.host_uses("the sharing of memory", writes=((memory, memory + os.path.getsize(name)),))()
        return name.encode()

    def open_ipc(self, handle: bytes, device: int) -> int:
        if MACHINE.blind:
            raise CUDAError("cudaErrorPeerAccessUnsupported")
        Path(f"{handle.decode()}.{os.getpid()}").touch()
        return self._mapped(handle.decode())

    def close_ipc(self, memory: int) -> None:
        time.sleep(0.02 * WORLD.Get_rank())  # rank 0 does not wait for the others by chance
        name = self._unmapped(memory)
        os.unlink(f"{name}.{os.getpid()}")

    @on_stream
    def clear(self, memory: int, nbytes: int, stream: int) -> None:
        if MACHINE.gpus_of_streams.get(stream, MACHINE.device) != MACHINE.device:
            raise CUDAError("cudaErrorInvalidResourceHandle: a stream of another GPU")
        MACHINE.runs(stream, "clearing", writes=((memory, memory + nbytes),))
        bytes_at(memory, nbytes, 1)[:] = 0

    @on_stream
    def copy_bytes(self, target: int, source: int, nbytes: int, stream: int) -> None:
        MACHINE.calls.append("copy_bytes")
        MACHINE.runs(stream, "a copy", ((source, source + nbytes),), ((target, target + nbytes),))
        if source < target + nbytes and target < source + nbytes:
            MACHINE.finds("a copy reads memory that it writes")
        bytes_at(target, nbytes, 1)[:] = bytes_at(source, nbytes, 1)

    def compile_intra_node(self, ranks: int, rank: int, device: int) -> None:
        _fail_cuda()

    @on_stream
    def intra_node_kernel(
        self, kernel: Kernel, shape: tuple[int, int], out: int, memory: Any, vectors: int, stream: int
    ) -> None:
        MACHINE.calls.append(kernel.name)
        given = int(memory.view(np.uint64)[kernel.rank])
        if out % 16 or given % 16:
            raise CUDAError(f"{MISALIGNED}: {kernel.name} at {out:#x} and {given:#x}")
        if not memory.view(np.uint64)[MAX_RANKS + kernel.rank]:
            # the kernels do not meet: the others may read this rank's memory since the last barrier of MPI
            MACHINE.host_uses("the others' reading", ((given, given + 16 * vectors),))()
        MACHINE.runs(stream, kernel.name, ((given, given + 16 * vectors),), ((out, out + 16 * vectors),))
        found = np.array([each and MEMORY.on_host(int(each), 1) for each in memory.view(np.uint64)], np.uint64)
        build.library(kernel.ranks, kernel.rank).intra_node(
            kernel.name.encode(),
            kernel.dtype.encode(),
            ctypes.c_void_p(MEMORY.on_host(out, 16 * vectors)),
            ctypes.c_void_p(found.ctypes.data),
            ctypes.c_ulonglong(vectors),
            *FEWER,
        )

    def explain(self, error: Exception) -> str | None:
        return str(error) if isinstance(error, CUDAError) else None


def host_extent(host: Any) -> tuple[int, int]:
    return host.ctypes.data, host.ctypes.data + host.nbytes


def bytes_at(address: int, count: int, datatype: int) -> np.ndarray:
    return np.frombuffer(on_gpu(address, count * TYPES[datatype].itemsize), np.uint8)


def extent_at(address: int, count: int, datatype: int) -> tuple[int, int]:
    if address % TYPES[datatype].itemsize:
        raise CUDAError(f"{MISALIGNED}: NCCL on {TYPES[datatype]} at {address:#x}")
    return address, address + count * TYPES[datatype].itemsize
