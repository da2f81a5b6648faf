"""The master side of a TCPStore: its listening socket, and the thread that serves."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import DistNetworkError, on_rank

if TYPE_CHECKING:
    from .server import Limits

BACKLOG = 4096
ONE_NODE = "127.0.0.1"
HOST_VARIABLE = "HPCCOMM_STORE_HOST"
DISCARD = 9  # the discard port; only used to look up a route


class Master:
    """The thread that serves a store on a listening socket; it sleeps until a client connects.

    ``close()`` ends the thread and all connections. They also end with the Master object and with the program.
    """

    def __init__(self, listener: socket.socket, key: bytes, limits: Limits | None = None) -> None:
        name = listener.getsockname()
        self.host: str
        self.port: int
        self.host, self.port = ("@" + name[1:].decode(), 0) if isinstance(name, bytes) else name[:2]
        end, ended = socket.socketpair()
        thread = threading.Thread(target=_serve, args=(listener, ended, key, limits), name="hpccomm-store", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, end, thread, os.getpid())


def _end(end: socket.socket, thread: threading.Thread, process: int) -> None:
    """End the thread and all connections; a forked process leaves its parent's open."""
    if process == os.getpid():
        with contextlib.suppress(OSError):  # the thread has ended
            end.shutdown(socket.SHUT_RDWR)  # close() is not enough if a forked process has it too
        thread.join()
    end.close()


def _serve(listener: socket.socket, ended: socket.socket, key: bytes, limits: Limits | None) -> None:
    with listener, ended:
        first = select.poll()
        first.register(listener, select.POLLIN)
        first.register(ended, select.POLLIN)
        if any(file == ended.fileno() for file, _ in first.poll()):
            return
        import asyncio  # takes 30 ms

        from .server import Limits, Server

        asyncio.run(Server(key, limits or Limits()).serve(listener, ended))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens only at `host`; raise DistNetworkError on failure."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        raise DistNetworkError(
            f"TCPStore: can't listen at {host}, port {port}: {error}; the master has to run on this host, and "
            f"port 0 chooses one that is free{on_rank()}"
        ) from error


def listen_on_this_node() -> socket.socket:
    """Return a listening Unix socket, for this user's processes.

    Its name is in the network namespace, like a port of 127.0.0.1, and not in the file system: it leaves no file
    behind. Other users can read the name in /proc/net/unix, but are refused (`handshake.is_own_user`).
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0hpccomm-{os.urandom(16).hex()}")
    listener.listen(BACKLOG)
    return listener


def is_loopback(host: str) -> bool:
    """Return True if `host` is reachable from this host only."""
    import ipaddress

    try:
        return ipaddress.ip_address(socket.getaddrinfo(host, DISCARD)[0][4][0]).is_loopback
    except (OSError, UnicodeError):
        return False


def serve(where: tuple[str, int] | None, peer: str | None) -> tuple[Master, tuple[str, int, bytes]]:
    """Start a new store; return its master, and the host, port and key for clients.

    Without `where` it listens at the address by which the host `peer` reaches this host. If `peer` is None too (all
    processes on one host), it listens at a Unix socket.
    """
    if where is None and peer is None and not os.environ.get(HOST_VARIABLE) and hasattr(socket, "SO_PEERCRED"):
        host, listener = "", listen_on_this_node()
    else:
        host, port = where or (address_for(peer), 0)
        if peer is not None and host not in (ONE_NODE, "::1", "localhost") and is_loopback(host):
            # many distributions map this host's name to loopback in /etc/hosts; other hosts can't use that address
            host = _route_to(peer)
        listener = listen(host, port)
    key = os.urandom(32)
    master = Master(listener, key)
    return master, (host or master.host, master.port, key)


def address_for(peer: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Return ``HPCCOMM_STORE_HOST``, or the address by which `peer` (None: only this host) reaches this host."""
    if said := environ.get(HOST_VARIABLE, "").strip():
        return said
    if peer is None or peer == socket.gethostname():
        return ONE_NODE
    return _route_to(peer)


def _route_to(peer: str) -> str:
    """Return this host's address on the route to `peer`."""
    for name in (peer, socket.gethostname()):
        try:
            family, kind, _, _, address = socket.getaddrinfo(name, DISCARD, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # on a datagram socket this looks up the route and sends nothing
                own: str = probe.getsockname()[0]
        except OSError:
            continue
        if not own.startswith("127.") and own != "::1":
            return own
    return socket.gethostname()
