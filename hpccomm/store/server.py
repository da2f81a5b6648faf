"""The server of a TCPStore: the table, and the connections of all clients, in one thread.

The thread imports it when the first client connects: importing asyncio takes 30 ms.

A client is a protocol object: with coroutines on streams, every request took twice as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import resource
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import DistStoreError
from . import handshake, wire
from .handshake import ROOM, Session, Verdict
from .table import LARGEST_VALUE, MOST_FIELDS, READS, QueueEmptyError, Request, Table
from .wire import Status

CHUNK = 1 << 18  # bytes read at once
READ_AHEAD = 1 << 16  # bytes read from a client while it waits for an answer
MIB = 1 << 20
OTHER_FILES = 64  # open files left for the rest of the process
STRANGERS = 64  # clients that have not yet proved that they have the key
AT_ONCE = 16  # connections accepted in one turn of the event loop
SCARCE = 4 * AT_ONCE  # with fewer free files than this, they are counted in each turn
COUNT_AGAIN = 1.0  # seconds between counts otherwise: listing takes longer with more clients
PAUSE = 0.1  # seconds, after the system had no file for a connection


class Limits(NamedTuple):
    """The limits of a server."""

    capacity: int = 4 << 30  # bytes of keys and values
    connections: int = 16384  # or the process's limit of open files, if that is lower
    handshake: float = 10.0  # seconds that a client has to prove that it has the key
    patience: float = 30.0  # seconds to send the rest of a message or to receive an answer; more for each MiB


class Server:
    """The table, and the clients.

    The number of clients that have not proved that they have the key ("strangers") is limited: a new one replaces the
    oldest. A client with the key normally proves it before it is replaced; otherwise it tries again.

    Each connection has one request at a time. So the server buffers, for each client, one message being read, one
    answer being sent, and a little read ahead; for each stranger, a few bytes.
    """

    def __init__(self, key: bytes, limits: Limits) -> None:
        files = _allowed_files(limits.connections + OTHER_FILES + STRANGERS)
        self._files = limits.connections * 2 + OTHER_FILES if files == resource.RLIM_INFINITY else files
        self._strangers_room = max(1, min(STRANGERS, self._files // 16))
        self.room = min(limits.connections, self._files - OTHER_FILES - self._strangers_room)
        self.key = key
        self.limits = limits
        self.table = Table(limits.capacity)
        self.clients: set[Client] = set()
        self.strangers: dict[Client, None] = {}  # also in `clients`; the oldest first
        self.input = memoryview(bytearray(CHUNK))
        self._free = 0  # files that the process may still open, besides OTHER_FILES
        self._others = 0  # open files other than clients', at the last count
        self._counted = -COUNT_AGAIN  # the time of the last count
        self._accepting: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None  # until it accepts again
        self._has_complained = False
        self._waiting: dict[str, dict[Client, None]] = {}  # by key; in the order of arrival

    async def serve(self, listener: socket.socket, end: socket.socket) -> None:
        """Serve the clients that connect to `listener`, until `end` is readable."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self._complain(context.get("exception") or context["message"]))
        ended = asyncio.Event()
        loop.add_reader(end, ended.set)
        listener.setblocking(False)
        loop.add_reader(listener, self._accept, loop, listener)  # asyncio's own server accepts without limit, and logs
        await ended.wait()
        loop.remove_reader(end)
        loop.remove_reader(listener)
        if self._pause is not None:
            self._pause.cancel()
        listener.shutdown(socket.SHUT_RDWR)  # close() is not enough if a forked process has it too
        listener.close()
        while self.clients or self._accepting:
            for client in self.clients:
                client.end()
            await asyncio.sleep(0)

    def _accept(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        """Accept some of the pending connections."""
        self._free = self._files - OTHER_FILES - self._others - len(self.clients)
        if self._free < SCARCE or loop.time() - self._counted >= COUNT_AGAIN:
            self._counted = loop.time()
            self._count_files()
        for _ in range(AT_ONCE):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file or memory is left, in the process or in the system
                self._complain(error)
                loop.remove_reader(listener)
                self._pause = loop.call_later(PAUSE, loop.add_reader, listener, self._accept, loop, listener)
                return
            if handshake.is_on_this_node(connection) and not handshake.is_own_user(connection):
                connection.close()
                continue
            task = loop.create_task(loop.connect_accepted_socket(lambda: Client(self), connection))
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)

    def admit(self, client: Client) -> None:
        """Add a stranger; disconnect the oldest ones if there are too many."""
        while len(self.strangers) >= max(1, min(self._strangers_room, len(self.strangers) + self._free)):
            next(iter(self.strangers)).end()
        self.strangers[client] = None
        self.clients.add(client)

    def _count_files(self) -> None:
        try:
            used = len(os.listdir("/proc/self/fd"))
        except FileNotFoundError:  # only Linux has it
            used = len(self.clients)
        except OSError:  # listing needs a free file, too
            used = self._files
        self._others = used - len(self.clients)
        self._free = self._files - OTHER_FILES - used

    def is_full(self) -> bool:
        """Return True if the server can't take another client."""
        if self._free < -AT_ONCE:  # the last count may be out of date
            self._count_files()
        return len(self.clients) - len(self.strangers) >= self.room or self._free < -AT_ONCE

    def _complain(self, problem: object) -> None:
        """Log only the first problem: a client that causes problems could fill the disk."""
        if not self._has_complained:
            self._has_complained = True
            logging.getLogger("hpccomm").warning(
                "the server of a store has a problem, of which it says no more: %r", problem
            )

    def wait(self, client: Client, key: str) -> None:
        """Call `look_again` of `client` when `key` changes."""
        self._waiting.setdefault(key, {})[client] = None

    def give_up(self, client: Client, key: str) -> None:
        """Remove `client` from the clients that wait for `key`."""
        waiting = self._waiting.get(key, {})
        waiting.pop(client, None)
        if not waiting:
            self._waiting.pop(key, None)

    def wake(self, keys: Sequence[str]) -> None:
        """Call `look_again` of the clients that wait for one of `keys`."""
        for key in keys if self._waiting else ():
            for client in self._waiting.pop(key, ()):
                asyncio.get_running_loop().call_soon(client.look_again)


