"""The mailbox of a watchdog: a socket by which the ranks of its node, and ``hpccomm debug --pid``, reach it.

A signal would be the program's own at times, and would end a process that does not expect it. Only Linux has such
sockets; elsewhere, and between containers with networks of their own, each rank looks into the folder by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from pathlib import Path

LOOK, ASK = b"look", b"ask"
CREDENTIALS = struct.Struct("3i")  # process, (real) user, group: the kernel vouches for them
LONGEST = 1 << 13  # bytes of a datagram
MANY = 1000  # datagrams of other users in a second
CLOSED_FOR = 60.0  # seconds after so many


class Mailbox:
    """The mailbox of this process; closed until `open`."""

    def __init__(self) -> None:
        self.is_open = False  # nor while another user could keep the watchdog busy
        self.stranger: int | None = None  # a user whose datagrams have closed it
        self.was_woken = False  # whether `askers` has found a datagram since this was last reset
        self._socket: socket.socket | None = None
        self._second, self._strangers = 0.0, 0  # the datagrams of other users since then

    def open(self) -> None:
        """Let others reach it, where the system has such sockets."""
        with contextlib.suppress(OSError, AttributeError):
            self._socket = _bound(_address(os.getpid()))
            self._socket.setblocking(False)
            self.is_open = True

    def fileno(self) -> int:
        """Return its file descriptor; -1 where there is none."""
        return -1 if self._socket is None else self._socket.fileno()

    def close(self) -> None:
        """Close the socket: nobody reaches it any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket, self.is_open = None, False

    def askers(self, now: float) -> list[bytes]:
        """Return the addresses of those that have asked for reports in the datagrams that have come.

        Those of other users are dropped; after many in a second it closes for a while.
        """
        found = []
        if now - self._second >= (1.0 if self.is_open else CLOSED_FOR):
            self._second, self._strangers, self.is_open = now, 0, self._socket is not None
        with contextlib.suppress(OSError):  # there is nothing more
            while self._socket is not None and self.is_open:
                datagram, _, user, sender = _received(self._socket)
                if user not in (os.getuid(), 0):
                    self._strangers += 1
                    if self._strangers >= MANY:
                        self.is_open, self.stranger = False, user
                    continue
                self.was_woken = True
                if datagram == ASK:
                    found.append(sender)
        return found

    def answer(self, asker: bytes, folder: Path, token: str) -> None:
        """Send the folder of the reports, and the token that answering reports carry."""
        self._send(json.dumps([os.fspath(folder), token]).encode(), asker)

    def wake(self, process: int) -> None:
        """Ask another process of this node to look into the folder."""
        self._send(LOOK, _address(process))

    def _send(self, datagram: bytes, address: bytes | str) -> None:
        with contextlib.suppress(OSError, AttributeError):  # the other has none, or is gone; there are no such sockets
            if self._socket is not None:
                self._socket.sendto(datagram, socket.MSG_DONTWAIT, address)
                return
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:  # in the first second of a program
                own.sendto(datagram, socket.MSG_DONTWAIT, address)


def ask(process: int, patience: float) -> tuple[Path, str] | None:
    """Have a process of this node ask all ranks of its job for reports; return their folder, and this question's token.

    None if it is no rank that could; TimeoutError if it does not answer.
    """
    user = os.stat(f"/proc/{process}").st_uid
    with _bound("") as own:
        own.settimeout(patience)
        try:
            own.connect(_address(process))
            own.send(ASK)
        except ConnectionRefusedError:
            return None
        datagram, who, whose, _ = _received(own)
    if (who, whose) != (process, user):
        return None
    folder, token = json.loads(datagram)
    return Path(folder), str(token)


def _bound(address: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def _received(own: socket.socket) -> tuple[bytes, int, int, bytes]:
    """Return a datagram, the process and the user that have sent it, and the address of the sender."""
    datagram, ancillary, _, sender = own.recvmsg(LONGEST, socket.CMSG_SPACE(CREDENTIALS.size))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            process, user, _ = CREDENTIALS.unpack(data[: CREDENTIALS.size])
            return datagram, process, user, sender
    return datagram, 0, -1, sender


def _address(process: int) -> str:
    return f"\0hpccomm-{process}"
