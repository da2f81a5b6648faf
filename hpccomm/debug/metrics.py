"""Operations for monitoring systems: a text file of each node for Prometheus, and spans for OpenTelemetry."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib
import json
import os
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.hooks import Operation, RemovableHandle
from ..errors import on_rank
from ..process.settings import folder_at_start, job_id
from ..process.stderr import tell
from .hooks import register_hook

INTERVAL = 15.0  # seconds between two files
COUNTERS = {"operations": "completed operations", "bytes": "bytes of all arrays", "seconds": "time in operations"}
LABELS = ("run", "group", "operation")


def write_metrics(folder: str | os.PathLike[str], interval: float = INTERVAL) -> RemovableHandle:
    """Write the number, bytes and seconds of the operations, by group and name, to a file for Prometheus.

    Each node has one file, ``hpccomm-<job>-<node>.prom``, with the sums of its ranks. It is replaced at each interval
    and at the end of the program, and stays. Every rank calls this function; it needs the package prometheus_client.

    Parameters
    ----------
    folder : str or path
        An existing folder: the ``--collector.textfile.directory`` of the node's node_exporter.
    interval : float
        Seconds between two files.

    Returns
    -------
    RemovableHandle
        Its ``remove()``, or the end of a ``with`` block, writes the file once more and ends this.

    Raises
    ------
    ImportError
        prometheus_client is not installed.
    NotADirectoryError
        There is no such folder.

    Examples
    --------
    >>> import hpccomm.debug, pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> with hpccomm.debug.write_metrics(folder):
    ...     hc.all_reduce(np.ones(4))
    >>> (file,) = folder.glob("*.prom")
    >>> [line.split()[-1] for line in file.read_text().splitlines() if line.startswith("hpccomm_bytes_total")]
    ['32.0']
    """
    if not Path(folder).is_dir():
        raise NotADirectoryError(f"write_metrics: folder is {os.fspath(folder)!r}; expected an existing folder")
    metrics = _Metrics(_package("prometheus_client", "write_metrics"), Path(folder).absolute(), interval)
    handle = register_hook(metrics)

    def remove() -> None:
        handle.remove()
        metrics.stop()

    return RemovableHandle(remove)


class _Metrics:
    """The hook that counts, and the thread that writes; ranks of a node share a file of their sums."""

    def __init__(self, client: Any, folder: Path, interval: float) -> None:
        self._client, self._folder, self._interval = client, folder, interval
        self._key = secrets.token_hex(8)  # of this process in the shared file
        self._totals: dict[tuple[str, str], list[float]] = {}
        self._changing, self._has_stopped = threading.Lock(), threading.Event()
        atexit.register(self._end)
        threading.Thread(target=self._run, name="hpccomm-metrics", daemon=True).start()

    def begin(self, operation: Operation) -> None:
        pass

    def end(self, operation: Operation) -> None:
        if operation.error is None:
            with self._changing:
                totals = self._totals.setdefault((operation.group.name, operation.name), [0, 0, 0.0])
                for place, more in enumerate((1, operation.nbytes, operation.duration or 0.0)):
                    totals[place] += more

    def stop(self) -> None:
        """Write the file for the last time."""
        self._has_stopped.set()
        atexit.unregister(self._end)
        self._end()

    def _end(self) -> None:
        try:
            self.write()
        except OSError as error:
            tell(f"hpccomm: metrics can't be written: {error}{on_rank()}")

    def _run(self) -> None:
        while not self._has_stopped.wait(self._interval):
            with contextlib.suppress(OSError):  # the disk may be full for a while
                self.write()

    def write(self) -> None:
        """Add this rank's totals to the node's, and write the file for Prometheus; nothing before the first one."""
        with self._changing:
            own = [[*key, *values] for key, values in self._totals.items()]
        if not own:
            return
        run = job_id() or Path(folder_at_start()).name
        name = f"hpccomm-{run}-{socket.gethostname()}"
        totals, flags = self._folder / f".{name}.json", os.O_CREAT | os.O_NOFOLLOW
        with open(os.open(f"{totals}.lock", flags | os.O_RDWR, 0o600), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                with open(os.open(totals, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as file:
                    of_node = json.load(file)
            except FileNotFoundError:
                of_node = {}
            of_node[self._key] = own
            with open(os.open(f"{totals}.new", flags | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                json.dump(of_node, file)
            os.replace(f"{totals}.new", totals)  # whole: the disk may be full
            registry = self._client.CollectorRegistry()
            registry.register(_Sums(self._client, run, [row for rows in of_node.values() for row in rows]))
            self._client.write_to_textfile(os.fspath(self._folder / f"{name}.prom"), registry)


class _Sums:
    """The sums of a node's ranks, as prometheus_client's Collector."""

    def __init__(self, client: Any, run: str, rows: list[Any]) -> None:
        self._client, self._run, self._rows = client, run, rows

    def collect(self) -> Iterator[Any]:
        """Yield the counters."""
        for place, (name, text) in enumerate(COUNTERS.items()):
            sums: Counter[tuple[str, str]] = Counter()
            for group, operation, *values in self._rows:
                sums[group, operation] += values[place]
            counter = self._client.metrics_core.CounterMetricFamily(f"hpccomm_{name}", text, labels=LABELS)
            for key, value in sums.items():
                counter.add_metric([self._run, *key], value)
            yield counter


# -- OpenTelemetry -----------------------------------------------------------------------------------------------


def opentelemetry_spans(tracer: Any = None) -> RemovableHandle:
    """Make a span of OpenTelemetry for every operation of this rank, in the trace that is current when it begins.

    A span ends when the operation's completion is noticed. It needs the package opentelemetry-api.

    Parameters
    ----------
    tracer : opentelemetry.trace.Tracer, optional
        Default: the tracer ``"hpccomm"`` of the program's tracer provider.

    Returns
    -------
    RemovableHandle

    Raises
    ------
    ImportError
        opentelemetry-api is not installed.

    Examples
    --------
    >>> import hpccomm.debug
    >>> with hpccomm.debug.opentelemetry_spans():
    ...     hc.all_reduce(np.ones(4))  # a span "all_reduce" with hpccomm.bytes 32
    >>> hc.GroupMember.WORLD.sequence_number
    1
    """
    trace = _package("opentelemetry.trace", "opentelemetry_spans")
    return register_hook(_Spans(trace.get_tracer("hpccomm") if tracer is None else tracer, trace.StatusCode.ERROR))


class _Spans:
    def __init__(self, tracer: Any, error: Any) -> None:
        self._tracer, self._error = tracer, error
        self._open: dict[Operation, Any] = {}

    def begin(self, operation: Operation) -> None:
        facts = {
            "group": operation.group.name,
            "number": operation.sequence_number,
            "rank": operation.rank,
            "device": operation.device,
            "bytes": operation.nbytes,
            "is_async": operation.async_op,
        }
        attributes = {"hpccomm." + name: fact for name, fact in facts.items()}
        self._open[operation] = self._tracer.start_span(operation.name, attributes=attributes)

    def end(self, operation: Operation) -> None:
        span = self._open.pop(operation)
        if operation.error is not None:
            span.record_exception(operation.error)
            span.set_status(self._error, str(operation.error))
        span.end()


def _package(module: str, function: str) -> Any:
    """Import an optional package; raise an ImportError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        what = module.partition(".")[0]
        raise ImportError(f"{function} needs the package {what}: pip install 'hpccomm[metrics]'") from None
