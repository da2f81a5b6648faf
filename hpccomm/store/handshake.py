"""How a client and a server of a TCPStore convince each other that they have the same key, without showing it.

The client sends its nonce; the server sends one of its own; each answers with the HMAC-SHA256 of both under the key,
the client first. Without the key neither proof can be made, and each holds for one connection only.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import IntEnum

from .wire import VERSION

MAGIC = b"hpccomm\0" + bytes([VERSION])
NONCE = 32  # bytes
HELLO = len(MAGIC) + NONCE
PROOF = hashlib.sha256().digest_size


class Verdict(IntEnum):
    """What the server says before its nonce, and before its proof."""

    WELCOME = 0
    NO_ROOM = 1
    OTHER_PROTOCOL = 2
    WRONG_KEY = 3


REASONS: dict[int, str] = {
    Verdict.NO_ROOM: "it has as many connections as it takes (at most its ulimit -n)",
    Verdict.OTHER_PROTOCOL: "it speaks another version of the protocol; use the same hpccomm everywhere",
    Verdict.WRONG_KEY: "this process has another key (auth_key)",
}


def proof(key: bytes, who: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return what only a holder of `key` can say in this conversation; `who` is "client" or "server"."""
    return hmac.digest(key, who.encode() + MAGIC + client_nonce + server_nonce, "sha256")
