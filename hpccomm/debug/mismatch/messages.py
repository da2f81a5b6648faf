"""Labels sent ahead of messages (``HPCCOMM_DEBUG=DETAIL``), which the receiver compares with its own call."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ...core.hooks import Operation
from ...core.observers import who_is_late
from ...core.operation_list import START
from ...core.registry import OBJECTS
from ...core.timeouts import as_seconds, pause, pauses
from ...errors import DistBackendError, DistTimeoutError
from ...job.tags import OBJECTS as OF_OBJECTS
from ..words import tag_in_words
from .wording import array_in_words, caller

if TYPE_CHECKING:
    from ...core.group import ProcessGroup

LABEL_BYTES = 1024  # the size of the receive buffer, larger than any label
PATIENCE = 5.0  # seconds to wait for a label after its message has arrived

Label = dict[str, Any]


@dataclass
class Expected:
    """A posted receive, and the label of its message."""

    call: str
    words: str
    where: str
    source: Any  # None until it is known
    tag: int
    label: Label = field(default_factory=dict)  # empty until it arrives
    request: MPI.Request | None = None
    buffer: bytearray = field(default_factory=lambda: bytearray(LABEL_BYTES))

    def has_come(self) -> bool:
        """Return whether the label has arrived."""
        if not self.label and self.request is not None and self.request.Test():
            self.label = json.loads(self.buffer.rstrip(b"\0"))
        return bool(self.label)


class MessageCheck:
    """The comparison of messages; labels travel on the check's communicator, with their messages' MPI tags.

    Objects have tags of their own (`OF_OBJECTS`), so a receive of an array never gets a label of objects.

    MPI matches messages of one source and tag in order (MPI-4.1 §3.5), so a receive for the label is posted with the
    receive for the message. A receive from any source has no such order: it gets the label once the sender is known.
    After an asynchronous receive from any rank, messages with its tag are no longer compared.
    """

    def __init__(self, group: ProcessGroup, comm: MPI.Intracomm) -> None:
        self._group, self._comm = group, comm
        self._lock = threading.Lock()
        self._sends: list[tuple[MPI.Request, bytes]] = []
        self._expected: dict[Operation, Expected] = {}
        self._seen: dict[tuple[int, int], Label] = {}  # by source and tag, of messages not yet received
        self._uncompared: set[int] = set()  # tags whose messages are not compared
        self.is_waiting = False

    def begin(self, operation: Operation) -> None:
        """Send a label ahead, or expect one; a blocking receive waits for it, and raises before it receives."""
        arguments = operation.arguments
        if "dst" in arguments:
            self._send_label(operation)
        if "src" not in arguments:
            return
        words = _in_words(arguments.get("output", arguments.get("array")))
        source, tag = arguments["src"], _tag(operation, "recv_tag" if "recv_tag" in arguments else "tag")
        is_blocking = not operation.async_op and not operation.name.endswith(START)
        if source is None and not (is_blocking and self._is_mpi(operation)):
            self._uncompared.add(tag)
        if tag in self._uncompared:
            while (label := self._comm.Improbe(MPI.ANY_SOURCE, tag)) is not None:
                label.Recv([bytearray(LABEL_BYTES), MPI.BYTE])
            return
        expected = self._expect(operation, words, source, tag)
        if not is_blocking or operation.name == "sendrecv":  # waiting here could block the other rank
            return
        self.is_waiting = True
        try:
            if source is None:
                expected = self._expect(operation, words, self._next_sender(operation, tag), tag)
            self._wait(expected, as_seconds(self._group.timeout))
        finally:
            self.is_waiting = False
            self._expected.pop(operation)
        if expected.label["words"] != words:
            self._discard(expected)
            raise DistBackendError(self._difference(expected))
        if source is None:  # another rank's message may arrive first
            self._seen[expected.source, tag] = expected.label
            self._expect(operation, words, None, tag)

    def end(self, operation: Operation) -> None:
        """Compare the label of a completed message."""
        with self._lock:
            expected = self._expected.pop(operation, None)
        if expected is None:
            return
        if expected.source is None:
            if operation.error is not None:
                self._uncompared.add(expected.tag)  # the message's sender is not known
                return
            sender = operation.outcome[1] if isinstance(operation.outcome, tuple) else operation.outcome
            expected = self._expect(operation, expected.words, sender, expected.tag)
            self._expected.pop(operation)
        elif operation.error is not None and not isinstance(operation.error, DistBackendError):  # no longer receiving
            self._cancel(expected)
            return
        self._wait(expected, PATIENCE)
        if expected.label["words"] == expected.words:
            return
        error = DistBackendError(self._difference(expected))
        error.__cause__ = operation.error
        if not operation.async_op:
            raise error
        operation.error = error

    def _expect(self, operation: Operation, words: str, source: int | None, tag: int) -> Expected:
        expected = Expected(_title(operation), words, caller(), source, tag)
        if source is not None:
            expected.label = self._seen.pop((source, tag), {})
            if not expected.label:
                expected.request = self._comm.Irecv([expected.buffer, MPI.BYTE], source, tag)
        with self._lock:
            self._expected[operation] = expected
        return expected

    # -- labels ----------------------------------------------------------------------------------

    def _send_label(self, operation: Operation) -> None:
        array = operation.arguments.get("array")
        label = {
            "words": _in_words(array),
            "call": _title(operation),
            "where": caller()[-80:],
            "nbytes": 0 if array is None else int(array.size) * array.dtype.itemsize,
            "mpi": self._is_mpi(operation),
        }
        data = json.dumps(label).encode()
        request = self._comm.Isend([data, MPI.BYTE], operation.arguments["dst"], _tag(operation, "tag"))
        with self._lock:
            self._sends = [each for each in self._sends if not each[0].Test()]
            self._sends.append((request, data))

    def _wait(self, expected: Expected, timeout: float) -> None:
        if not _poll(expected.has_come, timeout):
            self._cancel(expected)
            raise DistTimeoutError(
                f"{expected.call} of {self._group.name!r}: no message from rank "
                f"{self._group.ranks[expected.source]} with tag {_tag_in_words(expected.tag)} within {timeout:g} s; "
                f"rank {self._group.ranks[self._group.rank]} receives {expected.words} at {expected.where}"
                f"{self._other_message(expected.source)}{who_is_late()}"
            )

    def _next_sender(self, operation: Operation, tag: int) -> int:
        """Return the sender of a label that no posted receive takes; earlier receives have posted theirs."""
        for source, seen_tag in self._seen:
            if seen_tag == tag:
                return source
        status, timeout = MPI.Status(), as_seconds(self._group.timeout)
        if not _poll(lambda: self._comm.Iprobe(MPI.ANY_SOURCE, tag, status), timeout):
            raise DistTimeoutError(
                f"{_title(operation)} of {self._group.name!r}: no message from any rank with tag {_tag_in_words(tag)} "
                f"within {timeout:g} s at {caller()}{self._other_message(MPI.ANY_SOURCE)}"
            )
        return status.Get_source()

    def _cancel(self, expected: Expected) -> None:
        if expected.request is None or expected.has_come():
            return
        expected.request.Cancel()
        status = MPI.Status()
        expected.request.Wait(status)
        if not status.Is_cancelled():  # the label came without its message: later labels may not match
            self._uncompared.add(expected.tag)

    def _discard(self, expected: Expected) -> None:
        """Receive and discard a message that differs, so that its sender continues and no later receive takes it."""
        if expected.label["mpi"]:
            comm: Any = self._group.comm
            comm.Recv([bytearray(expected.label["nbytes"]), MPI.BYTE], expected.source, expected.tag)

    # -- words -----------------------------------------------------------------------------------

    def _difference(self, expected: Expected) -> str:
        ranks, label = self._group.ranks, expected.label
        return (
            f"{expected.call} of {self._group.name!r}: rank {ranks[expected.source]} sends {label['words']} by "
            f"{label['call']} at {label['where']}, rank {ranks[self._group.rank]} receives {expected.words} at "
            f"{expected.where} (tag {expected.tag})"
        )

    def _other_message(self, source: int) -> str:
        status = MPI.Status()
        if not self._comm.Iprobe(source, MPI.ANY_TAG, status) or (tag := status.Get_tag()) >= 2 * OF_OBJECTS:
            return ""
        sender = self._group.ranks[status.Get_source()]
        return f"; a message of rank {sender} with tag {_tag_in_words(tag)} is waiting"

    def _is_mpi(self, operation: Operation) -> bool:
        device = operation.device
        return device == OBJECTS or self._group.config.device_map.get(device) == "mpi"


def _title(operation: Operation) -> str:
    return f"{operation.name} #{operation.sequence_number}"


def _tag(operation: Operation, argument: str) -> int:
    tag: int = operation.arguments[argument]
    return tag + OF_OBJECTS if operation.device == OBJECTS else tag


def _tag_in_words(tag: int) -> str:
    return tag_in_words("send_object_list" if tag >= OF_OBJECTS else "send", tag % OF_OBJECTS)


def _in_words(array: Any) -> str:
    return "Python objects" if array is None else array_in_words(array)


def _poll(is_there: Callable[[], bool], timeout: float) -> bool:
    """Poll until `is_there` returns True or the time is up; return whether it did."""
    deadline, looks = time.monotonic() + timeout, pauses()
    while not is_there():
        if time.monotonic() > deadline:
            return False
        pause(next(looks))
    return True
