"""What key-value stores cost: the time of one operation, and what many clients get through; beside torch's TCPStore.

It needs no MPI. Each master has a process of its own, and so has each of the many clients, except those of a HashStore,
which are threads. The contenders take turns, as everywhere.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

import hpccomm as hc

from ..measure import Plan, timed
from ..report import aligned, heads, microseconds, ratio

SIZES = (64, 4 << 10, 1 << 20, 64 << 20)  # bytes of a value
HOST = "127.0.0.1"
KEY = b"a key, as the stores of groups have one"
TORCH_LARGEST = 8 << 20  # what the server of torch 2 takes
ROUNDS = 3  # of each throughput


@dataclass(frozen=True)
class Row:
    """One result; `median_us` of an operation of one client, or `per_second` of all clients together."""

    operation: str
    size_bytes: int
    contender: str
    median_us: float | None = None
    p99_us: float | None = None
    clients: int = 1
    per_second: float | None = None


# -- the contenders ------------------------------------------------------------------------------------------------


def torch_store(port: int, is_master: bool = False) -> Any:
    """Return a TCPStore of torch's."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

    return TCPStore(HOST, port, is_master=is_master, wait_for_workers=False)


def tcp_store(port: int, is_master: bool = False) -> hc.TCPStore:
    """Return one of hpccomm's."""
    return hc.TCPStore(HOST, port, is_master=is_master, auth_key=KEY)


MASTERS: dict[str, Callable[..., Any]] = {"TCPStore": tcp_store, "torch": torch_store}
CONTENDERS = ("TCPStore", "FileStore", "HashStore", "torch")
Where = dict[str, Any]  # by contender: a port, or the path of a file


def opened(contender: str, where: Where) -> Any:
    """Return a client."""
    if contender in MASTERS:
        return MASTERS[contender](where[contender])
    return hc.FileStore(where[contender]) if contender == "FileStore" else hc.HashStore()


def takes(contender: str, size: int) -> bool:
    """Say whether a value of this size can be stored."""
    return contender != "torch" or size <= TORCH_LARGEST


def serve(contender: str, pipe: Any) -> None:
    """Hold a store until the other end of the pipe is closed: what the process of a master does."""
    store = MASTERS[contender](0, is_master=True)
    pipe.send(store.port)
    _last(pipe)


def work(pipe: Any) -> None:
    """Set and get as long as told: what the process of a client does."""
    while (told := _last(pipe)) is not None:
        contender, where, me, size, seconds = told
        store = opened(contender, where)
        pipe.send(None)
        _last(pipe)  # all are there
        pipe.send(pairs(store, me, size, seconds))


def pairs(store: Any, me: int, size: int, seconds: float) -> float:
    """Set and get a key of this client, again and again; return the operations per second."""
    key, value = f"client {me}", bytes(size)
    done, begin = 0, time.perf_counter()
    while not done or time.perf_counter() - begin < seconds:
        store.set(key, value)
        store.get(key)
        done += 2
    return done / (time.perf_counter() - begin)