def _allowed_files(wanted: int) -> int:
    """Raise this process's limit of open files to `wanted` if possible; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= enough:
        return soft
    with contextlib.suppress(OSError, ValueError):  # a container may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
        return enough
    return soft


class Client(asyncio.BufferedProtocol):
    """One client: the connection, and the bytes received of its next message.

    `_next` is the next step of the protocol, called with `_wanted` bytes. It is None until the client has received its
    answer.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._next: Callable[[bytearray], None] | None = self._hello
        self._wanted = handshake.HELLO
        self._drop: asyncio.TimerHandle | None = None  # disconnects a slow client
        self._request: Request | None = None  # waits for a key
        self._missing = ""  # the key that `_request` waits for
        self._deadline: asyncio.TimerHandle | None = None

    # -- the connection -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._socket: socket.socket = transport.get_extra_info("socket")
        handshake.keep_alive(self._socket)
        self._server.admit(self)
        self._hurry(self._server.limits.handshake)

    def get_buffer(self, _: int) -> memoryview:
        """Return the buffer for the next bytes; all clients share it, since the bytes are copied immediately."""
        return self._server.input

    def buffer_updated(self, nbytes: int) -> None:
        """Continue the protocol with the new bytes."""
        self._buffer += self._server.input[:nbytes]
        self._go_on()

    def _go_on(self) -> None:
        try:
            while self._next is not None and len(self._buffer) >= self._wanted:
                data, self._buffer = wire.split(self._buffer, self._wanted)
                self._next(data)
        except wire.MalformedError as error:
            self._close(self._session.signed(wire.packed(Status.MALFORMED, values=[str(error).encode()])))
        if self._next is None:
            if len(self._buffer) > READ_AHEAD:
                self._transport.pause_reading()
        elif self._drop is None and (self._buffer or self._next != self._head):
            self._hurry(self._server.limits.patience + self._wanted / MIB)

    def eof_received(self) -> bool:
        """Close the connection: a client that has left waits for no answer."""
        self._close()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Remove the client and its request."""
        self._next = None
        self._take_time()
        self._stop_waiting()
        self._server.clients.discard(self)
        self._server.strangers.pop(self, None)

    def pause_writing(self) -> None:
        """Stop reading until the client has received its answer."""
        self._next = None
        self._hurry(self._server.limits.patience + self._transport.get_write_buffer_size() / MIB)

    def resume_writing(self) -> None:
        """Read the next message."""
        if not self._transport.is_closing():
            self._take_time()
            self._next, self._wanted = self._head, wire.HEADER.size
            self._listen()

    def end(self) -> None:
        """Close the connection at once, even if a forked process has it too."""
        self._server.strangers.pop(self, None)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._transport.abort()

    # -- the steps of the protocol ---------------------------------------------------------------------

    def _hello(self, hello: bytearray) -> None:
        if not hello.startswith(handshake.MAGIC):
            self._close(bytes([Verdict.OTHER_PROTOCOL]))
        elif self._server.is_full():
            self._close(bytes([Verdict.NO_ROOM]) + ROOM.pack(len(self._server.clients) - len(self._server.strangers)))
        else:
            self._nonces = bytes(hello[len(handshake.MAGIC) :]), secrets.token_bytes(handshake.NONCE)
            self._transport.write(bytes([Verdict.WELCOME]) + self._nonces[1])
            self._next, self._wanted = self._proof, handshake.PROOF

    def _proof(self, proof: bytearray) -> None:
        key = self._server.key
        if not hmac.compare_digest(proof, handshake.proof(key, "client", *self._nonces)):
            self._close(bytes([Verdict.WRONG_KEY]))
            return
        self._take_time()
        self._server.strangers.pop(self, None)
        self._session = Session(self._socket, key, False, *self._nonces)
        self._transport.write(bytes([Verdict.WELCOME]) + handshake.proof(key, "server", *self._nonces))
        self._next, self._wanted = self._head, wire.HEADER.size

    def _head(self, data: bytearray) -> None:
        self._take_time()
        self._header, self._header_bytes = wire.header(data), data
        self._next, self._wanted = self._body, self._header.length + self._session.size

    def _body(self, data: bytearray) -> None:
        self._take_time()
        self._next = None
        body = memoryview(data)[: self._header.length]
        if not self._session.is_next(self._header_bytes, body, data[self._header.length :]):
            raise wire.MalformedError("a message that is not the client's; somebody is in between")
        request = wire.request(self._header, body)
        if not self._answered(request):
            self._request = request
            self._wait(request)
            self._deadline = self._loop.call_later(self._header.seconds, self._too_late)

    # -- answers ---------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """Answer the waiting request if its key exists now."""
        request = self._request
        if request is None:
            return  # the request has ended since
        if self._answered(request):
            self._stop_waiting()
            self._listen()
        else:
            self._wait(request)

    def _answered(self, request: Request) -> bool:
        """Answer a request; return False if it has to wait."""
        try:
            answer = self._server.table.apply(request)
            if answer is None:
                return False
            if len(answer.values) > MOST_FIELDS or sum(map(len, answer.values)) > LARGEST_VALUE:
                raise DistStoreError(f"the answer has more than {LARGEST_VALUE} bytes; ask for fewer keys at once")
        except DistStoreError as error:
            code = Status.EMPTY if isinstance(error, QueueEmptyError) else Status.REFUSED
            self._answer(wire.packed(code, values=[str(error).encode()]))
            return True
        if request.op not in READS:
            self._server.wake(request.keys)
        self._answer(wire.packed(Status.OK, values=answer.values, number=answer.number))
        return True

    def _answer(self, data: bytes) -> None:
        self._next, self._wanted = self._head, wire.HEADER.size
        self._transport.write(self._session.signed(data))  # calls pause_writing if the client reads slowly

    def _too_late(self) -> None:
        missing = self._missing
        self._stop_waiting()
        self._answer(wire.packed(Status.TOO_LATE, values=[missing.encode()]))
        self._listen()

    def _wait(self, request: Request) -> None:
        self._missing = self._server.table.missing(request) or request.keys[0]
        self._server.wait(self, self._missing)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._server.give_up(self, self._missing)
            self._request = self._deadline = None

    # -- time, and the end -----------------------------------------------------------------------------

    def _listen(self) -> None:
        """Continue with the bytes that have arrived."""
        self._transport.resume_reading()
        self._go_on()

    def _hurry(self, seconds: float) -> None:
        """Disconnect the client after `seconds`."""
        self._take_time()
        self._drop = self._loop.call_later(seconds, self._transport.abort)

    def _take_time(self) -> None:
        """Cancel the timer of `_hurry`."""
        if self._drop is not None:
            self._drop.cancel()
            self._drop = None

    def _close(self, last_words: bytes = b"") -> None:
        self._next = None
        self._stop_waiting()
        self._transport.write(last_words)
        self._hurry(self._server.limits.patience)  # to receive them
        self._transport.close()
