"""TCPStore: a store in one process, which other processes reach over the network."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ..core.checks import integer
from ..errors import DistStoreError, DistTimeoutError, on_rank
from . import wire
from .store import DEFAULT_TIMEOUT, Store, Timeout, too_late
from .table import HIDDEN, READS, WAITS, Answer, Op, QueueEmptyError, Request
from .wire import Status

if TYPE_CHECKING:  # these imports take time, and most programs have no TCPStore
    from .connection import Connections
    from .master import Master

GRACE = 5.0  # seconds that an answer may take, besides the request's own wait
WORKERS, ALL_THERE = HIDDEN + "workers", HIDDEN + "all there"


class TCPStore(Store):
    """A store in the memory of one process, the master; other processes reach it by TCP.

    Parameters
    ----------
    host : str
        Name or address of the master's host. The master listens only at this address.
    port : int
        0 on the master lets the system choose; see the attribute `port`.
    world_size : int, optional
        The number of processes that use the store, including the master.
    is_master : bool, optional
        Whether this process holds the store.
    timeout : timedelta or float (seconds), optional
        The time that operations wait, and that this process tries to reach the master. Default: 5 minutes.
    wait_for_workers : bool, optional
        Whether the master waits here until `world_size` processes have connected.
    auth_key : bytes, optional
        16 bytes or more, the same in all processes: ``secrets.token_bytes(32)``. A process with another key can neither
        use the store nor pose as its master, and packets changed on the way are rejected. Default: no key; then the
        master listens on loopback only, and every user of its host may use the store.

    Attributes
    ----------
    host : str
    port : int
        The master's address.

    Raises
    ------
    ValueError
        `auth_key` is too short; or it is missing, and `host` is no loopback address.
    DistNetworkError
        The master can't be reached or can't listen, or has another key or another version of hpccomm.
    DistTimeoutError
        Some workers did not connect in time.

    Notes
    -----
    The master serves in a Python thread: a long call that holds the GIL delays every client. When the master's process
    ends, every operation raises DistNetworkError. The data is not encrypted.

    Examples
    --------
    >>> import secrets
    >>> key = secrets.token_bytes(32)
    >>> with hc.TCPStore("localhost", 0, is_master=True, auth_key=key) as master:
    ...     client = hc.TCPStore("localhost", master.port, auth_key=key)
    ...     client.set("colour", "red")
    ...     master.get("colour")
    b'red'
    """

    def __init__(
        self,
        host: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        auth_key: bytes | None = None,
    ) -> None:
        if not 0 <= integer("TCPStore: port", port) < 1 << 16 or not (port or is_master):
            raise ValueError(f"TCPStore: port is {port}; expected 1 to 65535, or on the master 0{on_rank()}")
        from .handshake import GOOD_KEY, checked
        from .master import Master, is_loopback, listen

        key = checked(auth_key)
        if is_master and not key and not is_loopback(host):
            raise ValueError(
                f"TCPStore: without auth_key everybody who reaches {host} could read and change the store; give "
                f"auth_key={GOOD_KEY}, or listen at localhost{on_rank()}"
            )
        master = Master(listen(host, port), key) if is_master else None
        self._set_up(host, master.port if master else port, key, timeout, master)
        try:
            self._connections.open(self._timeout)
            self._join(world_size, wait_for_workers)
        except BaseException:
            self.close()
            raise

    @classmethod
    def at(cls, host: str, port: int, key: bytes, timeout: Timeout = DEFAULT_TIMEOUT) -> TCPStore:
        """Return a client of a running master; it connects on its first request."""
        store = cls.__new__(cls)
        store._set_up(host, port, key, timeout, None)
        return store

    def _set_up(self, host: str, port: int, key: bytes, timeout: Timeout, master: Master | None) -> None:
        from .connection import Connections

        super().__init__(timeout)
        self.host, self.port, self._key, self._is_master = host, port, key, master is not None
        self._connections = Connections(host, port, key)
        self._close = weakref.finalize(self, _close, self._connections, master)

    def request(self, request: Request, timeout: float) -> Answer:
        """Return the master's answer to `request`."""
        data = wire.packed(request.op, request.keys, request.values, request.number, timeout)
        limit = (timeout if request.op in WAITS else self._timeout) + GRACE
        code, answer = self._connections.ask(data, limit, request.op in READS)
        if code == Status.OK:
            return answer
        text = str(answer.values[0], "utf-8")
        if code == Status.TOO_LATE:
            raise too_late(request, timeout, text)
        raise (QueueEmptyError if code == Status.EMPTY else DistStoreError)(text + on_rank())

    def clone(self) -> TCPStore:
        """Return a client with its own connections."""
        return TCPStore.at(self.host, self.port, self._key, self.timeout)

    def close(self) -> None:
        """Close the connections; on the master, close the store for all processes."""
        super().close()
        self._close()

    def __repr__(self) -> str:
        return f"TCPStore({self.host!r}, {self.port})"

    def _join(self, world_size: int | None, wait_for_workers: bool) -> None:
        """Count this process; on the master, wait for all processes."""
        if world_size is None or world_size < 0:
            return
        if self.request(Request(Op.ADD, (WORKERS,), number=1), self._timeout).number == world_size:
            self.request(Request(Op.SET, (ALL_THERE,), (b"",)), self._timeout)
        if self._is_master and wait_for_workers:
            try:
                self.request(Request(Op.WAIT, (ALL_THERE,)), self._timeout)
            except DistTimeoutError:
                here_now = self.request(Request(Op.ADD, (WORKERS,)), self._timeout).number
                raise DistTimeoutError(
                    f"TCPStore: {here_now} of {world_size} processes have come within {self._timeout:g} s{on_rank()}"
                ) from None


def _close(connections: Connections, master: Master | None) -> None:
    connections.close()
    if master is not None:
        master.close()
