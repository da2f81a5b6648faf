"""The server of a TCPStore: it holds the table and talks to all clients, in one thread.

Imported by the thread itself, when the first client comes: asyncio takes 30 ms to import.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..errors import DistStoreError
from . import handshake, wire
from .handshake import Verdict
from .table import LARGEST_VALUE, READS, Answer, QueueEmptyError, Request, Table
from .wire import Status

READ_AHEAD = 1 << 16  # bytes that are taken from a client beyond the message that is read
MIB = 1 << 20
Start = Callable[[asyncio.StreamReader, asyncio.StreamWriter], "asyncio.Task[None]"]


class Limits(NamedTuple):
    """What a server allows."""

    capacity: int = 4 << 30  # bytes of keys and values
    connections: int = 16384
    handshake: float = 10.0  # seconds that a client has to show that it has the key
    patience: float = 30.0  # seconds that it has for the rest of a message, and to take an answer; more for each MiB


class Server:
    """Serve a table to those who have the key.

    Each connection has one request at a time. So what a client can make the server hold is one message being read, one
    answer being sent, and a little read ahead; and before it has shown that it has the key, a few bytes.
    """

    def __init__(self, key: bytes, limits: Limits) -> None:
        self._key = key
        self._limits = limits
        self._table = Table(limits.capacity)
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}  # by key; in the order of arrival
        self._clients: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket, end: socket.socket) -> None:
        """Talk to everybody who connects to `listener`, until `end` can be read."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(end, ended.set)
        server = await loop.create_server(lambda: _Connection(self._start), sock=listener)
        await ended.wait()
        loop.remove_reader(end)
        server.close()
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    def _start(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> asyncio.Task[None]:
        client = asyncio.ensure_future(self._converse(reader, writer))
        self._clients.add(client)
        client.add_done_callback(self._clients.discard)
        return client

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Talk to one client until it goes, or does not keep to the protocol."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            try:
                with _within(self._limits.handshake, writer):
                    welcome = await self._shake_hands(reader, writer)
                while welcome:
                    header = wire.header(await reader.readexactly(wire.HEADER.size))
                    with _within(self._limits.patience + header.length / MIB, writer):
                        body = await reader.readexactly(header.length)
                    await self._say(writer, await self._answer(wire.request(header, body), header.seconds))
            except wire.MalformedError as error:
                await self._say(writer, wire.packed(Status.MALFORMED, values=[str(error).encode()]))
            finally:
                writer.close()

    async def _shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Say whether the client has the key; it is told."""
        hello = await reader.readexactly(handshake.HELLO)
        nonces = hello[len(handshake.MAGIC) :], secrets.token_bytes(handshake.NONCE)
        if not hello.startswith(handshake.MAGIC):
            verdict = Verdict.OTHER_PROTOCOL
        elif len(self._clients) > self._limits.connections:
            verdict = Verdict.NO_ROOM
        else:
            await self._say(writer, bytes([Verdict.WELCOME]) + nonces[1])
            proof = await reader.readexactly(handshake.PROOF)
            if hmac.compare_digest(proof, handshake.proof(self._key, "client", *nonces)):
                await self._say(writer, bytes([Verdict.WELCOME]) + handshake.proof(self._key, "server", *nonces))
                return True
            verdict = Verdict.WRONG_KEY
        await self._say(writer, bytes([verdict]))
        return False

    async def _say(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        if writer.transport.get_write_buffer_size():  # the client has not taken all of it yet
            with _within(self._limits.patience + len(data) / MIB, writer):
                await writer.drain()

    async def _answer(self, request: Request, seconds: float) -> bytes:
        """Do a request, and return the message that answers it."""
        try:
            answer = self._table.apply(request) or await self._wait(request, seconds)
        except asyncio.TimeoutError:
            return wire.packed(Status.TOO_LATE, values=[self._missing(request).encode()])
        except DistStoreError as error:
            code = Status.EMPTY if isinstance(error, QueueEmptyError) else Status.REFUSED
            return wire.packed(code, values=[str(error).encode()])
        if request.op not in READS:
            self._wake(request.keys)
        nbytes = sum(map(len, answer.values))
        if nbytes > LARGEST_VALUE:
            why = f"the answer would have {nbytes} bytes; ask for fewer keys at once"
            return wire.packed(Status.REFUSED, values=[why.encode()])
        return wire.packed(Status.OK, values=answer.values, number=answer.number)

    async def _wait(self, request: Request, seconds: float) -> Answer:
        """Do a request when what it waits for has come; TimeoutError after `seconds`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while (answer := self._table.apply(request)) is None:
            key = self._missing(request)
            has_come = loop.create_future()
            self._waiting.setdefault(key, {})[has_come] = None
            try:
                await asyncio.wait_for(has_come, deadline - loop.time())
            finally:
                waiting = self._waiting.get(key, {})
                waiting.pop(has_come, None)
                if not waiting:
                    self._waiting.pop(key, None)
        return answer

    def _wake(self, keys: Sequence[str]) -> None:
        for key in keys if self._waiting else ():
            for has_come in self._waiting.pop(key, ()):
                if not has_come.done():
                    has_come.set_result(None)

    def _missing(self, request: Request) -> str:
        return self._table.missing(request) or request.keys[0]


class _Connection(asyncio.StreamReaderProtocol):
    """A client's connection: when it is lost, what the client has asked for is given up."""

    def __init__(self, start: Start) -> None:
        self._input = asyncio.StreamReader(limit=READ_AHEAD)
        super().__init__(self._input)
        self._start = start

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to talk."""
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        writer = asyncio.StreamWriter(transport, self, self._input, asyncio.get_running_loop())
        self._conversation = self._start(self._input, writer)

    def eof_received(self) -> bool:
        """Close: a client that has gone waits for no answer."""
        super().eof_received()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Give up."""
        super().connection_lost(error)
        self._conversation.cancel()


@contextlib.contextmanager
def _within(seconds: float, writer: asyncio.StreamWriter) -> Iterator[None]:
    """Drop a client for whom this takes longer."""
    drop = asyncio.get_running_loop().call_later(seconds, writer.transport.abort)
    try:
        yield
    finally:
        drop.cancel()
