"""The client side of a TCPStore: connections, each with one request at a time."""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import threading
import time

from ..errors import DistNetworkError, on_rank
from . import handshake, wire
from .handshake import REASONS, ROOM, Session, Verdict
from .table import Answer
from .wire import Status

CHUNK = 1 << 18  # bytes read at once
LONGEST_TRY = 10.0  # seconds for one attempt to connect and shake hands
SHORTEST_TRY = 1.0
LONGEST_PAUSE = 1.0  # seconds between two attempts
MOST_IDLE = 8
PASSING = {errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.EAGAIN}


class Connections:
    """The connections of one client; each request has its own, so threads do not wait for each other."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._where = host, port, key
        self._idle: list[Connection] = []
        self._most_idle = MOST_IDLE
        self._process = os.getpid()

    def open(self, patience: float) -> None:
        """Make the first connection; the master may take `patience` seconds to start."""
        self._idle.append(self._connected(time.monotonic() + patience, is_starting=True))

    def ask(self, request: bytes, limit: float, may_repeat: bool) -> tuple[int, Answer]:
        """Return the answer to a request (see Connection.ask) within `limit` seconds.

        If an idle connection turns out to be closed, a request that `may_repeat` is sent again on a new one.
        """
        deadline = time.monotonic() + limit
        if self._process != os.getpid():  # after a fork: the connections are the parent's
            self._idle, self._process = [], os.getpid()
        connection = self._taken()
        may_repeat &= connection is not None
        connection = connection or self._connected(deadline)
        try:
            answer = connection.ask(request, deadline, limit)
        except BaseException as error:
            connection.close()  # part of an answer may be unread
            if not may_repeat or not _is_cut(error.__cause__):
                raise
            self._idle = []  # the other idle connections are probably closed too
            try:
                connection = self._connected(deadline)
            except DistNetworkError:
                raise error from None
            answer = connection.ask(request, deadline, limit)
        self._idle.append(connection)
        if len(self._idle) > self._most_idle:
            self._idle.pop().close()
        return answer

    def close(self) -> None:
        """Close the idle connections now, and the others after their answers."""
        self._most_idle = 0
        while self._idle:
            self._idle.pop().close()

    def _taken(self) -> Connection | None:
        """Return an idle connection that seems to be open, or None."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.is_open():
                return connection
            connection.close()

    def _connected(self, deadline: float, is_starting: bool = False) -> Connection:
        """Return a new connection; retry after temporary failures until `deadline`."""
        pause = 0.01
        while True:
            try:
                return Connection(*self._where, deadline)
            except DistNetworkError as error:
                if not _may_pass(error.__cause__, is_starting) or time.monotonic() > deadline:
                    raise
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, LONGEST_PAUSE)


