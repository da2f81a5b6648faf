"""The class Benchmark, and the decorator that adds one.

A benchmark makes the arrays of one call of an operation, and NumPy's result. A contender's method with the benchmark's
name makes the call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from ..core import arithmetic
from ..core.operation_list import OPERATIONS
from ..cuda.packing import from_the_host, on_the_host

PERIOD = 251  # of the test values; a prime, so the check notices parts in a wrong place
WINDOW = 64  # messages in flight at once, as in the OSU benchmarks
WINDOW_BYTES = 64 << 20  # for all messages of a window together


@dataclass(frozen=True)
class Case:
    """One point of a benchmark on one rank."""

    rank: int
    ranks: int
    count: int  # elements of the array whose size the table shows
    dtype: np.dtype[Any]
    op: str = "sum"
    root: int = 0
    allocate: Callable[..., Any] = np.empty  # takes a shape and a dtype

    @property
    def part(self) -> int:
        """The elements of each rank if `count` is shared among the ranks."""
        return self.count // self.ranks

    @property
    def nbytes(self) -> int:
        """The size in the table."""
        return self.count * self.dtype.itemsize

    @property
    def window(self) -> int:
        """The number of messages of this size in flight at once, in benchmarks with many messages."""
        return max(1, min(WINDOW, WINDOW_BYTES // max(1, self.nbytes)))

    @property
    def peer(self) -> int | None:
        """This rank's partner in the other half of the ranks, as in osu_mbw_mr; None for a rank left over."""
        half = self.ranks // 2
        return None if self.rank >= 2 * half else self.rank + half if self.rank < half else self.rank - half

    @property
    def right(self) -> int:
        """The next rank on a ring."""
        return (self.rank + 1) % self.ranks

    @property
    def left(self) -> int:
        """The previous rank on a ring."""
        return (self.rank - 1) % self.ranks

    def array(self, *shape: int) -> Any:
        """Return an array of zeros, so its memory has been touched."""
        made = self.allocate(shape, self.dtype)
        assign(made, None)
        return made

    def values(self, rank: int, count: int) -> Any:
        """Return the values of `rank`: 1, 2 or 3, so sums are exact in every dtype."""
        period = np.random.default_rng(rank).integers(1, 4, PERIOD).astype(self.dtype)
        return np.resize(period, count)

    def mine(self, values: Any) -> Any:
        """Return this rank's part of `values`."""
        return values[self.rank * self.part : (self.rank + 1) * self.part]

    def reduced(self, count: int, ranks: Iterable[int] | None = None) -> Any:
        """Return NumPy's reduction of the values of `ranks` (default: all); half precisions are reduced in float64."""
        wide = np.float64 if self.dtype.itemsize == 2 and self.dtype.kind in "fV" else self.dtype
        every = range(self.ranks) if ranks is None else ranks
        total = reduce(UFUNCS[self.op], (self.values(rank, count).astype(wide) for rank in every))
        return (total / self.ranks if self.op == "avg" else total).astype(self.dtype)


UFUNCS = {name.lower(): ufunc for name, ufunc in arithmetic.UFUNCS.items() if name != "PREMUL_SUM"}


@dataclass
class Arrays:
    """The arrays of one call on this rank, the same for all contenders.

    `given` and `expected` are functions, so they compute nothing unless results are checked.
    """

    receive: Any  # an array or a list of arrays; the operation writes it, and reads it if there is no `send`
    send: Any = None
    given: Callable[[], Any] | None = None  # returns the flat values of `send` (or `receive`) before the call
    expected: Callable[[], Any] | None = None  # returns NumPy's `receive` after it; None: nothing is received

    def fill(self) -> None:
        """Write the given values to the inputs, and zeros to the outputs."""
        if self.receive is not None:
            assign(self.receive, None)
        if self.given is not None:
            assign(self.receive if self.send is None else self.send, self.given())

    def clear(self) -> None:
        """Set all arrays to zero, so that many repetitions of an operation do not overflow."""
        for each in (self.send, self.receive):
            if each is not None:
                assign(each, None)

    def wrong(self) -> int:
        """Return the number of received elements that differ from NumPy's."""
        if self.expected is None:
            return 0
        received = flat(self.receive)
        expected = np.asarray(self.expected()).reshape(-1)
        if received.dtype.kind in "fcV":
            # The library chooses the order of a floating-point reduction, so roundings may differ.
            tolerance = 1e-2 if received.dtype.itemsize == 2 else 1e-5
            wide = np.complex128 if received.dtype.kind == "c" else np.float64
            same = np.isclose(received.astype(wide), expected.astype(wide), rtol=tolerance, atol=0, equal_nan=True)
        else:
            same = received == expected
        return int(received.size - np.count_nonzero(same))


