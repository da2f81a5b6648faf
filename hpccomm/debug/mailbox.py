"""A watchdog's mailbox: a socket through which ranks of its node, and ``hpccomm debug --pid``, reach it.

A signal could be one that the program uses, and would end a process that does not expect it. Only Linux has such
sockets. Elsewhere, and between containers with separate networks, each rank polls the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from pathlib import Path

LOOK, ASK, ASK_AND_COUNT = b"look", b"ask", b"ask and count"
CREDENTIALS = struct.Struct("3i")  # process, (real) user, group: verified by the kernel
LONGEST = 1 << 13  # bytes of the longest datagram
MANY = 1000  # datagrams of other users in a second, which close the mailbox
CLOSED_FOR = 60.0  # seconds for which they close it


class Mailbox:
    """The mailbox of this process; closed until `open`."""

    def __init__(self) -> None:
        self.is_open = False  # False while another user floods the mailbox
        self.stranger: int | None = None  # the user whose datagrams closed the mailbox
        self.counts = False  # True if the last asker wants the bytes of operations to be counted
        self.was_woken = False  # True if `askers` has received a datagram since the last reset
        self._socket: socket.socket | None = None
        self._second, self._strangers = 0.0, 0  # other users' datagrams since `_second`

    def open(self) -> None:
        """Open the socket if the system has such sockets."""
        with contextlib.suppress(OSError, AttributeError):
            self._socket = _bound(_address(os.getpid()))
            self._socket.setblocking(False)
            self.is_open = True

    def fileno(self) -> int:
        """Return the socket's file descriptor; -1 without a socket."""
        return -1 if self._socket is None else self._socket.fileno()

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket, self.is_open = None, False

    def askers(self, now: float) -> list[bytes]:
        """Receive pending datagrams; return the addresses of those that ask for reports.

        Other users' datagrams are dropped; many in a second close the mailbox for a while.
        """
        found = []
        if now - self._second >= (1.0 if self.is_open else CLOSED_FOR):
            self._second, self._strangers, self.is_open = now, 0, self._socket is not None
        with contextlib.suppress(OSError):  # no more datagrams
            while self._socket is not None and self.is_open:
                datagram, _, user, sender = _received(self._socket)
                if user not in (os.getuid(), 0):
                    self._strangers += 1
                    if self._strangers >= MANY:
                        self.is_open, self.stranger = False, user
                    continue
                self.was_woken = True
                if datagram in (ASK, ASK_AND_COUNT):
                    found.append(sender)
                    self.counts = datagram == ASK_AND_COUNT
        return found

    def answer(self, asker: bytes, folder: Path, token: str) -> None:
        """Send the folder of the reports, and the token that answering reports carry."""
        self._send(json.dumps([os.fspath(folder), token]).encode(), asker)

    def wake(self, process: int) -> None:
        """Make another process of this node look into the folder."""
        self._send(LOOK, _address(process))

    def _send(self, datagram: bytes, address: bytes | str) -> None:
        with contextlib.suppress(OSError, AttributeError):  # no mailbox, no process, or no such sockets
            if self._socket is not None:
                self._socket.sendto(datagram, socket.MSG_DONTWAIT, address)
                return
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:  # in a program's first second
                own.sendto(datagram, socket.MSG_DONTWAIT, address)


def ask(process: int, patience: float, counts: bool = False) -> tuple[Path, str] | None:
    """Make a process of this node ask all ranks of its job for reports; return their folder and the question's token.

    With `counts`, the ranks count the bytes of their operations for a while.
    Return None if the process has no mailbox; raise TimeoutError if it does not answer.
    """
    user = os.stat(f"/proc/{process}").st_uid
    with _bound("") as own:
        own.settimeout(patience)
        try:
            own.connect(_address(process))
            own.send(ASK_AND_COUNT if counts else ASK)
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
    """Return a datagram, its sender's process and user, and its sender's address."""
    datagram, ancillary, _, sender = own.recvmsg(LONGEST, socket.CMSG_SPACE(CREDENTIALS.size))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            process, user, _ = CREDENTIALS.unpack(data[: CREDENTIALS.size])
            return datagram, process, user, sender
    return datagram, 0, -1, sender


def _address(process: int) -> str:
    return f"\0hpccomm-{process}"
