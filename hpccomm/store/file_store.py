"""FileStore: a store in a file that processes share."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import DistStoreError, here
from . import wire
from .store import DEFAULT_TIMEOUT, Store, Timeout, too_late
from .table import HIDDEN, READS, Answer, Op, Request, Table

MAGIC = b"hpccomm store 1\n"
RECORD = struct.Struct("<II")  # bytes that follow, their CRC-32
SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks at the file
CLOSED = HIDDEN + "closed"


class FileStore(Store):
    """A store in a file: a log of what was changed, which each process reads and adds to under a lock.

    For processes that share a file system and nothing else. A process that is killed while it writes leaves half a
    record, which its checksum gives away and the next one overwrites; what was complete stays.

    Parameters
    ----------
    path : str or os.PathLike
        The file; it is made if it is not there. A file left by an earlier run has that run's keys: give each run a path
        of its own.
    world_size : int, optional
        How many processes use it: the last one to close it deletes the file. Default: nobody does.
    timeout : timedelta or float (seconds), optional
        How long operations wait. Default: 5 minutes.

    Raises
    ------
    DistStoreError
        The file can't be opened, or is no store.

    Notes
    -----
    The lock is flock(2). On Linux it also works over NFS; Lustre has to be mounted with ``-o flock``. The file only
    grows.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, hc.FileStore(f"{folder}/store") as store:
    ...     store.set("colour", "red")
    ...     store.clone().get("colour")
    b'red'
    """

    def __init__(self, path: str | os.PathLike[str], world_size: int = -1, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self.path = os.fspath(path)
        self.world_size = world_size
        self._table = Table()
        self._read = 0  # bytes of the file that the table knows
        self._thread_lock = threading.Lock()
        self._open()
        with self._locked(fcntl.LOCK_EX):
            self._catch_up()

    def request(self, request: Request, timeout: float) -> Answer:
        """Do `request` in the file."""
        deadline, pause = time.monotonic() + timeout, SHORTEST_PAUSE
        lock = fcntl.LOCK_SH if request.op in READS else fcntl.LOCK_EX
        while True:
            with self._locked(lock):
                if self.is_closed:
                    raise DistStoreError(f"the store {self!r} has been closed{here()}")
                self._catch_up()
                answer = self._table.apply(request)
                if answer is not None:
                    if lock == fcntl.LOCK_EX:
                        self._write(request)
                    return answer
                missing = self._table.missing(request)
            left = deadline - time.monotonic()
            if left <= 0:
                raise too_late(request, timeout, missing or request.keys[0])
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)

    def clone(self) -> FileStore:
        """Return another store of the same file, which is not counted in `world_size`."""
        return FileStore(self.path, timeout=self.timeout)

    def close(self) -> None:
        """Close the file; the last of `world_size` processes deletes it."""
        if self.is_closed:
            return
        if self.world_size > 0:
            closed = self.request(Request(Op.ADD, (CLOSED,), number=1), self._timeout).number
            if closed == self.world_size:
                os.unlink(self.path)
        with self._thread_lock:
            super().close()
            self._close_file()

    def __repr__(self) -> str:
        return f"FileStore({self.path!r})"

    def _open(self) -> None:
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DistStoreError(
                f"FileStore: {self.path!r} can't be opened: {error.strerror}; give a file in a folder that exists, "
                f"and that all ranks share{here()}"
            ) from error
        self._close_file = weakref.finalize(self, os.close, self._file)
        self._process = os.getpid()

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        with self._thread_lock:
            if self._is_closed:
                yield  # the request refuses
                return
            if self._process != os.getpid():  # a fork: its parent has the lock of this open file
                self._close_file()
                self._open()
            fcntl.flock(self._file, kind)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _catch_up(self) -> None:
        """Apply the records that others have added."""
        size = os.fstat(self._file).st_size
        if self._read == 0:
            if size >= len(MAGIC) and os.pread(self._file, len(MAGIC), 0) != MAGIC:
                raise DistStoreError(f"FileStore: {self.path!r} is a file, but not a store; give another path{here()}")
            if size < len(MAGIC):
                os.pwrite(self._file, MAGIC, 0)
            self._read = len(MAGIC)
        if size <= self._read:
            return
        data = _read(self._file, size - self._read, self._read)
        begin = 0
        while begin + RECORD.size <= len(data):
            length, checksum = RECORD.unpack_from(data, begin)
            end = begin + RECORD.size + length
            record = data[begin + RECORD.size : end]
            if end > len(data) or zlib.crc32(record) != checksum:
                break  # its writer was killed: the next record goes here
            self._table.apply(_request(record))
            begin = end
        self._read += begin

    def _write(self, request: Request) -> None:
        """Add a record of what has been done; it counts when it is complete."""
        data = wire.packed(request.op, request.keys, request.values, request.number)
        record = RECORD.pack(len(data), zlib.crc32(data)) + data
        try:
            os.ftruncate(self._file, self._read)  # what a killed writer has left
            _write(self._file, record, self._read)
        except OSError as error:
            self._table, self._read = Table(), 0  # without this request
            raise DistStoreError(f"FileStore: {self.path!r} can't be written: {error.strerror}{here()}") from error
        self._read += len(record)


def _request(record: bytes) -> Request:
    header = wire.header(record[: wire.HEADER.size])
    return wire.request(header, record[wire.HEADER.size :])


def _read(file: int, length: int, offset: int) -> bytes:
    parts = []
    while length > 0 and (part := os.pread(file, length, offset)):
        parts.append(part)
        length, offset = length - len(part), offset + len(part)
    return b"".join(parts)


def _write(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done