def flat(arrays: Any) -> Any:
    """Return the elements of an array or of a list of arrays as one flat array on the host."""
    if isinstance(arrays, list):
        return np.concatenate([flat(each) for each in arrays])
    return (arrays if isinstance(arrays, np.ndarray) else on_the_host(arrays)).reshape(-1)


def assign(arrays: Any, values: Any) -> None:
    """Write flat `values` (None: zeros) to an array, or to the arrays of a list in order."""
    start = 0
    for each in arrays if isinstance(arrays, list) else [arrays]:
        part = 0 if values is None else values[start : start + each.size].reshape(each.shape)
        if isinstance(each, np.ndarray):
            each[...] = part
        else:
            from_the_host(each, np.full(each.shape, part, each.dtype))
        start += each.size


@dataclass(frozen=True)
class Benchmark:
    """A row of the registry; :func:`benchmark` adds one."""

    name: str  # on the command line; also the name of the contenders' methods
    summary: str  # the first line of the decorated function's docstring
    arrays: Callable[[Case], Arrays]  # the decorated function
    # The factor from size / time to bus bandwidth, by the number of ranks: nccl-tests, doc/PERFORMANCE.md.
    busbw: Callable[[int], float] = lambda n: 1.0
    kind: str = "collective"  # or "coalesced", or "message"; a word on the command line selects a kind
    shared: bool = False  # True: each rank has a part of the array, and its count is a multiple of the ranks
    sized: bool = True  # True: it has an array
    reduces: bool = False  # True: it uses `op`
    least_ranks: int = 1  # it is skipped on fewer ranks
    transfers: Callable[[Case], int] = lambda case: 1  # the number of transfers in a call; times are per transfer
    rate: bool = False  # True: the table shows messages per second
    mpi: str = ""  # mpi4py's method, if one call of it is enough; otherwise RawMPI4py may have a method for it

    def cases(self, template: Case, sizes: Iterable[int]) -> list[Case]:
        """Return one case for each of `sizes`; sizes that become equal by rounding give one case.

        A case has at least one element, or one per rank if the ranks share the array.
        """
        step = template.ranks if self.shared else 1
        counts = (max(1, size // template.dtype.itemsize // step) * step if self.sized else 0 for size in sizes)
        return [replace(template, count=count) for count in dict.fromkeys(counts)]


BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(name: str, **fields: Any) -> Callable[[Callable[[Case], Arrays]], Callable[[Case], Arrays]]:
    """Return a decorator that adds a benchmark; the function makes a case's arrays, `fields` are Benchmark's."""
    if name in OPERATIONS:
        fields.setdefault("reduces", OPERATIONS[name].reduces)

    def add(function: Callable[[Case], Arrays]) -> Callable[[Case], Arrays]:
        if name in BENCHMARKS:
            raise ValueError(f"benchmark: {name!r} exists already")
        summary = (function.__doc__ or "").strip().split("\n")[0]
        BENCHMARKS[name] = Benchmark(name, summary, function, **fields)
        return function

    return add


def load() -> dict[str, Benchmark]:
    """Return the registry, with hpccomm's own benchmarks."""
    importlib.import_module(".operations", __package__)
    return BENCHMARKS
