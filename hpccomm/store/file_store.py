"""FileStore: a store in a file that processes share.

The file is a log: unlike one file for each key, or SQLite, it needs nothing of the file system but flock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import DistStoreError, DistTimeoutError, on_rank
from . import wire
from .store import DEFAULT_TIMEOUT, Store, Timeout, too_late
from .table import HIDDEN, READS, Answer, Op, Request, Table

MAGIC = b"hpccomm store 2\n"
RECORD = struct.Struct("<III")  # length of the record's body, CRC-32 of this length, CRC-32 of the body
SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.05  # seconds between polls of the file
SHORTEST_TRY = 1.0  # seconds that every request tries to lock, even with a shorter timeout
CLOSED = HIDDEN + "closed"


class FileStore(Store):
    """A store in a file: a log of changes, which each process reads and extends under a lock.

    For processes of one user that share only a file system. The next record overwrites an incomplete one from a killed
    writer; every complete record stays.

    Parameters
    ----------
    path : str or os.PathLike
        The file; created if missing, with mode 600. A file that an earlier run left behind still has that run's
        keys: give each run a path of its own.
    world_size : int, optional
        The number of processes that use it: the last one to close it deletes the file. Default: no process does.
    timeout : timedelta or float (seconds), optional
        The time that operations wait for a key and for the file's lock. Default: 5 minutes.

    Raises
    ------
    DistStoreError
        The file can't be opened, is not a store, is damaged, or is accessible to other users.
    DistTimeoutError
        Another process holds the file's lock.

    Notes
    -----
    The lock is flock(2). On Linux it also works over NFS; Lustre must be mounted with ``-o flock``. The file only
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
        self.path = os.path.abspath(path)
        self.world_size = world_size
        self._table = Table()
        self._read = 0  # bytes of the file that are in the table
        self._thread_lock = threading.Lock()
        deadline = time.monotonic() + self._timeout
        while True:
            self._found = self._open(os.O_CREAT)
            with suppress(_GoneError), self._locked(fcntl.LOCK_EX, deadline):
                self._catch_up()
                return
            self._close_file()  # its last user has deleted it since `_open`

    @classmethod
    def replacing(cls, path: str) -> FileStore:
        """Return an empty store that replaces an earlier run's file; closing it deletes the file."""
        with suppress(_GoneError), cls(path) as old, old._locked(fcntl.LOCK_EX, time.monotonic() + old._timeout):
            os.unlink(old.path)
        return cls(path, world_size=1)

    def request(self, request: Request, timeout: float) -> Answer:
        """Return the answer to `request`, from the file."""
        deadline, pause = time.monotonic() + timeout, SHORTEST_PAUSE
        lock = fcntl.LOCK_SH if request.op in READS else fcntl.LOCK_EX
        while True:
            with self._locked(lock, deadline):
                answer = self._applied(request)
                missing = None if answer is not None else self._table.missing(request)
            if answer is not None:
                return answer
            left = deadline - time.monotonic()
            if left <= 0:
                raise too_late(request, timeout, missing or request.keys[0])
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)

    def clone(self) -> FileStore:
        """Return another store of the same file, which does not count in `world_size`."""
        with self._locked(fcntl.LOCK_SH, time.monotonic() + self._timeout):
            pass  # it is there: no other is made
        return FileStore(self.path, timeout=self.timeout)

    def close(self) -> None:
        """Close the file; the last of `world_size` processes deletes it."""
        if self.is_closed:
            return
        try:
            if self.world_size > 0:
                with suppress(_GoneError), self._locked(fcntl.LOCK_EX, time.monotonic() + self._timeout):
                    closed = self._applied(Request(Op.ADD, (CLOSED,), number=1))
                    if closed is not None and closed.number == self.world_size:
                        os.unlink(self.path)
        finally:
            with self._thread_lock:
                super().close()
                self._close_file()

    def __repr__(self) -> str:
        return f"FileStore({self.path!r})"

    def _error(self, text: str) -> DistStoreError:
        return DistStoreError(f"FileStore: {self.path!r} {text}{on_rank()}")

    def _open(self, create: int) -> os.stat_result:
        """Open the file and return its stat; it must be private to this user: others could read and forge values."""
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | create, 0o600)
        except OSError as error:
            why = "It is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise self._error(
                f"can't be opened: {why}; give a file in a folder that exists, and that all ranks share"
            ) from error
        self._close_file = weakref.finalize(self, os.close, self._file)
        found = os.fstat(self._file)
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
            self._close_file()
            raise self._error(
                f"is not a file for this user (uid {os.geteuid()}) only: it has uid {found.st_uid} and mode {mode:o}; "
                f"give another path, or `chmod 600` a file of your own"
            )
        self._process = os.getpid()
        return found

    @contextmanager
    def _locked(self, kind: int, deadline: float) -> Iterator[None]:
        """Hold the file's lock; raise _GoneError if `path` is now another file."""
        deadline = max(deadline, time.monotonic() + SHORTEST_TRY)
        if not self._thread_lock.acquire(timeout=min(deadline - time.monotonic(), threading.TIMEOUT_MAX)):
            raise self._late("thread of this process")
        try:
            if self._is_closed:
                raise DistStoreError(f"the store {self!r} has been closed{on_rank()}")
            if self._process != os.getpid():  # after a fork: parent and child would share the lock of this open file
                self._close_file()
                self._open(0)
            self._flock(kind, deadline)
            try:
                if not self._is_there():
                    raise _GoneError(str(self._error("has been deleted or replaced since this store was opened")))
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def _flock(self, kind: int, deadline: float) -> None:
        while True:
            try:
                return fcntl.flock(self._file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise self._late("process") from None
            except OSError as error:
                raise self._error(f"can't be locked: {error.strerror}; give a file on another file system") from error
            time.sleep(SHORTEST_PAUSE)

    def _late(self, who: str) -> DistTimeoutError:
        return DistTimeoutError(
            f"FileStore: another {who} has held the lock of {self.path!r} all the time; is it stopped? "
            f"`fuser -v {self.path}` names who has the file open{on_rank()}"
        )

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self._found, os.lstat(self.path))
        except OSError:
            return False

    def _applied(self, request: Request) -> Answer | None:
        """Return the answer to `request` and append it to the file; return None if it has to wait."""
        self._catch_up()
        answer = self._table.apply(request)
        if answer is not None and request.op not in READS:
            self._write(request)
        return answer

    def _catch_up(self) -> None:
        """Apply the records that other processes have appended."""
        size = os.fstat(self._file).st_size
        if self._read == 0:
            if size == 0:
                _write(self._file, MAGIC, 0)
                size = len(MAGIC)
            elif os.pread(self._file, len(MAGIC), 0) != MAGIC:
                raise self._error("is a file, but not a store; give another path")
            self._read = len(MAGIC)
        if size < self._read:
            raise self._damaged()
        data = _read(self._file, size - self._read, self._read)
        begin = 0
        while (record := self._record(data, begin)) is not None:
            try:
                self._table.apply(wire.request(wire.header(record[: wire.HEADER.size]), record[wire.HEADER.size :]))
            except wire.MalformedError as error:
                raise self._damaged() from error
            begin += RECORD.size + len(record)
            self._read += RECORD.size + len(record)

    def _record(self, data: bytes, begin: int) -> bytes | None:
        """Return the record at `begin`; None at the end of the log.

        The end may be an incomplete record (its writer was killed), or zeros (its node crashed after the file grew and
        before the data was written).
        """
        body = begin + RECORD.size
        if len(data) < body or (not any(data[begin:body]) and data.count(0, begin) == len(data) - begin):
            return None
        length, checksum_of_length, checksum = RECORD.unpack_from(data, begin)
        if zlib.crc32(data[begin : begin + 4]) != checksum_of_length:
            raise self._damaged()
        record = data[body : body + length]
        if len(record) < length:
            return None
        if zlib.crc32(record) != checksum:
            raise self._damaged()
        return record

    def _damaged(self) -> DistStoreError:
        return self._error(f"is damaged at byte {self._read}, and what follows is lost; give another path")

    def _write(self, request: Request) -> None:
        """Append the record of a request; only a complete record is valid."""
        data = wire.packed(request.op, request.keys, request.values, request.number)
        length = len(data).to_bytes(4, "little")
        record = RECORD.pack(len(data), zlib.crc32(length), zlib.crc32(data)) + data
        try:
            os.ftruncate(self._file, self._read)  # removes an incomplete record of a killed writer
            _write(self._file, record, self._read)
        except OSError as error:
            self._table, self._read = Table(), 0  # read the file again later, without this request
            raise self._error(f"can't be written: {error.strerror}") from error
        self._read += len(record)


class _GoneError(DistStoreError):
    """The file was deleted or replaced."""


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
