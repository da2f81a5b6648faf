"""The client's side of a TCPStore: connections, and one question at a time on each."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time

from ..errors import DistNetworkError, here
from . import handshake, wire
from .handshake import REASONS, Verdict
from .table import Answer
from .wire import Status

CHUNK = 1 << 18  # bytes taken at once
LONGEST_TRY = 10.0  # seconds: to connect once, and for each step of the handshake
SHORTEST_TRY = 1.0
LONGEST_PAUSE = 1.0  # between two tries
MOST_IDLE = 8


class Connections:
    """The connections of one client: each question has one to itself, so threads do not wait for each other."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._where = host, port, key
        self._idle: list[Connection] = []
        self._room = MOST_IDLE
        self._process = os.getpid()

    def open(self, patience: float) -> None:
        """Make the first connection; for `patience` seconds the master may still be starting."""
        deadline, pause = time.monotonic() + patience, 0.01
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                self._idle.append(Connection(*self._where, max(left, SHORTEST_TRY)))
            except DistNetworkError as error:
                if not isinstance(error.__cause__, (ConnectionError, TimeoutError)) or time.monotonic() > deadline:
                    raise
            else:
                return
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, LONGEST_PAUSE)

    def ask(self, request: bytes, limit: float) -> tuple[int, Answer]:
        """Send a request on one of them; see Connection.ask."""
        if self._process != os.getpid():  # a fork: the connections are the parent's
            self._idle, self._process = [], os.getpid()
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = Connection(*self._where, limit)
        try:
            answer = connection.ask(request, limit)
        except BaseException:
            connection.close()  # it may be in the middle of an answer
            raise
        self._idle.append(connection)
        if len(self._idle) > self._room:
            self._idle.pop().close()
        return answer

    def close(self) -> None:
        """Close those that nobody uses now, and the others later."""
        self._room = 0
        while self._idle:
            self._idle.pop().close()


class Connection:
    """A connection to a master that has shown that it has the key; it may take `limit` seconds to make."""

    def __init__(self, host: str, port: int, key: bytes, limit: float) -> None:
        self._name = f"the store at {host}, port {port}"
        self._buffer = bytearray()
        self._input = memoryview(bytearray(CHUNK))  # made once: making it takes longer than a small answer
        limit = min(limit, LONGEST_TRY)
        try:
            self._socket = socket.create_connection((host, port), limit)
        except (OSError, UnicodeError) as error:
            raise DistNetworkError(f"{self._name} can't be reached: {error}{here()}") from error
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._shake_hands(key)
        except BaseException:
            self._socket.close()
            raise

    def ask(self, request: bytes, limit: float) -> tuple[int, Answer]:
        """Send a request; return the status and the answer, which may take `limit` seconds."""
        try:
            self._socket.settimeout(limit)
            self._socket.sendall(request)
            header = wire.header(self._take(wire.HEADER.size))
            answer = Answer(tuple(wire.fields(header, self._take(header.length))), header.number)
        except (OSError, wire.MalformedError) as error:
            raise self._explained(error, f"has not answered within {limit:g} s") from error
        if header.code == Status.MALFORMED:
            raise DistNetworkError(f"{self._name} refuses a message: {str(answer.values[0], 'utf-8')}{here()}")
        return header.code, answer

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _shake_hands(self, key: bytes) -> None:
        client = secrets.token_bytes(handshake.NONCE)
        try:
            self._socket.sendall(handshake.MAGIC + client)
            self._welcomed(self._take(1))
            server = bytes(self._take(handshake.NONCE))
            self._socket.sendall(handshake.proof(key, "client", client, server))
            self._welcomed(self._take(1))
            proof = self._take(handshake.PROOF)
        except OSError as error:
            raise self._explained(error, "is no store of hpccomm, or is too busy: it does not answer") from error
        if not hmac.compare_digest(proof, handshake.proof(key, "server", client, server)):
            raise DistNetworkError(f"{self._name} has another key (auth_key) than this process{here()}")

    def _welcomed(self, verdict: bytearray) -> None:
        if verdict[0] != Verdict.WELCOME:
            reason = REASONS.get(verdict[0], "it is no store of hpccomm")
            raise DistNetworkError(f"{self._name} has refused this process: {reason}{here()}")

    def _take(self, wanted: int) -> bytearray:
        """Return the next `wanted` bytes."""
        while len(self._buffer) < wanted:
            nbytes = self._socket.recv_into(self._input)
            if not nbytes:
                raise ConnectionResetError("it has closed the connection")
            self._buffer += self._input[:nbytes]
        if len(self._buffer) == wanted:  # no copy: it may be large
            taken, self._buffer = self._buffer, bytearray()
        else:
            taken = self._buffer[:wanted]
            del self._buffer[:wanted]
        return taken

    def _explained(self, error: Exception, silence: str) -> DistNetworkError:
        if isinstance(error, TimeoutError):
            return DistNetworkError(f"{self._name} {silence}{here()}")
        return DistNetworkError(f"{self._name} is gone: {error}; has the process that holds it ended?{here()}")
