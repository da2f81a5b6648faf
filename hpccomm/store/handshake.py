"""The handshake of a TCPStore: client and server prove to each other that they have the same key, without sending it.

Client and server each send a nonce. Each proves itself with the HMAC-SHA256 of both nonces under the key, the client
first. A proof needs the key and is valid for one connection only. The same nonces give a key for each direction: every
later message has a tag, made with its direction's key and the message's number. So an attacker that relays the proofs
can neither send requests nor answer them.

On one node, the kernel names the user at the other end (SO_PEERCRED): other users are refused, no attacker can be in
between, and messages have no tags.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from enum import IntEnum

from ..errors import on_rank
from .wire import VERSION

MAGIC = b"hpccomm\0" + bytes([VERSION])
NONCE = 32  # bytes
HELLO = len(MAGIC) + NONCE
PROOF = hashlib.sha256().digest_size
TAG = 16
SHORTEST_KEY = 16
ROOM = struct.Struct("<I")  # the number of clients; follows NO_ROOM
Bytes = bytes | bytearray | memoryview
_PEER = struct.Struct("3i")  # SO_PEERCRED: process, user, group


class Verdict(IntEnum):
    """The server's byte before its nonce and before its proof."""

    WELCOME = 0
    NO_ROOM = 1
    OTHER_PROTOCOL = 2
    WRONG_KEY = 3


REASONS: dict[int, str] = {
    Verdict.NO_ROOM: "it has {} clients, as many as its process may have open files for; type `ulimit -n 16384` before "
    "the job is started (each rank that uses a store is a client)",
    Verdict.OTHER_PROTOCOL: "it speaks another version of the protocol; use the same hpccomm everywhere",
    Verdict.WRONG_KEY: "this process has another key (auth_key)",
}


def checked(auth_key: object) -> bytes:
    """Return a program's key, b"" for None; raise TypeError or ValueError if it is not bytes or too short."""
    if auth_key is None:
        return b""
    if not isinstance(auth_key, (bytes, bytearray, memoryview)):
        raise TypeError(f"TCPStore: auth_key is a {type(auth_key).__name__}; expected bytes: {GOOD_KEY}{on_rank()}")
    key = bytes(auth_key)
    if len(key) < SHORTEST_KEY:
        raise ValueError(
            f"TCPStore: auth_key has {len(key)} bytes; expected {SHORTEST_KEY} or more, {GOOD_KEY}; or None for no key"
            f"{on_rank()}"
        )
    return key


GOOD_KEY = "secrets.token_bytes(32), the same in all processes"


def proof(key: bytes, who: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return the proof of `who` ("client" or "server") for these nonces; only a holder of `key` can compute it.

    The key is hashed with its length, because HMAC treats keys that differ only in trailing NULs as equal.
    """
    derived = hashlib.sha256(b"hpccomm store key\0" + len(key).to_bytes(8, "little") + key).digest()
    return hmac.digest(derived, who.encode() + MAGIC + client_nonce + server_nonce, "sha256")


class Session:
    """The tags of one connection's messages, each made with the key of its direction and the message's number.

    Tags are empty without a key, and on one node.
    """

    def __init__(self, connection: socket.socket, key: bytes, is_client: bool, *nonces: bytes) -> None:
        self.size = TAG if key and not is_on_this_node(connection) else 0
        directions = [proof(key, f"messages of the {who}", *nonces) for who in ("client", "server")]
        self._out, self._in = directions if is_client else directions[::-1]
        self._sent = self._received = 0

    def signed(self, message: bytes) -> bytes:
        """Return this side's next message with its tag."""
        self._sent += 1
        return message + self._tag(self._out, self._sent, message) if self.size else message

    def is_next(self, head: Bytes, body: Bytes, tag: Bytes) -> bool:
        """Return True if this is the other side's next message."""
        self._received += 1
        return not self.size or hmac.compare_digest(tag, self._tag(self._in, self._received, head, body))

    def _tag(self, key: bytes, number: int, *parts: Bytes) -> bytes:
        tag = hmac.new(key, number.to_bytes(8, "little"), "sha256")
        for part in parts:
            tag.update(part)
        return tag.digest()[:TAG]


def is_on_this_node(connection: socket.socket) -> bool:
    """Return True for a Unix socket."""
    return connection.family == socket.AF_UNIX


def is_own_user(connection: socket.socket) -> bool:
    """Return True if the process at the other end of a Unix socket belongs to this user."""
    _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.geteuid())


def keep_alive(connection: socket.socket) -> None:
    """Make TCP probe an idle connection after a minute, and every 15 seconds after that."""
    if not is_on_this_node(connection):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):  # not every system has them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
