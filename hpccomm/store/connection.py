"""The client's side of a TCPStore: connections, and one question at a time on each."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import time
from collections.abc import Iterator

from ..errors import DistNetworkError, here
from . import handshake, wire
from .handshake import REASONS, Verdict
from .table import Answer
from .wire import Status

CHUNK = 1 << 18  # bytes taken at once
LONGEST_TRY = 10.0  # seconds: to connect once, and for the handshake
LONGEST_PAUSE = 1.0  # between two tries
MOST_IDLE = 8


class Connections:
    """The connections of one client: each question has one to itself, so threads do not wait for each other."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._where = host, port, key
        self._idle: list[Connection] = []
        self._process = os.getpid()

    def open(self, patience: float) -> None:
        """Make the first connection; for `patience` seconds the master may still be starting."""
        deadline, pause = time.monotonic() + patience, 0.01
        while True:
            try:
                self._idle.append(Connection(*self._where))
            except DistNetworkError as error:
                if not isinstance(error.__cause__, (ConnectionError, TimeoutError)) or time.monotonic() > deadline:
                    raise
            else:
                return
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, LONGEST_PAUSE)

    @contextlib.contextmanager
    def one(self) -> Iterator[Connection]:
        """Lend a connection; one that is left with an exception may be in the middle of an answer, and is closed."""
        if self._process != os.getpid():  # a fork: the connections are the parent's
            self._idle, self._process = [], os.getpid()
        connection = self._idle.pop() if self._idle else Connection(*self._where)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        if len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close those that nobody uses."""
        while self._idle:
            self._idle.pop().close()


class Connection:
    """A connection to a master that has shown that it has the key."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._name = f"the store at {host}, port {port}"
        self._buffer = bytearray()
        try:
            self._socket = socket.create_connection((host, port), LONGEST_TRY)
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
        with self._explained(f"has not answered within {limit:g} s"):
            self._socket.settimeout(limit)
            self._socket.sendall(request)
            header = wire.header(self._take(wire.HEADER.size))
            answer = Answer(tuple(wire.fields(header, self._take(header.length))), header.number)
        if header.code == Status.MALFORMED:
            raise DistNetworkError(f"{self._name} refuses a message: {str(answer.values[0], 'utf-8')}{here()}")
        return header.code, answer

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _shake_hands(self, key: bytes) -> None:
        client = secrets.token_bytes(handshake.NONCE)
        with self._explained("is no store of hpccomm, or is too busy: it does not answer"):
            self._socket.sendall(handshake.MAGIC + client)
            self._welcomed(self._take(1))
            server = self._take(handshake.NONCE)
            self._socket.sendall(handshake.proof(key, "client", client, server))
            self._welcomed(self._take(1))
            proof = self._take(handshake.PROOF)
        if not hmac.compare_digest(proof, handshake.proof(key, "server", client, server)):
            raise DistNetworkError(f"{self._name} has another key (auth_key) than this process{here()}")

    def _welcomed(self, verdict: bytes) -> None:
        if verdict[0] != Verdict.WELCOME:
            reason = REASONS.get(verdict[0], "it is no store of hpccomm")
            raise DistNetworkError(f"{self._name} has refused this process: {reason}{here()}")

    def _take(self, wanted: int) -> bytes:
        """Return the next `wanted` bytes."""
        while len(self._buffer) < wanted:
            chunk = self._socket.recv(CHUNK)
            if not chunk:
                raise ConnectionResetError("it has closed the connection")
            self._buffer += chunk
        taken = bytes(memoryview(self._buffer)[:wanted])
        del self._buffer[:wanted]
        return taken

    @contextlib.contextmanager
    def _explained(self, silence: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise DistNetworkError(f"{self._name} {silence}{here()}") from error
        except (OSError, wire.MalformedError) as error:
            raise DistNetworkError(
                f"{self._name} is gone: {error}; has the process that holds it ended?{here()}"
            ) from error