class Connection:
    """A connection, made before `deadline`, to a master that has proved that it has the key."""

    def __init__(self, host: str, port: int, key: bytes, deadline: float) -> None:
        self._name = f"the store at {host}" + (f", port {port}" if port else "")
        self._buffer = bytearray()
        self._input = memoryview(bytearray(CHUNK))  # allocated once: it takes longer than reading a small answer
        now = time.monotonic()
        deadline = min(max(deadline, now + SHORTEST_TRY), now + LONGEST_TRY)
        try:
            self._socket = _connected(host, port, deadline - now)
        except (OSError, UnicodeError) as error:
            ended = "; has the process that holds it ended?" if isinstance(error, ConnectionRefusedError) else ""
            raise DistNetworkError(f"{self._name} can't be reached: {error}{ended}{on_rank()}") from error
        try:
            self._shake_hands(key, deadline)
        except BaseException:
            self._socket.close()
            raise

    def ask(self, request: bytes, deadline: float, limit: float) -> tuple[int, Answer]:
        """Return the status and the answer of a request by `deadline`, which is `limit` seconds after the call."""
        try:
            self._socket.settimeout(_left(deadline))
            self._socket.sendall(self._session.signed(request))
            head = self._take(wire.HEADER.size, deadline)
            header = wire.header(head)
            body = self._take(header.length, deadline)
            tag = self._take(self._session.size, deadline)
            if not self._session.is_next(head, body, tag):
                raise wire.MalformedError("a message that is not the store's; somebody is in between")
            answer = Answer(tuple(wire.fields(header, body)), header.number)
        except (OSError, wire.MalformedError) as error:
            raise self._explained(error, f"has not answered within {limit:g} s") from error
        if header.code == Status.MALFORMED:
            raise DistNetworkError(f"{self._name} refuses a message: {str(answer.values[0], 'utf-8')}{on_rank()}")
        return header.code, answer

    def is_open(self) -> bool:
        """Return True unless the connection was closed while idle."""
        self._socket.settimeout(0)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _shake_hands(self, key: bytes, deadline: float) -> None:
        client = secrets.token_bytes(handshake.NONCE)
        try:
            self._socket.sendall(handshake.MAGIC + client)
            self._welcomed(deadline)
            server = bytes(self._take(handshake.NONCE, deadline))
            self._socket.sendall(handshake.proof(key, "client", client, server))
            self._welcomed(deadline)
            proof = self._take(handshake.PROOF, deadline)
        except OSError as error:
            raise self._explained(error, "is no store of hpccomm, or is too busy: it does not answer") from error
        if not hmac.compare_digest(proof, handshake.proof(key, "server", client, server)):
            raise DistNetworkError(f"{self._name} has another key (auth_key) than this process{on_rank()}")
        self._session = Session(self._socket, key, True, client, server)

    def _welcomed(self, deadline: float) -> None:
        verdict = self._take(1, deadline)[0]
        if verdict != Verdict.WELCOME:
            reason = REASONS.get(verdict, "it is no store of hpccomm")
            if verdict == Verdict.NO_ROOM:
                reason = reason.format(*ROOM.unpack(self._take(ROOM.size, deadline)))
            raise DistNetworkError(f"{self._name} has refused this process: {reason}{on_rank()}")

    def _take(self, wanted: int, deadline: float) -> bytearray:
        """Return the next `wanted` bytes."""
        while len(self._buffer) < wanted:
            nbytes = self._socket.recv_into(self._input)
            if not nbytes:
                raise ConnectionResetError("it has closed the connection")
            self._buffer += self._input[:nbytes]
            if len(self._buffer) < wanted:  # bytes that trickle in do not extend the deadline
                self._socket.settimeout(_left(deadline))
        taken, self._buffer = wire.split(self._buffer, wanted)
        return taken

    def _explained(self, error: Exception, silence: str) -> DistNetworkError:
        if isinstance(error, TimeoutError):
            return DistNetworkError(f"{self._name} {silence}{on_rank()}")
        return DistNetworkError(f"{self._name} is gone: {error}; has the process that holds it ended?{on_rank()}")


def _connected(host: str, port: int, limit: float) -> socket.socket:
    if not host.startswith("@"):
        connection = socket.create_connection((host, port), limit)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake.keep_alive(connection)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(limit)
        connection.connect("\0" + host[1:])
        if not handshake.is_own_user(connection):
            raise PermissionError("it belongs to another user")
    except BaseException:
        connection.close()
        raise
    return connection


def _left(deadline: float) -> float:
    """Return the seconds until `deadline`; raise TimeoutError if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return min(left, threading.TIMEOUT_MAX)  # a socket takes no more


def _is_cut(error: BaseException | None) -> bool:
    return isinstance(error, ConnectionError) or getattr(error, "errno", None) == errno.ETIMEDOUT


def _may_pass(error: BaseException | None, is_starting: bool) -> bool:
    """Return True for a temporary error: the network, name resolution, a busy master, or one that is starting."""
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    if isinstance(error, ConnectionRefusedError):
        return is_starting
    return isinstance(error, (ConnectionError, TimeoutError)) or getattr(error, "errno", None) in PASSING