def _last(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


# -- measuring -------------------------------------------------------------------------------------------------------


@contextmanager
def processes(number: int, target: Callable[..., None], *arguments: Any) -> Iterator[list[Any]]:
    """Start processes, which end with the block; the pipes to them."""
    context = multiprocessing.get_context("spawn")
    pipes, started = [], []
    try:
        for _ in range(number):
            here, there = context.Pipe()
            process = context.Process(target=target, args=(*arguments, there), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            started.append(process)
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in started:
            process.join()


def run(sizes: Sequence[int], clients: int, plan: Plan) -> list[Row]:
    """Measure everything."""
    names = [name for name in CONTENDERS if name != "torch" or importlib.util.find_spec("torch") is not None]
    rows = []
    with ExitStack() as stack:
        where: Where = {}
        for name in filter(MASTERS.__contains__, names):
            where[name] = stack.enter_context(processes(1, serve, name))[0].recv()
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for size in sizes:
            where["FileStore"] = os.path.join(folder, str(size))
            rows += latencies([name for name in names if takes(name, size)], where, size, plan)
            os.unlink(where["FileStore"])
        workers = stack.enter_context(processes(clients, work))
        for size in sizes:
            rows += throughputs([name for name in names if takes(name, size)], where, size, workers, plan.budget)
    return rows


def latencies(names: Sequence[str], where: Where, size: int, plan: Plan) -> list[Row]:
    """Time the operations of one client."""
    stores = {name: opened(name, where) for name in names}
    value = bytes(size)
    rows = []
    for operation, call in {
        "set": lambda store: store.set("key", value),
        "get": lambda store: store.get("key"),
        "wait": lambda store: store.wait(["key"]),
        "add": lambda store: store.add("number", 1),
    }.items():
        if operation in ("wait", "add") and size > SIZES[0]:
            continue  # no value is sent
        calls = {name: partial(call, store) for name, store in stores.items()}
        for name, samples in in_turns(calls, plan).items():
            median, p99 = np.percentile(samples, [50, 99]) * 1e6
            rows.append(Row(operation, size if operation in ("set", "get") else 0, name, float(median), float(p99)))
    for store in stores.values():
        store.delete_key("key") if not isinstance(store, hc.FileStore) else store.close()
    return rows


def in_turns(calls: Mapping[str, Callable[[], Any]], plan: Plan) -> dict[str, list[float]]:
    """Time each call again and again, in turns in a random order; seconds."""
    for call in calls.values():
        timed(call, 1 + plan.warmup // 5)
    iterations = plan.iterations_of(sum(timed(call, 1) for call in calls.values()))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    shuffled = np.random.default_rng(0)
    for _ in range(iterations):
        for name in shuffled.permutation(list(calls)):
            samples[name].append(timed(calls[name], 1))
    return samples


def throughputs(names: Sequence[str], where: Where, size: int, workers: Sequence[Any], seconds: float) -> list[Row]:
    """Let all clients set and get at once, each its own key."""
    rates: dict[str, list[float]] = {name: [] for name in names}
    shuffled = np.random.default_rng(0)
    for _ in range(ROUNDS):
        for name in shuffled.permutation(names):
            if name == "HashStore":
                store = hc.HashStore()
                with ThreadPoolExecutor(len(workers)) as pool:
                    threads = [pool.submit(pairs, store, me, size, seconds) for me in range(len(workers))]
                    rates[name].append(sum(thread.result() for thread in threads))
                continue
            for me, pipe in enumerate(workers):
                pipe.send((str(name), where, me, size, seconds))
            for word in ("opened", "done"):
                answers = [pipe.recv() for pipe in workers]
                if word == "opened":
                    for pipe in workers:
                        pipe.send("go")
            rates[name].append(sum(answers))
            if name == "FileStore":
                os.unlink(where["FileStore"])  # it only grows
    return [
        Row("set and get", size, name, clients=len(workers), per_second=float(np.median(rates[name]))) for name in names
    ]


# -- what is shown ---------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row], clients: int) -> str:
    """Return the results as text."""
    names = [name for name in CONTENDERS if any(row.contender == name for row in rows)]
    one = [row for row in rows if row.median_us is not None]
    many = [row for row in rows if row.per_second is not None]
    lines = _table("store: one client, the time of an operation; ratio: TCPStore / torch", names, "us", one)
    lines += ["", *_table(
        f"store: set and get by {clients} clients at once, operations of all of them; ratio: TCPStore / torch",
        names, "1/s", many,
    )]  # fmt: skip
    if "torch" not in names:
        lines.append("# torch: not installed (pip install torch)")
    elif any(not takes("torch", row.size_bytes) for row in rows):
        lines.append(f"# torch: its server takes values of at most {TORCH_LARGEST} bytes")
    return "\n".join(lines)


def _table(title: str, names: Sequence[str], unit: str, rows: Sequence[Row]) -> list[str]:
    columns = [("operation", "", 11), ("size", "bytes", 10), *((name, unit, 11) for name in names)]
    columns += [("ratio", "", 6)] * ("torch" in names)
    lines = [title, heads(columns)]
    for operation, size in dict.fromkeys((row.operation, row.size_bytes) for row in rows):
        found = {
            row.contender: row.per_second if row.median_us is None else row.median_us
            for row in rows
            if (row.operation, row.size_bytes) == (operation, size)
        }
        cells = [operation, str(size) if size else "-"]
        cells += [_shown(found.get(name), unit) for name in names]
        if "torch" in names:
            other = found.get("torch")
            cells.append(ratio(None if other is None else (found["TCPStore"] or 0) / other))
        lines.append(aligned(columns, cells))
    return lines


def _shown(value: float | None, unit: str) -> str:
    if unit == "us" or value is None:
        return microseconds(value)
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def documents(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows for the JSON."""
    return [asdict(row) for row in rows]
